"""Tests of the training loop: what it may do with a boosted model, and what is refused before an update."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeshard
from pipeshard.config import PipelineConfig
from pipeshard.engine.optimizer_trial import SPARED, gap, own_methods
from pipeshard.entry import Engine
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.split.materialize import is_released
from tests.hunt.nets import Net, data
from tests.pool import Pool

pytestmark = pytest.mark.local


def boost(model: nn.Module, optimizer: Any = None, **options: Any) -> Engine:
    arguments = {"pp_size": dist.get_world_size(), "num_microbatches": 2, "dry_run_input": data(0), "verify": False}
    return pipeshard.initialize(model, optimizer, **arguments | options)


def seeded(kind: type[nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return kind()


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters() if not is_released(parameter)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


class Ahead(torch.optim.Optimizer):
    """Contains another optimizer, with the same groups, as SAM and Lookahead do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


def foreign_steps() -> None:
    """Optimizers that step on a boosted model: those of nobody are refused, and nothing has changed."""
    model = seeded()
    early, passed = sgd(model.parameters()), sgd(model.parameters())
    engine = boost(model, passed, max_norm=0.01)
    before = values(model)
    engine.execute_pipeline(iter([data(1)]))
    for foreign in (early, sgd(engine.model.parameters()), sgd(passed.param_groups[0]["params"])):
        with pytest.raises(
            UsageError, match=r"SGD was not boosted, but its step would update .* Pass the optimizer to"
        ):
            foreign.step()
    with pytest.raises(
        UsageError, match=r"cannot step this SGD directly: it was passed to boost .*, and its own step does not clip"
    ):
        passed.step()
    assert all(map(torch.equal, before, values(model)))
    engine.optimizer.step()
    assert not all(map(torch.equal, before, values(model)))


def boosted_later() -> None:
    """A model boosted without an optimizer, and the remedy that the error names."""
    model, unsplit = seeded(), seeded()
    engine = boost(model)
    engine.execute_pipeline(iter([data(1)]))
    optimizer = sgd(engine.model.parameters())
    with pytest.raises(UsageError, match=r"engine\.boost"):
        optimizer.step()
    engine.boost(engine.model, optimizer)
    theirs = sgd(unsplit.parameters())
    for seed in range(2):
        loss = engine.execute_pipeline(iter([data(seed)]))["loss"]
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        theirs.zero_grad()
        (expected := unsplit(**data(seed))["loss"]).backward()
        theirs.step()
        torch.testing.assert_close(loss.as_subclass(Tensor), expected.detach())
    with pytest.raises(UsageError, match="StepLR was passed without the SGD"):
        pipeshard.initialize(seeded(), None, lr_scheduler=torch.optim.lr_scheduler.StepLR(theirs, 1), pp_size=1)


def unconcerned() -> None:
    """Another model's optimizer steps as ever, and so does one around or inside of a boosted optimizer."""
    model, other = seeded(), nn.Linear(2, 2)
    outer = Ahead(sgd(model.parameters()))
    engine = boost(model, outer, max_norm=1.0)
    before = values(model)
    free = sgd(other.parameters())
    for wrapped in (engine.optimizer, Ahead(engine.optimizer)):
        engine.execute_pipeline(iter([data(1)]))
        other(torch.ones(2)).sum().backward()
        free.step()
        wrapped.step()
        engine.optimizer.zero_grad()
    assert not any(map(torch.equal, before, values(model)))
    with pytest.raises(UsageError, match="cannot step this SGD directly: it was passed to boost"):
        outer.base.step()


@pytest.mark.turns
def test_an_optimizer_that_was_not_boosted_is_refused_in_its_first_step(pool: Pool) -> None:
    """One made after boost ignored max_norm and the loss scale without an error; one beside a model that was boosted
    without an optimizer trained nothing at all."""
    for function in (foreign_steps, boosted_later, unconcerned):
        for world in (1, 2):
            pool.run(function, world, timeout=120)


