"""Entry: a call of a module of the model, in which all stages take part.

The code of `generate` calls the whole model, only its encoder, or another part of the model. Each such call is a
forward of the pipeline. The routes of the call come from the trace of a twin: the same call without a cache, and with
only the new positions. pipeshard traces the twin in the same way as a training batch.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.read import read_batch
from pipeshard.errors import UsageError
from pipeshard.hf import CACHES, DECODER_MASK, MASK, USES_CACHE, is_encoder_decoder, is_new, media_kind


def entry_of(model: nn.Module, path: str, arguments: Mapping[str, Any]) -> Batch:
    """The Batch of a call of the module `path` ("" for the model itself). `arguments` are the call's arguments by name.

    Raises BatchError if the arguments contain no tensor.
    """
    module = model.get_submodule(path)
    if not _generates(module):
        return replace(Batch.of(arguments), entry=path)
    batch = read_batch(module, arguments, lists=_NoSampleLists())
    # In a list of images, an entry is one image: its rows are not samples, even if there are as many rows as samples.
    images = {name: () for name in batch.tensors if media_kind(name) and re.search(r"\[\d+\]", name)}
    return replace(batch.owned({**batch.owners, **images}), entry=path)


class _NoSampleLists(dict[str, bool]):
    """Declares that no list has one entry per sample, since an encoder's output may have any number of entries."""

    def __contains__(self, path: object) -> bool:
        return True

    def __getitem__(self, path: str) -> bool:
        return False


def call_key(entry: Batch) -> tuple[Any, ...]:
    """A key that is equal for calls with the same structure and sizes."""
    tensors = ((path, leaf.shape, leaf.dtype) for path, leaf in entry.tensors.items())
    return (entry.entry, *tensors, *entry.others)


def counts_samples(model: nn.Module, entry: Batch) -> bool:
    """Whether the rows of a call are samples: the module generates or, like an encoder, takes only tensors with these
    rows. The rows of a vision tower may be patches, and its other tensors then have one row per image."""
    dims = [dim for leaf, dim in zip(entry.leaves, entry.row_dims, strict=True) if isinstance(leaf, Tensor)]
    return _generates(model.get_submodule(entry.entry)) or None not in dims


def arguments_by_name(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name. Raises UsageError if an argument is bound to a positional-only parameter or to
    `*args`."""
    if not args:
        return dict(kwargs)
    bound = inspect.signature(forward).bind(*args, **kwargs)
    kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
    given = bound.arguments
    if any(kinds[name] in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY) for name in given):
        raise UsageError(
            f"{getattr(forward, '__qualname__', forward)} receives arguments by positional-only parameters or *args, "
            "so a pipeline cannot generate with it. Declare a named parameter for each argument"
        )
    more = {name: given.pop(name) for name in list(given) if kinds[name] is inspect.Parameter.VAR_KEYWORD}
    return dict(given) | {key: value for extra in more.values() for key, value in extra.items()}


def twin(model: nn.Module, path: str, arguments: Mapping[str, Any], forward: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a call's twin: no caches, and masks that contain only the new positions."""
    kept = {name: value for name, value in arguments.items() if name not in CACHES}
    if USES_CACHE in inspect.signature(forward).parameters or USES_CACHE in kept:
        kept[USES_CACHE] = False
    module = model.get_submodule(path)
    is_decoder = is_encoder_decoder(module) and _generates(module)
    new = next((value.shape[1] for name, value in kept.items() if is_new(name, value, is_decoder)), None)
    if new is None or len(kept) == len(arguments):  # no cache of earlier positions
        return kept
    return {
        name: _newest(value, new) if name == (DECODER_MASK if is_decoder else MASK) else value
        for name, value in kept.items()
    }


def _generates(module: nn.Module) -> bool:
    """Whether this is a model that generates: the whole model or, inside adapters or a wrapper, the base model."""
    return hasattr(module, "generate")


def _newest(mask: Any, new: int) -> Any:
    """The last `new` positions of a mask, or of each mask in a mapping from kinds of layers to masks. A shorter mask is
    padded."""
    if isinstance(mask, Mapping):
        return {kind: _newest(part, new) for kind, part in mask.items()}
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4) or mask.shape[-1] == new:
        return mask
    return mask[..., -new:].contiguous() if mask.shape[-1] > new else torch.nn.functional.pad(mask, (0, new))[..., :new]
