"""Coupling: detects whether the training loop changes a parameter using a value computed from several parameters.

Examples are a radius computed from the norm of all gradients, a projection, a quantile, and noise that one generator
produces for several parameters in turn. With several stages, each rank computes such a value from the parameters of one
stage only. Clamping, decaying or averaging each parameter separately is exact. The written values alone do not show
whether the loop combined parameters. So in some updates, torch modes intercept all operators of the loop. The modes
propagate parameter names from weights and gradients to all values computed from them. The modes also watch the steps of
a user's own optimizer, which may begin to combine parameters after its trial (engine/optimizer_trial.py).
"""

import sys
import weakref
from bisect import bisect, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from posixpath import commonpath
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from pipeshard.distributed.collectives import local
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.hosted import stored_grad
from pipeshard.engine.mixed_precision import MasterWeight
from pipeshard.engine.updates import Updates, is_sampled
from pipeshard.ghost import Ghost
from pipeshard.graph.lone import Lone
from pipeshard.graph.operators import COLLECTIVES, SCALAR, draws, mutated, tensors_among
from pipeshard.graph.rng import generator_of
from pipeshard.graph.storage import storage_of
from pipeshard.private import DispatchMode, OpOverload, enter_below, leave_below, modes_entered

OVERWRITING = {torch.ops.aten.copy_, torch.ops.aten.zero_, torch.ops.aten.fill_}
OF_LISTS = "aten::_foreach", "aten::_fused"  # prefixes of operators on lists of tensors
READERS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}


class Stream(NamedTuple):
    """A tag for the random numbers that one generator has produced since it was last seeded."""

    number: int


class Number(NamedTuple):
    """A tag for a Python number that the loop passed to an operator after Python code had read several parameters."""

    value: float


LoopTag = str | Stream | Number  # a str is the name of a parameter
NO_LOOP_TAGS: frozenset[LoopTag] = frozenset()


