"""The dataloader: where it was left, it goes on, and loads nothing of what comes before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from pipeshard.dataloader import ResumableDataLoader
from pipeshard.errors import CheckpointError, ConfigurationError


class Numbers(Dataset[int]):
    def __init__(self, count: int = 22) -> None:
        self.count, self.loaded = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> int:
        self.loaded += 1
        return k


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


OPTIONS: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True},
    "in order": {},
    "ragged": {"shuffle": True, "drop_last": True},
    "batches": {"batch_size": 1, "batch_sampler": [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10], [11]]},
    "unbatched": {"batch_size": None, "shuffle": True},
    "generator": {"shuffle": True, "generator": 7},
    "workers": {"shuffle": True, "num_workers": 2},
    "persistent": {"shuffle": True, "num_workers": 2, "persistent_workers": True},
    "stream": {"dataset": Stream()},
}


def make(**options: Any) -> ResumableDataLoader:
    if "generator" in options:
        options["generator"] = torch.Generator().manual_seed(options["generator"])
    return ResumableDataLoader(**{"dataset": Numbers(), "batch_size": 4, "seed": 3, **options})


def epochs(loader: ResumableDataLoader, count: int) -> list[list[Any]]:
    return [[batch.tolist() if torch.is_tensor(batch) else batch for batch in loader] for _ in range(count)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_loader_goes_on_where_another_was_left(options: dict[str, Any]) -> None:
    whole = epochs(make(**options), 3)
    flat = [batch for epoch in whole for batch in epoch]
    assert len({str(epoch) for epoch in whole}) == (3 if options.get("shuffle") else 1)
    length = len(whole[0])
    for taken in (1, length) if options.get("num_workers") else (0, 1, length - 1, length, length + 2):
        left = make(**options)
        states = [left.state_dict()]
        for _ in range(2):
            for batch in left:
                states.append(left.state_dict())
                assert str(batch.tolist() if torch.is_tensor(batch) else batch) == str(flat[len(states) - 2])
        other = make(**{**options, "seed": 8, "generator": 9} if "generator" in options else {**options, "seed": 8})
        list(other)
        other.load_state_dict(states[taken])
        assert (other.epoch, other.batches) == divmod(taken, length) or "dataset" in options
        found = [batch for epoch in epochs(other, 3) for batch in epoch]
        assert found[: len(flat) - taken] == flat[taken:], taken


def test_what_comes_before_is_not_loaded() -> None:
    left = make(shuffle=True)
    iterator = iter(left)
    for _ in range(4):
        next(iterator)
    assert left.remaining == 2
    other = make(shuffle=True)
    other.load_state_dict(left.state_dict())
    assert [len(batch) for batch in other] == [4, 2]
    assert other.dataset.loaded == 6  # type: ignore[attr-defined]


def test_an_epoch_that_was_broken_off_is_followed_by_the_next() -> None:
    whole, loader = epochs(make(shuffle=True), 3), make(shuffle=True)
    next(iter(loader))
    assert epochs(loader, 2) == whole[1:]


def test_the_generator_of_a_sampler_of_one_s_own_is_seeded() -> None:
    for generator in (None, torch.Generator().manual_seed(5)):

        def sampled(generator: Any = generator) -> ResumableDataLoader:
            return make(sampler=WeightedRandomSampler([1.0] * 22, 22, generator=generator))

        whole, left = epochs(sampled(), 2), sampled()
        for _ in zip(range(3), left):
            pass
        other = sampled()
        other.load_state_dict(left.state_dict())
        assert epochs(other, 2) == [whole[0][3:], whole[1]]


def test_what_does_not_fit_is_refused() -> None:
    state = make().state_dict()
    for other in (make(batch_size=3), make(dataset=Numbers(21))):
        with pytest.raises(CheckpointError, match=r"saved with .* make it of the same data"):
            other.load_state_dict(state)
    with pytest.raises(ConfigurationError, match="the order is that of sampler"):
        make(shuffle=True, sampler=RandomSampler(Numbers()))
    with pytest.raises(ValueError, match="IterableDataset"):
        make(shuffle=True, dataset=Stream())
