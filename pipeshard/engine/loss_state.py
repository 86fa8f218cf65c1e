"""Loss state: tracks the values, other than samples, that a loss depends on and that a user may change between steps.

The trials of a loss rule use one set of class weights, one training mode and one value of each coefficient. With other
values, the loss may follow a different rule: a mean over samples becomes a weighted mean if the class weights are not
all 1. So a rule counts as proven only for the state that these tensors and numbers had in its trials. Values are
compared by kind: integers up to 64 by value, other numbers by sign and power of four, and tensors by range and by
whether all elements are equal. In an exact comparison, an annealed coefficient would differ in every step.
"""

from collections.abc import Hashable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.engine.loss_values import Range
from pipeshard.graph.flags import kind_of_number
from pipeshard.graph.shapes import is_trainable
from pipeshard.graph.units import find_units
from pipeshard.graph.writes import Noted, count_reads
from pipeshard.private import tree_leaves
from pipeshard.split.materialize import is_released

MOST_IN_BATCH = 64  # larger tensors in a batch are not compared
LIBRARIES_OF_LAYERS = {"torch", "transformers"}
MODULE_OF_LOSSES = nn.CrossEntropyLoss.__module__  # losses in this module may have class weights
COMPARED_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
COMPARED_DTYPES |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
NUMBERS = "biuf"  # kinds of numpy dtypes
MOST_ELEMENTS = 2**20  # larger tensors are not compared


class LossState:
    """The values that the user has set in tensors of the model: buffers, frozen parameters, and tensors in attributes
    or in lists and dicts that are attributes. Changes made by forwards do not count. Modules inside units seldom
    compute a loss, so torch's and transformers' own modules inside units are skipped, except torch's losses."""

    def __init__(self, model: nn.Module) -> None:
        of_units = {module for unit in find_units(model).values() for module in unit.modules()}
        self._modules = [module for module in model.modules() if module not in of_units or _may_weight(module)]
        self._versions: list[tuple[Tensor, Noted]] | None = None
        self._kinds: tuple[Hashable, ...] = ()

    def look(self) -> tuple[Hashable, ...]:
        """The kinds of the tracked tensors, computed again if the user has changed a tensor."""
        versions = self._look()
        if self._versions is None or not _is_same(versions, self._versions):
            self._versions, self._kinds = versions, tuple(kind_of_tensor(tensor) for tensor, _ in versions)
        return self._kinds

    def stepped(self) -> None:
        """Record that a step has run since `look`: changes since then were made by forwards."""
        if self._versions is not None:
            self._versions = self._look()

    def _look(self) -> list[tuple[Tensor, Noted]]:
        tensors = (tensor for module in self._modules for tensor in _tensors(module))
        return [(t, Noted(0 if t.is_inference() else t._version, count_reads(t))) for t in tensors]


def _may_weight(module: nn.Module) -> bool:
    """Whether the module's class may compute a loss from the module's tensors, such as class weights."""
    name = type(module).__module__
    return name == MODULE_OF_LOSSES or name.split(".")[0] not in LIBRARIES_OF_LAYERS


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for holder in module.__dict__.values():  # these include the dicts of buffers and parameters
        values = holder.values() if isinstance(holder, dict) else holder
        for value in values if isinstance(holder, dict | list | tuple) else [holder]:
            if isinstance(value, Tensor) and not (isinstance(value, nn.Parameter) and is_trainable(value)):
                yield value


def _is_same(now: list[tuple[Tensor, Noted]], then: list[tuple[Tensor, Noted]]) -> bool:
    pairs = zip(now, then)
    return len(now) == len(then) and all(a is b and noted == before for (a, noted), (b, before) in pairs)


def of_batch(batch: Batch) -> tuple[Hashable, ...]:
    """The kinds of a batch's numbers, and of its small tensors without a batch dimension."""
    kinds: list[Hashable] = []
    for leaf, dim in zip(batch.leaves, batch.row_dims, strict=True):
        if isinstance(leaf, int | float):
            kinds.append(kind_of_number(float(leaf)))
        elif isinstance(leaf, Tensor) and dim is None and leaf.numel() <= MOST_IN_BATCH:
            kinds.append(kind_of_tensor(leaf))
    return tuple(kinds)


def of_entries(batch: Batch) -> tuple[Hashable, ...]:
    """The kind of each list or array with one entry per sample: the kind of its numbers, its string if it contains only
    one distinct string, and whether all entries have tensors of the same shapes."""
    kinds: list[Hashable] = []
    for entries in batch.entries.values():
        if isinstance(entries, np.ndarray) and entries.dtype.kind in NUMBERS:
            kinds.append(kind_of_tensor(torch.from_numpy(entries.astype(np.float64))))
            continue
        leaves = [tree_leaves(entry) for entry in entries]
        numbers = [leaf for of_entry in leaves for leaf in of_entry if isinstance(leaf, int | float)]
        texts = {leaf for of_entry in leaves for leaf in of_entry if isinstance(leaf, str)}
        shapes = {tuple(leaf.shape for leaf in of_entry if isinstance(leaf, Tensor)) for of_entry in leaves}
        of_numbers = kind_of_tensor(torch.tensor(numbers, dtype=torch.float64)) if numbers else None
        kinds.append((of_numbers, min(texts) if len(texts) == 1 else None, len(shapes) == 1))
    return tuple(kinds)


def kind_of_tensor(tensor: Tensor) -> Hashable:
    """The kind of a tensor, or None if its values are not compared. Tensors of one kind are assumed to give the same
    rule."""
    numbers = tensor.detach()
    if is_released(tensor) or type(numbers) is not Tensor or numbers.is_meta or numbers.layout is not torch.strided:
        return None
    if not 0 < numbers.numel() <= MOST_ELEMENTS or numbers.dtype not in COMPARED_DTYPES:
        return None
    if numbers.numel() == 1:
        return kind_of_number(float(numbers))
    low, high = numbers.aminmax()
    return Range.of_floats(numbers), bool(low == high)
