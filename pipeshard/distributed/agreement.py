"""Agreement: properties that must be the same on all ranks (versions, arguments, models, optimizers), compared at
boost.

Ranks compare digests. If the digests differ, the error shows the first line that differs.
"""

import hashlib
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeshard.distributed.collectives import gather_objects, share_tensor
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.schedule.program import Program

logger = logging.getLogger("pipeshard")
PACKAGES = ("pipeshard", "torch", "transformers", "colossalai", "peft", "accelerate")
SHOWN_BY_REPR = (bool, int, float, str, type(None), Program)  # types whose repr shows the whole value


def compare_ranks(items: Mapping[str, Sequence[str]], group: dist.ProcessGroup, named: Callable[[int], str]) -> None:
    """Raise ConfigurationError, on every rank, if the lines of an item differ between the ranks of `group`.

    Ranks send digests, and send the lines only if the digests differ. The error shows the first line that differs.
    """
    digests = {name: hashlib.blake2b("\n".join(lines).encode()).hexdigest() for name, lines in items.items()}
    ranks = gather_objects(digests, group)
    differs = next((name for name in digests if len({other.get(name) for other in ranks}) > 1), None)
    if differs is None:
        return
    texts = gather_objects(list(items[differs]), group)
    other = next(rank for rank, lines in enumerate(texts) if lines != texts[0])
    pairs = zip_longest(texts[0], texts[other], fillvalue="nothing")
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    raise ConfigurationError(
        f"{differs} differs between ranks: {first} on {named(0)}, but {second} on {named(other)}. Start every "
        "rank with the same program, arguments and packages"
    )


def texts_of(arguments: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return each argument as a line `name=value`. The line is the same in every process if the values are equal."""
    return {name: [f"{name}={_value_text(value)}"] for name, value in arguments.items()}


def versions() -> dict[str, list[str]]:
    """The versions of Python and of the packages that training depends on, one line each."""
    lines = [f"Python {'.'.join(platform.python_version_tuple()[:2])}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"no {package}")
    return {"a version": lines}


def optimizer_texts(optimizer: Optimizer) -> dict[str, list[str]]:
    """The class of an optimizer and the options of its parameter groups, one line each."""
    groups = [
        ", ".join(f"{key}={_value_text(value)}" for key, value in group.items() if key not in ("params", "param_names"))
        for group in optimizer.param_groups
    ]
    return {"the optimizer": [type(optimizer).__qualname__, *(f"group {k} with {g}" for k, g in enumerate(groups))]}


@torch.no_grad()
def take_first_weights(model: nn.Module, group: dist.ProcessGroup, named: Callable[[int], str]) -> None:
    """Copy the first rank's parameters, buffers, and tensors in module attributes to every rank, if any of these
    tensors differs between ranks. Call it on every rank. DistributedDataParallel also copies the first rank's
    parameters and buffers.

    Ranks compare only a few elements of each tensor, since these elements differ if the ranks used different seeds.
    Tensors that are on the meta device on any rank are skipped, since they are initialized or loaded later. Tensors
    that are not strided are also skipped.
    """
    tensors = _tensors(model)
    ranks = gather_objects({name: _digest(tensor) for name, tensor in tensors.items()}, group)
    shared = [name for name in ranks[0] if None not in (digests.get(name) for digests in ranks)]
    different = next((name for name in shared if len({digests[name] for digests in ranks}) > 1), None)
    if different is None:
        return
    other = next(rank for rank, digests in enumerate(ranks) if digests[different] != ranks[0][different])
    if group.rank() == 0:
        logger.warning(
            "the values of %s differ between %s and %s: every rank uses the weights of %s. To build the same model "
            "everywhere, call torch.manual_seed(0) on every rank before building it",
            different, named(other), named(0), named(0),
        )  # fmt: skip
    for name in shared:
        share_tensor(tensors[name], group)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state dict, parameters, buffers, and tensors in module attributes, by name, shape and dtype.
    The key includes the shape because a rank may have resized a buffer."""
    attributes = ((f"{path}.{key}", held) for path, one in model.named_modules() for key, held in vars(one).items())
    others = {name.lstrip("."): held for name, held in attributes if isinstance(held, Tensor)}
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    every = model.state_dict(keep_vars=True) | own | others  # hooks of state_dict may convert or omit tensors
    return {
        f"{name} of shape {tuple(t.shape)} and dtype {t.dtype}": t for name, t in every.items() if isinstance(t, Tensor)
    }


def hash_of(content: str) -> int:
    """A 56-bit hash of a string, the same in every process."""
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=7).digest(), "little")


@torch.no_grad()
def _digest(tensor: Tensor) -> str | None:
    """A digest of up to four elements along each dimension, or None for a tensor that is on meta or not strided."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return None
    some = tensor[tuple(slice(None, None, max(1, -(-size // 4))) for size in tensor.shape)]
    data = some.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(bytes(data.tolist()), digest_size=8).hexdigest()


def compare_trained(
    trained: Mapping[str, bool], group: dist.ProcessGroup, named: Callable[[int], str]
) -> dict[str, bool]:
    """Merge the requires_grad flags of all ranks' parameters, by name. Raises UsageError, on every rank, if a parameter
    is trained on only some of the ranks that hold it."""
    merged, holders = dict[str, bool](), dict[str, int]()
    for rank, of_rank in enumerate(gather_objects(dict(trained), group)):
        for name, flag in of_rank.items():
            holder = holders.setdefault(name, rank)
            if merged.setdefault(name, flag) != flag:
                raise UsageError(
                    f"{name} is held by several ranks, but has requires_grad={not flag} on {named(holder)} and {flag} "
                    f"on {named(rank)}: set the same value on every rank"
                )
    return merged


def _value_text(value: Any) -> str:
    if isinstance(value, SHOWN_BY_REPR):
        return repr(value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:  # a learning rate
        return f"tensor({value.item()!r})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_value_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple | range):
        return "[" + ", ".join(map(_value_text, value)) + "]"
    return getattr(value, "__qualname__", None) or type(value).__qualname__
