"""Loops: training loops as users write them, each compared with the same loop in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import pipeshard
from pipeshard import PipelinePlugin
from pipeshard.split.materialize import is_released
from tests.hunt.nets import Net, data

Batch = dict[str, Tensor]
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "two stages": {},
    "zbv": {"schedule": "zbv"},
    "replicas": {"dp_size": 2},
    "ZeRO-1": {"dp_size": 2, "zero_stage": 1},
    "FSDP": {"dp_size": 2, "fsdp": True},
}


def whole(tensor: Any) -> Tensor:
    result: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return result


class Sides:
    """A model that is split by the plugin, and the same one unsplit, which gets all replicas' batches."""

    def __init__(
        self,
        layout: Mapping[str, Any],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        criterion: Any = None,
        **options: Any,
    ) -> None:
        def sgd(model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Net())
        self.unsplit, model = models
        self.reference = (optimizer or sgd)(self.unsplit)
        size = torch.distributed.get_world_size() // layout.get("dp_size", 1)
        options = {"num_microbatches": 2, "dry_run_input": data(rows=6), **layout, **options}
        self.plugin = PipelinePlugin(pp_size=size, **options)
        mine = (optimizer or sgd)(model)
        self.engine = pipeshard.initialize(model, mine, criterion, plugin=self.plugin)
        self.optimizer = self.engine.optimizer
        self.criterion, self.found = criterion, list[str]()

    @property
    def model(self) -> Any:
        return self.engine.model.unwrap()

    @property
    def both(self) -> list[Any]:
        return [self.unsplit, self.model]

    def batches(self, seed: int, rows: int = 4, length: int = 6) -> list[Batch]:
        """One for each replica, the second with a sample more."""
        return [data(seed + 100 * k, rows + k, length) for k in range(self.plugin.dp_size)]

    def own(self, *steps: list[Batch]) -> Iterator[Batch]:
        replica = self.plugin.grid.replica if self.plugin.dp_size > 1 else 0
        return iter([{name: leaf.clone() for name, leaf in batches[replica].items()} for batches in steps])

    def loss(self, batches: list[Batch], weight: float = 1.0) -> float:
        """That of the unsplit model, with its backward."""
        batch = {name: torch.cat([each[name] for each in batches]) for name in batches[0]}
        output = self.unsplit(batch["ids"], batch["labels"])
        loss = output["loss"] if self.criterion is None else self.criterion(output, batch)
        loss = (loss[0] / loss[1] if isinstance(loss, tuple) else loss) * weight
        loss.backward()
        return float(loss)

    def split_loss(self, batches: list[Batch]) -> float:
        return float(self.engine.execute_pipeline(self.own(batches))["loss"])

    def compare(self, loss: float, expected: float) -> None:
        """Loss, norm and every gradient of this rank."""
        if not abs(loss - expected) <= 2e-5 * max(1, abs(expected)):
            self.found.append(f"loss {loss}, unsplit {expected}")
        wanted = {name: parameter.grad for name, parameter in self.unsplit.named_parameters()}
        norm = torch.nn.utils.get_total_norm([gradient for gradient in wanted.values() if gradient is not None])
        if not torch.isclose(torch.as_tensor(self.optimizer.get_grad_norm()), norm, rtol=1e-4):
            self.found.append(f"norm {float(self.optimizer.get_grad_norm())}, unsplit {float(norm)}")
        for name, parameter in self.held():
            gradient, right = whole(parameter.grad), wanted[name]
            if gradient is None or right is None:
                if any(g is not None and g.abs().max() > 0 for g in (gradient, right)):
                    self.found.append(f"{name} has a gradient on one side only")
            elif not torch.allclose(gradient, right, rtol=1e-4, atol=1e-6):
                self.found.append(f"gradient of {name}")

    def held(self) -> list[tuple[str, Any]]:
        return [(name, p) for name, p in self.model.named_parameters() if not is_released(p)]

    def step(self) -> None:
        for optimizer in (self.reference, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, batches: list[Batch]) -> None:
        self.compare(self.split_loss(batches), self.loss(batches))

    def done(self) -> list[str]:
        wanted = dict(self.unsplit.named_parameters())
        for name, parameter in self.held():
            if not torch.allclose(whole(parameter.detach()), wanted[name], rtol=1e-4, atol=1e-5):
                self.found.append(f"{name} at the end")
        return self.found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def accumulates(layout: Mapping[str, Any], syncs: bool = True) -> list[str]:
    """Three batches of other sizes a step; with `no_sync`, and one step that syncs by hand."""
    sides = Sides(layout)
    for step in range(3):
        loss = expected = 0.0
        for k, rows in enumerate((4, 7, 3)):
            batches = sides.batches(10 * step + k, rows)
            late = not syncs and (k < 2 or step == 1)
            with sides.engine.no_sync(sides.engine.model) if late else contextlib.nullcontext():
                loss += sides.split_loss(batches)
            expected += sides.loss(batches)
        if not syncs and step == 1:
            sides.plugin.sync_grads(sides.engine.model)
        sides.compare(loss, expected)
        sides.step()
    return sides.done()


