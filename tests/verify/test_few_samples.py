"""Tests of few samples: if a model does not run on some of its batch's samples, the proof uses all of them."""

import pytest
import torch
from torch import Tensor

from pipeshard.verify.proof import DIFFERENT, EXACT
from tests.pool import Pool
from tests.remedies.nets import Graph
from tests.verify.test_verify import proof_of

pytestmark = pytest.mark.local

NODES = 8


def made() -> Graph:
    torch.manual_seed(0)
    return Graph()


def nodes(highest: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([[0, highest, 1], [highest, 1, 0]])
    x, labels = torch.randn(NODES, 4, generator=generator), torch.arange(NODES) % 4
    return {"x": x, "edges": edges, "labels": labels}


def kinds() -> list[str]:
    """Edges within the first microbatch of all nodes, which are not within one of a few; and one microbatch."""
    return [proof_of(made(), nodes(3)).kind, proof_of(made(), nodes(7), num_microbatches=1).kind]


@pytest.mark.turns
def test_a_batch_that_indexes_its_samples_is_compared_whole(pool: Pool) -> None:
    """A few samples raised IndexError, so nothing was proven: the edges of a graph were applied to each microbatch of
    its nodes, which trained another model."""
    assert pool.run(kinds, 1) == [[DIFFERENT, EXACT]]
