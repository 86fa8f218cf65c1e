"""Follower: a model that is boosted together with another model, and follows its weights (a momentum encoder)."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor

import pipeshard
from pipeshard.split.materialize import is_released
from tests.hunt.nets import Net, V, data


class Follows(Net):
    """Is trained to give what a momentum encoder gives."""

    def forward(self, ids: Tensor, labels: Tensor, keys: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.body(self.embed(ids)))
        loss = self.loss(logits, labels)
        return {"loss": loss if keys is None else loss + (logits - keys).square().mean(), "logits": logits}


def momentum_encoder() -> list[str]:
    """A model that follows another one, boosted by itself and moved after optimizer.step(), beside the unsplit two."""
    torch.manual_seed(0)
    unsplit = Follows()
    unsplit_slow, model, slow = (copy.deepcopy(unsplit) for _ in range(3))
    size = dist.get_world_size()
    options = {"pp_size": size, "num_microbatches": 2, "verify": False}
    sample = {**data(0), "keys": torch.zeros(4, 6, V)}
    following = pipeshard.initialize(slow, dry_run_input=data(0), **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (unsplit, model)]
    engine = pipeshard.initialize(model, optimizers[1], dry_run_input=sample, **options)
    found = []
    for step in range(3):
        batch = data(step)
        with torch.no_grad():
            wanted = unsplit_slow(**batch)["logits"]
            outputs = following.execute_pipeline(iter([batch]), return_outputs="logits")["outputs"]
        keys = outputs["logits"].clone() if outputs is not None else torch.empty(4, 6, V)
        dist.broadcast(keys, size - 1)
        loss = engine.execute_pipeline(iter([{**batch, "keys": keys}]))["loss"]
        expected = unsplit(**batch, keys=wanted)["loss"]
        expected.backward()
        if not abs(float(loss) - float(expected.detach())) <= 1e-5:
            found.append(f"step {step}: loss {float(loss)}, unsplit {float(expected.detach())}")
        for optimizer in (optimizers[0], engine.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for kept, new in ((unsplit_slow, unsplit), (slow, model)):
                for of_slow, of_model in zip(kept.parameters(), new.parameters(), strict=True):
                    if not is_released(of_model):
                        of_slow.lerp_(of_model, 0.1)
    return found
