"""Preserving: running a model, and restoring its state afterwards.

A copy of the model would not fit if the model fills the machine's memory, and a copy on meta would have no values. So
pipeshard runs the model itself. Python state is restored from a Snapshot, and a tensor is copied only when an operator
is about to write to it.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage, nn

from pipeshard.graph.operators import mutated
from pipeshard.graph.places import HOOKS
from pipeshard.graph.shapes import is_trainable
from pipeshard.graph.snapshot import Change, Hooks, Snapshot
from pipeshard.graph.storage import is_moved, storage_of
from pipeshard.hf import disable_caches, enable_caches
from pipeshard.private import DispatchMode


@contextlib.contextmanager
def preserving(
    model: nn.Module, criterion: Callable[..., Any] | None = None, timed: bool = False, before: "Before | None" = None
) -> Iterator["Before"]:
    """Context manager that, on exit, restores the modules and everything that is reachable from their code or from the
    criterion: cached tensors, counters, statistics, generators, hooks, and tensors that were written to, including
    parameters. Inside the context, the model's key-value caches (`use_cache`) are disabled.

    With `timed`, no operator is intercepted. Of the tensors that were written to, only buffers are then restored. A
    snapshot of a large model takes a long time: if nothing has changed the model since an earlier use of this context
    manager, pass as `before` the object that the earlier use yielded.
    """
    cached = disable_caches(model)
    before = before or Before(model, criterion)
    for buffer in model.buffers() if timed else ():
        before.writes.keep(buffer)
    try:
        with contextlib.nullcontext() if timed else before.writes:
            yield before
    finally:
        before.restore()
        enable_caches(cached)


class Before:
    """The state of a model, a criterion and everything that their code reaches, recorded when this object is
    created."""

    def __init__(self, model: nn.Module, criterion: Callable[..., Any] | None = None) -> None:
        self.snapshot = Snapshot({"": model}, then={"the criterion": criterion})
        self.tensors = {tensor: tensor.data for *_, tensor, _ in self.snapshot.tensors}
        self.writes = Writes({storage_of(tensor) for tensor in self.tensors})
        self.hooks = Hooks(((self.snapshot.paths.get(id(m), ()), m) for m in model.modules()), HOOKS)

    def changes(self) -> Iterator[Change]:
        """The differences between the recorded and the current state."""
        yield from self.snapshot.replaced()
        for path, holder, key, tensor, _ in self.snapshot.tensors:
            if self.writes.times[storage_of(tensor)] or is_moved(tensor, self.tensors[tensor]):
                yield Change(path, holder, key, tensor, tensor)
        for path, hooks, content in self.hooks.changed():
            yield Change(path, hooks, None, content, hooks)

    def restore(self) -> None:
        for tensor, data in self.tensors.items():
            if is_moved(tensor, data):
                tensor.data = data
        self.writes.undo()
        self.snapshot.restore()
        for _, hooks, content in self.hooks.recorded:
            put_hooks(hooks, content)


def put_hooks(hooks: Any, content: Any) -> None:
    """Restore the content of a module's dict of hooks."""
    if hooks.keys() != content.keys():
        hooks.clear()
        hooks.update(content)


class Writes(DispatchMode):
    """Mode that copies each storage in `storages` before an operator first writes to it. `undo` restores the content.

    Attributes:
        times: the number of writes to each storage.
    """

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages = storages
        self.times: Counter[int] = Counter()
        self._kept: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            targets = list(mutated(func, args, kwargs or {}))
            for tensor in targets:
                self.keep(tensor)
            if any(self._is_blank(tensor) for tensor in targets):  # no memory to write to
                return targets[0] if func._schema.returns else None
        return func(*args, **(kwargs or {}))

    def keep(self, tensor: Tensor) -> None:
        key, storage = storage_of(tensor), tensor.untyped_storage()
        if key not in self.storages:
            return
        self.times[key] += 1
        if key not in self._kept and storage.device.type != "meta" and storage.data_ptr():
            self._kept[key] = storage, storage.clone()

    def _is_blank(self, tensor: Tensor) -> bool:
        """Whether the tensor is a released parameter: a single element of one of `storages`, expanded to the
        parameter's shape."""
        return storage_of(tensor) in self.storages and tensor.numel() > 1 and not any(tensor.stride())

    def undo(self) -> None:
        for storage, content in self._kept.values():
            storage.copy_(content)
        self._kept.clear()


@contextlib.contextmanager
def as_trained(model: nn.Module) -> Iterator[None]:
    """Context manager in which released parameters require gradients if they require gradients on the stages that hold
    them."""
    ghosts = [p for p in model.parameters() if is_trainable(p) and not p.requires_grad]
    for ghost in ghosts:
        ghost.requires_grad_(True)
    try:
        yield
    finally:
        for ghost in ghosts:
            ghost.requires_grad_(False)


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Context manager in which matrix products and convolutions of fp32 tensors are computed in fp32, not in TF32.
    Kernels for different batch sizes round TF32 differently, by more than the proof and the loss trials tolerate."""
    cudnn, mkldnn = cast(Any, torch.backends.cudnn), cast(Any, torch.backends.mkldnn)
    backends: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul]
    before = [backend.fp32_precision for backend in backends]
    products, convolves = "highest", True  # torch's defaults, used if torch's older options cannot be read
    with warnings.catch_warnings(action="ignore"):  # some torch versions warn about older options
        with contextlib.suppress(RuntimeError):
            products = torch.get_float32_matmul_precision()
        with contextlib.suppress(RuntimeError):
            convolves = cudnn.allow_tf32
    _set_tf32("highest", False)
    for backend in backends:
        if backend.fp32_precision not in ("ieee", "none"):  # "none" follows an option for all of torch
            backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        _set_tf32(products, convolves)
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _set_tf32(products: str, convolves: bool) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolves
