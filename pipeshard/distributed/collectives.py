"""Collectives: the exchange of small values and tensors between ranks, without executing pickled code.

If one rank omits a collective call, the other ranks hang. Therefore, every collective call to pipeshard begins with a
small all-gather in which the ranks compare their calls.
"""

import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pipeshard.distributed.groups import carrier, ranks_of
from pipeshard.distributed.progress import own_progress
from pipeshard.distributed.watching import calling, named
from pipeshard.errors import MessageError, UsageError, explained
from pipeshard.private import StridedShard


def encode(value: Any) -> bytes:
    """Serialize a value to bytes, for `decode`.

    Supports None, numbers, strings, bytes, tensors, dtypes, torch.Sizes, and dicts, lists, tuples and sets of these.
    Raises MessageError for objects that torch.load refuses with weights_only=True, since unpickling these objects could
    execute code.
    """
    buffer = io.BytesIO()
    with explained(
        lambda error: MessageError(
            f"this {type(value).__name__} must contain only tensors, numbers and strings: {reason(error)}"
        )
    ):
        torch.save(value, buffer)
        decode(buffer.getvalue())
    return buffer.getvalue()


def decode(content: bytes) -> Any:
    """Inverse of `encode`. Tensors are loaded on the CPU, except meta tensors."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def reason(error: BaseException) -> str:
    """The type and cause of an error in one line, without torch's stack trace or advice to allow code execution."""
    text = str(error).strip()
    told = re.search(r"(?:WeightsUnpickler error: |^(?=Trying to load))(.*?)( Please use|$)", text, re.MULTILINE)
    return f"{type(error).__name__}: {told[1] if told else next(iter(text.splitlines()), '')}"


T = TypeVar("T")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


