"""Tests of a criterion's weights: trained weights are refused, and the proof restores what it changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeshard
from pipeshard.batch.read import read_batch
from pipeshard.config import PipelineConfig
from pipeshard.engine.division import traced
from pipeshard.entry import Engine
from pipeshard.errors import ConfigurationError, PipeshardError
from pipeshard.graph.trace import trace
from pipeshard.split.materialize import is_released
from pipeshard.verify.proof import prove
from tests.pool import Pool

pytestmark = pytest.mark.local

CLASSES, WIDTH = 4, 8
Made = Callable[[Any, Any], Tensor]


class Arc(nn.Module):
    """A margin loss with a weight a class, which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(CLASSES, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls: list[int] = []

    def forward(self, embedded: Tensor, batch: Any) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(embedded.mean(0), 0.1)
        self.calls.append(len(self.calls))
        return F.cross_entropy(8 * F.normalize(embedded) @ F.normalize(self.centers).T, batch["criterion.y"])


class Holder:
    """An object that is no module, with modules and parameters in lists and dicts."""

    def __init__(self) -> None:
        self.arc = Arc()
        self.scales = {"logit": [nn.Parameter(torch.zeros(()))]}

    def method(self, embedded: Tensor, batch: Any) -> Tensor:
        return self.arc(embedded, batch)

    def __call__(self, embedded: Tensor, batch: Any) -> Tensor:
        scale = self.scales["logit"][0]
        return embedded.square().mean() * (-scale).exp() + scale


ARC = Arc()
TEMPERATURE = torch.zeros((), requires_grad=True)


def reads_global_module(embedded: Tensor, batch: Any) -> Tensor:
    return ARC(embedded, batch)


def reads_global_tensor(embedded: Tensor, batch: Any) -> Tensor:
    return (embedded * TEMPERATURE.exp()).square().mean()


def takes_arc(arc: Arc, embedded: Tensor, batch: Any) -> Tensor:
    return arc(embedded, batch)


def closure() -> Made:
    arc = Arc()
    return lambda embedded, batch: arc(embedded, batch)


def listed() -> Made:
    """Uncertainty weights, one for each of two losses."""
    variances = [nn.Parameter(torch.zeros(())) for _ in range(2)]

    def loss(embedded: Tensor, batch: Any) -> Tensor:
        losses = embedded.square().mean(), embedded.abs().mean()
        return sum((-v).exp() * part + v for v, part in zip(variances, losses, strict=True))

    return loss


HOLDERS: dict[str, Callable[[], Made]] = {
    "a module": Arc,
    "a closure": closure,
    "a global module": lambda: reads_global_module,
    "a global tensor": lambda: reads_global_tensor,
    "a partial": lambda: functools.partial(takes_arc, Arc()),
    "a bound method": lambda: Holder().method,
    "an object that is called": Holder,
    "a list": listed,
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, WIDTH))


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"input": torch.randn(8, 8), "criterion.y": torch.randint(0, CLASSES, (8,))}


@pytest.mark.parametrize("name", HOLDERS)
def test_trained_weights_of_a_criterion_are_refused_when_it_is_traced(name: str) -> None:
    """Rank 0's weights were off by 25, and those of other ranks were never trained: a lambda held the module."""
    model = net()
    sample = read_batch(model, batch())
    with pytest.raises(ConfigurationError, match="the model does not contain"):
        trace(model, sample, HOLDERS[name]())


def penalty(embedded: Tensor, batch: Any) -> Tensor:
    """A gradient penalty makes leaves of its own."""
    mixed = torch.rand(8, 8, requires_grad=True)
    return embedded.square().mean() + torch.autograd.grad(mixed.square().sum(), mixed, create_graph=True)[0].mean()


def frozen() -> Made:
    teacher = net().requires_grad_(False)
    return lambda embedded, batch: (embedded - teacher(embedded)).square().mean()


def under_no_grad() -> Made:
    teacher = net()

    def loss(embedded: Tensor, batch: Any) -> Tensor:
        with torch.no_grad():
            target = teacher(embedded)
        return (embedded - target).square().mean()

    return loss


