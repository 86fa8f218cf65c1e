"""Planner: the comparison of schedules for a model, and the recommendation of a schedule."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.batch.read import dummy_inputs, read_batch
from pipeshard.config import AUTO
from pipeshard.engine.mixed_precision import Precision
from pipeshard.engine.refusals import refuse_sharded_packing
from pipeshard.errors import NO_LOSS, ConfigurationError, PartitionError, UsageError, counted
from pipeshard.garbage import collector_paused
from pipeshard.graph.dataflow import Dataflow
from pipeshard.hf import recomputes
from pipeshard.options import check_plan
from pipeshard.planner.auto import search
from pipeshard.planner.candidate import Candidate, Subject, metered, unit_cost
from pipeshard.planner.devices import Devices
from pipeshard.planner.memory import REMEDIES, Footprint, Forms, Training, check_positive, format_bytes
from pipeshard.planner.plan import Estimate, Plan
from pipeshard.planner.profile import Profile, find_profile, shapes_of
from pipeshard.schedule.given import Schedule
from pipeshard.schedule.schedules import SCHEDULES, num_chunks
from pipeshard.schedule.search import Searched
from pipeshard.split.packed import packed_layers
from pipeshard.split.partition import Cost, Cuts, by_cost, is_profile, named_modules_of, speeds_of
from pipeshard.split.policy import Policy, find_policy, is_plain
from pipeshard.split.tensor_parallel import plan_of, sliced_sizes
from pipeshard.split.ties import glue_parameters, tie_on_meta, used_parameters

# The order of preference for schedules that are about equally fast: the simplest first.
SIMPLEST = ("1f1b", "zb-h1", "gpipe", "zbv", "interleaved", "v-half", "v-min", AUTO)
NEAR = 0.03  # the fraction by which a simpler schedule may be slower


def recommend(estimates: Sequence[Estimate], limits: Sequence[int] = ()) -> tuple[Estimate, str]:
    """Return the estimate of the recommended schedule, and the reason as one sentence. The recommendation is the
    fastest schedule that fits, or a simpler schedule that is nearly as fast. If no schedule fits, the recommendation
    ignores the memory limits."""
    possible = [e for e in estimates if not e.problem]
    fitting = [e for e in possible if e.fits is not False] or possible
    fastest = min(fitting, key=lambda e: (e.time, SIMPLEST.index(e.schedule), e.num_model_chunks))
    near = [e for e in fitting if e.time <= fastest.time * (1 + NEAR)]
    best = min(near, key=lambda e: (SIMPLEST.index(e.schedule), e.num_model_chunks))
    if best is fastest:
        why = "the fastest that fits" if limits else "the fastest"
    else:
        why = f"simpler than {fastest.name}, and at most {NEAR:.0%} slower"
    memory = f"rank {best.fullest} takes the most memory, {format_bytes(best.peak)}"
    return best, f"{best.name}: {why}; {memory}{f' of {format_bytes(limits[best.fullest])}' if limits else ''}."


LENGTH = 2048  # the largest default number of tokens in a generated sample


@collector_paused()
def plan(
    model: nn.Module,
    batch: Any = None,
    pp_size: int = 2,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    schedule: str | None = None,
    num_model_chunks: int = 1,
    partition: Cuts = "auto",
    device_memory: str | int | Sequence[str | int] | None = None,
    optimizer: str = "adamw",
    policy: type[Policy] | None = None,
    profile: Profile | str | Path | None = None,
    criterion: Criterion | None = None,
    seq_len: int | None = None,
    precision: str = "fp32",
    dp_size: int = 1,
    zero_stage: int = 0,
    fsdp: bool = False,
    tp_size: int = 1,
    tp_plan: Mapping[str, str] | None = None,
    ep_size: int = 1,
    ep_plan: Mapping[str, str] | None = None,
    offload: str | None = None,
    tflops: float | None = None,
    link: str | Sequence[str] | None = None,
    device_speed: str | Sequence[float] | None = None,
) -> Plan:
    """Estimate how `model` would train on `pp_size` ranks with each schedule, and recommend a schedule. Only shapes are
    computed, so `plan` needs no process group and no GPU. `model` may be any model that `pipeshard.trace` accepts,
    including a model on meta. `batch` must have the same sizes as the training batches. As in the plugin, pass either
    `num_microbatches` or `microbatch_size` to split the batch. Without a batch, the plan is for `num_microbatches`
    microbatches of `microbatch_size` samples (1 by default) with `seq_len` tokens per sample. By default, `seq_len` is
    the maximum length that the model accepts, but at most 2048.

    Args:
        schedule: the schedule whose stages are shown, with its `num_model_chunks`. The default is the recommended
            schedule. "auto" searches for a schedule that fits in `device_memory` (by default, in the most memory that a
            rank needs with 1F1B). If a known schedule is at least as fast as the schedule found, the known schedule is
            shown instead.
        partition: same as in `PipelinePlugin`. If a rank would exceed `device_memory` with the partition of a rule such
            as "auto", `plan` replaces this partition with one that fits, if it finds one.
        device_memory: the memory limit of the ranks: one value for all ranks, such as "80GB" or a number of bytes, or
            one value per rank, such as "24GB,12GB".
        optimizer: "adamw" or "adam" (two states per parameter), "sgd" (one state, with momentum) or "none". A state is
            as large as the parameter's gradient. "adamw_fused" is AdamW with `fused=True`. "adamw_8bit" and "lion_8bit"
            are bitsandbytes optimizers. If a Trainer creates such an optimizer, pass "trainer_adamw_8bit" or
            "trainer_lion_8bit".
        precision: same as in `PipelinePlugin`. With "bf16" or "fp16", a rank holds fp32 gradients, master weights and
            states in addition to the 16-bit parameters.
        dp_size: same as in `PipelinePlugin`.
        zero_stage: same as in `PipelinePlugin`. 1 shards the optimizer's state across the replicas.
        fsdp: same as in `PipelinePlugin`. True shards the persistent memory of each unit across the replicas.
        tp_size: same as in `PipelinePlugin`. The memory counts only one rank's shards of parameters, gradients and
            states. Times and activations are estimated for unsharded units.
        tp_plan: same as in `PipelinePlugin`.
        ep_size: same as in `PipelinePlugin`. The memory counts only one rank's share of the experts' parameters.
        ep_plan: same as in `PipelinePlugin`.
        offload: same as in `PipelinePlugin`. Copies to the host and back are assumed to take no time.
        profile: measured times of units, as a Profile or the path of its file. They replace the estimated times. With
            `partition="profile"`, `plan` measures the times. With "profile:PATH", `plan` reads the file or, if the file
            does not exist, measures the times and writes the file.
        policy: same as in `PipelinePlugin`.
        criterion: same as in `PipelinePlugin`.
        tflops: the sustained speed of a device on this model, in 10^12 operations per second (not the peak in the data
            sheet). With `tflops`, times are in seconds.
        link: the bandwidth and latency between any two ranks, such as "50GB/s,10us" or "10Gbit/s", or a list with one
            link from each rank to the next. `link` requires times in seconds. Without `link`, messages take no time.
        device_speed: the relative speed of each rank, such as "1.0,0.6". Measured and estimated times refer to speed 1.
            With `partition="auto"` or "profile", stages are balanced by the speeds. By default, the speeds are taken
            from `partition` if it lists speeds ("speed:1.0,0.6"), and otherwise all speeds are 1.

    Raises PartitionError if the requested schedule (by default, every schedule) is impossible or needs more than
    `device_memory`. Raises ConfigurationError for invalid arguments, BatchError for an invalid batch or if no batch can
    be generated, UsageError if the model returns no loss, and TraceError if the model cannot be traced.
    """
    if not isinstance(pp_size, int) or pp_size < 1:
        raise ConfigurationError(
            f"pp_size, the number of ranks in a pipeline, must be a positive integer, got {pp_size!r}"
        )
    is_auto = schedule == AUTO
    chosen = None if schedule is None or is_auto else (schedule, num_chunks(schedule, num_model_chunks))
    speeds = speeds_of(partition, pp_size) if device_speed is None else device_speed
    devices = Devices.parse(pp_size, device_memory, speeds, link)
    microbatch, m = first_microbatch(model, batch, num_microbatches, microbatch_size, seq_len)
    training = Training(optimizer, precision, dp_size, zero_stage, fsdp, tp_size, ep_size, offload)
    subject = study(model, microbatch, criterion, policy, partition, training, profile, tp_plan, ep_plan)
    subject = timed(subject, tflops, link).on(devices)
    unit = 1.0 if subject.in_seconds else sum(map(sum, subject.costs)) / sum(devices.speeds) or 1.0

    tried = [attempt(subject, name, pp_size, m, v) for name, v in schedules(chosen, num_model_chunks)]
    found: Schedule | None = None
    if is_auto:
        best_found, found, _ = automatic(subject, pp_size, m)
        chosen = best_found.program.name, best_found.num_model_chunks
        known = schedules(num_model_chunks=num_model_chunks)  # a known schedule is shown with the cuts that were found
        tried = [best_found if which == chosen else each for which, each in zip(known, tried, strict=True)]
        tried += [best_found] * (best_found.program.name == AUTO)
    candidates = {(c.program.name, c.num_model_chunks): c for c in tried if isinstance(c, Candidate)}
    estimates = [c.estimate(unit) if isinstance(c, Candidate) else c for c in tried]
    impossible = next((e for e in estimates if e.problem and chosen in (None, (e.schedule, e.num_model_chunks))), None)
    if impossible and (chosen or not candidates):
        raise PartitionError(impossible.problem)
    best, reason = recommend(estimates, devices.memory)
    if best.fits is False:  # no schedule fits: show the schedule that exceeds the limits least
        best = min((e for e in estimates if not e.problem), key=lambda e: max(devices.excess(e.memory)))
    shown = candidates[chosen or (best.schedule, best.num_model_chunks)]
    if shown.fits is False:
        rank = max(range(pp_size), key=devices.excess(shown.memory).__getitem__)
        fitting = [f"schedule {e.name} (fits)" for e in estimates if e.fits]
        raise PartitionError(
            f"with schedule {shown.program.name!r}, rank {rank} of {pp_size} needs {shown.memory[rank]}, but its "
            f"device_memory is {format_bytes(devices.memory[rank])}. Possible remedies: "
            f"{', '.join([*fitting, REMEDIES])}"
        )
    return Plan(
        model=type(model).__name__,
        parameters=subject.forms.count(model.parameters()),
        pp_size=pp_size,
        num_microbatches=m,
        microbatch=shapes_of(microbatch),
        training=training,
        devices=devices,
        partition=subject.partition if isinstance(subject.partition, str) else ", ".join(map(str, subject.partition)),
        unit="seconds" if subject.in_seconds else "relative",
        schedule=shown.program.name,
        num_model_chunks=shown.num_model_chunks,
        stages=shown.stages(unit),
        schedules=tuple(estimates),
        recommended=best.name,
        reason=reason,
        cuts=shown.cuts,
        searched=found if isinstance(found, Searched) else None,
        unused=unused_modules(model, subject.flow),
    )


def unused_modules(model: nn.Module, flow: Dataflow) -> dict[str, int]:
    """For each module whose parameters the trace does not use, the number of its parameters. Modules inside such a
    module are omitted."""
    used = used_parameters(model, flow)
    found = dict[str, int]()
    for path, module in model.named_modules():
        parameters, is_inside = set(module.parameters()), any(f"{path}.".startswith(f"{name}.") for name in found)
        if parameters and not parameters & used and not is_inside:
            found[path] = sum(parameter.numel() for parameter in parameters)
    return found


class Automatic(NamedTuple):
    """The fastest candidate (with a searched or a known schedule), the schedule of this candidate, and the fastest
    candidate with a known schedule (None if none fits)."""

    candidate: Candidate
    schedule: Schedule
    known: Candidate | None


def automatic(subject: Subject, p: int, m: int) -> Automatic:
    """Find the fastest program of m microbatches, searched or known, and cut the model for it.

    The subject's devices define the memory limits. Without limits, each rank may use the most memory that a rank needs
    with 1F1B. Raises PartitionError if no program fits.
    """
    if not subject.devices.memory:
        one = attempt(subject, "1f1b", p, m, 1)
        if isinstance(one, Estimate):
            raise PartitionError(one.problem)
        most = max(memory.total for memory in one.memory)
        subject = replace(subject, devices=replace(subject.devices, memory=(most,) * p))
    tried = [attempt(subject, name, p, m, v) for name, v in schedules()]
    fitting = [(c, c.program.name) for c in tried if isinstance(c, Candidate) and c.fits]
    known = min(fitting, key=_time, default=None)
    searched = search(subject, p, m) if p > 1 else None
    found: list[tuple[Candidate, Schedule]] = [each for each in (known, searched) if each]
    if not found:
        problems = [each.problem for each in tried if isinstance(each, Estimate)]
        if len(problems) == len(tried):
            raise PartitionError(problems[0])
        raise PartitionError(
            f"schedule={AUTO!r} found no program that fits in the memory of {counted(p, 'rank')} (limit per rank: "
            f"{subject.devices.limits}). Possible remedies: {REMEDIES}"
        )
    return Automatic(*min(found, key=_time), known and known[0])


def _time(found: tuple[Candidate, Schedule]) -> float:
    return found[0].estimate(1.0).time


def study(
    model: nn.Module,
    microbatch: Batch,
    criterion: Criterion | None,
    policy: type[Policy] | None,
    partition: Cuts,
    training: Training,
    profile: Profile | str | Path | None,
    tp_plan: Mapping[str, str] | None = None,
    ep_plan: Mapping[str, str] | None = None,
) -> Subject:
    """Trace the model, and determine the cost and memory of its unit calls. The arguments and the errors are the same
    as in `plan`."""
    tie_on_meta(model)
    refuse_sharded_packing(model, training.fsdp, training.slices)
    cuts = named_modules_of(partition)
    precision = Precision(training.precision, False, torch.device("cpu"))
    lowered, microbatch = precision.lowered(model), precision.of_batch(microbatch)
    with precision.seeming(model):
        flow, meter = metered(model, microbatch, criterion, cuts=cuts)
        if flow.loss is None:
            raise UsageError(NO_LOSS)
        units = [model.get_submodule(call.unit) for call in flow.calls]
        recomputed = any(map(recomputes, units))
        unrecomputed = metered(model, microbatch, criterion, cuts=cuts, recomputed=False)[1] if recomputed else meter
        measured = _profile(profile, partition, model, flow, microbatch, criterion)
    policy, sliced = policy or find_policy(model), dict[nn.Parameter, int]()
    if training.slices > 1:
        check_plan("tp_plan", tp_plan)
        check_plan("ep_plan", ep_plan)
        styles = plan_of(model, training.tp_size, tp_plan, policy.tp_plan, training.ep_size, ep_plan)
        called = {call.unit for call in flow.calls}
        sliced = sliced_sizes(model, called, glue_parameters(flow), training.slices, styles)
    packed = {layer.get_parameter("weight"): layer for _, layer in packed_layers(model)}
    forms = Forms(lowered, sliced, packed, {m.weight for m in model.modules() if isinstance(m, nn.Embedding)})
    again = partial(study, model, microbatch, criterion, policy, training=training, profile=None)
    is_sharded = training.slices > 1 or training.fsdp
    is_whole = is_sharded or not by_cost(partition) or not is_plain(policy) or hasattr(model, "pipeline_hints")
    costs = measured.times if measured else [unit_cost(*call) for call in zip(units, meter.works, strict=True)]
    has_own = measured is None and policy.costs is not Policy.costs
    return Subject(
        model=model,
        flow=flow,
        costs=own_costs(model, flow, policy, costs) if has_own else costs,
        footprint=Footprint(model, flow, meter, unrecomputed.works, training, forms),
        policy=policy,
        partition=partition,
        training=training,
        devices=Devices((), ()),
        forms=forms,
        in_seconds=measured is not None,
        again=None if is_whole else again,
        before_policy=[sum(cost) for cost in costs] if has_own else (),
    )


def own_costs(model: nn.Module, flow: Dataflow, policy: type[Policy], costs: Sequence[Cost]) -> list[Cost]:
    """Scale these costs so that the costs of the calls are proportional to the policy's own `costs`. The sum of all
    costs does not change, nor do the proportions of F, B and W within a call."""
    whole = type(policy.__name__, (policy,), {"distribute_layers": Policy.distribute_layers})
    own = whole(model, flow, 0, 1, costs=[sum(cost) for cost in costs]).costs()
    total = sum(map(sum, costs)) / (sum(own) or 1.0)
    factors = (total * now / (sum(cost) or 1.0) for cost, now in zip(costs, own, strict=True))
    return [Cost(*(part * factor for part in cost)) for cost, factor in zip(costs, factors, strict=True)]


def timed(subject: Subject, tflops: float | None, link: Any) -> Subject:
    """Convert the subject's costs to seconds if `tflops` is given. Raises ConfigurationError for an invalid `tflops`,
    for `tflops` in addition to a profile, and for a `link` if times are not in seconds."""
    if tflops is not None:
        if isinstance(tflops, bool) or not isinstance(tflops, int | float) or not 0 < tflops < math.inf:
            raise ConfigurationError(f"tflops must be a positive number, got {tflops!r}")
        if subject.in_seconds:
            raise ConfigurationError(
                "tflops and a profile both determine how long a unit takes: pass only one of the two"
            )
        costs = [Cost(*(part / (tflops * 1e12) for part in cost)) for cost in subject.costs]
        subject = replace(subject, costs=costs, in_seconds=True)
    if link is not None and not subject.in_seconds:
        raise ConfigurationError("link requires times in seconds: also pass tflops or a profile")
    return subject


def attempt(subject: Subject, name: str, p: int, m: int, v: int) -> Candidate | Estimate:
    """The Candidate for this schedule, or an Estimate whose `problem` is the reason why the model cannot be cut."""
    try:
        return Candidate(subject, subject.training.config(name, p, m, v).program(m), v)
    except PartitionError as error:
        return Estimate(name, v, problem=str(error))


def schedules(chosen: tuple[str, int] | None = None, num_model_chunks: int = 1) -> list[tuple[str, int]]:
    """Every known schedule with its number of chunks per rank. "interleaved" is listed with two chunks and, if another
    number of chunks was requested, also with this number."""
    wanted = {2, num_model_chunks} - {1} | ({chosen[1]} if chosen and chosen[0] == "interleaved" else set())
    names = [(name, v) for name in SCHEDULES for v in (sorted(wanted) if name == "interleaved" else [1])]
    return [(name, num_chunks(name, v)) for name, v in names]


def first_microbatch(
    model: nn.Module, batch: Any, num_microbatches: int | None, microbatch_size: int | None, seq_len: int | None
) -> tuple[Batch, int]:
    """The first microbatch of `batch`, and the number of microbatches. Without a batch, the microbatch is generated."""
    sizes = {"num_microbatches": num_microbatches, "microbatch_size": microbatch_size, "seq_len": seq_len}
    check_positive(**{name: size for name, size in sizes.items() if size is not None})
    if batch is None:
        if num_microbatches is None:
            raise ConfigurationError("without a batch, num_microbatches is required: pass it, or pass a batch")
        config = getattr(model, "config", None)
        length = seq_len or min(getattr(config, "max_position_embeddings", None) or LENGTH, LENGTH)
        return read_batch(model, dummy_inputs(model, microbatch_size or 1, length)), num_microbatches
    if seq_len is not None:
        raise ConfigurationError(
            f"seq_len={seq_len} is the length of a generated batch, but a batch was passed: omit seq_len or the batch"
        )
    if (num_microbatches is None) == (microbatch_size is None):
        raise ConfigurationError(
            "with a batch, pass exactly one of the two arguments num_microbatches and microbatch_size, got "
            f"num_microbatches={num_microbatches} and microbatch_size={microbatch_size}"
        )
    microbatches = read_batch(model, batch).split(num_microbatches, microbatch_size)
    return microbatches[0], len(microbatches)


def _profile(
    profile: Profile | str | Path | None,
    partition: Cuts,
    model: nn.Module,
    flow: Dataflow,
    microbatch: Batch,
    criterion: Criterion | None,
) -> Profile | None:
    """Load or measure the times of units. Returns None if neither `profile` nor `partition` requests measured times."""
    if profile is None and is_profile(partition):
        path = partition.partition(":")[2]
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        profile = find_profile(path, model, flow, microbatch, device, criterion)
        if path and not Path(path).exists():
            profile.save(path)
        return profile
    if isinstance(profile, str | Path):
        profile = Profile.load(profile)
    if profile is not None:
        profile.check(model, flow, microbatch)
    return profile
