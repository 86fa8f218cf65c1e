"""Reader: reads batches from the data iterator, and checks that all ranks of a pipeline read the same batches.

Every stage reads the whole batch, since the model's glue runs on all stages. No part of the batch is sent. If a
DataLoader had a different seed on one rank, stages would silently train on different batches, so ranks compare digests
of their batches.
"""

import functools
import hashlib
import logging
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeshard.batch.batch import Batch
from pipeshard.batch.read import RowDims
from pipeshard.batch.tree import flatten, text
from pipeshard.distributed.agreement import hash_of
from pipeshard.distributed.collectives import gather_objects, meet
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.mixed_precision import Precision
from pipeshard.engine.updates import has_one_factor
from pipeshard.errors import BatchError, listed, of_all, summary

logger = logging.getLogger("pipeshard")
SAMPLE = 8192  # at most this many values of a tensor enter the digest of a whole batch


def digest(batch: Batch, paths: Collection[str] | None = None) -> int:
    """Return a 56-bit hash of all values of the leaves at `paths`. Without `paths`, hash all leaves, but only a sample
    of the values of large tensors."""
    state = hashlib.blake2b(digest_size=7)
    for path, leaf in zip(batch.paths, batch.leaves, strict=True):
        if paths is None or path in paths:
            _, parts, tree = flatten(leaf)
            state.update(f"{path}{tree}".encode())
            for part in parts:
                state.update(_leaf_content(part, is_sample=paths is None))
    return int.from_bytes(state.digest(), "little")


def digest_tensors(tensors: Iterable[Tensor], is_sampled: Callable[[Tensor], bool]) -> str:
    """Return a 56-bit hash of tensors as a hex string. Large tensors for which `is_sampled(tensor)` is True contribute
    only a sample of their values."""
    state = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        state.update(_leaf_content(tensor, is_sampled(tensor)))
    return state.hexdigest()


