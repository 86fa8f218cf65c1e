"""Optimizer trial: tests whether an optimizer updates parts of a model the same way as the whole model.

If an optimizer couples parameters (LBFGS, sharpness-aware minimization, a norm over all parameters), each stage would
silently compute updates that differ from the updates of the whole model. For the optimizers of torch and bitsandbytes,
and torchao's Adam, the result is known without a trial. The trial runs any other optimizer on tiny parameters, once on
all of these parameters and once on each half, and compares the updates. An optimizer may begin to couple parameters
later, so engine/coupling.py watches some of its updates in training. pipeshard refuses an optimizer that calls a
collective of all ranks in the trial, since each rank updates its own parameters in a step.
"""

import copy
import inspect
import logging
import math
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Optimizer

from pipeshard.config import PipelineConfig
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.coupling import OptimizerTrial, eagerly
from pipeshard.engine.groups import keep, options_per_parameter
from pipeshard.engine.step_guard import contents
from pipeshard.engine.updates import CLIP
from pipeshard.errors import ConfigurationError
from pipeshard.graph.rng import seeded

logger = logging.getLogger("pipeshard")
FEW = 2  # parameters per group in the first trial, and per kind and group in the second trial
SIZE, SPARED = 4, 0.02  # the largest size of a tiny parameter's dimensions, and the largest allowed gap
SCALES = (1.0, 100.0, 0.01) + (1.0,) * 6 + (1000.0,)  # gradient scales by step; the last exceeds any mean so far
OVERRIDDEN = ("step", "add_param_group", "zero_grad")  # attributes that schedulers, or an earlier boost, may set
SLOWEST, USUAL_RATE = 1e-5, 1e-2  # the least learning rate at which updates can be compared, and its replacement
KNOWN = "torch.optim.", "bitsandbytes.optim.", "torchao.optim.adam"  # modules whose optimizers do not couple parameters
WHOLE = (Adafactor, getattr(torch.optim, "Muon", Adafactor))  # torch optimizers that need whole matrices
Index = tuple[int, int]  # the index of a parameter's group, and the parameter's index in the group
Closure = Callable[[], Tensor]
# Optimizers that are not watched, because their operators combine parameters although the trial finds independent
# updates, or because their step cannot run in a mode.
UNWATCHED: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def check_separable(
    optimizer: Optimizer, model: nn.Module, config: PipelineConfig, grid: Grid, clip: str = CLIP
) -> None:
    """Raise ConfigurationError if the optimizer would update parts of the model differently than the whole model.
    `clip` is the error's advice on how to clip gradients."""
    name = type(optimizer).__name__
    if not config.lowers and rounds_at_random(optimizer) and grid.size > 1:
        raise ConfigurationError(
            f"{name} rounds updates of bf16 parameters stochastically (bf16_stochastic_round=True), so ranks that hold "
            "the same weight would round it to different values: use PipelinePlugin(precision='bf16'), which keeps "
            "fp32 master weights, or bf16_stochastic_round=False"
        )
    sharded = grid.tp_size > 1 or (config.fsdp and grid.dp_size > 1)
    if grid.pp_size == 1 and not sharded and not (config.zero_stage and grid.dp_size > 1):
        return
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            f"{name} computes its update direction from the gradients of all parameters together, but each rank "
            "updates only a part of the parameters: use another optimizer, or pp_size=1 without tp_size, ep_size, "
            "zero_stage or fsdp"
        )
    if aligned := sorted(options_per_parameter(optimizer)):
        raise ConfigurationError(
            f"a parameter group of {name} has the option {aligned[0]!r} with one value for each parameter, but a rank "
            "that updates only some of the parameters would apply these values to the wrong parameters. Put parameters "
            "with different values into different groups, use another optimizer, or use pp_size=1 without tp_size, "
            "ep_size, zero_stage or fsdp"
        )
    known, trial = never_couples(optimizer), OptimizerTrial(grid)

    def gaps(mode: AbstractContextManager[Any]) -> tuple[bool, bool]:
        couples = not known and gap(optimizer, model, False, mode) > SPARED
        return couples, sharded and (looks_at_whole(optimizer) if known else gap(optimizer, model, True, mode) > SPARED)

    try:
        try:
            couples, divides = gaps(trial)
        except Exception:
            if trial.waiting is not None:
                raise
            UNWATCHED.add(optimizer)
            couples, divides = gaps(nullcontext())  # compiled code may not run in a dispatch mode
    except Exception as error:  # a user's class may raise anything
        if grid.first and trial.waiting is None:
            logger.warning(
                "could not check whether %s updates each parameter independently (%s: %s). If it does not, training "
                "differs from training in one process: compare the losses of a few steps with a run with pp_size=1",
                name, type(error).__name__, error,
            )  # fmt: skip
        couples = divides = False
    if trial.waiting is not None:
        raise ConfigurationError(
            f"{name} exchanges tensors with all ranks {trial.waiting}, but each rank updates different parameters, so "
            "the exchange would mix tensors of different parameters. Use the optimizer's single-device variant "
            "(SingleDeviceMuon, torch.optim.Muon). To divide its state and work among replicas, pass zero_stage=1. "
            "Alternatively, use pp_size=1 without tp_size, ep_size, zero_stage or fsdp"
        )
    if trial.combines:
        UNWATCHED.add(optimizer)
    if couples:
        raise ConfigurationError(
            f"{name} couples parameters: the update of a parameter depends on other parameters (through a norm or an "
            "estimate over all parameters, random numbers, or the optimizer's own list of parameters), but each rank "
            "updates only a part of the parameters. If the optimizer is your own, keep per-parameter state in "
            "self.state[parameter]. If it clips gradients itself, turn off its clipping (timm's Lamb: "
            f"max_grad_norm=None) and {clip} to clip by the norm of the whole model. Otherwise, use another optimizer, "
            "or use pp_size=1 without tp_size, ep_size, zero_stage or fsdp"
        )
    if divides:
        raise ConfigurationError(
            f"{name} needs whole parameters, but with tp_size, ep_size or fsdp each rank has only a shard of a "
            "parameter: use zero_stage=1 instead, or use an elementwise optimizer"
        )


