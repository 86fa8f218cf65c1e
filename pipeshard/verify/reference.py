"""Reference: an unsplit copy of the user's model, which is called directly and trained on the same microbatches."""

import contextlib
import copy
import functools
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, sum_and_count
from pipeshard.engine.optimizer_trial import copied_optimizer
from pipeshard.engine.step_guard import contents
from pipeshard.errors import PipeshardError, explained, summary
from pipeshard.graph.functions import CALLABLES, Memo, objects_within
from pipeshard.graph.preserve import without_tf32
from pipeshard.graph.rng import Randomness, python_state
from pipeshard.graph.snapshot import Snapshot
from pipeshard.hf import disable_caches
from pipeshard.private import tree_map_only
from pipeshard.split.adapters import begin
from pipeshard.split.initialize import InitWeights, initialize_tensors
from pipeshard.split.materialize import allocate
from pipeshard.split.packed import packed_layers
from pipeshard.split.skeleton import build_layer, skeletons

PACKED_STD = 0.02  # standard deviation of the values for a quantized weight
# Objects without model state, which all copies share: data, files, connections, locks, writers and progress bars.
SHARED = Dataset, DataLoader, dist.ProcessGroup, io.IOBase, type(threading.Lock()), type(threading.RLock()), ModuleType
PACKAGES_OF_SHARED = {"threading", "queue", "_queue", "multiprocessing", "concurrent", "socket", "sqlite3"}
PACKAGES_OF_SHARED |= {"tqdm", "rich", "wandb", "trackio", "tensorboard", "tensorboardX", "datasets"}


class Uncopyable(Exception):
    """A model, criterion or optimizer holds an object that cannot be copied."""


@dataclass
class Copies:
    """A model with its criterion, optimizer and sample, or copies of these. The optimizer trains the parameters of this
    model, and the criterion may read them."""

    model: nn.Module
    criterion: Criterion | None
    optimizer: Optimizer | None
    sample: Batch

    def copy(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> "Copies":
        """Copy all fields to `device`, with floating-point tensors cast to `dtype`.

        Closures (hooks, lambdas) are also copied: otherwise every copy would modify the user's own captured objects.
        Objects without model state are shared, such as the log writer of a trainer whose method is the criterion.
        Raises Uncopyable for other objects that cannot be copied.
        """
        others = torch.OutOfMemoryError, MemoryError, PipeshardError
        with explained(lambda error: Uncopyable(f"deepcopy raised {summary(error)}"), but=others):
            made = self._copied()
        for tensor in made._tensors():
            to = dtype if tensor.is_floating_point() else None
            tensor.data = tensor.data.to(device, to)
        if dtype is not None:
            made.sample = made.sample.map(lambda path, leaf, dim: leaf.to(dtype) if leaf.is_floating_point() else leaf)
        made.sample = made.sample if device is None else made.sample.to(device)
        return made

    def _copied(self) -> "Copies":
        memo = Memo(copies_of_kept(self.model) | self.shared, functions(self.model, self.criterion, self.optimizer))
        model, criterion = copy.deepcopy((self.model, self.criterion), memo)
        for old, new in zip(self.model.parameters(), model.parameters(), strict=True):
            copy_hooks(old, new, memo)
        made = Copies(model, criterion, None, copy.deepcopy(self.sample))
        memo.fill()
        made.optimizer = None if self.optimizer is None else copied_optimizer(self.optimizer, memo)
        return made

    @functools.cached_property
    def shared(self) -> dict[int, Any]:
        """A memo for deepcopy with the objects that all copies share."""
        snapshot = Snapshot({"": self.model, "the criterion": self.criterion, "the optimizer": self.optimizer})
        return {id(one): one for one in snapshot.reached if is_shared(one)}

    def drawn(self, device: torch.device, rule: InitWeights, seed: int) -> "Copies":
        """A copy in which meta tensors are allocated and initialized."""
        made = self.copy()
        for module in skeletons(made.model):
            build_layer(module, seed)
        names = [name for name, parameter in made.model.named_parameters() if parameter.is_meta]
        packed = [layer for name, layer in packed_layers(made.model) if name in names]
        initialize_tensors(made.model, names, allocate(made.model, names, device), rule or True, seed)
        source = torch.Generator(device).manual_seed(seed)
        for layer in packed:
            layer.pack(torch.randn(layer.whole_shape, device=device, generator=source) * PACKED_STD)
        begin(made.model)
        return made

    def foreign(self) -> dict[str, nn.Parameter]:
        """The optimizer's tensors that are not the model's parameters, by generated name, in the order of groups."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        own = set(self.model.parameters())
        foreign = [p for group in groups for p in group["params"] if p not in own]
        return {f"parameter {k} of the optimizer, which is not in the model": p for k, p in enumerate(foreign)}

    @property
    def trains_in_part(self) -> bool:
        """Whether there is an optimizer that does not train all trainable parameters of the model."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        trained = {parameter for group in groups for parameter in group["params"]}
        return bool(trained) and any(p.requires_grad and p not in trained for p in self.model.parameters())

    def trained(self) -> dict[str, nn.Parameter]:
        """The model's parameters, and other tensors that the optimizer trains, by name."""
        return dict(self.model.named_parameters()) | self.foreign()

    def _tensors(self) -> Iterator[Tensor]:
        modules = [self.model, *([self.criterion] if isinstance(self.criterion, nn.Module) else [])]
        for module in modules:
            yield from module.parameters()
            yield from module.buffers()
        yield from self.foreign().values()
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        for state in (state for state in states if isinstance(state, Mapping)):  # a parameter's state
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim)


