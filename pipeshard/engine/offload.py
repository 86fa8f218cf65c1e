"""Offload: keeps a stage's activations in host memory between a forward and its backward.

torch's saved-tensor hooks receive every tensor that autograd saves. Offload copies the tensor's storage to the host,
once for all views of the storage. While another action computes, Offload copies the storage back for the next backward.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from pipeshard.distributed.collectives import free_storage, like, local
from pipeshard.engine.weight_grad import Gradients
from pipeshard.schedule.program import Action, Kind
from pipeshard.schedule.residence import Holding, residences
from pipeshard.split.route import MoveAway

SMALL = 1024  # bytes; smaller storages are not worth a copy


class CudaTransfer:
    """Copies tensors to and from pinned host memory on a separate stream, while the GPU computes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._used: list[Tensor] = []  # sources and targets of copies that may still be running

    def store(self, tensor: Tensor) -> Tensor:
        """Start copying a tensor to the host, and return the copy."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy(copy, tensor)
        return copy

    def load(self, copy: Tensor) -> Tensor:
        """Start copying a stored tensor to newly allocated device memory, and return the new tensor."""
        tensor = torch.empty(copy.shape, dtype=copy.dtype, device=self.device)
        self._copy(tensor, copy)
        return tensor

    def wait(self) -> None:
        """Make later computation on the device wait for all copies started so far."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self._used.clear()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        # The current stream computes the source, and was the last to use the target's memory.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        self._used += target, source


def transfer_of(device: torch.device) -> CudaTransfer | None:
    """Return the transfer between a GPU and the host, or None for other devices (a CPU already uses host memory)."""
    return CudaTransfer(device) if has_own_memory(device) else None


def has_own_memory(device: torch.device) -> bool:
    """Whether a device has its own memory, separate from the host's."""
    return device.type == "cuda"


class Block:
    """The host copy of a storage. `here` is the new copy on the device, or None before `load`."""

    def __init__(self, transfer: CudaTransfer, storage: torch.UntypedStorage) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        self.transfer, self.copy = transfer, transfer.store(whole.set_(storage))
        self.here: Tensor | None = None

    def load(self) -> None:
        if self.here is None:
            self.here = self.transfer.load(self.copy)


class SavedTensor:
    """A tensor (for a DTensor, this rank's shard) that autograd has saved: on the host as a view of `block`, or on the
    device if `block` is None."""

    def __init__(self, tensor: Tensor, block: Block | None = None) -> None:
        self.block, self.version, self.kept = block, tensor._version, tensor.detach()
        self.requires_grad = tensor.requires_grad
        if block is not None:
            part = local(tensor)
            self.view = part.storage_offset(), part.shape, part.stride()
            free_storage(self.kept)  # keeps the version counter and, for a DTensor, the placements

    def tensor(self) -> Tensor:
        """Return the saved tensor on the device. Raises RuntimeError if the tensor was modified in place after it was
        saved: with saved-tensor hooks, autograd does not detect such writes."""
        if self.kept._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of {self.kept.dtype} is at version {self.kept._version}; expected version {self.version}"
            )
        if self.block is None:
            return self.kept
        if self.block.here is None:  # this backward is not an action of the program
            self.block.load()
            self.block.transfer.wait()
        assert self.block.here is not None
        part = local(self.kept).new_empty(0).set_(self.block.here.untyped_storage(), *self.view)
        return like(part, self.kept)

    def argument(self) -> Tensor:
        """Return the saved tensor as an argument of a recomputed unit. The argument requires a gradient if the original
        tensor required one."""
        value = self.tensor()
        return value.requires_grad_().view_as(value) if self.requires_grad else value


@dataclass
class Seen:
    """A storage that autograd has saved in this step. `holding` identifies the microbatch and the stage that first
    saved the storage. `blocks` contains the host copies, by tensor version."""

    storage: StorageWeakRef
    holding: Holding
    blocks: "WeakValueDictionary[int, Block]" = field(default_factory=WeakValueDictionary)


