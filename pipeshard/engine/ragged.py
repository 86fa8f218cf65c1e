"""Ragged: groups samples of different lengths into microbatches by tokens, and removes padding that no sample needs.

A position is padding if its attention mask is 0 and its labels are ignored. Without a mask, the positions after the
last label are padding in the decoder of an encoder-decoder model. Padding is removed from every tensor that has these
positions. Sums over valid labels and masked attention do not depend on padding. The proof at boost checks that removing
padding changes neither the loss nor the gradients.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch, LeafSpan, Selection, split_sizes
from pipeshard.batch.grouping import TokenCost, group
from pipeshard.config import PipelineConfig
from pipeshard.errors import BatchError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.hf import (
    DECODER_MASK,
    IDS,
    IGNORED,
    LABELS,
    MASK,
    is_encoder_decoder,
    is_mask,
    is_of_decoder,
    media_kind,
    padding_token,
    targets,
)
from pipeshard.slices.refusals import attention_slope
from pipeshard.split.partition import ELEMENT, call_costs

ENCODER, DECODER = "encoder", "decoder"
EMBEDDINGS = "inputs_embeds"
MOVED = 5  # elements moved per parameter and microbatch: two reads, and a gradient that is written and summed
# The fixed cost of a unit call (about 2 ms of Python and kernel launches), in floating-point operations. The value for
# GPUs is an estimate.
CALL = {"cpu": 1e8, "cuda": 2e11}


class SidePositions(NamedTuple):
    """The positions of one side of a batch: of the encoder's inputs (or the only inputs), or of the decoder's inputs.
    `total` is the number of positions, including padding. Sample k needs the first `lengths[k]` positions."""

    total: int
    lengths: tuple[int, ...]


class Ragged:
    """Splits batches of `model` into microbatches of at most `microbatch_tokens` padded tokens."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.encoder_decoder = model, is_encoder_decoder(model)
        self._fixed = set[tuple[str, int]]()  # dimensions whose size once differed from the number of positions

    def plan_for(
        self,
        config: PipelineConfig,
        flow: Dataflow,
        units: Mapping[str, nn.Module],
        sample: Batch,
        device: torch.device,
    ) -> Self:
        """Prepare `split` to group samples by the costs of the traced calls, for the schedule of `config`. Returns
        self."""
        totals = self._totals(_shapes(sample))
        for path in sample.tensors:
            if (side := self._side_of(path)) in totals:
                self._dims(path, sample, totals[side])  # a dimension whose size differs here never counts positions
        self.cost = self._cost(flow, units, device)
        self.idle = (config.pp_size - 1) / config.num_model_chunks
        self.has_short_cooldown = config.defers and config.schedule in ("1f1b", "interleaved")
        return self

    def _cost(self, flow: Dataflow, units: Mapping[str, nn.Module], device: torch.device) -> TokenCost:
        """Compute the TokenCost of a microbatch from the planner's costs of the traced calls and from the fixed costs
        of each parameter and call."""
        parameters = sum(p.numel() for call in flow.calls for p in units[call.unit].parameters())
        fixed = MOVED * ELEMENT * parameters + CALL.get(device.type, 0.0) * len(flow.calls)
        lengths = self._totals({path: shape for path, shape, _ in flow.axes.tensors}).values()
        slope = attention_slope(self.model)
        rows, *_ = *flow.axes.sizes, 1
        tokens = TokenCost(0.0, slope).of(rows, list(lengths))
        every = sum(call_costs(flow, units)) - sum(call_costs(flow, units, 0.0))
        return TokenCost(fixed * tokens / every if every else 0.0, slope)

    def split(self, batch: Batch, config: PipelineConfig) -> list[Batch]:
        """Split a batch into microbatches of at most `microbatch_tokens` padded tokens. Without this limit, `config`
        determines the number or size of the microbatches.

        Raises BatchError if a sample has more than `microbatch_tokens` tokens, or if the batch has neither token ids
        nor embeddings.
        """
        sides = self._sides(batch)
        if config.microbatch_tokens is not None:
            groups = self._groups(sides, config.microbatch_tokens)
        else:
            sizes = split_sizes(batch.rows, *config.cut)
            groups = [list(range(end - size, end)) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        return [self._part(batch, rows, sides) for rows in groups]

    def _groups(self, sides: Mapping[str, SidePositions], limit: int) -> list[list[int]]:
        lengths = list(zip(*(side.lengths for side in sides.values()), strict=True))
        for k, of_sample in enumerate(lengths):
            if sum(of_sample) > limit:
                of = f" ({' and '.join(f'{n} of the {name}' for name, n in zip(sides, of_sample))})" * (len(sides) > 1)
                raise BatchError(
                    f"sample {k} of the batch has {sum(of_sample)} tokens{of}, more than microbatch_tokens={limit}: "
                    f"truncate samples to at most {limit} tokens, or increase microbatch_tokens. Padding on the left "
                    "counts as tokens: pad on the right instead (tokenizer.padding_side = 'right')"
                )
        groups = group(lengths, limit, self.cost, self.idle)
        # The longest microbatches run in the middle, or last if the cooldown is shortened: in simulations of schedules,
        # hardly any other order is faster.
        return groups if self.has_short_cooldown else groups[::2] + groups[1::2][::-1]

    def _sides(self, batch: Batch) -> dict[str, SidePositions]:
        """Map the name of each side of a batch to its SidePositions. Raises BatchError if the batch has neither token
        ids nor embeddings."""
        totals = self._totals(_shapes(batch))
        if ENCODER not in totals:
            raise BatchError(
                f"microbatch_tokens: the batch has neither {IDS} nor {EMBEDDINGS} with a sequence dimension, only "
                f"{list(batch.paths)}, so pipeshard cannot determine the lengths of the samples. Pass the batch as a "
                "dict of the forward's arguments, or use num_microbatches"
            )
        return {name: self._side(name, batch, total) for name, total in totals.items()}

    def _totals(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """The number of positions of each side in the batch: the size of the second dimension of the side's token ids,
        embeddings or labels. If the ids and the mask have several texts per sample, with shape (samples, choices,
        positions), the positions of all texts count, and no position is removed."""
        leaves: dict[str, tuple[str, ...]] = {ENCODER: (IDS, EMBEDDINGS)}
        if self.encoder_decoder:
            leaves[DECODER] = (f"decoder_{IDS}", f"decoder_{EMBEDDINGS}", LABELS)

        def total(path: str) -> int:
            has_texts = shapes[path] == shapes.get(path.replace(IDS, MASK)) and path.endswith(IDS)
            return math.prod(shapes[path][1:]) if has_texts else shapes[path][1]

        found = {
            name: [total(path) for path in paths if len(shapes.get(path, ())) > 1] for name, paths in leaves.items()
        }
        return {name: totals[0] for name, totals in found.items() if totals}

    def _side(self, name: str, batch: Batch, total: int) -> SidePositions:
        used = self._used(name, batch, total)
        if used is None:
            return SidePositions(total, (total,) * batch.rows)
        used[:, 0] = True  # no microbatch is empty
        return SidePositions(total, tuple((total - used.flip(1).int().argmax(1)).tolist()))

    def _used(self, name: str, batch: Batch, total: int) -> Tensor | None:
        """Return a boolean tensor (samples, positions) that is False for padding, or None if neither a mask nor labels
        determine the padding. Without a mask, only decoder labels determine the padding, since decoder positions do not
        attend to later positions."""
        mask = self._mask(name, batch, total)
        counted = [] if mask is None else [mask != 0, *self._other_masks(name, batch, total)]
        if mask is not None or name == DECODER:
            counted += [
                (leaf != IGNORED).flatten(2).any(2) if leaf.ndim > 2 else leaf != IGNORED
                for leaf in self._labels(name, batch, total)
            ]
        return torch.stack([each.cpu() for each in counted]).any(0) if counted else None

    def _mask(self, name: str, batch: Batch, total: int) -> Tensor | None:
        path = MASK if name == ENCODER else DECODER_MASK
        mask = batch.by_sample(path) if path in batch.tensors else None
        return mask if mask is not None and mask.shape == (batch.rows, total) else None

    def _other_masks(self, name: str, batch: Batch, total: int) -> list[Tensor]:
        """The masks of other texts with as many positions as this side. These texts are trimmed together with the
        side."""
        paths = [path for path in batch.tensors if path.endswith(MASK) and path not in (MASK, DECODER_MASK)]
        paths = [path for path in paths if self._side_of(path) == name and self._dims(path, batch, total)]
        masks = [batch.by_sample(path) for path in paths]
        return [mask != 0 for mask in masks if mask.shape == (batch.rows, total)]

    def _labels(self, name: str, batch: Batch, total: int) -> list[Tensor]:
        """The targets that have one or more entries per position of this side."""
        paths = (path for path in targets(batch.tensors) if self._side_of(path) == name)
        return [batch.by_sample(path) for path in paths if self._dims(path, batch, total)]

    def _side_of(self, path: str) -> str:
        return DECODER if is_of_decoder(path, self.encoder_decoder) else ENCODER

    def _dims(self, path: str, batch: Batch, total: int) -> list[int]:
        """The sequence dimensions of a leaf: the dimensions whose size has equaled the number of positions of the
        leaf's side in every batch so far."""
        leaf, row_dim = batch.tensors[path], batch.row_dims[batch.paths.index(path)]
        if leaf.ndim < 2 or (media_kind(path) is not None and not is_mask(path)):
            return []
        self._fixed |= {(path, dim) for dim, size in enumerate(leaf.shape) if size != total}
        if path.endswith(EMBEDDINGS):
            self._fixed.add((path, leaf.ndim - 1))  # the hidden size, which may equal the number of positions
        dims = (dim for dim, size in enumerate(leaf.shape) if size == total and dim != row_dim)
        return [dim for dim in dims if (path, dim) not in self._fixed]

    def _part(self, batch: Batch, rows: list[int], sides: Mapping[str, SidePositions]) -> Batch:
        """Return the microbatch of these samples, without the trailing positions that are padding in every sample."""
        spans: dict[str, LeafSpan] = {}

        def narrowed(path: str, leaf: Tensor, dim: int | None) -> Tensor:
            side = sides.get(self._side_of(path))
            if side is not None and (dims := self._dims(path, batch, side.total)):
                span = spans[path] = LeafSpan(max(side.lengths[k] for k in rows), side.total)
                for positions in dims:
                    leaf = leaf.narrow(positions, 0, span.length)
            return leaf.contiguous()  # like the batch's own tensors: a criterion may call view

        return replace(batch.take(torch.tensor(rows)).map(narrowed), selection=Selection(tuple(rows), spans))

    def padded(self, batch: Batch) -> list[Batch]:
        """Return the batch with padding appended (25 % more positions), so that every microbatch has padding to remove.
        For models that cannot run with more positions, also return a batch in which padding replaces the last 25 % of
        the positions. This second batch is omitted if the batch contains answer positions, or if nothing marks its
        padding. In a batch that is padded on the left, the replaced positions are tokens, and may include all
        labels."""
        sides = self._sides(batch)
        sides = {name: side for name, side in sides.items() if self._used(name, batch, side.total) is not None}
        has_answers = any(path.endswith("_positions") for path in batch.tensors)  # such as start_positions
        cuts = [False] if has_answers or not sides else [False, True]
        return [self._extended(batch, sides, is_cut) for is_cut in cuts]

    def _extended(self, batch: Batch, sides: Mapping[str, SidePositions], is_cut: bool) -> Batch:
        """Append padding to the batch: 25 % more positions on these sides. With `is_cut`, first remove the same number
        of the batch's own positions."""
        fillings = {IDS: padding_token(self.model) or 0, **dict.fromkeys(targets(batch.tensors), IGNORED)}

        def fill(path: str, leaf: Tensor, dim: int | None) -> Tensor:
            side = sides.get(self._side_of(path))
            if side is None:
                return leaf
            quarter = max(1, side.total // 4)
            for positions in self._dims(path, batch, side.total):
                leaf = leaf.narrow(positions, 0, max(1, side.total - quarter)) if is_cut else leaf
                shape = list(leaf.shape)
                shape[positions] = quarter
                padding = leaf.new_full(shape, fillings.get(path.removeprefix("decoder_"), 0))
                leaf = torch.cat([leaf, padding], positions)
            return leaf

        return batch.map(fill)


def _shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf, with the samples as the first dimension."""
    return {path: tuple(batch.by_sample(path).shape) for path in batch.tensors}