def never_couples(optimizer: Optimizer) -> bool:
    """Whether the optimizer is from one of the KNOWN modules."""
    return type(optimizer).__module__.startswith(KNOWN)


def is_watched(optimizer: Optimizer) -> bool:
    """Whether to watch some of the optimizer's steps, in case the optimizer begins to couple parameters."""
    return not never_couples(optimizer) and optimizer not in UNWATCHED


def rounds_at_random(optimizer: Optimizer) -> bool:
    """Whether an optimizer (for example, from torchao) rounds updates of bf16 parameters stochastically."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    is_asked = bool(getattr(optimizer, "bf16_stochastic_round", False))
    return is_asked and any(parameter.dtype is torch.bfloat16 for parameter in parameters)


def looks_at_whole(optimizer: Optimizer) -> bool:
    """Whether an optimizer from the KNOWN modules needs unsharded parameters, as torch's Adafactor and Muon, and some
    optimizers of bitsandbytes and torchao do. In states with at most 8 bits, each block of values (256 in bitsandbytes)
    shares one scale. With `max_unorm`, updates depend on norms of whole parameters. AdEMAMix stores two states in one
    tensor, which a checkpoint cannot divide into shards."""
    of_bitsandbytes = getattr(optimizer, "args", None)
    of_torchao: float = getattr(optimizer, "block_size", math.inf)
    in_blocks = getattr(of_bitsandbytes, "optim_bits", 32) == 8 or of_torchao < math.inf
    stacks = getattr(optimizer, "optimizer_name", None) == "ademamix"
    return isinstance(optimizer, WHOLE) or in_blocks or stacks or getattr(of_bitsandbytes, "max_unorm", 0.0) > 0


def gap(optimizer: Optimizer, model: nn.Module, sliced: bool, mode: AbstractContextManager[Any] | None = None) -> float:
    """Compare the updates of one optimizer with the updates of two optimizers that each have half of its parameters
    (with `sliced`, half of the rows of each parameter). Return the largest difference, relative to the largest update
    of the same step. Also compare the updates of the optimizer's own methods. `step` runs in `mode`."""
    mode = mode or nullcontext()
    first, of_kinds = (_tiny(optimizer, sliced, FEW, by_kind) for by_kind in (False, True))
    starts = [first] if [*first] == [*of_kinds] else [first, of_kinds]  # the order determines the halves
    try:
        return max(_gap_from(start, optimizer, model, sliced, mode) for start in starts)
    except Exception:  # the optimizer may need all parameters
        return _gap_from(_tiny(optimizer, sliced, None, False), optimizer, model, sliced, mode)


def _gap_from(
    start: dict[Index, Tensor], optimizer: Optimizer, model: nn.Module, sliced: bool, mode: AbstractContextManager[Any]
) -> float:
    methods = own_methods(optimizer)
    by_methods = _gap(start, lambda values: _called(optimizer, model, values, methods), sliced) if methods else 0.0
    if by_methods > SPARED:
        return by_methods
    with mode, eagerly():  # torch.compile with fullgraph=True fails in a mode
        return _gap(start, lambda values: _stepped(optimizer, model, values), sliced)


