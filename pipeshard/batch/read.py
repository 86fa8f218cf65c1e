"""Read: converts samples into a Batch, with the batch dimension of each leaf.

A single batch may be ambiguous: a table may happen to have as many rows as there are samples, and an (s, b) leaf looks
like a leaf that every microbatch needs in full. A leaf must therefore have the same role in all batches, and an
ambiguous leaf is refused unless `batch_dims` declares it. One of the architectures in docs/parity.md has such a leaf.
"""

import inspect
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from pipeshard.batch.batch import FOR_CRITERION, Batch, BatchDims
from pipeshard.batch.media import INTEGERS, Owners, media_owners
from pipeshard.errors import BatchError
from pipeshard.hf import (
    IDS,
    LABELS,
    MASK,
    PER_TOKEN,
    PIXELS,
    has_label_per_sample,
    image_shape,
    is_spacing,
    is_target,
    main_input,
)

logger = logging.getLogger("pipeshard")
SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def read_batch(
    model: nn.Module, data: Any, declared: BatchDims | None = None, lists: dict[str, bool] | None = None
) -> Batch:
    """Create a Batch for `model` from the data that a dataloader yielded, and assign media to samples.

    `declared` maps paths to the dimension that counts the samples (None: every microbatch receives the full leaf).
    `lists` maps the paths of lists of tensors in earlier batches to whether they have one entry per sample. This call
    updates `lists`.
    """
    declared = declared or {}
    batch = Batch.of(data, main_input(model), declared, lists)
    _refuse_tensors(batch)
    owners = {path: counts for path, counts in _owners(model, batch).items() if path not in declared}
    owners |= {path: several for path, dim in declared.items() if dim == 0 and (several := _several(batch, path))}
    taken = taken_by(model, batch.data)
    return replace(batch.owned(owners), taken=taken, exact=_exact(model, batch, taken))


def _refuse_tensors(batch: Batch) -> None:
    """Raise BatchError for sparse tensors, and for tensors on the meta device, which have no values to train on."""
    for path, tensor in batch.all_tensors:
        if tensor.is_meta:
            raise BatchError(
                f"{path}: a tensor of shape {tuple(tensor.shape)} is on the meta device, so it has no values: "
                "create it on the CPU or on the rank's device"
            )
        if tensor.layout in SPARSE:
            raise BatchError(
                f"{path}: a tensor of shape {tuple(tensor.shape)} is sparse, which pipeshard supports neither in "
                "traces nor in microbatches: pass tensor.to_dense(), or pass its indices and values and create the "
                "sparse tensor in the model's forward"
            )


def taken_by(model: nn.Module, data: Any) -> int | None:
    """The number of entries of a tuple, such as (images, labels), that are passed to the model, or None for all.

    Entries for which the model's forward has no positional argument are only for the criterion. So are class labels in
    the last entry, if the model would receive them as an optional mask, positions, token types or a flag.
    """
    if not isinstance(data, tuple | list) or len(data) < 2:
        return None
    parameters = parameters_of_forward(model)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    places = _positional(parameters)
    if not places:
        return None
    taken = min(len(data), len(places))
    if taken == len(data) and taken > 1 and _is_of_criterion(places[taken - 1], data):
        taken -= 1
    return taken if taken < len(data) else None


def _is_of_criterion(argument: inspect.Parameter, data: Sequence[Any]) -> bool:
    """Whether the last entry of a tuple contains labels (one integer per sample), not a value for `argument`."""
    value, is_optional = data[-1], argument.default is not argument.empty
    if not is_optional or not isinstance(value, Tensor) or value.ndim != 1 or value.dtype not in INTEGERS:
        return False
    is_per_token = argument.name in PER_TOKEN and isinstance(data[0], Tensor) and value.shape == data[0].shape[:1]
    return is_per_token or "mask" in argument.name or isinstance(argument.default, bool)


def refuse_labels_for_model(model: nn.Module, batch: Batch, read: Collection[str]) -> None:
    """Raise BatchError if the last entry of a tuple seems to contain labels, but is passed to the model as an optional
    mask, positions or token types. `read` contains the paths of the leaves that the criterion reads.

    Since a criterion may also read a mask, the entry for an argument whose name ends in `mask` counts as labels only
    if some of its values are neither 0 nor 1.
    """
    data, path = batch.data, batch.paths[-1]
    places = _positional(parameters_of_forward(model))
    is_whole = isinstance(data, tuple | list) and batch.taken is None and 1 < len(data) <= len(places)
    if not is_whole or path not in read or not isinstance(data[-1], Tensor) or data[-1].dtype not in INTEGERS:
        return
    name, default = places[len(data) - 1].name, places[len(data) - 1].default
    is_mask = name.endswith("mask") and bool(data[-1].ge(0).logical_and(data[-1].le(1)).all())
    if default is not inspect.Parameter.empty and (name in PER_TOKEN or name.endswith("mask")) and not is_mask:
        raise BatchError(
            f"{path}, the last entry of the batch, is passed to {type(model).__name__} as {name}, but the criterion "
            f"also reads it: pass a dict. If this entry contains labels, use the key '{FOR_CRITERION}labels' (only the "
            f"criterion receives it); if it is the model's {name}, use the key '{name}'"
        )


