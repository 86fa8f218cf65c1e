"""Tests of questions: conditions on a batch's values, which are evaluated again for batches of other sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeshard import trace
from pipeshard.batch.batch import Batch
from pipeshard.graph.dataflow import Dataflow

H = 8
SIZES = (2, 8), (2, 9), (3, 8), (5, 31), (1, 4), (4, 4)


class Masked(nn.Module):
    """Leaves a mask out where glue finds that it would change nothing, as transformers' models do."""

    def __init__(self, is_needless: Callable[[Tensor, Tensor], bool]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, H)
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(2))
        self.is_needless = is_needless

    def forward(self, input_ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        is_needless = self.is_needless(input_ids, mask)
        for layer in self.layers:
            x = layer(x if is_needless else x * mask[..., None])
        return {"loss": x.square().mean()}


def batch(rows: int, length: int, padded: int = 0) -> Batch:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length - padded :] = 0
    return Batch.of({"input_ids": torch.arange(rows * length).reshape(rows, length) % 11, "mask": mask})


def fits(flow: Dataflow, of: Batch) -> bool:
    """Whether the Dataflow is for this batch."""
    deltas = flow.axes.deltas(of)
    return deltas is not None and all(question.holds(of.tensors, deltas) for question in flow.questions)


@pytest.mark.parametrize(
    "is_needless",
    [
        lambda ids, mask: bool(mask.all()),
        lambda ids, mask: bool(mask.sum() == mask.numel()),
        lambda ids, mask: bool((mask.sum(1) == mask.shape[1]).all()),
        lambda ids, mask: bool((mask * sum(mask.shape)).min() == sum(mask.shape)),
        lambda ids, mask: not (mask == 0).any(),
    ],
)
@pytest.mark.parametrize("padded", [0, 2])
def test_one_trace_serves_all_sizes_with_its_answer(is_needless: Callable[[Tensor, Tensor], bool], padded: int) -> None:
    """Numbers in a question that were those of the traced sizes: each new length was traced anew, and a padded batch of
    9 positions passed for one without padding, as it had as many ones as the traced batch of 8."""
    model = Masked(is_needless)
    flow = trace(model, batch(3, 12, padded))
    assert [fits(flow, batch(*sizes, padded=1)) for sizes in SIZES] == [padded > 0] * len(SIZES)
    assert [fits(flow, batch(*sizes)) for sizes in SIZES] == [padded == 0] * len(SIZES)


@pytest.mark.parametrize(
    "is_needless",
    [
        lambda ids, mask: torch.equal(mask, torch.ones_like(mask)),
        lambda ids, mask: bool((mask.sum(1) == torch.full((len(mask),), mask.shape[1])).all()),
        lambda ids, mask: bool(mask.sum() + sum(mask.shape) == mask.numel() + sum(mask.shape)),
    ],
)
def test_what_cannot_be_told_for_other_sizes_is_for_the_traced_ones(
    is_needless: Callable[[Tensor, Tensor], bool],
) -> None:
    """A tensor that glue made of nothing but sizes, and a number that is neither a sum nor a product of them."""
    model = Masked(is_needless)
    for sizes in SIZES:
        flow = trace(model, batch(*sizes), exact=True)
        assert fits(flow, batch(*sizes)) and not fits(flow, batch(*sizes, padded=1))
    flow = trace(model, batch(3, 12))
    for other in (batch(*sizes, padded) for sizes in SIZES for padded in (0, 1)):
        tensors = other.tensors.values()
        assert not fits(flow, other) or flow.questions[0].answer == is_needless(*tensors)


class Teaching(nn.Module):
    """Computes with the batch in inference mode, also in place, before the layers that it trains."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.teacher, self.layers = nn.ModuleList([nn.Linear(H, H)]), nn.ModuleList([nn.Linear(H, H)])
        self.writes = writes

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.inference_mode():
            scaled = x / 2
            if self.writes:
                scaled.add_(1)
            is_large = bool(scaled.mean() > 1)
            features = self.teacher[0](scaled)
        features = self.layers[0](features.clone())
        return {"loss": features.square().mean() if is_large else features.mean()}


@pytest.mark.parametrize("writes", [False, True])
def test_glue_may_compute_with_the_batch_in_inference_mode(writes: bool) -> None:
    """The trace failed with "Inference tensors do not track version counter". Without it, writes cannot be noticed."""
    flow = trace(Teaching(writes), torch.zeros(2, H))
    assert flow.loss is not None and flow.watched == {"[0]"}


class Shortened(Masked):
    """Leaves out the positions after the longest sample, before its layers or for its loss."""

    def __init__(self, lengths: Callable[[Tensor], Any], is_late: bool) -> None:
        super().__init__(lambda ids, mask: True)
        self.lengths, self.is_late = lengths, is_late

    def forward(self, input_ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        if not self.is_late:
            x = x[:, : max(self.lengths(mask))]
        for layer in self.layers:
            x = layer(x)
        return {"loss": x[:, : max(self.lengths(mask))].square().mean()}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.numpy])
def test_lengths_that_glue_reads_as_a_list_are_for_the_traced_mask(
    read: Callable[[Tensor], Any], is_late: bool
) -> None:
    """A batch whose longest sample is shorter was refused, since the trace was used for it."""
    flow = trace(Shortened(lambda mask: read(mask.sum(1)), is_late), batch(3, 12))
    assert flow.watched == (set() if is_late else {"mask"})
