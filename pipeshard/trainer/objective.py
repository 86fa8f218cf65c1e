"""Objective: a Trainer's own compute_loss as the criterion of the pipeline.

Before a step, every rank calls compute_loss to record the inputs that compute_loss passes to the model. In the step,
the last stage calls compute_loss as the pipeline's criterion, with a placeholder for the model that returns the
pipeline's outputs. The last stage then sends other effects of compute_loss (such as metrics) to the other ranks. A
trace or a trial uses only the loss, and discards other effects.

The loss of TRL's DPOTrainer also requires a second model, the reference, but a pipeline runs one model in a step. The
mixin Preferences therefore computes the reference's log-probabilities before the step (with the reference's own stages,
or with the model's stages without adapters) and adds them to the batch. compute_loss then runs with
precompute_ref_logps=True.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from pipeshard.batch.batch import FOR_CRITERION
from pipeshard.batch.tree import PLAIN_VALUES
from pipeshard.checkpoint.files import together
from pipeshard.checkpoint.random_state import random_state, set_random_state
from pipeshard.data.order import is_equal
from pipeshard.distributed.collectives import gather, gather_objects, share_value
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.updates import is_sampled
from pipeshard.errors import PipeshardError, TraceError, UsageError
from pipeshard.ghost import as_if_held
from pipeshard.graph.nodes import nodes_from
from pipeshard.plugin import PipelinePlugin
from pipeshard.private import tree_map_only, tree_tensors
from pipeshard.replaced import replaced
from pipeshard.trainer.kept import KeptState
from pipeshard.trainer.stand_ins import ModuleStandIn, PipelineAccelerator, in_fp32, without_checkpointing
from pipeshard.trainer.written import Written

ITEMS = "num_items_in_batch"


class ComputesLoss(Protocol):
    model: nn.Module
    accelerator: PipelineAccelerator
    pipeline: PipelinePlugin

    @property
    def autocasts(self) -> bool: ...

    def keeping_logs(self, logs: list[Any]) -> AbstractContextManager[None]: ...

    def report_logs(self, logs: list[Any]) -> None: ...

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any: ...


class Called(Exception):
    """Raised when compute_loss calls the model. Holds the inputs of the call."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs = inputs


class Resized(TraceError):
    """Raised if compute_loss calls the model with inputs whose sizes differ from the batch's. This may happen in a
    trace, since a trace varies each size separately."""


@dataclass
class Gathering:
    """Whether compute_loss has gathered values from other replicas (in a step, a trace or a trial), and the number of
    steps since then."""

    is_seen: bool = False
    steps: int = 0

    @property
    def is_compared(self) -> bool:
        """Whether this step compares the loss with the loss that results without gathered values: in the first steps
        and, after that, if the number of steps is a power of two."""
        return self.is_seen and is_sampled(self.steps)


