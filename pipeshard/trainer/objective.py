"""Objective: the loss that a Trainer's own compute_loss makes of what the pipeline has computed, as a criterion.

Before a step it is asked what it calls the model with, on every rank. In the step the last stage calls it again, with
what the model has returned in the place of the model: muted, as the pipeline's criterion, of which nothing but the
loss is kept, for it is also traced; and once for all else that it does (metrics), which the other ranks are told of.

Of the loss of TRL's DPOTrainer another run of a model, the reference, is part, but a pipeline runs one model in a step.
So the reference's log-probabilities are computed before, by its own stages, or by the model's with the adapters off,
and put beside the batch, where TRL has them too if they are precomputed.
"""

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import FOR_CRITERION
from pipeshard.checkpoint.files import together
from pipeshard.distributed.collectives import share_value
from pipeshard.engine.engine import Pipeline
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.plugin import PipelinePlugin
from pipeshard.trainer.stand_ins import PipelineAccelerator, StandIn

ITEMS = "num_items_in_batch"
COMPARED = 8  # batches of which the loss is compared with that of a compute_loss which gathers nothing
PLAIN = (bool, int, float, str, type(None))


class ComputesLoss(Protocol):
    model: nn.Module
    accelerator: PipelineAccelerator

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any: ...


class Called(Exception):
    """The model was called, with these inputs."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs = inputs


class Objective:
    """Calls `trainer.compute_loss`. `num_items` is what all batches of a window together are to be divided by."""

    def __init__(self, trainer: ComputesLoss) -> None:
        self._trainer = weakref.ref(trainer)  # nothing of which the loss is traced through
        self.num_items: Any = None
        self.added: frozenset[str] = frozenset()  # what compute_loss gives the model beside the batch
        self._changed: set[str] = set()  # attributes of the trainer, in this step
        self._compared = 0

    @property
    def trainer(self) -> ComputesLoss:
        trainer = self._trainer()
        assert trainer is not None
        return trainer

    def called_with(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What the model is called with, and what of the batch the loss may read beside it, under names of its own."""
        trainer = self.trainer
        try:
            with self._muted():
                trainer.compute_loss(Asking(trainer.model), dict(inputs), num_items_in_batch=self.num_items)
        except Called as called:
            self.added = frozenset(called.inputs.keys() - inputs.keys())
            beside = {FOR_CRITERION + name: inputs[name] for name in inputs.keys() - called.inputs.keys()}
            return {**called.inputs, **{name: beside[name] for name in sorted(beside)}}
        raise UsageError(
            f"compute_loss of {type(trainer).__name__} has not called the model that it was given: let it call "
            "model(**inputs), and make the loss of what that returns"
        )

    def __call__(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        with self._muted():
            return self._loss(outputs, inputs)

    def note(self, outputs: Any, inputs: Mapping[str, Any]) -> None:
        """What compute_loss does beside the loss, of one batch."""
        before = _plain(vars(self.trainer))
        loss = self._loss(outputs, inputs)
        now = _plain(vars(self.trainer))
        self._changed |= {name for name in now if name not in before or not _equal(now[name], before[name])}
        if self._compared < COMPARED:
            self._compared += 1
            muted = self(outputs, inputs)
            if not torch.allclose(muted, loss, rtol=1e-5, atol=1e-7, equal_nan=True):
                raise UsageError(
                    f"the loss of compute_loss is {loss.item()}, but {muted.item()} where it gathers nothing from "
                    "other ranks and counts nothing: let it depend on the batch and the model's outputs alone"
                )

    def share(self, pipeline: Pipeline) -> None:
        """Tell all ranks what that has come to on the last stage."""
        if pipeline.group.size() > 1:
            own = {name: entry for name, entry in _plain(vars(self.trainer)).items() if name in self._changed}
            _put(vars(self.trainer), share_value(own, pipeline.last_rank, pipeline.group))
        self._changed.clear()

    def _loss(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        trainer = self.trainer
        answer = Answer(trainer.model, outputs, {name: inputs[name] for name in inputs if name not in self.added})
        given = {name: value for name, value in inputs.items() if name not in self.added and name != ITEMS}
        given = {name.removeprefix(FOR_CRITERION): value for name, value in given.items()}
        loss = trainer.compute_loss(answer, given, num_items_in_batch=self.num_items)
        if not isinstance(loss, Tensor):
            raise UsageError(f"compute_loss of {type(trainer).__name__} returned a {type(loss).__name__}, not a tensor")
        return loss

    @contextmanager
    def _muted(self) -> Iterator[None]:
        """Inside, numbers are gathered from nobody, and what is counted or listed is forgotten."""
        trainer = self.trainer
        before, trainer.accelerator.is_muted = _plain(vars(trainer)), True
        try:
            yield
        finally:
            trainer.accelerator.is_muted = False
            for fresh in _plain(vars(trainer)).keys() - before.keys():
                delattr(trainer, fresh)
            _put(vars(trainer), before)


class Asking(StandIn):
    """A model in name, which tells by Called what it is called with."""

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        if args:
            raise UsageError("compute_loss calls the model with inputs by place: let it call model(**inputs)")
        raise Called(inputs)


class Answer(Asking):
    """What the pipeline has computed of a batch, as a model that is called with it, once."""

    def __init__(self, model: nn.Module, outputs: Any, inputs: Mapping[str, Any]) -> None:
        super().__init__(model)
        self.outputs, self.inputs, self.was_called = outputs, inputs, False

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        if self.was_called:
            raise UsageError("compute_loss calls the model twice, but a pipeline runs it once on each batch")
        if other := [name for name in self.inputs.keys() & inputs.keys() if not _same(inputs[name], self.inputs[name])]:
            raise UsageError(
                f"compute_loss gives the model another {', '.join(sorted(other))} than the batch has: let the data "
                "collator make it what it is to be"
            )
        self.was_called = True
        return self.outputs


def _same(given: Any, known: Any) -> bool:
    return given is known or (isinstance(given, PLAIN) and given == known)


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of all entries that are numbers, or lists and dicts of them."""
    return {name: _copy(entry) for name, entry in value.items() if _is_plain(entry)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, PLAIN) and _is_plain(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN) or (isinstance(value, Tensor) and value.ndim == 0 and not value.requires_grad)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(entry) for key, entry in value.items()}
    if isinstance(value, Tensor):
        return torch.clone(value)
    return list(map(_copy, value)) if isinstance(value, list) else value


def _put(holder: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    """Give back the entries of a dict, which stays what it is, and so do dicts in it."""
    for key, value in content.items():
        if isinstance(value, dict) and isinstance(holder.get(key), dict):
            for gone in holder[key].keys() - value.keys():
                del holder[key][gone]
            _put(holder[key], value)
        else:
            holder[key] = value


CHOSEN, REJECTED, BOTH = "ref_chosen_logps", "ref_rejected_logps", "ref_logps"  # of B pairs, and of 2B rows


class Preferences:
    """Above a DPOTrainer, of whose public names are `precompute_ref_logps`, `ref_model` and `compute_ref_log_probs`."""

    pipeline: PipelinePlugin
    precompute_ref_logps: bool
    ref_model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= dict(zip(inspect.signature(super().__init__).parameters, args))
        given = kwargs.get("args")
        if getattr(given, "sync_ref_model", False):
            raise ConfigurationError(
                "sync_ref_model=True would mix the parameters of two models, which are in parts here: leave it out"
            )
        if getattr(given, "precompute_ref_log_probs", False):
            for name in ("train_dataset", "eval_dataset"):
                kwargs[name] = self._on_disk(kwargs.get(name), Path(kwargs["args"].output_dir) / "datasets" / name)
        super().__init__(**kwargs)

    def _on_disk(self, dataset: Any, folder: Path) -> Any:
        """A dataset in memory as one whose files all ranks share: the first one adds log-probabilities to them."""
        from datasets import Dataset  # which TRL needs, but transformers does not

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
        """The batch with the reference's log-probabilities, one for each of its rows; every rank calls it. A sample,
        by which the stages are yet to be made, gets zeros."""
        if BOTH in inputs:
            return inputs
        inputs = dict(inputs)
        if CHOSEN in inputs:
            chosen, rejected = inputs.pop(CHOSEN), inputs.pop(REJECTED)
        elif is_sample:
            chosen, rejected = torch.zeros(len(inputs["input_ids"])).chunk(2)
        else:
            model = self.ref_model if self.ref_model is not None else self._own_stages()  # type: ignore[attr-defined]
            chosen, rejected = self.compute_ref_log_probs(model, inputs)  # type: ignore[attr-defined]
        return inputs | {BOTH: torch.cat([chosen, rejected])}

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs = self.with_reference(inputs) if not isinstance(model, Asking) else dict(inputs)
        inputs[CHOSEN], inputs[REJECTED] = inputs.pop(BOTH).chunk(2)
        before, self.precompute_ref_logps = self.precompute_ref_logps, True
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.precompute_ref_logps = before
