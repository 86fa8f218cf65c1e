"""Reader: takes the next batch, and makes sure that all ranks have taken the same."""

import functools
import hashlib
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeshard.batch.batch import Batch, split_sizes
from pipeshard.batch.row_dims import RowDims
from pipeshard.batch.tree import flatten, text
from pipeshard.distributed.collectives import gather_objects
from pipeshard.distributed.consistency import meet
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.mixed_precision import Precision
from pipeshard.engine.outputs import describe
from pipeshard.errors import BatchError, listed

SAMPLE = 8192  # numbers of a tensor that enter its digest


def digests(batch: Batch, paths: Collection[str]) -> tuple[bytes, ...]:
    """A hash of all values of each of these leaves that the batch has."""
    tensors, entries = batch.tensors, batch.entries
    values = [_bytes(tensors[path]) for path in sorted(paths) if path in tensors]
    values += [_content(entries[path]) for path in sorted(paths) if path in entries]
    return tuple(hashlib.blake2b(value, digest_size=12).digest() for value in values)


def digest(batch: Batch) -> int:
    """A number that differs between batches: 56 bits of a hash of names, shapes, dtypes and (a sample of) values,
    and of what is no tensor as text."""
    state = hashlib.blake2b(digest_size=7)
    for path, tensor in batch.tensors.items():
        state.update(f"{path}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel() > SAMPLE:
            flat = flat[:: -(-flat.numel() // SAMPLE)]
        state.update(_bytes(flat))
    for path, other in batch.others:
        state.update(f"{path}{other}".encode())
    for path, entries in batch.entries.items():
        state.update(path.encode() + _content(entries))
    return int.from_bytes(state.digest(), "little")


def _content(entries: Any) -> bytes:
    """What a list of one entry a sample holds, with the values of tensors."""
    _, leaves, tree = flatten(entries)
    known = (
        f"{tuple(leaf.shape)}{leaf.dtype}".encode() + _bytes(leaf) if isinstance(leaf, Tensor) else text(leaf).encode()
        for leaf in leaves
    )
    return str(tree).encode() + b"".join(known)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Agreement:
    """What the ranks have agreed on for a step: the seed of the first one's generator, by which all draw random
    numbers, the samples of each replica, and the `news` that any rank has."""

    seed: int
    rows: list[int]
    news: int


def agree(grid: Grid, batch: Batch | Exception, mode: tuple[bool, int, bool], news: int) -> Agreement:
    """Compare this step over all ranks; every rank raises BatchError if they differ.

    `batch` is the reason on a rank that could get none; `mode` is (backward too, the code of the outputs wanted, model
    in training mode), `news` are bits. The ranks of a replica have to have the same batch, all of them the same mode.
    """
    rest = *mode, news, torch.initial_seed() % 2**63
    mine = [1, digest(batch), batch.rows, *rest] if isinstance(batch, Batch) else [0, 0, 0, *rest]
    ranks = meet(grid.world, grid.named, mine)
    if not all(has for has, *_ in ranks):
        reason = f"{type(batch).__name__}: {batch}" if isinstance(batch, Exception) else None
        reasons = gather_objects(reason, grid.world)
        without = [f"{grid.named(r)}: {reason}" for r, reason in enumerate(reasons) if reason is not None]
        raise BatchError(
            f"{len(without)} of {len(ranks)} ranks got no usable batch from the data iterator, so none ran this step: "
            f"{listed(without)}"
        )
    each = grid.size // grid.dp_size
    replicas = [ranks[first : first + each] for first in range(0, len(ranks), each)]
    same = all(len({tuple(rank[:3]) for rank in replica}) == 1 for replica in replicas)
    if not same or len({tuple(rank[3:6]) for rank in ranks}) > 1:
        table = "; ".join(
            f"{grid.named(r)}: {rows} samples (digest {number:014x}), {'training step' if train else 'forward only'}, "
            f"return_outputs={describe(outputs)}, model.{'train' if training else 'eval'}()"
            for r, (_, number, rows, train, outputs, training, *_) in enumerate(ranks)
        )
        raise BatchError(
            f"the stages of one pipeline must read the same batch in the same mode, but {table}. Give every rank the "
            "same data in the same order: plugin.prepare_dataloader(dataset, batch_size, shuffle, seed) does. A "
            "DataLoader of your own must not take a share (DistributedSampler, accelerator.prepare); one that shuffles "
            "or whose dataset or collator draws random numbers, needs all ranks to be seeded alike, as by "
            "transformers.set_seed(0)"
        )
    told = functools.reduce(operator.or_, (rank[6] for rank in ranks))
    return Agreement(ranks[0][-1], [replica[0][2] for replica in replicas], told)


class Reader:
    """Reads batches; `cut()` is the number of microbatches in a batch and None, or None and the samples in each."""

    def __init__(
        self, row_dims: RowDims, cut: Callable[[], tuple[int | None, int | None]], grid: Grid, precision: Precision
    ) -> None:
        self.row_dims, self.cut, self.grid, self.precision = row_dims, cut, grid, precision

    @property
    def cuts(self) -> bool:
        """Whether a batch becomes several microbatches, as far as the plugin's arguments tell."""
        return self.cut()[0] != 1

    def settle(self, batch: Batch) -> Batch:
        """A batch that was read already, as the model is to get it."""
        return self.precision.of_batch(self.row_dims.settle(batch) if self.cuts else batch)

    def next(
        self,
        data_iter: Iterator[Any],
        mode: tuple[bool, int, bool],
        news: Callable[[Batch], int],
    ) -> tuple[Batch, Agreement]:
        """The next batch, compared over the ranks: all of them raise if one has none, or another one.

        `news(batch)` is what the others have to learn.
        """
        batch: Batch | Exception
        try:
            batch = self._read(data_iter)
        except Exception as error:
            batch = error
        try:
            agreed = agree(self.grid, batch, mode, news(batch) if isinstance(batch, Batch) else 0)
        except BatchError as disagreement:
            raise (batch if isinstance(batch, Exception) else disagreement) from None
        assert isinstance(batch, Batch)
        return batch, agreed

    def first(self, agreed: Agreement) -> int:
        """The number of this replica's first microbatch among those of all replicas."""
        return sum(len(split_sizes(rows, *self.cut())) for rows in agreed.rows[: self.grid.replica])

    def _read(self, data_iter: Iterator[Any]) -> Batch:
        if not hasattr(data_iter, "__next__"):
            raise BatchError(
                f"execute_pipeline takes an iterator of batches, not a {type(data_iter).__name__}: "
                "pass iter(dataloader), made once an epoch, or iter([batch])"
            )
        try:
            data = next(data_iter)
        except StopIteration:
            raise BatchError(
                "the data iterator is empty: make a new one, iter(dataloader), for every epoch, and call "
                "execute_pipeline len(dataloader) times"
            ) from None
        return self.precision.of_batch(self.row_dims.read(data, self.cuts))
