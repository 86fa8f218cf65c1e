"""Separable optimizers: those that do to each parameter what they would do to it alone, so that ranks can share one."""

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Optimizer

from pipeshard.config import PipelineConfig
from pipeshard.distributed.mesh import Grid
from pipeshard.errors import ConfigurationError

logger = logging.getLogger("pipeshard")
SIZE, STEPS, SPARED = 4, (1.0, 100.0, 0.01), 0.02  # of a parameter in a trial; gradients of its steps; what is no gap
OWN = ("step", "add_param_group", "zero_grad")  # methods that schedulers, or an earlier boost, have put on an optimizer
WHOLE = (Adafactor, getattr(torch.optim, "Muon", Adafactor))  # torch's own that look at whole matrices


def check_separable(optimizer: Optimizer, model: nn.Module, config: PipelineConfig, grid: Grid) -> None:
    """Raise ConfigurationError for an optimizer that would do something else to a part of the model than to all of it.

    Torch's own are known. Any other is tried: copies of it step on a few tiny parameters, once all together, and once
    each half of them apart, as ranks would.
    """
    name = type(optimizer).__name__
    sliced = grid.tp_size > 1 or (config.fsdp and grid.dp_size > 1)
    if grid.pp_size * grid.tp_size == 1 and not (grid.dp_size > 1 and (config.fsdp or config.zero_stage)):
        return
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            f"{name} takes its direction from the gradients of all parameters together, of which each rank has a part "
            "only: use another optimizer, or pp_size=1 without tp_size, zero_stage and fsdp"
        )
    known = type(optimizer).__module__.startswith("torch.optim.")
    try:
        couples = not known and gap(optimizer, model, False) > SPARED
        divides = sliced and (isinstance(optimizer, WHOLE) if known else gap(optimizer, model, True) > SPARED)
    except Exception as error:  # whatever a stranger's code raises
        if grid.first:
            logger.warning(
                "whether %s does to a part of the model what it would do to it in all could not be tried (%s: %s): it "
                "does if it looks at one parameter at a time",
                name, type(error).__name__, error,
            )  # fmt: skip
        return
    if couples:
        raise ConfigurationError(
            f"{name} does something else to parameters together than to each alone (a norm over all of them, an "
            "estimate from all of them, random numbers), but each rank has a part of them only: use another optimizer "
            "(max_norm clips by the norm of the whole model), or pp_size=1 without zero_stage and fsdp"
        )
    if divides:
        raise ConfigurationError(
            f"{name} looks at whole parameters, of which each rank has slices with tp_size > 1 and fsdp=True: use "
            "zero_stage=1 instead, or an optimizer that works element by element"
        )


def gap(optimizer: Optimizer, model: nn.Module, sliced: bool) -> float:
    """How much an optimizer's updates differ, relative to the largest, if each half of its parameters, or (`sliced`)
    of the rows of each, has an optimizer of its own."""
    together, *halves = [list(_parts(optimizer, half, sliced)) for half in (None, 0, 1)]
    large = [*model.parameters(), *model.buffers()]  # of which it may have a reference
    with torch.random.fork_rng():
        ends = [_stepped(optimizer, parts, large) for parts in (together, *halves)]
    apart = ends[1] | ends[2] if not sliced else {k: torch.cat([ends[1][k], ends[2][k]]) for k in ends[1]}
    moved = max((float((ends[0][k] - start).abs().max()) for k, _, start in together), default=0.0)
    differs = max((float((ends[0][k] - apart[k]).abs().max()) for k, _, _ in together), default=0.0)
    return differs / moved if moved else 0.0


def _parts(optimizer: Optimizer, half: int | None, sliced: bool) -> Iterator[tuple[tuple[int, int], Tensor, Tensor]]:
    """Place, original and tiny values of the parameters that the trial of all, or of one half, has: two a group."""
    generator = torch.Generator().manual_seed(0)
    place = 0
    for k, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"][:2]):
            shape = [min(n, SIZE) for n in parameter.shape]
            tiny = torch.randn(shape, generator=generator)
            place += 1
            if sliced and (not shape or shape[0] < 2):
                continue
            if half is None or sliced:
                yield (k, j), parameter, tiny if half is None else tiny.chunk(2)[half]
            elif place % 2 == half:
                yield (k, j), parameter, tiny


def _stepped(
    optimizer: Optimizer, parts: list[tuple[tuple[int, int], Tensor, Tensor]], large: list[Tensor]
) -> dict[tuple[int, int], Tensor]:
    """The values after some steps of a copy that has these parameters alone."""
    error: Exception | None = None
    for closes in (False, True):
        tiny = {k: nn.Parameter(value.to(original.device).clone()) for k, original, value in parts}
        trial = _copy(optimizer, tiny, large)
        torch.manual_seed(0)
        try:
            for scale in STEPS:
                closure = _closure(list(tiny.values()), scale)
                closure()
                type(trial).step(trial, *([closure] if closes else []))
            return {k: parameter.detach().cpu() for k, parameter in tiny.items()}
        except Exception as raised:  # it may want a closure
            error = error or raised
    assert error is not None
    raise error


def _closure(parameters: list[nn.Parameter], scale: float) -> Callable[[], Tensor]:
    """A loss of each parameter alone, whose gradient differs a little way on; its value is no parameter's affair."""

    def closure() -> Tensor:
        with torch.no_grad():
            for parameter in parameters:
                parameter.grad = scale * torch.cos(40.0 * parameter)
        return torch.ones((), requires_grad=True)

    return closure


def _copy(optimizer: Optimizer, tiny: dict[tuple[int, int], nn.Parameter], large: list[Tensor]) -> Any:
    """The optimizer as it was made, with these parameters in the place of its own; nothing large is copied."""
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)} | {id(tensor): torch.empty(0) for tensor in large}
    for k, group in enumerate(optimizer.param_groups):
        memo |= {id(p): tiny.get((k, j), nn.Parameter(torch.empty(0))) for j, p in enumerate(group["params"])}
    trial = memo[id(optimizer)] = object.__new__(type(optimizer))
    content = {key: value for key, value in optimizer.__dict__.items() if key not in OWN}
    trial.__dict__.update(copy.deepcopy(content, memo))
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for k, group in enumerate(trial.param_groups):
        group["params"][:] = [parameter for (of, _), parameter in tiny.items() if of == k]
    return trial
