"""Samples: the batch that a model is traced with, collated, given or a dummy."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from pipeshard.batch.batch import Batch
from pipeshard.batch.batch_dims import BatchDims, refuse_unknown
from pipeshard.batch.media import read_batch
from pipeshard.batch.tree import without_adapters
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


def made_up(model: nn.Module, rows: int = 2, length: int = 8) -> dict[str, Tensor]:
    """A batch of `rows` samples, of `length` tokens each where the model takes tokens.

    Raises BatchError for a model that takes something else than tokens or images of one size.
    """
    main: Any = getattr(model, "main_input_name", None)
    config: Any = getattr(model, "config", None)
    if main == "input_ids":
        ids = torch.zeros(rows, length, dtype=torch.int64)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        if type(without_adapters(model)[1]).__name__.endswith("SequenceClassification"):
            batch["labels"] = ids[:, 0]
        return batch
    if main == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = size if isinstance(size, Sequence) else (size, size)
        pixels = torch.zeros(rows, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": pixels, "labels": torch.zeros(rows, dtype=torch.int64)}
    raise BatchError(
        f"what {type(model).__name__} takes (main input {main!r}) cannot be made up: pass a batch "
        "(PipelinePlugin(dry_run_input=...), pipeshard.plan(model, batch, ...)), or a dataloader over an indexable "
        "dataset to booster.boost"
    )


def find_sample(
    model: nn.Module,
    given: Any,
    dataloader: DataLoader[Any] | None,
    batch_dims: BatchDims,
    size: int,
    device: torch.device,
) -> Batch:
    """What is `given` (a batch, or a function `fn(size, device)` that makes one), the dataset's first samples, or else
    one made up for the model.

    Raises BatchError for what cannot be read or made up, ConfigurationError for declared leaves that it has not.
    """
    data = given(size, device) if callable(given) and not isinstance(given, Mapping) else given
    if data is None and dataloader is not None:
        data = first_samples(dataloader)
    batch = read_batch(model, made_up(model) if data is None else data, batch_dims)
    if data is not None:
        refuse_unknown(batch.paths, batch_dims)
    return batch
