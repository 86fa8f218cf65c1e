"""Questions: glue's Python decisions that depend on a batch's values (`if mask.all():`). These decisions are evaluated
again for every other batch.

If the answer differs, the model may take a different path, and another Dataflow is needed. At a branch that depends on
values, torch.export fails or specializes to one path. Here, Recipes records the operators that compute the answer from
the batch. Integers among the operators' arguments may depend on the sizes of the batch (`mask.sum() == mask.numel()`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pipeshard.batch.batch import Batch
from pipeshard.graph.shapes import Count, is_count
from pipeshard.private import TreeSpec, tree_flatten, tree_unflatten

FEW = 4  # sizes of a traced batch that are larger than this are lengths
NO_VERSION = -1  # of a tensor made in inference mode: torch does not count writes to such a tensor


@dataclass(frozen=True)
class _Slot:
    """A reference to a leaf of the batch (by the leaf's path), or to the result of an earlier operator (by the
    operator's number)."""

    of: str | int


class _Result(NamedTuple):
    """The call of an operator with which glue computed a tensor. The record is valid until something writes to the
    tensor."""

    version: int
    func: Any
    args: Any
    kwargs: Any


class Operator(NamedTuple):
    """One operator of a Question, with its (args, kwargs) flattened into `leaves` and `tree`."""

    func: Any
    leaves: tuple[Any, ...]
    tree: TreeSpec

    def is_as(self, other: "Operator") -> bool:
        """Whether the two operators are equal, apart from integers among their arguments."""
        same = self.func is other.func and self.tree == other.tree and len(self.leaves) == len(other.leaves)
        return same and all(map(_are_alike, self.leaves, other.leaves))


def _are_alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):  # constants; their shapes may depend on the batch
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return (is_count(a) and is_count(b)) or (type(a) is type(b) and a == b)


@dataclass(frozen=True)
class Question:
    """A decision of glue that depends on the batch's leaves `paths`. `steps` are the operators that compute the
    decision, and `answer` is the result of the last operator. `steps` is None if the question cannot be evaluated for
    other batches. The answer is then valid only for the traced values. A Question that computes a criterion's count
    (`is_count`) decides nothing, so it has no `answer` and holds for every batch."""

    steps: tuple[Operator, ...] | None
    answer: Any
    device: torch.device
    paths: frozenset[str]
    is_count: bool = False

    def holds(self, tensors: Mapping[str, Tensor], deltas: Sequence[int]) -> bool:
        """Whether the answer is the same for a batch with these leaves and with sizes that differ from the traced sizes
        by `deltas`."""
        return self.is_count or self.ask(tensors, deltas) == (True, self.answer)

    def ask(self, tensors: Mapping[str, Tensor], deltas: Sequence[int] = ()) -> tuple[bool, Any]:
        """Return (True, answer) for these leaves of a batch, or (False, None) if the question cannot be evaluated for
        these leaves."""
        if self.steps is None:
            return False, None
        results: list[Any] = []

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, Count):
                return leaf.at(deltas)
            if not isinstance(leaf, _Slot):
                return leaf
            return tensors[leaf.of].to(self.device) if isinstance(leaf.of, str) else results[leaf.of]

        try:
            with torch.no_grad():
                for func, leaves, tree in self.steps:
                    args, kwargs = tree_unflatten([filled(leaf) for leaf in leaves], tree)
                    results.append(func(*args, **kwargs))
        except (RuntimeError, IndexError, KeyError, TypeError, ValueError):  # the shapes do not match
            return False, None
        return True, results[-1]

    def is_as(self, other: "Question") -> bool:
        """Whether the other question has the same answer and the same operators, apart from integers among the
        operators' arguments."""
        if self.steps is None or other.steps is None or len(self.steps) != len(other.steps):
            return False
        return self.answer == other.answer and all(a.is_as(b) for a, b in zip(self.steps, other.steps, strict=True))

    @property
    def numbers(self) -> Iterator[Any]:
        """The integers among the arguments of the operators, in order."""
        return (leaf for step in self.steps or () for leaf in step.leaves if is_count(leaf))

    def with_numbers(self, numbers: Iterator[Any]) -> "Question":
        """The same question with its integers replaced by the next items of the iterator, in the order of
        `self.numbers`."""
        steps = [
            Operator(func, tuple(next(numbers) if is_count(leaf) else leaf for leaf in leaves), tree)
            for func, leaves, tree in self.steps or ()
        ]
        return replace(self, steps=None if self.steps is None else tuple(steps))


