"""DeepSpeed: a PipelineModule over a list of layers, with TiedLayerSpec for a tied embedding and head."""

from functools import cache
from typing import Any

import deepspeed  # type: ignore[import-not-found]
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.speed.stages import HandStage, causal_loss
from benchmarks.speed.work import LEARNING_RATE, Batch, Work


class Trainer:
    def __init__(self, work: Work, rank: int, size: int, dynamic_shape: bool = False) -> None:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        self.work = work
        module = PipelineModule(
            layers=_layers(work),
            num_stages=size,
            loss_fn=causal_loss,
            partition_method="uniform",
            dynamic_shape=dynamic_shape,
        )
        self.engine, *_ = deepspeed.initialize(model=module, config=settings(work, work.microbatches))
        _model.cache_clear()

    def step(self, batch: Batch) -> float:
        microbatches = [(part["input_ids"], part["labels"]) for part in self.work.split(batch)]
        return float(self.engine.train_batch(iter(microbatches)))

    def report(self) -> dict[str, Any]:
        return {}


def settings(work: Work, microbatches: int) -> dict[str, Any]:
    """Return DeepSpeed's config for this number of microbatches per rank."""
    adamw = {"lr": LEARNING_RATE, "weight_decay": 0.01, "torch_adam": True, "adam_w_mode": True}
    return {
        "train_micro_batch_size_per_gpu": work.microbatch,
        "gradient_accumulation_steps": microbatches,
        "optimizer": {"type": "AdamW", "params": adamw},
        "gradient_clipping": 0.0,  # the default is 1.0
        "steps_per_print": 10**9,
    }


def _layers(work: Work) -> list[Any]:
    """Return specs of the embedding, each layer (the last one with the final norm) and the head."""
    blocks = [LayerSpec(_Block, work, k) for k in range(work.layers)]
    if work.family == "gpt2":
        embedding = TiedLayerSpec("tokens", _Embedding, work)
        return [embedding, *blocks, TiedLayerSpec("tokens", _Embedding, work, forward_fn=_logits)]
    return [LayerSpec(_Embedding, work), *blocks, LayerSpec(_Head, work)]


class _Embedding(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.stage = HandStage(_model(work), 0, 0)
        self.weight = _model(work).get_input_embeddings().weight  # TiedLayerSpec ties this attribute

    def forward(self, ids: Tensor) -> Tensor:
        return self.stage.embed(ids)


class _Block(nn.Module):
    def __init__(self, work: Work, k: int) -> None:
        super().__init__()
        self.stage = HandStage(_model(work), k, k + 1, ends=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.stage(hidden)


class _Head(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.head = _model(work).lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


def _logits(embedding: Any, hidden: Tensor) -> Tensor:
    return F.linear(hidden, embedding.weight)


@cache
def _model(work: Work) -> Any:
    return work.model()