@pytest.mark.parametrize("make", [frozen, under_no_grad, lambda: penalty], ids=["frozen", "no_grad", "penalty"])
def test_what_a_criterion_does_not_train_is_no_weight_of_its_own(make: Callable[[], Made]) -> None:
    """A frozen discriminator, a teacher and leaves that the criterion makes itself stay exact."""
    model = net()
    assert trace(model, read_batch(model, batch()), make()).loss is not None


class OnGpu(Tensor):
    """A tensor on a fake GPU, which is in the CPU's memory: a loss refuses it beside tensors of the CPU."""

    memory: int

    @classmethod
    def of(cls, tensor: Tensor) -> OnGpu:
        made = tensor.as_subclass(cls)
        made.memory = made.data_ptr()
        return made

    @property
    def is_there(self) -> bool:
        return self.data_ptr() == self.memory

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0" if self.is_there else "cpu")

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return OnGpu.of(self.detach()) if self.is_there else self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.to:
                return args[0].clone()
            if func is F.cross_entropy and kwargs["weight"].is_there:
                raise RuntimeError("Expected all tensors to be on the same device")
            return func(*args, **(kwargs or {}))


def test_class_weights_on_the_gpu_are_traced_beside_a_model_on_the_cpu() -> None:
    """Boost traces the model before it moves the model to the GPU: class weights that were there already, as each step
    needs them, raised torch's error about devices, with advice about tensors of the whole batch."""
    weights = OnGpu.of(torch.ones(CLASSES))
    model, gpu = net()[:1].append(nn.Linear(16, CLASSES)), torch.device("cuda:0")
    loss = nn.CrossEntropyLoss(weight=weights)
    config = PipelineConfig(pp_size=1, num_microbatches=1)

    def criterion(scores: Tensor, batch: Any) -> Tensor:
        return loss(scores, batch["criterion.y"])

    _, flow = traced(config, model, read_batch(model, batch()), criterion, (), gpu)
    assert flow.loss is not None
    assert weights.is_there


def test_a_criterion_that_moves_its_inputs_to_the_gpu_keeps_its_tensors_there() -> None:
    """A criterion moved the model's output to its teacher on the GPU, and was traced. Then boost moved all tensors of
    criteria beside the model: torch's error about devices, or a teacher of 14 GB in the host's memory."""
    teacher = OnGpu.of(torch.ones(CLASSES))
    model, gpu = net()[:1].append(nn.Linear(16, CLASSES)), torch.device("cuda:0")
    config = PipelineConfig(pp_size=1, num_microbatches=1)

    def criterion(scores: Tensor, batch: Any) -> Tensor:
        if not teacher.is_there:  # its inputs, which would now be on the GPU, are not
            raise RuntimeError("Expected all tensors to be on the same device")
        return F.cross_entropy(scores, batch["criterion.y"])

    _, flow = traced(config, model, read_batch(model, batch()), criterion, (), gpu)
    assert flow.loss is not None


def test_the_proof_leaves_what_a_criterion_reaches_as_it_was() -> None:
    """The proof's backward went into the user's own object: a global is not copied with a function."""
    arc, model = ARC, net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    arc.requires_grad_(True)
    for before in (None, torch.ones(CLASSES, WIDTH)):
        arc.centers.grad = before
        values = {name: value.clone() for name, value in arc.state_dict().items()}
        sample = read_batch(model, batch())
        config = PipelineConfig(pp_size=2, num_microbatches=1)
        prove(config, torch.device("cpu"), model, optimizer, reads_global_module, sample)
        assert arc.centers.grad is before
        assert before is None or bool((before == 1).all())
        assert all(torch.equal(value, values[name]) for name, value in arc.state_dict().items())
        assert arc.calls == []
    arc.centers.grad = None


def unfreezes() -> list[str]:
    """Errors of one rank: weights that are unfrozen after two steps, and a later criterion that has some."""
    arc, model = Arc().requires_grad_(False), net()

    def loss(embedded: Tensor, batch: Any) -> Tensor:
        return arc.centers.mean() * embedded.square().mean()

    engine = pipeshard.initialize(
        model, torch.optim.SGD(model.parameters(), 0.1), loss, pp_size=2, num_microbatches=1, verify=False,
        dry_run_input=batch(),
    )  # fmt: skip
    for _ in range(2):
        engine.execute_pipeline(iter([batch()]))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    arc.requires_grad_(True)
    errors = []
    for _ in range(2):
        try:
            engine.execute_pipeline(iter([batch()]))
        except ConfigurationError as error:
            errors.append(str(error))
    return [*errors, str(arc.centers.grad)]


