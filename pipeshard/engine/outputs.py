"""Outputs: the model outputs that a step returns, collected over its microbatches.

Only the last stage has outputs. The logits of a whole batch may need more memory than the rest of a step, so a step
keeps only the outputs that `return_outputs` requests. If the trace shows an output that cannot be merged for the whole
batch (a scalar other than the loss, a samples-by-samples matrix), every rank raises UsageError before the step.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, is_dataclass
from dataclasses import fields as fields_of
from operator import eq
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeshard.batch.batch import Batch, LeafSpan, Selection
from pipeshard.batch.tree import field_of, flatten_with_names
from pipeshard.distributed.collectives import gather, gather_objects
from pipeshard.errors import UsageError, summary
from pipeshard.graph.dataflow import Dataflow, Reads, Wanted
from pipeshard.graph.shapes import TensorSpec
from pipeshard.private import disabled_torch_function, tree_flatten, tree_map_only, tree_tensors, tree_unflatten

ReturnOutputs = bool | str | Collection[str] | Callable[[Any, Any], Any]
BACKWARD = (
    "execute_pipeline already runs the backward pass and accumulates the gradients in .grad: remove "
    "booster.backward(...) and loss.backward()"
)


class StepLoss(Tensor):
    """The loss of a step: a tensor without an autograd graph. Its `backward` raises UsageError. Copies of the loss,
    saved losses and results computed from the loss are plain tensors."""

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError(BACKWARD)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))


class Outputs:
    """The outputs that `return_outputs` requests from one step, collected from the microbatches that have run.

    Attributes:
        needed: the fields of the model's output that the last stage needs in addition to the loss (True: all, False:
            none).
        with_loss: whether the batch's loss is part of the result.

    Raises UsageError for an invalid request.
    """

    def __init__(self, asked: ReturnOutputs, num_batches: int = 1) -> None:
        if num_batches > 1 and asked is not False and asked != "loss" and not callable(asked):
            raise UsageError(
                f"return_outputs={asked!r} merges the outputs of one batch, but num_batches={num_batches}: pass "
                "a function, 'loss' or False"
            )
        self.function: Callable[[Any, Any], Any] | None = asked if callable(asked) else None
        self.each_loss = asked == "loss"
        self.needed: Wanted = asked if isinstance(asked, bool) else self.function is not None
        if not (isinstance(asked, bool) or self.function or self.each_loss):
            self.needed = frozenset([asked] if isinstance(asked, str) else _names(asked))
        fields = self.needed if isinstance(self.needed, frozenset) else ()
        self.with_loss = asked is True or "loss" in fields
        self._text = "a function" if self.function else repr(sorted(fields) or asked)
        self.kept: list[Any] = []
        self._batches: list[Batch] = []
        self._class: type | None = None  # the output's class, if only some of its fields are kept
        self._failure: UsageError | None = None

    def __str__(self) -> str:
        """A description of the request. Ranks with the same request have the same description."""
        return self._text

    def check(self, flow: Dataflow, batch: Batch, is_cut: bool, is_split: bool) -> None:
        """Raise UsageError, on every rank, if the model's output lacks a requested field or the requested loss. Also
        raise UsageError if the outputs cannot be collected from the stages or microbatches, or cannot be merged.
        `is_split` is whether the model is split into stages, and `is_cut` is whether `batch` is split into
        microbatches."""
        if self.each_loss and flow.loss is None:
            raise UsageError(
                "return_outputs='loss' requests a loss, but this batch has none: add labels to the batch, or pass a "
                "criterion"
            )
        for name, kind in flow.opaque if self.needed else ():
            is_wanted = not name or (self.function is None and self._takes(name))  # a function need not read this part
            if is_wanted and (is_split or (is_cut and self.function is None)):
                raise UsageError(
                    f"return_outputs={self} requests the model's output{name and ' '}{name} ({kind}), whose tensors "
                    "cannot be collected from stages or microbatches. Return a dict, a tuple, a named tuple or a "
                    "transformers ModelOutput from forward, register the class with "
                    "torch.utils._pytree.register_pytree_node, or pass return_outputs='loss' or False"
                )
        if is_cut and self.function is None:
            self._check_merge(flow, batch)
        if isinstance(self.needed, frozenset):
            fields = dict.fromkeys(filter(None, (field_of(path) for path, _, _ in flow.outputs)))
            if unknown := sorted(self.needed - fields.keys()):
                known = f"its fields are {', '.join(fields)}" if fields else "it has no named fields"
                raise UsageError(
                    f"return_outputs requests {', '.join(map(repr, unknown))}, which the model's output for this batch "
                    f"does not have: {known}. Pass existing fields, True, 'loss', or a function of the output and the "
                    "microbatch"
                )

    def _check_merge(self, flow: Dataflow, batch: Batch) -> None:
        """Raise UsageError if an output of a microbatch cannot be merged for the whole `batch`. An output without a
        batch dimension can be merged if it depends only on parameters and on leaves that all microbatches contain in
        full."""
        for path, use, spec in flow.outputs if self.needed else ():
            if self._takes(path) and not _is_loss(use, spec, flow):
                is_computed = bool(use.values or use.hidden or use.inputs & batch.parted)
                _refuse_unmergeable(path, spec, is_computed)

    def merges(self, flows: Sequence[Dataflow], batch: Batch) -> bool:
        """Whether the outputs of the microbatches of `batch` can be merged, as far as their traces show. Outputs cannot
        be merged if the microbatches have different outputs, or if another scalar depends on the same results as the
        loss."""
        if len(flows) == 1 or not self.needed or self.function is not None:
            return True
        try:
            for flow in flows:
                self._check_merge(flow, batch)
        except UsageError:
            return False
        taken = [[output for output in flow.outputs if self._takes(output[0])] for flow in flows]
        fields = {tuple(path for path, *_ in outputs) for outputs in taken}
        return len(fields) == 1 and sum(_is_loss(use, spec, flows[0]) for _, use, spec in taken[0]) <= 1

    def _takes(self, path: str) -> bool:
        return not isinstance(self.needed, frozenset) or field_of(path) in self.needed

    def keep(self, output: Any, loss: Tensor | None, batch: Batch) -> None:
        """Keep the requested fields of one microbatch's output, or its loss, detached. If a function was requested,
        call it on the output and keep the result instead."""
        self._batches.append(batch)
        if self.function is not None:
            self._call(self.function, output, batch)
        elif self.each_loss:
            assert loss is not None
            self.kept.append(loss.detach())
        elif self.needed:
            if isinstance(self.needed, frozenset):  # the class is restored at the end, since it may require a field
                self._class = type(output)
                output = {name: output[name] for name in output if name in self.needed}
            self._losses = {k for k, leaf in enumerate(tree_flatten(output)[0]) if leaf is loss}
            self.kept.append(_detached(output))

    @property
    def latest(self) -> Any:
        """The result that was kept for the latest microbatch, or None."""
        return self.kept[-1] if self.kept else None

    @property
    def has_nan(self) -> bool:
        """Whether a kept result contains a NaN. Placeholders for values that were not sent are NaN."""
        with_values = (tensor for tensor in tree_tensors(self.kept) if not tensor.is_meta)
        return any(bool(tensor.isnan().any()) for tensor in with_values if tensor.is_floating_point())

    def _call(self, function: Callable[[Any, Any], Any], output: Any, batch: Batch) -> None:
        if self._failure is not None:
            return
        try:
            with torch.no_grad():
                self.kept.append(function(_detached(output), batch.for_criterion()))
        except Exception as error:  # raised after the step, since other stages wait for this stage
            self._failure = UsageError(
                f"the function passed as return_outputs failed on the output of microbatch {len(self.kept)} "
                f"({summary(error)}). The step itself completed, so the gradients of a training step are valid: fix "
                "the function"
            )
            self._failure.__cause__ = error

    def merged(self, flow: Dataflow, loss: Tensor | None) -> Any:
        """Return the result of the step: the microbatches' losses, the list of the function's results, or the merged
        output with the batch's `loss`. Returns None if nothing was requested, or if merging fails (`raise_failure` then
        raises the error)."""
        if self.each_loss:
            return torch.stack(self.kept)
        if self.function is not None or not self.needed:
            return self.kept if self.function else None
        try:
            merged = self._merge(flow, loss)
            return merged if self._class is None else _of_class(self._class, merged)
        except UsageError as error:
            self._failure = error

    def _merge(self, flow: Dataflow, loss: Tensor | None) -> Any:
        """Merge the microbatches' outputs into one output of the same class: concatenate tensors along their batch
        dimension, and replace the loss with the batch's `loss`. Numbers, strings, and tensors without a batch dimension
        must be the same in all microbatches. Other objects are taken from the first microbatch. Raises UsageError if
        numpy arrays would have to be merged."""
        specs = {path: spec for path, _, spec in flow.outputs}
        named, tree = flatten_with_names(self.kept[0])
        is_whole = len(self._batches) == 1 and self._batches[0].selection is None
        if not is_whole:
            self._refuse_lists(named, flow)
        columns = zip(*(tree_flatten(output)[0] for output in self.kept), strict=True)
        leaves: list[Any] = []
        for k, ((name, first), column) in enumerate(zip(named, columns, strict=True)):
            slopes = specs[name].slopes if name in specs else ()
            dim = next((d for d, slope in enumerate(slopes) if slope and slope[0]), None)
            if k in self._losses and loss is not None:
                leaves.append(loss)
            elif is_whole or not isinstance(first, Tensor | np.ndarray | np.generic | int | float | str):
                leaves.append(first)
            elif isinstance(first, np.ndarray):
                raise _unmergeable(name, "is a numpy array, not a tensor")
            elif not isinstance(first, Tensor) or first.ndim == 0 or (dim is None and slopes):
                leaves.append(_same(name, column))
            else:
                dim = self._sample_dim(name, column) if dim is None else dim
                leaves.append(self._restored(name, column, dim, flow))
        return tree_unflatten(leaves, tree)

    def _refuse_lists(self, named: Sequence[tuple[str, Any]], flow: Dataflow) -> None:
        """Raise UsageError if the output's structure differs between microbatches, or if the output contains a list
        with one entry per sample. `named` contains the leaves of the first microbatch's output, with
        their names."""
        if len({str(tree_flatten(output)[1]) for output in self.kept}) > 1:
            raise _unmergeable("(its structure)", "differs between microbatches")
        rows = self._batches[0].rows
        nodes, _ = tree_flatten(self.kept[0], is_leaf=lambda node: type(node) is list and len(node) == rows)
        lists = [tree_tensors(node) for node in nodes if isinstance(node, list)] if not flow.axes.groups else []
        for tensor, *_ in filter(None, lists):
            name = next(name for name, leaf in named if leaf is tensor)
            raise _unmergeable(name, f"is in a list with one entry per sample of the microbatch ({rows} in all)")

    def _restored(self, name: str, column: Sequence[Tensor], dim: int, flow: Dataflow) -> Tensor:
        """Merge one output's tensors from all microbatches along the batch dimension `dim`, with the samples in their
        original order. Positions that were removed from a microbatch as padding are filled with zeros."""
        selections = [batch.selection for batch in self._batches if batch.selection is not None]
        if not selections:
            return torch.cat(list(column), dim)
        spans = _spans(name, column, dim, flow, selections)
        shape = list(column[0].shape)
        shape[dim] = sum(len(selection.rows) for selection in selections)
        for at, of_parts in spans.items():
            shape[at] = of_parts[0].total
        whole = column[0].new_zeros(shape)
        for k, (part, selection) in enumerate(zip(column, selections, strict=True)):
            view = whole
            for at, of_parts in spans.items():
                view = view.narrow(at, 0, of_parts[k].length)
            view.index_copy_(dim, torch.tensor(selection.rows, device=view.device), part)
        return whole

    def _sample_dim(self, name: str, column: Sequence[Tensor]) -> int:
        """Return the batch dimension of an output that was traced at only one size: a dimension whose size in each
        microbatch is the microbatch's number of samples. If several dimensions fit, prefer one that is also the batch
        dimension of an input. If none fits, return 0. Raises UsageError if several dimensions fit and the microbatches
        have different numbers of samples."""
        rows = [batch.rows for batch in self._batches]
        fitting = [dim for dim in range(column[0].ndim) if [tensor.shape[dim] for tensor in column] == rows]
        if len(fitting) > 1 and len(set(rows)) > 1:
            raise _unmergeable(name, f"has {len(fitting)} dimensions that could be the batch dimension")
        of_batch = [dim for dim in self._batches[0].row_dims if dim in fitting]
        return next(iter([*of_batch, *fitting]), 0)

    def raise_failure(self, group: dist.ProcessGroup, is_doubtful: bool) -> bool:
        """Raise UsageError on every rank of `group` if a rank failed to collect the outputs. Returns whether
        `is_doubtful` is true on any rank, or False if `needed` is False. Call it on all ranks."""
        if not self.needed:
            return False
        failed, doubtful = gather(torch.tensor([self._failure is not None, is_doubtful]), group).any(0).tolist()
        if failed:
            reasons = gather_objects(None if self._failure is None else str(self._failure), group)
            raise self._failure or UsageError(next(filter(None, reasons)))
        return doubtful


def _spans(
    name: str, column: Sequence[Tensor], dim: int, flow: Dataflow, selections: Sequence[Selection]
) -> dict[int, list[LeafSpan]]:
    """Map each sequence dimension of an output to the LeafSpans of the microbatches. In the trace, a sequence dimension
    grows with the number of positions (if the trace has varied this number). In every microbatch, the size of a
    sequence dimension is the number of positions, possibly minus a constant (next-token losses have fewer entries).
    Raises UsageError for any other dimension that grows in the trace or differs between microbatches."""
    slopes = next((spec.slopes for path, _, spec in flow.outputs if path == name), ())
    groups = [[path for path, _ in group] for group in flow.axes.groups[1:]] if slopes else []
    known = {path for group in groups for path in group}
    found: dict[int, list[LeafSpan]] = {}
    for at in (at for at in range(column[0].ndim) if at != dim):
        grows = [path for group, slope in zip(groups, slopes[at][1:] if slopes else ()) if slope for path in group]
        sizes = [part.shape[at] for part in column]
        for path in grows or [path for path in selections[0].spans if path not in known]:
            of_path = [selection.spans[path] for selection in selections if path in selection.spans]
            fewer = of_path[0].length - sizes[0] if of_path else 0
            is_shifted = fewer > 0 and bool(grows) and sum(slopes[at]) == 1
            if (not fewer or is_shifted) and sizes == [span.length - fewer for span in of_path]:
                found.setdefault(at, [LeafSpan(s.length - fewer, s.total - fewer) for s in of_path])
        if at not in found and (grows or len(set(sizes)) > 1):
            raise _unmergeable(name, "has a dimension whose size depends on how much padding a microbatch has")
    return found


def _names(asked: Any) -> list[str]:
    names = list(asked) if isinstance(asked, Collection) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(
            "return_outputs must be True, False, 'loss', a field name, a list of field names, or a function fn(output, "
            f"microbatch), got {asked!r}"
        )
    return names


def _of_class(kind: type, content: dict[str, Any]) -> Any:
    """An output of class `kind` with only the fields in `content`. Other fields that a dataclass requires are None."""
    declared = fields_of(kind) if is_dataclass(kind) else ()
    required = [f.name for f in declared if f.init and f.default is MISSING and f.default_factory is MISSING]
    return kind(**(dict.fromkeys(required) | content))


def _detached(output: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach(), output)


def _is_loss(use: Reads, spec: TensorSpec, flow: Dataflow) -> bool:
    """Whether an output is the loss that the model returns."""
    return use == flow.loss and not spec.shape


def _refuse_unmergeable(path: str, spec: TensorSpec, is_computed: bool) -> None:
    growing = sum(bool(slopes and slopes[0]) for slopes in spec.slopes)
    if growing > 1:
        why = f"has {growing} dimensions that grow with the batch, so each microbatch compares only its own samples"
        raise _unmergeable(path, why)
    if is_computed and not growing and (not spec.shape or spec.slopes):  # without slopes: traced at one size only
        raise _unmergeable(path, "has no batch dimension, and each microbatch computes its own value")


def _unmergeable(path: str, why: str) -> UsageError:
    return UsageError(
        f"the model's output{path and ' '}{path} cannot be merged for the whole batch: it {why}. Request only other "
        "fields (return_outputs=[...]), pass a function fn(output, microbatch), or use one microbatch"
    )


def _same(name: str, column: Sequence[Any]) -> Any:
    """Return the value that is the same in all microbatches. Raises UsageError if the values differ."""
    first = column[0]
    equal = torch.equal if isinstance(first, Tensor) else eq
    if all(equal(first, other) for other in column[1:]):
        return first
    raise _unmergeable(name, "differs between microbatches")