def eagerly() -> AbstractContextManager[Any]:
    """Context manager in which compiled functions run eagerly. Does nothing if torch's compiler has not been imported:
    in this case, no function is compiled, and the import would take seconds."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class Coupling:
    """Watches the training loop between its calls to pipeshard, in the first updates of a model and in updates whose
    number is a power of two. Without an optimizer, calls to pipeshard are counted instead of updates. Tags are kept per
    storage, as in a trace (graph/taint.py). If a storage contains several watched tensors, each tensor has its own
    tags. The watch ends when the model is deleted."""

    def __init__(self, weights: Mapping[str, MasterWeight], names: Mapping[Any, str], updates: Updates) -> None:
        self._weights, self._names, self._updates, self._grid = weights, names, updates, updates.grid
        self._starts: dict[int, list[int]] = {}  # by storage: the offsets of the watched tensors in it
        self._tags: dict[tuple[int, int], tuple[StorageWeakRef, frozenset[LoopTag]]] = {}
        self._most = 0  # number of tags above which tags of freed storages are dropped
        self._elsewhere = frozenset[str]()  # parameters that only other ranks train
        self._held = frozenset[str]()
        self._read, self._has_read = set[str](), False  # parameters that Python read; whether the loop missed others
        self._streams: dict[int, int] = {}  # by id of the generator: the number of its Stream
        self._drawn = 0
        self._modes = Operators(self), PythonReads(self)
        self._stepping, self._within_step = "", ExitStack()  # the watched step: its optimizer's class; its contexts
        self._excuse: Callable[[], object] | None = None  # called instead of a report if the step combines parameters
        self.is_watching, self._calls = False, 0
        self._called = 0  # number of calls to pipeshard that have returned

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager for a call to pipeshard. On entry, checks the values that the loop has written. On exit,
        resumes watching the loop. No model watches the operators that the call runs, since they are not operators of
        the loop."""
        self.end()
        self._calls += 1
        try:
            with others_suspended():
                yield
        finally:
            self._calls -= 1
        if self._calls == 0:
            self.begin()
            self._called += 1

    def begin(self) -> None:
        """Start watching the loop if this update is one of the watched updates, and some parameters are trained only on
        other ranks."""
        self._begin(self._updates.count if self._updates.in_use() else self._called)

    def begin_step(self, optimizer: str, update: int, excuse: Callable[[], object] | None) -> None:
        """As `begin`, but for step number `update` of an optimizer. `optimizer` is the name of the optimizer's class.
        If the step combines parameters, `end` calls `excuse` and reports nothing. If `excuse` is None, `end` reports
        the step."""
        self._begin(update)
        if self.is_watching:
            self._stepping, self._excuse = optimizer, excuse
            self._within_step.enter_context(eagerly())  # torch.compile with fullgraph=True fails in a mode
            self._within_step.enter_context(self._reads_suspended())

    def _begin(self, count: int) -> None:
        if self.is_watching or not is_sampled(count):
            return
        self._held = frozenset(name for name, weight in self._weights.items() if weight.parameter.requires_grad)
        optimized = ((each, w) for each in self._optimizers for w in each.weights.values() if w.parameter.requires_grad)
        of_others = {w.name for each, w in optimized if w.master not in each.names}
        released = (name for p, name in self._names.items() if isinstance(p, Ghost) and p.pipeshard_trainable)
        self._elsewhere = frozenset(of_others.union(released))
        if not self._elsewhere:
            return
        self._starts.clear()
        for tensor in (local(tensor) for _, tensor in self._places() if tensor.layout is torch.strided):
            insort(self._starts.setdefault(storage_of(tensor), []), int(tensor.storage_offset()))
        for name, tensor in self._places():
            self._set(tensor, frozenset({name}))
        self.is_watching = True
        end_of_deleted()
        enter_below(*self._modes)

    @contextmanager
    def _reads_suspended(self) -> Iterator[None]:
        """Context manager in which the loop's earlier reads do not count. On exit, the reads made inside the context
        are forgotten."""
        before = self._read, self._has_read
        self._read, self._has_read = set(), False
        try:
            yield
        finally:
            self._read, self._has_read = before

    def end(self) -> None:
        """Stop watching the loop, or an optimizer's step, and report coupled writes to the Updates."""
        if not self.is_watching:
            return
        self.is_watching = False
        leave_below(*self._modes)
        self._within_step.close()
        stepping, self._stepping = self._stepping, ""
        coupled = self._coupled(f"The step of {stepping}" if stepping else "The training loop")
        numbers = self._numbers()
        if stepping:  # an optimizer may compute a number for each parameter
            numbers = {value: names for value, names in numbers.items() if self._rest(names, least=2)}
            if self._excuse is not None:
                if coupled or numbers:
                    self._excuse()
                return
        self._updates.found = self._updates.found or coupled
        for value, names in numbers.items():
            for name in names:
                self._updates.numbered.setdefault(name, set()).add(value)
        if not stepping:
            self._updates.found = self._updates.found or self._drawn_in(self._values(), "{name}")
            self._updates.drawn = self._updates.drawn or self._drawn_in(self._gradients(), "the gradient of {name}")

    def _coupled(self, writer: str) -> str:
        """The text of a warning if `writer` has combined several parameters in a tensor and missed a parameter of
        another rank, otherwise ""."""
        for name, tensor in self._places():
            names = {tag for tag in self._of([tensor]) if isinstance(tag, str)} | {name}
            if rest := self._rest(names):
                rank, other = self._grid.named(self._grid.mesh.rank), min(names - {name})
                return COUPLED.format(
                    writer=writer, name=name, rank=rank, other=other, rest=rest, clip=self._updates.clip
                )
        return ""

    def _numbers(self) -> dict[float, set[str]]:
        """Map each tagged number (see Number) to the names of the parameters that were changed using this number."""
        numbers: dict[float, set[str]] = {}
        for name, tensor in self._places():
            for tag in self._of([tensor]):
                if isinstance(tag, Number):
                    numbers.setdefault(tag.value, set()).add(name)
        return numbers

    def _drawn_in(self, places: Iterable[tuple[str, Tensor]], changed: str) -> str:
        """The text of a warning (for gradients, of an error) if the loop has written random numbers from one generator
        to several of these tensors, but not to tensors of another rank, otherwise "". `changed` is the text's term for
        a tensor of the parameter {name}, such as "the gradient of {name}"."""
        drawn: dict[Stream, set[str]] = {}
        for name, tensor in places:
            for tag in self._of([tensor]):
                if isinstance(tag, Stream):
                    drawn.setdefault(tag, set()).add(name)
        rank = self._grid.named(self._grid.mesh.rank)
        rests = ((min(names), self._rest(names, least=2)) for names in drawn.values())
        found = ((changed.format(name=name), rest) for name, rest in rests if rest)
        return next((DRAWN.format(changed=tensor, rank=rank, rest=rest) for tensor, rest in found), "")

    @property
    def _optimizers(self) -> Iterable[Any]:
        return self._updates.in_use().values()

    def _places(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter name, tensor) for each parameter, master weight, gradient and optimizer state."""
        yield from self._gradients()
        yield from self._values()

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._weights.items():
            yield from ((name, parameter) for parameter in (weight.parameter, weight.master))
        for optimizer in self._optimizers:
            for parameter, name in optimizer.names.items():
                state = optimizer.optim.state.get(parameter, {})
                kept = tensors_among(value for key, value in state.items() if key != "step")  # "step" is a count
                yield from ((name, tensor) for tensor in kept)

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._weights.items():
            for parameter in (weight.parameter, weight.master):
                if (gradient := stored_grad(parameter)) is not None:
                    yield name, gradient

    def _rest(self, names: set[str], least: int = 3) -> str | None:
        """The name of a parameter on another rank that the loop missed when it combined the parameters `names`, or
        None. If `names` contains all of this rank's trainable parameters (and at least two), any parameter of another
        rank counts as missed. Otherwise, only parameters in the innermost module that contains all of `names` count,
        and `names` must contain at least `least` names."""
        is_all = names >= self._held
        if len(names) < (2 if is_all else least):
            return None
        module = "" if is_all else commonpath(name.replace(".", "/") for name in names).replace("/", ".")
        rest = (name for name in self._elsewhere - names if f"{name}.".startswith(f"{module}." if module else ""))
        return min(rest, default=None)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator of the loop, and propagate tags from the tensors that the operator reads to the tensors that
        it writes."""
        drawn = self._stream(args, kwargs) if draws(func, args, kwargs) else NO_LOOP_TAGS
        result = func(*args, **kwargs)
        self.follow(func, args, kwargs, result, drawn)
        return result

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any, drawn: frozenset[LoopTag] = NO_LOOP_TAGS) -> None:
        """Propagate tags through an operator that has run."""
        inputs = [*args, *kwargs.values()]
        written = [*tensors_among([result]), *mutated(func, args, kwargs)]
        if func.namespace in COLLECTIVES:
            for tensor in tensors_among([*inputs, result]):
                self._set(tensor, NO_LOOP_TAGS)
        elif func.name().startswith(OF_LISTS):
            self._follow_each(func, inputs, result, written)
        else:
            self._follow(func, inputs, written, drawn)

    def follow_unnamed(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """As `follow`, but each nn.Parameter gets a tag when an operator first reads it. Returns whether the operator
        has changed a parameter using a value computed from several parameters."""
        inputs = tensors_among([*args, *kwargs.values()])
        for parameter in (each for each in inputs if isinstance(each, nn.Parameter) and not self._of([each])):
            self._set(parameter, frozenset({str(storage_of(parameter))}))
        self.follow(func, args, kwargs, result)
        written = ((str(storage_of(tensor)), self._of([tensor])) for tensor in mutated(func, args, kwargs))
        return any(own in tags and sum(isinstance(tag, str) for tag in tags) > 1 for own, tags in written)

    def _follow_each(self, func: Any, inputs: Sequence[Any], result: Any, written: Sequence[Tensor]) -> None:
        """Propagate tags through a foreach or fused operator, which combines only tensors at the same index of its
        argument lists."""
        lists = [each for each in (*inputs, result) if isinstance(each, list | tuple) and each]
        others = [each for each in inputs if not isinstance(each, list | tuple)]
        targets = set(map(id, written))
        for row in zip(*lists):
            self._follow(func, [*row, *others], [each for each in row if id(each) in targets], NO_LOOP_TAGS)

    def _follow(self, func: Any, inputs: Sequence[Any], written: Sequence[Tensor], drawn: frozenset[LoopTag]) -> None:
        packet, overwrites = func._overloadpacket, func._overloadpacket in OVERWRITING
        tags = self._of(tensors_among(inputs[overwrites:]))
        if packet in SCALAR:
            self._read_tags(tags)
        numbers = [] if "norm" in func.name() else [_number(each) for each in inputs if self._is_number(each)]
        if self._has_read:
            tags |= set(map(Number, numbers))
        elif numbers and tags:  # the loop has used the values it read, and missed no parameter of another rank
            self._read.clear()
        for tensor in written:
            keeps = not overwrites or _is_part(tensor)
            self._set(tensor, (self._of([tensor]) if keeps else NO_LOOP_TAGS) | tags | drawn)

    def _is_number(self, value: Any) -> bool:
        """Whether `value` is a Python float, or an untagged 0-d floating-point CPU tensor: torch may have converted a
        float into this tensor."""
        if isinstance(value, Tensor):
            is_single = value.ndim == 0 and value.is_floating_point() and value.device.type == "cpu"
            return is_single and not self._of([value])
        return isinstance(value, float)

    def read_by(self, tensors: Iterable[Tensor]) -> None:
        """Record that Python reads these tensors."""
        self._read_tags(self._of(tensors))

    def _read_tags(self, tags: frozenset[LoopTag]) -> None:
        """Record that Python reads a value with these tags."""
        names = {tag for tag in tags if isinstance(tag, str)}
        if not self._has_read and not names <= self._read:
            self._read |= names
            self._has_read = self._rest(self._read) is not None

    def _stream(self, args: Any, kwargs: Any) -> frozenset[LoopTag]:
        """A set that contains the Stream of the random numbers that an operator is about to generate. A generator that
        was just seeded gets a new Stream."""
        tensor = next(tensors_among([args]), None)
        device = torch.device(kwargs.get("device") or (tensor.device if tensor is not None else "cpu"))
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator))
        generator = next(given, None) or generator_of(device)
        fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        if id(generator) not in self._streams or torch.equal(generator.get_state(), fresh.get_state()):
            self._drawn += 1
            self._streams[id(generator)] = self._drawn
        return frozenset({Stream(self._streams[id(generator)])})

    def _of(self, tensors: Iterable[Tensor]) -> frozenset[LoopTag]:
        found = (self._tags.get(self._key(local(tensor))) for tensor in tensors)
        return NO_LOOP_TAGS.union(*(tags for of_storage in found if of_storage is not None for tags in of_storage[1:]))

    def _key(self, tensor: Tensor) -> tuple[int, int]:
        """The key of the watched tensor that `tensor` is or views: its storage, and its position among the watched
        tensors in this storage."""
        storage = storage_of(tensor)
        starts = self._starts.get(storage, ())
        return storage, bisect(starts, tensor.storage_offset()) if len(starts) > 1 else 0

    def _set(self, tensor: Tensor, tags: frozenset[LoopTag]) -> None:
        tensor = local(tensor)
        key = self._key(tensor)
        if not tags:
            self._tags.pop(key, None)
        elif tensor.layout is torch.strided:
            address = self._tags[key][0] if key in self._tags else StorageWeakRef(tensor.untyped_storage())
            self._tags[key] = address, tags
        if len(self._tags) > self._most:
            self._tags = {key: kept for key, kept in self._tags.items() if not kept[0].expired()}
            self._most = 2 * len(self._tags)


