"""Running state: state in the model that one forward passes to the next, kept separately for each stage of a rank.

Every stage runs the glue once per microbatch, in the order of the microbatches. State that glue updates (counters,
generators, values computed from the batch) is therefore the same on all stages as in the unsplit model. State computed
from unit results is correct on the stages that have these results, and only these stages read the state. Other stages
do not update this state. Batch norm is handled separately: with `deferred`, its running statistics are updated once per
step, from the whole batch.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.graph.carried import Held, Place
from pipeshard.graph.dataflow import Carried
from pipeshard.private import BatchNorm
from pipeshard.split.replay import Replay
from pipeshard.split.route import Route


class Carry:
    """Passes running state between the forwards of one step on one rank."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.places: dict[str, Place] = {}

    def begin(self, routes: Sequence[Route]) -> None:
        """Prepare a step that runs one forward on each of these routes."""
        has_one_stage, has_one_forward = len({route.stage for route in routes}) == 1, len(routes) == 1
        carried = {
            place.name: place
            for route in routes
            for place in route.flow.carried
            if place.kind not in ("parameter", "settled")
            and not (has_one_stage and _is_settled(place, route, has_one_forward))
        }
        self.places = {name: Place(self.model, place.path) for name, place in carried.items()}
        self.written = {name for name, place in carried.items() if place.kind == "tensor"}
        self.start = {name: place.take() for name, place in self.places.items()}
        self.left: dict[int, dict[str, Held]] = {}  # by stage, the state after the stage's latest forward
        self.same: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self.places}
        names = {id(self.start[name].value): name for name in self.written}
        for module in self.model.modules() if names else ():
            for key, buffer in module._buffers.items():
                if id(buffer) in names:
                    self.same[names[id(buffer)]].append((module, key))

    @contextmanager
    def around(self, route: Route) -> Iterator[None]:
        """Context manager for one forward on this route: restores the state of the route's stage, and records the new
        state on exit."""
        left = self.left.setdefault(route.stage, {}) if self.places else {}
        for name in self.places:
            held = left.get(name, self.start[name])
            if name in self.written and isinstance(held.value, Tensor):
                held = Held(held.value.detach().clone(), None)  # a backward may need the old value
            self._put(name, held)
        with self._passing(route):
            yield
        left.update((name, place.take()) for name, place in self.places.items() if name not in route.spoiled)

    @contextmanager
    def _passing(self, route: Route) -> Iterator[None]:
        """Context manager for a forward that the stage stops early, before the end of the model's forward. On exit,
        restores the state that glue would have restored later (a depth counter, a list of losses)."""
        paths = route.flow.passing if route.stop is not None else ()
        places = [Place(self.model, path) for path in paths]
        held = [place.take() for place in places]
        yield
        for place, before in zip(places, held):
            place.put(before)

    def end(self) -> None:
        """Write the final state to each place in the model. The last stage of this rank that has the correct state
        provides it."""
        for name in self.places:
            start = self.start[name]
            held = [self.left[stage][name] for stage in sorted(self.left) if name in self.left[stage]]
            last = held[-1] if held else start
            if name in self.written and isinstance(last.value, Tensor) and last.value.shape == start.value.shape:
                with torch.no_grad():
                    start.value.copy_(last.value)
                last = start
            self._put(name, last)
        self.places = {}

    def _put(self, name: str, held: Held) -> None:
        self.places[name].put(held)
        for module, key in self.same[name]:
            module._buffers[key] = held.value


def _is_settled(place: Carried, route: Route, has_one_forward: bool) -> bool:
    """Whether a rank with one stage can leave a place's state in the model instead of carrying it. Tensors must be
    carried if there are several forwards, since a backward may need a value that a later forward overwrites."""
    if place.kind == "tensor" and not has_one_forward:
        return False
    return place.until == -1 or place.name not in route.spoiled


# The moments of each input of a module, by module. They are not stored in modules or hooks, since changes that units
# make there are compared with the trace.
_MOMENTS: defaultdict[nn.Module, list[Tensor]] = defaultdict(list)


@contextmanager
def deferred(units: Iterable[nn.Module], replay: Replay | None = None) -> Iterator[None]:
    """Context manager that updates the running statistics of these units once, on exit, with the mean and the variance
    of all inputs (Kim et al. 2020, arXiv:2004.09910). The variance is unbiased, as in torch's update. Each microbatch
    is still normalized by its own statistics. Calls of units of the rank's other stages, which `replay` answers, do not
    count.
    """
    modules: dict[Any, None] = {module: None for unit in units for module in unit.modules() if _tracks(module)}
    before = {module: [buffer.clone() for buffer in _statistics(module)] for module in modules}

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if replay is None or _runs_next(replay):
            _MOMENTS[module].append(_moments(next(iter((*args, *kwargs.values())))))

    hooks = [module.register_forward_pre_hook(add, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for module, buffers in before.items():
                if module in _MOMENTS:
                    _move(module, buffers, _MOMENTS.pop(module))


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and module.training and module.running_mean is not None


def _statistics(module: BatchNorm) -> list[Tensor]:
    buffers = (module.running_mean, module.running_var, module.num_batches_tracked)
    return [buffer for buffer in buffers if buffer is not None]


def _runs_next(replay: Replay) -> bool:
    """Whether the current call computes: the called module is a unit of the current stage, or is inside such a unit."""
    run = replay.active
    return run is None or run.inside or all(step.held for step in run.route.steps[run.next : run.next + 1])


def _moments(x: Tensor) -> Tensor:
    """Return the number, the mean and the (biased) variance of each channel's values, in fp64. The mean and the
    variance are computed in at least fp32, as in torch."""
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(x, [dim for dim in range(x.ndim) if dim != 1], correction=0)
    size = torch.full_like(mean, x.numel() // x.shape[1], dtype=torch.float64)
    return torch.stack([size, mean.double(), variance.double()])


def _move(module: Any, before: list[Tensor], moments: list[Tensor]) -> None:
    for buffer, value in zip(_statistics(module), before, strict=True):
        buffer.copy_(value)
    module.num_batches_tracked += 1
    momentum = module.momentum if module.momentum is not None else 1 / float(module.num_batches_tracked)
    sizes, means, variances = torch.stack(moments, 1)
    size = sizes.sum(0)
    shares = sizes / size
    mean = (shares * means).sum(0)
    # Subtracting the square of the mean from the mean of squares would lose precision by cancellation.
    variance = (shares * (variances + (means - mean).square())).sum(0)
    unbiased = variance * size / (size - 1)  # torch refuses to normalize by the variance of a single value
    for buffer, value in ((module.running_mean, mean), (module.running_var, unbiased)):
        buffer.copy_(torch.lerp(buffer.double(), value, momentum))
