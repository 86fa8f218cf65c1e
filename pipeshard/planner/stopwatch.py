"""Stopwatch: one kind of unit, run alone on a device to take its time."""

import copy
import statistics
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map_only, tree_unflatten

from pipeshard.model.meter import Meter, Visit
from pipeshard.model.partition import Cost
from pipeshard.model.standin import blank_state
from pipeshard.model.taint import Value
from pipeshard.runtime.deferral import Deferral

SPREAD = 0.02  # the standard deviation of made-up parameters
# Runs before the first that counts. The first gives parameters the gradients that later ones add to, and the next few
# may each get memory from the system that no run had before: an embedding's is five times as long then.
WARM_UPS = 3
COLD = 64 * 2**20  # bytes written before F and B, which in a step find in no cache what other units have run since


@dataclass
class Capture:
    """The arguments of a unit call; `made_up` are the leaves that come from units, and so have no values."""

    leaves: list[Any]
    made_up: frozenset[int]
    tree: TreeSpec


class Captures(Meter):
    """A Meter that keeps the arguments of every kind of call.

    Attributes:
        calls: the capture of each unit call, the same object for calls of one kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Capture] = []
        self.kinds: list[tuple[Visit, Capture]] = []

    def add(self, visit: Visit, arguments: Sequence[Any], tree: TreeSpec, result: Sequence[Any]) -> None:
        if not self.works:  # the first call of a run
            self.calls, self.kinds = [], []
        super().add(visit, arguments, tree, result)
        known = next((capture for of_kind, capture in self.kinds if of_kind is visit), None)
        if known is None:
            made_up = frozenset(k for k, leaf in enumerate(arguments) if self._is_made_up(leaf))
            leaves = [_copied(leaf) for leaf in arguments]
            known = Capture(leaves, made_up, tree)
            self.kinds.append((visit, known))
        self.calls.append(known)

    def _is_made_up(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and any(isinstance(tag, Value) for tag in self.taint.of([leaf]))


class Stopwatch:
    """Runs `unit` on `device` with the arguments of `capture`."""

    def __init__(self, unit: nn.Module, capture: Capture, device: torch.device) -> None:
        self.unit, self.capture, self.device = unit, capture, device

    def median(self, repeats: int) -> Cost:
        """Median seconds of forward, backward without the weight gradients that can wait, and those."""
        state = blank_state(self.unit, self.device)
        own = (*self.unit.named_parameters(remove_duplicate=False), *self.unit.named_buffers(remove_duplicate=False))
        for name, tensor in own:
            if tensor.device != self.device and state[name].is_floating_point():
                state[name].data.normal_(0, SPREAD)
        arguments = [self._placed(leaf, k in self.capture.made_up) for k, leaf in enumerate(self.capture.leaves)]
        self.cold = torch.empty(COLD, dtype=torch.uint8, device=self.device)
        deferral = Deferral(self.unit.modules())
        with stateless._reparametrize_module(self.unit, state), deferral.installed(), torch.enable_grad():
            runs = [self._run(arguments, deferral) for _ in range(WARM_UPS + repeats)]
        return Cost(*(statistics.median(part) for part in zip(*runs[WARM_UPS:], strict=True)))

    def _run(self, arguments: list[Any], deferral: Deferral) -> Cost:
        leaves = tree_map_only(Tensor, lambda t: t.clone(), [_copied(leaf) for leaf in arguments])
        args, kwargs = tree_unflatten(leaves, self.capture.tree)
        self.cold.zero_()
        start = self._now()
        result = self.unit(*args, **kwargs)
        forward = self._now() - start
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
        gradients = [torch.randn_like(t) for t in made]
        pending = deferral.begin()
        self.cold.zero_()
        start = self._now()
        if made:
            torch.autograd.backward(made, gradients)
        middle = self._now()
        deferral.finish(pending)
        return Cost(forward, middle - start, self._now() - middle)

    def _placed(self, leaf: Any, made_up: bool) -> Any:
        """An argument on the device, with random values in the place of values that a unit would have made."""
        if isinstance(leaf, MutableMapping):
            placed = copy.copy(leaf)
            placed.update(tree_map_only(Tensor, lambda t: self._placed(t, True), dict(leaf)))
            return placed
        if not isinstance(leaf, Tensor):
            return leaf
        if made_up and leaf.is_floating_point():
            there = torch.randn(leaf.shape, dtype=leaf.dtype, device=self.device)
        else:
            there = leaf.detach().to(self.device)
        return there.requires_grad_(leaf.requires_grad)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _copied(leaf: Any) -> Any:
    return copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf
