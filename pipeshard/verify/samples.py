"""Samples: chooses samples from a batch for each step of a proof, and splits them into microbatches of replicas."""

from dataclasses import dataclass

import torch
from torch import nn

from pipeshard.batch.batch import Batch, BatchDims
from pipeshard.batch.read import read_batch
from pipeshard.config import PipelineConfig
from pipeshard.hf import IDS, MASK, has_parameter, special_tokens, text_config, without_adapters
from pipeshard.slices.cut import sequence_of
from pipeshard.verify.reference import Copies
from pipeshard.verify.whole import is_batch_norm

ROWS, PARTS = 5, 2  # samples and microbatches of a step: the microbatches differ in size


@dataclass(frozen=True)
class Samples:
    """The choice of `count` samples for each step, for `replicas` replicas with `m` microbatches each."""

    count: int
    m: int
    replicas: int = 1

    @classmethod
    def few(cls, config: PipelineConfig, given: Copies) -> "Samples":
        """A few samples, for two replicas if the job has several replicas and the batch has enough samples. Batch norm
        needs two samples per microbatch. For two replicas, an optimizer must train only the model's parameters, and the
        loss must be over the samples of all replicas (loss_reduction="token")."""
        m = 1 if config.num_microbatches == 1 else PARTS
        parts, rows = 2 * m, given.sample.rows
        several = (config.dp_size or 1) > 1 and config.loss_reduction == "token"
        if not several or given.foreign():
            return cls(ROWS, m)
        if rows >= 2 * parts:
            return cls(2 * parts + 1, m, replicas=2)
        suffice = rows >= parts and not any(map(is_batch_norm, given.model.modules()))
        return cls(ROWS, m, replicas=2 if suffice else 1)

    @classmethod
    def all(cls, config: PipelineConfig, batch: Batch) -> "Samples":
        """The whole batch, split as in training."""
        return cls(batch.rows, len(batch.split(*config.cut)))

    def vary(self, batch: Batch) -> bool:
        """Whether the first two steps use different samples."""
        return batch.rows > self.count

    def of_step(self, batch: Batch, step: int) -> Batch:
        """The samples of a step: the first `count` in even steps, the last `count` in reverse order in odd steps."""
        order = range(batch.rows)
        return batch.take(torch.tensor((order[::-1] if step % 2 else order)[: self.count]))

    def of_replica(self, step: int, batch: Batch, replica: int) -> Batch:
        """The samples of one replica in a step."""
        rows = self.of_step(batch, step)
        sizes = [part.rows for part in rows.split(self.m * self.replicas)]
        before = sum(sizes[: replica * self.m])
        return rows.take(torch.arange(before, before + sum(sizes[replica * self.m : (replica + 1) * self.m])))


def with_drawn_ids(model: nn.Module, batch: Batch) -> Batch:
    """If all token ids of a batch are equal, as in dummy inputs, replace them with random ids of tokens that are not
    special. Equal samples have equal results, and equal tokens have equal hidden states at every position (with RoPE),
    so a comparison would not detect a model that mixes samples or positions."""
    base, ids = without_adapters(model)[1], batch.tensors.get(IDS)
    many = getattr(text_config(base), "vocab_size", None)
    if ids is None or ids.is_floating_point() or ids.unique().numel() > 1 or not isinstance(many, int):
        return batch
    special = {*special_tokens(base)}
    tokens = torch.tensor([token for token in range(many) if token not in special] or [*range(many)])
    drawn = tokens[torch.randint(len(tokens), ids.shape, generator=torch.Generator().manual_seed(0))]
    return batch.map(lambda path, leaf, _: drawn.to(leaf) if path == IDS else leaf)


def with_mask(model: nn.Module, batch: Batch, declared: BatchDims) -> Batch:
    """Add an attention_mask of ones if the model takes one and the batch has none, since later batches may have one."""
    data = batch.data
    if not isinstance(data, dict) or MASK in data or not has_parameter(model, MASK):
        return batch
    ones = torch.ones(batch.rows, sequence_of(batch), dtype=torch.int64, device=batch.device)
    return read_batch(model, {**data, MASK: ones}, declared)
