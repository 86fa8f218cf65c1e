"""The dataloader: where it was left, it goes on, and loads nothing of what comes before."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from pipeshard.batch.read import first_samples
from pipeshard.dataloader import ResumableDataLoader
from pipeshard.errors import BatchError, CheckpointError, ConfigurationError


class Numbers(Dataset[int]):
    def __init__(self, count: int = 22) -> None:
        self.count, self.loaded = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> int:
        self.loaded += 1
        return k


class Stream(IterableDataset[int]):
    first, count = 0, 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.count))


class Sharded(Stream):
    """A stream whose workers read different parts of it, by themselves."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, 26, info.num_workers) if info else range(26))


def start_elsewhere(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.first = 100 * worker


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


def test_workers_that_persist_end_with_their_loader() -> None:
    """A loader that was a circle with its sampler was left to the garbage collector, which closed the pipes of its
    workers before they were told to end: a program with two of them ended 10 s late."""
    loader = make(num_workers=2, persistent_workers=True)
    next(iter(loader))
    workers: Any = loader._iterator._workers  # type: ignore[attr-defined]
    gc.disable()
    try:
        del loader
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


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


REPLICAS: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True},
    "in order": {},
    "dropped": {"shuffle": True, "drop_last": True},
    "workers": {"shuffle": True, "num_workers": 2},
    "sampler": {"sampler": [7, 3, 3, 1, 0, 21, 2, 9, 8, 12, 11]},
    "random sampler": {"sampler": RandomSampler(Numbers(), num_samples=19)},
    "stream": {"dataset": Stream()},
    "stream, dropped": {"dataset": Stream(), "drop_last": True},
    "stream, workers": {"dataset": Stream(), "num_workers": 2},
    "stream of parts": {"dataset": Sharded(), "num_workers": 2},
    "stream, parted by a function": {"dataset": Stream(), "num_workers": 2, "worker_init_fn": start_elsewhere},
}


