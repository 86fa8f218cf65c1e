"""Agreement: all ranks of a pipeline run the same step on the same batch, or none does."""

import hashlib
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from pipeshard.errors import BatchError
from pipeshard.model.batch import Batch
from pipeshard.runtime.outputs import describe

SAMPLE = 8192  # numbers of a tensor that enter its digest
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def digests(batch: Batch, paths: Collection[str]) -> tuple[bytes, ...]:
    """A hash of all values of each of these leaves that the batch has."""
    tensors = [batch.tensors[path] for path in sorted(paths) if path in batch.tensors]
    return tuple(hashlib.blake2b(_bytes(tensor), digest_size=12).digest() for tensor in tensors)


def digest(batch: Batch) -> int:
    """A number that differs between batches: 56 bits of a hash of names, shapes, dtypes and (a sample of) values."""
    state = hashlib.blake2b(digest_size=7)
    for path, tensor in batch.tensors.items():
        state.update(f"{path}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel() > SAMPLE:
            flat = flat[:: -(-flat.numel() // SAMPLE)]
        state.update(_bytes(flat))
    return int.from_bytes(state.digest(), "little")


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
    dist.all_gather(gathered, sent, group=group)
    return torch.stack(gathered).cpu()


def agree(group: dist.ProcessGroup, batch: Batch | None, mode: tuple[bool, int, bool]) -> int:
    """Compare this step over the ranks of `group`; every rank raises BatchError if they differ.

    `batch` is None on a rank that could get none; `mode` is (backward too, the code of the outputs wanted, model in
    training mode).
    Returns the seed of the first rank's generator, by which all of them draw random numbers in this step.
    """
    seed = torch.initial_seed() % 2**63
    mine = [0, 0, 0, *mode, seed] if batch is None else [1, digest(batch), batch.rows, *mode, seed]
    ranks = gather(torch.tensor(mine), group).tolist()
    without = [r for r, (has, *_) in enumerate(ranks) if not has]
    if without:
        raise BatchError(
            f"stage{'s' if len(without) > 1 else ''} {without} of {len(ranks)} got no usable batch from the data "
            "iterator (the reason is in the error there); no stage ran this step"
        )
    if len({tuple(rank[:-1]) for rank in ranks}) > 1:
        table = "; ".join(
            f"stage {r}: {rows} samples (digest {number:014x}), {'training step' if train else 'forward only'}, "
            f"return_outputs={describe(outputs)}, model.{'train' if training else 'eval'}()"
            for r, (_, number, rows, train, outputs, training, _) in enumerate(ranks)
        )
        raise BatchError(
            f"the stages of one pipeline must read the same batch in the same mode, but {table}. Give every rank the "
            "same data in the same order: plugin.prepare_dataloader(dataset, batch_size, shuffle, seed) does"
        )
    return ranks[0][-1]


def share_scalar(value: Tensor | None, source: int, group: dist.ProcessGroup, device: torch.device) -> Tensor | None:
    """The scalar (or None) that global rank `source` has, on every rank of `group`, with its dtype."""
    content = (0.0, 0.0) if value is None else (float(value), 1.0 + DTYPES.index(value.dtype))
    message = torch.tensor(content, dtype=torch.float64, device=device_of(group))
    dist.broadcast(message, source, group=group)
    number, code = message.tolist()
    return torch.tensor(number, dtype=DTYPES[int(code) - 1], device=device) if code else None
