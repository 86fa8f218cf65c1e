"""Tests of outputs that cannot be merged from microbatches: losses in tuples, scalars, numbers, matrices of samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.batch.read import read_batch
from pipeshard.engine.outputs import Outputs
from pipeshard.errors import UsageError
from pipeshard.graph.trace import trace
from tests.messages import assert_told
from tests.pool import Pool
from tests.unsplit import Split

pytestmark = pytest.mark.local

H, ROWS = 8, 6


class Telling(nn.Module):
    """Returns a tuple with its loss first, and what `kind` says beside it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.scale = kind, nn.Parameter(torch.tensor(2.0))
        self.enter, self.head = nn.Linear(H, H), nn.Linear(H, H)
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        count = (x < 9).sum()
        for layer in (self.enter, *self.layers, self.head):
            x = torch.tanh(layer(x))
        if self.kind == "count":
            return x.square().mean() * self.scale, x, count
        beside: Any = {
            "scalar": x.mean(),
            "number": len(x),
            "sum": x.mean(0),
            "pairs": x @ x.T,
            "same": [self.scale, 3, "a", None],
            "array": x.detach().numpy(),
            "number of numpy": x.detach().numpy().mean(),
        }
        return x.square().mean() * self.scale, x, beside[self.kind]


def rows() -> Tensor:
    return torch.randn(ROWS, H, generator=torch.Generator().manual_seed(0))


def merged(kind: str) -> tuple[list[str], bool]:
    """What is said to an evaluation of three microbatches, and whether what is returned is the whole batch's."""
    torch.manual_seed(0)
    model, own = Telling(kind), lambda out, batch: out[0]
    with torch.no_grad():
        expected = model(rows())
    split, told, good = Split(model, dist.get_world_size(), rows(), num_microbatches=3), [], True
    run = split.booster.execute_pipeline
    with torch.no_grad():
        try:
            out = run(iter([rows()]), split.model, own, None, return_outputs=True)
        except UsageError as error:
            told = [str(error)]
        else:
            if out["outputs"] is not None:
                pairs = zip(out["outputs"][:2], expected[:2], strict=True)
                good = all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
                good &= out["outputs"][2] == expected[2]
        whole = run(iter([rows()]), split.model, own, None, return_outputs=lambda out, batch: len(out[1]))
        good &= whole["outputs"] in (None, [2, 2, 2])
    return told, good


@pytest.mark.turns
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("scalar", r"\[2\] cannot be merged .* has no batch dimension"),
        ("sum", r"\[2\] cannot be merged .* has no batch dimension"),
        ("count", r"\[2\] cannot be merged .* has no batch dimension"),
        ("pairs", r"\[2\] cannot be merged .* has 2 dimensions that grow with the batch"),
        ("same", None),
        ("array", r"\[2\] cannot be merged .* is a numpy array, not a tensor"),
        ("number of numpy", r"\[2\] cannot be merged .* differs between microbatches"),
    ],
)
def test_no_microbatch_s_own_passes_for_the_batch_s(pool: Pool, kind: str, why: str | None) -> None:
    """The first microbatch's loss, scalars, numbers and numpy arrays were returned, and (6, 2) for the (6, 6) of all
    pairs. So was the number of the first microbatch's entries, which happened to be that of each other one."""
    for told, good in pool.run(merged, 2, kind):
        assert good
        assert_told(told, [] if why is None else [why])


class Counts(nn.Module):
    """Returns, beside its samples, a number of the batch: of their entries, or of those of a table for all of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList(nn.Linear(H, H) for _ in range(3))

    def forward(self, x: Tensor, table: Tensor) -> Any:
        count = (x < 9).sum() if self.kind == "samples" else (table < 9).sum()
        for layer in self.layers:
            x = layer(x)
        return x, count


@pytest.mark.parametrize("kind", ["samples", "table"])
def test_what_is_computed_from_a_shared_leaf_is_the_same_in_all_microbatches(kind: str) -> None:
    model = Counts(kind)
    batch = read_batch(model, {"x": rows(), "table": torch.ones(ROWS)}, {"table": None})
    flow = trace(model, batch.split(num_microbatches=3)[0])
    assert Outputs(True).merges([flow] * 3, batch) == (kind == "table")


class Detects(nn.Module):
    """Returns what it has found in each sample in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layers = nn.Embedding(11, H), nn.ModuleList(nn.Linear(H, H) for _ in range(4))

    def forward(self, ids: Tensor) -> Any:
        x = self.enter(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.square().mean(), "logits": x, "found": [{"boxes": sample.view(-1, 4)} for sample in x]}


def detected(num_microbatches: int) -> tuple[bool, str]:
    """Whether the logits are those of the whole batch, and what is said of the lists."""
    torch.manual_seed(0)
    model, data = Detects(), {"ids": torch.arange(ROWS * 5).view(ROWS, 5) % 11}
    with torch.no_grad():
        expected = model(**data)["logits"]
    split = Split(model, dist.get_world_size(), data, num_microbatches=num_microbatches)
    logits = split.evaluate(data, return_outputs="logits")["outputs"]
    with pytest.raises(UsageError) as caught:
        split.evaluate(data, return_outputs="found")
    return logits is None or torch.allclose(logits["logits"], expected, atol=1e-6), str(caught.value)


@pytest.mark.turns
@pytest.mark.parametrize("num_microbatches", [3, 4])
def test_lists_with_an_entry_per_sample_are_told(pool: Pool, num_microbatches: int) -> None:
    """The first samples of all microbatches were joined, logits were joined along their length, and batches that do
    not divide evenly ended the last rank alone."""
    for good, message in pool.run(detected, 2, num_microbatches):
        assert good
        assert_told(
            [message],
            [r"\['found'\]\[0\]\['boxes'\] .* sample .*\(2 in all\)" if num_microbatches == 3 else "structure"],
        )


def numbers() -> str:
    torch.manual_seed(0)
    split = Split(Telling("number"), dist.get_world_size(), rows(), num_microbatches=4)
    with torch.no_grad(), pytest.raises(UsageError) as caught:
        split.booster.execute_pipeline(
            iter([rows()]), split.model, lambda out, batch: out[0], None, return_outputs=True
        )
    return str(caught.value)


@pytest.mark.turns
def test_numbers_that_differ_are_told_on_every_rank(pool: Pool) -> None:
    for message in pool.run(numbers, 2):
        assert "output [2] cannot be merged for the whole batch: it differs between microbatches" in message
