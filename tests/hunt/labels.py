"""Labels: values other than -100 that a model's own loss ignores."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from tests.hunt.nets import Net, data


class Ignoring(Net):
    """Its own loss leaves out one value."""

    ignored = -1

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=self.ignored)


class Unlabelled(Ignoring):
    ignored = 255


class Padded(Ignoring):
    ignored = 0


class Unpadded(Ignoring):
    ignored = 3


def marked(mark: int, first: int = 0) -> Sequence[dict[str, Tensor]]:
    """Three batches; from the `first` on samples have different numbers of labels."""
    batches = [data(seed, length=length) for seed, length in enumerate((6, 6, 8))]
    for batch in batches[first:]:
        for row, labels in enumerate(batch["labels"]):
            labels[1 + row :] = mark
    return batches
