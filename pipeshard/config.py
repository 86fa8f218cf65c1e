"""PipelineConfig: the arguments of PipelinePlugin, checked without processes or devices.

PipelineHints: a model's own values for some of these arguments.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from pipeshard.batch.batch import check_declared
from pipeshard.batch.criterion import Criterion
from pipeshard.errors import ConfigurationError
from pipeshard.options import (
    LEAST_SCALE,
    MOST_SCALE,
    POSITIVE,
    check_offload,
    check_plan,
    check_precision,
    check_replicas,
    is_number,
    is_offloaded,
    is_positive,
    is_time,
)
from pipeshard.schedule.given import Schedule, chunks_of, is_v, name_of, program_of
from pipeshard.schedule.passes import shorten_cooldown, split_backwards
from pipeshard.schedule.program import Program
from pipeshard.schedule.schedules import IN_A_V
from pipeshard.schedule.slices import SLICED, number_of_slices, sliced
from pipeshard.split.initialize import InitWeights
from pipeshard.split.materialize import refuse_compile_options
from pipeshard.split.partition import Cuts, is_profile
from pipeshard.split.policy import Policy
from pipeshard.split.route import Recompute

REDUCTIONS = ("token", "batch", "microbatch")
CUTS = "num_microbatches", "microbatch_size", "microbatch_tokens"
LEAST_OF_SLICE = 256  # the smallest number of positions per slice with num_slices="auto"
AUTO = "auto"  # search for a schedule
OF_ONE_RANK = ("dry_run_input", "timeout")  # arguments that may differ between ranks


@dataclass(frozen=True)
class PipelineHints:
    """The attribute `pipeline_hints` of a model: values for the plugin's arguments that the user did not set.

    `num_stages` is the number of stages that the model requires, or None. If `recompute` is True, units are recomputed:
    all units or, if `checkpointable` is set, only the units whose class names are in `checkpointable`.
    """

    num_stages: int | None = None
    partition: Cuts = "auto"
    recompute: bool = False
    criterion: Criterion | None = None
    checkpointable: Collection[str] | None = None

    @classmethod
    def of(cls, model: object) -> "PipelineHints":
        return getattr(model, "pipeline_hints", None) or cls()


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The arguments of PipelinePlugin. All except `dry_run_input` and `timeout` must be the same on every rank.

    Fields that depend on other settings are resolved: `num_model_chunks` is the number that the schedule uses,
    `num_microbatches` is 1 if pp_size=1 and no argument splits batches, and `verify` is False if PIPESHARD_VERIFY=0
    disables "auto".

    Args:
        pp_size: p, the number of ranks in a pipeline.
        num_microbatches: the number of microbatches into which each batch is split along its samples.
        microbatch_size: alternatively, the number of samples per microbatch.
        microbatch_tokens: alternatively, the maximum number of tokens per microbatch, including padding. Samples of
            similar length are grouped, and each microbatch is padded only to the length of its longest sample. All
            three arguments may be omitted with pp_size=1, and for a PipelineTrainer.
        schedule: "1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "v-half" or "v-min". With "zb-h1", "zbv", "v-half" and
            "v-min", stages compute the weight gradients of linear and embedding layers separately, when they would
            otherwise wait. Alternatively, pass a `pipeshard.schedule.Program`, or a function of (p, m, v) that returns
            a Program. pipeshard adds messages to this Program, and otherwise runs it unchanged. "auto" searches for the
            cuts, the number of chunks per rank and the order of all actions that minimize this model's step time within
            `memory_limit`. The search uses the costs of partition="auto" or "profile".
        memory_limit: the maximum memory per rank with schedule="auto", such as "80GB". It includes AdamW's states. The
            default is the most memory that any rank needs with "1f1b".
        num_slices: the number of slices into which each microbatch is split along its sequence during training. Slices
            reduce idle time for long sequences. "auto" uses the smallest power of two that nearly minimizes the step
            time, with at least 256 positions per slice. Requires a transformers decoder with a cache, and
            schedule="1f1b", "gpipe" or "zb-h1".
        num_model_chunks: v, the number of model chunks per rank: 2 (the default) or more for "interleaved", always 2
            for the V schedules ("zbv", "v-half", "v-min"), and 1 for all other schedule names. With a Program, a
            function or "auto", the schedule determines v.
        p2p: "broadcast", "isend", or a subclass of `pipeshard.P2P`.
        partition: how to choose the cuts:
            - "auto": by cost;
            - "uniform";
            - "parameters";
            - "type:REGEX": each stage gets the same number of units whose class matches;
            - "profile": by measured time ("profile:PATH" saves the times in a file);
            - "speed:1.0,0.6": by cost divided by each rank's relative speed;
            - a list with the number of unit calls of each of the p·v stages;
            - a list with the names of the modules to cut after.
        policy: a Policy class for this model. The default is the class registered for the model.
        init_weights: how to initialize meta tensors (built under `torch.device("meta")`, or under accelerate's
            `init_empty_weights`). True uses the architecture's `_init_weights`, and `reset_parameters()` of plain
            modules. Other values that a constructor assigns to meta tensors are lost. With False, you must load the
            values with `booster.load_model`. A function is called as `fn(module)` or `fn(module, name)` for every
            module that has its own meta parameters. The initial values depend only on rank 0's seed
            (`torch.manual_seed`) and on names, not on `pp_size`.
        dry_run_input: a batch for tracing the model, or a function `fn(size, device)` that creates a batch of `size`
            samples. The default is the first samples of the dataloader's dataset or, without a dataloader, dummy
            inputs.
        shared_weights: groups of parameter names, such as [("embed.weight", "head.weight")]. The parameters of each
            group are tied together before the model is cut. The tied parameter keeps the values of the group's first
            parameter.
        max_norm: clip the gradients of the whole model to this L2 norm in every `optimizer.step()`. 0 disables
            clipping.
        loss_reduction: "token" gives the loss of the whole batch, that is, the mean over the batch's valid labels.
            "batch" computes this mean for each replica's batch separately, and averages the replicas' losses, as
            DistributedDataParallel does. "microbatch" is the unweighted mean of the microbatches' losses.
        dp_size: the number of replicas. The default is the largest number that the world size allows.
        tp_size: the number of ranks that shard each stage, using the architecture's own `tp_plan` (transformers 5) or
            the plan of the model's policy.
        tp_plan: a custom plan, as a dict from names of modules and parameters (with * for numbers) to "colwise",
            "rowwise" or another style.
        ep_size: the number of ranks that shard the experts of each stage, using the architecture's own `ep_plan`. Not
            supported with tp_size > 1.
        ep_plan: a custom plan, as a dict from names of expert modules to "ep_dispatch_experts", and from names of their
            parameters to "grouped_gemm".
        zero_stage: 1 shards the optimizer state across the replicas, without splitting any parameter's state.
        fsdp: True shards the parameters, gradients and optimizer state of each held unit across the replicas, with
            torch's `fully_shard`. Parameters are gathered once per step.
        precision: "fp32" leaves the model in its own dtype. With "bf16" or "fp16", parameters are 16-bit, but gradients
            are accumulated and updates are applied in fp32. "fp16" scales the loss, and all ranks skip a step if a
            gradient overflowed.
        autocast: keep the parameters in fp32, and run forwards under torch.autocast with `precision`.
        initial_scale: the initial loss scale, with "fp16".
        compile: True, or a dict of torch.compile options, to compile each held unit separately. Units of the same class
            are compiled only once. Not supported with schedules that split the backward, schedule="auto", `num_slices`,
            `offload` of activations, or `deferred_batch_norm`.
        batch_dims: a dict from the path of a batch leaf to the leaf's batch dimension, or to None if every microbatch
            receives the unsplit leaf. Declare a leaf whose batch dimension is not the first dimension (time-major
            inputs). A batch with an undeclared, ambiguous leaf raises BatchError.
        recompute: the unit calls that keep only their inputs and run again in the backward pass: True (all calls), a
            fraction of each stage's calls, from 0 to 1 (repeated layers first), or a list of p·v fractions, one per
            stage.
        offload: "activations" keeps the activations of at most two microbatches on a rank's GPU, and copies all other
            activations to the host until their backward. "optimizer" keeps the optimizer's states and the master
            weights on the host. Gradients are copied to the host for the optimizer's step, which runs on the CPU, and
            the updated values are copied back. "both" combines the two. On a CPU, nothing is copied. "optimizer" and
            "both" are not supported with `fsdp`, tp_size > 1 or ep_size > 1.
        activation_checkpoint_interval: an alternative to `recompute`: with k > 0, every k-th unit call of the model is
            recomputed.
        timeout: the number of seconds that one action of a step, or one wait for another rank, may take, or None for no
            limit. Outside a step, the limit is three times as long. After this time, all ranks abort with a table of
            each rank's current activity. "adaptive" is 20 times the longest action so far. Its minimum is 30 seconds,
            or 600 seconds until `optimizer.step()` has completed once. A dict sets separate values for a "step", for
            any "other" call (a save, a load, a boost), and for the script's own waits "between" two calls.
        watchdog: False disables the mechanisms that stop all ranks together: two threads, a small process,
            faulthandler, and hooks for `atexit`, exceptions, `sys.exit` and SIGTERM (if SIGTERM has no handler). With
            False, the other ranks raise the backend's errors if a rank fails.
        check_finite: check that the loss, sent activations and gradients, and the parameters' gradients and updated
            values are finite. If a value is not finite, the stage raises NonFiniteError. The error names the stage and
            the first non-finite parameter, if any. With "fp16", gradients are not checked, since they may overflow.
        verify: before the model is cut, prove that the split model trains like the unsplit model. In the first process,
            all stages and the unsplit model take two steps on samples of the batch that is used for tracing. With
            pp_size=1, the proof compares the batch, split into several microbatches, with the whole batch. "auto" runs
            the proof for your own models, criteria and optimizers, for transformers classes that docs/parity.md does
            not list, and with `num_slices` or `microbatch_tokens`. With "auto", the proof stops after 5 seconds, or
            after 60 seconds with `num_slices`, with `microbatch_tokens`, or for a smaller copy of the model. A smaller
            copy replaces a model that is on meta, or too large for a tenth of the free memory. A difference raises
            VerificationError.
        deferred_batch_norm: update batch norm's running statistics once per step, from the replica's whole batch,
            instead of once per microbatch. Not supported with `compile`.

    Raises ConfigurationError for invalid arguments and combinations.
    """

    pp_size: int
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    schedule: Schedule = "1f1b"
    num_model_chunks: int = 1
    p2p: str | type = "broadcast"
    partition: Cuts = "auto"
    policy: type[Policy] | None = None
    dry_run_input: Any = None
    init_weights: InitWeights = True
    max_norm: float | None = 0.0
    loss_reduction: str = "token"
    compile: bool | dict[str, Any] = False
    dp_size: int | None = None
    tp_size: int = 1
    ep_size: int = 1
    zero_stage: int = 0
    fsdp: bool = False
    precision: str = "fp32"
    autocast: bool = False
    initial_scale: float = 2.0**16
    batch_dims: Mapping[str, int | None] | None = None
    recompute: bool | float | Sequence[float] = False
    activation_checkpoint_interval: int = 0
    shared_weights: Sequence[Sequence[str]] = ()
    timeout: float | str | Mapping[str, Any] | None = 600.0
    watchdog: bool = True
    check_finite: bool = False
    verify: bool | str = "auto"
    tp_plan: Mapping[str, str] | None = None
    ep_plan: Mapping[str, str] | None = None
    deferred_batch_norm: bool = False
    num_slices: int | str = 1
    offload: str | None = None
    microbatch_tokens: int | None = None
    memory_limit: str | int | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_microbatches()
        self._check_kinds()
        self._check_schedule()
        check_replicas(self.zero_stage, self.fsdp)
        refuse_compile_options(self.compile_options, self.pp_size, bool(self.compile) and self.deferred_batch_norm)
        check_precision(self.precision, self.autocast)
        check_offload(self.offload, self.fsdp, self.tp_size, self.ep_size)
        if self.offloads("activations") and self.compile:
            raise ConfigurationError(
                f"offload={self.offload!r} is not supported with compile={self.compile!r}: compiled units do not call "
                "the hooks that copy activations to the host. Use only one of the two"
            )
        check_declared(self.batch_dims)
        self._settle(batch_dims=dict(self.batch_dims or {}))
        if self.verify == "auto" and os.environ.get("PIPESHARD_VERIFY") == "0":
            self._settle(verify=False)
        _ = self.placement, self.recomputed  # both raise for invalid arguments

    @property
    def num_stages(self) -> int:
        """The number of stages, p·v: each rank holds one stage, or one stage per chunk."""
        return self.pp_size * self.num_model_chunks

    @property
    def is_v(self) -> bool:
        """Whether the stages form a V, from the first rank to the last rank and back."""
        return self.schedule in IN_A_V or (self.num_model_chunks == 2 and is_v(self.placement, self.pp_size))

    @property
    def cut(self) -> tuple[int | None, int | None]:
        """(num_microbatches, microbatch_size). At most one of these two values is set. With `microbatch_tokens`, both
        are None."""
        return self.num_microbatches, self.microbatch_size

    @property
    def slices_of_stage(self) -> int:
        """The number of ranks that hold slices of one stage."""
        return self.tp_size * self.ep_size

    def refuse_uncut(self) -> None:
        """Raise ConfigurationError unless exactly one of the three arguments that split batches is set."""
        if len(self._cuts) != 1:
            given = self._cuts or dict.fromkeys(CUTS)
            sizes = " and ".join(f"{name}={value}" for name, value in given.items())
            raise ConfigurationError(f"batches cannot be split with {sizes}: pass exactly one of {', '.join(CUTS)}")

    @property
    def _cuts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in CUTS if getattr(self, name) is not None}

    @property
    def has_exact_loss(self) -> bool:
        """Whether the loss of a batch does not depend on how the batch is split into microbatches."""
        return self.loss_reduction != "microbatch"

    @property
    def lowers(self) -> bool:
        """Whether parameters are cast to 16 bits, with fp32 master weights."""
        return self.precision != "fp32" and not self.autocast

    def offloads(self, what: str) -> bool:
        """Whether `offload` includes `what`, which is "activations" or "optimizer"."""
        return is_offloaded(self.offload, what)

    @property
    def has_slices(self) -> bool:
        """Whether microbatches are split along the sequence."""
        return self.num_slices != 1

    @property
    def is_ragged(self) -> bool:
        """Whether samples are grouped into microbatches by number of tokens, and excess padding is removed."""
        return self.microbatch_tokens is not None

    def slices_of(self, totals: Sequence[int]) -> int:
        """The number of slices per microbatch. `totals` lists the number of positions of each microbatch."""
        if isinstance(self.num_slices, int):
            return self.num_slices
        return number_of_slices(str(self.schedule), self.pp_size, len(totals), min(totals) // LEAST_OF_SLICE)

    @property
    def compile_options(self) -> dict[str, Any]:
        return self.compile if isinstance(self.compile, dict) else {}

    @property
    def defers(self) -> bool:
        """Whether weight gradients may be computed separately even if the schedule does not require a separate pass.
        False for compiled units, and with tensor or expert parallelism."""
        return not (self.compile or self.slices_of_stage > 1)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage. With schedule="auto", before the search, each rank has one stage."""
        if self.schedule == AUTO:
            return tuple(range(self.pp_size))
        named = isinstance(self.schedule, str)  # a function may not support a single microbatch
        return self.program(1 if named else self.num_microbatches or 1).placement

    @cached_property
    def recomputed(self) -> Recompute:
        """The recomputation that `recompute` and `activation_checkpoint_interval` request."""
        return Recompute.of(self.recompute, self.activation_checkpoint_interval, self.num_stages)

    def program(self, num_microbatches: int = 1, num_slices: int = 1) -> Program:
        """The program of a training step, without messages. Raises ConfigurationError if the schedule does not support
        these numbers, or if `compile` is set and the schedule computes weight gradients separately."""
        if num_slices > 1:
            program = sliced(str(self.schedule), self.pp_size, num_microbatches, num_slices)
        else:
            program = program_of(self.schedule, self.pp_size, num_microbatches, self.num_model_chunks)
        if program.has_weight:
            self._refuse_compiled_backward(program.name)
        if not self.defers or not isinstance(self.schedule, str):
            return program
        return split_backwards(program) if num_slices > 1 else shorten_cooldown(program)

    def settled(self, model: object, criterion: Criterion | None) -> tuple[Cuts, Recompute, Criterion | None]:
        """The partition, the recomputation and the criterion of a model. The model's hints replace the arguments that
        the user has not set.

        Raises ConfigurationError if the model requires a number of stages other than `num_stages`.
        """
        hints = PipelineHints.of(model)
        if hints.num_stages not in (None, self.num_stages):
            raise ConfigurationError(
                f"the model was built for num_stages={hints.num_stages}, but pp_size={self.pp_size} and "
                f"num_model_chunks={self.num_model_chunks} result in num_stages={self.num_stages}: use the same number "
                "of stages, or build the model without num_stages"
            )
        given = any(self.recomputed.ratios) or self.recomputed.interval > 0
        hinted = replace(Recompute.of(hints.recompute, 0, self.num_stages), classes=hints.checkpointable)
        return (
            hints.partition if self.partition == "auto" else self.partition,
            self.recomputed if given else hinted,
            criterion if criterion is not None else hints.criterion,
        )

    @property
    def of_all_ranks(self) -> dict[str, Any]:
        """The arguments that must be the same on every rank."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in OF_ONE_RANK}

    def _settle(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_sizes(self) -> None:
        parts = {"pp_size": "ranks in a pipeline", "dp_size": "replicas", "tp_size": "tensor-parallel ranks per stage"}
        parts |= {"ep_size": "expert-parallel ranks per stage"}
        for name, what in parts.items():
            size = getattr(self, name)
            if not is_positive(size) and (name, size) != ("dp_size", None):
                raise ConfigurationError(f"{name}, the number of {what}, must be {POSITIVE}, got {size!r}")
        if self.tp_size > 1 and self.ep_size > 1:
            raise ConfigurationError(
                f"tp_size={self.tp_size} is not supported with ep_size={self.ep_size}: pipeshard shards either "
                "the matrices or the experts of a stage. Use only one of the two, with more stages or replicas"
            )

    def _check_microbatches(self) -> None:
        if self.pp_size == 1 and not self._cuts:
            self._settle(num_microbatches=1)
        if len(self._cuts) > 1:
            self.refuse_uncut()

    def _check_kinds(self) -> None:
        self._check("loss_reduction", self.loss_reduction in REDUCTIONS, "'token', 'batch' or 'microbatch'")
        for name in CUTS:
            self._check(name, getattr(self, name) is None or is_positive(getattr(self, name)), POSITIVE)
        is_number = is_positive(self.num_slices)
        self._check("num_slices", is_number or self.num_slices == "auto", f"'auto' or {POSITIVE}")
        self._check("num_model_chunks", is_positive(self.num_model_chunks), POSITIVE)
        is_policy = self.policy is None or (isinstance(self.policy, type) and issubclass(self.policy, Policy))
        self._check("policy", is_policy, "a subclass of pipeshard.Policy")
        draws = isinstance(self.init_weights, bool) or callable(self.init_weights)
        self._check("init_weights", draws, "True, False or a function")
        self._check("compile", isinstance(self.compile, bool | dict), "True, False or a dict of options")
        times = self.timeout if isinstance(self.timeout, Mapping) else {"step": self.timeout}
        what = "a positive number of seconds, 'adaptive' or None, or a dict of these for 'step', 'other' and 'between'"
        self._check("timeout", set(times) <= {"step", "other", "between"} and all(map(is_time, times.values())), what)
        self._check("verify", isinstance(self.verify, bool) or self.verify == "auto", "'auto', True or False")
        self._check_numbers()
        check_plan("tp_plan", self.tp_plan)
        check_plan("ep_plan", self.ep_plan)

    def _check_numbers(self) -> None:
        norm = 0.0 if self.max_norm is None else self.max_norm
        holds = is_number(norm) and norm >= 0  # infinity measures the norm without clipping
        self._check("max_norm", holds, "a non-negative number, or None for no clipping")
        self._settle(max_norm=norm)
        scale = self.initial_scale
        self._check(
            "initial_scale", is_number(scale) and LEAST_SCALE <= scale <= MOST_SCALE, "a number between 1 and 2**32"
        )
        for name in ("fsdp", "autocast", "watchdog", "check_finite", "deferred_batch_norm"):
            value = getattr(self, name)
            self._check(name, isinstance(value, int) and value in (True, False), "True or False")

    def _check(self, name: str, holds: Any, what: str) -> None:
        if not holds:
            raise ConfigurationError(f"{name} must be {what}, got {getattr(self, name)!r}")

    def _check_schedule(self) -> None:
        if self.memory_limit is not None and self.schedule != AUTO:
            raise ConfigurationError(
                f"memory_limit={self.memory_limit!r} is not supported with schedule={name_of(self.schedule)!r}: "
                f"memory_limit applies only to the search of schedule={AUTO!r}. Omit it, or pass schedule={AUTO!r}"
            )
        if self.schedule == AUTO:
            self._check_auto()
            return
        m = self.num_microbatches or 1
        self._settle(num_model_chunks=chunks_of(self.schedule, self.pp_size, self.num_model_chunks, m))
        if not isinstance(self.schedule, str):
            program_of(self.schedule, self.pp_size, m, self.num_model_chunks)
        if self.has_slices:
            self._check_slices()

    def _check_auto(self) -> None:
        """Refuse options whose values the search chooses itself, and options that the search's programs do not
        support."""
        for name, default in (
            ("partition", AUTO),
            ("num_model_chunks", 1),
            ("num_slices", 1),
            ("microbatch_tokens", None),
        ):
            value = getattr(self, name)
            if value != default and not is_profile(value):
                raise ConfigurationError(
                    f"{name}={value!r} is not supported with schedule={AUTO!r}, which chooses cuts and chunks itself, "
                    f"and requires unsliced microbatches of equal size: omit {name}"
                )
        if not isinstance(self.recompute, bool | int | float):
            raise ConfigurationError(
                f"recompute={self.recompute!r} is not supported with schedule={AUTO!r}, which chooses the number of "
                "stages itself: pass True, or one fraction for all stages"
            )
        self._refuse_compiled_backward(AUTO)

    def _check_slices(self) -> None:
        """Refuse options that slices do not support."""
        if self.schedule not in SLICED:
            raise ConfigurationError(
                f"num_slices={self.num_slices!r} is not supported with schedule={name_of(self.schedule)!r}. Use one "
                f"of {', '.join(SLICED)}"
            )
        if self.is_ragged:
            raise ConfigurationError(
                f"num_slices={self.num_slices!r} is not supported with microbatch_tokens={self.microbatch_tokens}: "
                "slices require microbatches of equal length, but microbatch_tokens makes their lengths differ. Use "
                "only one of the two"
            )
        if self.compile:
            raise ConfigurationError(
                f"num_slices={self.num_slices!r} is not supported with compile={self.compile!r}: the cache length "
                "differs between slices, so torch would recompile each unit for each slice. Use only one of the two"
            )

    def _refuse_compiled_backward(self, schedule: str) -> None:
        """Refuse `compile` for a schedule that computes weight gradients separately."""
        if self.compile:
            raise ConfigurationError(
                f"compile={self.compile!r} is not supported with schedule={schedule!r}, which may compute weight "
                "gradients separately: a compiled backward computes them together with the input gradients. Use "
                "schedule='1f1b', 'interleaved' or 'gpipe'"
            )