def unfreezes(precision: str, options: dict[str, Any], adds: bool) -> list[str]:
    """Steps of a model, part of which is unfrozen after boost, with fp32 values that small updates add up in."""
    model = seeded()
    model.layers.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad] if adds else model.parameters()
    engine = boost(model, torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0), precision=precision, **options)
    model = engine.model.unwrap()
    for step in range(20):
        if step == 2:
            model.layers.requires_grad_(True)
            if adds:
                engine.optimizer.add_param_group({"params": list(model.layers.parameters())})
        if step == 15:
            model.layers[0].requires_grad_(False)
        engine.execute_pipeline(iter([data(step % 2)]))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    wrong = []
    for name, weight in engine.optimizer.weights.items():
        owned = weight.owner in (None, engine.optimizer.grid.replica)
        if owned and weight.master.dtype is not torch.float32:
            wrong.append(f"{name} has {weight.master.dtype}")
        if owned and "layers" in name:
            moved = (weight.master.detach() - weight.parameter.detach().float()).abs().max()
            wrong += [] if 0 < moved < 1e-2 else [f"{name} has no values of its own: {moved}"]
    return wrong


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("precision", "world", "options"),
    [("bf16", 1, {}), ("bf16", 2, {}), ("fp16", 2, {}), ("bf16", 2, {"pp_size": 1, "dp_size": 2, "zero_stage": 1})],
)
def test_what_is_unfrozen_after_boost_is_updated_in_fp32(
    pool: Pool, precision: str, world: int, options: dict[str, Any]
) -> None:
    """It was updated in 16 bits, where small updates round to nothing (bf16), or gave inf (fp16)."""
    for adds in (False, True):
        assert pool.run(unfreezes, world, precision, options, adds, timeout=120) == [[]] * world


def modes() -> None:
    """The mode that a model had at boost is still its own, and what it says of itself is true."""
    model = seeded().eval()
    engine = boost(model)
    assert not engine.model.training and not model.training
    engine.model.train()
    assert engine.model.training and model.training and model.layers[0].training
    model.eval()
    assert not engine.model.training
    assert engine[0] is engine.model and len(engine) == 5 and engine[1:3] == (None, None)


def frozen() -> None:
    """Everything frozen after boost is nothing to train."""
    model = seeded()
    engine = boost(model, sgd(model.parameters()))
    engine.model.requires_grad_(False)
    with pytest.raises(UsageError, match=r"every trainable parameter was frozen .* after the model was boosted"):
        engine.execute_pipeline(iter([data(0)]))
    with torch.no_grad():
        engine.execute_pipeline(iter([data(0)]))
    model.head.requires_grad_(True)
    engine.execute_pipeline(iter([data(0)]))


def without_labels() -> None:
    """A whole batch without labels has the loss of the unsplit model, nan, and one microbatch of these counts 0."""
    model, unsplit = seeded(), seeded()
    engine = boost(model, sgd(model.parameters()))
    batches = [data(0), data(1)]
    batches[0]["labels"][:] = -100
    batches[1]["labels"][: len(batches[1]["labels"]) // 2] = -100
    for batch in batches:
        loss = engine.execute_pipeline(iter([copy.deepcopy(batch)]))["loss"].as_subclass(Tensor)
        expected = unsplit(**batch)["loss"]
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), equal_nan=True)
        for ours, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
            if not is_released(ours):
                torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)


def scaler() -> None:
    """An enabled GradScaler around a boosted optimizer."""
    model = seeded()
    engine = boost(model, sgd(model.parameters()))
    engine.execute_pipeline(iter([data(0)]))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(UsageError, match="remove GradScaler"):
        scaler.step(engine.optimizer)
    torch.amp.GradScaler("cpu", enabled=False).step(engine.optimizer)


def hooked() -> None:
    """A hook on every parameter."""
    model, unsplit = seeded(), seeded()
    engine = boost(model, sgd(model.parameters()))
    for one in (engine.model, unsplit):
        for parameter in one.parameters():
            parameter.register_hook(lambda gradient: gradient / 2)
    engine.execute_pipeline(iter([data(0)]))
    unsplit(**data(0))["loss"].backward()
    for ours, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
        if not is_released(ours):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_hooks_on_all_parameters(pool: Pool) -> None:
    """A hook on a parameter of another stage ended in torch's error about tensors that do not require a gradient."""
    pool.run(hooked, 2, timeout=120)


