"""BatchSplitter: splits the batches of a step into microbatches, and microbatches into slices."""

from collections.abc import Sequence

from torch import nn

from pipeshard.batch.batch import Batch
from pipeshard.config import PipelineConfig
from pipeshard.engine.ragged import Ragged
from pipeshard.hf import has_flash_attention
from pipeshard.slices.cut import cut, lengths, sequence_of
from pipeshard.slices.refusals import attention_slope


class BatchSplitter:
    """Splits batches as the plugin's arguments specify. A step requests the same split several times, so the last
    result is cached until `forget` is called. With `microbatch_tokens`, `ragged` splits the batches. Pipeline sets
    `ragged` after it has traced the model.
    """

    ragged: Ragged | None = None

    def __init__(self, config: PipelineConfig, model: nn.Module) -> None:
        self.config = config
        self.slope = attention_slope(model) if config.has_slices else 0.0
        self.is_flash = config.has_slices and has_flash_attention(model)
        self.forget()

    def forget(self) -> None:
        self._of_batches: tuple[list[Batch], list[list[Batch]]] = [], []
        self._of_microbatches: tuple[list[list[Batch]], list[list[Batch]]] = [], []

    def is_several(self) -> bool:
        """Whether a step may split a batch into several microbatches."""
        return self.config.num_microbatches != 1

    def microbatches(self, batches: Sequence[Batch]) -> list[list[Batch]]:
        """The microbatches of each batch."""
        if [*map(id, self._of_batches[0])] != [*map(id, batches)]:
            self._of_batches = list(batches), [self._split(batch) for batch in batches]
        return self._of_batches[1]

    def uncut(self, batches: Sequence[Batch]) -> None:
        """Use each of these batches as one microbatch until `forget` is called."""
        self._of_batches = list(batches), [[batch] for batch in batches]

    def slices(self, microbatches: list[list[Batch]]) -> list[list[Batch]]:
        """The slices of each microbatch, for all batches in order. Every microbatch has the same number of slices.
        Returns an empty list if microbatches are not sliced."""
        if self.config.has_slices and self._of_microbatches[0] is not microbatches:
            self._of_microbatches = microbatches, self._sliced([part for parts in microbatches for part in parts])
        return self._of_microbatches[1]

    def all(self, batches: Sequence[Batch], train: bool) -> list[list[Batch]]:
        """The microbatches of each batch. With `train`, the list also contains the slices of each microbatch, if
        microbatches are sliced."""
        microbatches = self.microbatches(batches)
        return microbatches + self.slices(microbatches) if train else microbatches

    def _split(self, batch: Batch) -> list[Batch]:
        return batch.split(*self.config.cut) if self.ragged is None else self.ragged.split(batch, self.config)

    def _sliced(self, microbatches: Sequence[Batch]) -> list[list[Batch]]:
        totals = [sequence_of(batch) for batch in microbatches]
        wanted = self.config.slices_of(totals)
        n = min(len(lengths(total, wanted, self.slope)) for total in totals)
        if n == 1:
            return []
        sizes = [lengths(total, n, self.slope) for total in totals]
        return [cut(batch, of_batch, self.is_flash) for batch, of_batch in zip(microbatches, sizes, strict=True)]
