"""Tests of the dataloader: it resumes at its saved position, and does not load earlier samples."""

from __future__ import annotations

import enum
import gc
import io
import itertools
import logging
import math
import random
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets.distributed import split_dataset_by_node
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from pipeshard.checkpoint import untrusted
from pipeshard.data.first_samples import find_sample, first_samples
from pipeshard.data.order import Order, packed
from pipeshard.dataloader import ResumableDataLoader
from pipeshard.errors import BatchError, CheckpointError, ConfigurationError, UsageError
from tests.pool import Pool


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


def masking() -> DataCollatorForLanguageModeling:
    """A collator with a generator of its own, which it creates at its first call."""
    words = Tokenizer(WordLevel({"[MASK]": 0, "[PAD]": 1, "a": 2}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, mask_token="[MASK]", pad_token="[PAD]")
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5, seed=3)


def epochs(loader: ResumableDataLoader, count: int) -> list[list[Any]]:
    return [[batch.tolist() if torch.is_tensor(batch) else batch for batch in loader] for _ in range(count)]


@pytest.mark.turns
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


class Flaky(Numbers):
    """Raises at one sample, as a file that cannot be read."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def __getitem__(self, k: int) -> int:
        if k == self.bad:
            raise OSError(f"sample {k} cannot be read")
        return k


def collated(samples: list[int]) -> torch.Tensor:
    if 9 in samples:
        raise OSError("sample 9 cannot be read")
    return torch.tensor(samples)


FLAKY: dict[str, tuple[int, dict[str, Any]]] = {
    "dataset": (2, {"dataset": Flaky(9)}),
    "workers": (2, {"dataset": Flaky(9), "num_workers": 2}),
    "last batch": (5, {"dataset": Flaky(20)}),
    "collator": (2, {"collate_fn": collated}),
    "stream": (2, {"dataset": Sharded(), "collate_fn": collated}),
}


@pytest.mark.parametrize(("bad", "options"), FLAKY.values(), ids=FLAKY.keys())
def test_a_batch_that_raises_is_followed_by_the_next(bad: int, options: dict[str, Any]) -> None:
    """A sample that raised ended the epoch on its rank: the other ranks read on, and each further step was a
    BatchError. A state that was saved then began with the next epoch, and the rest of this one was never read."""
    loader, count = make(**options), 7 if isinstance(options.get("dataset"), Stream) else 6
    batches, read, states = iter(loader), [], []
    for number in range(count):
        if number == bad:
            with pytest.raises(OSError, match=r"sample \d+ cannot be read"):
                next(batches)
        else:
            read.append(next(batches))
        states.append((loader.epoch, loader.batches))
    assert states == [(0, number + 1) for number in range(count)]
    assert flat(read) == [k for k in range(26 if count == 7 else 22) if k // 4 != bad]
    state = {**loader.state_dict(), "epoch": 0, "batches": 4}
    assert next(batches, None) is None and loader.epoch == 1
    resumed = make(**options)
    resumed.load_state_dict(state)
    assert next(iter(resumed)).tolist() == [16, 17, 18, 19]


def test_a_batch_that_raises_while_its_position_is_saved_is_not_lost() -> None:
    """state_dict() of a stream loads the next batch. If it raised, the save failed, and the batch was lost on the one
    rank that saved: from then on, this rank was one batch ahead of the others."""
    loader = make(dataset=Sharded(), collate_fn=collated)
    batches = iter(loader)
    assert [next(batches)[0], next(batches)[0]] == [0, 4]
    assert loader.state_dict()["batches"] == 2
    with pytest.raises(OSError, match="sample 9 cannot be read"):
        next(batches)
    assert next(batches).tolist() == [12, 13, 14, 15]
    assert loader.state_dict()["batches"] == 4


class Expired(Stream):
    """A stream that cannot be read to its end."""

    def __iter__(self) -> Iterator[int]:
        yield from range(9)
        raise OSError("the token has expired")


@pytest.mark.parametrize("taken", [3, 4])
def test_a_stream_that_ends_at_an_error_before_its_position_raises_it(taken: int) -> None:
    """A resume from a stream that could no longer be read advised to correct state_dict or, if the last batch before
    the position failed, silently ended the epoch."""
    other = make(dataset=Expired())
    other.load_state_dict({**other.state_dict(), "batches": taken})
    with pytest.raises(OSError, match="the token has expired"):
        next(iter(other))


def test_a_batch_that_raises_before_the_position_is_skipped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The error was swallowed."""
    other = make(dataset=Sharded(), collate_fn=collated)
    other.load_state_dict({**other.state_dict(), "batches": 4})
    assert next(iter(other)).tolist() == [16, 17, 18, 19]
    assert "batch 2 of an epoch of Sharded" in caplog.text and "sample 9 cannot be read" in caplog.text


class Slow(Stream):
    """A stream whose batch at 4 takes longer than the loader's timeout."""

    def __iter__(self) -> Iterator[int]:
        for k in range(12):
            if k == 4:
                time.sleep(2.5)
            yield k


@pytest.mark.parametrize("skipped", [0, 2])
def test_a_batch_that_was_not_ready_in_time_is_not_counted(skipped: int) -> None:
    """After the timeout of a loader, the next call reads the same batch, but it was counted twice, so that a resume
    omitted a batch. A timeout before the position of a resume repeated one."""
    loader = make(dataset=Slow(), num_workers=1, timeout=1, prefetch_factor=1)
    loader.load_state_dict({**loader.state_dict(), "batches": skipped})
    batches, read = iter(loader), []
    while len(read) < 3 - skipped:
        try:
            read.append(next(batches)[0].item())
        except RuntimeError as error:
            assert "timed out" in str(error)
    assert read == [0, 4, 8][skipped:] and loader.batches == 3


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


