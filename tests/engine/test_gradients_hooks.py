"""Tests of gradients that user code changes, requests or hooks: exact, or refused before a parameter changes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from torch import Tensor, nn
from torch.nn import functional as F

from pipeshard import PipelinePlugin
from pipeshard.errors import TraceError, UsageError
from pipeshard.split.materialize import is_released
from tests.pool import Pool
from tests.unsplit import largest_error

pytestmark = pytest.mark.local


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    tied = sparse = False
    between: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, sparse=self.sparse)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 11)
        if self.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(self.between(x)).flatten(0, 1), labels.flatten())}


class Tied(Net):
    tied = True


class Sparse(Net):
    sparse = True


class SparseTied(Tied):
    sparse = True


def data(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 11, (4, 3), generator=generator) for name in ("ids", "labels")}


class Both:
    """A model unsplit, and split over two stages."""

    def __init__(self, kind: type[Net], prepare: Callable[[Any], Any] | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.alone = kind()
        model = copy.deepcopy(self.alone)
        for each in (self.alone, model) if prepare is not None else ():
            prepare(each)
        self.models = [self.alone, model]
        self.plugin = PipelinePlugin(
            2, num_microbatches=2, dry_run_input=data(), partition=[3, 3], verify=False, **options
        )
        self.booster = Booster(plugin=self.plugin)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)

    def backward(self, seed: int = 0) -> None:
        self.alone(**data(seed))["loss"].backward()
        self.booster.execute_pipeline(iter([data(seed)]), self.model, None, self.optimizer)

    def error(self) -> float:
        """The largest one of a held gradient."""
        expected = {name: parameter.grad for name, parameter in self.alone.named_parameters()}
        parameters = [(name, p) for name, p in self.models[1].named_parameters() if not is_released(p)]
        for name, parameter in parameters:
            assert (parameter.grad is None) == (expected[name] is None), name
        held = [(name, p) for name, p in parameters if p.grad is not None]
        assert held
        return largest_error(float((p.grad.to_dense() - expected[name].to_dense()).abs().max()) for name, p in held)


def changed_between_calls() -> float:
    """What is tied was told by identity: a gradient that was replaced (clamped, scaled) was summed once more."""

    def clamped(p: nn.Parameter) -> None:
        p.grad = p.grad.clamp(-0.01, 0.01)

    def scaled(p: nn.Parameter) -> None:
        p.grad.data = p.grad.data * 0.5

    def zeros(p: nn.Parameter) -> None:
        p.grad = torch.zeros_like(p.grad)

    def in_place(p: nn.Parameter) -> None:
        p.grad.clamp_(-0.01, 0.01)

    errors = []
    both = Both(Tied)
    for change in (clamped, scaled, zeros, in_place):
        for seed in range(2):
            both.backward(seed)
            for model in both.models if seed == 0 else ():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        change(parameter)
        errors.append(both.error())
        both.models[0].embed.weight.requires_grad_(False)  # frozen, what has piled up stays
        both.models[1].embed.weight.requires_grad_(False)
        both.backward(2)
        errors.append(both.error())
        for model in both.models:
            model.zero_grad()
            model.embed.weight.requires_grad_(True)
    both.backward()
    with both.booster.no_sync(both.model):
        both.backward(1)
    for parameter in both.models[1].parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    with pytest.raises(UsageError, match=r"embed.weight was modified before it was summed over the ranks"):
        both.backward(2)
    for kind in (Sparse, SparseTied):  # the rows of a lookup, and a head's whole gradient, in one bucket
        other = Both(kind, max_norm=100.0)
        other.backward()
        errors.append(other.error())
        other.optimizer.step()  # with a norm
    return largest_error(errors)


@pytest.mark.turns
def test_gradients_may_be_changed_between_two_calls(pool: Pool) -> None:
    assert largest_error(pool.run(changed_between_calls, 2)) < 1e-6


def of_the_other_model() -> float:
    """`sync_grads(model)` and `no_sync(model)` acted on the model that was boosted last."""
    both = Both(Tied)
    booster, plugin = both.booster, both.plugin
    torch.manual_seed(1)
    other, *_ = booster.boost(Tied(), None)
    with booster.no_sync(both.model):
        assert not both.model.pipeline.synchronizes and other.pipeline.synchronizes
        both.backward()
    plugin.sync_grads(both.model)
    return both.error()


def test_two_models_of_one_plugin(pool: Pool) -> None:
    assert largest_error(pool.run(of_the_other_model, 2)) < 1e-6


def listening(prepare: Callable[[Net], Any], kind: type[Net] = Net) -> None:
    both = Both(kind, prepare)
    held = [p for p in both.models[1].parameters() if not is_released(p)]
    before = [p.detach().clone() for p in held]
    with pytest.raises(UsageError, match="hook") as caught:
        both.backward()
    assert all(torch.equal(p, q) for p, q in zip(before, held, strict=True))
    raise caught.value


def clamp_parameter(model: Net) -> None:
    """A hook that is not linear saw each stage's part of a tied gradient."""
    model.embed.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))


