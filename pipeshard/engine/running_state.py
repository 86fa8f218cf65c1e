"""Running state: what glue and batch norm leave to the next forward, kept apart for each of a rank's stages.

Every stage runs the glue, for every microbatch once and in their order, so that what it carries on is on all of them
what it would be in the unsplit model: counters, generators, what is made of the batch. What is made of the results of
units is so on the stages that have these, which are those that read it; on the others it stays what it was.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeshard.graph.carried import Held, Place
from pipeshard.graph.dataflow import Carried
from pipeshard.split.route import Route


class Carry:
    """Around the forwards of one step, on one rank."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.places: dict[str, Place] = {}

    def begin(self, routes: Sequence[Route]) -> None:
        """Get ready for one forward on each of these routes."""
        alone, is_single = len({route.stage for route in routes}) == 1, len(routes) == 1
        carried = {
            place.name: place
            for route in routes
            for place in route.flow.carried
            if place.kind not in ("parameter", "settled") and not (alone and self._is_settled(place, route, is_single))
        }
        self.places = {name: Place(self.model, place.path) for name, place in carried.items()}
        self.written = {name for name, place in carried.items() if place.kind == "tensor"}
        self.start = {name: place.take() for name, place in self.places.items()}
        same = {id(self.start[name].value): name for name in self.written}
        self.others: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self.places}
        for module in self.model.modules() if same else ():
            for key, buffer in module._buffers.items():
                if id(buffer) in same:
                    self.others[same[id(buffer)]].append((module, key))
        self.now: dict[int, dict[str, Held]] = {}

    def _is_settled(self, place: Carried, route: Route, is_single: bool) -> bool:
        """Whether a place need not be looked after on a rank with one stage; unless a microbatch `is_single`, a
        backward may need what a later forward would write to."""
        if place.kind == "tensor" and not is_single:
            return False
        return place.until == -1 or place.name not in route.spoiled

    def around(self, route: Route) -> AbstractContextManager[None]:
        """Around one forward on this route."""
        return self._around(route) if self.places else nullcontext()

    def end(self) -> None:
        """Leave what the last stage has that has it right."""
        for name, start in self.start.items() if self.places else ():
            found = [self.now[stage][name] for stage in sorted(self.now) if name in self.now[stage]]
            held = found[-1] if found else start
            if name in self.written and isinstance(held.value, Tensor) and held.value.shape == start.value.shape:
                with torch.no_grad():
                    start.value.copy_(held.value)
                held = start
            self._put(name, held)
        self.places, self.start, self.now = {}, {}, {}

    @contextmanager
    def _around(self, route: Route) -> Iterator[None]:
        now = self.now.setdefault(route.stage, {})
        for name in self.places:
            held = now.get(name, self.start[name])
            if name in self.written and isinstance(held.value, Tensor):
                held = Held(held.value.detach().clone(), None)  # a backward may need what there was
            self._put(name, held)
        yield
        now.update((name, place.take()) for name, place in self.places.items() if name not in route.spoiled)

    def _put(self, name: str, held: Held) -> None:
        """Put it there, and where the same buffer is too."""
        self.places[name].put(held)
        for module, key in self.others[name]:
            module._buffers[key] = held.value


# By module, the sum, the sum of squares and the number of what a step has normalized in each channel. They are nothing
# that a module or a hook can reach, as what units change is compared with what the trace saw.
_SUMS: dict[nn.Module, tuple[Tensor, Tensor, int]] = {}


@contextmanager
def deferred(units: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, each microbatch is normalized by its own statistics, as always; afterwards the running ones of these
    units have moved once, by mean and (biased) variance of all that was normalized (Kim et al. 2020, arXiv:2004.09910).
    """
    modules: dict[Any, None] = {module: None for unit in units for module in unit.modules() if _tracks(module)}
    before = {module: [buffer.clone() for buffer in _buffers(module)] for module in modules}
    hooks = [module.register_forward_pre_hook(_add) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for module, buffers in before.items():
                if module in _SUMS:
                    _move(module, buffers, *_SUMS.pop(module))


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.training and module.running_mean is not None


def _buffers(module: _BatchNorm) -> list[Tensor]:
    return [
        buffer for buffer in (module.running_mean, module.running_var, module.num_batches_tracked) if buffer is not None
    ]


def _add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    x: Tensor = inputs[0].detach()
    dims = [dim for dim in range(x.ndim) if dim != 1]
    total, squares, count = _SUMS.get(module, (0, 0, 0))
    _SUMS[module] = total + x.sum(dims), squares + x.square().sum(dims), count + x.numel() // x.shape[1]


def _move(module: Any, before: list[Tensor], total: Tensor, squares: Tensor, count: int) -> None:
    for buffer, value in zip(_buffers(module), before, strict=True):
        buffer.copy_(value)
    module.num_batches_tracked += 1
    share = module.momentum if module.momentum is not None else 1 / float(module.num_batches_tracked)
    mean = total / count
    module.running_mean.mul_(1 - share).add_(mean * share)
    module.running_var.mul_(1 - share).add_((squares / count - mean.square()) * share)
