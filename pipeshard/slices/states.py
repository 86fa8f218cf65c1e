"""States: the cache that the slices of one microbatch share on one rank, and the gradients that flow back through it.

    slice 0          slice 1              slice 2
    append k0 ----.  append k1 ------.    append k2 ---.
    reads  k0     '->reads  k0 k1    '--> reads k0 k1 k2       forward passes, from the first slice to the last
           ^                ^  ^                  ^  ^  ^
           g0+              g0+ g1+               g0 g1 g2     backward passes, from the last slice to the first

Every slice has its own autograd graph. A buffer sums the gradients of k0 that slices 1 and 2 compute, and the backward
of slice 0 starts with this sum.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from pipeshard.errors import TraceError, counted


class Left(NamedTuple):
    """A state that a slice has passed to later slices: the root of the state's autograd graph, and a function that
    returns the gradient from later slices, or None if no later slice has computed a gradient."""

    edge: GradientEdge
    gradient: Callable[[], Tensor | None]


class Grown:
    """A tensor that grows along one dimension from slice to slice, up to `length` positions. The tensor is stored in
    one buffer that is never copied.

    `append` writes the positions of a slice, and returns the positions from `first` to the end of the slice.
    """

    def __init__(self, like: Tensor, dim: int, length: int) -> None:
        self.dim = dim % like.ndim
        self.shape = (*like.shape[: self.dim], length, *like.shape[self.dim + 1 :])
        self._values = torch.empty(self.shape, dtype=like.dtype, device=like.device)
        self._gradient: Tensor | None = None

    def append(self, new: Tensor, start: int, first: int) -> Tensor:
        if new.requires_grad:
            return _Append.apply(new, self, start, first)
        return self.write(new, start, first)

    def write(self, new: Tensor, start: int, first: int) -> Tensor:
        """Write the positions of a slice, and return a view of the positions from `first` to the end of the slice. The
        view has its own version counter (`data`). This is safe, since writes of later slices do not change the
        positions that an earlier slice's graph has saved."""
        end = start + new.shape[self.dim]
        self.part(start, end).copy_(new.detach())
        return self.part(first, end)

    def part(self, start: int, end: int) -> Tensor:
        """A view of the positions [start, end)."""
        return self._values.data.narrow(self.dim, start, end - start)

    def add(self, gradient: Tensor, first: int) -> None:
        """Add the gradient that a later slice computed for earlier positions. `first` is the first of these positions.
        16-bit gradients are summed in fp32."""
        count = gradient.shape[self.dim]
        if self._gradient is not None:
            self._gradient.narrow(self.dim, first, count).add_(gradient)
            return
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        self._gradient = torch.empty(self.shape, dtype=dtype, device=gradient.device)
        self._gradient.narrow(self.dim, 0, first).zero_()
        self._gradient.narrow(self.dim, first, count).copy_(gradient)

    def gradient(self, start: int, length: int) -> Tensor | None:
        if self._gradient is None:
            return None
        return self._gradient.narrow(self.dim, start, length).to(self._values.dtype)


class _Append(torch.autograd.Function):
    """`Grown.write` with a backward that adds the gradients of earlier slices' positions to `grown`."""

    @staticmethod
    def forward(ctx: Any, new: Tensor, grown: Grown, start: int, first: int) -> Tensor:
        ctx.grown, ctx.first, ctx.earlier, ctx.length = grown, first, start - first, new.shape[grown.dim]
        return grown.write(new, start, first)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), grown = gradients, ctx.grown
        if ctx.earlier:
            grown.add(gradient.narrow(grown.dim, 0, ctx.earlier), ctx.first)
        return gradient.narrow(grown.dim, ctx.earlier, ctx.length), None, None, None


class Slice:
    """One slice of a microbatch: the positions [start, end) of `total`, and the `states` that it shares with the
    microbatch's other slices. `left` are the states that the slice has passed to later slices, by name."""

    def __init__(self, start: int, end: int, total: int, states: dict[Any, Any]) -> None:
        self.start, self.end, self.total, self.states = start, end, total, states
        self.left: dict[Any, Left] = {}
        self._handed: set[Any] = set()
        self._causal = WeakTensorKeyDictionary()  # by mask, the result of `is_causal`

    def is_causal(self, mask: Tensor) -> bool:
        """Whether a mask lets each position of this slice attend exactly to itself and all earlier positions."""
        if mask not in self._causal:
            shape = (self.end - self.start, self.end)
            is_like = mask.dtype is torch.bool and tuple(mask.shape[-2:]) == shape
            wanted = torch.ones(shape, dtype=torch.bool, device=mask.device).tril(self.start) if is_like else mask
            self._causal[mask] = is_like and bool((mask == wanted).all())
        return bool(self._causal[mask])

    def grow(self, name: Any, new: Tensor, dim: int, window: int | None = None) -> Tensor:
        """Append `new`, the positions of this slice. Return all positions so far or, with a `window`, only this slice
        and the `window - 1` positions before it. A recomputed unit writes the same positions again."""
        count = new.shape[dim]
        if count != self.end - self.start:
            raise TraceError(
                f"num_slices: layer {name[0]} adds {counted(count, 'position')} to its cache in a slice of "
                f"{self.end - self.start} positions, so its cache is not indexed by position. Use num_slices=1"
            )
        if name not in self.states:
            self.states[name] = Grown(new, dim, self.total)
        grown: Grown = self.states[name]
        if new.requires_grad and name not in self.left and self.end < self.total:
            start = self.start
            self.left[name] = Left(get_gradient_edge(new), lambda: grown.gradient(start, count))
        return grown.append(new, self.start, 0 if window is None else max(0, self.start - window + 1))

    def release(self) -> None:
        """Free the slice's state after its backward, and the shared states after the backward of the first slice."""
        self.left.clear()
        if self.start == 0:
            self.states.clear()

    def take(self, name: Any) -> Tensor | None:
        """The state from the previous slice, as a leaf of this slice's graph, or None if there is none. Call this
        method before `hand_over`."""
        return self.states.get(name)

    def hand_over(self, name: Any, state: Tensor) -> None:
        """Pass a state to the next slice, replacing the previous state. Does nothing in the last slice, or if the state
        was already passed (when the unit is recomputed)."""
        if name in self._handed or self.end == self.total:
            return
        self._handed.add(name)
        leaf = state.detach().requires_grad_(state.requires_grad)
        self.states[name] = leaf
        if state.requires_grad:
            self.left[name] = Left(get_gradient_edge(state), lambda: leaf.grad)
