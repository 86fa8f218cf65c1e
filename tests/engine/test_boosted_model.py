"""Tests of the boosted model: names, attributes, hooks and keys are the model's own, on a stage and in one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pipeshard.errors import UsageError
from tests.hunt.loops import Sides
from tests.hunt.nets import Net
from tests.pool import Pool

pytestmark = pytest.mark.local


def both(sides: Sides) -> list[Any]:
    """The unsplit model and the boosted one, as a loop has them."""
    return [sides.unsplit, sides.engine.model]


class Annealed(Net):
    """Its loss has a factor, as a number, and a divisor, as a buffer."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) * self.factor / self.scale


def sets_attributes() -> list[str]:
    """The factor and the divisor are set anew at every step; before the last one the factor is deleted."""
    with mock.patch("tests.hunt.loops.Net", Annealed):
        sides = Sides({})
    for step in range(5):
        for model in both(sides):
            model.factor = 1.0 + step
            model.scale = torch.tensor(1.0 + 2 * step)
            if step == 4:
                del model.factor
        sides.train(sides.batches(step))
        sides.step()
    return sides.done()


def freezes_by_name() -> list[str]:
    sides = Sides({})
    for step in range(4):
        for model in both(sides):
            for name, parameter in model.named_parameters():
                if name.startswith(("embed", "layers.0")):
                    parameter.requires_grad = step % 2 == 0
        sides.train(sides.batches(step))
        sides.step()
    return sides.done()


def hooks() -> list[str]:
    sides = Sides({})
    calls: list[list[str]] = [[], []]
    for model, called in zip(both(sides), calls, strict=True):
        model.register_forward_pre_hook(lambda *_, called=called: called.append("before"))
    for step in range(2):
        sides.train(sides.batches(step))
        sides.step()
    assert calls[0] == ["before"] * 2
    assert len(calls[1]) >= 4  # twice a step at least, once for each microbatch
    return sides.done()


def names_and_modes() -> None:
    sides = Sides({})
    boosted = sides.engine.model
    for listed in ("named_parameters", "named_modules", "named_children", "named_buffers"):
        assert [n for n, _ in getattr(boosted, listed)()] == [n for n, _ in getattr(sides.unsplit, listed)()]
    assert boosted.get_submodule("layers.0") is sides.model.layers[0]
    boosted.extra = 1
    assert sides.model.extra == 1 and "extra" not in vars(boosted)
    del boosted.extra
    assert not hasattr(boosted, "extra") and not hasattr(sides.model, "extra")
    assert boosted.eval() is boosted
    assert not any(module.training for module in sides.model.modules())
    assert boosted.train() is boosted
    assert all(module.training for module in sides.model.modules())
    assert boosted.requires_grad_(False) is boosted
    assert not any(parameter.requires_grad for parameter in sides.model.parameters())


def replaces_its_head() -> None:
    sides = Sides({})
    sides.train(sides.batches(0))
    sides.step()
    held = [parameter for _, parameter in sides.held()]
    before = [parameter.detach().clone() for parameter in held]
    sides.engine.model.head = nn.Linear(*reversed(sides.unsplit.head.weight.shape))
    with pytest.raises(UsageError, match=r"head \(in .*Net\) was added, replaced or removed .* before booster.boost"):
        sides.split_loss(sides.batches(1))
    assert all(map(torch.equal, before, held))


def adds_a_parameter() -> None:
    sides = Sides({})
    sides.train(sides.batches(0))
    sides.model.layers.register_parameter("scale", nn.Parameter(torch.ones(())))
    with pytest.raises(UsageError, match=r"layers.scale \(in ModuleList\) was added, replaced or removed"):
        sides.split_loss(sides.batches(1))


def replaces_a_sharded_parameter() -> None:
    sides = Sides({"dp_size": 2, "fsdp": True})
    for _ in range(2):
        sides.train(sides.batches(0))
        sides.step()
    sides.model.layers[0].a.weight = nn.Parameter(torch.zeros_like(sides.unsplit.layers[0].a.weight))
    with pytest.raises(UsageError, match=r"layers.0.a.weight \(in Linear\) was added, replaced or removed"):
        sides.split_loss(sides.batches(1))


def loads_keys_of_a_model() -> None:
    sides = Sides({})
    torch.manual_seed(1)
    weights = {name: torch.randn_like(value) for name, value in sides.unsplit.state_dict().items()}
    head = {name: value for name, value in weights.items() if name.startswith("head")}
    for given, strict in ((weights, True), (head, False)):
        for model in both(sides):
            model.load_state_dict(given, strict=strict)
        sides.train(sides.batches(0))
    assert sides.done() == []


@pytest.mark.turns
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_set_on_a_boosted_model_is_set_on_the_model(pool: Pool, size: int) -> None:
    """`model.coefficient = 0.1` and `model.head = nn.Linear(...)` went to the object around the model, whose forward
    did not see them: it trained on with what was there before."""
    assert pool.run(sets_attributes, size, timeout=120) == [[]] * size
    pool.run(replaces_its_head, size, timeout=120)
    pool.run(adds_a_parameter, size, timeout=120)  # was not noticed on a module without parameters of its own


@pytest.mark.turns
def test_a_sharded_parameter_that_is_replaced_is_refused(pool: Pool) -> None:
    """With fsdp, the new parameter was overwritten in the next step, or trained by nobody."""
    pool.run(replaces_a_sharded_parameter, 2)


@pytest.mark.turns
@pytest.mark.parametrize("size", [1, 2])
def test_names_of_a_boosted_model_are_the_models(pool: Pool, size: int) -> None:
    """They began with `module.`: what a loop froze by `name.startswith("layers.0")` was trained on, and weights that
    it loaded with strict=False were dropped."""
    assert pool.run(freezes_by_name, size, timeout=120) == [[]] * size
    assert pool.run(hooks, size, timeout=120) == [[]] * size
    pool.run(names_and_modes, size, timeout=120)
    if size == 1:
        pool.run(loads_keys_of_a_model, 1, timeout=120)
