"""Tests of packed sequences: recurrent layers between pack_padded_sequence and pad_packed_sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pipeshard
from pipeshard.errors import TraceError
from tests.pool import Pool
from tests.unsplit import largest_error, relative_errors

pytestmark = pytest.mark.local

H, TOKENS, CLASSES, LENGTH = 8, 20, 5, 6


class Packed(nn.GRU):
    """A recurrent layer that packs what it takes, and unpacks what it returns."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        output, _ = super().forward(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])[0]


class Tagger(nn.Module):
    """Packs and unpacks between its layers, or in each of them."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, H), nn.Linear(H, CLASSES)
        self.layers = nn.ModuleList(kind(H, H, batch_first=True) for _ in range(4))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.of_layer(layer, x, lengths)
        return self.head(x)

    def of_layer(self, layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        return layer(x, lengths)


class PacksOutside(Tagger):
    def of_layer(self, layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        output, _ = layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])[0]


class PacksOnce(Tagger):
    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(pad_packed_sequence(x, batch_first=True, total_length=LENGTH)[0])


class LastStates(Tagger):
    """Reads no more than the last hidden state of each layer."""

    def of_layer(self, layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        _, last = layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return last[0].unsqueeze(1)


class ByPosition(nn.Linear):
    """A layer that mixes no positions."""

    def __init__(self, size: int, hidden: int, batch_first: bool) -> None:
        super().__init__(size, hidden)


class RunsOnData(Tagger):
    """Runs each layer on the positions of all samples, without the padding."""

    def of_layer(self, layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed = packed._replace(data=layer(packed.data))
        return pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])[0]


class SplitsAtLengths(Tagger):
    """Runs each layer on parts that end where the lengths say."""

    def of_layer(self, layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        parts = x.flatten(0, 1).tensor_split(lengths.cumsum(0)[:-1])
        return torch.cat([layer(part) for part in parts]).view_as(x)


def criterion(output: Any, batch: Any) -> Tensor:
    return cross_entropy(output.transpose(1, 2), batch["criterion.labels"])


def data(rows: int) -> dict[str, Tensor]:
    return {
        "ids": torch.randint(TOKENS, (rows, LENGTH)),
        "lengths": torch.randint(1, LENGTH + 1, (rows,)),
        "criterion.labels": torch.randint(CLASSES, (rows, LENGTH)),
    }


def boosted(model: nn.Module, sample: Any) -> Any:
    plugin = pipeshard.PipelinePlugin(pp_size=dist.get_world_size(), dry_run_input=sample, num_microbatches=2)
    return pipeshard.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion, plugin=plugin)


def trained(make: type[Tagger], kind: type[nn.Module]) -> float:
    """The largest error of a loss or a gradient in a few steps."""
    torch.manual_seed(0)
    model = make(kind)
    unsplit = copy.deepcopy(model)
    batches = [data(rows) for rows in (4, 3, 4)]
    engine, steps, errors = boosted(model, batches[0]), iter(batches), []
    for batch in batches:
        loss = criterion(unsplit(batch["ids"], batch["lengths"]), batch)
        loss.backward()
        errors.append(abs(float(engine.execute_pipeline(steps)["loss"] / loss.detach()) - 1))
        errors += relative_errors(engine.model.unwrap(), unsplit, floor=1e-6)
        engine.optimizer.zero_grad()
        unsplit.zero_grad()
    return largest_error(errors)


def packed() -> list[float]:
    for make in (PacksOutside, PacksOnce):
        with pytest.raises(
            TraceError,
            match=r"failed after unit layers\.0: .*returns a PackedSequence.*: write a module that takes and returns",
        ):
            boosted(make(nn.GRU), data(4))
    return [error for error in (trained(LastStates, nn.GRU), trained(Tagger, Packed)) if not error < 2e-6]


@pytest.mark.turns
def test_lengths_of_a_packed_result_are_refused_and_the_remedy_works(pool: Pool) -> None:
    """Between layers, what a packed sequence is packed by is a result of a unit, of which others have no values.
    Boost ended in "index_select(): self indexing axis dim should be positive"."""
    assert pool.run(packed, 2) == [[], []]


@pytest.mark.turns
def test_each_batch_may_have_its_own_lengths(pool: Pool) -> None:
    """The second batch was refused: its shapes differed from those of the trace, which had not noted that they depend
    on the lengths."""
    assert largest_error(pool.run(trained, 2, RunsOnData, ByPosition)) < 2e-6
    assert largest_error(pool.run(trained, 2, SplitsAtLengths, ByPosition)) < 2e-6
