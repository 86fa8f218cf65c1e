"""Model: one entry of the catalog, and its unsplit training step."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

CRITERION = "criterion."  # begins the keys that a model does not get
DROPS = ("dropout", "droppath", "drop_path", "stochasticdepth", "dropblock", "attn_drop")
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)


def by_samples(batch: Any, count: int) -> list[Any]:
    """A batch in `count` parts of as many samples: of every tensor and list that has as many as the first tensor."""
    samples = _samples(batch)
    if samples is None or samples % count:
        raise ValueError(f"{samples} samples in {count} parts")
    size = samples // count
    return [_cut(batch, samples, slice(start, start + size)) for start in range(0, samples, size)]


def _samples(value: Any) -> int | None:
    if torch.is_tensor(value):
        return len(value) if value.ndim else None
    if isinstance(value, list) and value and not isinstance(value[0], (dict, list)):
        return len(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((found for item in items if (found := _samples(item)) is not None), None)


def _cut(value: Any, samples: int, own: slice) -> Any:
    if torch.is_tensor(value):
        return value[own] if value.ndim and len(value) == samples else value
    if isinstance(value, dict):
        return {key: _cut(item, samples, own) for key, item in value.items()}
    if isinstance(value, list) and len(value) == samples:
        return value[own]
    if isinstance(value, (list, tuple)):
        return type(value)(_cut(item, samples, own) for item in value)
    return value


def returned(output: Any, batch: Any) -> Tensor:
    """The loss that the model returns."""
    return output


def labels(output: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(output, batch["criterion.labels"])


@dataclass(frozen=True)
class Remedy:
    """What a refusal says to do.

    Attributes:
        says: words of the refusal, a regular expression.
        done: what is done, as the report names it.
        changed: fields of the entry that it changes; options are added to those that the entry has.
        stages: the number of stages, where it is another.
    """

    says: str
    done: str
    changed: Mapping[str, Any] = field(default_factory=dict)
    stages: int | None = None


def cutting(module: str) -> Remedy:
    """A cut after this module, for two stages."""
    return Remedy("partition=", f'partition=["{module}"]', {"options": {"partition": [module]}})


@dataclass(frozen=True)
class Model:
    """A tiny model with random weights, a batch, and the loss.

    Attributes:
        package: where it comes from, as it is called on PyPI.
        name: of the model, or of the kind of training.
        build: makes it.
        batch: makes a batch; keys that begin with "criterion." are for the loss alone.
        loss: `fn(output, batch)`, the criterion.
        parts: cuts the batch into microbatches, for the unsplit model.
        optimizer: of the model.
        options: of PipelinePlugin, such as num_microbatches=1 for one graph, whose nodes are no samples.
        most: the largest number of stages.
        zeros: whether parameters that are zero stay so.
        remedies: what is done where the entry is refused, one after the other.
    """

    package: str
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], Tensor] = labels
    parts: Callable[[Any, int], Sequence[Any]] = by_samples
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    options: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)
    most: int = 3
    zeros: bool = False
    remedies: Sequence[Remedy] = ()

    def following(self, count: int) -> Model:
        """The entry as its first remedies make it."""
        found = self
        for remedy in self.remedies[:count]:
            options = {**found.options, **remedy.changed.get("options", {})}
            found = replace(found, **{**remedy.changed, "options": options})
        return found

    def __str__(self) -> str:
        return f"{self.package}/{self.name}"

    def made(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model in training mode, without dropout, and with the same weights each time."""
        torch.manual_seed(0)
        model = self.build().train()
        for module in model.modules():
            undropped(module)
        for parameter in model.parameters():
            # Zeros, as in the last layer of a ControlNet, would stop the gradients of what is before them.
            if parameter.requires_grad and not self.zeros and not parameter.any():
                nn.init.normal_(parameter, std=0.02)
        return model if dtype == torch.float32 else model.to(dtype)

    def batches(self, dtype: torch.dtype = torch.float32) -> list[Any]:
        """One for each of two steps."""
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(1)
        return [cast(self.batch(), dtype) for _ in range(2)]


def undropped(module: nn.Module) -> None:
    """Take out what a module draws by itself: its numbers would be others in a pipeline."""
    for name, value in vars(module).items():
        drops = "drop" in name.lower() or (name == "p" and type(module).__name__.lower().startswith(DROPS))
        if drops and isinstance(value, float):
            setattr(module, name, 0.0)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A batch whose floating point tensors are of this dtype."""
    if torch.is_tensor(value):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(cast(item, dtype) for item in value)
    return value


def called(model: nn.Module, batch: Any) -> Any:
    """The model called with a batch, as a pipeline calls it."""
    if isinstance(batch, dict):
        return model(**{key: value for key, value in batch.items() if not key.startswith(CRITERION)})
    if isinstance(batch, (list, tuple)):
        return model(*batch)
    return model(batch)
