"""Outputs: what a step gives of the model's outputs, collected over its microbatches."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from pipeshard.errors import UsageError
from pipeshard.model.batch import Batch
from pipeshard.model.dataflow import Dataflow, Wanted
from pipeshard.model.names import field_of, flatten_with_names

ReturnOutputs = bool | str | Collection[str] | Callable[[Any, Any], Any]
LOSSES = "loss"
NOTHING, EVERYTHING, FUNCTION, EACH_LOSS, FIELDS = range(5)  # kinds of what can be asked for; fields add a digest


class Outputs:
    """What one step was asked for by `return_outputs`, and what its microbatches have given of it so far.

    `needed` is what of the model's output, beside the loss, has to be there on the last stage; `code` a number by
    which ranks tell whether they were asked for the same. Raises UsageError for what cannot be asked for.
    """

    def __init__(self, asked: ReturnOutputs) -> None:
        self.kept: list[Any] = []
        self.batches: list[Batch] = []
        self.failure: Exception | None = None
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

    def check(self, flow: Dataflow) -> None:
        """Raise UsageError, on every rank alike, where the model's output has not what was asked for."""
        if self.code == EACH_LOSS and flow.loss is None:
            raise UsageError("return_outputs='loss', but there is none: give the batch labels, or pass a criterion")
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

    def keep(self, output: Any, loss: Tensor | None, batch: Batch) -> None:
        """Take what was asked for of the output and the loss of one microbatch, detached."""
        self.batches.append(batch)
        if self.function is not None:
            self._call(self.function, output, batch)
        elif self.code == EACH_LOSS:
            assert loss is not None
            self.kept.append(loss.detach())
        elif self.needed:
            self.kept.append(_detached(output if self.needed is True else _select(output, self.needed)))

    def merged(self, flow: Dataflow, loss: Tensor | None) -> Any:
        """What the step returns, of all microbatches; `loss` is the batch's."""
        if self.code == EACH_LOSS:
            return torch.stack(self.kept)
        if self.code in (NOTHING, FUNCTION):
            return self.kept if self.function else None
        return _merge(self.kept, flow, loss, self.batches)

    @property
    def failed(self) -> Tensor:
        """One more than the number of the microbatch on whose output the function has failed here, or 0; int64."""
        return torch.tensor(0 if self.failure is None else 1 + len(self.kept))

    def raise_failure(self, failed: int) -> None:
        """Raise UsageError for the microbatch that the last stage has `failed` on; on every rank."""
        why = "its error is that of the last stage"
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


def _merge(outputs: Sequence[Any], flow: Dataflow, loss: Tensor | None, batches: Sequence[Batch]) -> Any:
    """One output, of the class the model returns, for the whole batch: microbatches are put together along the
    dimension that grows with the number of samples, the loss is the batch's."""
    specs = {path: spec for path, _, spec in flow.outputs}
    named, tree = flatten_with_names(outputs[0])
    columns = zip(*(tree_flatten(output)[0] for output in outputs), strict=True)
    merged = []
    for (name, first), column in zip(named, columns, strict=True):
        spec = specs.get(name)
        dim = next((d for d, slopes in enumerate(spec.slopes) if slopes and slopes[0]), None) if spec else None
        if name == "['loss']" and loss is not None:
            merged.append(loss)
        elif not isinstance(first, Tensor) or len(column) == 1 or first.ndim == 0:
            merged.append(first)
        else:
            merged.append(torch.cat(column, dim=_counting(column, batches) if dim is None else dim))
    return tree_unflatten(merged, tree)


def _counting(column: Sequence[Tensor], batches: Sequence[Batch]) -> int:
    """The dimension that counts the samples in what was traced at one size alone: one that does in the batch, too."""
    rows = [batch.rows for batch in batches]
    of_batch = [dim for dim in batches[0].row_dims if dim is not None and dim < column[0].ndim]
    dims = [*dict.fromkeys(of_batch), *range(column[0].ndim)]
    return next((dim for dim in dims if [tensor.shape[dim] for tensor in column] == rows), 0)