def accumulates_without_sync(layout: Mapping[str, Any]) -> list[str]:
    return accumulates(layout, syncs=False)


def takes_several_batches(layout: Mapping[str, Any]) -> list[str]:
    sides = Sides(layout)
    for step in range(3):
        several = [sides.batches(10 * step + k, 4 + k, 4 + k) for k in range(3)]
        result = sides.engine.execute_pipeline(sides.own(*several), num_batches=3, weight=1 / 3)
        sides.compare(float(result["loss"]), sum(sides.loss(batches, 1 / 3) for batches in several))
        sides.step()
    return sides.done()


def evaluates_between(layout: Mapping[str, Any]) -> list[str]:
    sides = Sides(layout)
    for step in range(3):
        first, second = sides.batches(step), sides.batches(step + 7, 2)
        loss, expected = sides.split_loss(first), sides.loss(first)
        sides.model.eval()
        with torch.no_grad():
            asked = [{"ids": data(70 + step, 3, 9)["ids"], "labels": data(70 + step, 3, 9)["labels"]}]
            got = sides.engine.execute_pipeline(sides.own(asked * sides.plugin.dp_size), return_outputs=True)
            wanted = sides.unsplit(**asked[0])["logits"]
        if got["outputs"] is not None and not torch.allclose(got["outputs"]["logits"], wanted, atol=1e-5):
            sides.found.append("outputs of the evaluation")
        sides.model.train()
        sides.compare(loss + sides.split_loss(second), expected + sides.loss(second))
        sides.step()
    return sides.done()


def freezes(layout: Mapping[str, Any]) -> list[str]:
    sides = Sides(layout, adamw)
    for step in range(5):
        for model in sides.both:
            model.layers[0].requires_grad_(step not in (1, 2))
            model.embed.requires_grad_(step != 2)
            model.head.requires_grad_(step not in (3, 4))
            model.layers[3].a.weight.requires_grad_(step % 2 == 0)
        sides.train(sides.batches(step))
        sides.step()
    return sides.done()


def keeps_gradients(layout: Mapping[str, Any]) -> list[str]:
    """Freezes a layer that has a gradient still, and sets gradients to zeros, not to None."""
    sides = Sides(layout, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(4):
        for model in sides.both:
            model.layers[0].requires_grad_(step != 2)
        sides.train(sides.batches(step))
        for optimizer in (sides.reference, sides.optimizer):
            optimizer.step()
            if step % 2:
                optimizer.zero_grad(set_to_none=False)
    return sides.done()


def adds_a_group(layout: Mapping[str, Any]) -> list[str]:
    def two_groups(model: Any) -> torch.optim.Optimizer:
        groups = [{"params": [*model.head.parameters()], "lr": 0.05}, {"params": [*model.layers[1:].parameters()]}]
        return torch.optim.AdamW(groups, lr=0.01)

    sides = Sides(layout, two_groups)
    optimizers = (sides.reference, sides.optimizer)
    rates = [lambda k: 0.5**k, lambda k: 1.0 + k]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rates) for optimizer in optimizers]
    for step in range(4):
        if step == 2:
            for model, optimizer in zip(sides.both, optimizers, strict=True):
                late = [*model.embed.parameters(), *model.layers[0].parameters()]
                optimizer.add_param_group({"params": late, "lr": 0.02})
        sides.train(sides.batches(step))
        sides.step()
        if step < 2:
            for schedule in schedules:
                schedule.step()
    return sides.done()


