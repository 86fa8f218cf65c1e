"""pytorch-metric-learning: its losses over the pairs and triplets of a batch, and its losses with trained weights."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn

from tests.packages.model import Model, returned

CLASSES, WIDTH = 4, 8
ONE = {"num_microbatches": 1}
PAIRS = ("ContrastiveLoss", "TripletMarginLoss", "NTXentLoss", "SupConLoss", "MultiSimilarityLoss", "CircleLoss",
         "SignalToNoiseRatioContrastiveLoss", "NPairsLoss", "FastAPLoss", "LiftedStructureLoss",
         "GeneralizedLiftedStructureLoss", "TupletMarginLoss")  # fmt: skip
WEIGHTS: dict[str, dict[str, Any]] = {
    "ArcFaceLoss": {},
    "CosFaceLoss": {},
    "ProxyNCALoss": {},
    "ProxyAnchorLoss": {},
    "NormalizedSoftmaxLoss": {},
    "SoftTripleLoss": {},
}


def encoder() -> nn.Module:
    layers = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, WIDTH))


def samples(key: str) -> dict[str, Tensor]:
    return {"input": torch.randn(8, 8), key: torch.tensor([0, 0, 1, 1, 0, 1, 0, 1])}


def of_pairs(name: str) -> Model:
    loss = getattr(losses, name)()

    def of_batch(output: Any, batch: Any) -> Tensor:
        found: Tensor = loss(output, batch["criterion.labels"])
        return found

    return Model("pytorch-metric-learning", name, encoder, lambda: samples("criterion.labels"), of_batch, options=ONE)


def of_mined(output: Any, batch: Any) -> Tensor:
    pairs = miners.MultiSimilarityMiner()(output, batch["criterion.labels"])
    found: Tensor = losses.TripletMarginLoss()(output, batch["criterion.labels"], pairs)
    return found


class WithLoss(nn.Module):
    """A loss with weights of its own in the model that trains them."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.encoder, self.loss = encoder(), loss

    def forward(self, input: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.loss(self.encoder(input), labels)
        return found


def of_weights(name: str) -> Model:
    def build() -> nn.Module:
        return WithLoss(getattr(losses, name)(CLASSES, WIDTH, **WEIGHTS[name]))

    return Model("pytorch-metric-learning", name, build, lambda: samples("labels"), returned)


MODELS = [
    *(of_pairs(name) for name in PAIRS),
    *(of_weights(name) for name in WEIGHTS),
    Model(
        "pytorch-metric-learning",
        "TripletMarginLoss, mined",
        encoder,
        lambda: samples("criterion.labels"),
        of_mined,
        options=ONE,
    ),
]
