"""Outputs: what a step gives of the model's outputs, collected over its microbatches."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from pipeshard.batch.batch import Batch
from pipeshard.batch.tree import field_of, flatten_with_names
from pipeshard.errors import UsageError
from pipeshard.graph.dataflow import Dataflow, Wanted

ReturnOutputs = bool | str | Collection[str] | Callable[[Any, Any], Any]
LOSSES = "loss"
NOTHING, EVERYTHING, FUNCTION, EACH_LOSS, FIELDS = range(5)  # kinds of what can be asked for; fields add a digest
BACKWARD = (
    "the backward pass of a pipeline is part of booster.execute_pipeline(data_iter, model, criterion, optimizer), "
    "which leaves the gradients in place: drop booster.backward(...) and loss.backward()"
)


class StepLoss(Tensor):
    """The loss of a step: a tensor without a graph, which says so where somebody calls `backward`. What is computed of
    it, copied or saved is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def _plain(self) -> Tensor:
        return self.as_subclass(Tensor)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError(BACKWARD)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self._plain.clone()

    def __format__(self, spec: str) -> str:
        return format(self._plain, spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._plain)


class Outputs:
    """What one step was asked for by `return_outputs`, and what its microbatches have given of it so far.

    `needed` is what of the model's output, beside the loss, has to be there on the last stage; `code` a number by
    which ranks tell whether they were asked for the same. Raises UsageError for what cannot be asked for.
    """

    def __init__(self, asked: ReturnOutputs) -> None:
        self.kept: list[Any] = []
        self.batches: list[Batch] = []
        self.failure: Exception | None = None
        self.of_loss: set[int] = set()  # the leaves of the output that are the loss itself
        self.function: Callable[[Any, Any], Any] | None = None
        self.needed: Wanted = False
        if isinstance(asked, bool):
            self.needed, self.code = asked, EVERYTHING if asked else NOTHING
        elif callable(asked):
            self.function, self.needed, self.code = asked, True, FUNCTION
        elif asked == LOSSES:
            self.code = EACH_LOSS
        else:
            self.needed = fields = frozenset([asked] if isinstance(asked, str) else _names(asked))
            digest = hashlib.blake2b("\0".join(sorted(fields)).encode(), digest_size=6).digest()
            self.code = FIELDS + int.from_bytes(digest, "little")

    @property
    def with_loss(self) -> bool:
        """Whether the batch's loss is among them."""
        return self.code == EVERYTHING or (isinstance(self.needed, frozenset) and "loss" in self.needed)

    def check(self, flow: Dataflow, is_cut: bool) -> None:
        """Raise UsageError, on every rank alike, where the model's output has not what was asked for, or where that of
        a batch which `is_cut` cannot be put together of the microbatches'."""
        if self.code == EACH_LOSS and flow.loss is None:
            raise UsageError("return_outputs='loss', but there is none: give the batch labels, or pass a criterion")
        if is_cut and (self.code == EVERYTHING or self.code >= FIELDS):
            self._refuse_unmergeable(flow)
        if isinstance(self.needed, bool):
            return
        fields = dict.fromkeys(filter(None, (field_of(path) for path, _, _ in flow.outputs)))
        unknown = sorted(self.needed - fields.keys())
        if unknown:
            known = f"its fields are {', '.join(fields)}" if fields else "it has no fields with names"
            raise UsageError(
                f"return_outputs asks for {', '.join(map(repr, unknown))}, which is not in the model's output for this "
                f"batch: {known}. Use some of these, True, 'loss', or a function of the output and the microbatch"
            )

    def _refuse_unmergeable(self, flow: Dataflow) -> None:
        for path, use, spec in flow.outputs:
            growing = sum(bool(slopes and slopes[0]) for slopes in spec.slopes)
            is_loss = not spec.shape and use == flow.loss
            if (isinstance(self.needed, frozenset) and field_of(path) not in self.needed) or is_loss:
                continue
            if growing > 1:
                why = f"has {growing} dimensions that count the samples, so it compares those of one microbatch alone"
            elif use.values and (not spec.shape or (spec.slopes and not growing)):  # else traced for one size alone
                why = "has no dimension that counts the samples, so each microbatch has one of its own"
            else:
                continue
            raise UsageError(_unmergeable(path, why))

    def keep(self, output: Any, loss: Tensor | None, batch: Batch) -> None:
        """Take what was asked for of the output and the loss of one microbatch, detached."""
        self.batches.append(batch)
        if self.function is not None:
            self._call(self.function, output, batch)
        elif self.code == EACH_LOSS:
            assert loss is not None
            self.kept.append(loss.detach())
        elif self.needed:
            wanted = output if self.needed is True else _select(output, self.needed)
            self.of_loss = {k for k, leaf in enumerate(tree_flatten(wanted)[0]) if leaf is loss}
            self.kept.append(_detached(wanted))

    def merged(self, flow: Dataflow, loss: Tensor | None) -> Any:
        """What the step returns, of all microbatches; `loss` is the batch's."""
        if self.code == EACH_LOSS:
            return torch.stack(self.kept)
        if self.code in (NOTHING, FUNCTION):
            return self.kept if self.function else None
        try:
            return _merge(self.kept, flow, loss, self.batches, self.of_loss)
        except UsageError as error:
            self.failure = error

    @property
    def may_fail(self) -> bool:
        """Whether something may turn out at the end of the step, on the last stage alone."""
        return self.function is not None or bool(self.needed)

    @property
    def failed(self) -> Tensor:
        """One more than the number of the microbatch on whose output the function has failed here, or 0; int64."""
        return torch.tensor(0 if self.failure is None else 1 + len(self.kept))

    def raise_failure(self, failed: int) -> None:
        """Raise UsageError for the microbatch that the last stage has `failed` on; on every rank."""
        why = "its error is that of the last stage"
        if self.function is None:
            raise self.failure or UsageError(f"outputs of the microbatches cannot be put together: {why}")
        if self.failure is not None:
            why = f"{type(self.failure).__name__}: {self.failure}"
        raise UsageError(
            f"the function given as return_outputs failed on the output of microbatch {failed} ({why}). The step "
            "itself is done: its gradients are in place"
        ) from self.failure

    def _call(self, function: Callable[[Any, Any], Any], output: Any, batch: Batch) -> None:
        """A failure is kept for the end of the step: amid it, the other stages would wait for this one."""
        if self.failure is not None:
            return
        try:
            with torch.no_grad():
                self.kept.append(function(_detached(output), batch.for_criterion()))
        except Exception as error:
            self.failure = error