def test_a_seed_that_is_no_integer_is_refused() -> None:
    """seed=args.seed, whose default is None, failed in the first iteration, inside of pipeshard."""
    for seed in (None, "0", 0.5):
        with pytest.raises(ConfigurationError, match=f"seed must be an integer, the same on every rank, got {seed!r}"):
            make(seed=seed)
    assert make(seed=None, generator=5).seed == 5
    assert flat(make(seed=np.int64(3), shuffle=True)) == flat(make(seed=3, shuffle=True))


def test_what_does_not_fit_is_refused() -> None:
    state = make().state_dict()
    for other in (make(batch_size=3), make(dataset=Numbers(21))):
        with pytest.raises(CheckpointError, match=r"saved with .* Create the dataloader from the same data"):
            other.load_state_dict(state)
    with pytest.raises(ConfigurationError, match=r"sampler=..., which already sets the order"):
        make(shuffle=True, sampler=RandomSampler(Numbers()))
    with pytest.raises(ValueError, match="IterableDataset"):
        make(shuffle=True, dataset=Stream())


def test_batches_in_the_order_of_the_workers_are_refused() -> None:
    """Each stage read the batches in the order in which its own workers finished: after hours, a step had different
    batches. A single process that resumed trained on some twice, and on others never, without an error."""
    with pytest.raises(ConfigurationError, match=r"in_order=False is not supported: .*Remove in_order=False"):
        make(num_workers=2, in_order=False)
    assert flat(make(num_workers=2, in_order=True)) == flat(make())


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


@pytest.mark.turns
@pytest.mark.sampled(8)
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
    assert len(told) == 3 and all(text.startswith("the last 2 samples of each epoch") for text in told)  # one a replica


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
    ended = before == 4 and "dataset" in options  # the last 2 of 10 are too few for them
    going_on = [batch for batch in (expected if ended else expected[1:]) if len(batch) >= after]
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
            with pytest.raises(ConfigurationError, match="DistributedSampler already splits the data into 2 shares"):
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
    with pytest.raises(
        ConfigurationError, match="start_index must be a non-negative multiple of the batch size 4, got 3"
    ):
        loader.sampler.set_start_index(3)  # type: ignore[attr-defined]


def test_the_sampler_may_be_told_the_epoch_of_an_iterator_that_exists() -> None:
    """`set_epoch(epoch)` after `iter(dataloader)` moved the position but not the iterator: the next epoch had no
    batches, and its order was never trained."""
    whole, loader = epochs(make(shuffle=True), 3), make(shuffle=True)
    for epoch in range(3):
        iterator = iter(loader)
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        assert [batch.tolist() for batch in iterator] == whole[epoch]
        assert (loader.epoch, loader.batches) == (epoch + 1, 0)
    loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    iter(loader)
    loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    assert epochs(loader, 2) == whole[:2]  # as nothing was read
    iter(loader)
    loader.sampler.set_epoch(2)  # type: ignore[attr-defined]
    loader.sampler.set_start_index(8)  # type: ignore[attr-defined]
    assert epochs(loader, 1) == [whole[2][2:]]


@pytest.mark.parametrize("how", ["load_state_dict", "set_start_index", "set_epoch"])
def test_an_iterator_from_before_the_place_was_set_is_not_read(how: str) -> None:
    """An iterator that a script made before it loaded its state read from the beginning, and was counted from the
    saved place: batches came twice, and the next save had another place."""
    whole, loader = epochs(make(shuffle=True), 1), make(shuffle=True)
    before = iter(loader)
    if how == "load_state_dict":
        loader.load_state_dict({**loader.state_dict(), "batches": 2})
    elif how == "set_epoch":
        next(before)
        loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    else:
        loader = make(shuffle=True)
        loader.sampler.set_start_index(8)  # type: ignore[attr-defined]
        before = iter(loader)
        next(before)
        loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
        loader.sampler.set_start_index(8)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="created before the position of its dataloader was loaded or set"):
        next(before)
    assert loader.batches == (0 if how == "set_epoch" else 2)
    assert epochs(loader, 1) == [whole[0] if how == "set_epoch" else whole[0][2:]]


class Own(DistributedSampler[int]):
    """A sampler that ColossalAI would make for each replica."""

    def __iter__(self) -> Iterator[int]:
        return iter([*range(self.epoch, 22), *range(self.epoch)][self.rank :: self.num_replicas])


def test_a_distributed_sampler_of_ones_own_is_told_the_epoch() -> None:
    loader = make(sampler=Own(Numbers(), num_replicas=1, rank=0))
    loader.sampler.set_epoch(5)  # type: ignore[attr-defined]
    assert flat(loader)[:4] == [5, 6, 7, 8]


class Ordered(Sampler[int]):
    """Samplers that people write; each draws its order in another way."""

    def __init__(self) -> None:
        self.indices, self.rounds, self.own = list(range(22)), 0, random.Random()

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(22).tolist()


class InPlace(Ordered):
    """Shuffles the order of the epoch before."""

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        return iter(self.indices)


class OwnGenerator(InPlace):
    def __iter__(self) -> Iterator[int]:
        self.own.shuffle(self.indices)
        yield from self.indices


