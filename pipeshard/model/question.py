"""Questions: what glue asks of the values of a batch in Python (`if mask.all():`), asked again of every other batch.

Where the answer is another one, the model may go another way, for which another Dataflow is needed. A question is kept
as the operators that made it from the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class _Slot:
    """A leaf of the batch, by path, or the result of an earlier operator."""

    of: str | int


class _Made(NamedTuple):
    tensor: Tensor
    version: int
    func: Any
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class Question:
    """Operators on the leaves with these `paths`, the last of which gives the `answer` for the batch that was traced;
    None if no other batch can be asked, so that the answer is good for these very values."""

    steps: tuple[tuple[Any, Any, Any], ...] | None
    answer: Any
    device: torch.device
    paths: frozenset[str]

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a batch gives the same answer."""
        return self.ask(tensors) == (True, self.answer)

    def ask(self, tensors: Mapping[str, Tensor]) -> tuple[bool, Any]:
        """Whether these leaves of a batch can be asked, and what they answer."""
        if self.steps is None:
            return False, None
        results: list[Any] = []

        def filled(slot: _Slot) -> Any:
            return tensors[slot.of].to(self.device) if isinstance(slot.of, str) else results[slot.of]

        try:
            with torch.no_grad():
                for func, args, kwargs in self.steps:
                    results.append(func(*tree_map_only(_Slot, filled, args), **tree_map_only(_Slot, filled, kwargs)))
        except (RuntimeError, IndexError, KeyError, TypeError, ValueError):  # of another shape than it was made for
            return False, None
        return True, results[-1]


class Recipes:
    """How tensors were made of the batch, as far as operators of glue made them of nothing else."""

    def __init__(self, device: torch.device, real: Mapping[str, Tensor] | None = None) -> None:
        """`real` are the leaves to be asked, if another batch than theirs is run."""
        self.device, self.real = device, real
        self.questions: list[Question] = []
        self._leaves: dict[int, tuple[Tensor, int, str]] = {}
        self._made: dict[int, _Made] = {}

    def leaf(self, tensor: Tensor, path: str) -> None:
        self._leaves[id(tensor)] = tensor, tensor._version, path

    def note(self, func: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        self._made[id(output)] = _Made(output, output._version, func, args, kwargs)

    def ask(self, func: Any, args: Any, kwargs: Any, answer: Any, paths: frozenset[str]) -> Any:
        """Keep the question that `func` asks; returns its answer, of yes or no that of the real batch."""
        steps: list[tuple[Any, Any, Any]] = []
        is_known = self._follow(func, args, kwargs, steps, {})
        question = Question(tuple(steps) if is_known else None, answer, self.device, paths)
        if self.real is not None and is_known and isinstance(answer, bool):
            can_be_asked, real = question.ask(self.real)
            if can_be_asked:
                question = replace(question, answer=real)
        self.questions.append(question)
        return question.answer

    def _follow(self, func: Any, args: Any, kwargs: Any, steps: list[Any], known: dict[int, int]) -> bool:
        """Append the steps that lead to a call of `func`; False where one cannot be made again."""
        is_good = True

        def slot(tensor: Tensor) -> Any:
            nonlocal is_good
            if id(tensor) in known:
                return _Slot(known[id(tensor)])
            if found := self._leaves.get(id(tensor)):
                is_good &= tensor._version == found[1]
                return _Slot(found[2])
            made = self._made.get(id(tensor))
            if made is None:
                return tensor  # a constant
            is_good &= tensor._version == made.version and self._follow(*made[2:], steps, known)
            known[id(tensor)] = len(steps) - 1
            return _Slot(known[id(tensor)])

        step = func, tree_map_only(Tensor, slot, args), tree_map_only(Tensor, slot, kwargs)
        steps.append(step)
        return is_good
