"""Tests of custom, late or several optimizers: they train as in one process, or are refused immediately."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from colossalai.booster import Booster
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import pipeshard
from pipeshard import PipelinePlugin
from pipeshard.engine.optimizer_trial import SPARED, gap
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.split.materialize import is_released
from pipeshard.verify.proof import EXACT, Proof
from tests.engine.test_gradients_hooks import Net, data
from tests.pool import Pool
from tests.unsplit import largest_error
from tests.verify.test_verify import proof_of

pytestmark = pytest.mark.local


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization: each stage went uphill by the norm of its own gradients."""

    def __init__(self, params: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "it goes up and down again"
        closure = torch.enable_grad()(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        closure()
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        before = [p.clone() for p in parameters]
        for parameter in parameters:
            parameter.add_(0.05 * parameter.grad / norm)
        closure()
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
        self.base.step()


class Clipping(SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class ClipsMatrices(SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"] if p.ndim == 2], 0.1)
        return super().step(closure)


class ClipsPeaks(SGD):
    """As ZClip: it clips by the mean of earlier norms, as soon as it has some."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = self.__dict__.setdefault("norms", [])
        norms.append(float(torch.stack([gradient.norm() for gradient in found]).norm()))
        mean = sum(norms) / len(norms)
        if len(norms) > 5 and norms[-1] > 2 * mean:
            torch._foreach_mul_(found, mean / norms[-1])
        return super().step(closure)


class Scaled(torch.optim.Optimizer):
    """As peft's LoRA-FA, whose groups list the names and scales of their parameters: a stage paired its parameters with
    those of the first stage. The tiny parameters of a trial have the first scales, too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"betas": [0.9, 0.999]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p, scale in zip(group["params"], group["scales"], strict=False):
                if p.grad is not None:
                    p.sub_(scale * p.grad)


class Signed(torch.optim.Optimizer):
    """One of a user's that each stage may run for itself; it keeps a model of its own, which no trial may copy."""

    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params, {"lr": 0.1})
        self.model = model

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign() / p.grad.abs().mean())


class Estimating(torch.optim.Optimizer):
    """As Prodigy and D-Adaptation: all parameters have one step size, which is estimated from all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"d": 1e-6, "over": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        graded = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        d, over, under = self.param_groups[0]["d"], self.param_groups[0]["over"], 0.0
        for p in graded:
            state = self.state[p]
            if not state:
                state |= {"p0": p.clone(), "s": torch.zeros_like(p), "mean": torch.zeros_like(p), "square": 0.0}
            over += d / 1e-6 * d * float((p.grad * (state["p0"] - p)).sum())
            state["mean"] = 0.9 * state["mean"] + 0.1 * d * p.grad
            state["square"] = 0.999 * state["square"] + 0.001 * d * d * p.grad.square()
            state["s"] += d / 1e-6 * d * p.grad
            under += float(state["s"].abs().sum())
        for group in self.param_groups:
            group |= {"over": over, "d": max(d, over / under if under else 0.0)}
        for p in graded:
            p.sub_(d * self.state[p]["mean"] / (self.state[p]["square"].sqrt() + d * 1e-8))


class ScheduleFree(SGD):
    """As those of the package schedulefree: it steps only after `train`, which users call after boost."""

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0].get("train_mode"):
            raise RuntimeError("Optimizer was not in train mode when step is called")
        return super().step(closure)


class Broken(SGD):
    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("call first_step and second_step")


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.02}]


def test_a_trial_tells_what_couples_parameters() -> None:
    model = Net()
    values, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    cases: list[tuple[Callable[[], Any], bool, bool]] = [  # whether it couples parameters, and rows of them
        (lambda: AdamW(two_groups(model), lr=0.1), False, False),
        (lambda: SGD(two_groups(model), lr=0.1, momentum=0.9), False, False),
        (lambda: torch.optim.Adafactor(two_groups(model), lr=0.1), False, True),
        (lambda: Signed(two_groups(model), model), False, True),
        (lambda: Sam(two_groups(model), lr=0.1), True, True),
        (lambda: Clipping(two_groups(model), lr=0.1), True, True),
        (lambda: ScheduleFree(two_groups(model), lr=0.1), False, False),
        (lambda: torch.optim.LBFGS(model.parameters()), True, True),
    ]
    for make, couples, divides in cases:
        optimizer = make()
        name = type(optimizer).__name__
        assert (gap(optimizer, model, False) > SPARED) == couples, name
        assert (gap(optimizer, model, True) > SPARED) == divides, name
    assert all(torch.equal(p, value) and p.grad is None for p, value in zip(model.parameters(), values, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_estimate_over_all_parameters_is_told() -> None:
    """Prodigy passed the trial, whose gradients were alike in all parameters: each stage trained with its own step
    size, or ended after two updates with an error about an option that no user had set."""
    model = Net()
    assert gap(Estimating(model.parameters()), model, False) > SPARED
    assert gap(Estimating([{"params": [p]} for p in model.parameters()]), model, False) > SPARED


def test_parameters_of_each_kind_are_tried() -> None:
    """A model begins with two vectors, and its optimizer clips matrices: the trial had only the two vectors."""
    model = Net()
    vectors_first = sorted(model.parameters(), key=lambda parameter: parameter.ndim)
    assert gap(ClipsMatrices(vectors_first, lr=0.1), model, False) > SPARED
    assert gap(ClipsMatrices(model.parameters(), lr=0.1), model, False) > SPARED
    assert gap(ClipsMatrices([{"params": [p]} for p in model.parameters()], lr=0.1), model, False) > SPARED
    layers = [{"params": [*layer.parameters()]} for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert gap(ClipsMatrices(layers, lr=0.1), model, False) > SPARED


def test_a_trial_with_a_parameter_without_dimensions_runs() -> None:
    """Its moves have one dimension less than others: boost warned that the trial had failed, and did not refuse."""
    model = Net()
    parameters = [*model.parameters(), nn.Parameter(torch.ones(()))]
    assert gap(SGD(parameters, lr=0.1), model, False) < SPARED < gap(Clipping(parameters, lr=0.1), model, False)


def test_an_optimizer_that_couples_at_a_peak_is_told() -> None:
    """The gradients of the trial were largest in its second step, when there was no mean yet."""
    model = Net()
    assert gap(ClipsPeaks(model.parameters(), lr=0.1), model, False) > SPARED


def coupled_in_an_update() -> Proof:
    model = Net()
    return proof_of(model, data(), optimizer=ClipsMatrices(model.parameters(), lr=0.1))


def test_a_proof_tells_that_an_update_differs(pool: Pool) -> None:
    """It blamed the forward and the cuts, whose losses and gradients it had found equal."""
    (proof,) = pool.run(coupled_in_an_update, 1)
    assert proof.in_update and "after step 1 differs" in proof.reason and "optimizer's step" in proof.reason, proof


def schedule_free() -> Proof:
    model = Net()
    return proof_of(model, data(), optimizer=ScheduleFree(model.parameters(), lr=0.1))


def test_a_schedule_free_optimizer_is_proven(pool: Pool) -> None:
    """The trial at boost and the proof stepped an optimizer before a loop could call its train: nothing was proven."""
    (proof,) = pool.run(schedule_free, 1)
    assert proof.kind == EXACT, str(proof)


def boosted(make: Callable[[nn.Module], Any], model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = model or Net()
    booster = Booster(plugin=PipelinePlugin(2, num_microbatches=2, dry_run_input=data(), verify=False, **options))
    return booster, *booster.boost(model, make(model))[:2]


def refused(kind: str) -> None:
    criterion = nn.Linear(2, 2)
    makers: dict[str, Callable[[nn.Module], Any]] = {
        "lbfgs": lambda m: torch.optim.LBFGS(m.parameters()),
        "sam": lambda m: Sam(m.parameters(), lr=0.1),
        "clipping": lambda m: Clipping(m.parameters(), lr=0.1),
        "lists": lambda m: Scaled([{"params": [*m.parameters()], "scales": [1.0] * len([*m.parameters()])}]),
        "foreign": lambda m: SGD([*m.parameters(), *criterion.parameters()], lr=0.1),
    }
    boosted(makers[kind])


@pytest.mark.turns
def test_what_a_part_of_the_model_is_not_enough_for(pool: Pool) -> None:
    for kind, message in (
        ("lbfgs", "LBFGS computes its update direction from the gradients of all parameters together"),
        ("sam", "Sam couples parameters: the update of a parameter depends on other parameters"),
        (
            "clipping",
            "pass max_norm=... to PipelinePlugin or pipeshard.initialize to clip by the norm of the whole model",
        ),
        ("lists", "a parameter group of Scaled has the option 'scales' with one value for each parameter"),
        ("foreign", "group 0 of the optimizer contains a parameter of shape (2, 2) that is not in the model"),
    ):
        for told in pool.run_expecting(ConfigurationError, refused, 2, kind):
            assert message in told, told


def adalora() -> str:
    config = peft.AdaLoraConfig(target_modules=["a"], total_step=10)
    booster, model, optimizer = boosted(lambda m: SGD(m.parameters(), lr=0.1), peft.get_peft_model(Net(), config))
    booster.execute_pipeline(iter([data()]), model, None, optimizer)
    optimizer.step()
    with pytest.raises(UsageError) as refusal:
        model.base_model.update_and_allocate(0)
    return str(refusal.value)


def test_adalora_trains_with_its_first_ranks(pool: Pool) -> None:
    """Its allocation failed in its second step: "unsupported operand type(s) for *: 'Ghost' and 'NoneType'". Then boost
    refused also those who never allocate, such as a Trainer."""
    for told in pool.run(adalora, 2):
        assert "AdaLoRA chooses the rank of each adapter from the gradients of all layers" in told


class Listed(SGD):
    """Updates all parameters of a group by one operator, which takes no empty list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            graded = [p for p in group["params"] if p.grad is not None]
            torch._foreach_add_(graded, [p.grad for p in graded], alpha=-group["lr"])


def with_an_empty_group() -> str:
    def groups(model: Any) -> list[dict[str, Any]]:
        rest = [*model.embed.parameters(), *model.layers.parameters()]
        return [{"params": [*model.head.parameters()]}, {"params": rest}]

    booster, model, optimizer = boosted(lambda m: Listed(groups(m), lr=0.1))
    booster.execute_pipeline(iter([data()]), model, None, optimizer)
    try:
        optimizer.step()
    except RuntimeError as error:
        return " ".join(error.__notes__)
    return ""


def test_a_group_that_is_empty_on_one_stage_is_named(pool: Pool) -> None:
    """torch's "Tensor list must have at least one tensor", of a class that trains in one process, named no group."""
    told = "rank 0 (stage 0) has no gradients for group 0 of Listed: the parameters there are frozen or on other ranks"
    first, second = pool.run(with_an_empty_group, 2)
    assert told in first and "skip a group in which no parameter has a gradient" in first and second == ""


def with_an_error_of_a(kind: str) -> list[str]:
    def fails(*_: Any) -> None:
        optimizer.zero_grad()
        raise ValueError(kind)

    booster, model, optimizer = boosted(lambda m: SGD(m.parameters(), lr=0.1))
    booster.execute_pipeline(iter([data()]), model, None, optimizer)
    if kind == "hook":
        optimizer.optim.register_step_pre_hook(fails)
    try:
        optimizer.step(*[fails] * (kind == "closure"))
    except ValueError as error:
        return [note for note in getattr(error, "__notes__", ()) if "group" in note]
    return ["no error"]


@pytest.mark.parametrize("kind", ["hook", "closure"])
def test_an_error_of_the_users_own_has_no_note_on_groups(pool: Pool, kind: str) -> None:
    """Before the gradients are in the groups, all groups were said to have none."""
    assert pool.run(with_an_error_of_a, 2, kind) == [[], []]


def not_of_this_model() -> list[str]:
    """An optimizer that did not go through boost, or did with another model, was taken without a word."""
    booster, _, own = boosted(lambda m: SGD(m.parameters(), lr=0.1))
    other, *_ = booster.boost(Net(), None)
    late = SGD(other.parameters(), lr=0.1)
    told = []
    for wrong in (late, own):
        with pytest.raises(UsageError) as caught:
            booster.execute_pipeline(iter([data()]), other, None, wrong)
        told.append(str(caught.value))
    with pytest.raises(UsageError):
        booster.boost(other, own)
    _, late, *_ = booster.boost(other, late)  # made after the model was boosted, as users of FSDP do
    booster.execute_pipeline(iter([data()]), other, None, late)
    late.step()
    return told


@pytest.mark.turns
def test_optimizers_of_another_model(pool: Pool) -> None:
    for first, second in pool.run(not_of_this_model, 2):
        assert "this SGD is not an optimizer that booster.boost returned" in first and "pass the optimizer" in first
        assert "was boosted with another model" in second


def loaded(is_early: bool) -> tuple[float, str]:
    """The difference of the parameters after a step with the state of an optimizer that was not boosted, loaded before
    boost or, if not `is_early`, after it; and what is said of the inner optimizer's state, which has no names."""
    torch.manual_seed(0)
    alone = Net()
    optimizer = AdamW(alone.parameters(), lr=0.1)
    alone(**data())["loss"].backward()
    optimizer.step()
    model, late = copy.deepcopy(alone), copy.deepcopy(optimizer.state_dict())
    booster, split, own = boosted(lambda m: resumed(m, late if is_early else None), model)
    if not is_early:
        own.load_state_dict(late)
    alone.zero_grad()
    alone(**data())["loss"].backward()
    optimizer.step()
    booster.execute_pipeline(iter([data()]), split, None, own)
    own.step()
    with pytest.raises(UsageError) as caught:
        own.load_state_dict(own.unwrap().state_dict())
    own.unwrap().load_state_dict(own.unwrap().state_dict())  # as the error advises
    return gap_to(alone, split.unwrap(), own), str(caught.value)


def resumed(model: nn.Module, state: dict[str, Any] | None) -> AdamW:
    optimizer = AdamW(model.parameters(), lr=0.1)
    if state is not None:
        optimizer.load_state_dict(state)
    return optimizer


@pytest.mark.turns
def test_a_state_without_names_is_loaded_before_boost(pool: Pool) -> None:
    """The state of another stage, saved from `optimizer.unwrap()`, was loaded by position: the moments of other
    parameters, silently. That of an optimizer that was not boosted ended in torch's error about sizes of groups."""
    for error, told in pool.run(loaded, 2, True):
        assert error < 1e-5
        assert "this state dict does not contain parameter names" in told and "before booster.boost" in told
    pool.run_expecting(UsageError, loaded, 2, False)


def boosted_alone(model: nn.Module, optimizer: Any, **options: Any) -> Any:
    options = {"pp_size": 1, "num_microbatches": 2, "dry_run_input": data(), "verify": False, **options}
    return pipeshard.initialize(model, optimizer, **options)


def updated(again: bool) -> list[Tensor]:
    """The parameters after a step with a limit of the norm; `again` boosts the same objects twice."""
    torch.manual_seed(0)
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    kept = [boosted_alone(model, optimizer, max_norm=1e-3) for _ in range(1 + again)]
    kept[-1].execute_pipeline(iter([data()]))
    kept[-1].optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def narrowed_twice(options: dict[str, Any]) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    boosted_alone(model, optimizer, **options)
    boosted_alone(model, optimizer, **options)


@pytest.mark.turns
def test_a_cell_that_boosts_the_same_objects_again(pool: Pool) -> None:
    """With one stage, the optimizer of a notebook was boosted twice: the clip of the first boost refused the second's
    step, and its master weights were said to belong to another model."""
    ((once, twice),) = zip(pool.run(updated, 1, False), pool.run(updated, 1, True), strict=True)
    assert all(map(torch.equal, once, twice))
    (told,) = pool.run_expecting(UsageError, narrowed_twice, 1, {"precision": "bf16"})
    assert "this SGD was already boosted: use the model and the optimizer that boost returned, or create a new" in told


def gap_to(alone: nn.Module, model: nn.Module, *optimizers: Any) -> float:
    """The largest error of a value that the optimizers update: in 16 bits, these are fp32 values."""
    reference = dict(alone.named_parameters())
    held = [(name, p) for name, p in model.named_parameters() if not is_released(p)]
    updated = {name: tensor for optimizer in optimizers for tensor, name in optimizer.names.items()}
    assert all(torch.equal(p, updated.get(name, p).to(p.dtype)) for name, p in held)
    held = [(name, updated.get(name, p)) for name, p in held]
    return largest_error(float((p - reference[name]).detach().abs().max()) for name, p in held)


def change_by(optimizer: Any, before: dict[Any, Tensor]) -> float:
    """The largest change of a parameter of this optimizer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return largest_error(float((p - before[p]).abs().max()) for p in parameters)


def trained(kind: str, options: dict[str, Any]) -> tuple[float, float]:
    """Two optimizers of one model knew neither each other's norm nor the loss scale; what came by `add_param_group`
    was in no norm."""
    torch.manual_seed(0)
    alone = Net()
    before = {parameter: parameter.detach().clone() for parameter in alone.parameters()}
    optimizers: list[list[Any]] = []
    model = copy.deepcopy(alone)
    for each in (alone, model):
        first, second = two_groups(each)
        if kind == "two":
            optimizers.append([SGD([first], lr=0.1, momentum=0.9), SGD([second], lr=0.1)])
        else:
            optimizers.append([SGD([*each.embed.parameters(), *each.head.parameters()], lr=0.1)])
            each.layers.requires_grad_(False)
    booster = Booster(plugin=PipelinePlugin(2, num_microbatches=1, dry_run_input=data(), verify=False, **options))
    whole = model
    model, *_ = booster.boost(model, None)
    inner, optimizers[1] = optimizers[1], [booster.boost(model, optimizer)[1] for optimizer in optimizers[1]]
    for step in range(4):
        if kind != "two" and step:
            parts = [alone.layers[3 - step], whole.layers[3 - step]]
            for part, of in zip(parts, (optimizers[0][0], (optimizers[1] if step == 1 else inner)[0]), strict=True):
                of.add_param_group({"params": list(part.requires_grad_(True).parameters()), "lr": 0.05})
        booster.execute_pipeline(iter([data(step)]), model, None, optimizers[1][0])
        alone(**data(step))["loss"].backward()
        if options.get("max_norm"):
            expected = nn.utils.clip_grad_norm_(alone.parameters(), options["max_norm"])
        for optimizer in optimizers[0] + optimizers[1][:: 1 if step % 2 else -1]:  # in any order
            optimizer.step()
        if options.get("max_norm"):
            assert optimizers[1][0].get_grad_norm() == pytest.approx(float(expected), rel=1e-3)
        for optimizer in optimizers[0] + optimizers[1]:
            optimizer.zero_grad()
    assert [len(o.param_groups) for o in optimizers[1]] == [1, 1] if kind == "two" else [4]
    return gap_to(alone, whole, *optimizers[1]), min(change_by(optimizer, before) for optimizer in optimizers[0])


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["two", "added"])
def test_late_groups_and_second_optimizers(pool: Pool, kind: str) -> None:
    for gap_of_rank, change in pool.run(trained, 2, kind, {"max_norm": 0.2}):
        assert gap_of_rank < 1e-6 < 0.01 * change
    if kind == "two":
        for gap_of_rank, change in pool.run(trained, 2, kind, {"precision": "fp16", "initial_scale": 1024.0}):
            assert gap_of_rank < 5e-4 < 0.1 * change


def overflown() -> bool:
    """An overflow is one for both optimizers, and the scale is halved once."""
    model = Net()
    booster, boosted_model, first = boosted(
        lambda m: SGD([p for p in m.parameters() if p.ndim > 1], lr=0.1), model, precision="fp16", initial_scale=2.0**17
    )
    _, second, *_ = booster.boost(boosted_model, SGD([p for p in model.parameters() if p.ndim < 2], lr=0.1))
    own = [p for p in model.parameters() if not is_released(p)]
    before = [p.detach().clone() for p in own]
    booster.execute_pipeline(iter([data()]), boosted_model, None, first)
    held = [p for p in model.parameters() if p.grad is not None]
    held[0].grad.fill_(float("inf"))
    second.step(), first.step()
    assert boosted_model.pipeline.scaling.value == 2.0**16
    return all(torch.equal(p, q) for p, q in zip(before, own, strict=True))


def test_an_overflow_is_one_for_all_optimizers(pool: Pool) -> None:
    assert all(pool.run(overflown, 2))


def warned(kind: str) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipeshard").addHandler(handler)
    try:
        maker = Broken if kind == "broken" else SGD
        booster, model, optimizer = boosted(lambda m: maker(m.parameters(), lr=0.1))
        for step in range(2 if kind != "broken" else 0):
            booster.execute_pipeline(iter([data(step)]), model, None, optimizer)
            if kind == "own":
                optimizer.clip_grad_by_norm(0.1)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        logging.getLogger("pipeshard").removeHandler(handler)
    return told


@pytest.mark.processes
@pytest.mark.turns
def test_what_cannot_be_told_is_said(pool: Pool) -> None:
    """An optimizer that the trial at boost could not run was passed on, and its user was not told."""
    assert pool.run(warned, 2, "own") == [[], []]
    first, second = pool.run(warned, 2, "broken")
    assert len(first) == 1 and "Broken" in first[0] and second == []


def some_of_the_model() -> str:
    booster, model, optimizer = boosted(lambda m: SGD(m.head.parameters(), lr=0.1), max_norm=0.1)
    booster.execute_pipeline(iter([data()]), model, None, optimizer)
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    optimizer.add_param_group({"params": [*model.unwrap().embed.parameters(), *model.unwrap().layers.parameters()]})
    with pytest.raises(UsageError, match=r"directly: it was passed to boost .*, and its own step does not clip"):
        optimizer.unwrap().step()
    optimizer.step()
    with pytest.raises(ConfigurationError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 2
    return str(caught.value)


def test_max_norm_with_an_optimizer_of_some_parameters(pool: Pool) -> None:
    """Docs said the norm of the whole model, and it was that of what the optimizer had."""
    for told in pool.run(some_of_the_model, 2):
        assert "no boosted optimizer contains have gradients (embed.weight" in told and "requires_grad_(False)" in told


def unfrozen_by_rank(is_called_everywhere: bool) -> None:
    """Steps with a norm, of which the later ones train a layer that only the first stage's rank has added."""
    torch.manual_seed(0)
    alone = Net()
    alone.embed.requires_grad_(False)
    booster, model, optimizer = boosted(
        lambda m: SGD([p for p in m.parameters() if p.requires_grad], lr=0.1), copy.deepcopy(alone), max_norm=0.1
    )
    other = SGD([p for p in alone.parameters() if p.requires_grad], lr=0.1)
    for step in range(4):
        if step == 2:
            own = [p.requires_grad_(True) for p in model.unwrap().embed.parameters() if not is_released(p)]
            if own or is_called_everywhere:
                optimizer.add_param_group({"params": own})
            other.add_param_group({"params": list(alone.embed.requires_grad_(True).parameters())})
        booster.execute_pipeline(iter([data()]), model, None, optimizer)
        alone(**data())["loss"].backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        for each in (other, optimizer):
            each.step()
            each.zero_grad()
    wanted = dict(alone.named_parameters())
    held = [(name, p) for name, p in model.unwrap().named_parameters() if not is_released(p)]
    assert largest_error((parameter - wanted[name]).abs().max() for name, parameter in held) < 1e-6


@pytest.mark.turns
@pytest.mark.parametrize("is_called_everywhere", [True, False])
def test_a_layer_that_one_rank_has_added_is_in_the_norm(pool: Pool, is_called_everywhere: bool) -> None:
    """A loop unfroze a layer and added the parameters that are not released: none on another stage. With max_norm, only
    some ranks then gathered the names of parameters in no optimizer, so all ranks waited until the timeout."""
    pool.run(unfrozen_by_rank, 2, is_called_everywhere, timeout=60)


def closed(options: dict[str, Any]) -> tuple[float, float]:
    """A closure runs the pipeline inside of `step`: gradients were clipped, and given to the fp32 values, before."""
    torch.manual_seed(0)
    alone = Net()
    booster, model, optimizer = boosted(lambda m: SGD(m.parameters(), lr=0.1), copy.deepcopy(alone), **options)
    other = SGD(alone.parameters(), lr=0.1)
    before = {parameter: parameter.detach().clone() for parameter in alone.parameters()}

    def closure() -> Tensor:
        optimizer.zero_grad()
        return booster.execute_pipeline(iter([data()]), model, None, optimizer)["loss"]

    for _ in range(2):
        optimizer.step(closure)
        other.zero_grad()
        alone(**data())["loss"].backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        other.step()
    return gap_to(alone, model.unwrap(), optimizer), change_by(other, before)


@pytest.mark.turns
def test_steps_with_a_closure(pool: Pool) -> None:
    for precision, tolerance in (("fp32", 1e-6), ("bf16", 1e-4)):
        for gap_of_rank, change in pool.run(closed, 2, {"max_norm": 0.1, "precision": precision}):
            assert gap_of_rank < tolerance < 0.1 * change


def test_a_trial_of_an_optimizer_restores_the_generators_of_gpus() -> None:
    """On a machine with two or more GPUs, boost printed torch's page about fork_rng without devices on every rank. Then
    boost seeded all GPUs with 0: the noise that a loop drew on its GPU was the same on all replicas."""
    model, gpus = torch.nn.Linear(2, 2), [torch.Generator().manual_seed(k) for k in (1, 2)]
    before = [generator.get_state() for generator in (*gpus, torch.default_generator)]
    with (
        mock.patch("torch.cuda.is_initialized", lambda: True),
        mock.patch("torch.cuda.current_device", lambda: 1),
        mock.patch("torch.cuda.default_generators", gpus),
        mock.patch("torch.cuda.manual_seed_all") as seeded,
        mock.patch("torch.random.fork_rng") as forked,
    ):
        gap(SGD(model.parameters(), lr=0.1), model, sliced=False)
    after = [generator.get_state() for generator in (*gpus, torch.default_generator)]
    assert not seeded.called and not forked.called and all(map(torch.equal, before, after))