def flat(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("options", REPLICAS.values(), ids=REPLICAS.keys())
def test_replicas_together_read_what_one_process_reads(options: dict[str, Any], replicas: int) -> None:
    whole = epochs(make(batch_size=4 * replicas, **options), 2)
    loaders = [make(replica=r, num_replicas=replicas, **options) for r in range(replicas)]
    shares = [epochs(loader, 2) for loader in loaders]
    for epoch, expected in enumerate(whole):
        together = list(zip(*(share[epoch] for share in shares), strict=True))  # equally many batches
        kept = [batch for batch in expected if len(batch) >= replicas]
        assert [flat(batches) for batches in together] == kept
        for batches in together:
            sizes = [len(batch) for batch in batches]
            assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    if "dataset" not in options:
        assert {len(loader) for loader in loaders} == {len(shares[0][0])}


def test_the_last_samples_are_spread_and_a_last_few_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def sizes(count: int, **options: Any) -> list[list[int]]:
        loaders = [make(dataset=Numbers(count), replica=r, num_replicas=3, **options) for r in range(3)]
        assert len({len(loader) for loader in loaders}) == 1
        return [[len(batch) for batch in loader] for loader in loaders]

    with caplog.at_level(logging.WARNING, "pipeshard"):
        assert sizes(19) == [[4, 3], [4, 2], [4, 2]]
        assert sizes(15) == [[4, 1], [4, 1], [4, 1]]
        assert sizes(14, drop_last=True) == [[4], [4], [4]]
        assert not caplog.records
        assert sizes(14) == [[4], [4], [4]]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3 and all(text.startswith("the last 2 of an epoch's samples") for text in told)  # one a replica


def test_whole_batches_are_dealt_out_in_turn() -> None:
    for options in (OPTIONS["batches"], {"batch_size": None, "dataset": Numbers(6)}):
        whole = epochs(make(**options), 1)[0]
        shares = [epochs(make(**options, replica=r, num_replicas=4), 1)[0] for r in range(4)]
        assert shares == [[whole[0]], [whole[1]], [whole[2]], [whole[3]]]


@pytest.mark.parametrize("options", [{"shuffle": True}, {"dataset": Stream()}], ids=["shuffled", "stream"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_another_number_of_replicas_goes_on(options: dict[str, Any], before: int, after: int) -> None:
    def replicas(n: int) -> list[ResumableDataLoader]:
        return [make(batch_size=8 // n, replica=r, num_replicas=n, **options) for r in range(n)]

    expected = [batch.tolist() for batch in make(batch_size=8, **options)]
    left = replicas(before)
    iterators = [iter(loader) for loader in left]
    assert [flat([next(iterator) for iterator in iterators])] == expected[:1]
    states = [loader.state_dict() for loader in left]
    assert all(state == states[0] for state in states) and states[0]["batch_size"] == 8
    others = replicas(after)
    for other in others:
        other.load_state_dict(states[0])
    going_on = [batch for batch in expected[1:] if len(batch) >= after]
    if "dataset" not in options:
        assert {other.remaining for other in others} == {len(going_on)}
    assert [flat(batches) for batches in zip(*others, strict=True)] == going_on
    with pytest.raises(CheckpointError, match=r"'batch_size': 8.* all replicas together"):
        make(batch_size=8, replica=1, num_replicas=2, **options).load_state_dict(states[0])


def test_states_from_before_there_were_replicas_are_read() -> None:
    state = {"seed": 3, "epoch": 1, "batches": 2, "batch_size": 4, "samples": 22}
    expected = epochs(make(shuffle=True), 2)[1][2:]
    others = [make(shuffle=True, batch_size=2, replica=r, num_replicas=2) for r in range(2)]
    for other in others:
        other.load_state_dict(state)
    assert [flat(batches) for batches in zip(*others, strict=True)] == expected
    unbatched = {**state, "batch_size": None}
    make(batch_size=None).load_state_dict(unbatched)
    with pytest.raises(CheckpointError, match=r"'batches_at_once': 1.*'batches_at_once': 2"):
        make(batch_size=None, replica=0, num_replicas=2).load_state_dict(unbatched)


def test_a_state_at_the_end_for_these_replicas_begins_the_next_epoch() -> None:
    loader = make(batch_size=2, dataset=Numbers(17), replica=3, num_replicas=4)  # 2 x 8, and one left out
    loader.load_state_dict({"seed": 3, "epoch": 0, "batches": 2, "batch_size": 8, "samples": 17})
    assert (loader.epoch, loader.remaining) == (1, 2)


def test_replicas_that_cannot_be_are_refused() -> None:
    for replica, replicas in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigurationError, match=f"got replica={replica} with num_replicas={replicas}"):
            make(replica=replica, num_replicas=replicas)
    shared = DistributedSampler(Numbers(), num_replicas=2, rank=0)
    batches = torch.utils.data.BatchSampler(shared, 2, False)
    for options in ({"sampler": shared}, {"batch_size": 1, "batch_sampler": batches}):
        for replicas in (1, 2):
            with pytest.raises(ConfigurationError, match="DistributedSampler takes one of 2 shares by itself"):
                make(**options, num_replicas=replicas)
    assert flat(make(sampler=DistributedSampler(Numbers(), 1, 0, shuffle=False))) == [*range(22)]


def test_scripts_tell_the_sampler_its_epoch_and_where_to_begin() -> None:
    """`dataloader.sampler.set_epoch(epoch)` and `set_start_index`, which ColossalAI's scripts call, were
    AttributeErrors of the loader's own sampler."""
    whole, loader = epochs(make(shuffle=True), 4), make(shuffle=True)
    found = []
    for epoch in (0, 1, 3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        found += epochs(loader, 1)
    assert found == [whole[0], whole[1], whole[3]]
    loader.sampler.set_epoch(2)  # type: ignore[attr-defined]
    loader.sampler.set_start_index(8)  # type: ignore[attr-defined]
    assert loader.remaining == 4 and epochs(loader, 2) == [whole[2][2:], whole[3]]
    left = make(shuffle=True)
    left.load_state_dict({**left.state_dict(), "epoch": 1, "batches": 2})
    left.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert epochs(left, 1) == [whole[1][2:]]  # the place of a resumed run stays
    for epoch in range(2):  # as often as not the loop is left early
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        assert next(iter(loader)).tolist() == whole[epoch][0]
    with pytest.raises(ConfigurationError, match="start_index=3 is within a batch of 4 samples"):
        loader.sampler.set_start_index(3)  # type: ignore[attr-defined]


class Own(DistributedSampler[int]):
    """A sampler that ColossalAI would make for each replica."""

    def __iter__(self) -> Iterator[int]:
        return iter([*range(self.epoch, 22), *range(self.epoch)][self.rank :: self.num_replicas])


def test_a_distributed_sampler_of_ones_own_is_told_the_epoch() -> None:
    loader = make(sampler=Own(Numbers(), num_replicas=1, rank=0))
    loader.sampler.set_epoch(5)  # type: ignore[attr-defined]
    assert flat(loader)[:4] == [5, 6, 7, 8]


class Shuffling(Sampler[int]):
    """Draws its order from the process's generator, when it is first asked."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(22).tolist()

    def __len__(self) -> int:
        return 22


def test_a_sampler_draws_from_the_generators_of_the_program() -> None:
    """Which depend on nothing here: otherwise a loader that goes on would have another order than the one it left."""
    orders = []
    for begin in (0, 2):
        loader = make(sampler=Shuffling())
        loader.sampler.set_start_index(4 * begin)  # type: ignore[attr-defined]
        torch.manual_seed(4)
        orders.append(epochs(loader, 1)[0])
    assert orders[1] == orders[0][2:]


class Noisy(Numbers):
    """Draws from the generators of the process, as augmentations do."""

    def __getitem__(self, k: int) -> Any:
        return torch.tensor([float(k), torch.rand(()), random.random(), np.random.rand()])


def masked(samples: Any) -> Any:
    return torch.stack(samples) + torch.rand(4)


def test_what_datasets_and_collators_draw_depends_on_the_place_alone() -> None:
    """Collators that mask at random (`DataCollatorForLanguageModeling(mlm=True)`) gave each rank another batch, unless
    the program had seeded them alike, and other masks after a resume."""
    options = {"dataset": Noisy(), "shuffle": True, "collate_fn": masked}
    torch.manual_seed(1)
    whole = epochs(make(**options), 2)
    after = torch.rand(())
    torch.manual_seed(1)
    assert torch.equal(torch.rand(()), after)  # the program's own are as they were
    left = make(**options)
    for _ in zip(range(2), left):
        torch.rand(3)
    other = make(**options)
    other.load_state_dict(left.state_dict())
    assert epochs(other, 2) == [whole[0][2:], whole[1]]
    assert whole[0] != whole[1]
    assert len({batch[0][1] for batch in whole[0]}) == len(whole[0])


def test_lists_of_tokens_become_tensors_as_in_the_trainer() -> None:
    """A tokenized `datasets.Dataset` has lists, which torch's default_collate takes apart, one tensor a position."""
    samples = [{"input_ids": [k, k + 1], "label": k % 2, "text": "words"} for k in range(22)]
    batch = next(iter(make(dataset=samples)))
    assert batch["input_ids"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]] and batch["labels"].tolist() == [0, 1, 0, 1]
    assert "text" not in batch
    ragged = [{"input_ids": [1] * (1 + k)} for k in range(22)]
    with pytest.raises(BatchError, match=r"collate_fn=transformers.DataCollatorForSeq2Seq\(tokenizer\)"):
        next(iter(make(dataset=ragged)))
    tensors = [{"sizes": torch.tensor([k, 1])} for k in range(22)]
    assert next(iter(make(dataset=tensors)))["sizes"].shape == (4, 2)


def test_the_first_samples_of_any_loader() -> None:
    """A loader with a `batch_sampler`, which accelerate gives to all, was taken for one whose entries are batches."""
    samples: Any = [{"input_ids": torch.tensor([k, k])} for k in range(10)]
    batches = BatchSampler(RandomSampler(samples), 3, False)
    loaders = [
        DataLoader(samples, batch_sampler=batches),
        make(dataset=samples, batch_size=1, batch_sampler=batches),
        Accelerator(cpu=True).prepare(DataLoader(samples, batch_size=3)),
    ]
    for loader in loaders:
        assert first_samples(loader)["input_ids"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert first_samples(DataLoader(samples, batch_sampler=[[0, 1], [2]]))["input_ids"].shape == (1, 2)
    assert first_samples(DataLoader(samples, batch_size=None))["input_ids"].shape == (2,)
    lists: Any = [{"input_ids": [1, 2]}]
    with pytest.raises(BatchError, match=r"default_collate takes apart: use plugin.prepare_dataloader"):
        first_samples(DataLoader(lists, batch_size=1))