def _leaf_content(leaf: Any, is_sample: bool) -> bytes:
    """The content of a leaf for a digest. With `is_sample`, only a sample of the values of a large tensor."""
    if not isinstance(leaf, Tensor):
        return text(leaf).encode()
    values = leaf.detach().reshape(-1)
    if is_sample and values.numel() > SAMPLE:
        values = values[:: -(-values.numel() // SAMPLE)]
    return f"{tuple(leaf.shape)}{leaf.dtype}".encode() + values.contiguous().cpu().view(torch.uint8).numpy().tobytes()


class Report(NamedTuple):
    """A rank's report at the beginning of a step. The ranks of a replica must have the same `digest` and `rows`, and
    all ranks must have the same `mode`. `has_batch` is 0 if the data iterator yielded no usable batch, `parts` is the
    number of microbatches, and `seed` is the seed of torch's generator. `news`, `ways`, `options` and `factor` are the
    fields of the rank's News (`news` is its `bits`)."""

    has_batch: int
    digest: int
    rows: int
    parts: int
    mode: int
    news: int
    ways: int
    options: int
    factor: int
    seed: int


class News(NamedTuple):
    """A rank's report on the batches that it has read (`bits`, and a number that identifies the batches' `ways`) and on
    the last update (`options` and `factor`, see `Updates.numbers`)."""

    bits: int = 0
    ways: int = 0
    options: int = 0
    factor: int = 0


class Agreement(NamedTuple):
    """The result of comparing all ranks' reports. `seed` is the first rank's seed, which all ranks use for random
    numbers. `parts` contains the number of microbatches of each replica, and `news` is the bitwise OR of all ranks'
    `news`. `alike` is whether the ranks of each replica have the same ways. `updated_alike` is whether the last updates
    of all ranks had the same options and factors. `repeated` contains the replicas that read the same batches as
    another replica."""

    seed: int
    parts: list[int]
    news: int
    alike: bool
    updated_alike: bool
    repeated: list[int]


def agree(grid: Grid, batches: Sequence[Batch] | Exception, parts: int, mode: str, news: News) -> Agreement:
    """Compare all ranks' reports on this step. Every rank raises BatchError if a rank has no batch, if the ranks of a
    replica have different batches, or if ranks have different modes.

    `batches` is an exception if reading failed on this rank. `mode` describes the step (forward only, the requested
    outputs, ...).
    """
    failure = summary(batches) if isinstance(batches, Exception) else None
    has_batch, read = failure is None, () if isinstance(batches, Exception) else batches
    rows, number = sum(batch.rows for batch in read), hash_of(repr([digest(batch) for batch in read]))
    code = hash_of(mode)
    report = Report(int(has_batch), number, rows, parts, code, *news, torch.initial_seed() % 2**63)
    reports = [Report(*numbers) for numbers in meet(grid.world, grid.named, report)]
    if not all(report.has_batch for report in reports):
        reasons = gather_objects(failure, grid.world)
        without = [f"{grid.named(r)}: {reason}" for r, reason in enumerate(reasons) if reason is not None]
        raise BatchError(
            f"{len(without)} of {len(reports)} ranks got no usable batch from the data iterator: {listed(without)}. "
            "No rank ran this step"
        )
    size = grid.size // grid.dp_size
    replicas = [reports[first : first + size] for first in range(0, len(reports), size)]
    same_batch = all(len({(report.digest, report.rows) for report in replica}) == 1 for replica in replicas)
    if not same_batch or len({report.mode for report in reports}) > 1:
        modes = gather_objects(mode, grid.world)
        table = "; ".join(
            f"{grid.named(r)}: batch size {report.rows} (digest {report.digest:014x}), {modes[r]}"
            for r, report in enumerate(reports)
        )
        if same_batch:
            raise BatchError(
                f"all ranks must run a step in the same mode, but these ranks differ: {table}. On every rank, pass the "
                "same arguments to execute_pipeline, and use the same grad mode (torch.no_grad()) and the same model "
                "mode (model.train() or model.eval())"
            )
        raise BatchError(
            f"the stages of one pipeline must read the same batch, but these ranks differ: {table}. Give all stages "
            "the same data in the same order, for example with plugin.prepare_dataloader(dataset, batch_size, shuffle, "
            "seed) or, in a Trainer, self.accelerator.prepare(DataLoader(...)). Your own DataLoader must not shard the "
            "data across stages (as accelerate's own Accelerator does, and DistributedSampler by default). If it "
            "shuffles, or if its dataset or collator uses random numbers, use the same seed on all ranks, for example "
            "with transformers.set_seed(0). A `datasets` stream needs shuffle(..., seed=0). If only one rank has an "
            "entry of the batch, broadcast the entry to the other ranks. For example, the outputs of another boosted "
            "model exist only on the rank of that model's last stage (docs/training.md has an example)"
        )
    bits = functools.reduce(operator.or_, (report.news for report in reports))
    alike = all(len({report.ways for report in replica}) == 1 for replica in replicas)
    updated_alike = len({report.options for report in reports}) == 1 and has_one_factor(r.factor for r in reports)
    parts_of = [replica[0].parts for replica in replicas]
    counts = Counter(replica[0].digest for replica in replicas)
    repeated = [number for number, replica in enumerate(replicas) if counts[replica[0].digest] > 1]
    return Agreement(reports[0].seed, parts_of, bits, alike, updated_alike, repeated)


class Reader:
    """Reads batches for a model. `cut` splits batches into microbatches. `cuts()` returns whether a batch may have
    several microbatches."""

    def __init__(
        self,
        row_dims: RowDims,
        cut: Callable[[Sequence[Batch]], Sequence[Sequence[Batch]]],
        cuts: Callable[[], bool],
        grid: Grid,
        precision: Precision,
    ) -> None:
        self.row_dims, self.cut, self.cuts, self.grid, self.precision = row_dims, cut, cuts, grid, precision
        self._has_warned = False  # about a batch that several replicas read

    def settle(self, batch: Batch) -> Batch:
        """Convert a batch that has already been read into the form that the model receives."""
        return self.precision.of_batch(self.row_dims.settle(batch) if self.cuts() else batch)

    def next(
        self, data_iter: Iterator[Any], mode: str, news: Callable[[Sequence[Batch]], News], count: int = 1
    ) -> tuple[list[Batch], Agreement]:
        """Read the next `count` batches, and compare them across ranks. All ranks raise an error if a rank has no
        batch, or if the ranks disagree (see `agree`).

        `mode` describes the step, and `news(batches)` returns the News to report to the other ranks.
        """
        batches: list[Batch] | Exception
        parts = 0
        try:
            batches = self._read_all(data_iter, count)
            parts = sum(map(len, self.cut(batches)))
        except Exception as error:  # an error of any kind must be sent to the other ranks
            batches = error
        read = () if isinstance(batches, Exception) else batches
        try:
            agreement = agree(self.grid, batches, parts, mode, news(read) if read else News())
        except BatchError as disagreement:
            raise of_all(batches if isinstance(batches, Exception) else disagreement) from None
        return list(read), agreement

    def warn_repeated(self, agreement: Agreement) -> None:
        """Warn once if several replicas train on the same batch."""
        if agreement.repeated and self.grid.first and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "in this step, replicas %s read batches that other replicas also read, so the replicas train on fewer "
                "distinct samples than they read. Give each replica its own part of the data: use "
                "plugin.prepare_dataloader(dataset, batch_size), or pass your own DataLoader a DistributedSampler with "
                "num_replicas=plugin.grid.dp_size and rank=plugin.grid.replica",
                ", ".join(map(str, agreement.repeated)),
            )

    def first(self, agreement: Agreement) -> int:
        """The index of this replica's first microbatch among the microbatches of all replicas."""
        return sum(agreement.parts[: self.grid.replica])

    def _read_all(self, data_iter: Iterator[Any], count: int) -> list[Batch]:
        """Read `count` batches. Continue after an error, since ranks without an error read all `count` batches."""
        batches: list[Batch] = []
        errors: list[Exception] = []
        for _ in range(count):
            try:
                batches.append(self._read(data_iter))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return batches

    def _read(self, data_iter: Iterator[Any]) -> Batch:
        if not hasattr(data_iter, "__next__"):
            raise BatchError(
                f"execute_pipeline expects an iterator of batches, got an object of class {type(data_iter).__name__}: "
                "pass iter(dataloader), created once per epoch, or iter([batch])"
            )
        try:
            data = next(data_iter)
        except StopIteration:
            raise BatchError(
                "the data iterator is exhausted: create a new one with iter(dataloader) for every epoch, and call "
                "execute_pipeline len(dataloader) times per epoch (with num_batches, len(dataloader) // num_batches "
                "times)"
            ) from None
        if isinstance(data, Batch):
            return self.precision.of_batch(data)
        return self.precision.of_batch(self.row_dims.read(data, self.cuts()))