def _is_part(tensor: Tensor) -> bool:
    """Whether the tensor's storage also contains elements outside the tensor. False for a sparse tensor, which has no
    storage."""
    return tensor.layout is torch.strided and tensor.numel() * tensor.itemsize < tensor.untyped_storage().nbytes()


def _number(value: Tensor | float) -> float:
    return value.detach().item() if isinstance(value, Tensor) else value


REMEDY = (
    "Sum the value over the ranks with torch.distributed.all_reduce (counting each tied weight once), use "
    "optimizer.get_grad_norm() on every rank, or compute a separate value for each parameter. If an optimizer clips "
    "gradients itself, turn off its clipping and {clip}"
)
COUPLED = (
    "{writer} changed {name} on {rank} with a value that it computed from {name} and {other}, but not from "
    "{rest}, which another rank trains. Each rank computes a different value, so training differs from training in one "
    f"process. {REMEDY}"
)
DRAWN = (
    "The training loop changed {changed} on {rank} with random numbers that one generator produced for several "
    "parameters in turn, but not for {rest}, which another rank trains. The numbers therefore differ from those of a "
    "single process. Use a separate torch.Generator().manual_seed(...) for each parameter, with a seed computed from "
    "the parameter's name and the step"
)


class Watching:
    """Base class of the torch modes that a Coupling enters. A mode has only a weak reference to its Coupling."""

    def __init__(self, coupling: Coupling) -> None:
        super().__init__()
        self._coupling = weakref.ref(coupling)

    @property
    def is_over(self) -> bool:
        """Whether the model has been deleted."""
        return self._coupling() is None

    @property
    def is_active(self) -> bool:
        coupling = self._coupling()
        return coupling is not None and coupling.is_watching