class Nested(Ordered):
    """Shuffles the arrays of its buckets in place, whatever holds them, and sometimes the order of the buckets."""

    def __init__(self, kind: Any) -> None:
        self.buckets = kind([np.arange(11), np.arange(11, 22)])
        self.taken: dict[str, Any] = {"newest": deque(maxlen=3), "ever": set(), "counts": defaultdict(int)}

    def __iter__(self) -> Iterator[int]:
        buckets = self.buckets.values() if isinstance(self.buckets, dict) else self.buckets
        for bucket in buckets:
            np.random.shuffle(bucket)
            yield from bucket.tolist()
        self.taken["ever"].add(int(bucket[0]))
        self.taken["newest"].append(bucket.copy())
        self.taken["counts"][int(bucket[0])] += 1
        if isinstance(self.buckets, OrderedDict):
            self.buckets.move_to_end(next(iter(self.buckets)))


class Lazy(Ordered):
    """Draws each index when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(22))
        while left:
            yield left.pop(int(np.random.randint(len(left))))


class Counting(Ordered):
    """Counts its epochs at the end of each, and goes by the count."""

    def __iter__(self) -> Iterator[int]:
        yield from ((5 * k + self.rounds) % 22 for k in range(22))
        self.rounds += 1


class Curriculum(Counting):
    """Knows its state itself."""

    def state_dict(self) -> dict[str, int]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rounds = state["rounds"]


class Endless(Ordered):
    """Has no length, and epochs of different ones."""

    __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        self.rounds += 1
        yield from torch.randperm(22).tolist()[: 22 - 5 * (self.rounds % 2)]


class Wrapping(Sampler[int]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class Buckets(Sampler[list[int]]):
    """Batches in a random order, which it also makes to count them."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def made(self) -> list[list[int]]:
        indices = list(self.inner)
        batches = [indices[k : k + 4] for k in range(0, len(indices), 4)]
        random.shuffle(batches)
        return batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.made())

    def __len__(self) -> int:
        return len(self.made())


def whole() -> DistributedSampler[int]:
    return DistributedSampler(Numbers(), 1, 0)


SAMPLERS: dict[str, Any] = {
    "global": lambda: {"sampler": Ordered()},
    "in place": lambda: {"sampler": InPlace()},
    "own generator": lambda: {"sampler": OwnGenerator()},
    "arrays in a list": lambda: {"sampler": Nested(list)},
    "arrays in a tuple": lambda: {"sampler": Nested(tuple)},
    "arrays in a deque": lambda: {"sampler": Nested(deque)},
    "arrays in a dict": lambda: {"sampler": Nested(lambda arrays: dict(enumerate(arrays)))},
    "arrays in an OrderedDict": lambda: {"sampler": Nested(lambda arrays: OrderedDict(enumerate(arrays)))},
    "arrays in a defaultdict": lambda: {"sampler": Nested(lambda arrays: defaultdict(list, enumerate(arrays)))},
    "lazy": lambda: {"sampler": Lazy()},
    "counting": lambda: {"sampler": Counting()},
    "counting, two workers": lambda: {"sampler": Counting(), "num_workers": 2},
    "curriculum": lambda: {"sampler": Curriculum()},
    "endless": lambda: {"sampler": Endless()},
    "endless, workers that persist": lambda: {"sampler": Endless(), "num_workers": 2, "persistent_workers": True},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(22))},
    "distributed": lambda: {"sampler": whole()},
    "wrapped": lambda: {"sampler": Wrapping(Wrapping(RandomSampler(Numbers())))},
    "batches": lambda: {"batch_size": 1, "batch_sampler": BatchSampler(RandomSampler(Numbers()), 4, False)},
    "batches, wrapped": lambda: {"batch_size": 1, "batch_sampler": BatchSampler(Wrapping(InPlace()), 4, False)},
    "batches, distributed": lambda: {"batch_size": 1, "batch_sampler": BatchSampler(whole(), 4, False)},
    "buckets": lambda: {"batch_size": 1, "batch_sampler": Buckets(RandomSampler(Numbers()))},
    "buckets in place": lambda: {"batch_size": 1, "batch_sampler": Buckets(OwnGenerator())},
    "buckets, counting": lambda: {"batch_size": 1, "batch_sampler": Buckets(Counting())},
    "buckets, curriculum": lambda: {"batch_size": 1, "batch_sampler": Buckets(Curriculum())},
}


def seeded_otherwise(number: int) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(number)


def as_in_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.turns
@pytest.mark.parametrize("options", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_a_sampler_of_ones_own_has_one_order_everywhere(options: Any) -> None:
    """A BatchSampler around a RandomSampler was never seeded, nor was any sampler in another: ranks read different
    batches, and a resume repeated some samples and skipped others."""
    seeded_otherwise(1)
    expected = epochs(make(dataset=Noisy(), collate_fn=torch.stack, **options()), 3)
    assert len({str([row[0] for batch in epoch for row in batch]) for epoch in expected}) == 3
    lengths = [len(epoch) for epoch in expected]
    for epoch, taken in ((0, 0), (0, 2), (0, lengths[0]), (1, 0), (1, 3), (2, lengths[2] - 1)):
        seeded_otherwise(10 * epoch + taken)
        left = make(dataset=Noisy(), collate_fn=torch.stack, **options())
        epochs(left, epoch)
        iterator = iter(left)
        for _ in range(taken):
            next(iterator)
        state = as_in_a_file(left.state_dict())
        other = make(dataset=Noisy(), collate_fn=torch.stack, **options())
        other.load_state_dict(state)
        wanted = [batches for batches in [expected[epoch][taken:], *expected[epoch + 1 :]] if batches]
        assert epochs(other, len(wanted)) == wanted, (epoch, taken)
    shares = []
    for replica in range(2):
        seeded_otherwise(replica)
        shares.append(epochs(make(replica=replica, num_replicas=2, **options()), 1)[0])
    read = [number for batches in zip(*shares, strict=True) for batch in batches for number in batch]
    assert len(read) == len(set(read)) >= len({row[0] for batch in expected[0] for row in batch}) - 6


class Yielding(Ordered):
    """Keeps its position as torchdata's StatefulDistributedSampler does, for a loader that reads nothing twice."""

    def __init__(self) -> None:
        super().__init__()
        self.yielded, self.start = 0, 0

    def __iter__(self) -> Iterator[int]:
        first, self.start = self.start, 0
        for k in range(first, 22):
            self.yielded = k + 1
            yield k

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["yielded"]


class YieldingStream(Yielding, IterableDataset[int]):  # type: ignore[misc]
    __len__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["here", "worker"])
