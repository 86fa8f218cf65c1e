"""Agreement: all ranks of a pipeline run the same step on the same batch, or none does."""

import functools
import hashlib
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pipeshard.errors import BatchError, MessageError, listed
from pipeshard.grid import Grid
from pipeshard.model.batch import Batch
from pipeshard.model.nested import text
from pipeshard.runtime.calls import call_of, compare_calls
from pipeshard.runtime.codec import decode, encode
from pipeshard.runtime.outputs import describe
from pipeshard.runtime.progress import NOW
from pipeshard.runtime.watching import calling

T = TypeVar("T")

SAID = 8  # numbers that ranks compare when they meet
SAMPLE = 8192  # numbers of a tensor that enter its digest
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def digests(batch: Batch, paths: Collection[str]) -> tuple[bytes, ...]:
    """A hash of all values of each of these leaves that the batch has."""
    tensors, entries = batch.tensors, batch.entries
    values = [_bytes(tensors[path]) for path in sorted(paths) if path in tensors]
    values += [_content(entries[path]) for path in sorted(paths) if path in entries]
    return tuple(hashlib.blake2b(value, digest_size=12).digest() for value in values)


def digest(batch: Batch) -> int:
    """A number that differs between batches: 56 bits of a hash of names, shapes, dtypes and (a sample of) values,
    and of what is no tensor as text."""
    state = hashlib.blake2b(digest_size=7)
    for path, tensor in batch.tensors.items():
        state.update(f"{path}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel() > SAMPLE:
            flat = flat[:: -(-flat.numel() // SAMPLE)]
        state.update(_bytes(flat))
    for path, other in batch.others:
        state.update(f"{path}{other}".encode())
    for path, entries in batch.entries.items():
        state.update(path.encode() + _content(entries))
    return int.from_bytes(state.digest(), "little")


def _content(entries: Any) -> bytes:
    """What a list of one entry a sample holds, with the values of tensors."""
    leaves, tree = tree_flatten(entries)
    known = (
        f"{tuple(leaf.shape)}{leaf.dtype}".encode() + _bytes(leaf) if isinstance(leaf, Tensor) else text(leaf).encode()
        for leaf in leaves
    )
    return str(tree).encode() + b"".join(known)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().tobytes()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where small messages of a group live: gloo gathers and reduces on the CPU only."""
    on_cpu = "cpu:" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def gather(numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The numbers of every rank of `group`, one row each: shape (ranks, *numbers.shape)."""
    sent = numbers.to(device_of(group))
    gathered = [torch.empty_like(sent) for _ in range(group.size())]
    NOW.wait_in(group, dist.all_gather(gathered, sent, group=group, async_op=True))
    return torch.stack(gathered).cpu()


def meet(group: dist.ProcessGroup, named: Callable[[int], str], numbers: Sequence[int] = ()) -> list[list[int]]:
    """What every rank of the world has to say at the beginning of a call, 8 numbers at most; all of them raise
    UsageError where they are not at the same call."""
    mine = [*call_of(NOW), *numbers, *[0] * (SAID - len(numbers))]
    ranks = gather(torch.tensor(mine), group).tolist()
    compare_calls([tuple(said[:2]) for said in ranks], named)
    return [said[2 : 2 + len(numbers)] for said in ranks]


@contextmanager
def together_in(name: str) -> Iterator[None]:
    """A call of the user's that every rank has to make, as the same one after the same others; also a decorator."""
    with calling(name) as watch:
        if watch is not None:
            meet(watch.world, watch.named)
        yield


@dataclass(frozen=True)
class Agreement:
    """What the ranks have agreed on for a step: the seed of the first one's generator, by which all draw random
    numbers, the samples of each replica, and the `news` that any rank has."""

    seed: int
    rows: list[int]
    news: int


def agree(grid: Grid, batch: Batch | Exception, mode: tuple[bool, int, bool], news: int) -> Agreement:
    """Compare this step over all ranks; every rank raises BatchError if they differ.

    `batch` is the reason on a rank that could get none; `mode` is (backward too, the code of the outputs wanted, model
    in training mode), `news` are bits. The ranks of a replica have to have the same batch, all of them the same mode.
    """
    rest = *mode, news, torch.initial_seed() % 2**63
    mine = [1, digest(batch), batch.rows, *rest] if isinstance(batch, Batch) else [0, 0, 0, *rest]
    ranks = meet(grid.world, grid.named, mine)
    if not all(has for has, *_ in ranks):
        reason = f"{type(batch).__name__}: {batch}" if isinstance(batch, Exception) else None
        reasons = gather_objects(reason, grid.world)
        without = [f"{grid.named(r)}: {reason}" for r, reason in enumerate(reasons) if reason is not None]
        raise BatchError(
            f"{len(without)} of {len(ranks)} ranks got no usable batch from the data iterator, so none ran this step: "
            f"{listed(without)}"
        )
    each = grid.size // grid.dp_size
    replicas = [ranks[first : first + each] for first in range(0, len(ranks), each)]
    same = all(len({tuple(rank[:3]) for rank in replica}) == 1 for replica in replicas)
    if not same or len({tuple(rank[3:6]) for rank in ranks}) > 1:
        table = "; ".join(
            f"{grid.named(r)}: {rows} samples (digest {number:014x}), {'training step' if train else 'forward only'}, "
            f"return_outputs={describe(outputs)}, model.{'train' if training else 'eval'}()"
            for r, (_, number, rows, train, outputs, training, *_) in enumerate(ranks)
        )
        raise BatchError(
            f"the stages of one pipeline must read the same batch in the same mode, but {table}. Give every rank the "
            "same data in the same order: plugin.prepare_dataloader(dataset, batch_size, shuffle, seed) does. A "
            "DataLoader of your own must not take a share (DistributedSampler, accelerator.prepare); one that shuffles "
            "or whose dataset or collator draws random numbers, needs all ranks to be seeded alike, as by "
            "transformers.set_seed(0)"
        )
    told = functools.reduce(operator.or_, (rank[6] for rank in ranks))
    return Agreement(ranks[0][-1], [replica[0][2] for replica in replicas], told)


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """What every rank of `group` has, in their order; nothing that comes from another rank is run.

    Raises MessageError, on every rank, where one has what is not made of tensors, numbers and strings alone.
    """
    try:
        content, flawed = encode(value), False
    except MessageError as error:  # which the others have to learn instead
        content, flawed = str(error).encode(errors="backslashreplace"), True
    heads = gather(torch.tensor([len(content), flawed]), group).tolist()
    padded = torch.zeros(max(length for length, _ in heads), dtype=torch.uint8)
    padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    contents = [row[:length].numpy().tobytes() for row, (length, _) in zip(gather(padded, group), heads)]
    for rank, (content, (_, flawed)) in enumerate(zip(contents, heads)):
        if flawed:
            raise MessageError(f"rank {rank} of {len(heads)} cannot tell the others what it has: {content.decode()}")
    return [decode(content) for content in contents]


def share_scalar(value: Tensor | None, source: int, group: dist.ProcessGroup, device: torch.device) -> Tensor | None:
    """The scalar (or None) that global rank `source` has, on every rank of `group`, with its dtype."""
    content = (0.0, 0.0) if value is None else (float(value), 1.0 + DTYPES.index(value.dtype))
    message = torch.tensor(content, dtype=torch.float64, device=device_of(group))
    NOW.wait_in(group, dist.broadcast(message, source, group=group, async_op=True))
    number, code = message.tolist()
    return torch.tensor(number, dtype=DTYPES[int(code) - 1], device=device) if code else None


def sum_scalar(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a scalar over the ranks of `group`, in its own dtype or fp32, whichever is finer."""
    total = value.detach().to(device_of(group), torch.promote_types(value.dtype, torch.float32))
    NOW.wait_in(group, dist.all_reduce(total, group=group, async_op=True))
    return total.to(value)


def share_tensor(tensor: Tensor, group: dist.ProcessGroup | None, source: int | None = None) -> None:
    """Give all ranks of `group` the values that the first of them, or the global rank `source`, has."""
    if group is None or group.size() == 1 or tensor.numel() == 0:
        return
    flat = tensor.detach().reshape(-1).contiguous()
    broadcast_bytes(flat, dist.get_process_group_ranks(group)[0] if source is None else source, group)
    tensor.data.copy_(flat.view_as(tensor))


def broadcast_bytes(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fill a contiguous tensor with that of global rank `source`; no backend knows every dtype."""
    if tensor.numel():
        content = tensor.view(-1).view(torch.uint8)
        NOW.wait_in(group, dist.broadcast(content, source, group=group, async_op=True))
