"""Objective: the loss that a Trainer's own compute_loss makes of what the pipeline has computed, as a criterion.

Before a step it is asked what it calls the model with, on every rank. In the step the last stage calls it again, with
what the model has returned in the place of the model: muted, as the pipeline's criterion, of which nothing but the
loss is kept, for it is also traced; and once for all else that it does (metrics), which the other ranks are told of.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import FOR_CRITERION
from pipeshard.distributed.collectives import share_value
from pipeshard.engine.engine import Pipeline
from pipeshard.errors import UsageError
from pipeshard.trainer.accelerator import PipelineAccelerator

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


class Asking:
    """A model in name, which tells by Called what it is called with."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

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
