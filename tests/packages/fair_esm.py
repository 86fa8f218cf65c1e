"""fair-esm: protein language models of both generations, and the MSA transformer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from esm import Alphabet
from esm.model.esm1 import ProteinBertModel
from esm.model.esm2 import ESM2
from esm.model.msa_transformer import MSATransformer
from torch import Tensor, nn
from torch.nn import functional

from tests.packages.model import Model

LENGTH = 10


def residues(*shape: int) -> Callable[[], dict[str, Tensor]]:
    """Amino acids between the first and the last token, some of them to be told."""

    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(4, 24, (4, *shape, LENGTH))
        tokens[..., 0] = 0
        return {"tokens": tokens, "criterion.tokens": tokens.clone()}

    return batch


def told(output: Any, batch: Any) -> Tensor:
    logits, tokens = output["logits"], batch["criterion.tokens"]
    return functional.cross_entropy(logits.flatten(0, -2), tokens.flatten())


def esm1(arch: str, alphabet: str) -> nn.Module:
    options = Namespace(
        arch=arch,
        layers=4,
        embed_dim=32,
        ffn_embed_dim=64,
        attention_heads=2,
        max_positions=64,
        emb_layer_norm_before=True,
        token_dropout=False,
        final_bias=True,
        logit_bias=True,
    )
    model = ProteinBertModel(options, Alphabet.from_architecture(alphabet))
    for name, buffer in model.named_buffers():
        if name.endswith("_float_tensor"):
            buffer.zero_()  # it has whatever its memory had
    return model


def alignment() -> nn.Module:
    options = Namespace(
        layers=4,
        embed_dim=32,
        ffn_embed_dim=64,
        attention_heads=2,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_tokens=2**14,
        max_positions=64,
        embed_positions_msa=True,
    )
    return MSATransformer(options, Alphabet.from_architecture("msa_transformer"))


MODELS = [
    Model("fair-esm", "ESM-2", lambda: ESM2(4, 32, 2, token_dropout=False), residues(), told),
    Model("fair-esm", "ESM-2, token dropout", lambda: ESM2(4, 32, 2, token_dropout=True), residues(), told),
    Model("fair-esm", "ESM-1b", lambda: esm1("roberta_large", "ESM-1b"), residues(), told),
    Model("fair-esm", "ESM-1", lambda: esm1("protein_bert_base", "ESM-1"), residues(), told),
    Model("fair-esm", "MSA Transformer", alignment, residues(3), told),
]
