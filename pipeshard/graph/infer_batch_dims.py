"""Doubts: leaves of which another dimension than the first may count the samples; the model's own glue tells."""

import itertools
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.batch_dims import BatchDims
from pipeshard.batch.criterion import Criterion, key_of
from pipeshard.batch.media import read_batch
from pipeshard.errors import BatchError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.preserve import untouched
from pipeshard.graph.trace import run_on_few
from pipeshard.graph.tracer import Tracer

logger = logging.getLogger("pipeshard")
KEPT = 128  # what is remembered of criteria, which may be made anew in each step
MOST = 4  # doubtful leaves at once: each doubles the ways to read a batch


class RowDims:
    """Reads batches for one model; knows which dimension of each leaf counts the samples, as declared or found.

    In doubt is a tensor whose first dimension does not have as many entries as there are samples, and of whose others
    just one has, or whose first one has several times as many. Whether that one counts them, or every microbatch gets
    the tensor whole, is found when such a leaf is first met: the glue is run on 2, 3 and 5 samples either way, and the
    way that the model takes is it. What a leaf's first dimension was in one batch it has to be in all.
    """

    def __init__(self, model: nn.Module, declared: BatchDims | None = None) -> None:
        self.model, self.declared = model, dict(declared or {})
        self._found: dict[str, int | None] = {}
        self._lists: dict[str, bool] = {}
        self._first: dict[tuple[str, int], tuple[int, int]] = {}  # by path and dimensions: size of the first, samples
        self._unread: set[Any] = set()

    def read(self, data: Any, criterion: Criterion | None = None, is_cut: bool = True) -> Batch:
        """A batch as a dataloader gives it. One that is not cut into microbatches leaves no doubts.

        Raises BatchError for what cannot be read, and where the model takes a leaf both ways.
        """
        batch = read_batch(self.model, data, self.declared, self._lists)
        return self.settle(batch, criterion) if is_cut else batch

    def settle(self, batch: Batch, criterion: Criterion | None = None) -> Batch:
        """The batch with no leaf in doubt; one that neither the model nor the criterion reads stays whole."""
        batch = self._as_before(batch)
        tensors = batch.tensors
        known = {path: dim for path, dim in self._found.items() if path in tensors}
        fitting = {
            path: dim
            for path, dim in known.items()
            if dim is None or (dim < tensors[path].ndim and _fits(tensors[path].shape[dim], dim, batch.rows))
        }
        batch = _cut(batch, fitting)
        doubts = {path: dim for path, dim in self._doubts(batch).items() if path not in fitting}
        key = key_of(criterion), tuple(doubts.items())
        if not doubts or batch.rows == 1 or key in self._unread:
            return batch
        found = self._find(batch, doubts, criterion)
        self._found |= found
        if found.keys() != doubts.keys():
            if len(self._unread) >= KEPT:
                self._unread.clear()
            self._unread.add((key[0], tuple((path, dim) for path, dim in doubts.items() if path not in found)))
        return _cut(batch, found)

    def _as_before(self, batch: Batch) -> Batch:
        """The batch with leaves whole that were so before, when their first dimension did not have as many entries as
        there were samples, though it has now by chance; raises BatchError where that cannot be told."""
        whole: dict[str, int | None] = {}
        for path, leaf in batch.tensors.items():
            size = leaf.shape[0] if leaf.ndim else 1
            if path in self.declared or path in batch.owners or batch.rows == 1 or size == 1:
                continue
            before, rows = self._first.setdefault((path, leaf.ndim), (size, batch.rows))
            was, now = before == rows, size == batch.rows
            if was == now or self._found.get(path) is not None:
                continue
            if was or before != size:
                raise BatchError(
                    f"the first dimension of {path} was {before} in a batch of {rows} samples, and is {size} in one of "
                    f"{batch.rows}: so it counts the samples only by chance, or not always. Say which by "
                    f"PipelinePlugin(batch_dims={{{path!r}: None}}) for what every microbatch gets whole, or "
                    f"{{{path!r}: 0}} for one entry a sample"
                )
            whole[path] = None
        return batch.counted(whole)

    def _doubts(self, batch: Batch) -> dict[str, int]:
        """The leaves in doubt, and which of their dimensions may count the samples."""
        doubts = {}
        for path, leaf in batch.tensors.items():
            dims = [dim for dim, size in enumerate(leaf.shape) if size == batch.rows]
            is_read = path in self.declared or batch.row_dims[batch.paths.index(path)] is not None
            owned = bool(batch.owners.get(path)) and path != "labels"  # labels: (s, b), or one row for each codebook
            if is_read or owned:
                continue
            several = leaf.ndim > 0 and len(leaf) > batch.rows and len(leaf) % batch.rows == 0
            if len(dims) == 1:
                doubts[path] = dims[0]
            elif several and not dims and path not in batch.owners:
                doubts[path] = 0
        return doubts

    def _find(self, batch: Batch, doubts: Mapping[str, int], criterion: Criterion | None) -> dict[str, int | None]:
        if len(doubts) > MOST:
            raise BatchError(f"{_told(batch, doubts)} Declare which do: {_remedy(doubts)}")
        tracer = Tracer(self.model, criterion, batch)
        ways: list[tuple[dict[str, int], Dataflow]] = []
        with untouched(self.model, criterion):
            for chosen in itertools.product((True, False), repeat=len(doubts)):
                cut = {path: dim for (path, dim), yes in zip(doubts.items(), chosen, strict=True) if yes}
                flow = run_on_few(tracer, _cut(batch, cut))
                if flow is not None:
                    ways.append((cut, flow))
        if not ways:
            logger.warning(
                "%s The model runs neither way, so every microbatch gets them whole. Declare which dimension counts "
                "the samples, or None: %s",
                _told(batch, doubts),
                _remedy(doubts),
            )
            return dict.fromkeys(doubts)
        read = [path for path in doubts if any(_reads(flow, path) for _, flow in ways)]
        both = {path: doubts[path] for path in read if len({path in cut for cut, _ in ways}) > 1}
        if both:
            raise BatchError(
                f"{_told(batch, both)} The model runs both if that is cut with the samples and if every "
                f"microbatch gets it whole: declare which is meant, {_remedy(both)}"
            )
        cut, _ = ways[0]
        return {path: cut.get(path) for path in read}


def _fits(size: int, dim: int, rows: int) -> bool:
    return size == rows or (dim == 0 and size % rows == 0)


def _cut(batch: Batch, dims: BatchDims) -> Batch:
    """The batch where these dimensions count the samples, or several entries of each."""
    tensors = batch.tensors
    several = {path: len(tensors[path]) // batch.rows for path, dim in dims.items() if dim == 0}
    owners = {path: (count,) * batch.rows for path, count in several.items() if count > 1}
    batch = batch.counted({path: dim for path, dim in dims.items() if dim is not None and path not in owners})
    return batch.owned({**batch.owners, **owners}) if owners else batch


def _reads(flow: Dataflow, path: str) -> bool:
    return path in flow.consulted or any(path in use.inputs for use in flow.uses())


def _told(batch: Batch, doubts: Mapping[str, int]) -> str:
    each = [f"dimension {dim} of {path} {tuple(batch.tensors[path].shape)}" for path, dim in doubts.items()]
    return f"There are {batch.rows} samples, and {', '.join(each)} may count them, or not."


def _remedy(paths: Mapping[str, int]) -> str:
    cut, whole = dict(paths), dict.fromkeys(paths)
    return f"PipelinePlugin(batch_dims={cut}) or batch_dims={whole}"
