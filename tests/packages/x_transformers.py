"""x-transformers: its wrappers, and the variants of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import x_transformers as x
from torch import Tensor, nn
from torch.nn import functional

from tests.packages.model import Model, returned

TOKENS, LENGTH = 50, 12
ATTENTION: dict[str, Any] = {"dim": 32, "depth": 3, "heads": 2, "attn_dim_head": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "rotary xpos": {"rotary_xpos": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "T5's relative positions": {"rel_pos_bias": True},
    "dynamic position bias": {"dynamic_pos_bias": True},
    "RMSNorm, SwiGLU": {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
    "grouped queries": {"attn_kv_heads": 1},
    "sandwich": {"sandwich_coef": 1},
    "macaron": {"macaron": True},
    "post-norm": {"pre_norm": False},
    "residual attention": {"residual_attn": True, "pre_norm": False},
    "talking heads": {"attn_pre_talking_heads": True},
    "persistent memory": {"attn_num_mem_kv": 4},
    "gated attention": {"attn_gate_values": True},
    "gated residual": {"gate_residual": True},
    "scaled residual": {"scale_residual": True},
    "shifted tokens": {"shift_tokens": 1},
    "query-key norm": {"attn_qk_norm": True},
    "value residual": {"add_value_residual": True},
    "hyper-connections": {"num_residual_streams": 2},
    "sparse attention": {"attn_sparse_topk": 4},
    "ReLU squared": {"ff_relu_squared": True},
}


def text() -> dict[str, Tensor]:
    return {"x": torch.randint(TOKENS, (4, LENGTH))}


def next_token(output: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(output[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten())


def decoder(**given: Any) -> nn.Module:
    return x.TransformerWrapper(num_tokens=TOKENS, max_seq_len=16, attn_layers=x.Decoder(**ATTENTION, **given))


def variant(name: str) -> Model:
    return Model("x-transformers", f"decoder, {name}", lambda: decoder(**VARIANTS[name]), text, next_token)


def wrapper(name: str, build: Callable[[], nn.Module], batch: Callable[[], Any], loss: Any = returned) -> Model:
    return Model("x-transformers", name, build, batch, loss)


def encoder() -> nn.Module:
    return x.TransformerWrapper(num_tokens=TOKENS, max_seq_len=16, attn_layers=x.Encoder(**ATTENTION))


def of_tokens(output: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), batch["criterion.tokens"].flatten())


def vision() -> nn.Module:
    return x.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=10, attn_layers=x.Encoder(**ATTENTION))


def continuous() -> nn.Module:
    layers = x.Decoder(**ATTENTION)
    return x.ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=16, attn_layers=layers)


MODELS = [
    *(variant(name) for name in VARIANTS),
    wrapper("AutoregressiveWrapper", lambda: x.AutoregressiveWrapper(decoder()), text),
    wrapper("encoder", encoder, lambda: text() | {"criterion.tokens": torch.randint(TOKENS, (4, LENGTH))}, of_tokens),
    wrapper(
        "XTransformer",
        lambda: x.XTransformer(
            dim=32,
            enc_num_tokens=TOKENS,
            enc_depth=2,
            enc_heads=2,
            enc_max_seq_len=16,
            dec_num_tokens=TOKENS,
            dec_depth=2,
            dec_heads=2,
            dec_max_seq_len=16,
        ),
        lambda: {"src": torch.randint(TOKENS, (4, 10)), "tgt": torch.randint(TOKENS, (4, LENGTH))},
    ),
    wrapper(
        "ViTransformerWrapper",
        vision,
        lambda: {"img": torch.randn(4, 3, 32, 32), "criterion.labels": torch.randint(10, (4,))},
        lambda output, batch: functional.cross_entropy(output, batch["criterion.labels"]),
    ),
    wrapper(
        "ContinuousTransformerWrapper",
        continuous,
        lambda: {"x": torch.randn(4, LENGTH, 8), "criterion.target": torch.randn(4, LENGTH, 8)},
        lambda output, batch: functional.mse_loss(output, batch["criterion.target"]),
    ),
    wrapper(
        "ContinuousAutoregressiveWrapper",
        lambda: x.ContinuousAutoregressiveWrapper(continuous()),
        lambda: {"x": torch.randn(4, LENGTH, 8)},
    ),
]
