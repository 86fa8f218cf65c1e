"""Tracer: runs a model's glue with placeholders for its units, and tracks the dependencies between values.

torch.fx and torch.export need a graph of the whole model. Much of transformers' code has no such graph: it reads values
in Python, changes objects, and calls libraries. A pipeline needs only the dependencies between units. So the model's
own forward runs on a batch, each unit call returns zeros of the shapes of its kind's results, and a Taint tracks these.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.overrides import TorchFunctionMode

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import WHOLE_TENSOR, Criterion, sum_and_count
from pipeshard.batch.tree import flatten_with_names
from pipeshard.errors import PipeshardError, TraceError, explained, summary
from pipeshard.garbage import collector_paused
from pipeshard.ghost import with_released
from pipeshard.graph.dataflow import Call, Dataflow, Reads
from pipeshard.graph.foreign import refuse_foreign
from pipeshard.graph.forward_error import forward_error
from pipeshard.graph.kinds import CallKind, Kinds, UnitCall, device_of_glue
from pipeshard.graph.meter import Meter
from pipeshard.graph.operators import casting, tensors_among
from pipeshard.graph.preserve import as_trained
from pipeshard.graph.question import Recipes
from pipeshard.graph.readers import Readers
from pipeshard.graph.rng import CheckpointSpans, Randomness, no_draw, python_state
from pipeshard.graph.shapes import Axes, TensorSpec, placeholder
from pipeshard.graph.snapshot import Snapshot
from pipeshard.graph.taint import Decision, Hidden, Input, Kept, Tag, Taint, Used, Value
from pipeshard.graph.unit_outputs import answer, opened
from pipeshard.graph.units import CutPoint, check_call, find_units, handled, modules_apart
from pipeshard.private import tree_flatten, tree_tensors
from pipeshard.replaced import replaced

SMALL = 4  # the maximum number of elements per sample of an input that may contain sizes (of images, ...)


class _SeenOutside(Exception):
    """Raised if glue or a unit uses a tensor that escaped an earlier unit call untracked. Every call must then be
    visited, even a call of a known kind."""


class Tracer:
    """Runs the glue of one model, and caches the kinds of its units between runs. Units that do not run on meta are
    visited on `device` (default: the model's). `meter` observes every run. `draw(2 * k)` seeds the random numbers of
    the glue before call k, as stages do (see Randomness).

    Attributes:
        reset: called before every run.
        listen: called with (call number, False) before each unit call, with (call number, True) after it, and with
            (None, False) at the end of the forward.
        kept: for the tag of each place, the tensors that an earlier forward left at this place.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion | None,
        sample: Batch,
        meter: Meter | None = None,
        cuts: Sequence[str] = (),
        device: torch.device | None = None,
        lent: Mapping[str, Mapping[str, Tensor]] | None = None,
        draw: Callable[[int], object] = no_draw,
    ) -> None:
        self.model, self.criterion, self.meter, self.draw = model, criterion, meter, draw
        self.units = find_units(model, cuts)
        self.device = device_of_glue(model, sample)
        self.kinds = Kinds(self.units, self.device, device or self.device, meter, lent)
        self.apart = {id(module): name for name, module in modules_apart(model, self.units)}
        self.python_random = self.counts_results = False
        self.reset: Callable[[], None] = lambda: None
        self.listen: Callable[[int | None, bool], None] = lambda call, is_through: None
        self.kept: Mapping[Kept, Sequence[Tensor]] = {}

    @collector_paused()
    def run(self, batch: Batch, real: Batch | None = None) -> Dataflow:
        """Run the glue on `batch`, and return the Dataflow. The Dataflow has shapes for the sizes of `batch`, but no
        slopes. With `real`, a bool that glue computes from the batch is computed from `real` instead, if possible."""
        batch = batch.to(self.device)
        try:
            return self._run(batch, real)
        except _SeenOutside:
            self.kinds.reuse = False
            return self._run(batch, real)

    def _run(self, batch: Batch, real: Batch | None) -> Dataflow:
        self.reset()
        batch = batch.copied(batch.paths)  # glue may write to the tensors
        self.taint = Taint(self.device, Recipes(self.device, batch, real))
        self.taint.modules, self.taint.rows = self.apart, batch.rows
        self.calls: list[Call] = []
        self.groups = CheckpointSpans()
        self.readers = Readers(self.units, self.model, self.criterion)
        self.rows = batch.rows
        self._mark_inputs(batch)
        with (
            as_trained(self.model),
            Randomness(self.device).step(0, 0),
            handled(self.units, self._answer),
            self.meter.running(self.taint) if self.meter else nullcontext(),
            self.taint,
            Reading(self.taint),
            noting_functions(self.taint) as sealed,
            self.readers.noting(),
        ):
            self.draw(0)
            state, self.seed = python_state(), torch.initial_seed()
            output = self._forward(batch)
            with self.readers.outside_glue():
                self.listen(None, False)
            of_forward = dict(self.taint.decisions)
            self.taint.in_criterion = self.criterion is not None
            loss = self._loss(output, batch)
            self._refuse_foreign(loss)
            if self.meter:
                self.meter.loss = loss
            self.python_random |= python_state() != state  # a visit may use `random` or numpy, too
        return self._dataflow(output, loss, batch, sealed, of_forward)

    def _mark_inputs(self, batch: Batch) -> None:
        for name, parameter in with_released(self.model.named_parameters()):  # parameters may share memory
            self.taint.mark(parameter, self.taint.of([parameter]) | {Used(name)})
        for path, leaf in batch.tensors.items():
            self.taint.mark(leaf, self.taint.of([leaf]) | {Input(path)})
        for tag, tensors in self.kept.items():
            for tensor in tensors:
                self.taint.mark(tensor, frozenset({tag}))

    def _forward(self, batch: Batch) -> Any:
        try:
            return batch.call(self.model)
        except _SeenOutside:
            raise
        except Exception as error:  # of any type: raised by the model's code
            is_packed = "PackedSequence" in str([call.parts for call in self.calls])
            if isinstance(error, TraceError) and not is_packed:
                raise
            last_unit = self.calls[-1].unit if self.calls else ""
            raise forward_error(self.model, batch, last_unit, is_packed, error) from error

    def _loss(self, output: Any, batch: Batch) -> Tensor | None:
        with explained(
            lambda error: TraceError(
                f"tracing the criterion failed: {summary(error)}. pipeshard called criterion(output, batch) with a "
                f"batch of size {batch.rows} and the output of {type(self.model).__name__} for this batch. "
                f"{WHOLE_TENSOR}"
            ),
            but=(PipeshardError,),
        ):
            loss, count = sum_and_count(output, self.criterion, batch)
        self.counts_results = isinstance(count, Tensor) and bool(self._use([count]).values)
        self.taint.recipes.ask_count(count, self._is_of_criterion)
        return loss if loss is None or count is None else loss / count

    def _is_of_criterion(self, tensor: Tensor) -> bool:
        """Whether this tensor is at a place of the criterion and is not a parameter. Flags compares such tensors."""
        own = Snapshot({"": self.criterion}, without=(self.model,)).tensors
        return not isinstance(tensor, nn.Parameter) and any(tensor is held for *_, held, _ in own)

    def _refuse_foreign(self, loss: Tensor | None) -> None:
        """Raise ConfigurationError if the criterion trains tensors outside the model. Every rank traces the criterion,
        so every rank raises the error."""
        if loss is not None and self.criterion is not None:
            refuse_foreign(loss, list(self.model.parameters()), self.taint.is_made, self.criterion)

    def _dataflow(
        self, output: Any, loss: Tensor | None, batch: Batch, sealed: Sequence[int], of_forward: Mapping[Decision, int]
    ) -> Dataflow:
        """The Dataflow of this run. `sealed` are the unit calls inside custom autograd functions, and `of_forward` are
        the decisions that were made before the criterion was called."""
        taint, rewritten, through = self.taint, self.taint.recipes.rewritten, len(self.calls)
        taint.use([loss])
        late = self._use([], taint.decided.get(through, frozenset()))  # read by decisions after the last call
        named, _ = flatten_with_names(output)
        tensors = [(name, leaf) for name, leaf in named if isinstance(leaf, Tensor)]
        taint.read_shape(leaf for _, leaf in tensors)
        others = [(name, leaf) for name, leaf in named if not isinstance(leaf, Tensor)]
        outputs = tuple((name, self._use([leaf]).joined(late), TensorSpec.of(leaf)) for name, leaf in tensors)
        used = None if loss is None else self._use([loss]).joined(late)
        if used is not None:  # forbids cuts after the first of these calls
            used = replace(used, hidden=used.hidden | frozenset(sealed[:1]))
        small = {path for path, leaf in batch.tensors.items() if leaf.numel() <= SMALL * batch.rows}
        shaping = taint.shaping | taint.read_between
        watched = frozenset(shaping | (small & (taint.seen | rewritten)) | batch.entries.keys())
        return Dataflow(
            calls=tuple(self.calls),
            loss=used,
            outputs=outputs,
            written=frozenset(taint.written),
            decisions=tuple(decision for decision, calls in taint.decisions.items() if calls < through),
            has_branches=bool(taint.decided.get(through)),
            deciders=frozenset(taint.deciders),
            differentiated=frozenset() if loss is None else self.taint.reached(loss),
            late_decisions=tuple(decision for decision, calls in of_forward.items() if calls == through),
            consulted=frozenset(taint.consulted | rewritten),
            watched=watched,
            axes=Axes((), (), (), ()),
            glue_random=taint.drawn or self.python_random or bool(self.groups.spans),  # seeds identify repeats
            python_random=self.python_random,
            tail=taint.of_glue,
            touched=frozenset(taint.touched),
            questions=tuple(asked for asked in taint.recipes.questions if asked.is_count or not asked.paths <= watched),
            hooks=taint.hooks,
            rewritten=rewritten,
            together=tuple(self.groups.spans),
            valued=frozenset(self.kinds.valued),
            counts_results=self.counts_results,
            observed=tuple(self.readers.observed(self.calls, self.kinds.settings)),
            numbers=tuple(self.readers.numbers(self.kinds.valued, self.kinds.settings)),
            opaque=tuple((name, type(leaf).__name__) for name, leaf in others if tree_tensors(opened(leaf))),
        )

    def _answer(self, unit: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record one call of a unit, and return placeholders for its result."""
        if self.taint.inside is not None:  # a call by another unit belongs to that unit
            return original(*args, **kwargs)
        with self.readers.outside_glue():
            return self._answered(unit, original, args, kwargs)

    def _answered(self, unit: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        taint = self.taint
        index = len(self.calls)
        self._refuse_seed(unit)
        self.listen(index, False)
        self.groups.note(index)
        is_cut = isinstance(self.units[unit], CutPoint)
        if is_cut:
            check_call(unit, args, self.calls, self.rows)
        leaves, tree = tree_flatten((args, kwargs))
        taint.read_shape(leaves)
        taint.use(leaves)
        self._use(leaves)
        kind = self.kinds.of(UnitCall(unit, self.units[unit], original, leaves, tree), taint)
        self.draw(2 * (index + 1))
        self.seed = torch.initial_seed()
        reads = self._use(leaves, kind.met)
        for position in kind.written:
            taint.write(leaves[position], frozenset({Hidden(index)}))  # later reads depend on this call
        self.calls.append(
            Call(
                unit=unit,
                reads=reads,
                differentiated=self._differentiated(kind, leaves),
                parts=kind.parts,
                leaves=kind.leaves,
                flops=kind.flops + taint.of_glue,
                elements=kind.elements,
                writes=bool(kind.written),
                is_cut=is_cut,
            )
        )
        self.readers.note_call(index, kind, self.kinds.settings[unit])
        taint.calls, taint.of_glue = index + 1, 0
        result = [self._stand_in(leaf, Value(index, position)) for position, leaf in enumerate(kind.leaves)]
        if self.meter and kind.visit:
            self.meter.add(kind.visit, leaves, tree, result)
        pairs = [(result[k], leaves[n]) for k, n in kind.shares] + [(result[k], result[n]) for k, n in kind.twins]
        for one, other in pairs:
            taint.alias(one, other, frozenset({Hidden(index)}))
        if any(unpack_dual(tensor).tangent is not None for tensor in tensors_among(leaves)):
            taint.decide(frozenset({Value(index, 0)}), is_for_all=True)  # tangents are not sent to other stages
            result = [make_dual(x, torch.zeros_like(x)) if _is_float(x) else x for x in result]
        answered = answer(self.units[unit], kind.parts, result, (args, kwargs))
        self.listen(index, True)
        return answered

    def _refuse_seed(self, unit: str) -> None:
        """Raise TraceError if the forward has seeded torch, and calls this unit before using random numbers: stages
        reseed torch in and after each unit."""
        seed = torch.initial_seed()
        if seed != self.seed and torch.equal(torch.Generator().manual_seed(seed).get_state(), torch.get_rng_state()):
            raise TraceError(
                f"{type(self.model).__name__} seeds torch in its forward (torch.manual_seed), and calls unit {unit} "
                "before generating random numbers. Stages reseed torch in and after each unit, so the model's seed "
                "would be lost: use your own torch.Generator, seed torch in the unit, or generate the numbers before "
                "the unit"
            )

    def _use(self, tensors: Sequence[Any], others: frozenset[Tag] = frozenset()) -> Reads:
        """The Reads of `tensors` and of the tags `others`. Raises _SeenOutside if one of the tags is Hidden while known
        kinds are reused."""
        use = Reads.of(self.taint.of(tensors) | others)
        if use.hidden and self.kinds.reuse:
            raise _SeenOutside
        return use

    def _differentiated(self, kind: CallKind, leaves: Sequence[Any]) -> tuple[frozenset[Value], ...]:
        """For each leaf of a call's outputs, the values that receive a gradient if the leaf receives one."""
        if not torch.is_grad_enabled():  # the call may be in an autograd function, whose backward may reach all values
            trained = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            every = Reads.of(kind.met | self.taint.of(trained)).values
            return (every,) * len(kind.leaves)
        inputs = {k: self.taint.reached(leaves[k]) for positions in kind.reached for k in positions}
        return tuple(
            met.union(*(inputs[k] for k in positions))
            for met, positions in zip(kind.reached_aside, kind.reached, strict=True)
        )

    def _stand_in(self, leaf: Any, value: Value) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        tensor = placeholder(leaf, self.device)
        self.taint.mark(tensor, frozenset({value}), home=value)
        return tensor


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


class Reading(TorchFunctionMode):
    """Mode that notifies a Taint of tensor uses that bypass the dispatcher.

    Four uses are reported as decisions:

    - reading the values or the address of a tensor (`tolist`, `data_ptr`, ...)
    - splitting at the positions in a tensor
    - converting a list with tensors to a tensor or an index
    - differentiating unit results in glue, since each stage has only a part of the graph of these results (in a trace,
      these gradients are zeros)

    Range checks of `one_hot` are not decisions. Hooks on gradients and reads of sizes that depend on values of the
    batch are also reported. Raises RuntimeError if autocast would cast inside a unit on meta, since autocast does not
    cast meta tensors. Reading a meta tensor's address (0) also raises RuntimeError, since a kernel would access memory
    at this address.
    """

    READERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr)
    BUILDERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
    SIZES: tuple[Any, ...] = (Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel)
    SIZES += (Tensor.__iter__, Tensor.__repr__, Tensor.is_same_size, torch.is_same_size)
    SIZES += tuple(getattr(Tensor, name).__get__ for name in ("shape", "nbytes"))
    SPLITTERS = (Tensor.tensor_split, torch.tensor_split)
    INDEXERS = (Tensor.__getitem__, Tensor.__setitem__)
    LISTENERS = (Tensor.register_hook, Tensor.retain_grad)
    DIFFERENTIATORS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)

    def __init__(self, taint: Taint) -> None:
        super().__init__()
        self.taint = taint

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.LISTENERS:
            self.taint.hook(args[0])
        elif func in self.DIFFERENTIATORS and self._are_of_units(args[0]):
            return self._zeros(args[0], args[1] if len(args) > 1 else (), (kwargs or {})["create_graph"])
        elif func is Tensor.data_ptr and args[0].is_meta:
            raise RuntimeError("the forward reads the address (data_ptr) of a meta tensor, which has no memory")
        elif func in self.READERS:
            self.taint.read_values(args[0], is_by_address=func is Tensor.data_ptr)
        elif self.taint.shapes and func in self.SIZES:
            self.taint.read_shape(args)
        elif func in self.SPLITTERS:
            self.taint.read_positions((*args, *(kwargs or {}).values())[1:])
        elif func in self.BUILDERS or func in self.INDEXERS:
            outer = args[1] if func in self.INDEXERS else args
            items = outer if isinstance(outer, tuple) else [outer]
            nested = [item for item in items if isinstance(item, list | tuple)]
            self.taint.decide(self.taint.of(tensors_among(nested)), shaping=True)
        elif self.taint.inside is not None and casting() and any(t.is_meta for t in tensors_among(args)):
            raise RuntimeError("torch.autocast does not cast meta tensors")
        classes = (*args, *(kwargs or {}).values())[1:] if func is nn.functional.one_hot else ()
        self.taint.is_checking = classes > (0,)  # otherwise, values determine num_classes
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.taint.is_checking = False

    def _are_of_units(self, outputs: Any) -> bool:
        """Whether glue differentiates tensors that depend on unit results. If so, records a decision. Returns False
        inside a unit."""
        tags = frozenset(tag for tag in self.taint.of(tensors_among([outputs])) if isinstance(tag, Value | Hidden))
        self.taint.decide(tags, is_for_all=True)
        return bool(tags) and self.taint.inside is None

    def _zeros(self, outputs: Any, inputs: Sequence[Tensor], create_graph: bool) -> tuple[Tensor, ...]:
        gradients = tuple(torch.zeros_like(tensor, requires_grad=bool(create_graph)) for tensor in inputs)
        for gradient in gradients:
            self.taint.mark(gradient, self.taint.of(tensors_among([outputs, *inputs])))
        return gradients


@contextmanager
def noting_functions(taint: Taint) -> Iterator[list[int]]:
    """Context manager that yields the list of unit calls made inside custom autograd functions, such as reformer's
    reversible layers. The backward of such a function may call these units again in a different way."""
    sealed: list[int] = []
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        first = taint.calls
        result = original.__get__(None, cls)(*args, **kwargs)
        sealed.extend(range(first, taint.calls))
        return result

    with replaced(torch.autograd.Function, apply=classmethod(apply)):
        yield sealed
