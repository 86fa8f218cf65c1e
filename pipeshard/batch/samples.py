"""Samples: the batch that a model is traced with: the user's, the dataset's first samples, or dummy inputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from pipeshard.batch.batch import Batch
from pipeshard.batch.batch_dims import BatchDims, refuse_unknown
from pipeshard.batch.media import read_batch
from pipeshard.errors import BatchError
from pipeshard.hf import IDS, LABELS, MASK, PIXELS, has_label_per_sample, image_shape, main_input

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
    collate_fn = getattr(dataloader, "collate_fn", None)
    if collate_fn is None or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return None
    size, sampler = getattr(dataloader, "batch_size", None), getattr(dataloader, "batch_sampler", None)
    with torch.random.fork_rng(devices=[]):
        if size is None and sampler is None:  # the dataset's entries are batches
            return collate_fn(dataset[0])
        size = size or getattr(sampler, "batch_size", None) or 1
        samples = [dataset[k] for k in range(min(len(dataset), size))]
        tokens = samples[0].get(IDS) if isinstance(samples[0], Mapping) else None
        if collate_fn is default_collate and _is_numbers(tokens):
            raise BatchError(
                "the dataset's samples have lists of tokens, which torch's default_collate takes apart: use "
                "plugin.prepare_dataloader(dataset, batch_size), pass collate_fn=transformers.default_data_collator "
                f"(or {COLLATORS}, which pad) to the DataLoader, or call dataset.with_format('torch')"
            )
        return collate_fn(samples)


def _is_numbers(value: Any) -> bool:
    """Whether this is a list of numbers, or of such lists."""
    return isinstance(value, list) and (not value or isinstance(value[0], int | float) or _is_numbers(value[0]))


def made_up(model: nn.Module, rows: int = 2, length: int = 8) -> dict[str, Tensor]:
    """Dummy inputs: `rows` samples, of `length` tokens each where the model takes tokens.

    Raises BatchError for a model that takes something else than tokens or images of one size.
    """
    if main_input(model) == IDS:
        ids = torch.zeros(rows, length, dtype=torch.int64)
        return {IDS: ids, MASK: torch.ones_like(ids), LABELS: ids[:, 0] if has_label_per_sample(model) else ids}
    if main_input(model) == PIXELS and (shape := image_shape(model)) is not None:
        return {PIXELS: torch.zeros(rows, *shape), LABELS: torch.zeros(rows, dtype=torch.int64)}
    raise BatchError(
        f"what {type(model).__name__} takes (main input {main_input(model)!r}) cannot be made up: pass a batch "
        "(PipelinePlugin(dry_run_input=...), pipeshard.plan(model, batch, ...)), or a dataloader over an indexable "
        "dataset to booster.boost"
    )


def find_sample(
    model: nn.Module,
    dry_run_input: Any,
    dataloader: DataLoader[Any] | None,
    batch_dims: BatchDims,
    size: int,
    device: torch.device,
) -> Batch:
    """The user's `dry_run_input` (a batch, or a function `fn(size, device)` that makes one), the dataset's first
    samples, or else dummy inputs for the model.

    Raises BatchError for what cannot be read or made up, ConfigurationError for declared leaves that it has not.
    """
    is_function = callable(dry_run_input) and not isinstance(dry_run_input, Mapping)
    data = dry_run_input(size, device) if is_function else dry_run_input
    if data is None and dataloader is not None:
        data = first_samples(dataloader)
    batch = read_batch(model, made_up(model) if data is None else data, batch_dims)
    if data is not None:
        refuse_unknown(batch.paths, batch_dims)
    return batch
