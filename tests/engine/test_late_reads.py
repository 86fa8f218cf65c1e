"""Tests of late reads: the forward reads a parameter of another stage that it did not read in the trace at boost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.errors import TraceError
from tests.pool import Pool
from tests.unsplit import Split, largest_error, parameter_error

pytestmark = pytest.mark.local

Penalties = Callable[[nn.ModuleList], Callable[[], Any]]


def squares(parameters: Iterable[Tensor]) -> Any:
    return 1e-2 * sum(parameter.square().sum() for parameter in parameters)


def read_directly(layers: nn.ModuleList) -> Callable[[], Any]:
    return lambda: squares(layers.parameters())


def in_a_list(layers: nn.ModuleList) -> Callable[[], Any]:
    kept = [*layers.parameters()]
    return lambda: squares(kept)


def in_a_list_without_gradients(layers: nn.ModuleList) -> Callable[[], Any]:
    kept = [*layers.parameters()]
    return lambda: squares(parameter.detach() for parameter in kept) * layers[-1].bias.sum()


def in_a_closure(layers: nn.ModuleList) -> Callable[[], Any]:
    weight = layers[0].weight
    return lambda: 1e-2 * weight.sum()  # type: ignore[operator]


def in_a_partial(layers: nn.ModuleList) -> Callable[[], Any]:
    return partial(torch.sum, layers[0].weight)


def of_a_module_in_a_dict(layers: nn.ModuleList) -> Callable[[], Any]:
    kept = {"first": layers[0]}
    return lambda: 1e-2 * kept["first"].weight.sum()  # type: ignore[operator]


PENALTIES = [read_directly, in_a_list, in_a_list_without_gradients, in_a_closure, in_a_partial, of_a_module_in_a_dict]


class Penalized(nn.Module):
    """The forward adds a penalty to the loss if `has_penalty` is set."""

    def __init__(self, penalty: Penalties, has_penalty: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.penalty, self.has_penalty = penalty(self.layers), has_penalty

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        loss = (x.mean(1) - labels).square().mean()
        return {"loss": loss + self.penalty() if self.has_penalty else loss}


class Counting(Penalized):
    """The penalty begins with the eighth forward of a stage."""

    forwards = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.forwards += 1
        self.has_penalty = self.forwards > 7
        return super().forward(x, labels)


class Remembering(Penalized):
    """Keeps its parameters in an attribute, which the forward never reads."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept = [*self.parameters()]


def trained(kind: type[Penalized], penalty: Penalties, early: bool, late: bool, **options: Any) -> float:
    """The largest error of a parameter after four steps, the last two with `late` in place of `early`."""
    model, unsplit = kind(penalty, early), kind(penalty, early)
    data = [{"x": torch.randn(4, 8), "labels": torch.randn(4)} for _ in range(4)]
    split = Split(model, dist.get_world_size(), data[0], num_microbatches=2, **options)
    optimizer = torch.optim.AdamW(unsplit.parameters(), lr=1e-3)
    for k, batch in enumerate(data):
        split.model.has_penalty = unsplit.has_penalty = late if k > 1 else early
        split.backward(batch)
        split.step()
        unsplit(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameter_error(split, unsplit)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("options", [{}, {"verify": False, "loss_reduction": "microbatch"}], ids=["exact", "unproven"])
def test_a_parameter_that_the_stage_has_released(pool: Pool, penalty: Penalties, options: dict[str, Any]) -> None:
    """A penalty that the loop turned on read parameters of another stage. The error was that the loss is not a mean
    over samples, or only one rank raised it, while the other ranks computed with the values at boost."""
    for message in pool.run_expecting(TraceError, trained, 2, Penalized, penalty, False, True, **options):
        assert "unlike in the trace at boost, the model reads layers.0." in message
        assert "outside its unit on stage 1, which does not hold this parameter" in message


def test_a_released_parameter_that_a_branch_reads_unseen(pool: Pool) -> None:
    """A branch on the number of forwards began to read a kept parameter of another stage: the stage computed with the
    value at boost, without an error."""
    arguments = Counting, in_a_list_without_gradients, False, False
    for message in pool.run_expecting(TraceError, trained, 2, *arguments, verify=False):
        assert "uses different unit outputs or parameters than in its trace" in message


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_parameter_that_the_trace_at_boost_has_read(pool: Pool, penalty: Penalties) -> None:
    """The same penalties train exactly if they are on at boost, also if the loop turns them off later."""
    for early, late in ((True, True), (True, False)):
        options = {"verify": False, "loss_reduction": "microbatch"}
        assert largest_error(pool.run(trained, 2, Penalized, penalty, early, late, **options)) < 1e-6


def test_kept_parameters_that_nothing_reads(pool: Pool) -> None:
    """A list of all parameters in an attribute was refused, since it differed from the unsplit model's after a step."""
    assert largest_error(pool.run(trained, 2, Remembering, in_a_partial, False, False)) < 1e-6
