"""Small config: reduces the layers, widths, heads, experts and tokens in the config of a transformers model."""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.hf import (
    EXPERT_COUNTS,
    EXPERT_GROUPS,
    EXPERTS_OF_TOKEN,
    HEAD_COUNTS,
    INNER_WIDTHS,
    LAYER_COUNTS,
    NO_WIDTHS,
    VOCABULARIES,
    WIDTHS,
    is_token,
)
from pipeshard.split.packed import Packed

LEAST_WIDTH, LEAST_INNER = 64, 16  # widths below LEAST_WIDTH are kept; reduced inner widths are at least LEAST_INNER
NARROWER = 4  # factor by which inner widths are reduced more than other widths
LITTLE = 4  # upper limit of the smaller divisor that `factors` returns
LEAST_TOKENS = 64
SETTINGS = (bool, str, float, type(None))


def _parts(config: Any) -> Iterator[Any]:
    """A config and all configs nested in it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_diff_dict"):
            yield from _parts(value)


def _numbers(config: Any, names: re.Pattern[str]) -> Iterator[tuple[Any, str, int]]:
    """The integers with matching names in a config and its nested configs, as (config, name, number)."""
    for part in _parts(config):
        for name, value in vars(part).items():
            if type(value) is int and names.search(name):
                yield part, name, value


def factors(config: Any) -> list[int]:
    """Common divisors of all widths and numbers of heads, in descending order: the largest, and one of at most
    LITTLE."""
    heads = [value for _, _, value in _numbers(config, HEAD_COUNTS) if value > 1]
    widths = [value for _, _, value in _numbers(config, WIDTHS) if value >= LEAST_WIDTH]
    largest = gcd(*heads, *widths) if heads else 1
    return sorted({largest, gcd(largest, LITTLE)}, reverse=True)


def layer_counts(model: nn.Module, config: Any, stages: int) -> dict[int, int]:
    """Map each number of layers in the config to a smaller number that still includes two layers per stage and all
    kinds of layers. Omits numbers that cannot be reduced."""
    counts = {value for _, _, value in _numbers(config, LAYER_COUNTS)}
    needed = {value: 2 * stages for value in counts if value > 2 * stages}
    for part in _parts(config):
        for value in vars(part).values():
            if isinstance(value, list | tuple) and len(value) in needed:
                needed[len(value)] = max(needed[len(value)], all_kinds([repr(item) for item in value]))
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) in needed:
            needed[len(module)] = max(needed[len(module)], all_kinds([kind_of_layer(layer) for layer in module]))
    return {value: count for value, count in needed.items() if count < value}


def all_kinds(kinds: Sequence[Any]) -> int:
    """The smallest n for which the first n layers include all kinds."""
    return 1 + max(kinds.index(kind) for kind in set(kinds))


def kind_of_layer(layer: nn.Module) -> tuple[Any, ...]:
    """A value that is equal for two layers with equal modules, parameters and settings."""
    return tuple(
        (
            path,
            type(module),
            _settings(module),
            tuple((name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters(recurse=False)),
        )
        for path, module in layer.named_modules()
    )


def _settings(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """The attributes in which kinds of layers may differ, except the path of a quantized layer, which is unique."""
    omitted = "path" if isinstance(module, Packed) else None
    return tuple(
        sorted((key, repr(x)) for key, x in vars(module).items() if isinstance(x, SETTINGS) and key != omitted)
    )


def take_layers(config: Any, layers: Mapping[int, int]) -> Iterator[str]:
    """Replace the numbers of layers in a config with the smaller numbers in `layers`. Yield descriptions of the
    changes."""
    changed = [(part, name, value) for part, name, value in _numbers(config, LAYER_COUNTS) if value in layers]
    for part, name, value in changed:
        for key, items in list(vars(part).items()):
            if isinstance(items, list | tuple) and len(items) == value:
                setattr(part, key, items[: layers[value]])
        setattr(part, name, layers[value])
        yield f"{layers[value]} of {value} layers"


def take_widths(config: Any, factor: int) -> Iterator[str]:
    """Divide the widths and numbers of heads in a config, and reduce the number of experts. Yield descriptions of the
    changed widths.

    Any number in the config that equals a width, such as the size to which images are projected, is divided like this
    width.
    """
    widths = {value for _, _, value in _numbers(config, WIDTHS) if value >= LEAST_WIDTH}
    inner = {value: _inner(value, factor) for _, _, value in _numbers(config, INNER_WIDTHS) if value >= LEAST_WIDTH}
    narrow = inner | {value: value // factor for value in widths}
    for part in list(_parts(config)):
        for name, value in list(vars(part).items()):
            if type(value) is int and value in narrow and not NO_WIDTHS.search(name):
                setattr(part, name, narrow[value])
    for part, name, value in list(_numbers(config, HEAD_COUNTS)):
        setattr(part, name, max(1, value // factor))
    for part, name, value in list(_numbers(config, EXPERT_COUNTS)):
        setattr(part, name, _experts(part, value))
    yield from (f"width {narrow[value]} of {value}" for value in sorted(widths) if narrow[value] != value)


def _inner(value: int, factor: int) -> int:
    return min(value, max(LEAST_INNER, value // (NARROWER * factor) // 8 * 8))


def _experts(config: Any, count: int) -> int:
    """The smallest number of experts that divides `count`, leaves the router a choice, and fills the groups equally."""
    chosen = max((value for _, _, value in _numbers(config, EXPERTS_OF_TOKEN)), default=1)
    groups = max((value for _, _, value in _numbers(config, EXPERT_GROUPS)), default=1)
    least = 2 * max(chosen, groups)
    return next(n for n in range(1, count + 1) if n == count or (n >= least and count % n == 0 and n % groups == 0))


def has_vocabulary(config: Any) -> bool:
    return any(True for _ in _numbers(config, VOCABULARIES))


def tokens(config: Any) -> set[int]:
    """The token ids in a config and its nested configs."""
    found: set[int] = set()
    for part in _parts(config):
        for name, value in vars(part).items():
            if is_token(name) and type(value) is int:
                found.add(value)
            elif is_token(name) and isinstance(value, list | tuple):
                found.update(value)
    return {token for token in found if token >= 0}


def take_tokens(config: Any, ids: Tensor) -> Iterator[str]:
    """Reduce the vocabulary of a config to these token ids, renumbered in order. Yield descriptions of the changes."""
    size, largest = max(LEAST_TOKENS, len(ids)), int(ids.max())
    for part, name, value in list(_numbers(config, VOCABULARIES)):
        if value > max(size, largest):
            setattr(part, name, size)
            yield f"{size} of {value} tokens"
    for part in list(_parts(config)):
        for name, value in list(vars(part).items()):
            if is_token(name) and type(value) is int and value >= 0:
                setattr(part, name, int(torch.searchsorted(ids, value)))
            elif is_token(name) and isinstance(value, list | tuple):
                setattr(part, name, [int(torch.searchsorted(ids, token)) for token in value])
