"""Training: a user's script as data, run split across the ranks and unsplit, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeshard
from pipeshard.split.materialize import is_released
from tests.hunt.nets import Net, data

RATE = 0.1
FLOOR = 0.02  # smaller gradients are compared with this: a bias before a batch norm has none but by rounding
CLOSE = 1e-6  # relative to the loss, and to the largest element of each gradient and parameter
Batch = Mapping[str, Any]


def ordinary() -> list[Batch]:
    return [data(seed) for seed in range(3)]


@dataclass(frozen=True)
class Training:
    """`make()` trained on `batches`, with a plugin that has these `options`. `between(step, model)` runs before each
    step. Unsplit, each step takes `parts` parts of the batch by their first dimension, and the mean of their losses."""

    make: Callable[[], nn.Module] = Net
    options: Mapping[str, Any] = field(default_factory=dict)
    criterion: Callable[[nn.Module], Any] | None = None
    batches: Callable[[], Sequence[Batch]] = ordinary
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    between: Callable[[int, nn.Module], object] | None = None
    prepare: Callable[[nn.Module], object] | None = None
    parts: int = 1


def run(training: Training) -> list[str]:
    """What differs on this rank from the unsplit model. Raises what the library raises."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(training.make())
        if training.prepare is not None:
            training.prepare(models[-1])
    unsplit, model = models
    criteria = [None if training.criterion is None else training.criterion(one) for one in models]
    optimizers = [optimizer_of(training, one) for one in models]
    batches = training.batches()
    engine = pipeshard.initialize(
        model,
        optimizers[1],
        criteria[1],
        **{"pp_size": dist.get_world_size(), "num_microbatches": 2, "dry_run_input": dict(batches[0])}
        | dict(training.options),
    )
    found: list[str] = []
    for step, batch in enumerate(batches):
        if training.between is not None:
            training.between(step, unsplit)
            training.between(step, engine.model.unwrap())
        loss = engine.execute_pipeline(iter([copy.deepcopy(batch)]))["loss"]
        expected = accumulate(unsplit, criteria[0], batch, training.parts)
        found += [f"step {step}: {difference}" for difference in compare(loss, expected, engine, unsplit)]
        for one in (optimizers[0], engine.optimizer):
            one.step()
            one.zero_grad()
    wanted = dict(unsplit.named_parameters())
    for name, parameter in engine.model.unwrap().named_parameters():
        if not is_released(parameter) and far(parameter.detach(), wanted[name].detach()):
            found.append(f"{name} after all steps")
    return found


def optimizer_of(training: Training, model: nn.Module) -> torch.optim.Optimizer:
    if training.optimizer is not None:
        return training.optimizer(model)
    return torch.optim.SGD(model.parameters(), lr=RATE)


def accumulate(model: nn.Module, criterion: Any, batch: Batch, parts: int) -> Tensor:
    """The unsplit model's loss, after its backward pass."""
    total = torch.zeros(())
    for k in range(parts):
        part = copy.deepcopy(batch) if parts == 1 else {name: leaf.chunk(parts)[k] for name, leaf in batch.items()}
        output = model(**{name: leaf for name, leaf in part.items() if not name.startswith("criterion.")})
        loss = output["loss"] if criterion is None else criterion(output, part)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        (loss / parts).backward()
        total = total + loss.detach() / parts
    return total


def compare(loss: Tensor, expected: Tensor, engine: Any, unsplit: nn.Module) -> list[str]:
    """What differs in the loss and in the gradients that this rank has."""
    wanted = dict(unsplit.named_parameters())
    found = []
    if not abs(float(loss) - float(expected)) <= CLOSE * abs(float(expected)):
        found.append(f"loss {float(loss)}, unsplit {float(expected)}")
    for name, parameter in engine.model.unwrap().named_parameters():
        if is_released(parameter):
            continue
        gradient, right = parameter.grad, wanted[name].grad
        if (gradient is None) != (right is None):
            found.append(f"{name} has {'no' if gradient is None else 'a'} gradient")
        elif gradient is not None and right is not None and far(gradient, right):
            found.append(f"gradient of {name} by {float((gradient - right).abs().max()):.2g}")
    return found


def far(value: Tensor, right: Tensor) -> bool:
    return not bool((value - right).abs().max() <= CLOSE * right.abs().max().clamp(min=FLOOR))
