"""Row dims: which dimension of each leaf counts the samples, from batch to batch.

One batch may not tell: a table has as many rows as there are samples by chance, and a (s, b) leaf looks like one that
every microbatch needs whole. So what a leaf was in one batch it has to be in all, and a leaf that may be cut either way
is refused until `batch_dims` says which. Of the architectures in docs/parity.md one has such a leaf.
"""

from typing import Any

from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.batch_dims import BatchDims
from pipeshard.batch.media import read_batch
from pipeshard.errors import BatchError
from pipeshard.hf import LABELS

Kind = tuple[str, int]  # a leaf's path and its number of dimensions


class RowDims:
    """Reads batches for one model, and remembers of each leaf what earlier batches have shown."""

    def __init__(self, model: nn.Module, declared: BatchDims | None = None) -> None:
        self.model, self.declared = model, dict(declared or {})
        self._lists: dict[str, bool] = {}
        self._first: dict[Kind, tuple[int, int]] = {}  # the size of the first dimension, and the samples
        self._other: dict[Kind, set[int]] = {}  # dimensions that once had a size which does not count the samples

    def read(self, data: Any, is_cut: bool = True) -> Batch:
        """A batch as a dataloader gives it; one that is not cut into microbatches may have leaves that are in doubt.

        Raises BatchError for what cannot be read.
        """
        batch = read_batch(self.model, data, self.declared, self._lists)
        return self.settle(batch) if is_cut else batch

    def settle(self, batch: Batch) -> Batch:
        """The batch with leaves whole that have as many entries as there are samples by chance.

        Raises BatchError for leaves of which that, or another dimension that may count the samples, is in doubt.
        """
        if batch.rows == 1:
            return batch
        dims = dict(zip(batch.paths, batch.row_dims, strict=True))
        leaves = {path: leaf for path, leaf in batch.tensors.items() if path not in self.declared}
        whole: BatchDims = {
            path: None
            for path, leaf in leaves.items()
            if path not in batch.owners and dims[path] in (0, None) and self._is_whole_as_before(path, leaf, batch.rows)
        }
        doubts = {
            path: dim
            for path, leaf in leaves.items()
            if (dim := self._doubtful(path, leaf, batch)) is not None and (path in whole or dims[path] is None)
        }
        if doubts:
            shapes = (f"dimension {dim} of {path} {tuple(leaves[path].shape)}" for path, dim in doubts.items())
            raise BatchError(
                f"there are {batch.rows} samples, and {', '.join(shapes)} may count them or not. Pass "
                f"PipelinePlugin(batch_dims={doubts}) to cut it with the samples, or "
                f"batch_dims={dict.fromkeys(doubts)} to give it whole to every microbatch"
            )
        return batch.counted(whole)

    def _is_whole_as_before(self, path: str, leaf: Tensor, rows: int) -> bool:
        """Whether the first dimension did not count the samples in the first batch, but seems to do so now."""
        size = leaf.shape[0] if leaf.ndim else 1
        if size == 1:
            return False
        size_before, rows_before = self._first.setdefault((path, leaf.ndim), (size, rows))
        counted_before, counts_now = size_before == rows_before, size == rows
        if counted_before == counts_now:
            return False
        if counted_before or size_before != size:
            raise BatchError(
                f"the first dimension of {path} was {size_before} in a batch of {rows_before} samples, and is {size} "
                f"in one of {rows}: it counts the samples only by chance, or not always. Pass "
                f"PipelinePlugin(batch_dims={{{path!r}: None}}) for what every microbatch gets whole, or "
                f"{{{path!r}: 0}} for one entry a sample"
            )
        return True

    def _doubtful(self, path: str, leaf: Tensor, batch: Batch) -> int | None:
        """The dimension of a leaf that is not cut which may count the samples: the only one of as many entries, or
        else the first one, where it has several times as many. None that once had another size is in doubt."""
        if batch.owners.get(path) and path != LABELS:  # labels: (s, b), or one row for each codebook
            return None
        several = leaf.ndim > 0 and len(leaf) % batch.rows == 0
        other = self._other.setdefault((path, leaf.ndim), set())
        other |= {dim for dim, size in enumerate(leaf.shape) if size != batch.rows and (dim > 0 or not several)}
        equal = [dim for dim, size in enumerate(leaf.shape) if size == batch.rows and dim not in other]
        if equal:
            return equal[0] if len(equal) == 1 else None
        return 0 if several and 0 not in other and path not in batch.owners else None