@pytest.mark.parametrize("first", [1, 6])
def test_a_sampler_whose_state_is_a_position_is_refused(first: int, options: dict[str, Any]) -> None:
    """A resume in the second epoch skipped the rest of the epoch or, after a break, a part of it, without an error."""
    left = make(sampler=Yielding(), **options)
    for taken in (first, 2):
        for _ in zip(range(taken), left):
            pass
    for state in (left.state_dict(), as_in_a_file(left.state_dict())):
        other = make(sampler=Yielding(), **options)
        other.load_state_dict(state)
        assert other.state_dict()["last_entry"] == 7
        with pytest.raises(
            CheckpointError,
            match=r"Yielding yields a different order.*entry 7 differs.*Correct the sampler's state_dict",
        ):
            list(other)


def test_a_stream_whose_state_is_a_position_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A resume in the second epoch ended it at once, without an error."""
    left, other = make(dataset=YieldingStream()), make(dataset=YieldingStream())
    epochs(left, 1)
    other.load_state_dict(left.state_dict())
    assert epochs(other, 1) == [[]]
    assert "a dataloader yielded no batch in epoch 1" in caplog.text
    for _ in zip(range(2), left):
        pass
    other.load_state_dict(left.state_dict())
    with pytest.raises(
        CheckpointError, match=r"YieldingStream ended after 0 batches.* but 2 had been read.*state_dict"
    ):
        list(other)


def test_the_programs_generators_are_left_as_they_were() -> None:
    for options in SAMPLERS.values():
        if not options().get("num_workers"):  # torch itself draws to start them
            seeded_otherwise(1)
            epochs(make(dataset=Noisy(), collate_fn=torch.stack, **options()), 1)
            after = torch.rand(()), random.random(), np.random.rand()
            seeded_otherwise(1)
            assert after == (torch.rand(()), random.random(), np.random.rand())


class Noisy(Numbers):
    """Draws from the generators of the process, as augmentations do."""

    def __getitem__(self, k: int) -> Any:
        return torch.tensor([float(k), torch.rand(()), random.random(), np.random.rand()])


class Moves(Noisy):
    """Draws from a generator of its own as well."""

    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng()

    def __getitem__(self, k: int) -> Any:
        return super().__getitem__(k) * self.own.random()


def test_workers_draw_what_one_process_draws() -> None:
    """Augmentations of a resumed epoch were other ones where workers draw them, and of a generator that the dataset
    holds they were other ones everywhere."""
    options: dict[str, Any] = {"dataset": Moves(), "shuffle": True, "collate_fn": masked}
    expected = epochs(make(**options), 2)
    for workers in ({"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}):
        left = make(**{**options, **workers, "dataset": Moves()})
        assert epochs(left, 2) == expected
        left.load_state_dict({**left.state_dict(), "epoch": 0, "batches": 2})
        assert epochs(left, 2) == [expected[0][2:], expected[1]]


def masked(samples: Any) -> Any:
    return torch.stack(samples) + torch.rand(4)


class OnDemand(Noisy):
    """Draws from a generator that it creates at its first sample."""

    own: Any = None

    def __getitem__(self, k: int) -> Any:
        if self.own is None:
            self.own = np.random.default_rng(0)
        return super().__getitem__(k) * self.own.random()


class Masking:
    """A collator that creates its generator in its first batch, nearer than the dataset's generator is."""

    def __init__(self) -> None:
        self.own: Any = None

    def __call__(self, samples: Any) -> Any:
        if self.own is None:
            self.own = random.Random(0)
        return masked(samples) + self.own.random()


@pytest.mark.parametrize("kind", ["dataset", "collator", "both"])
def test_a_generator_that_is_created_on_demand_is_seeded(kind: str) -> None:
    """A generator was looked for once, before the first sample: one that this sample created was never seeded. After a
    resume, or with other workers, augmentations were other ones, without an error."""

    def options() -> dict[str, Any]:
        dataset = Noisy() if kind == "collator" else OnDemand()
        return {"dataset": dataset, "shuffle": True, "collate_fn": masked if kind == "dataset" else Masking()}

    expected = epochs(make(**options()), 2)
    for workers in ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        left = make(**options(), **workers)
        assert epochs(left, 2) == expected
        other = make(**options(), **workers)
        other.load_state_dict({**left.state_dict(), "epoch": 0, "batches": 2})
        assert epochs(other, 2) == [expected[0][2:], expected[1]]


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


class Shuffled(Sharded):
    """A stream that shuffles by the process's generators and by one of its own; workers divide it."""

    def __init__(self) -> None:
        self.own = np.random.default_rng()

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            yield int(self.own.integers(100)) * 10_000 + random.randrange(100) * 100 + number


class Sized(Sharded):
    def __len__(self) -> int:
        return 26


class Rounds(Stream):
    """Counts its epochs itself."""

    rounds = 0

    def __iter__(self) -> Iterator[int]:
        self.rounds += 1
        return iter(range(self.rounds, self.rounds + 22))


class Told(Stream):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, 22 + self.epoch))