def argument_names(model: nn.Module) -> list[str]:
    """The names of the positional arguments of the model's forward, or an empty list if the forward has no
    signature."""
    return [parameter.name for parameter in _positional(parameters_of_forward(model))]


def parameters_of_forward(model: nn.Module) -> list[inspect.Parameter]:
    """The parameters of the model's forward, or an empty list if the forward has no signature."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def _positional(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _exact(model: nn.Module, batch: Batch, taken: int | None) -> frozenset[str]:
    """The paths of the leaves that keep their precision if the model is cast to 16 bits. These are leaves that only the
    criterion receives, and targets and spacings, identified by their own name or by the name of the model's positional
    argument."""
    prefixes = FOR_CRITERION, f"['{FOR_CRITERION}"
    exact = {path for path in batch.paths if _is_exact(path) or path.startswith(prefixes)}
    if batch.tree.kind is not dict:
        paths, names = iter(batch.paths), itertools.chain(argument_names(model), itertools.repeat(""))
        for k, (entry, name) in enumerate(zip(batch.tree.parts, names)):
            of_entry = [*itertools.islice(paths, entry.size)]
            if _is_exact(name) or (taken is not None and k >= taken):
                exact.update(of_entry)
    return frozenset(exact)


def _is_exact(name: str) -> bool:
    return is_target(name) or is_spacing(name)


def _owners(model: nn.Module, batch: Batch) -> Owners:
    owners = media_owners(model, batch)
    if LABELS in batch.tensors and batch.tensors[LABELS].ndim == 2 and (codebooks := _several(batch, LABELS)):
        owners[LABELS] = codebooks  # one row for each codebook of a sample
    return owners


def _several(batch: Batch, path: str) -> tuple[int, ...]:
    """The number of entries of each sample, if the size of the leaf's first dimension is a multiple of the number of
    samples (at least twice this number). Otherwise ()."""
    leaf = batch.tensors.get(path)
    count, remainder = divmod(len(leaf) if leaf is not None and leaf.ndim else 0, batch.rows)
    return (count,) * batch.rows if count > 1 and not remainder else ()


LeafKind = tuple[str, int]  # a leaf's path and its number of dimensions


class RowDims:
    """Reads the batches of one model, and compares the dimensions of each leaf between batches."""

    def __init__(self, model: nn.Module, declared: BatchDims | None = None) -> None:
        self.model, self.declared = model, dict(declared or {})
        self._lists: dict[str, bool] = {}
        self._first: dict[
            LeafKind, tuple[int, int]
        ] = {}  # in the first batch: the size of dimension 0, and the number of samples
        self._other: dict[LeafKind, set[int]] = {}  # dimensions that did not count the samples in some batch

    def read(self, data: Any, is_cut: bool = True) -> Batch:
        """Read a batch from a dataloader. If the batch is not split into microbatches (`is_cut=False`), leaves may be
        ambiguous.

        Raises BatchError for a batch that cannot be read.
        """
        batch = read_batch(self.model, data, self.declared, self._lists)
        return self.settle(batch) if is_cut else batch

    def settle(self, batch: Batch) -> Batch:
        """Return the batch without the row dimensions of leaves that only happen to have as many rows as there are
        samples.

        Raises BatchError for leaves whose row dimension is ambiguous, and for graphs, which cannot be split.
        """
        _refuse_graphs(batch)
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
            one = len(doubts) == 1
            shapes = (f"dimension {dim} of {path} {tuple(leaves[path].shape)}" for path, dim in doubts.items())
            raise BatchError(
                f"the batch has {batch.rows} samples, and it is ambiguous whether {' and '.join(shapes)} "
                f"{'is a batch dimension' if one else 'are batch dimensions'}. To split along "
                f"{'this dimension' if one else 'these dimensions'}, pass PipelinePlugin(batch_dims={doubts}). To pass "
                f"the whole {'tensor' if one else 'tensors'} to every microbatch, pass "
                f"batch_dims={dict.fromkeys(doubts)}"
            )
        return batch.counted(whole)

    def _is_whole_as_before(self, path: str, leaf: Tensor, rows: int) -> bool:
        """Whether the first dimension did not count the samples in the first batch, although its size is now the number
        of samples. Raises BatchError if the dimension cannot have the same role in both batches."""
        size = leaf.shape[0] if leaf.ndim else 1
        if size == 1:
            return False
        size_before, rows_before = self._first.setdefault((path, leaf.ndim), (size, rows))
        counted_before, counts_now = size_before == rows_before, size == rows
        if counted_before == counts_now:
            return False
        if counted_before or size_before != size:
            raise BatchError(
                f"the first dimension of {path} had size {size_before} in an earlier batch of {rows_before} samples, "
                f"but has size {size} in this batch of {rows} samples. This dimension is therefore not always the "
                f"batch dimension. Pass PipelinePlugin(batch_dims={{{path!r}: None}}) to pass all of {path} to "
                f"every microbatch, or batch_dims={{{path!r}: 0}} if {path} has one entry per sample"
            )
        return True

    def _doubtful(self, path: str, leaf: Tensor, batch: Batch) -> int | None:
        """The dimension of an unsplit leaf that may count the samples, or None. This is the only dimension whose size
        is the number of samples. If no dimension has this size, it is dimension 0, if its size is a multiple of the
        number of samples. A dimension is excluded if its size in this or an earlier batch is neither that batch's
        number of samples nor (for dimension 0) a multiple of it."""
        if path in batch.owners and path != LABELS:  # labels: (s, b), or one row for each codebook
            return None
        several = leaf.ndim > 0 and len(leaf) % batch.rows == 0
        other = self._other.setdefault((path, leaf.ndim), set())
        other |= {dim for dim, size in enumerate(leaf.shape) if size != batch.rows and (dim > 0 or not several)}
        equal = [dim for dim, size in enumerate(leaf.shape) if size == batch.rows and dim not in other]
        if equal:
            return equal[0] if len(equal) == 1 else None
        return 0 if several and 0 not in other and path not in batch.owners else None


def _refuse_graphs(batch: Batch) -> None:
    """Raise BatchError for torch_geometric's Data and Batch, whose tensors count nodes and edges."""
    kind = next((kind for kind in batch.tree.kinds if hasattr(kind, "__cat_dim__")), None)
    if kind is not None:
        raise BatchError(
            f"the batch contains an instance of {kind.__name__}, whose tensors have one row per node or edge, not per "
            "sample, so it cannot be split into microbatches. Pass PipelinePlugin(num_microbatches=1)"
        )


