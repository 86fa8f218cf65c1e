"""Loss sizes: the numbers of samples and the lengths at which a loss rule was tried.

A loss may depend on sizes: it may process chunks of positions, or have terms that appear only with more samples. So
sizes are grouped into ranges between powers of two. In each range, a rule counts as proven up to the largest sizes at
which it held, and is tried again at larger sizes. Even a run with irregular lengths has few ranges.
"""

from dataclasses import dataclass, replace
from typing import Self

from pipeshard.batch.batch import Batch


@dataclass(frozen=True)
class Sizes:
    """The numbers of samples in all replicas (`rows`) and in a microbatch (`part`), and the sizes of all axes
    except batch dimensions (`lengths`)."""

    rows: int
    part: int
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch, num_microbatches: int, replicas: int = 1) -> Self:
        part = -(-batch.rows // num_microbatches)
        rows = max(2, batch.rows * replicas)
        return cls(rows, min(part, rows - 1), _lengths(batch))

    def of_batch(self, batch: Batch) -> Self:
        """These sizes with the lengths of `batch`."""
        return replace(self, lengths=_lengths(batch))

    @property
    def larger(self) -> Self:
        """These sizes with `rows` and `part` rounded up to the next power of two (`part` is at most `rows - 1`)."""
        rows = power(self.rows)
        return replace(self, rows=rows, part=min(power(self.part), rows - 1))

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.rows, self.part, *self.lengths

    @property
    def range(self) -> tuple[int, ...]:
        """The upper ends of the range that contains these sizes: each number rounded up to a power of two."""
        return tuple(map(power, self.numbers))


class Tried:
    """The sizes at which a rule held. Within a range, the rule counts as tried at all sizes up to the largest sizes at
    which it held."""

    def __init__(self) -> None:
        self._until: dict[tuple[int, ...], tuple[int, ...]] = {}

    def covers(self, sizes: Sizes) -> bool:
        until = self._until.get(sizes.range)
        return until is not None and all(map(int.__le__, sizes.numbers, until))

    def add(self, sizes: Sizes) -> None:
        before = self._until.get(sizes.range, sizes.numbers)
        self._until[sizes.range] = tuple(map(max, before, sizes.numbers))


def power(size: int) -> int:
    """The smallest power of two that is at least `size`, or 0 for 0."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def _lengths(batch: Batch) -> tuple[int, ...]:
    dims = dict(zip(batch.paths, batch.row_dims, strict=True))
    pairs = ((dims[path], axis, size) for path, leaf in batch.tensors.items() for axis, size in enumerate(leaf.shape))
    return tuple(size for dim, axis, size in pairs if axis != dim)