def _gap(start: dict[Index, Tensor], run: Callable[[dict[Index, Tensor]], dict[Index, Tensor]], sliced: bool) -> float:
    halves = [
        {index: value.chunk(2)[half] for index, value in start.items()} if sliced else dict([*start.items()][half::2])
        for half in (0, 1)
    ]
    together = run(start)
    try:
        first, second = [run(values) for values in halves]
    except Exception:  # the optimizer needs all parameters, for example because it keeps its own list
        return 1.0
    apart = {index: torch.cat([first[index], second[index]], 1) for index in start} if sliced else first | second
    if not start:
        return 0.0
    gaps = [(together[index], together[index] - apart[index]) for index in start]
    moved, differs = (
        torch.cat([gap.reshape(len(gap), -1) for gap in of_all], 1).abs().amax(1) for of_all in zip(*gaps)
    )
    counts = moved > 1e-6
    return float((differs[counts] / moved[counts]).max()) if counts.any() else 0.0


def own_methods(optimizer: Optimizer) -> list[str]:
    """Return the names of the public methods that the optimizer's class adds to torch's Optimizer. Only methods that
    need no arguments and read `param_groups` are included. The names are in the order of definition (SAM's first_step
    before its second_step)."""
    found: dict[str, None] = {}
    for kind in reversed(type(optimizer).__mro__):
        if kind is object or issubclass(Optimizer, kind) or kind.__module__.startswith("torch."):
            continue
        for name, method in vars(kind).items():
            if isinstance(method, FunctionType) and not name.startswith("_") and not hasattr(Optimizer, name):
                found[name] = None
    return [name for name in found if _goes_through_groups(getattr(type(optimizer), name))]


def _goes_through_groups(method: Callable[..., Any]) -> bool:
    """Whether the method can be called without arguments, and reads the parameter groups."""
    original = inspect.unwrap(method)
    first, *others = inspect.signature(original).parameters.values()
    optional = (first.VAR_POSITIONAL, first.VAR_KEYWORD)
    needed = [one for one in others if one.default is one.empty and one.kind not in optional]
    return not needed and "param_groups" in original.__code__.co_names


def _tiny(optimizer: Optimizer, sliced: bool, few: int | None, by_kind: bool) -> dict[Index, Tensor]:
    """Return small random tensors for the first `few` parameters of each group (None: all) or, with `by_kind`, of each
    kind in each group. With `sliced`, only parameters with several rows are included. Tensors of one kind are adjacent,
    so that each half contains some of them."""
    kinds: dict[tuple[Any, ...], dict[Index, list[int]]] = {}
    for k, group in enumerate(optimizer.param_groups):
        counts = Counter[tuple[Any, ...]]()
        for j, parameter in enumerate(group["params"]):
            kind = (parameter.ndim, *sorted(vars(parameter))) if by_kind else ()
            counts[kind] += 1
            if few is None or counts[kind] <= few:
                kinds.setdefault(kind, {})[k, j] = [min(size, SIZE) for size in parameter.shape]
    shapes = {index: shape for of_kind in kinds.values() for index, shape in of_kind.items()}
    if sliced:
        shapes = {index: shape for index, shape in shapes.items() if shape and shape[0] > 1}
    generator = torch.Generator().manual_seed(0)
    return {index: torch.randn(shape, generator=generator) for index, shape in shapes.items()}


def _stepped(optimizer: Optimizer, model: nn.Module, values: dict[Index, Tensor]) -> dict[Index, Tensor]:
    """Copy the optimizer with only these parameters, run the steps of the copy, and return the change of each parameter
    in each step."""
    alone, closed = (
        (lambda trial, _: type(trial).step(trial)),
        (lambda trial, closure: type(trial).step(trial, closure)),
    )
    try:
        return _moves(optimizer, model, values, enumerate([alone] * len(SCALES)))
    except Exception as error:  # the optimizer may need a closure
        try:
            return _moves(optimizer, model, values, enumerate([closed] * len(SCALES)))
        except Exception:  # the first error is more informative
            raise error from None


def _called(
    optimizer: Optimizer, model: nn.Module, values: dict[Index, Tensor], methods: Sequence[str]
) -> dict[Index, Tensor]:
    """Call these methods in order on a copy of the optimizer, each with new gradients, and return the change of each
    parameter in each call."""

    def call(trial: Any, _: Closure, name: str) -> None:
        with suppress(Exception):  # the method may need something that only a training loop provides
            getattr(type(trial), name)(trial)

    return _moves(optimizer, model, values, [(0, partial(call, name=name)) for name in methods])