COLLATORS = "DataCollatorForSeq2Seq(tokenizer), DataCollatorWithPadding(tokenizer)"


def collate(samples: list[Any]) -> Any:
    """Collate samples with torch's default_collate. If the samples are mappings with lists of numbers (a tokenized
    `datasets.Dataset`), use transformers' default_data_collator instead. As in Trainer, default_data_collator renames
    `label` to `labels`, and omits strings.

    Raises BatchError if the lists of the samples differ in length.
    """
    if not (isinstance(samples[0], Mapping) and any(map(is_numbers, samples[0].values()))):
        return default_collate(samples)
    from transformers import default_data_collator

    try:
        return default_data_collator(samples, return_tensors="pt")
    except ValueError as error:
        raise BatchError(
            f"the samples' lists cannot be stacked into a tensor ({error}): pad the lists with "
            f"collate_fn=transformers.{COLLATORS} or a similar collator, or pass padding='max_length' to the tokenizer"
        ) from error


def is_numbers(value: Any) -> bool:
    """Whether a value is a list of numbers, or a nested list of numbers."""
    return isinstance(value, list) and (not value or isinstance(value[0], int | float) or is_numbers(value[0]))


def dummy_inputs(model: nn.Module, rows: int = 2, length: int = 8) -> dict[str, Tensor]:
    """Dummy inputs: `rows` samples. If the model takes tokens, each sample has `length` tokens.

    Raises BatchError for a model that takes neither tokens nor images of one size.
    """
    if main_input(model) == IDS:
        ids = torch.zeros(rows, length, dtype=torch.int64)
        return {IDS: ids, MASK: torch.ones_like(ids), LABELS: ids[:, 0] if has_label_per_sample(model) else ids}
    if main_input(model) == PIXELS and (shape := image_shape(model)) is not None:
        return {PIXELS: torch.zeros(rows, *shape), LABELS: torch.zeros(rows, dtype=torch.int64)}
    raise BatchError(
        f"cannot generate an input for {type(model).__name__} (main input {main_input(model)!r}): pass a batch to "
        "PipelinePlugin(dry_run_input=...) or pipeshard.plan(model, batch, ...), or pass a dataloader over a dataset "
        "to booster.boost (if the dataset is streaming, it must support copy.deepcopy)"
    )
