"""Collate: how the samples of a dataset become a batch, where a dataloader does not say."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from pipeshard.errors import BatchError

COLLATORS = "DataCollatorForSeq2Seq(tokenizer), DataCollatorWithPadding(tokenizer)"


def collate(samples: list[Any]) -> Any:
    """torch's default_collate, or, for mappings with lists of numbers (as a tokenizer leaves in a `datasets.Dataset`),
    transformers' default_data_collator, as its Trainer does: `label` becomes `labels`, strings are left out.

    Raises BatchError for lists of different lengths.
    """
    if not (isinstance(samples[0], Mapping) and any(map(_is_numbers, samples[0].values()))):
        return default_collate(samples)
    from transformers import default_data_collator

    try:
        return default_data_collator(samples, return_tensors="pt")
    except ValueError as error:
        raise BatchError(
            f"the samples' lists do not make a tensor ({error}): pad them, by collate_fn=transformers.{COLLATORS} or "
            "the like, or by padding='max_length' where they are tokenized"
        ) from error


def first_samples(dataloader: DataLoader[Any]) -> Any:
    """What the dataloader would make of its dataset's first samples; nothing of its order or its state is used up.

    Raises BatchError where it would take lists of tokens apart.
    """
    dataset: Any = getattr(dataloader, "dataset", None)
    made_by = getattr(dataloader, "collate_fn", None)
    if made_by is None or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return None
    size, sampler = getattr(dataloader, "batch_size", None), getattr(dataloader, "batch_sampler", None)
    with torch.random.fork_rng(devices=[]):
        if size is None and sampler is None:  # the dataset's entries are batches
            return made_by(dataset[0])
        size = size or getattr(sampler, "batch_size", None) or 1
        samples = [dataset[k] for k in range(min(len(dataset), size))]
        tokens = samples[0].get("input_ids") if isinstance(samples[0], Mapping) else None
        if made_by is default_collate and _is_numbers(tokens):
            raise BatchError(
                "the dataset's samples have lists of tokens, which torch's default_collate takes apart: use "
                "plugin.prepare_dataloader(dataset, batch_size), pass collate_fn=transformers.default_data_collator "
                f"(or {COLLATORS}, which pad) to the DataLoader, or call dataset.with_format('torch')"
            )
        return made_by(samples)


def _is_numbers(value: Any) -> bool:
    """Whether this is a list of numbers, or of such lists."""
    return isinstance(value, list) and (not value or isinstance(value[0], int | float) or _is_numbers(value[0]))
