"""Meter: the work of each unit call at a batch's sizes, and the bytes of tensors that autograd saves in the call."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet, finalize

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from pipeshard.errors import TraceError
from pipeshard.graph.operators import SHAPED, aten, flops, run_by_shape
from pipeshard.graph.storage import storage_of
from pipeshard.graph.taint import Hidden, Taint, Value
from pipeshard.private import (
    DisableTorchFunction,
    DispatchMode,
    TreeSpec,
    disable_current_modes,
    tree_leaves,
    tree_tensors,
)
from pipeshard.replaced import replaced


class FusedAttention(TorchFunctionMode):
    """Mode that runs attention on meta tensors as one fused operator. For the backward, this operator saves the inputs,
    the result and one element per row, but no attention scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args and isinstance(args[0], Tensor) and args[0].is_meta:
            return _attention(func, *args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    plain: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    learned = attn_mask is not None and attn_mask.requires_grad
    if learned or query.ndim != 4 or query.shape[-1] != value.shape[-1]:
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    fused = aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


PRODUCTS = {aten.mm, aten.addmm}  # of linear layers: W computes the gradients of their weights
BY_ROWS = {aten.embedding_dense_backward}  # stages accumulate only the rows that were read
NO_WORK = {aten.detach, aten._unsafe_view, aten.lift_fresh}  # their results alias their inputs
RunOperator = Callable[[Any, Any, Any], Any]  # run(operator, args, kwargs) -> the result


def _as_ever(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


class Living(DispatchMode):
    """Mode that counts the bytes of new storages that are alive. When the storage of a tensor in `before` is freed, the
    size of this storage is subtracted. `run` runs each operator. The results of operators in `but` do not count.

    Attributes:
        bytes: the total size of living new storages, minus the total size of freed storages of `before`.
        peak: the maximum of `bytes` so far.
    """

    def __init__(self, before: Iterable[Tensor] = (), run: RunOperator = _as_ever, but: Container[Any] = ()) -> None:
        super().__init__()
        self.run, self.but, self.bytes, self.peak = run, but, 0, 0
        self._known: set[int] = set()
        for tensor in before:
            self._count(tensor)
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage_of(tensor) for tensor in tree_tensors((args, kwargs))}
        result = self.run(func, args, kwargs)
        if func._overloadpacket not in self.but:
            for tensor in tree_tensors(result):
                if storage_of(tensor) not in given:
                    self._count(tensor)
        self.peak = max(self.peak, self.bytes)
        return result

    def _count(self, tensor: Tensor) -> None:
        key = storage_of(tensor)
        if tensor.layout is torch.strided and key not in self._known:
            storage = tensor.untyped_storage()
            self._known.add(key)
            self.bytes += storage.nbytes()
            finalize(storage, self._died, key, storage.nbytes()).atexit = False

    def _died(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


@dataclass(frozen=True)
class Work:
    """The work of one unit call at the traced sizes, and the tensors that autograd saves in this call and in the glue
    between the previous call and this call.

    `flops` and `elements` (the number of computed elements) are counted for one forward. `by_parameter` maps the name
    of each of the unit's parameters to the flops of the operators that read it. If an operator reads several
    parameters, its flops count only for the largest parameter (the weight, not the bias). `kept` contains the size in
    bytes of each tensor that autograd saves for the backward, by key. Parameters and leaves of the batch are omitted.
    The key of a tensor is the `Value` of a unit's result, or another key that is the same for all calls that save the
    tensor. A call's intermediate tensors share one key. `temporary` is a peak during the backward: the maximum of the
    bytes that the backward has allocated (including the gradients of the results) minus the bytes of `kept` that the
    backward has freed. `waiting` is the number of bytes that stay allocated after B because W needs them: the inputs of
    matrix products with trained parameters, and the gradients of these products.
    """

    flops: int
    elements: int
    by_parameter: Mapping[str, int]
    kept: Mapping[Hashable, int]
    temporary: int = 0
    waiting: int = 0


class _Kept:
    """A tensor that autograd has saved. Autograd's graph holds the only reference to this object."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.key = storage_of(tensor)

    @property
    def size(self) -> int:
        return self.tensor.untyped_storage().nbytes()


@dataclass
class Visit:
    """The work of one run of a unit, and the tensors that autograd saves during the run.

    `own` contains the bytes of the unit's saved intermediate tensors, by storage. `inputs` and `results` are the
    positions of saved inputs and results. If a result shares memory with an input, `passed` maps the result to this
    input. `given` maps storages to the positions of inputs, and `parameters` maps storages to the names of parameters.
    `factors` and `gradients` describe the matrix products with `trained` parameters: `factors` maps the storage of each
    input of these products to its size in bytes, and `gradients` is the total size in bytes of the gradients of these
    products.
    """

    flops: int = 0
    elements: int = 0
    by_parameter: dict[str, int] = field(default_factory=dict)
    own: dict[int, int] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    results: set[int] = field(default_factory=set)
    passed: dict[int, int] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    factors: dict[int, int] = field(default_factory=dict)
    gradients: int = 0
    graph: WeakSet[_Kept] = field(default_factory=WeakSet)
    temporary: int = 0


class Meter(DispatchMode):
    """Mode that measures the runs of a Tracer. In the stack of dispatch modes, the Meter is below the Taint.

    Glue that computes with unit results runs on shapes only, since these results have no values. So a batch of the real
    size takes no more time or memory than a small batch. Attention runs as one fused operator, as on a GPU.

    Attributes:
        works: the Work of each unit call.
        tail: the Work of the glue after the last call, including the loss: saved tensors and `temporary`, but no flops.
        same: for each result that shares memory with an argument, the key of the argument in `Work.kept`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []
        self.tail = Work(0, 0, {}, {})
        self.same: dict[Value, Hashable] = {}
        self.visiting: Visit | None = None
        self.is_differentiating = False
        self.loss: Tensor | None = None

    @contextmanager
    def running(self, taint: Taint) -> Iterator[None]:
        """Context manager for one run of a Tracer. `works` and `tail` are complete on exit."""
        self.taint, self.works, self.same, self.results = taint, [], {}, list[Tensor]()
        self.glue: list[WeakSet[_Kept]] = [WeakSet()]
        self.persistent = {key for key, tags in taint.tags.items() if tags}  # parameters, and the batch
        with self, saved_tensors_hooks(lambda tensor: _note(self.glue[-1], tensor), self._unpack), FusedAttention():
            yield
        *before, tail = [self._of_glue(kept) for kept in self.glue]
        self.works = [replace(work, kept={**glue, **work.kept}) for work, glue in zip(self.works, before, strict=True)]
        self.tail = Work(0, 0, {}, tail, self._temporary_of_tail())

    @contextmanager
    def visit(self, module: nn.Module, inputs: Sequence[Any]) -> Iterator[Visit]:
        """Context manager that measures a run of one unit on temporary tensors, and yields the run's Visit. Afterwards,
        pass the results to `end`."""
        self.visiting = visit = Visit()
        visit.parameters = {storage_of(t): name for name, t in module.named_parameters()}
        visit.trained = {storage_of(t) for t in module.parameters() if t.requires_grad}
        visit.given = {storage_of(t): k for k, t in enumerate(inputs) if isinstance(t, Tensor)}
        own = {*visit.parameters, *map(storage_of, module.buffers())}
        kept = visit.graph
        try:
            with saved_tensors_hooks(lambda tensor: _note(kept, tensor), self._unpack):
                yield visit
        finally:
            self.visiting = None
        visit.inputs = {visit.given[entry.key] for entry in kept if entry.key in visit.given}
        own |= visit.given.keys()
        visit.own = {entry.key: entry.size for entry in kept if entry.key not in own}

    def end(self, visit: Visit, leaves: Sequence[Any], parameters: Iterable[Tensor]) -> None:
        """Complete the visit of a unit that ran with `parameters` and returned `leaves`. From now on, saved tensors
        that are among `leaves` count as results, not as the unit's own tensors."""
        made = {storage_of(t): k for k, t in enumerate(leaves) if isinstance(t, Tensor)}
        visit.passed = {k: visit.given[key] for key, k in made.items() if key in visit.given}
        visit.results = {made[key] for key in visit.own if key in made}
        visit.own = {key: size for key, size in visit.own.items() if key not in made}
        visit.temporary = self._temporary(visit, leaves, parameters)

    def _temporary(self, visit: Visit, leaves: Sequence[Any], parameters: Iterable[Tensor]) -> int:
        """The peak bytes of temporary tensors in the backward of a visit. A parameter's gradient is temporary until it
        is accumulated."""
        roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop)
        own = (entry.tensor for entry in visit.graph if entry.key in visit.own)  # a list would keep the tensors alive
        with disable_current_modes(), Living(own, but=BY_ROWS) as living:
            self._differentiate(lambda: torch.autograd.backward(roots, [torch.empty_like(root) for root in roots]))
        return living.peak

    def _temporary_of_tail(self) -> int:
        """The peak bytes of temporary tensors in the backward of the glue after the last call."""
        loss, self.loss = self.loss, None
        results, self.results = [tensor for tensor in self.results if tensor.requires_grad], []
        if loss is None or not loss.requires_grad:
            return 0
        own = (entry.tensor for entry in self.glue[-1] if entry.key not in self.persistent)
        with Living(own, self._by_shape, BY_ROWS) as living:
            self._differentiate(lambda: torch.autograd.grad(loss, results, allow_unused=True))
        return living.peak

    def _differentiate(self, run: Callable[[], object]) -> None:
        # `run` fails if an operator has no meta kernel, or if values are read. Tensors that a recomputation saves are
        # not recorded.
        unnoted = saved_tensors_hooks(_Kept, self._unpack)
        with replaced(self, is_differentiating=True), unnoted, DisableTorchFunction(), suppress(Exception):
            run()

    def _unpack(self, entry: _Kept) -> Tensor:
        if not self.is_differentiating:
            raise TraceError(
                "the model runs a backward pass inside its forward, so the planner cannot estimate the model's memory: "
                "set the schedule and the partition explicitly instead of schedule='auto' or partition='profile'"
            )
        return entry.tensor

    def add(self, visit: Visit, arguments: Sequence[Any], tree: TreeSpec, result: Sequence[Any]) -> None:
        """Add the Work of one call of the visited kind. `arguments` are the leaves of the call's arguments, whose
        structure is `tree`. `result` are the placeholders that the call returns."""
        index = len(self.works)
        self.works.append(self._work(visit, index, arguments, result))
        self.results += [leaf for leaf in result if isinstance(leaf, Tensor)]
        for k, argument in visit.passed.items():
            self.same[Value(index, k)] = self._key(storage_of(arguments[argument]))
        self.glue.append(WeakSet())

    def _work(self, visit: Visit, index: int, arguments: Sequence[Any], result: Sequence[Any]) -> Work:
        tensors = [arguments[k] for k in visit.inputs] + [result[k] for k in visit.results]
        kept: dict[Hashable, int] = {("made by", index): sum(visit.own.values())} if visit.own else {}
        for tensor in tensors:
            if storage_of(tensor) not in self.persistent:
                kept[self._key(storage_of(tensor))] = tensor.untyped_storage().nbytes()
        waiting = sum(visit.factors.values()) + visit.gradients
        return Work(visit.flops, visit.elements, visit.by_parameter, kept, visit.temporary, waiting)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.visiting is not None:
            result = func(*args, **kwargs)
            self._count(self.visiting, func, args, kwargs, result)
            return result
        tags = self.taint.of(tree_leaves((args, kwargs)))
        if any(isinstance(tag, Value | Hidden) for tag in tags) and _computes(func):
            try:
                return self._by_shape(func, args, kwargs)
            except Exception:  # the operator has no meta kernel, or the shape of its result depends on values
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _by_shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _is_view(func):
            return func(*args, **kwargs)
        return run_by_shape(func, args, kwargs, self.taint.device)

    def _count(self, visit: Visit, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not _is_view(func) and func._overloadpacket not in NO_WORK:
            visit.elements += sum(map(Tensor.numel, tree_tensors(result)))
        if made := flops(func, args, kwargs, result):
            visit.flops += made
            read = [tensor for tensor in tree_tensors((args, kwargs)) if storage_of(tensor) in visit.parameters]
            if read:
                name = visit.parameters[storage_of(max(read, key=Tensor.numel))]
                visit.by_parameter[name] = visit.by_parameter.get(name, 0) + made
            if func._overloadpacket in PRODUCTS and any(storage_of(tensor) in visit.trained for tensor in read):
                factors = [x for x in tree_tensors((args, kwargs)) if storage_of(x) not in visit.parameters]
                visit.factors |= {storage_of(x): x.untyped_storage().nbytes() for x in factors}
                visit.gradients += sum(x.nbytes for x in tree_tensors(result))

    def _of_glue(self, kept: WeakSet[_Kept]) -> dict[Hashable, int]:
        return {self._key(k.key): k.size for k in kept if k.key not in self.persistent}

    def _key(self, storage: int) -> Hashable:
        key = self.taint.homes.get(storage, storage)
        return self.same.get(key, key) if isinstance(key, Value) else key


def _computes(func: Any) -> bool:
    """Whether an operator on placeholders can run on shapes only. A view cannot. Neither can an operator that reads
    only the shape of its input (such as zeros_like), since its result must have actual values."""
    changes_shape = torch.Tag.inplace_view in func.tags
    return not (_is_view(func) or changes_shape or func._overloadpacket in SHAPED)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(entry.alias_info is not None and not entry.alias_info.is_write for entry in returns)


def _note(kept: WeakSet[_Kept], tensor: Tensor) -> _Kept:
    entry = _Kept(tensor)
    kept.add(entry)
    return entry


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