def describe(code: int) -> str:
    """What was asked for, as far as a code tells."""
    names = {NOTHING: "False", EVERYTHING: "True", FUNCTION: "a function", EACH_LOSS: "'loss'"}
    return names.get(code, f"fields with digest {code - FIELDS:012x}")


def _names(asked: Any) -> list[str]:
    names = list(asked) if isinstance(asked, Collection) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"return_outputs={asked!r} is none of True, False, a field's name, a list of such names, 'loss', and a "
            "function of a microbatch's output and the microbatch"
        )
    return names


def _detached(output: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach(), output)


def _select(output: Any, fields: Collection[str]) -> Any:
    """An output of the same class with these fields only."""
    return type(output)(**{name: content for name, content in output.items() if name in fields})


def _unmergeable(path: str, why: str) -> str:
    return (
        f"the model's output {path} cannot be put together for the whole batch: it {why}. Name the fields that you "
        "need, without this one (return_outputs=[...]), pass a function fn(output, microbatch), or use one microbatch"
    )


def _merge(
    outputs: Sequence[Any], flow: Dataflow, loss: Tensor | None, batches: Sequence[Batch], of_loss: Collection[int]
) -> Any:
    """One output, of the class the model returns, for the whole batch: microbatches are put together along the
    dimension that grows with the number of samples, the loss is the batch's."""
    specs = {path: spec for path, _, spec in flow.outputs}
    named, tree = flatten_with_names(outputs[0])
    columns = zip(*(tree_flatten(output)[0] for output in outputs), strict=True)
    merged = []
    for k, ((name, first), column) in enumerate(zip(named, columns, strict=True)):
        spec = specs.get(name)
        dim = next((d for d, slopes in enumerate(spec.slopes) if slopes and slopes[0]), None) if spec else None
        if k in of_loss and loss is not None:
            merged.append(loss)
        elif len(column) == 1 or not _is_data(first):
            merged.append(first)
        elif not isinstance(first, Tensor) or first.ndim == 0 or (dim is None and spec is not None and spec.slopes):
            merged.append(_same(name, column))
        else:
            merged.append(torch.cat(column, dim=_counting(name, column, batches) if dim is None else dim))
    return tree_unflatten(merged, tree)


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or type(leaf) in (int, float, bool, str)


def _same(name: str, column: Sequence[Any]) -> Any:
    """What all microbatches have; raises UsageError where they differ."""
    first = column[0]
    for other in column[1:]:
        if not (torch.equal(first, other) if isinstance(first, Tensor) else first == other):
            why = "differs between microbatches, and has no dimension that counts the samples"
            raise UsageError(_unmergeable(name, why))
    return first


def _counting(name: str, column: Sequence[Tensor], batches: Sequence[Batch]) -> int:
    """The dimension that counts the samples in what was traced at one size alone: one that does in the batch, too."""
    rows = [batch.rows for batch in batches]
    of_batch = [dim for dim in batches[0].row_dims if dim is not None and dim < column[0].ndim]
    dims = dict.fromkeys([*of_batch, *range(column[0].ndim)])
    fitting = [dim for dim in dims if [tensor.shape[dim] for tensor in column] == rows]
    if len(fitting) > 1 and len(set(rows)) > 1:
        raise UsageError(_unmergeable(name, f"has {len(fitting)} dimensions that count the samples of one microbatch"))
    return fitting[0] if fitting else 0
