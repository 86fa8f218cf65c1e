"""Work: the model, initial weights and batches of all contenders, generated from seeds.

This module runs in each contender's own environment, with the version of transformers that is installed there.
"""

import zlib
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

LEARNING_RATE = 3e-4

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """A model ("llama", or "gpt2" with tied embeddings) and the size of its batches.

    A batch has `microbatches` × `microbatch` samples of `length` tokens. Its labels equal its token ids.
    """

    family: str = "llama"
    hidden: int = 448
    heads: int = 7
    layers: int = 8
    vocabulary: int = 2048
    length: int = 128
    microbatch: int = 2
    microbatches: int = 8

    def having(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def __str__(self) -> str:
        return f"{self.family}, m={self.microbatches}"

    @property
    def samples(self) -> int:
        return self.microbatch * self.microbatches

    def config(self) -> Any:
        # Eager attention in GPT-2 for all contenders: with sdpa, ColossalAI's GPT-2 attends to future tokens.
        if self.family == "gpt2":
            return GPT2Config(
                vocab_size=self.vocabulary,
                n_embd=self.hidden,
                n_head=self.heads,
                n_layer=self.layers,
                n_positions=max(self.length, 256),
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                resid_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
                use_cache=False,
                attn_implementation="eager",
            )
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=-(-self.hidden * 8 // 3 // 64) * 64,
            num_attention_heads=self.heads,
            num_hidden_layers=self.layers,
            max_position_embeddings=max(self.length, 256),
            use_cache=False,
            attn_implementation="sdpa",
        )

    def model(self) -> Any:
        """Build the model in training mode. A parameter's name seeds its values, so all contenders start equal."""
        model = AutoModelForCausalLM.from_config(self.config())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _draw(name, parameter)
        return model.train()

    def batch(self, seed: int, length: int | None = None) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(self.vocabulary, (self.samples, length or self.length), generator=generator)
        return {"input_ids": ids, "labels": ids}

    def share(self, batch: Batch, rank: int, size: int) -> list[Batch]:
        """Return the microbatches of data-parallel replica `rank` of `size`."""
        parts = self.split(batch)
        return parts[rank * len(parts) // size : (rank + 1) * len(parts) // size]

    def split(self, batch: Batch) -> list[Batch]:
        parts = [tensor.split(self.microbatch) for tensor in batch.values()]
        return [dict(zip(batch, tensors)) for tensors in zip(*parts, strict=True)]


def _draw(name: str, parameter: nn.Parameter) -> None:
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.ndim == 1:
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
