"""Samples: the reasons why the samples of a call must stay together in one microbatch."""

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch import nn

from pipeshard.batch.batch import Batch
from pipeshard.distributed.collectives import gather_objects
from pipeshard.errors import UsageError, of_all
from pipeshard.graph.places import MISSING, names_in
from pipeshard.hf import CACHES, POSITIONS, USES_CACHE, is_quantized_cache, rope_limit
from pipeshard.private import tree_tensors
from pipeshard.slices.cut import num_positions


class SampleDependence:
    """Detects, for one call of `generate`, whether a sample depends on other samples of its microbatch."""

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module], group: dist.ProcessGroup) -> None:
        self.model, self.units, self.group = model, units, group
        self._states: list[str | None] | None = None

    def bond(
        self, entry: Batch, batches: Sequence[Batch], caches: Sequence[Any], forward: Callable[..., Any]
    ) -> str | None:
        """The reason why the samples of the call `entry` cannot be split into `batches`, or None if they can. The
        reason is the same on all ranks. `caches` are the caches among the arguments of the module's own `forward`."""
        return (
            self._of_new_cache(entry, caches, forward)
            or self._of_quantized(caches)
            or self._of_positions(entry, batches)
            or self._of_states()
        )

    def _of_new_cache(self, entry: Batch, caches: Sequence[Any], forward: Callable[..., Any]) -> str | None:
        accepts = any(name in CACHES for name in inspect.signature(forward).parameters)
        if caches or not accepts or not entry.data.get(USES_CACHE):
            return None
        return f"{type(self.model.get_submodule(entry.entry)).__name__} creates a cache in its forward"

    def _of_quantized(self, caches: Sequence[Any]) -> str | None:
        quantized = next(filter(is_quantized_cache, caches), None)
        return None if quantized is None else f"{type(quantized).__name__} quantizes all samples together"

    def _of_positions(self, entry: Batch, batches: Sequence[Batch]) -> str | None:
        if POSITIONS not in entry.tensors or not self._rope_limits:  # without positions, samples do not differ
            return None
        longest, shortest = num_positions(entry), min(map(num_positions, batches))
        for name, limit in self._rope_limits.items():
            if shortest < longest and limit < longest:
                return (
                    f"{name} ({type(self.model.get_submodule(name)).__name__}) computes its frequencies from the "
                    f"longest sample of a batch with more than {limit} positions"
                )
        return None

    def _of_states(self) -> str | None:
        # Not a cached_property, which holds a lock in Python 3.11: ranks in other threads would wait for this lock.
        if self._states is None:
            self._states = gather_objects(self._state(), self.group)  # a unit may have run only on some ranks
        return next(filter(None, self._states), None)

    def _state(self) -> str | None:
        for unit, whole in self.units.items():
            for path, module in whole.named_modules(prefix=unit):
                for name in sorted(assigned(type(module))):  # type: ignore[arg-type]
                    of_class = inspect.getattr_static(type(module), name, MISSING)
                    value = vars(module).get(name, of_class)  # neither a parameter nor a buffer
                    is_later = not hasattr(module, name)  # created in the first forward
                    if is_later or value is None or tree_tensors(value):
                        return f"{path} ({type(module).__name__}) may keep states of samples in its attribute {name}"
        return None

    @cached_property
    def _rope_limits(self) -> dict[str, int]:
        limits = {name: rope_limit(module) for name, module in self.model.named_modules()}
        return {name: limit for name, limit in limits.items() if limit is not None}


@cache
def assigned(kind: type) -> frozenset[str]:
    """The attributes that a module of this class assigns in its forward, or in methods whose names occur there. Omits
    attributes that only store another object's dtype or device."""
    seen, found, todo = set[str](), set[str](), ["forward"]
    while todo:
        name = todo.pop()
        method: Any = inspect.unwrap(getattr(kind, name, None))  # type: ignore[arg-type]
        if name in seen or not isinstance(method, FunctionType):
            continue
        seen.add(name)
        code = method.__code__
        steps = [*dis.get_instructions(code)]
        found |= {
            str(step.argval)
            for value, owner, step in zip(steps, steps[1:], steps[2:])
            if step.opname == "STORE_ATTR" and owner.argrepr.rpartition(", ")[2] in code.co_varnames[:1]
            if value.argval not in ("dtype", "device")
        }
        todo += names_in(code)
    return frozenset(found)


def cannot_split(bond: str) -> Exception:
    """The error that every rank raises if `num_microbatches` would split samples that must stay together."""
    return of_all(
        UsageError(
            f"{bond}, so samples cannot be split into microbatches: call model.generate(..., num_microbatches=1)"
        )
    )
