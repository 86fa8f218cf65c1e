"""Tests of models whose path or shapes depend on the length of the batch, far from the lengths of a short trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hunt.nets import Net, data
from tests.pool import Pool
from tests.remedies.training import Training, run

pytestmark = pytest.mark.local


class Windows(Net):
    """Pads long samples to windows of 32 positions."""

    def body(self, x: Tensor) -> Any:
        length = x.shape[1]
        padded = F.pad(x, (0, 0, 0, -length % 32)) if length > 40 else x
        return super().body(padded)[:, :length]


class Pools(Net):
    """Pools long samples."""

    def body(self, x: Tensor) -> Any:
        length = x.shape[1]
        if length <= 64:
            return super().body(x)
        pooled = super().body(F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2))
        return F.interpolate(pooled.transpose(1, 2), length).transpose(1, 2)


class Truncates(Net):
    """Reads only the last 64 positions."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(ids[:, -64:], labels[:, -64:])


class Skips(Net):
    """A skip connection of long samples, across the cut."""

    def body(self, x: Tensor) -> Any:
        first = self.layers[0](x)
        return super().body(x) + (first if x.shape[1] > 64 else 0)


class Detaches(Net):
    """Long samples train only the last layers."""

    def body(self, x: Tensor) -> Any:
        first = self.layers[0](x)
        return super().body(x) + (first.detach() if x.shape[1] > 64 else first)


class Counts(Net):
    """Long samples read integers of the first layer, which other stages had replaced with zeros."""

    def body(self, x: Tensor) -> Any:
        largest = self.layers[0](x).argmax(-1, keepdim=True)
        x = super().body(x)
        return x * (1 + 0.01 * largest) if x.shape[1] > 64 else x


def wrong(make: type[Net], lengths: tuple[int, ...]) -> list[str]:
    """What differs from the unsplit model on batches of these lengths."""
    batches = [data(step, length=length) for step, length in enumerate(lengths)]
    return run(Training(make, {"verify": False}, batches=lambda: batches, prepare=nn.Module.double))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lengths", [(12, 100, 33, 129, 70), (100, 100)])
@pytest.mark.parametrize("make", [Windows, Pools, Truncates, Skips, Detaches, Counts])
def test_long_samples_train_as_in_one_process(pool: Pool, make: type[Net], lengths: tuple[int, ...]) -> None:
    """The trace had at most 37 positions: of long samples, shapes were refused, losses were NaN, and integers of
    another stage were 0 without an error."""
    assert pool.run(wrong, 2, make, lengths) == [[], []]