class Recipes:
    """Records, for each tensor that glue computed from the batch alone, the operators that computed the tensor."""

    def __init__(self, device: torch.device, batch: Batch | None = None, real: Batch | None = None) -> None:
        """If the traced `batch` is shortened, pass the original batch as `real`: the questions are then evaluated on
        the values of `real`."""
        self.device, self.real = device, real
        self.questions: list[Question] = []
        self.is_unasked = False  # whether glue has read a number of unknown origin
        self._sizes = {} if batch is None or real is None else _products(batch, real)
        self._tensors = [] if batch is None else [(path, tensor, tensor._version) for path, tensor in batch.all_tensors]
        leaves = {} if batch is None else batch.tensors
        self._leaves = {id(leaf): (leaf._version, path) for path, leaf in leaves.items()}
        self._results = WeakTensorKeyDictionary()  # a tensor that glue drops is freed: no question needs it
        self._made = WeakTensorKeyDictionary()  # the versions of tensors made from Python values alone

    @property
    def rewritten(self) -> frozenset[str]:
        """The paths of the batch's leaves that have been written to. A list counts if any of its tensors has been."""
        return frozenset(path for path, tensor, version in self._tensors if tensor._version != version)

    def note(self, func: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        version = NO_VERSION if output.is_inference() else output._version
        self._results[output] = _Result(version, func, args, kwargs)

    def note_made(self, inputs: Sequence[Tensor], output: Tensor) -> None:
        """Record a tensor that glue computed without random numbers, if all `inputs` were made from Python values."""
        if all(map(self._is_made, inputs)) and not output.is_inference():
            self._made[output] = output._version

    def note_read(self, tensors: Sequence[Tensor]) -> None:
        """Record that glue has read, without a question, a number that was computed from these tensors."""
        self.is_unasked |= not all(map(self._is_made, tensors))

    def _is_made(self, tensor: Tensor) -> bool:
        return tensor in self._made and bool(self._made[tensor] == tensor._version)

    def ask(self, func: Any, args: Any, kwargs: Any, answer: Any, paths: frozenset[str]) -> Question:
        """Record and return the question whose last operator is `func`. If possible, a bool answer is recomputed for
        the real batch."""
        steps: list[Operator] = []
        is_known = self._follow(func, args, kwargs, steps, {})
        question = Question(tuple(steps) if is_known else None, answer, self.device, paths)
        if self.real is not None and is_known and isinstance(answer, bool):
            # Only a comparison of all runs shows which integers are sizes. Here, an integer that equals a size is
            # treated as that size.
            guess = question.with_numbers(self._sizes.get(number, number) for number in question.numbers)
            answers = [asked.ask(self.real.tensors) for asked in (guess, question)]
            question = replace(question, answer=next((value for can, value in answers if can), answer))
        self.questions.append(question)
        return question

    def ask_count(self, count: Any, is_own: Callable[[Tensor], bool]) -> None:
        """Record the Question that computes a criterion's count, if this count was computed only from the batch, Python
        values and the criterion's own tensors (`is_own`). The values of other tensors, and numbers that were read from
        these tensors, may change from step to step."""
        of_count = self._results.get(count) if isinstance(count, Tensor) else None
        if of_count is None or self.is_unasked or not _has_version(count, of_count.version):
            return
        steps: list[Operator] = []
        is_known = self._follow(of_count.func, of_count.args, of_count.kwargs, steps, {})
        constants = (leaf for step in steps for leaf in step.leaves if isinstance(leaf, Tensor))
        if is_known and all(self._is_made(constant) or is_own(constant) for constant in constants):
            self.questions.append(Question(tuple(steps), None, self.device, frozenset(), is_count=True))

    def _follow(self, func: Any, args: Any, kwargs: Any, steps: list[Operator], known: dict[int, int]) -> bool:
        """Append to `steps` the operators that compute the inputs of a call of `func`, and the call itself. Returns
        False if an operator cannot be repeated because one of its inputs has since been written to, or was computed in
        inference mode."""
        is_good = True

        def slot(leaf: Any) -> Any:
            nonlocal is_good
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in known:
                return _Slot(known[id(leaf)])
            if of_batch := self._leaves.get(id(leaf)):
                version, path = of_batch
                is_good &= leaf._version == version
                return _Slot(path)
            result = self._results.get(leaf)
            if result is None:
                return leaf  # a constant
            is_good &= _has_version(leaf, result.version) and self._follow(
                result.func, result.args, result.kwargs, steps, known
            )
            known[id(leaf)] = len(steps) - 1
            return _Slot(known[id(leaf)])

        leaves, tree = tree_flatten((args, kwargs))
        steps.append(Operator(func, tuple(map(slot, leaves)), tree))
        return is_good


def _has_version(tensor: Tensor, version: int) -> bool:
    """Whether nothing has written to the tensor since the tensor had this version. Returns False if the version is
    unknown."""
    return version != NO_VERSION and tensor._version == version


def _products(batch: Batch, real: Batch) -> dict[int, int]:
    """Map numbers of `batch` to the corresponding numbers of `real`: sizes (except 1), products of two such sizes, and
    the neighbors of lengths (slices such as x[:-1] end at such a neighbor)."""
    sizes = {size: of for path, leaf in batch.tensors.items() for size, of in zip(leaf.shape, real.tensors[path].shape)}
    sizes = {size: of for size, of in sizes.items() if size > 1}
    beside = {size + k: of + k for size, of in sizes.items() if size > FEW for k in (-1, 1)}
    return beside | {a * b: sizes[a] * sizes[b] for a, b in combinations(sizes, 2)} | sizes