class Progressive(Dataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> int:
        return 100 * self.epoch + number


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_knows_its_epoch(workers: int) -> None:
    """A dataset with set_epoch, which the loader calls according to docs/data.md, gave the samples of epoch 0 in every
    epoch."""
    loader = make(dataset=Progressive(), batch_size=4, num_workers=workers)
    whole = epochs(loader, 2)
    assert whole == [[[100 * epoch + number for number in range(4)]] for epoch in range(2)]
    again = make(dataset=Progressive(), batch_size=4, num_workers=workers)
    again.load_state_dict(loader.state_dict() | {"epoch": 1})
    assert epochs(again, 1) == whole[1:]
    loader.dataset.set_epoch(7)  # type: ignore[attr-defined]
    assert epochs(loader, 1) == [[[700, 701, 702, 703]]]  # the user's own epoch stays


STREAMS: dict[str, dict[str, Any]] = {
    "plain": {"dataset": Sharded},
    "sized": {"dataset": Sized},
    "sized, dropped": {"dataset": Sized, "drop_last": True},
    "sized, workers": {"dataset": Sized, "num_workers": 2},
    "sized, dropped, workers": {"dataset": Sized, "num_workers": 2, "drop_last": True},
    "shuffled": {"dataset": Shuffled},
    "shuffled, workers": {"dataset": Shuffled, "num_workers": 2},
    "shuffled, workers that persist": {"dataset": Shuffled, "num_workers": 2, "persistent_workers": True},
    "counting": {"dataset": Rounds},
    "told its epoch, workers that persist": {"dataset": Told, "num_workers": 1, "persistent_workers": True},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("options", STREAMS.values(), ids=STREAMS.keys())
def test_a_stream_goes_on_at_every_batch(options: dict[str, Any], replicas: int) -> None:
    """With two workers and two replicas a state after batch 3 of 4 counted as the end, and one at the end of a stream
    without a length gave an epoch of no batches."""

    def loader(replica: int = 0) -> ResumableDataLoader:
        seeded_otherwise(replica)
        new = {**options, "dataset": options["dataset"]()}
        return make(batch_size=3, replica=replica, num_replicas=replicas, **new)

    expected, states = [], []
    left = loader()
    for _ in range(2):
        expected.append([])
        for batch in left:
            expected[-1].append(batch.tolist())
            states.append(as_in_a_file(left.state_dict()))
    first = len(expected[0])
    if hasattr(left.dataset, "__len__"):
        assert len(left) == first
        assert len(loader()) == first
    for taken in {1, first - 1, first, first + 1}:
        other = loader()
        other.load_state_dict(states[taken - 1])
        assert other.epoch == taken // first
        wanted = [expected[0][taken:], expected[1]] if taken < first else [expected[1][taken - first :]]
        assert epochs(other, len(wanted)) == wanted, taken
    shares = [epochs(loader(replica), 1)[0] for replica in range(replicas)]
    read = [number for batches in zip(*shares, strict=True) for number in flat(batches)]
    assert len({number % 100 for number in read}) == len(read)


def test_a_stream_with_other_workers_is_refused() -> None:
    state = make(dataset=Sharded(), num_workers=2).state_dict()
    with pytest.raises(CheckpointError, match=r"'workers': 2.*'workers': 1.*workers is num_workers"):
        make(dataset=Sharded()).load_state_dict(state)
    make(dataset=Sharded()).load_state_dict(make(dataset=Sharded(), num_workers=1).state_dict())


def test_replicas_mask_otherwise_though_they_read_one_stream() -> None:
    options: dict[str, Any] = {"dataset": Stream(), "collate_fn": lambda samples: torch.rand(len(samples)).tolist()}
    first, second = (epochs(make(**options, replica=replica, num_replicas=2), 1)[0] for replica in range(2))
    assert first[0] != second[0]
    for workers in ({}, {"num_workers": 1, "persistent_workers": True}):
        loader = make(**options, **workers, replica=0, num_replicas=2)
        assert epochs(loader, 1) == [first]
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "batches": 1})
        assert epochs(loader, 1) == [first[1:]]


class Drawn(Stream):
    """Draws its samples from torch's generator, one after another."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(1000, ())) for _ in range(16))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["here", "worker"])
def test_a_stream_draws_the_same_with_any_number_of_replicas(options: dict[str, Any]) -> None:
    """With replicas, each batch's collator advanced the generator from which the stream draws its samples."""

    def collated(samples: Any) -> Any:
        torch.rand(3)
        return torch.tensor(samples)

    options = {**options, "dataset": Drawn(), "collate_fn": collated}
    whole = epochs(make(batch_size=4, **options), 2)
    shares = [epochs(make(batch_size=2, replica=r, num_replicas=2, **options), 2) for r in range(2)]
    for epoch, expected in enumerate(whole):
        assert [flat(batches) for batches in zip(*(share[epoch] for share in shares), strict=True)] == expected


class OfALibrary(Stream):
    """Has a state for a loader of its library, which passes the number of samples."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_a_state_that_needs_arguments_is_not_that_of_an_order() -> None:
    """MosaicML's StreamingDataset ended in a TypeError that named only the missing arguments."""
    left, other = make(dataset=OfALibrary()), make(dataset=OfALibrary())
    expected = epochs(make(dataset=Stream()), 1)[0]
    assert next(iter(left)).tolist() == expected[0]
    other.load_state_dict(left.state_dict())
    assert epochs(other, 1) == [expected[1:]]


