"""Compare: what differs between the split model and the unsplit one, and the Proof that comes of it."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.batch.tree import flatten_with_names

EXACT, DIFFERENT, UNPROVEN = "exact", "different", "unproven"


@dataclass(frozen=True)
class Proof:
    """ "exact", "different" or "unproven", the last two with the reason; what was compared how often, `but` what was
    not, and how long it took. `refused` is whether the reason is an error that training raises, too."""

    kind: str
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    but: tuple[str, ...] = ()
    seconds: float = 0.0
    refused: bool = False


class Proven(BaseException):
    """Leaves the program at booster.boost, with the proof; `what` was proven, or not."""

    def __init__(self, proof: Proof, what: str) -> None:
        super().__init__(f"{what}: {proof.kind}")
        self.proof, self.what = proof, what


@dataclass
class Alone:
    """`pp_size` is the number of stages, in place of that which the plugin is given."""

    pp_size: int | None = None


_now: Alone | None = None


def standing_alone() -> Alone | None:
    """Whether this process stands for all ranks, and how many."""
    return _now


@contextlib.contextmanager
def alone(pp_size: int | None = None) -> Iterator[None]:
    """Inside, a plugin in a world of one process has all stages, and booster.boost raises Proven."""
    global _now
    before, _now = _now, Alone(pp_size)
    try:
        yield
    finally:
        _now = before


LOSS, GRADIENT = 1e-5, 1e-4  # relative errors that rounding may make
FINE = 1e-9  # in fp64
FLOOR = 1e-3  # of the largest gradient: what is smaller than that is compared with it
DEPTH = 3  # of the lists and dicts that an attribute may be


class Different(Exception):
    """The split model is not the unsplit one; says what differs, and in which part of a step, if that is known."""

    def __init__(self, what: str, part: str = "") -> None:
        super().__init__(what)
        self.part = part


@dataclass
class Comparison:
    """Counts what was compared, and raises Different for what is not alike.

    `fine` compares as fp64 allows.
    """

    fine: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    def loss(self, split: Tensor, unsplit: Tensor, what: str) -> None:
        if not self._close(split, unsplit, LOSS, 1e-3):
            raise Different(f"{what} is {float(split):.7g}, unsplit {float(unsplit):.7g}", "forward")
        self.count("losses")

    def gradients(self, split: Mapping[str, Tensor | None], unsplit: Mapping[str, Tensor | None], what: str) -> None:
        """In the order given, which is that of the backward pass."""
        largest = max((_size(gradient) for gradient in unsplit.values() if gradient is not None), default=0.0)
        for name, expected in unsplit.items():
            gradient = split[name]
            if (gradient is None) != (expected is None):
                raise Different(f"{name} {what} gets {_a(gradient)}, unsplit {_a(expected)}", "backward")
            if gradient is not None and expected is not None:
                if not self._close(gradient, expected, GRADIENT, FLOOR * largest):
                    gap = _gap(gradient, expected)
                    raise Different(f"the gradient of {name} {what} is another: {gap}", "backward")
                self.count("gradients")

    def tensors(self, split: Mapping[str, Any], unsplit: Mapping[str, Any], kind: str, what: str) -> None:
        """Parameters, buffers and what is saved, by name."""
        if split.keys() != unsplit.keys():
            names = split.keys() ^ unsplit.keys()
            raise Different(f"{min(names)} is {'not ' if min(names) in unsplit else ''}among the {kind} {what}")
        for name, expected in unsplit.items():
            if not self.same(split[name], expected):
                raise Different(f"{name} {what} is another: {_gap(split[name], expected)}")
            self.count(kind)

    def values(self, split: Any, unsplit: Any, kind: str, what: str) -> None:
        """Numbers and tensors in nested values; what is poison (nan) in the split is a difference."""
        theirs, mine = dict(_leaves(unsplit)), dict(_leaves(split))
        for name, expected in theirs.items():
            if name in mine and not _poison(mine[name]) and not self.same(mine[name], expected):
                raise Different(f"{what}{name} is {_text(mine[name], expected)}")
            self.count(kind)

    def same(self, split: Any, unsplit: Any) -> bool:
        if isinstance(unsplit, Tensor) and isinstance(split, Tensor):
            return self._close(split, unsplit, GRADIENT, 1e-6)
        if isinstance(unsplit, int) and isinstance(split, int):
            return split == unsplit
        if isinstance(unsplit, Number) and isinstance(split, Number):
            return self._close(torch.tensor(split), torch.tensor(unsplit), GRADIENT, 1e-6)
        return True

    def _close(self, split: Tensor, unsplit: Tensor, relative: float, floor: float) -> bool:
        """As far as the dtype can tell."""
        if split.shape != unsplit.shape:
            return False
        if split.dtype is unsplit.dtype and split.device == unsplit.device and _equal(split, unsplit):
            return True
        if split.layout is not torch.strided or unsplit.layout is not torch.strided:
            split, unsplit = split.to_dense(), unsplit.to_dense()
        if not (unsplit.is_floating_point() or unsplit.is_complex()) or not unsplit.numel():
            return torch.equal(split, unsplit.to(split.dtype))
        relative = FINE if self.fine else max(relative, 8 * torch.finfo(unsplit.dtype).eps)
        gap = (split.detach() - unsplit.detach().to(split.device)).abs()
        gap = gap.masked_fill(split.isnan() & unsplit.isnan() | (split == unsplit), 0)  # infinities are alike, too
        return bool(gap.max() <= relative * max(_size(unsplit), floor))

    def count(self, kind: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1


def attributes(module: nn.Module) -> dict[str, Any]:
    """What forwards may have left on a module, beside parameters and buffers."""
    own = nn.Module().__dict__.keys()
    return {name: value for name, value in vars(module).items() if name not in own and name != "forward"}


def _leaves(value: Any, name: str = "", depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | bool | int | float):
        yield name, value
    elif depth and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}[{key!r}]", depth - 1)
    elif depth and isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            yield from _leaves(inner, f"{name}[{key}]", depth - 1)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Of a model's output."""
    return dict(flatten_with_names(tree)[0])


def _equal(split: Tensor, unsplit: Tensor) -> bool:
    """To the bit, as they mostly are: that is looked at first, since it is quick."""
    return split.layout is unsplit.layout is torch.strided and torch.equal(split, unsplit)


def _a(gradient: Tensor | None) -> str:
    return "no gradient" if gradient is None else f"a gradient of up to {_size(gradient):.2g}"


def _poison(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().all())


def _size(tensor: Tensor) -> float:
    finite = tensor.detach().nan_to_num(0.0, 0.0, 0.0).abs() if tensor.layout is torch.strided else tensor.to_dense()
    return float(finite.max()) if tensor.numel() else 0.0


def _gap(split: Any, unsplit: Any) -> str:
    if not (isinstance(split, Tensor) and isinstance(unsplit, Tensor)):
        return f"{split!r:.40}, unsplit {unsplit!r:.40}"
    if split.shape != unsplit.shape:
        return f"shape {tuple(split.shape)}, unsplit {tuple(unsplit.shape)}"
    gap = (split.detach().double() - unsplit.detach().double()).abs().max()
    return f"it differs by {float(gap):.2g} where the largest number is {_size(unsplit):.2g}"


def _text(split: Any, unsplit: Any) -> str:
    if isinstance(unsplit, Tensor) and unsplit.numel() != 1:
        return f"another: {_gap(split, unsplit)}"
    return f"{float(split):.7g}, unsplit {float(unsplit):.7g}"
