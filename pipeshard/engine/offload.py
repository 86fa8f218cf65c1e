"""Offload: the activations of a stage, in the host's memory between a forward and its backward.

torch's saved-tensor hooks see every tensor that autograd saves. Its storage is copied to the host, once for all views
of it, and copied back before the backward that needs it, while another action computes.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from pipeshard.distributed.collectives import local
from pipeshard.engine.weight_grad import Gradients
from pipeshard.schedule.program import Action, Kind
from pipeshard.schedule.residence import Holding, residences
from pipeshard.split.route import Save

SMALL = 1024  # bytes that are not worth a copy


class Transfer(Protocol):
    """Copies between a device and the host; these copies may run while the device computes."""

    def store(self, tensor: Tensor) -> Any:
        """Begin to copy a tensor to the host; returns the copy."""

    def load(self, copy: Any) -> Tensor:
        """Begin to copy it back into new memory of the device."""

    def wait(self) -> None:
        """Make later computation on the device wait for all copies."""


class CudaTransfer:
    """Copies through pinned memory, on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._used: list[Tensor] = []  # by copies that may still run

    def store(self, tensor: Tensor) -> Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy(copy, tensor)
        return copy

    def load(self, copy: Tensor) -> Tensor:
        tensor = torch.empty(copy.shape, dtype=copy.dtype, device=self.device)
        self._copy(tensor, copy)
        return tensor

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self._used.clear()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        # The source is computed, and the target's memory was last used, by the current stream.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        self._used += target, source


def transfer_of(device: torch.device) -> Transfer | None:
    """The transfer between this device and the host; None for a CPU, whose memory is the host's."""
    return CudaTransfer(device) if device.type == "cuda" else None


class Block:
    """A storage, copied to the host; `here` is a copy of it on the device."""

    def __init__(self, transfer: Transfer, storage: torch.UntypedStorage) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        self.transfer, self.copy = transfer, transfer.store(whole.set_(storage))
        self.here: Tensor | None = None

    def load(self) -> None:
        if self.here is None:
            self.here = self.transfer.load(self.copy)


class Saved:
    """A tensor that autograd has saved, as a view of `block`, or kept on the device without a block."""

    def __init__(self, tensor: Tensor, block: Block | None = None) -> None:
        self.block, self.version, self.kept = block, tensor._version, tensor.detach()
        self.requires_grad = tensor.requires_grad
        if block is not None:
            self.view = tensor.storage_offset(), tensor.shape, tensor.stride()
            self.kept.data = tensor.new_empty(0)  # what is left of it shares the version of the tensor alone

    def tensor(self) -> Tensor:
        """Its value. Raises RuntimeError if it was written to: with saved-tensor hooks, autograd does not check
        this."""
        if self.kept._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of {self.kept.dtype} is at version {self.kept._version}; expected version {self.version}"
            )
        if self.block is None:
            return self.kept
        if self.block.here is None:  # a backward that no action of the program runs
            self.block.load()
            self.block.transfer.wait()
        assert self.block.here is not None
        return self.kept.new_empty(0).set_(self.block.here.untyped_storage(), *self.view)

    def argument(self) -> Tensor:
        """Its value for a unit that is recomputed; it requires a gradient if it did the first time."""
        value = self.tensor()
        return value.requires_grad_().view_as(value) if self.requires_grad else value


@dataclass
class Seen:
    """A storage that was saved in this step: the `holding` that saved it first, and the copies of its contents, by
    version."""

    storage: StorageWeakRef
    holding: Holding
    blocks: "WeakValueDictionary[int, Block]" = field(default_factory=WeakValueDictionary)


class Offload:
    """Offloads the activations of a rank's stages: all except those of the running action and of the next B or W.

    Not offloaded: weights and buffers, small tensors, tensors of other devices and of tensor subclasses, and memory
    that several microbatches share, which no copy would free.
    """

    def __init__(self, transfer: Transfer, device: torch.device) -> None:
        self.transfer, self.device = transfer, device

    def begin(self, actions: Sequence[Action], held: Iterable[Tensor]) -> None:
        """Prepare a training step of these actions, with `held` weights and buffers."""
        self._residences = residences(actions)
        self._held = {local(tensor.detach()).untyped_storage()._cdata for tensor in held}
        self._seen: dict[int, Seen] = {}
        self._blocks: dict[Holding, list[weakref.ref[Block]]] = {}

    def end(self) -> None:
        """Discard everything of the step."""
        self._seen, self._blocks = {}, {}

    @contextmanager
    def saving(self, i: int, stage: int) -> Iterator[Save | None]:
        """Around the F of microbatch i on a stage. Yields a function that saves the arguments of recomputed units; None
        if they stay on the device."""
        action = Action(Kind.F, i, stage)
        self.load(action)
        if self._stays(action):
            yield None
            return
        save = partial(self._save, (i, stage))
        with saved_tensors_hooks(save, Saved.tensor):
            yield lambda tensor: save(tensor).argument

    def load(self, action: Action) -> None:
        """Before an action: wait for the activations that it needs, and begin to copy those of the next B or W."""
        self._load(action[1:])
        self.transfer.wait()
        residence = self._residences.get(action)
        if residence is not None and residence.next is not None:
            self._load(residence.next)

    def store(self, i: int, stage: int, pending: list[Gradients]) -> None:
        """After the B of microbatch i on a stage: offload what its W needs."""
        if not self._stays(Action(Kind.B, i, stage)):
            _replace(pending, Tensor, partial(self._save, (i, stage)))

    @staticmethod
    def restore(pending: list[Gradients]) -> None:
        """Before the W: undo `store`."""
        _replace(pending, Saved, Saved.tensor)

    def _stays(self, action: Action) -> bool:
        """Whether the activations of this action stay on the device, as those of a head do, which is not in the
        program."""
        residence = self._residences.get(action)
        return residence is None or residence.stays

    def _load(self, holding: Holding) -> None:
        for reference in self._blocks.pop(holding, ()):
            if (block := reference()) is not None:
                block.load()

    def _save(self, holding: Holding, tensor: Tensor) -> Saved:
        return Saved(tensor, self._block(holding, tensor))

    def _block(self, holding: Holding, tensor: Tensor) -> Block | None:
        """The copy of the tensor's storage; None if it stays on the device."""
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


def _replace(pending: list[Gradients], kind: type, by: Callable[[Any], Any]) -> None:
    """Replace each tensor in these terms that is of this kind."""
    for k, (parameter, term) in enumerate(pending):
        values = {each.name: getattr(term, each.name) for each in fields(term)}
        pending[k] = parameter, replace(term, **{n: by(v) for n, v in values.items() if isinstance(v, kind)})