def test_hugging_face_streams_are_told_their_epoch() -> None:
    """Without `set_epoch` a shuffled stream gave one order in all epochs, and after a resume that of epoch 0."""

    def loader() -> ResumableDataLoader:
        rows = datasets.Dataset.from_dict({"number": list(range(22))})
        stream = rows.to_iterable_dataset(num_shards=2).shuffle(seed=4, buffer_size=8)
        return make(dataset=stream, collate_fn=lambda samples: [sample["number"] for sample in samples])

    whole = epochs(loader(), 2)
    assert whole[0] != whole[1] and sorted(flat(whole[1])) == [*range(22)]
    left, other = loader(), loader()
    for _ in range(2):
        for _ in zip(range(2), left):
            pass
    other.load_state_dict(left.state_dict())
    assert epochs(other, 1) == [whole[1][2:]]


class Around(IterableDataset[Any]):
    """A stream that reads another one."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)


def test_hugging_face_streams_without_a_seed_are_refused() -> None:
    """Each process had its own order: replicas and resumed runs read some samples twice, and others never."""
    rows = datasets.Dataset.from_dict({"number": list(range(22))}).to_iterable_dataset(num_shards=2)

    def both(**seed: int) -> list[Any]:
        shuffled = rows.shuffle(buffer_size=8, **seed)
        mixed = datasets.interleave_datasets([rows, rows], probabilities=[0.5, 0.5], **seed)
        return [shuffled, Around(shuffled.map(dict).filter(bool)), mixed, mixed.take(4)]

    for stream in both():
        with pytest.raises(ConfigurationError, match=r"without a seed.* stream\.shuffle\(seed=0, buffer_size=1000\)"):
            make(dataset=stream)
    for stream in (rows, *both(seed=4)):
        make(dataset=stream)


def test_a_stream_that_is_split_by_node_is_refused() -> None:
    """Each replica read a half of its own half of the stream."""
    stream = datasets.Dataset.from_dict({"number": list(range(22))}).to_iterable_dataset()
    for replicas in (1, 2):
        with pytest.raises(ConfigurationError, match=r"IterableDataset already splits the data into 2 shares"):
            make(dataset=split_dataset_by_node(stream, 0, 2), num_replicas=replicas)


def refused_pipe(replicas: int) -> None:
    pipe = IterableWrapper(range(22)).sharding_filter().map(int)
    with pytest.raises(ConfigurationError, match=r"ShardingFilterIterDataPipe .*Remove sharding_filter\(\)"):
        make(dataset=pipe, num_replicas=replicas)
    assert flat(make(dataset=IterableWrapper(range(22)), num_replicas=replicas))[:4] == [*range(4)]


def test_a_pipe_that_shards_itself_is_refused(pool: Pool) -> None:
    """torch shards a DataPipe by the rank of the process: each stage read other samples. With replicas, it was not
    sharded at all, and each worker silently read the samples of the others."""
    refused_pipe(2)
    pool.run(refused_pipe, 2, 1)
    pipe = IterableWrapper(range(22)).sharding_filter()
    assert sorted(flat(make(dataset=pipe, num_workers=2))) == [*range(22)]


def test_the_generator_of_a_transform_of_hugging_face_is_seeded() -> None:
    """A generator in the function of `set_transform` was never found: each rank augmented its batches differently."""

    def loader(seed: int) -> ResumableDataLoader:
        own = np.random.default_rng(seed)
        rows = datasets.Dataset.from_dict({"number": list(range(22))})
        rows.set_transform(lambda batch: {"x": [own.random() + number for number in batch["number"]]})
        return make(dataset=rows, collate_fn=lambda samples: [sample["x"] for sample in samples])

    assert epochs(loader(1), 2) == epochs(loader(2), 2)


def test_a_sampler_that_was_told_its_epoch_by_the_program_keeps_it() -> None:
    sampler = DistributedSampler(Numbers(), 1, 0)
    loader = make(sampler=sampler)
    sampler.set_epoch(5)
    assert flat(loader) == list(sampler)


def test_the_place_of_an_iterator_that_is_not_counted_is_not_saved() -> None:
    """After a look at a batch within an epoch, the position was in the next epoch: a resumed run skipped the rest."""
    loader = make()
    training = iter(loader)
    next(training)
    next(iter(loader))
    assert loader.state_dict()["epoch"] == 1  # so far, as if the first epoch had been broken off
    next(training)
    with pytest.raises(UsageError, match=r"from an older iterator, but only the newest.*, create another dataloader"):
        loader.state_dict()
    for _ in loader:
        assert loader.state_dict()["epoch"] in (2, 3)
    next(training)
    loader.load_state_dict(make().state_dict())
    assert loader.state_dict() == make().state_dict()


def test_two_loaders_in_turn() -> None:
    """An evaluation in the middle of an epoch does not move the training's data."""
    train, evaluate = {"dataset": Noisy(), "sampler": Lazy()}, {"dataset": Noisy(9), "shuffle": True}
    expected, alone = epochs(make(**train), 1)[0], epochs(make(**evaluate), 1)
    found = []
    for batch in make(**train):
        found.append(batch.tolist())
        assert epochs(make(**evaluate), 1) == alone
    assert found == expected


def test_combinations_are_refused_as_by_torch() -> None:
    batches = BatchSampler(RandomSampler(Numbers()), 4, False)
    for options in (
        {"batch_size": 2, "batch_sampler": batches},
        {"batch_size": 1, "batch_sampler": batches, "shuffle": True},
        {"batch_size": 1, "batch_sampler": batches, "sampler": Ordered()},
        {"batch_size": 1, "batch_sampler": batches, "drop_last": True},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 0},
        {"dataset": Stream(), "sampler": Ordered()},
        {"dataset": Stream(), "batch_size": 1, "batch_sampler": batches},
        {"persistent_workers": True},
    ):
        with pytest.raises(ValueError, match=r"batch|shuffle|sampler|persistent"):
            make(**options)