@pytest.mark.turns
def test_modes_frozen_models_labels_and_scalers(pool: Pool) -> None:
    """`training` was True for a model in eval mode, a frozen model trained on, and a batch without labels gave 0."""
    for function in (modes, frozen, without_labels, scaler):
        pool.run(function, 2, timeout=120)


def other_seeds(partly: bool) -> list[str]:
    """What differs from the first rank's model, unsplit, if every rank builds its model with another seed."""
    torch.manual_seed(0)
    unsplit = Net()
    torch.manual_seed(dist.get_rank())
    model = Net()
    if partly and dist.get_rank():
        model.layers.to("meta")
    engine = boost(model, sgd(model.parameters()), init_weights=partly)
    loss = float(engine.execute_pipeline(iter([data(0)]))["loss"])
    wrong = [] if partly or abs(loss - float(unsplit(**data(0))["loss"])) < 1e-5 else [f"loss {loss}"]
    theirs = dict(unsplit.named_parameters())
    held = [(name, p) for name, p in model.named_parameters() if not is_released(p)]
    compared = [(name, p) for name, p in held if not partly or "layers" not in name]
    return wrong + [name for name, parameter in compared if not torch.equal(parameter, theirs[name])]


@pytest.mark.turns
def test_every_rank_takes_the_weights_of_the_first(pool: Pool) -> None:
    """Each stage kept its part of another model, if ranks were seeded differently."""
    for partly in (False, True):
        assert pool.run(other_seeds, 2, partly, timeout=120) == [[], []]


class Projected(Net):
    """Adds random tensors that no state dict has to its logits: a buffer, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(self.head.out_features), persistent=False)
        self.scale = torch.rand(self.head.out_features)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits * self.scale + self.shift, labels)


def other_buffers() -> None:
    unsplit = seeded(Projected)
    torch.manual_seed(dist.get_rank())
    engine = boost(Projected())
    loss = engine.execute_pipeline(iter([data(0)]))["loss"]
    torch.testing.assert_close(loss.as_subclass(Tensor), unsplit(**data(0))["loss"].detach())


def test_every_rank_takes_the_buffers_of_the_first(pool: Pool) -> None:
    """Buffers that a state dict leaves out, and tensors in attributes, stayed those of each rank's own seed."""
    pool.run(other_buffers, 2)


class Positions(nn.Module):
    """Has buffers alone, as in tutorials of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("at", torch.randn(64, 1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.ones(2)))
        self.register_buffer("fine", torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.at[: x.shape[1]] * self.fine


class Placed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.embed_of, self.embed = self.embed, nn.Sequential(self.embed, self.positions)


def lowered(precision: str) -> list[str]:
    """The dtypes of a model's buffers, and its loss, which unsplit is that of `model.bfloat16()`."""
    model, dtype = seeded(Placed), {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    unsplit = copy.deepcopy(model)
    unsplit._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    engine = boost(model, sgd(model.parameters()), precision=precision)
    loss = float(engine.execute_pipeline(iter([data(0)]))["loss"])
    expected = float(unsplit(**data(0))["loss"])
    found = [] if abs(loss - expected) < 0.02 * expected else [f"loss {loss}, not {expected}"]
    theirs = dict(unsplit.named_buffers())
    return found + [f"{n} is {b.dtype}" for n, b in model.named_buffers() if b.dtype is not theirs[n].dtype]


@pytest.mark.turns
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_buffers_of_modules_without_parameters_are_cast(pool: Pool, precision: str) -> None:
    """They stayed in fp32, so the next layer failed with "mat1 and mat2 must have the same dtype"."""
    for world in (1, 2):
        assert pool.run(lowered, world, precision, timeout=120) == [[]] * world


@pytest.mark.parametrize("value", ["1.0", float("nan"), -1.0, True])
def test_a_max_norm_that_clips_by_nothing_is_refused(value: Any) -> None:
    """-1.0 and nan turned clipping off without an error, and "1.0" failed in the first step."""
    with pytest.raises(ConfigurationError, match=f"max_norm must be a non-negative number.*got {value!r}"):
        PipelineConfig(pp_size=1, max_norm=value)


def test_a_max_norm_of_none_does_not_clip_and_an_infinite_one_measures() -> None:
    assert PipelineConfig(pp_size=1, max_norm=None).max_norm == 0.0
    assert PipelineConfig(pp_size=1, max_norm=float("inf")).max_norm == float("inf")


class Perturbing(torch.optim.SGD):
    """Sharpness-aware minimization. The loop calls both steps itself; `coupled` scales by the norm of all gradients."""

    coupled = True

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = [p.grad.norm() if p.grad is not None else torch.zeros(()) for p in parameters]
        whole = torch.stack(norms).norm()
        for parameter, norm in zip(parameters, norms):
            self.state[parameter]["moved"] = moved = parameter.grad * (0.1 / (whole if self.coupled else norm))
            parameter.add_(moved)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.state[parameter].pop("moved"))


