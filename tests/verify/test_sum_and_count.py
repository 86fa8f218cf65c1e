"""Tests of sum and count: the proof compares a criterion that returns both with the quotient for the unsplit batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeshard.verify.proof import DIFFERENT, EXACT
from tests.pool import Pool
from tests.verify.test_verify import proof_of
from tests.verify.test_whole_batch import WORDS, Centred, Net, words

pytestmark = pytest.mark.local

WEIGHTS = torch.linspace(0.5, 3.0, WORDS)


def weighted(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(out["logits"].flatten(0, 1), batch["labels"].flatten(), WEIGHTS, reduction="sum")
    return total, WEIGHTS[batch["labels"]].sum()


def background(out: Any, batch: Any) -> tuple[Tensor, int]:
    """A sum that is not zero in a microbatch where there is nothing to count."""
    return out["logits"].square().sum(), int((batch["labels"] == words()["labels"][0, 0]).sum())


def kinds() -> list[str]:
    cases = ((None, weighted), (None, background), (Centred, weighted))
    return [proof_of(Net(layer), words(), criterion).kind for layer, criterion in cases]


@pytest.mark.turns
def test_a_sum_and_a_count_are_proven(pool: Pool) -> None:
    """The proof took the unsplit mean times the weight of a sum: every such criterion was refused at boost, though
    errors advise it. Samples that depend on each other are still found."""
    assert pool.run(kinds, 1) == [[EXACT, EXACT, DIFFERENT]]