MANY: dict[str, Any] = {
    "numbers": lambda values: [value / 3 for value in values],
    "strings": lambda values: [f"sample {value}\0\ud800" for value in values],
    "batches": lambda values: [values[k : k + 4] for k in range(0, len(values), 4)],
    "tuple": tuple,
    "pairs": lambda values: [(value, f"sample {value}") for value in values],
    "pairs and a tensor": lambda values: [torch.tensor(0.5), [(value, None) for value in values]],
    "by pair": lambda values: dict.fromkeys(itertools.pairwise(values), 0.5),
    "by sample": lambda values: {f"sample {value}": {"loss": 0.5, 1: {value}} for value in values},
    "set": set,
    "deque": deque,
    "deques": lambda values: [deque(values[k : k + 4], 8) for k in range(0, len(values), 4)],
    "losses": lambda values: dict.fromkeys(values, 0.5),
    "buckets": lambda values: {f"bucket {k}": values[k::100] for k in range(100)},
    "counts": Counter,
    "other keys and a large number": lambda values: [values, {None: 2**100, 0.5: -math.inf}],
}


@pytest.mark.parametrize("kind", MANY.values(), ids=MANY.keys())
def test_a_position_with_many_values_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """A sampler that shuffles a list of 4.2 million indices in place was saved in the second epoch, and none of these
    training states could be loaded."""
    monkeypatch.setattr(untrusted, "MOST_STEPS", 15_000)
    left, other = Ordered(), Ordered()
    order, later = Order(left), Order(other)
    left.indices = kind(list(range(20_000)))
    torch.save(untrusted.plain(packed(order.state()), "the position"), tmp_path / "position.pt")
    later.load_state(untrusted.load_plain(tmp_path / "position.pt", "a position", "load another"))
    assert other.indices == left.indices and type(other.indices) is type(left.indices)


class Phase(enum.StrEnum):
    WARM = "warm"


class Named(Sampler[int]):
    """Yields names, of which each is also an index."""

    def __iter__(self) -> Iterator[int]:
        return iter(Name(k) for k in range(22))

    def __len__(self) -> int:
        return 22


class Name(int):
    pass


@pytest.mark.parametrize("value", [Phase.WARM, [Phase.WARM, 1], {Phase.WARM: 1}, (HTTPStatus.OK,)])
def test_a_position_does_not_lose_a_class(value: Any) -> None:
    """A sampler's phase, an enum of strings, was a plain string after a resume, of which `phase is Phase.WARM` is
    false."""
    sampler = Ordered()
    order = Order(sampler)
    sampler.indices = value
    with pytest.raises(CheckpointError, match=r"would lose its class (Phase|HTTPStatus): .* plain numbers and strings"):
        packed(order.state())
    sampler.indices = [np.float64(2), np.str_("a"), np.bool_(True)]  # type: ignore[list-item]
    assert packed(order.state())


def test_an_entry_that_cannot_be_saved_is_refused_when_it_is() -> None:
    loader = make(sampler=Named())
    assert flat(loader) == list(range(22))
    next(iter(loader))
    with pytest.raises(CheckpointError, match="would lose its class Name"):
        loader.state_dict()


def test_a_position_is_as_large_as_in_its_file() -> None:
    """A training state declared its few bytes of JSON as a tensor of a terabyte, which a resume allocated."""
    sampler = Ordered()
    text = torch.tensor(list(b'{"indices": 7}'), dtype=torch.uint8).as_strided([2**40], [0])
    Order(sampler).load_state({"0 Ordered": {"attributes": {"pipeshard.kind": "json", "arguments": [text]}}})
    assert sampler.indices == 7


class Tokens(Stream):
    """A stream of windows of a memory-mapped file, with more of them in a list."""

    def __init__(self, folder: Path) -> None:
        np.arange(2**20, dtype=np.uint16).tofile(folder / "train.bin")
        self.tokens = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
        self.windows = [[k] for k in range(5000)]
        self.table = torch.zeros(2**19)
        self.told: list[int] = []

    def __iter__(self) -> Iterator[int]:
        self.told.append(len(self.told))
        return iter(self.tokens[:8].tolist())


def test_the_data_of_a_stream_is_neither_copied_nor_saved(tmp_path: Path) -> None:
    """A loader read all of a memory-mapped file of tokens into memory, once a rank, to compare it at each save."""
    stream = Tokens(tmp_path)
    order = Order(stream)
    stream.told.append(7)
    stream.tokens, tokens = None, stream.tokens  # type: ignore[assignment]
    assert order.state() == {"0 Tokens": {"attributes": {"told": [7], "tokens": None}}}
    stream.tokens, stream.windows = tokens, [[7]] * 2000  # another object is not the data
    assert order.state() == {"0 Tokens": {"attributes": {"told": [7], "windows": [[7]] * 2000}}}
    order.load_state({})
    assert stream.told == [] and stream.tokens is tokens and len(stream.table) == 2**19


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


def test_the_first_samples_leave_the_programs_generators() -> None:
    """`random` and numpy were ahead after boost, by what the first samples of a dataset had drawn."""
    seeded_otherwise(1)
    first_samples(DataLoader(Noisy(), batch_size=4))
    after = torch.rand(()), random.random(), np.random.rand()
    seeded_otherwise(1)
    assert after == (torch.rand(()), random.random(), np.random.rand())


