"""Rules: the loss rule of a batch that is split into two microbatches."""

from torch import nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.engine.loss import LossRule
from pipeshard.engine.loss_search import prove_loss_rule
from pipeshard.engine.loss_sizes import Sizes
from pipeshard.graph.dataflow import Dataflow


def find_loss_rule(model: nn.Module, flow: Dataflow, batch: Batch, criterion: Criterion | None) -> LossRule:
    return prove_loss_rule(model, flow, batch, criterion, Sizes.of(batch, 2)).rule