class Objective:
    """A criterion that calls `trainer.compute_loss`. `num_items` is Trainer's `num_items_in_batch`, counted over a full
    gradient accumulation window."""

    def __init__(self, trainer: ComputesLoss) -> None:
        self._trainer = weakref.ref(trainer)  # so that a trace of the loss does not enter the Trainer
        self.num_items: Any = None
        self.added: frozenset[str] = frozenset()  # the model inputs that compute_loss adds to the batch, or writes to
        self._kind: Callable[[dict[str, Any]], Any] = dict  # the class of a batch, such as BatchEncoding
        self._kept: KeptState | None = None  # the Trainer's state before the window
        self._random: dict[str, Any] = {}  # the generators' states after the last call of compute_loss
        self._failure: UsageError | None = None
        self._calls = 0  # the number of compute_loss calls in this step
        self._logs: list[Any] = []  # the log entries of compute_loss in this step
        self._pipeline: Pipeline | None = None  # the pipeline whose step runs
        # From the last trial with consistent sizes: the sizes, and the outputs that receive a gradient from the loss.
        self._sizes: dict[str, torch.Size] = {}
        self._reached: tuple[int, ...] = ()
        self._gathering = Gathering()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Objective":
        """A copy that is used only for trials."""
        made = Objective(self.trainer)
        made.num_items, made.added = copy.deepcopy(self.num_items, memo), self.added
        made._kind = self._kind
        made._sizes, made._reached = dict(self._sizes), self._reached
        made._gathering = self._gathering  # shared, since a trial may find that compute_loss gathers
        return made

    @property
    def trainer(self) -> ComputesLoss:
        trainer = self._trainer()
        assert trainer is not None
        return trainer

    @contextmanager
    def stepping(self, pipeline: Pipeline) -> Iterator[None]:
        """Context manager for the pipeline step of a gradient accumulation window. On exit, all ranks receive the
        changes that compute_loss has made.

        In the step, the accelerator's `sync_gradients` is true only in the last call of compute_loss, as in one
        process.
        """
        accelerator = self.trainer.accelerator
        self._random, self._failure = random_state(), None
        self._pipeline, self._calls, self._logs = pipeline, 0, []
        tokens = pipeline.config.microbatch_tokens
        accelerator.uneven = "" if tokens is None else f"microbatch_tokens={tokens}"
        try:
            yield
        finally:
            self._pipeline, accelerator.is_last_call, accelerator.uneven = None, True, ""
            self._gathering.steps += self._gathering.is_seen
        self._share(pipeline)

    def called_with(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run compute_loss up to its call of the model. Returns the inputs of this call, and the rest of the batch
        under names with the prefix FOR_CRITERION.

        compute_loss receives copies of the tensors, since the step calls compute_loss again with the original batch. If
        compute_loss has written to a tensor that the model receives, the result contains both the original and the
        modified tensor.
        """
        trainer, before = self.trainer, random_state()
        if self._kept is None or any(self._kept.changes()):
            self._kept = KeptState(trainer)
        self._kind = cast(Any, type(inputs))  # its constructor takes a dict, as Trainer assumes
        given = tree_map_only(Tensor, torch.clone, dict(inputs))
        copies = {name: Written(tree_tensors(value)) for name, value in given.items()}
        try:
            with trainer.keeping_logs([]), as_if_held() as errors:
                batch = self._kind(dict(given))
                trainer.compute_loss(Asking(trainer.model), batch, num_items_in_batch=self.num_items)
        except Called as called:
            written = {name for name, copy in copies.items() if copy.is_changed}
            self.added = frozenset(name for name in called.inputs if name not in inputs or name in written)
            if self.added and errors:
                raise UsageError(
                    "compute_loss reads parameters of other stages before it calls the model, so the model inputs that "
                    f"compute_loss creates or changes ({', '.join(sorted(self.added))}) may depend on these "
                    "parameters: read the parameters after the model call, or compute the inputs in the data collator"
                ) from errors[0]
            as_given = called.inputs.keys() - self.added
            passed = called.inputs | {name: inputs[name] for name in as_given if called.inputs[name] is given[name]}
            beside = {FOR_CRITERION + name: inputs[name] for name in inputs.keys() - as_given}
            return {**passed, **{name: beside[name] for name in sorted(beside)}}
        finally:
            set_random_state(before)
            self._kept.restore()
        raise UsageError(
            f"compute_loss of {type(trainer).__name__} did not call the model that it received: call model(**inputs), "
            "and compute the loss from the model's outputs"
        )

    def __call__(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return the loss in a trace or a trial, and undo other effects of compute_loss.

        If compute_loss builds the model's inputs from several tensors of the batch, a trace that varies sizes may pass
        tensors with inconsistent sizes. In this case, the result is the sum of the outputs that the loss depends on.
        """
        leaves, kept = tree_tensors(outputs), KeptState(self.trainer, copies=True)
        try:
            with replaced(self.trainer.accelerator, is_muted=True), self.trainer.keeping_logs([]):
                loss = self._loss(outputs, inputs, is_trial=True)
        except Resized:
            if not self._is_near(inputs):
                raise
            return torch.stack([leaves[place].float().sum() for place in self._reached]).sum()
        finally:
            kept.restore()
        if self.added and loss.requires_grad:
            edges = _edges_of(loss)
            self._reached = tuple(k for k, leaf in enumerate(leaves) if leaf.requires_grad and _edge(leaf) in edges)
            self._sizes = self._sizes_of(inputs)
        return loss

    def _sizes_of(self, inputs: Mapping[str, Any]) -> dict[str, torch.Size]:
        given = {name: inputs[name] for name in self.added if name in inputs}
        return {name: value.shape for name, value in given.items() if isinstance(value, Tensor)}

    def _is_near(self, inputs: Mapping[str, Any]) -> bool:
        """Whether no size is more than 1 below the corresponding size of the last consistent inputs, as in a trace that
        varies the sizes of these inputs. False in a trace that starts with shorter inputs, whose lengths may match by
        coincidence."""
        sizes = self._sizes_of(inputs)
        if sizes.keys() != self._sizes.keys() or not self._reached:
            return False
        pairs = [pair for name in sizes for pair in zip(sizes[name], self._sizes[name])]
        return all(size >= before - 1 for size, before in pairs)

    def in_step(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return the loss in a step, on the last stage, and keep all other effects of compute_loss.

        compute_loss uses the same random numbers as in one process. If compute_loss raises UsageError, every rank
        raises UsageError at the end of the step.
        """
        if self._pipeline is None:
            return self(outputs, inputs)
        before = random_state()
        self._calls += 1
        self.trainer.accelerator.is_last_call = self._calls == len(self._pipeline.ran)
        try:
            set_random_state(self._random)
            muted = self(outputs, inputs).detach() if self._gathering.is_compared else None
            set_random_state(self._random)
            with self.trainer.keeping_logs(self._logs):
                loss = self._loss(outputs, inputs)
            self._random = random_state()
            if muted is not None and not torch.allclose(muted, loss, rtol=1e-5, atol=1e-7, equal_nan=True):
                raise UsageError(
                    "the loss depends on values of other replicas: compute_loss returns "
                    f"{loss.item()}, but {muted.item()} without gathering from other replicas. Compute the loss only "
                    "from the batch and the model's outputs"
                )
            return loss
        except UsageError as error:
            self._failure = self._failure or error
            leaves = [tensor for tensor in tree_tensors(outputs) if tensor.is_floating_point()]
            return torch.stack([leaf.float().sum() * 0.0 for leaf in leaves]).sum()
        finally:
            set_random_state(before)

    def _share(self, pipeline: Pipeline) -> None:
        """Send all ranks the changes that compute_loss has made on the last stage, and report compute_loss's logs on
        all ranks. Every rank raises UsageError if compute_loss has raised UsageError, or if a change cannot be sent."""
        kept, self._kept = self._kept, None
        assert kept is not None  # each batch of the window has recorded the state
        random = None if is_equal(self._random, random_state()) else self._random
        logs, random = of_last_stage(self.trainer, pipeline, kept, (self._logs, random), self._failure)
        if random is not None:
            set_random_state(random)
        self.trainer.report_logs(logs)

    def _loss(self, outputs: Any, inputs: Mapping[str, Any], is_trial: bool = False) -> Tensor:
        """Call compute_loss. If the forward runs under autocast, compute_loss runs without autocast, on outputs in
        fp32: in one process, accelerate also runs only the forward under autocast."""
        trainer = self.trainer
        outside: AbstractContextManager[object] = nullcontext()
        if trainer.autocasts:
            outputs = tree_map_only(Tensor, in_fp32, outputs)
            outside = torch.autocast(trainer.pipeline.grid.device.type, enabled=False)
        answer = Answer(trainer.model, outputs, inputs, self.added, is_trial)
        left_out = {*self.added, ITEMS}
        given = {name.removeprefix(FOR_CRITERION): inputs[name] for name in inputs if name not in left_out}
        gathers = trainer.accelerator.gathers
        with outside:
            loss = trainer.compute_loss(answer, self._kind(given), num_items_in_batch=self.num_items)
        self._gathering.is_seen |= trainer.accelerator.gathers > gathers
        if isinstance(loss, tuple):
            raise UsageError(
                f"{type(trainer).__name__}.compute_loss returned a tuple of {len(loss)} values, although it was called "
                "with return_outputs=False: return (loss, outputs) only if return_outputs is True, otherwise the loss"
            )
        if not isinstance(loss, Tensor):
            raise UsageError(f"{type(trainer).__name__}.compute_loss must return a tensor, but returned {loss!r:.200}")
        return loss


def of_last_stage(
    trainer: ComputesLoss, pipeline: Pipeline, kept: KeptState, value: Any, failure: Exception | None, text: str = "{}"
) -> Any:
    """Apply the last stage's changes since `kept` on all ranks, and return the last stage's `value`. Raises UsageError,
    on every rank, if the last stage of any replica has a `failure`, or cannot send its changes or value. `text` is the
    error's text, with {} for the reason."""
    is_last, told = dist.get_rank() == pipeline.last_rank, None
    try:
        if is_last and failure is None:
            told = kept.told(value)
    except UsageError as error:
        failure = error
    reasons = gather_objects(str(failure) if is_last and failure is not None else None, pipeline.grid.world)
    if (reason := next(filter(None, reasons), None)) is not None:
        raise UsageError(text.format(reason)) from failure
    if pipeline.group.size() > 1:
        told = share_value(told, pipeline.last_rank, pipeline.group)
    return value if is_last else KeptState.adopt(trainer, cast(Any, told), pipeline.device)


def evaluated_together(trainer: ComputesLoss, pipeline: Pipeline, compute_loss: Callable[[], Any]) -> Any:
    """Call compute_loss on every rank, and return its result. If a rank lacks parameters that compute_loss reads, all
    ranks use the last stage's result, state changes and logs. Raises UsageError, on every rank, if the last stage also
    fails."""
    failure, result, logs, kept = None, None, list[Any](), KeptState(trainer)
    try:
        with trainer.keeping_logs(logs), as_if_held() as errors:
            result = compute_loss()
    except UsageError as error:
        failure = error
    except Exception as error:
        if not errors or isinstance(error, PipeshardError):  # otherwise, the cause may be a missing parameter's NaN
            raise
    failure = errors[0] if errors else failure
    if bool(gather(torch.tensor(int(failure is not None)), pipeline.grid.world).any()):
        text = (
            "compute_loss failed in evaluation: {}. If compute_loss reads parameters of several stages, read them only "
            "during training (if model.training)"
        )
        logs, result = of_last_stage(trainer, pipeline, kept, (logs, result), failure, text)
    trainer.report_logs(logs)
    return result


class Asking(ModuleStandIn):
    """A placeholder for the model. A call raises Called with the inputs of the call."""

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        if args:
            raise UsageError("compute_loss passes inputs to the model by position: call model(**inputs)")
        raise Called(inputs)


class Answer(Asking):
    """A placeholder for the model. It can be called once, with the batch, and returns the pipeline's outputs for this
    batch.

    The call compares the inputs in `added` (those that compute_loss adds to the batch, or writes to) with their values
    from the earlier call of compute_loss. In a trace or a trial, the call compares only sizes: a trace that compared
    values would depend on the values, and would have to be repeated for each batch.
    """

    def __init__(
        self, model: nn.Module, outputs: Any, inputs: Mapping[str, Any], added: frozenset[str], is_trial: bool = False
    ) -> None:
        super().__init__(model)
        self.outputs, self.inputs, self.added, self.was_called = outputs, inputs, added, False
        self.is_trial = is_trial

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        if self.was_called:
            raise UsageError(
                "compute_loss calls the model twice, but a pipeline runs the model once per batch: call the model "
                "once. TRL's SFTTrainer calls the model twice if label_smoothing_factor or compute_loss_func is set: "
                "override compute_loss in a subclass, and return transformers.Trainer.compute_loss(self, *args, "
                "**kwargs)"
            )
        own = self.inputs.keys() & inputs.keys()
        if other := [name for name in own - self.added if not _is_given_value(inputs[name], self.inputs[name])]:
            raise UsageError(
                f"compute_loss passes copies or other values of {', '.join(sorted(other))} to the model, but the "
                "pipeline runs the model on the batch: pass the tensors of the batch itself, and change values in the "
                "data collator instead"
            )
        anew = {name: (inputs[name], self.inputs[name]) for name in sorted(own & self.added)}
        if self.is_trial and (other := [name for name, pair in anew.items() if not _is_same_size(*pair)]):
            raise Resized(
                f"compute_loss passes {', '.join(other)} to the model with a different size than in the batch: compute "
                "these inputs in the data collator"
            )
        if not self.is_trial and (other := [name for name, pair in anew.items() if not _is_equal(*pair)]):
            raise UsageError(
                "compute_loss is called twice for each batch of a gradient accumulation window (before the step and "
                f"during the step), but passes different values of {', '.join(other)} to the model in the two calls. "
                "Compute these values in the data collator, or make them independent of random numbers and of any "
                "state that compute_loss changes"
            )
        self.was_called = True
        return self.outputs


def _is_given_value(given: Any, known: Any) -> bool:
    return given is known or (isinstance(given, PLAIN_VALUES) and given == known)


def _is_equal(given: Any, known: Any) -> bool:
    """Whether a recomputed value equals the earlier value. Objects other than tensors and PLAIN_VALUES always count as
    equal."""
    if not isinstance(given, Tensor) or not isinstance(known, Tensor):
        return _is_given_value(given, known) or not isinstance(given, PLAIN_VALUES)
    return given.shape == known.shape and torch.equal(given.detach().to(known), known.detach())


def _is_same_size(given: Any, known: Any) -> bool:
    return not isinstance(given, Tensor) or not isinstance(known, Tensor) or given.shape == known.shape


def _edge(tensor: Tensor) -> tuple[Node, int]:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _edges_of(loss: Tensor) -> set[tuple[Node, int]]:
    """The edges of a loss's autograd graph, as (node, output number)."""
    root = _edge(loss)
    nodes = nodes_from([root[0]])
    return {root, *((node, number) for each in nodes for node, number in each.next_functions if node is not None)}


CHOSEN, REJECTED, BOTH = "ref_chosen_logps", "ref_rejected_logps", "ref_logps"  # B, B and 2B values for B pairs


class Preferences:
    """Mixin for a DPOTrainer. Uses the trainer's public attributes `precompute_ref_logps`, `ref_model` and
    `compute_ref_log_probs`."""

    pipeline: PipelinePlugin
    precompute_ref_logps: bool
    ref_model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        config = next((one for one in given.values() if getattr(one, "precompute_ref_log_probs", False)), None)
        if config is not None:
            folder = Path(config.output_dir) / "datasets"
            given = {name: self._on_disk(one, folder / str(name)) for name, one in given.items()}
        super().__init__(*(given[k] for k in range(len(args))), **{name: given[name] for name in kwargs})

    def _on_disk(self, dataset: Any, folder: Path) -> Any:
        """Write an in-memory dataset to files that all ranks share, since TRL adds log-probabilities only on the first
        rank. Returns the dataset loaded from these files. Any other argument is returned unchanged."""
        from datasets import Dataset  # TRL requires datasets, but transformers does not

        if isinstance(dataset, dict):
            return {name: self._on_disk(one, folder / name) for name, one in dataset.items()}
        if not isinstance(dataset, Dataset) or dataset.cache_files:
            return dataset
        grid = self.pipeline.grid
        with together(grid.world):
            if grid.first:
                dataset.save_to_disk(folder)
        return Dataset.load_from_disk(folder)

    def with_reference(self, inputs: dict[str, Any], is_sample: bool = False) -> dict[str, Any]:
        """The batch with the reference's log-probabilities, one per row. Call it on all ranks. With `is_sample` (the
        batch is only traced), the log-probabilities are zeros unless the batch contains them."""
        if BOTH in inputs:
            return inputs
        inputs = dict(inputs)
        if CHOSEN in inputs:
            chosen, rejected = inputs.pop(CHOSEN), inputs.pop(REJECTED)
        elif is_sample:
            chosen, rejected = torch.zeros(len(inputs["input_ids"])).chunk(2)
        else:
            model = self.ref_model if self.ref_model is not None else self._own_stages()  # type: ignore[attr-defined]
            with without_checkpointing(self.model):  # type: ignore[attr-defined]
                chosen, rejected = self.compute_ref_log_probs(model, inputs)  # type: ignore[attr-defined]
        return inputs | {BOTH: torch.cat([chosen, rejected])}

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs = self.with_reference(inputs) if not isinstance(model, Asking) else dict(inputs)
        inputs[CHOSEN], inputs[REJECTED] = inputs.pop(BOTH).chunk(2)
        with replaced(self, precompute_ref_logps=True):
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