class Operators(Watching, DispatchMode):
    """Passes each operator of the loop to its Coupling. Increments the versions of tensors to which a foreach or fused
    operator writes, since torch does not increment these versions in a mode."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        coupling, kwargs = self._coupling(), kwargs or {}
        if torch.compiler.is_compiling() or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        result = func(*args, **kwargs) if coupling is None else coupling.run(func, args, kwargs)
        if func.name().startswith(OF_LISTS):
            increment_version([tensor for tensor in mutated(func, args, kwargs) if not tensor.is_inference()])
        return result


class PythonReads(Watching, TorchFunctionMode):
    """Reports to its Coupling the tensors that Python reads without torch's dispatcher (tolist, numpy)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        coupling = self._coupling()
        if coupling is not None and func in READERS and not torch.compiler.is_compiling():
            coupling.read_by(args[:1])
        return func(*args, **(kwargs or {}))


class OptimizerTrial(Lone):
    """Dispatch mode of an optimizer's trial: like Lone, it refuses collectives of all ranks.

    Attributes:
        combines: whether the optimizer has changed a parameter using a value computed from several parameters. A
        Coupling would report each watched step of such an optimizer, even if the parameters' updates are independent of
        each other (as in a batch of matrices).
    """

    combines = False

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self._tags = Coupling({}, {}, Updates(grid))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(func, OpOverload):
            self.combines |= self._tags.follow_unnamed(func, args, kwargs or {}, result)
        return result


@contextmanager
def others_suspended() -> Iterator[None]:
    """Context manager in which no Coupling watches operators. Tags are kept."""
    modes = [mode for mode in modes_entered() if isinstance(mode, Operators | PythonReads)]
    leave_below(*modes)
    try:
        yield
    finally:
        enter_below(*(mode for mode in modes if mode.is_active))


def end_of_deleted() -> None:
    """Exit the modes of deleted models. A finalizer cannot do this: it may run inside an operator, and a mode must not
    be exited there. Until this call, the modes of a deleted model run every operator unchanged."""
    leave_below(*(mode for mode in modes_entered() if isinstance(mode, Watching) and mode.is_over))
