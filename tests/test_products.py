"""Tests of products: kinds of layers, training loops and resumes, each with every schedule and layout, are exact.

`make test` runs a sample of each, `make hunt` all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, RandomSampler

import pipeshard
from pipeshard import PipelinePlugin, load_training_state, save_training_state
from tests.hunt.layers import products
from tests.hunt.loops import LAYOUTS, LOOPS
from tests.hunt.nets import Net, data
from tests.hunt.resumes import RESUMES, STEPS, resumed, saved
from tests.hunt.run import run
from tests.pool import Pool

pytestmark = pytest.mark.local

LAYERS = products()


def layers(name: str) -> tuple[str, list[str]]:
    try:
        return "", run(LAYERS[name])
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}", []


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(pool: Pool, name: str) -> None:
    case = LAYERS[name]
    for error, differences in pool.run(layers, 2, name, timeout=120):
        if case.refused:
            assert error.startswith("pipeshard.errors.") and re.search(case.refused, error), (error, differences)
        else:
            assert (error, differences) == ("", [])


def looped(loop: str, layout: str) -> list[str]:
    return LOOPS[loop](LAYOUTS[layout])


@pytest.mark.turns
@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops(pool: Pool, loop: str, layout: str) -> None:
    size = 2 * LAYOUTS[layout].get("dp_size", 1)
    for differences in pool.run(looped, size, loop, layout, timeout=120):
        assert differences == []


@pytest.mark.turns
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RESUMES)
def test_resumes(pool: Pool, tmp_path: Path, name: str) -> None:
    before, after = RESUMES[name].sizes
    losses, weights = pool.run(saved, before, name, str(tmp_path), timeout=120)[0]
    again, found = pool.run(resumed, after, name, str(tmp_path), timeout=120)[0]
    assert losses == pytest.approx(again, abs=3e-5) and len(losses) == STEPS - RESUMES[name].stop
    assert weights is not None and found is not None and weights.keys() == found.keys()
    rounding = 2**-7 if RESUMES[name].before.get("precision") == "bf16" else 0.0  # FSDP gives values of 32 bits
    for key, value in weights.items():
        assert torch.allclose(value, found[key], rtol=rounding, atol=3e-5), key


class Numbered(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        return {"numbers": torch.tensor(k), **{name: leaf[0] for name, leaf in data(k, rows=1).items()}}


class Numbering(Net):
    """Takes the samples' numbers along."""

    def forward(self, ids: Tensor, labels: Tensor, numbers: Tensor) -> Any:  # type: ignore[override]
        return super().forward(ids, labels)


def read(folder: str, dp_size: int) -> tuple[int, list[int]]:
    """The samples that this rank reads in an epoch, which it leaves after a step; ranks are seeded differently."""
    torch.manual_seed(17 + torch.distributed.get_rank())
    size = torch.distributed.get_world_size() // dp_size
    plugin = PipelinePlugin(pp_size=size, dp_size=dp_size, num_microbatches=2, verify=False)

    def loader() -> Any:
        return plugin.prepare_dataloader(Numbered(), batch_sampler=BatchSampler(RandomSampler(Numbered()), 4, False))

    first, again, seen = loader(), loader(), []
    torch.manual_seed(0)
    model = Numbering()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = pipeshard.initialize(model, optimizer, dataloader=first, plugin=plugin)
    torch.manual_seed(17 + torch.distributed.get_rank())

    def noted(batches: Any) -> Iterator[Any]:
        for batch in batches:
            seen.extend(batch["numbers"].tolist())
            yield batch

    def steps(loader: Any, count: int) -> None:
        batches = noted(loader)
        for _ in range(count):
            engine.execute_pipeline(batches)
            engine.optimizer.step()
            engine.optimizer.zero_grad()

    steps(first, 1)
    save_training_state(folder, 1, engine.model, engine.optimizer, dataloader=first)
    load_training_state(folder, engine.model, engine.optimizer, dataloader=again)
    steps(again, again.remaining)
    return (plugin.grid.replica if dp_size > 1 else 0), seen


@pytest.mark.turns
@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_batch_sampler_is_read_once_by_ranks_that_are_seeded_differently(
    pool: Pool, tmp_path: Path, dp_size: int
) -> None:
    """A BatchSampler around a RandomSampler was not seeded: 18 to 20 of 24 samples were read, some of them twice."""
    replicas: dict[int, list[int]] = {}
    for replica, seen in pool.run(read, 2 * dp_size, str(tmp_path), dp_size):
        assert replicas.setdefault(replica, seen) == seen
    assert sorted(number for seen in replicas.values() for number in seen) == [*range(24)]