class Scaled:
    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, output: Any, batch: Any) -> Any:
        return F.cross_entropy(output["logits"].flatten(0, 1), batch["labels"].flatten()) * self.factor


def squares(output: Any, batch: Any) -> Any:
    return output["logits"].pow(2).mean()


def changes_its_criterion(layout: Mapping[str, Any]) -> list[str]:
    sides = Sides(layout, criterion=Scaled())
    for step, criterion in enumerate([Scaled(), Scaled(2.0), squares, Scaled()]):
        sides.criterion, batches = criterion, sides.batches(step)
        result = sides.engine.execute_pipeline(sides.own(batches), sides.engine.model, criterion, sides.optimizer)
        sides.compare(float(result["loss"]), sides.loss(batches))
        sides.step()
    return sides.done()


def weighted(output: Any, batch: Any) -> Any:
    losses = F.cross_entropy(output["logits"].transpose(1, 2), batch["labels"], reduction="none")
    return (losses * batch["criterion.weight"]).sum(), batch["criterion.weight"].sum()


def weighs_tokens(layout: Mapping[str, Any]) -> list[str]:
    def with_weights(batch: Batch) -> Batch:
        return {**batch, "criterion.weight": (batch["ids"] % 5 + 1) / 5}

    sides = Sides(layout, criterion=weighted, verify=False, dry_run_input=with_weights(data(rows=6)))
    for step in range(3):
        sides.train([with_weights(batch) for batch in sides.batches(step)])
        sides.step()
    return sides.done()


def clips(layout: Mapping[str, Any]) -> list[str]:
    sides = Sides(layout, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), max_norm=0.3)
    for step in range(4):
        sides.train(sides.batches(step))
        torch.nn.utils.clip_grad_norm_(sides.unsplit.parameters(), 0.3)
        sides.step()
    return sides.done()


def averages_weights(layout: Mapping[str, Any]) -> list[str]:
    """Keeps an average of the weights beside them, and goes on from it."""
    sides = Sides(layout)
    averages = [{name: p.detach().clone() for name, p in of} for of in (sides.unsplit.named_parameters(), sides.held())]
    for step in range(4):
        sides.train(sides.batches(step))
        sides.step()
        for average, of in zip(averages, (dict(sides.unsplit.named_parameters()), dict(sides.held())), strict=True):
            for name, value in average.items():
                value.lerp_(of[name].detach(), 0.5)
                if step == 2:
                    with torch.no_grad():
                        of[name].copy_(value)
    return sides.done()


def steps_by_a_closure(layout: Mapping[str, Any]) -> list[str]:
    sides = Sides(layout)
    for step in range(3):
        batches, losses = sides.batches(step), []

        def closure(batches: Any = batches, losses: Any = losses) -> Tensor:
            sides.optimizer.zero_grad()
            losses.append(sides.split_loss(batches))
            return torch.tensor(losses[-1])

        expected = sides.loss(batches)
        sides.optimizer.step(closure)
        sides.compare(losses[-1], expected)
        sides.reference.step()
        for optimizer in (sides.reference, sides.optimizer):
            optimizer.zero_grad()
    return sides.done()


LOOPS: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "accumulates": accumulates,
    "accumulates without sync": accumulates_without_sync,
    "takes several batches": takes_several_batches,
    "evaluates between": evaluates_between,
    "freezes": freezes,
    "keeps gradients": keeps_gradients,
    "adds a group": adds_a_group,
    "changes its criterion": changes_its_criterion,
    "weighs tokens": weighs_tokens,
    "clips": clips,
    "averages weights": averages_weights,
    "steps by a closure": steps_by_a_closure,
}
