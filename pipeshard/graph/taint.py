"""Taint: the values from which each tensor was computed, recorded for each storage.

Autograd's graph shows the dependencies of floating-point results. The graph does not show the dependencies of integers
and masks, dependencies through writes under no_grad or through `data`, or the values on which Python has branched. So a
dispatch mode propagates tags from the inputs of each operator to the outputs. Tags belong to storages, so a view has
the tags of its base.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from pipeshard.errors import TraceError
from pipeshard.graph.call_stack import running_modules, where
from pipeshard.graph.indices import check_indices
from pipeshard.graph.nodes import nodes_from, reached
from pipeshard.graph.operators import (
    SCALAR,
    SHAPED,
    aten,
    deciding_inputs,
    draws,
    flops,
    mutated,
    run_by_shape,
    tensors_among,
)
from pipeshard.graph.question import Recipes
from pipeshard.graph.shapes import ANCHOR
from pipeshard.graph.storage import address_of, storage_of
from pipeshard.private import DispatchMode


class Value(NamedTuple):
    """The tensor at leaf number `leaf` of the outputs of unit call `call`."""

    call: int
    leaf: int


@dataclass(frozen=True, slots=True)
class Used:
    """A parameter that glue reads directly."""

    name: str


@dataclass(frozen=True, slots=True)
class Input:
    """A leaf of the batch."""

    path: str


@dataclass(frozen=True, slots=True)
class Hidden:
    """A value computed inside unit call `call` that escaped the unit untracked."""

    call: int


@dataclass(frozen=True, slots=True)
class Kept:
    """State that an earlier forward left at the place `name`. If only one unit call writes to the place, `writer` is
    the number of this call."""

    name: str
    writer: int | None = None


Tag = Value | Used | Input | Hidden | Kept
NO_TAGS: frozenset[Tag] = frozenset()
FOR_ALL = -1


class Hook(NamedTuple):
    """A gradient hook that glue registers at `line`, after `calls` unit calls. `home` is the Value on which the hook is
    registered, or None if the hook is registered on a tensor that glue computed. `users` are the unit calls whose
    backward passes add to the tensor's gradient. The number of all calls stands for the loss."""

    calls: int
    home: Value | None
    line: str
    users: frozenset[int]


class Decision(NamedTuple):
    """A branch of glue at `line`. `parameters` are the names of the parameters on which the branch depends, or () if
    the branch depends on unit results."""

    line: str
    parameters: tuple[str, ...] = ()