def test_the_first_samples_leave_the_generators_of_a_collator() -> None:
    """transformers' collator with a seed makes its generator at its first call, which was boost's look at the data: all
    later masks differed from those of one process, and its workers shared one generator."""
    collator = masking()
    loader = DataLoader([{"input_ids": [2] * 32} for _ in range(8)], batch_size=4, collate_fn=collator)
    expected = next(iter(loader))["labels"]
    state = collator.generator.get_state()
    first_samples(loader)
    assert torch.equal(collator.generator.get_state(), state)
    collator.generator = None
    first_samples(loader)
    assert collator.generator is None
    assert torch.equal(next(iter(loader))["labels"], expected)


class Opening(Dataset[bytes]):
    """Opens its files when they are first read, which each worker does for itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first: Any = None
        self.files: dict[int, Any] = {}

    def __getitem__(self, k: int) -> bytes:
        self.first = self.first or self.path.open("rb")
        self.files.setdefault(k, self.path.open("rb"))
        return self.first.read(1)

    def __len__(self) -> int:
        return 4


def test_the_first_samples_leave_no_file_open(tmp_path: Path) -> None:
    """Spawned workers could not be started, since the file was already open: TypeError: cannot pickle."""
    (tmp_path / "data").write_bytes(b"0123")
    parts = [Opening(tmp_path / "data"), Opening(tmp_path / "data")]
    loader: Any = DataLoader(ConcatDataset(parts), batch_size=6, collate_fn=list)
    assert first_samples(loader) == [b"0", b"1", b"2", b"3", b"0", b"1"]
    assert [(part.first, part.files) for part in parts] == [(None, {}), (None, {})]


class Shards(Dataset[int]):
    """Loads shards of samples when they are first read, and keeps the newest ones."""

    def __init__(self, kept: int) -> None:
        self.cache: dict[int, list[int]] = {}
        self.order: deque[int] = deque()
        self.seen: list[int] = []
        self.kept, self.is_listed = kept, False

    def __getitem__(self, k: int) -> int:
        if not self.is_listed:
            self.seen.extend(range(5))
            self.is_listed = True
        if k not in self.cache:
            self.cache[k] = [k]
            self.order.append(k)
            if len(self.order) > self.kept:
                del self.cache[self.order.popleft()]
        return self.cache[k][0]

    def __len__(self) -> int:
        return 200


@pytest.mark.parametrize("size", [4, 100])
def test_the_first_samples_leave_a_cache_consistent(size: int) -> None:
    """The dict of a cache was empty again, but the list of its keys was not: a later sample raised KeyError."""
    dataset = Shards(kept=size)
    first_samples(DataLoader(dataset, batch_size=size))
    assert [*dataset.cache] == [*dataset.order]
    assert [dataset[k] for k in range(199, 0, -1)] == [*range(199, 0, -1)]
    assert dataset.seen == [*range(5)]


@pytest.mark.parametrize("size", [4, 100])
def test_the_first_samples_restore_all_or_nothing(size: int) -> None:
    """A new entry of a large collection stays, since its content was not copied. So must everything else."""
    dataset = Shards(kept=300)
    for k in range(100, 100 + size):
        assert dataset[k] == k
    first_samples(DataLoader(dataset, batch_size=4))
    assert [*dataset.cache] == [*dataset.order]
    assert len(dataset.cache) == (4 if size == 4 else 104)


def test_a_collators_own_generator_is_seeded_from_its_first_batch() -> None:
    """The generator of transformers' collator did not exist yet when the loader looked for generators to seed."""
    samples: Any = [{"input_ids": [2] * 32} for _ in range(22)]
    loaders = [make(dataset=samples, collate_fn=masking(), num_workers=count) for count in (0, 2)]
    here, there = (torch.cat([batch["labels"] for batch in loader]) for loader in loaders)
    assert torch.equal(here, there)


def test_a_dataset_of_other_keys_asks_for_a_batch() -> None:
    """A loader whose sampler yields string keys was read at 0 by boost: KeyError: 0, without a remedy."""
    records: Any = {name: {"x": torch.ones(3)} for name in ("first", "second")}
    loader = DataLoader(records, batch_size=2, sampler=SubsetRandomSampler(list(records)))
    with pytest.raises(BatchError, match=r"dict.*at the keys 0, 1, \.\.\. .*\(KeyError: 0\).*dry_run_input=batch"):
        first_samples(loader)
    batch = next(iter(loader))
    found = find_sample(torch.nn.Linear(3, 3), {"input": batch["x"]}, loader, {}, 2, torch.device("cpu"))
    assert found.tensors["input"].shape == (2, 3)


class Rows(Dataset[Any]):
    """A memory-mapped file, from which a list of indices reads a whole batch."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, indices: Any) -> Any:
        return torch.arange(20).view(10, 2)[indices]


def test_the_first_samples_of_a_dataset_that_is_read_by_lists_of_indices() -> None:
    """Torch's way to read whole batches at once gave one sample without a batch dimension, with which boost traced."""
    for size, expected in ((3, [[0, 1], [2, 3], [4, 5]]), (12, torch.arange(20).view(10, 2).tolist())):
        options: dict[str, Any] = {"batch_size": None, "sampler": BatchSampler(RandomSampler(Rows()), size, False)}
        for loader in (DataLoader(Rows(), **options), ResumableDataLoader(Rows(), **options)):
            assert first_samples(loader).tolist() == expected
    assert first_samples(DataLoader(Rows(), batch_size=None)).tolist() == [0, 1]


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
    assert first_samples(DataLoader(Sized(), batch_size=4)).tolist() == [0, 1, 2, 3]
    lists: Any = [{"input_ids": [1, 2]}]
    with pytest.raises(BatchError, match=r"default_collate does not stack: use plugin.prepare_dataloader"):
        first_samples(DataLoader(lists, batch_size=1))