@seeded(0)
def _moves(
    optimizer: Optimizer,
    model: nn.Module,
    values: dict[Index, Tensor],
    calls: Iterable[tuple[int, Callable[[Any, Closure], object]]],
) -> dict[Index, Tensor]:
    """Pass a copy of the optimizer and a closure to each function in `calls`. Set new gradients before each call, and
    return the change of each parameter in each call. In `calls`, each function is paired with the number that
    determines its gradients.

    The magnitude of a gradient depends on this number and on the parameter. If all gradients had the same magnitude, an
    estimate over all parameters (as in Prodigy) would equal the estimate over half of the parameters.
    """
    parameters: dict[Index, nn.Parameter] = {}
    for (k, j), value in values.items():
        original = optimizer.param_groups[k]["params"][j]
        parameters[k, j] = nn.Parameter(value.to("cpu" if original.is_meta else original.device).clone())
    trial = _copy(optimizer, model, parameters)
    seen = {index: [parameter.detach().cpu().clone()] for index, parameter in parameters.items()}
    for number, call in calls:

        def closure(number: int = number) -> Tensor:
            """Set each parameter's gradient to an elementwise function of the parameter, and return a constant
            loss."""
            with torch.no_grad():
                for (k, j), parameter in parameters.items():
                    size = 10 ** math.sin(1 + 7 * number + 3 * j + 5 * k)  # between 0.1 and 10
                    parameter.grad = SCALES[number] * size * torch.cos(40.0 * parameter)
            return torch.ones((), requires_grad=True)

        closure()
        call(trial, closure)
        for index, parameter in parameters.items():
            seen[index].append(parameter.detach().cpu().clone())
    return {index: torch.stack(values).diff(dim=0) for index, values in seen.items()}


def _corner(tensor: Tensor) -> Tensor:
    return tensor.detach()[(slice(SIZE),) * tensor.ndim].clone() if tensor.ndim else tensor.detach().clone()


def _copy(optimizer: Optimizer, model: nn.Module, parameters: dict[Index, nn.Parameter]) -> Any:
    """Return a copy of the optimizer with only `parameters` in its groups. Large tensors are not copied."""
    memo: dict[int, Any] = {id(value): _corner(value) for value in contents(optimizer) if isinstance(value, Tensor)}
    memo |= {id(tensor): torch.empty(0) for tensor in (*model.parameters(), *model.buffers())}
    state = memo[id(optimizer.state)] = defaultdict[Any, Any](dict)
    for k, group in enumerate(optimizer.param_groups):
        for j, original in enumerate(group["params"]):
            tried = memo[id(original)] = parameters.get((k, j), nn.Parameter(_corner(original)))
            tried.__dict__.update({key: _like(value, original, tried) for key, value in vars(original).items()})
            if original in optimizer.state:
                of_state = optimizer.state[original]
                state[tried] = {key: _like(value, original, tried) for key, value in of_state.items()}
    trial: Any = copied_optimizer(optimizer, memo)
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for k, group in enumerate(trial.param_groups):
        _speed_up(group)
        keep(group, sorted(j for of, j in parameters if of == k))
    set_training(trial)
    return trial


def copied_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a copy of an optimizer, without attributes that only replace methods of its class."""
    made: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    made.__dict__.update(copy.deepcopy({k: v for k, v in vars(optimizer).items() if k not in OVERRIDDEN}, memo))
    return made


def set_training(optimizer: Any) -> None:
    """Call the optimizer's `train` method, if it has one: schedule-free optimizers require this call before a step."""
    if callable(train := getattr(optimizer, "train", None)):
        train()


def _speed_up(group: dict[str, Any]) -> None:
    """Replace a learning rate near 0, at which updates cannot be compared. A warm-up may begin with a learning rate of
    0."""
    rate = group.get("lr")
    if isinstance(rate, Tensor | int | float) and torch.as_tensor(abs(rate)).max() < SLOWEST:
        group["lr"] = 0 * rate + USUAL_RATE


def _like(value: Any, original: nn.Parameter, tried: nn.Parameter) -> Any:
    """Convert a state value or attribute of the parameter `original` for the parameter `tried`. A tensor with the shape
    of `original` is replaced with ones in the shape of `tried`, which may be any slice of `original`."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value) if isinstance(value, list | dict) else value
    return torch.ones_like(tried, dtype=value.dtype) if value.shape == original.shape else _corner(value)