class PerturbingEach(Perturbing):
    coupled = False


def test_methods_of_an_optimizer_are_tried_like_its_step() -> None:
    """SAM's first_step scales by the norm of all gradients; the trial at boost called `step` alone, so each stage took
    the norm of its own."""
    model = Net()
    assert own_methods(Perturbing(model.parameters(), lr=0.1)) == ["first_step", "second_step"]
    assert own_methods(torch.optim.AdamW(model.parameters())) == []
    assert gap(Perturbing(model.parameters(), lr=0.1), model, False) > SPARED
    assert gap(PerturbingEach(model.parameters(), lr=0.1), model, False) <= SPARED


def paused(options: dict[str, Any], removes: bool) -> list[Tensor]:
    """The updated values after a loop has not trained the head for two of its steps: it has removed the head's group,
    or has frozen the head."""
    model = seeded()
    groups = [{"params": model.layers.parameters()}, {"params": model.head.parameters(), "lr": 0.02}]
    engine = boost(model, torch.optim.AdamW(groups, lr=0.01), **options)
    head = list(engine.model.head.parameters())
    for step in range(6):
        if step in (2, 4):
            engine.model.head.requires_grad_(removes or step == 4)
        if step == 2 and removes:
            engine.optimizer.param_groups.pop()
        if step == 4 and removes:
            engine.optimizer.add_param_group({"params": head, "lr": 0.02})
        engine.execute_pipeline(iter([data(step)]))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    values = [parameter.detach().clone() for parameter in engine.optimizer.parameters]
    if any(name.startswith("head") for name in engine.optimizer.names.values()):
        with pytest.raises((UsageError, ValueError), match=r"already in a group|more than one parameter group"):
            engine.optimizer.add_param_group({"params": head})
    return values


def paused_alike(options: dict[str, Any]) -> None:
    for removed, frozen in zip(paused(options, removes=True), paused(options, removes=False), strict=True):
        assert torch.equal(removed, frozen)


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"pp_size": 1, "dp_size": 2, "zero_stage": 1}]
)
def test_a_group_that_a_loop_has_removed_can_be_added_again(pool: Pool, options: dict[str, Any]) -> None:
    """The parameters of a removed group still counted as parameters of a group. The rank that updates them raised an
    error when the group was added again (16 bits, ZeRO)."""
    pool.run(paused_alike, 2, options)


def remembered() -> int:
    """The most entries that a cache of the traces has gained for eight sets of frozen parameters."""
    traces = boost(seeded()).model.pipeline.traces

    def sizes() -> dict[str, int]:
        return {name: len(value) for name, value in vars(traces).items() if hasattr(value, "__len__")}

    before, seen = sizes(), set()
    for parameter in [*traces.model.parameters()][:8]:
        parameter.requires_grad_(False)
        traces.look_at_trained()
        seen.add(traces._training)
    assert len(seen) == 8
    return max(size - before[name] for name, size in sizes().items())


def test_sets_of_frozen_parameters_are_not_remembered(pool: Pool) -> None:
    """A run that trains other layers every 20 steps (LISA) kept the names of each set for ever."""
    assert pool.run(remembered, 1) == [0]
