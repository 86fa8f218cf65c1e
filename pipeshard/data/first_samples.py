"""First samples: reads the batch with which boost traces the model, without advancing the user's data."""

import copy
import itertools
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from pipeshard.batch.batch import Batch, BatchDims, refuse_unknown
from pipeshard.batch.read import COLLATORS, dummy_inputs, is_numbers, read_batch
from pipeshard.batch.tree import is_keyed
from pipeshard.data.reach import MOST_ENTRIES, generators_kept, is_entered, reachable
from pipeshard.errors import BatchError, ConfigurationError, explained, summary
from pipeshard.graph.places import is_generator
from pipeshard.graph.rng import Draws
from pipeshard.hf import IDS

logger = logging.getLogger("pipeshard")
RESTORED_COLLECTIONS = {dict, OrderedDict, defaultdict, Counter, list, deque, set}


def find_sample(
    model: nn.Module,
    dry_run_input: Any,
    dataloader: DataLoader[Any] | None,
    batch_dims: BatchDims,
    size: int,
    device: torch.device,
    for_search: bool = False,
) -> Batch:
    """Read a batch from the first of the following that is available: the user's `dry_run_input` (a batch, or a
    function `fn(size, device)` that returns one), the dataset's first samples, and dummy inputs for the model.

    Raises BatchError if no batch can be read or generated, and ConfigurationError if the batch lacks a declared path.
    If `for_search`, also raises ConfigurationError if `dry_run_input` is a function, or if neither `dry_run_input` nor
    the dataset provides a batch: a search for a schedule requires the sizes of a training batch.
    """
    is_function = callable(dry_run_input) and not (isinstance(dry_run_input, Mapping) or is_keyed(dry_run_input))
    data = dry_run_input(size, device) if is_function else dry_run_input
    if data is None and dataloader is not None:
        data = first_samples(dataloader)
    if for_search and (data is None or is_function):
        why = "dry_run_input is a function" if is_function else "pipeshard has no batch"
        raise ConfigurationError(
            f"schedule='auto' requires the sizes of a whole batch, but {why}: pass dry_run_input=batch, with as many "
            "samples and tokens as a training batch. If a Trainer generates completions, pass the input_ids and labels "
            "of prompts with completions"
        )
    batch = read_batch(model, dummy_inputs(model) if data is None else data, batch_dims)
    if data is not None:
        refuse_unknown(batch.paths, batch_dims)
    return batch


def first_samples(dataloader: DataLoader[Any]) -> Any:
    """The dataset's first samples, collated by the dataloader's collate_fn. The loader's order and state, and the
    attributes of the dataset, do not change.

    Returns None for a loader that lacks a dataset or a collate_fn, for an empty dataset, and for a stream that cannot
    be copied or read in this process. Raises BatchError if default_collate would transpose lists of tokens, or if the
    dataset raises an error for the keys 0, 1, 2, ...
    """
    dataset: Any = getattr(dataloader, "dataset", None)
    collate_fn = getattr(dataloader, "collate_fn", None)
    if collate_fn is None or dataset is None:
        return None
    size, sampler = getattr(dataloader, "batch_size", None), getattr(dataloader, "batch_sampler", None)
    is_whole = size is None and sampler is None  # the dataset's entries are batches
    # a BatchSampler passed as the sampler yields lists of this many indices
    listed = getattr(getattr(dataloader, "sampler", None), "batch_size", None) if is_whole else None
    size = 1 if is_whole else size or getattr(sampler, "batch_size", None) or 1
    with _kept(dataset, collate_fn):
        if _is_indexed(dataset):
            with _explained(dataset):
                first = [*range(min(len(dataset), listed or size))]
                samples = [dataset[first]] if listed and first else [dataset[k] for k in first]
        else:
            samples = _first_of_stream(dataset, size)
        if not samples:
            return None
        if is_whole:
            return collate_fn(samples[0])
        tokens = samples[0].get(IDS) if isinstance(samples[0], Mapping) else None
        if collate_fn is default_collate and is_numbers(tokens):
            raise BatchError(
                "the dataset's samples contain lists of tokens, which torch's default_collate does not stack: use "
                "plugin.prepare_dataloader(dataset, batch_size), pass collate_fn=transformers.default_data_collator "
                f"(or {COLLATORS}, which pad) to the DataLoader, or call dataset.with_format('torch')"
            )
        return collate_fn(samples)