class Taint(DispatchMode):
    """Mode that propagates tags through every operator, including operators on integers, views and in-place writes.

    Outside units (`inside is None`), a result has the tags of the operator's inputs. Inside unit call c, every result
    is tagged Hidden(c), the tags of all inputs are collected in `met`, and work is counted in `flops` and `elements`.
    In glue, an operator with a meta tensor as input (a parameter of a model on meta) runs on shapes only. Such an
    operator returns zeros, or a meta tensor if all inputs are on meta.
    """

    def __init__(self, device: torch.device, recipes: Recipes | None = None) -> None:
        """Pass `recipes` to record how glue's questions are computed from the leaves of a batch."""
        super().__init__()
        self.device = device
        self.recipes = recipes or Recipes(device)
        self.calls = 0  # the number of unit calls so far
        self.inside: int | None = None
        self.tags: dict[int, frozenset[Tag]] = {}
        self.made = {storage_of(ANCHOR)}  # storages that operators, or the trace itself, have allocated
        self.homes: dict[int, Value] = {}  # storages that contain a Value itself, not a computed result
        self.nodes: dict[Node, frozenset[Value]] = {}  # by the grad_fn of a value or of its copy
        self.written: set[Value] = set()  # values that were changed in place
        self.stores: set[int] = set()  # storages to which the latest unit call writes
        self.decisions: dict[Decision, int] = {}  # the number of calls before the first such decision, or FOR_ALL
        self.modules: Mapping[int, str] = {}  # the names, by id, of modules that could be units
        self.deciders: set[str] = set()  # the outermost of `modules` that ran at each decision
        self.decided: dict[int, frozenset[Tag]] = {}  # the tags of decisions, by the number of calls before them
        self.consulted: set[str] = set()  # inputs of decisions
        self.seen: set[str] = set()  # inputs in `consulted` that were read other than through a Question
        self.recalled: set[str] = set()  # places with kept tensors on which glue branches
        self.shaping: set[str] = set()  # inputs on whose exact values the Dataflow depends, such as sizes
        self.rows = 0  # the number of samples in the traced batch
        self.lengths: dict[str, int] = {}  # by input: the number of calls before glue first read its lengths
        self.in_criterion = False
        self.shapes: dict[int, frozenset[str]] = {}  # by storage: inputs that determine shapes in the criterion
        self.met: set[Tag] = set()
        self.drawn = False  # whether glue used torch's random numbers
        self.touched: set[Value] = set()  # values that operators of glue received
        self.flops = self.elements = 0
        self.of_glue = 0  # flops of glue's operators on parameters since the last call
        self.is_checking = False
        self._hooked: list[tuple[int, Hook]] = []  # by the number of the tensor's node in autograd's graph
        self._users: dict[int, set[int]] = {}  # for the number of each node of glue, the unit calls that use it
        self.aliases: dict[int, list[tuple[Tensor, frozenset[Tag]]]] = {}
        self._alive: list[Any] = []  # prevents reuse of addresses

    def of(self, tensors: Iterable[Any]) -> frozenset[Tag]:
        """The union of the tags of all tensors among `tensors`. Other objects are ignored."""
        return NO_TAGS.union(*(self.tags.get(storage_of(t), NO_TAGS) for t in tensors if isinstance(t, Tensor)))

    def reached(self, tensor: Tensor) -> frozenset[Value]:
        """The values that receive a gradient if `tensor` receives one."""
        return reached(tensor, self.nodes)

    def mark(self, tensor: Tensor, tags: frozenset[Tag], home: Value | None = None) -> None:
        """Replace the tags of a tensor's storage. `home` is the Value that the storage contains, if any. The Value
        receives the gradient of the tensor."""
        self._alive.append(address_of(tensor))
        self.tags[storage_of(tensor)] = tags
        if home is not None:
            self.homes[storage_of(tensor)] = home
            if tensor.grad_fn is not None:
                self.nodes[tensor.grad_fn] = frozenset({home})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = list(tensors_among((*args, *kwargs.values())))
        tags = self.of(inputs) if func._overloadpacket not in SHAPED else NO_TAGS
        check_indices(func, args, kwargs, inputs)
        run = self._run_in_glue if self.inside is None else self._run_in_unit
        result, tags = run(func, args, kwargs, inputs, tags)
        if self.in_criterion and self.inside is None:
            self._note_shapes(func, args, inputs, result)
        for output in tensors_among((result,)):
            self._note_made(func, output, inputs)
            if self.inside is None or func._schema.is_mutable or not self.of([output]):  # a view has known values
                self._add(output, tags)
        if func._schema.is_mutable:
            for target in mutated(func, args, kwargs):
                self.write(target, tags)
        return result

    def note_made(self, tensors: Iterable[Tensor]) -> None:
        """Record tensors that the trace itself has created."""
        for tensor in tensors:
            self._alive.append(address_of(tensor))
            self.made.add(storage_of(tensor))

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed in this run, or has tags, as leaves of the batch and parameters do."""
        return storage_of(tensor) in self.made or bool(self.of([tensor]))

    def _note_made(self, func: Any, output: Tensor, inputs: list[Tensor]) -> None:
        key = storage_of(output)
        if key in self.tags:
            return
        if func._overloadpacket is aten.lift_fresh or all(storage_of(tensor) != key for tensor in inputs):
            self.made.add(key)

    def _run_in_glue(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], tags: frozenset[Tag]
    ) -> tuple[Any, frozenset[Tag]]:
        """Run an operator of glue, and return the result and its tags."""
        if any(tensor.is_nested for tensor in inputs):
            raise TraceError(
                f"{where()} uses a nested tensor between layers, but other stages do not have the row lengths of this "
                "tensor. Pass padded tensors between layers, and create nested tensors inside the forward of each layer"
            )
        packet, is_of_batch = func._overloadpacket, bool(tags) and all(isinstance(tag, Input) for tag in tags)
        if tags and (deciding := self.of(deciding_inputs(func, args))):
            is_shape = packet not in SCALAR
            is_noted = self.in_criterion if is_shape else is_of_batch
            self.decide(deciding, shaping=is_shape and not is_noted, is_asked=is_noted)
        is_drawn = draws(func, args, kwargs)
        self.drawn |= is_drawn
        self.touched |= {tag for tag in tags if isinstance(tag, Value)}
        result = self._without_meta(func, args, kwargs, inputs)
        if is_of_batch and packet in SCALAR and not self.is_checking:
            paths = frozenset(tag.path for tag in tags)  # type: ignore[union-attr]
            question = self.recipes.ask(func, args, kwargs, result, paths)
            self.shaping |= paths if question.steps is None else set()
            return question.answer, tags
        if packet in SCALAR and not self.is_checking:
            self.recipes.note_read(inputs)
        if isinstance(result, Tensor) and not func._schema.is_mutable:
            if is_of_batch:
                self.recipes.note(func, args, kwargs, result)
            elif not tags and not is_drawn:
                self.recipes.note_made(inputs, result)
        if any(isinstance(tag, Used) for tag in tags):
            self.of_glue += flops(func, args, kwargs, result)
        return result, tags

    def _run_in_unit(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], tags: frozenset[Tag]
    ) -> tuple[Any, frozenset[Tag]]:
        assert self.inside is not None
        if kwargs.get("generator") is not None and any(t.is_meta for t in inputs):
            raise RuntimeError("on meta, a generator produces no random numbers")  # the generator's state must change
        result, hidden = func(*args, **kwargs), frozenset({Hidden(self.inside)})
        self.met |= tags - hidden
        self.flops += flops(func, args, kwargs, result)
        self.elements += sum(output.numel() for output in tensors_among((result,)))
        return result, hidden

    def _without_meta(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """Run an operator of glue. If an input is on meta, the result is zeros. If all inputs are on meta and the
        target device is meta, the result stays on meta."""
        device = kwargs.get("device")
        moved = device is not None and torch.device(device).type == "meta"  # the target is a parameter's device
        if not any(t.is_meta for t in inputs):
            return func(*args, **kwargs | {"device": self.device} if moved else kwargs)
        stays = all(t.is_meta for t in inputs) and (device is None or moved)  # uses parameters and buffers only
        return run_by_shape(func, args, kwargs, torch.device("meta") if stays else self.device)

    def decide(
        self, tags: frozenset[Tag], shaping: bool = False, is_asked: bool = False, is_for_all: bool = False
    ) -> None:
        """Record a decision: a Python branch depends on values with these tags. With `shaping`, a shape depends on them
        instead. Decisions inside a unit are ignored. `is_asked` means that a Question or `shapes` records the decision.
        `is_for_all` means that no stage, not even the last, can make the decision."""
        if self.inside is not None or self.is_checking or not tags:
            return
        inputs = {tag.path for tag in tags if isinstance(tag, Input)}
        self.consulted |= inputs
        self.seen |= set() if is_asked else inputs
        self.shaping |= inputs if shaping else set()
        self.recalled |= {tag.name for tag in tags if isinstance(tag, Kept)}
        if any(not isinstance(tag, Input | Kept) for tag in tags):
            decision, calls = Decision(where(), _only_parameters(tags)), FOR_ALL if is_for_all else self.calls
            self.decisions[decision] = min(self.decisions.get(decision, calls), calls)
            self.deciders |= set(running_modules(self.modules)[-1:])
            self.decided[calls] = self.decided.get(calls, NO_TAGS) | tags

    def _note_shapes(self, func: Any, args: Any, inputs: Iterable[Tensor], result: Any) -> None:
        """Record the inputs that determine the shape of an operator's result in the criterion.

        The last stage runs the criterion itself, so such a shape matters only if Python code or a unit reads it.
        """
        paths = frozenset[str]().union(*(self.shapes.get(storage_of(tensor), ()) for tensor in inputs))
        if func._overloadpacket not in SCALAR:
            paths |= {tag.path for tag in self.of(deciding_inputs(func, args)) if isinstance(tag, Input)}
        if not paths:
            return
        for output in tensors_among((result,)):
            if output.ndim:
                self.shapes[storage_of(output)] = self.shapes.get(storage_of(output), frozenset()) | paths
        if isinstance(result, list):  # Python code reads its length
            self.read_shape(result)

    def read_values(self, tensor: Tensor, is_by_address: bool = False) -> None:
        """Record that Python code reads a tensor's values without a Question. With `is_by_address`, the code reads the
        tensor's address instead."""
        tags = self.of([tensor])
        self.decide(tags)
        self.read_shape([tensor])
        self.recipes.note_read([tensor])
        is_length = tensor.ndim < 2 and tensor.numel() in (1, self.rows) and not is_by_address
        if is_length and self.inside is None and all(isinstance(tag, Input) for tag in tags):
            for tag in tags:
                self.lengths.setdefault(tag.path, self.calls)  # type: ignore[union-attr]

    @property
    def read_between(self) -> set[str]:
        """The inputs from which glue computed lengths, if glue read these lengths before a unit call: such lengths may
        determine shapes. A length is one number, or one number per sample."""
        return {path for path, calls in self.lengths.items() if calls < self.calls}

    def read_positions(self, tensors: Iterable[Any]) -> None:
        """Record that an operator splits a tensor at the positions in these tensors, which the operator reads by
        address. Tensors without dimensions are skipped, since the dispatcher sees reads of such tensors."""
        positions = [tensor for tensor in tensors_among(tensors) if tensor.ndim]
        self.decide(self.of(positions), shaping=True)
        self.read_shape(positions)
        self.recipes.note_read(positions)

    def read_shape(self, tensors: Iterable[Any]) -> None:
        """Record that Python code or a unit reads the shapes of these tensors."""
        if self.inside is not None or not self.shapes:
            return
        for tensor in tensors_among(tensors):
            paths = self.shapes.get(storage_of(tensor), frozenset())
            self.seen |= paths
            self.shaping |= paths

    @contextmanager
    def inside_call(self) -> Iterator[set[int]]:
        """Context manager for the next unit call: operators inside the context belong to this call. Yields the set of
        storages to which these operators write."""
        self.inside, self.met, self.flops, self.elements = self.calls, set(), 0, 0
        self.stores = set()
        try:
            yield self.stores
        finally:
            self.inside = None

    def use(self, tensors: Iterable[Any]) -> None:
        """Record that the next unit call, or the loss, uses tensors, on all nodes of glue that then receive gradients.
        A later hook on such a node receives these gradients, too."""
        for node in nodes_from((getattr(tensor, "grad_fn", None) for tensor in tensors), until=self.nodes):
            self._users.setdefault(node._sequence_nr(), set()).add(self.calls)

    def hook(self, tensor: Tensor) -> None:
        """Record that glue observes the gradient of a tensor that glue or a unit has computed."""
        if self.inside is None and tensor.grad_fn is not None:
            hook = Hook(self.calls, self.homes.get(storage_of(tensor)), where(), frozenset())
            self._hooked.append((tensor.grad_fn._sequence_nr(), hook))

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The gradient hooks of glue, with their users so far."""
        return tuple(hook._replace(users=frozenset(self._users.get(node, ()))) for node, hook in self._hooked)

    def write(self, tensor: Tensor, tags: frozenset[Tag]) -> None:
        """Record that a value with these tags is written to a tensor in place."""
        self._add(tensor, tags)
        reached, waiting = {storage_of(tensor)}, [storage_of(tensor)]
        while waiting:
            storage = waiting.pop()
            if self.inside is not None:
                self.stores.add(storage)
            elif storage in self.homes:
                self.written.add(self.homes[storage])
            for other, unseen in self.aliases.get(storage, ()):
                if storage_of(other) not in reached:
                    self._add(other, unseen)
                    reached.add(storage_of(other))
                    waiting.append(storage_of(other))

    def alias(self, one: Tensor, other: Tensor, unseen: frozenset[Tag]) -> None:
        """Record that two tensors share memory in a real run, but not in the trace. From then on, a write to one tensor
        adds the tags `unseen` to the other tensor."""
        for a, b in ((one, other), (other, one)):
            self._alive.append(address_of(a))
            self.aliases.setdefault(storage_of(a), []).append((b, unseen))

    def _add(self, tensor: Tensor, tags: frozenset[Tag]) -> None:
        key = storage_of(tensor)
        if key not in self.tags:
            self._alive.append(address_of(tensor))
        self.tags[key] = self.tags.get(key, NO_TAGS) | tags


def _only_parameters(tags: frozenset[Tag]) -> tuple[str, ...]:
    """The names of the parameters among `tags`, or () if a tag refers to anything that units compute."""
    if any(isinstance(tag, Value | Hidden) for tag in tags):
        return ()
    return tuple(sorted(tag.name for tag in tags if isinstance(tag, Used)))
