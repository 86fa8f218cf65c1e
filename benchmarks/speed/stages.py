"""Hand-written stages of a Hugging Face model, as a user of torch's or DeepSpeed's pipelines writes them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class HandStage(nn.Module):
    """Layers `start` to `end` (exclusive) of a causal language model. The first stage also has the embedding, and the
    last stage has the norm and the head.

    Takes token ids (b, s) or hidden states (b, s, hidden); returns hidden states or logits (b, s, vocabulary).
    With `ends=False`, the embedding and the head are omitted.
    """

    def __init__(self, model: Any, start: int, end: int, ends: bool = True) -> None:
        super().__init__()
        llama = model.config.model_type == "llama"
        body = model.model if llama else model.transformer
        layers = body.layers if llama else body.h
        embeds, last = ends and start == 0, end == len(layers)
        self.tokens = (body.embed_tokens if llama else body.wte) if embeds else None
        self.positions = body.wpe if embeds and not llama else None
        self.rotary = body.rotary_emb if llama else None
        self.layers = nn.ModuleList(layers[start:end])
        self.norm = (body.norm if llama else body.ln_f) if last else None
        self.head = model.lm_head if last and ends else None

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.embed(x))

    def embed(self, x: Tensor) -> Tensor:
        if self.tokens is None:
            return x
        hidden = self.tokens(x)
        return hidden if self.positions is None else hidden + self.positions(_positions(x))

    def run(self, hidden: Tensor) -> Tensor:
        hidden = self.through_layers(hidden, **self._context(hidden))
        hidden = hidden if self.norm is None else self.norm(hidden)
        return hidden if self.head is None else self.head(hidden)

    def through_layers(self, hidden: Tensor, **context: Any) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, **context)
        return hidden

    def _context(self, hidden: Tensor) -> dict[str, Any]:
        """Arguments of all layers: rotary embeddings for llama's sdpa, a causal mask for GPT-2's eager attention."""
        if self.rotary is not None:
            return {"position_embeddings": self.rotary(hidden, _positions(hidden))}
        length = hidden.shape[1]
        mask = torch.full((length, length), torch.finfo(hidden.dtype).min).triu(1)
        return {"attention_mask": mask[None, None]}


def causal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens after the first."""
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])[None]
