"""Tests of a made-up architecture with everything that is hard to cut: it is exact without a policy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeshard.errors import TraceError
from tests import zoo
from tests.pool import Pool
from tests.unsplit import LEARNING_RATE, Split, gradient_error, parameter_error

pytestmark = pytest.mark.local

H = 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(H), nn.Linear(H, H)

    def forward(self, x: Tensor, side: Tensor) -> dict[str, Tensor]:
        y = x + torch.tanh(self.linear(self.norm(x)) + side)
        return {"x": y, "order": y.sum(-1).argsort(-1)}


class MadeUp(nn.Module):
    """Glue that scales and writes in place, a skip over three layers, integers that route, a layer called twice, a
    parameter on the container, the embedding's weight read by glue and tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCABULARY, H)
        self.gain = nn.Parameter(torch.ones(H))
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.side = nn.Linear(H, H)
        self.head = nn.Linear(H, H)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids) * 12.0
        side = self.side(x)
        skip = x
        for k, layer in enumerate([*self.layers[:4], self.layers[1], *self.layers[4:]]):
            out = layer(x, side * self.gain)
            order = out["order"]
            x = out["x"].gather(1, order.unsqueeze(-1).expand(-1, -1, H))
            if k == 3:
                x += skip
                x *= 0.5
                skip = order
        logits = self.head(x + skip.unsqueeze(-1)) @ self.embed.weight.T
        return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def train(m: int, p2p: str) -> tuple[int, ...]:
    torch.manual_seed(0)
    model = MadeUp()
    unsplit = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(unsplit.parameters(), lr=LEARNING_RATE)
    split = Split(model, dist.get_world_size(), _batch(0), num_microbatches=m, p2p=p2p)
    for seed in range(3):
        data: Any = _batch(seed)
        reference = unsplit(**data)
        reference["loss"].backward()
        out = split.backward(data, return_outputs=True)
        assert float(out["loss"]) == pytest.approx(float(reference["loss"].detach()), rel=1e-6)
        assert gradient_error(split, unsplit) < 1e-5
        if out["outputs"] is not None:
            assert torch.allclose(out["outputs"]["logits"], reference["logits"], atol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        split.step()
    assert parameter_error(split, unsplit) < LEARNING_RATE / 10
    return split.model.pipeline.policy.stages


def _batch(seed: int) -> dict[str, Tensor]:
    data = zoo.batch("bert", rows=6, length=7 + seed, seed=seed)
    return {"input_ids": data["input_ids"], "labels": data["labels"]}


@pytest.mark.turns
@pytest.mark.parametrize(
    ("p", "m", "p2p"), [(1, 3, "broadcast"), (2, 1, "broadcast"), (3, 3, "isend"), (4, 6, "broadcast")]
)
def test_a_made_up_architecture_is_exact(pool: Pool, p: int, m: int, p2p: str) -> None:
    assert pool.run(train, p, m, p2p)[0][-1] == p - 1


class Deciding(MadeUp):
    """Glue that asks an activation which way to go, by a list."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        if max(self.layers[0](x, x)["x"].amax((1, 2)).tolist()) > 0:
            x = 2 * x
        logits = self.head(x) @ self.embed.weight.T
        return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def boost_deciding() -> None:
    Split(Deciding(), dist.get_world_size(), _batch(0), num_microbatches=2)


@pytest.mark.turns
def test_glue_that_branches_on_an_activation_is_refused_with_its_line(pool: Pool) -> None:
    line = 'if max(self.layers[0](x, x)["x"].amax((1, 2)).tolist()) > 0:'
    for message in pool.run_expecting(TraceError, boost_deciding, 2):
        assert "test_made_up.py:" in message and line in message
    pool.run(boost_deciding, 1)


class Normed(nn.Module):
    """Running statistics without a parameter, and a counter that glue writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(zoo.VOCABULARY, H), nn.Linear(H, 5)
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(4))
        self.norm = nn.BatchNorm1d(H, affine=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        x = self.embed(input_ids).mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = self.head(self.norm(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def statistics(folder: str) -> None:
    torch.manual_seed(0)
    model = Normed()
    unsplit = copy.deepcopy(model)
    ids = _batch(0)["input_ids"]
    data = {"input_ids": ids, "labels": ids[:, 0] % 5}
    split = Split(model, dist.get_world_size(), data, num_microbatches=1)
    for _ in range(3):
        unsplit(**data)
        split.backward(data)
    split.booster.save_model(split.model, f"{folder}/one.safetensors")
    saved = load_file(f"{folder}/one.safetensors")
    for name, buffer in unsplit.named_buffers():
        assert torch.allclose(saved[name], buffer), name


@pytest.mark.turns
def test_running_statistics_without_parameters(pool: Pool, tmp_path: Path) -> None:
    pool.run(statistics, 2, str(tmp_path))