CPU = torch.device("cpu")
_on_cpu: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def control(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group that has the ranks of `group` and can send CPU tensors, so that sending metadata neither uses nor
    waits for a GPU. This is `group` itself or, if `group` has no CPU backend, a gloo group that is created on first
    use."""
    if carrier(CPU, group):
        return group
    if group not in _on_cpu:
        ranks = ranks_of(group)
        _on_cpu[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _on_cpu[group]


def gather(numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the `numbers` of every rank of `group`, stacked on the CPU: shape (ranks, *numbers.shape)."""
    group, sent = control(group), numbers.cpu()
    gathered = [torch.empty_like(sent) for _ in range(group.size())]
    own_progress().wait_in(group, dist.all_gather(gathered, sent, group=group, async_op=True))
    return torch.stack(gathered)


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Any:
    """Start broadcasting the tensor of global rank `source` to all ranks of `group`. Call `wait()` on the result."""
    return dist.broadcast(tensor, group_src=ranks_of(group).index(source), group=group, async_op=True)


def is_own(rank: int, group: dist.ProcessGroup) -> bool:
    """Whether this process, a member of `group`, is the global rank `rank`."""
    return ranks_of(group)[group.rank()] == rank


def first_seed(group: dist.ProcessGroup) -> int:
    """Return, on every rank, the torch.initial_seed() of the group's first rank, modulo 2**63."""
    return int(gather(torch.tensor([torch.initial_seed() % 2**63]), group)[0])


def _content(value: Any) -> tuple[bytes, bool]:
    """Encode a value. Returns (content, False) or, if the value cannot be sent, (reason, True)."""
    try:
        return encode(value), False
    except MessageError as error:
        return str(error).encode(errors="backslashreplace"), True


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Gather the values of all ranks of `group`, in the group's order. No code from another rank is executed.

    Raises MessageError, on every rank, if a value contains anything that `encode` does not support.
    """
    content, flawed = _content(value)
    heads = gather(torch.tensor([len(content), flawed]), group).tolist()
    content = content.ljust(max(length for length, _ in heads), b"\0")
    padded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    contents = [row[:length].numpy().tobytes() for row, (length, _) in zip(gather(padded, group), heads)]
    for rank, content, (_, flawed) in zip(ranks_of(group), contents, heads):
        if flawed:
            raise MessageError(f"rank {rank} cannot send a value to the other ranks: {content.decode()}")
    return [decode(content) for content in contents]


def gather_lists(values: Sequence[T], group: dist.ProcessGroup) -> list[T]:
    """Gather the lists of all ranks of `group`, and join them into one list, in the group's order. Raises MessageError
    as `gather_objects` does."""
    return [value for of_rank in gather_objects(list(values), group) for value in of_rank]


def share_value(value: T, source: int, group: dist.ProcessGroup) -> T:
    """Broadcast the value of global rank `source`, and return it on every rank of `group`, with tensors on the
    CPU. No code from the source is executed.

    Raises MessageError, on every rank, if the value contains anything that `encode` does not support.
    """
    content, flawed = _content(value) if is_own(source, group) else (b"", False)
    group, head = control(group), torch.tensor([len(content), flawed])
    broadcast_bytes(head, source, group)
    length, flawed = head.tolist()
    sent = torch.frombuffer(bytearray(content or length), dtype=torch.uint8)  # receivers start with zeros
    broadcast_bytes(sent, source, group)
    received = sent.numpy().tobytes()
    if flawed:
        raise MessageError(f"rank {source} cannot send its value: {received.decode()}")
    return decode(received)


def share_scalar(value: Tensor | None, source: int, group: dist.ProcessGroup, device: torch.device) -> Tensor | None:
    """Broadcast the scalar (or None) of global rank `source` to every rank of `group`. Returns the scalar on `device`,
    in the dtype that it has on the source."""
    content = (0.0, 0.0) if value is None else (float(value), 1.0 + DTYPES.index(value.dtype))
    message, group = torch.tensor(content, dtype=torch.float64), control(group)
    own_progress().wait_in(group, broadcast(message, source, group))
    number, code = message.tolist()
    return torch.tensor(number, dtype=DTYPES[int(code) - 1], device=device) if code else None


def sum_scalar(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum a scalar over the ranks of `group`. The sum is accumulated in at least fp32, and returned in the scalar's
    dtype."""
    total = value.detach().to(CPU, torch.promote_types(value.dtype, torch.float32), copy=True)
    group = control(group)
    own_progress().wait_in(group, dist.all_reduce(total, group=group, async_op=True))
    return total.to(value)


def share_in_turn(value: Any, *groups: dist.ProcessGroup) -> Any:
    """Broadcast a value from the first rank of each group, one group after the other, and return the value."""
    for group in groups:
        value = share_value(value, ranks_of(group)[0], group) if group.size() > 1 else value
    return value


def share_tensor(tensor: Tensor, group: dist.ProcessGroup | None, source: int | None = None) -> None:
    """Overwrite `tensor` with its values on the global rank `source` (by default, the first rank of `group`)."""
    if group is None or group.size() == 1 or tensor.numel() == 0:
        return
    flat = tensor.detach().reshape(-1).contiguous()
    flat = flat.cuda() if flat.is_cuda else flat  # on the current GPU: NCCL rejects two ranks on one GPU
    broadcast_bytes(flat, ranks_of(group)[0] if source is None else source, group)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(flat.view_as(tensor))


def broadcast_bytes(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Broadcast a contiguous tensor from global rank `source` in place. The tensor is sent as bytes, since no backend
    supports every dtype."""
    if tensor.numel():
        content = as_bytes(tensor)
        group = group if tensor.is_cuda else control(group)
        own_progress().wait_in(group, broadcast(content, source, group))


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat uint8 view of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor. The shard shares the DTensor's memory. Any other tensor is returned
    unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def free_storage(tensor: Tensor) -> None:
    """Free the memory of a tensor (for a DTensor, of this rank's shard) without changing the tensor's version
    counter."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = tensor._local_tensor.new_empty(0)
    else:
        tensor.data = tensor.new_empty(0)


def local_grad(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else local(parameter.grad)


def set_local_grad(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    parameter.grad = gradient if gradient is None else like(gradient, parameter)


def laid_out(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return `tensor` (a gradient, optimizer state or new value) with the strides of its parameter: fused optimizers
    read parameters, gradients and states as flat memory. For a DTensor parameter, return `tensor` unchanged."""
    if tensor.stride() == parameter.stride() or isinstance(parameter, DTensor):
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def align_grad(parameter: nn.Parameter) -> None:
    """Redistribute a parameter's gradient to the parameter's placements if the gradient's placements differ."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """Wrap this rank's shard `part` in a DTensor with the placements of `tensor`. Returns `part` unchanged if `part` is
    already a DTensor, or if `tensor` is not a DTensor."""
    if not isinstance(tensor, DTensor) or isinstance(part, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def whole(tensor: Tensor) -> Tensor:
    """Gather the full tensor of a DTensor. Call it on all ranks of the DTensor's mesh. Other tensors are returned
    unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor on a one-dimensional mesh with a strided shard (a part of each fused block)."""
    placements = tensor.placements if isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 1 else ()
    return any(isinstance(placement, StridedShard) for placement in placements)


def slice_like(value: Tensor, tensor: Tensor) -> Tensor:
    """Return this rank's shard of the full tensor `value`, sharded like `tensor`. Returns `value` unchanged if `tensor`
    is not a DTensor."""
    if not isinstance(tensor, DTensor):
        return value
    placed: Any = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return local(placed)


MOST_NUMBERS = 10  # the largest number of values that a rank can pass to `meet`


def meet(group: dist.ProcessGroup, named: Callable[[int], str], numbers: Sequence[int] = ()) -> list[list[int]]:
    """Gather the `numbers` (at most MOST_NUMBERS) of every rank at the beginning of a collective call. Every rank
    raises UsageError if the ranks are in different calls."""
    name, number = own_progress().call, own_progress().number
    message = torch.tensor([zlib.crc32(name.encode()), number, *numbers, *[0] * (MOST_NUMBERS - len(numbers))])
    rows = gather(message, group).tolist()
    if any(row[:2] != rows[0][:2] for row in rows):
        calls = gather_objects((name, number), group)
        table = "; ".join(f"{named(rank)}: {call} (call {k})" for rank, (call, k) in enumerate(calls))
        raise UsageError(
            f"the ranks make different calls: {table}. Every rank must make the collective calls of the plugin, the "
            "optimizer and the booster in the same order: check for calls that only some ranks make"
        )
    return [row[2 : 2 + len(numbers)] for row in rows]


@contextmanager
def together_in(name: str) -> Iterator[None]:
    """Context manager or decorator for the collective call `name`. On entry, raises UsageError, on every rank, if the
    ranks are in different calls."""
    with calling(name) as is_call:
        if is_call:
            world = dist.group.WORLD
            assert world is not None
            meet(world, named)
        yield