class Offload:
    """Offloads the activations of a rank's stages, except the activations of the running action and of the next B or W.

    The following are not offloaded:

    - weights and buffers, and weight casts that microbatches share;
    - small tensors, and tensors on other devices;
    - sparse tensors, tensor subclasses other than DTensor, and lazily conjugated or negated tensors;
    - storages that another microbatch or stage has already saved (copying would not free these storages).
    """

    def __init__(self, transfer: CudaTransfer, device: torch.device) -> None:
        self.transfer, self.device = transfer, device

    def begin(self, actions: Sequence[Action], held: Iterable[Tensor], shares_casts: bool = False) -> None:
        """Prepare a training step that runs `actions`. The weights and buffers in `held` are not offloaded. With
        `shares_casts`, autocast keeps its casts of weights until the end of the step."""
        self._residences, self._shares_casts = residences(actions), shares_casts
        self._held = {local(tensor.detach()).untyped_storage()._cdata for tensor in held}
        self._seen: dict[int, Seen] = {}
        self._casts: dict[int, StorageWeakRef] = {}  # by the id of the weight
        self._blocks: dict[Holding, list[weakref.ref[Block]]] = {}

    def end(self) -> None:
        """Discard all state of the step."""
        self._seen, self._casts, self._blocks = {}, {}, {}

    @contextmanager
    def saving(self, i: int, stage: int) -> Iterator[MoveAway | None]:
        """Context manager for the F of microbatch i on a stage. Yields None if the activations stay on the device.
        Otherwise, yields a function that saves an argument of a recomputed unit. This function returns another
        function, which restores the argument."""
        action = Action(Kind.F, i, stage)
        self.load(action)
        if self._stays(action):
            yield None
            return
        save = partial(self._save, (i, stage))
        with saved_tensors_hooks(save, SavedTensor.tensor):
            yield lambda tensor: save(tensor).argument

    def load(self, action: Action) -> None:
        """Wait for the activations that an action needs, and start copying back the activations of the next B or W.
        Call it before the action."""
        self._load(action[1:])
        self.transfer.wait()
        residence = self._residences.get(action)
        if residence is not None and residence.next is not None:
            self._load(residence.next)

    def store(self, i: int, stage: int, pending: list[Gradients]) -> None:
        """Offload the tensors that the W of microbatch i on a stage needs, unless they stay on the device. Call it
        after the B."""
        if not self._stays(Action(Kind.B, i, stage)):
            _replace(pending, Tensor, partial(self._save, (i, stage)))

    @staticmethod
    def restore(pending: list[Gradients]) -> None:
        """Undo `store`. Call `restore` before the W."""
        _replace(pending, SavedTensor, SavedTensor.tensor)

    def _stays(self, action: Action) -> bool:
        """Whether the activations of this action stay on the device, because the next action needs or prefetches them,
        or because the program does not contain this action (such as the head of sliced microbatches)."""
        residence = self._residences.get(action)
        return residence is None or residence.stays

    def _load(self, holding: Holding) -> None:
        for reference in self._blocks.pop(holding, ()):
            if (block := reference()) is not None:
                block.load()

    def _save(self, holding: Holding, tensor: Tensor) -> SavedTensor:
        is_shared = self._shares_casts and self._is_shared_cast(tensor)  # a copy on the host would not free its memory
        return SavedTensor(tensor, None if is_shared else self._block(holding, local(tensor)))

    def _is_shared_cast(self, tensor: Tensor) -> bool:
        """Whether a tensor is the first cast of a weight in this step. Later forwards either get this cast from
        autocast's cache, or make their own cast, which the cache does not keep."""
        if (weight := cast_weight(tensor)) is None:
            return False
        storage = StorageWeakRef(local(tensor).untyped_storage())
        return self._casts.setdefault(id(weight), storage) == storage

    def _block(self, holding: Holding, tensor: Tensor) -> Block | None:
        """Return the host copy of the tensor's storage, or None if the storage stays on the device."""
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device == self.device
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if storage.nbytes() < SMALL or key in self._held or isinstance(tensor._base, nn.Parameter):
            return None
        seen = self._seen.setdefault(key, Seen(StorageWeakRef(storage), holding))
        if seen.holding != holding:
            return None
        block = seen.blocks.get(tensor._version)
        if block is None:
            block = seen.blocks[tensor._version] = Block(self.transfer, storage)
            self._blocks.setdefault(holding, []).append(weakref.ref(block))
        return block


def cast_weight(tensor: Tensor) -> nn.Parameter | None:
    """Return the nn.Parameter from which a tensor (or, for a view, its base) was cast to another dtype, or None."""
    node = (tensor if tensor._base is None else tensor._base).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    variable = getattr(node.next_functions[0][0], "variable", None)
    return variable if isinstance(variable, nn.Parameter) else None


def _replace(pending: list[Gradients], kind: type, by: Callable[[Any], Any]) -> None:
    """Replace each field `v` of type `kind` in the terms of `pending` with `by(v)`."""
    for k, (parameter, term) in enumerate(pending):
        values = {each.name: getattr(term, each.name) for each in fields(term)}
        pending[k] = parameter, replace(term, **{n: by(v) for n, v in values.items() if isinstance(v, kind)})