def clamp_accumulated(model: Net) -> None:
    def clamp(parameter: Tensor) -> None:
        parameter.grad.clamp_(-0.01, 0.01)

    model.embed.weight.register_post_accumulate_grad_hook(clamp)


def step_in_backward(model: Net) -> None:
    """An optimizer within the backward pass stepped after each microbatch, of biases without a word."""

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)
        parameter.grad = None

    for layer in model.layers:
        layer.b.bias.register_post_accumulate_grad_hook(step)


def hook_last_unit(model: Net) -> None:
    """The one on a unit with which a stage ends never ran: backward begins behind it."""
    model.layers[1].register_full_backward_hook(lambda module, inputs, outputs: (0.5 * inputs[0],))


def prehook_last_unit(model: Net) -> None:
    model.layers[1].register_full_backward_pre_hook(lambda module, outputs: (0.5 * outputs[0],))


def hook_whole_model(model: Net) -> None:
    model.register_full_backward_hook(lambda module, inputs, outputs: None)


def listened() -> float:
    """Hooks that have all that they are about on one stage run as ever."""

    def prepare(model: Net) -> None:
        model.layers[0].register_full_backward_hook(lambda module, inputs, outputs: (0.5 * inputs[0],))
        model.layers[1].b.register_full_backward_pre_hook(lambda module, outputs: (0.3 * outputs[0],))
        model.layers[2].a.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))

    both = Both(Net, prepare)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipeshard").addHandler(handler)
    for half in (0, 1):  # the microbatches one after the other, as hooks see them
        part = {name: tensor[2 * half : 2 * half + 2] for name, tensor in data().items()}
        (0.5 * both.alone(**part)["loss"]).backward()
    both.booster.execute_pipeline(iter([data()]), both.model, None, both.optimizer)
    logging.getLogger("pipeshard").removeHandler(handler)
    warned = [text for text in said if text.startswith("gradient hooks, such as the one on layers.2.a.weight, run on")]
    assert len(warned) == (torch.distributed.get_rank() == 1)
    return both.error()


@pytest.mark.turns
def test_hooks(pool: Pool) -> None:
    assert largest_error(pool.run(listened, 2)) < 1e-6
    for prepare, kind, message in (
        (clamp_parameter, Tied, "embed.weight has a gradient hook, but several ranks hold"),
        (clamp_accumulated, Tied, "embed.weight has a gradient hook, but several ranks hold"),
        (
            step_in_backward,
            Net,
            ".b.bias has a hook (register_post_accumulate_grad_hook) that would be called after each microbatch",
        ),
        (hook_last_unit, Net, "layers.1 (Block) has a backward hook"),
        (prehook_last_unit, Net, "layers.1 (Block) has a backward hook"),
        (hook_whole_model, Net, "the model (Net) has a backward hook"),
    ):
        for told in pool.run_expecting(UsageError, listening, 2, prepare, kind):
            assert message in told, told


def hooked_in_all() -> None:
    """A step with a backward hook that is registered for all modules at once."""
    both = Both(Net)
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, inputs, outputs: None)
    try:
        both.booster.execute_pipeline(iter([data()]), both.model, None, both.optimizer)
    finally:
        handle.remove()


@pytest.mark.turns
def test_backward_hooks_of_all_modules_are_refused(pool: Pool) -> None:
    """A logger of gradients saw none, or a part, at the modules next to a cut, and nothing said so."""
    for told in pool.run_expecting(UsageError, hooked_in_all, 2):
        assert "(Net) has a backward hook" in told and "register_module_full_backward_hook" in told, told


class Force(nn.Module):
    """Forces of a potential, by autograd in the model's own forward: from a stage that has the end of the graph alone
    they were zeros."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layers = how, nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = x.detach().requires_grad_()
        energy = x
        for layer in self.layers:
            energy = layer(energy)
        if self.how == "hook":
            energy.register_hook(lambda g: 0.1 * g)
            return {"loss": (energy - labels).square().mean()}
        (force,) = torch.autograd.grad(energy.square().sum(), x, create_graph=True)
        return {"loss": (force - labels).square().mean()}


def forces(pp_size: int, how: str) -> float:
    torch.manual_seed(0)
    alone = Force(how)
    model, batch = copy.deepcopy(alone), {"x": torch.randn(4, 8), "labels": torch.randn(4, 8)}
    plugin = PipelinePlugin(pp_size, num_microbatches=1, dry_run_input=batch)
    boosted, optimizer, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = plugin.execute_pipeline(iter([dict(batch)]), boosted, None, optimizer)["loss"]
    expected = alone(**batch)["loss"]
    expected.backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    errors = [(p.grad - q.grad).abs().max() for p, q in pairs if not is_released(p)]
    return float(abs(loss - expected)) + largest_error(errors)


@pytest.mark.turns
def test_gradients_asked_for_in_forward(pool: Pool) -> None:
    for size, how in ((1, "grad"), (1, "hook"), (2, "hook")):
        assert largest_error(pool.run(forces, size, size, how)) < 1e-6
    for told in pool.run_expecting(TraceError, forces, 2, 2, "grad"):
        assert "autograd.grad(energy" in told and "a separate module" in told, told