def _is_indexed(dataset: Any) -> bool:
    """Whether samples are read by index. A stream may also have a length, but inherits a `__getitem__` that raises."""
    own = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
    return own is not Dataset.__getitem__ and hasattr(dataset, "__len__")


def _explained(dataset: Any) -> AbstractContextManager[None]:
    return explained(
        lambda error: BatchError(
            f"boost reads the first samples of the {type(dataset).__name__} at the keys 0, 1, ... to trace the model, "
            f"but reading failed ({summary(error)}). If the sampler yields other keys, pass a batch: "
            "PipelinePlugin(dry_run_input=batch)"
        )
    )


@contextmanager
def _kept(dataset: Any, collate_fn: Any) -> Iterator[None]:
    """Context manager for reading samples. On exit, it restores the generators of the process, and the generators,
    attributes and collections of the dataset and the collator. It discards objects that the dataset or the collator
    creates on first use: a generator (in transformers' collators with a seed), or an open file, which a worker must not
    inherit. Large collections are not copied. If the length of a large collection has changed on exit, neither
    attributes nor collections are restored, since a cache and the list of its keys must match."""
    objects = list(reachable(dataset, collate_fn))
    attributes = [vars(value) for value in objects if is_entered(value) and hasattr(value, "__dict__")]
    collections = [value for value in objects if type(value) in RESTORED_COLLECTIONS]
    small = [held for held in collections if len(held) <= MOST_ENTRIES]
    kept = [(held, copy.copy(held)) for held in (*attributes, *small)]
    large = [(held, len(held)) for held in collections if len(held) > MOST_ENTRIES]
    try:
        with Draws.from_here(torch.device("cpu")), generators_kept(filter(is_generator, objects)):
            yield
    finally:
        if all(len(held) == length for held, length in large):
            for held, before in kept:
                _restore(held, before)


def _restore(held: Any, before: Any) -> None:
    """Replace the entries of `held`, a collection, with the entries of its earlier copy `before`."""
    if type(held) is dict:  # attributes, which other threads may read, are never absent
        for added in held.keys() - before.keys():
            del held[added]
    else:
        held.clear()
    (held.extend if isinstance(held, list | deque) else held.update)(before)


def _first_of_stream(dataset: Any, count: int) -> list[Any]:
    """The first samples of a copy of a stream, so that the stream itself does not advance.

    Returns an empty list if the stream cannot be copied (for example, because it holds a generator, a socket or an open
    file), or cannot be read in this process. The caller then uses dummy inputs or raises an error that requests a
    batch.
    """
    try:
        copied = copy.deepcopy(dataset, {id(value): value for value in _constants(dataset)})
        return list(itertools.islice(iter(copied), count))
    except Exception as error:  # the user's own code, which raises again when training reads the stream
        logger.debug("the first samples of %s cannot be read ahead: %s", type(dataset).__name__, error)
        return []


def _constants(dataset: Any) -> Iterator[Any]:
    """The stream's data. A copy of the stream shares this data, since copying it could double the memory."""
    seen: set[int] = set()
    while dataset is not None and id(dataset) not in seen:
        seen.add(id(dataset))
        for value in getattr(dataset, "__dict__", {}).values():
            if isinstance(value, Tensor | np.ndarray | str | bytes) or hasattr(value, "__array_interface__"):
                yield value
        dataset = getattr(dataset, "dataset", None)
