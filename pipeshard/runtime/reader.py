"""Reader: takes the next batch, and makes sure that all ranks have taken theirs."""

from collections.abc import Callable, Iterator
from typing import Any

from pipeshard.errors import BatchError
from pipeshard.grid import Grid
from pipeshard.model.batch import Batch, split_sizes
from pipeshard.model.criterion import Criterion
from pipeshard.model.doubts import RowDims
from pipeshard.runtime.agreement import Agreement, agree
from pipeshard.runtime.precision import Precision


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

    def settle(self, batch: Batch, criterion: Criterion | None) -> Batch:
        """A batch that was read already, as the model is to get it."""
        return self.precision.of_batch(self.row_dims.settle(batch, criterion) if self.cuts else batch)

    def next(
        self,
        data_iter: Iterator[Any],
        criterion: Criterion | None,
        mode: tuple[bool, int, bool],
        news: Callable[[Batch], int],
    ) -> tuple[Batch, Agreement]:
        """The next batch, compared over the ranks: all of them raise if one has none, or another one.

        `news(batch)` is what the others have to learn.
        """
        batch: Batch | Exception
        try:
            batch = self._read(data_iter, criterion)
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

    def _read(self, data_iter: Iterator[Any], criterion: Criterion | None) -> Batch:
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
        return self.precision.of_batch(self.row_dims.read(data, criterion, self.cuts))