def is_shared(value: Any) -> bool:
    """Whether copies of a model share this object, because it contains no state of the model."""
    package = type(value).__module__.partition(".")[0]
    is_writer = package in PACKAGES_OF_SHARED or type(value).__module__.startswith("torch.utils.tensorboard")
    return isinstance(value, SHARED) or (is_writer and not isinstance(value, type | nn.Module | threading.local))


def functions(*owners: Any) -> Iterator[Any]:
    """The functions and bound methods in the attributes and hooks of modules, a criterion and an optimizer. Includes
    functions in lists, dicts and partial functions, and functions that other functions capture."""
    found = list(owners)
    for owner in owners:
        for one in owner.modules() if isinstance(owner, nn.Module) else [owner]:
            found += contents(getattr(one, "__dict__", {}))
        if isinstance(owner, nn.Module):
            found += [hook for parameter in owner.parameters() for hook in _hooks(parameter)]
    return objects_within(found, (), CALLABLES)


def copies_of_kept(model: nn.Module) -> dict[int, Any]:
    """A memo for deepcopy with copies of the non-leaf tensors that forwards have left on modules, since deepcopy does
    not support non-leaf tensors."""
    kept = (leaf for module in model.modules() for leaf in contents(vars(module)) if isinstance(leaf, Tensor))
    return {id(tensor): tensor.detach().clone() for tensor in kept if not tensor.is_leaf}


def _hooks(parameter: nn.Parameter) -> list[Callable[..., Any]]:
    later = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [*(parameter._backward_hooks or {}).values(), *(later or {}).values()]


def copy_hooks(old: nn.Parameter, new: nn.Parameter, memo: dict[int, Any]) -> None:
    """Copy the hooks and attributes of a parameter to the parameter's copy, since deepcopy omits both."""
    new.__dict__.update(copy.deepcopy(vars(old), memo))
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(copy.deepcopy(hook, memo))
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(copy.deepcopy(hook, memo))


logger = logging.getLogger("pipeshard")


def generators(device: torch.device) -> tuple[Any, ...]:
    """A value that changes when torch's, Python's or numpy's generator is used."""
    return Randomness(device).state(), python_state()


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Context manager that restores random generators on exit, and computes without TF32. It suppresses warnings and
    log messages (except DEBUG), since boost issues the same warnings and messages."""

    def quiet(record: logging.LogRecord) -> bool:
        return record.levelno < logging.INFO

    logger.addFilter(quiet)
    try:
        with (
            Randomness(device).step(0, 0),
            without_tf32(),
            warnings.catch_warnings(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeFilter(quiet)


@dataclass(frozen=True)
class Weights:
    """The weights of the microbatches' losses or, with `of_sums`, of the sums that a criterion returns as (sum,
    count)."""

    shares: Sequence[float]
    of_sums: bool = False


class NoLoss(Exception):
    """The model has no loss for a batch."""


class Reference:
    """One copy of the model, without interception. If the model uses random numbers, `places` seeds the generators
    before and after the forward of each unit, as every stage does."""

    def __init__(self, own: Copies, criterion: Criterion | None, device: torch.device) -> None:
        self.own, self.model, self.criterion, self.device = own, own.model, criterion, device
        self.places: Randomness | None = None
        disable_caches(self.model)

    def seed_places(self, units: Mapping[str, nn.Module], glue: bool, python: bool) -> None:
        """Make units and, if `glue`, the glue between units use the same random numbers as on the stages."""
        self.places = places = Randomness(self.device)
        places.python = python
        self._calls, self._inside, self._again = 0, False, False
        self._numbers: dict[str, list[int]] = {}

        def placed(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if self._inside:
                    return forward(*args, **kwargs)
                numbers = self._numbers.setdefault(name, [])
                if not self._again:
                    self._calls += 1
                    numbers.append(self._calls)
                number = numbers.pop() if self._again else self._calls  # recomputation runs the last call first
                self._inside = True
                places.at(2 * number - 1)
                try:
                    return forward(*args, **kwargs)
                finally:
                    self._inside = False
                    if glue:
                        places.at(2 * number)

            return run

        for name in units:
            unit: Any = self.model.get_submodule(name)
            unit.forward = placed(name, unit.forward)

    def step(
        self, batches: Sequence[Batch], weights: Weights, at: tuple[int, int], note: Callable[[], None], first: int = 0
    ) -> tuple[Tensor, list[Any]]:
        """Run the forward and the backward of each microbatch in turn. Return the weighted sum of losses, and
        the outputs. `first` is the number of the first microbatch, counted over all replicas."""
        total, outputs = torch.zeros(()), []
        with self.places.step(*at) if self.places is not None else nullcontext():
            for i, (batch, weight) in enumerate(zip(batches, weights.shares, strict=True)):
                if self.places is not None:
                    self._calls, self._again = 0, False
                    self._numbers.clear()
                    self.places.microbatch(first + i)
                    self.places.at(0)
                private = batch.copied(batch.paths)  # the model may write to its batch
                output = private.call(self.model)
                loss, count = sum_and_count(output, self.criterion, private)
                if loss is None:
                    raise NoLoss
                if count is not None and not weights.of_sums:
                    loss = loss / count
                outputs.append(tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), output))
                share = torch.zeros_like(loss.detach())
                self._again = True
                if weight:
                    loss.backward(torch.full_like(loss, weight))
                    share = loss.detach() * weight
                total = share if i == 0 else total + share
                note()
        return total, outputs
