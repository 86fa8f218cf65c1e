"""Gradient snapshot: this rank's gradients at one time, from which later changes by the training loop are found."""

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeshard.distributed.collectives import local
from pipeshard.graph.storage import storage_of
from pipeshard.graph.writes import Noted, is_written, note

LARGEST = 2.0**20  # only smaller factors are compared
TENSORS, VALUES = 8, 64  # at most this many gradients, and values of each, are sampled to find a factor
NEAR = 1e-3  # the tolerated relative difference of factors
COARSE = 4e-3  # the tolerance for factors of gradients whose values are rounded by more than NEAR (bf16)


class Factors(NamedTuple):
    """The factors by which a training loop has multiplied gradients of this rank. A factor is None if the gradients
    were changed in another way, or do not exist.

    Attributes:
        own: the factor of all gradients that this rank's updates use.
        whole: the factor of all gradients on this rank. With ZeRO, updates use only some of them.
        has_others: whether the loop has changed gradients that this rank's updates do not use. Such a loop selects
            parameters of the model, not of the optimizer's groups.
    """

    own: float | None
    whole: float | None
    has_others: bool = False

    def times(self, other: "Factors") -> "Factors":
        """The factors of two successive changes."""
        own, whole = _product(self.own, other.own), _product(self.whole, other.whole)
        return Factors(own, whole, self.has_others or other.has_others)


UNCHANGED, UNKNOWN = Factors(1.0, 1.0), Factors(None, None)


class GradientSnapshot:
    """The gradients of parameters that this rank updates (`own`) and of `others`, at one time. With `samples`, the
    snapshot contains a sample of their values."""

    def __init__(self, own: Collection[Tensor], others: Collection[Tensor] = (), samples: bool = False) -> None:
        self._given = own, others, samples
        self._own, self._others = _Gradients(own, samples), _Gradients(others, samples)

    def again(self) -> "GradientSnapshot":
        """A snapshot of the current gradients of the same parameters."""
        return GradientSnapshot(*self._given)

    @property
    def is_changed(self) -> bool:
        """Whether gradients were replaced or modified in place since the snapshot."""
        return self._own.is_changed or self._others.is_changed

    @property
    def was_zero(self) -> bool:
        """Whether the sample exists and contains only zeros."""
        return self._own.was_zero

    @property
    def rounding(self) -> float:
        """The largest relative error of the sampled values."""
        return max(self._own.rounding, self._others.rounding)

    def factors(self) -> Factors:
        """The factors by which gradients have been multiplied since the snapshot."""
        own = self._own.factor()
        other = self._others.factor() if self._others else own
        is_one = own is not None and other is not None and math.isclose(own, other, rel_tol=max(NEAR, self.rounding))
        return Factors(own, own if is_one else None, bool(self._others) and other != 1.0)

    def has_kept(self, gradients: Iterable[Tensor]) -> bool:
        """Whether all of these gradients are in the snapshot, and have not been modified since."""
        return all(self._own.has_kept(gradient) or self._others.has_kept(gradient) for gradient in gradients)

    def ignore(self, gradients: Collection[Tensor]) -> None:
        """Disregard the changes of these gradients since the snapshot."""
        self._own.ignore(gradients)
        self._others.ignore(gradients)


class _Gradients:
    """The gradients of some parameters at one time and, with `samples`, a sample of their values."""

    def __init__(self, parameters: Iterable[Tensor], samples: bool) -> None:
        self._of = {p: (p.grad, _noted(p.grad)) for p in parameters if p.grad is not None}
        self._by_id = {id(tensor): p for p, (_, noted) in self._of.items() for tensor, _ in noted}
        self._ignored: dict[int, int] = {}  # by memory: the version up to which changes are disregarded
        dense = [p for p, (grad, _) in self._of.items() if not grad.is_sparse] if samples else []
        sampled = dense[:: -(-len(dense) // TENSORS)] if dense else []
        self._values = {parameter: _some(parameter).clone() for parameter in sampled}

    def __len__(self) -> int:
        return len(self._of)

    @property
    def is_changed(self) -> bool:
        return any(p.grad is not gradient or self._is_written(noted) for p, (gradient, noted) in self._of.items())

    @property
    def was_zero(self) -> bool:
        return bool(self._values) and not any(bool(values.any()) for values in self._values.values())

    @property
    def rounding(self) -> float:
        return max((torch.finfo(values.dtype).eps for values in self._values.values()), default=0.0)

    def factor(self) -> float | None:
        if not self.is_changed:
            return 1.0
        present = [parameter.grad is not None for parameter in self._of]
        if not self._values or not all(present):
            return None
        before = torch.cat([values.double().cpu() for values in self._values.values()])
        after = torch.cat([_some(parameter).double().cpu() for parameter in self._values])
        return _factor(before, after, self.rounding)

    def has_kept(self, gradient: Tensor) -> bool:
        parameter = self._by_id.get(id(gradient))
        return parameter is not None and not self._is_written(self._of[parameter][1])

    def ignore(self, gradients: Iterable[Tensor]) -> None:
        for parameter in [self._by_id[id(each)] for each in gradients if id(each) in self._by_id]:
            for tensor, _ in self._of[parameter][1]:
                self._ignored[_memory(tensor)] = tensor._version
            if parameter in self._values and parameter.grad is not None:
                self._values[parameter] = _some(parameter).clone()

    def _is_written(self, noted: Iterable[tuple[Tensor, Noted]]) -> bool:
        return any(is_written(tensor, since) and self._counts(tensor, since) for tensor, since in noted)

    def _counts(self, tensor: Tensor, since: Noted) -> bool:
        """Whether a tensor was written to after the changes that are disregarded. Gradients in one buffer share one
        version."""
        version = self._ignored.get(_memory(tensor)) if self._ignored else None
        return version is None or is_written(tensor, since._replace(version=version))


def _noted(gradient: Tensor) -> list[tuple[Tensor, Noted]]:
    """Note the state of a gradient. A loop may also write to the local tensor of a DTensor, since this local tensor is
    the gradient of the corresponding tensor in the optimizer's groups."""
    own = local(gradient)
    return [(tensor, note(tensor)) for tensor in ([gradient] if own is gradient else [gradient, own])]


def _memory(tensor: Tensor) -> int:
    """A key that is the same for all gradients in one buffer."""
    return -id(tensor) if isinstance(tensor, DTensor) else storage_of(tensor)


def _some(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    flat = local(parameter.grad).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // VALUES)][:VALUES]


def _factor(before: Tensor, after: Tensor, rounding: float) -> float | None:
    """Return the positive factor, below LARGEST, by which `before` must be multiplied to get `after`, or None if no
    such factor exists. The values have a relative error of up to `rounding`. If there are too few values to average out
    this error, return None."""
    ratios = (after / before)[before != 0]
    factor = float(ratios.mean())
    if not 0.0 < factor < LARGEST or rounding / math.sqrt(len(ratios)) > COARSE / 4:
        return None
    expected = before * factor
    fits = ((after - expected).abs() <= max(NEAR, rounding) * expected.abs()).all()
    return factor if bool(fits) else None


def _product(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one * other