def test_weights_that_are_unfrozen_later_are_refused_on_every_rank(pool: Pool) -> None:
    """Frozen weights train exactly; once they require gradients, no step is made with them."""
    first, second = pool.run(unfreezes, 2)
    assert first == second
    assert len(first) == 3 and "the model does not contain" in first[0] and first[2] == "None"


class Counting:
    """Uses its own weights from the sixth call on."""

    def __init__(self, holds: Callable[[], Any]) -> None:
        self.held, self.calls = holds(), 0

    def __call__(self, embedded: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        loss = embedded.square().mean()
        return loss * self.held.mean().exp() if self.calls > 5 else loss


def weight() -> Any:
    return nn.Parameter(torch.zeros(1))


def leaf() -> Any:
    return torch.zeros(1, requires_grad=True)


def engine_of(criterion: Any, **options: Any) -> Engine:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    arguments = {"pp_size": 2, "num_microbatches": 1, "verify": False, "dry_run_input": batch()}
    return pipeshard.initialize(model, optimizer, criterion, **arguments | options)


def counts(holds: Callable[[], Any]) -> str:
    engine = engine_of(Counting(holds), loss_reduction="microbatch")
    for _ in range(10):
        engine.execute_pipeline(iter([batch()]))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return "nothing was refused"


@pytest.mark.parametrize("holds", [weight, leaf])
def test_weights_that_a_criterion_begins_to_use_are_refused(pool: Pool, holds: Callable[[], Any]) -> None:
    """A criterion that used its own weights from some step on was traced before, so that nobody saw them."""
    for message in pool.run_expecting(PipeshardError, counts, 2, holds):
        assert "the model does not contain" in message


class Whole(nn.Module):
    """The remedy: a model that has the criterion as a child."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.loss = Arc()

    def forward(self, input: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.body(input), {"criterion.y": y})}


def whole() -> Whole:
    torch.manual_seed(0)
    return Whole()


def follows_the_remedy() -> list[str]:
    """What differs from the unsplit model once the criterion is a child of the model."""
    model, unsplit = whole(), whole()
    data = {"input": batch()["input"], "y": batch()["criterion.y"]}
    engine = pipeshard.initialize(
        model, torch.optim.SGD(model.parameters(), 0.1), pp_size=2, num_microbatches=1, dry_run_input=data
    )
    optimizer = torch.optim.SGD(unsplit.parameters(), 0.1)
    for _ in range(3):
        loss = engine.execute_pipeline(iter([data]))["loss"].as_subclass(Tensor)
        expected = unsplit(**data)["loss"]
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for each in (engine.optimizer, optimizer):
            each.step()
            each.zero_grad()
    theirs = dict(unsplit.named_parameters())
    held = [(name, p) for name, p in model.named_parameters() if not is_released(p)]
    return [name for name, parameter in held if not torch.allclose(parameter, theirs[name], atol=1e-6)]


@pytest.mark.turns
def test_a_criterion_that_is_a_child_of_the_model_is_trained(pool: Pool) -> None:
    """The remedy that the refusal names: the weights of the criterion are the model's, and are trained exactly."""
    assert pool.run(follows_the_remedy, 2) == [[], []]


def passes_one_later() -> list[str]:
    engine = engine_of(penalty)
    errors = []
    for make in (*HOLDERS.values(), lambda: penalty):
        try:
            engine.execute_pipeline(iter([batch()]), engine.model, make(), engine.optimizer)
        except ConfigurationError as error:
            errors.append(str(error))
    return errors


@pytest.mark.turns
def test_a_criterion_that_is_passed_later_is_refused_on_every_rank(pool: Pool) -> None:
    """`execute_pipeline` takes another criterion than `boost`; one with trained weights trains nothing."""
    for errors in pool.run(passes_one_later, 2):
        assert len(errors) == len(HOLDERS)
        assert all(
            "trains only the parameters of the model" in error or "the model does not contain" in error
            for error in errors
        )
