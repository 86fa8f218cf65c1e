"""speechbrain: recognition, speakers, separation and synthesis, with its own losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from speechbrain.lobes.models.conv_tasnet import MaskNet
from speechbrain.lobes.models.CRDNN import CRDNN
from speechbrain.lobes.models.dual_path import Dual_Path_Model, SBTransformerBlock
from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN
from speechbrain.lobes.models.RNNLM import RNNLM
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.lobes.models.transformer.TransformerLM import TransformerLM
from speechbrain.lobes.models.Xvector import Xvector
from speechbrain.nnet.losses import ctc_loss, nll_loss
from speechbrain.nnet.pooling import StatisticsPooling
from torch import Tensor, nn
from torch.nn import functional

from tests.packages.model import Model, Remedy, cutting

WORDS, FRAMES, FEATURES = 12, 24, 16


class Recognizer(nn.Module):
    """An encoder with a head."""

    def __init__(self, encoder: nn.Module, width: int, count: int = WORDS) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, count)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(x))
        return found


class Transformer(nn.Module):
    """TransformerASR with its two heads, as the recipes have them."""

    def __init__(self, kind: str, module: str = "transformer") -> None:
        super().__init__()
        self.model = TransformerASR(
            tgt_vocab=WORDS,
            input_size=FEATURES,
            d_model=32,
            nhead=2,
            num_encoder_layers=3,
            num_decoder_layers=2,
            d_ffn=64,
            dropout=0.0,
            encoder_module=module,
            attention_type=kind,
            normalize_before=True,
            causal=False,
            kernel_size=5,
        )
        self.ctc, self.words = nn.Linear(32, WORDS), nn.Linear(32, WORDS)

    def forward(self, src: Tensor, tgt: Tensor) -> tuple[Tensor, Tensor]:
        encoded, decoded = self.model(src, tgt)
        return self.ctc(encoded), self.words(decoded)


def recorded() -> dict[str, Tensor]:
    return {"x": torch.randn(4, FRAMES, FEATURES), "criterion.text": torch.randint(1, WORDS, (4, 3))}


def transcribed() -> dict[str, Tensor]:
    words = torch.randint(1, WORDS, (4, 4))
    return {"src": torch.randn(4, FRAMES, FEATURES), "tgt": words, "criterion.text": words}


def ctc(output: Any, batch: Any) -> Tensor:
    ones = torch.ones(len(output))
    return ctc_loss(output.log_softmax(-1), batch["criterion.text"], ones, ones, blank_index=0)


def joint(output: Any, batch: Any) -> Tensor:
    text = batch["criterion.text"]
    told = nll_loss(output[1].log_softmax(-1), text)
    return 0.3 * ctc(output[0], batch) + 0.7 * told


def speakers() -> dict[str, Tensor]:
    return {"x": torch.randn(4, FRAMES, FEATURES), "criterion.speaker": torch.randint(WORDS, (4,))}


def speaker(output: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(output.squeeze(1), batch["criterion.speaker"])


def words() -> dict[str, Tensor]:
    return {"x": torch.randint(1, WORDS, (4, 8)), "criterion.next": torch.randint(1, WORDS, (4, 8))}


def next_word(output: Any, batch: Any) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    return functional.cross_entropy(logits.flatten(0, 1), batch["criterion.next"].flatten())


def mixtures() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8, 40), "criterion.masks": torch.randn(2, 4, 8, 40).transpose(0, 1).contiguous()}


def masked(output: Any, batch: Any) -> Tensor:
    return functional.l1_loss(output.transpose(0, 1), batch["criterion.masks"])


class Named(nn.Module):
    """One whose argument is called x, as in the batches here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


def dual_path() -> nn.Module:
    blocks: list[nn.Module] = [SBTransformerBlock(1, 8, 2, d_ffn=16) for _ in range(2)]
    return Named(Dual_Path_Model(8, 8, blocks[0], blocks[1], num_layers=3, K=8, num_spks=2))


def crdnn() -> nn.Module:
    return CRDNN(
        input_shape=(None, None, FEATURES),
        cnn_channels=(4, 4),
        rnn_layers=2,
        rnn_neurons=8,
        dnn_neurons=16,
        dropout=0.0,
    )


def xvector() -> nn.Module:
    model = Xvector(in_channels=FEATURES, tdnn_channels=[16] * 4 + [32], lin_neurons=16)
    for module in model.modules():
        if isinstance(module, StatisticsPooling):
            module.eps = 0.0  # of the random numbers that it adds to the mean
    return model


def of(name: str, build: Callable[[], nn.Module], batch: Any, loss: Any, *remedies: Remedy) -> Model:
    return Model("speechbrain", name, build, batch, loss, most=2 if remedies else 3, remedies=remedies)


MODELS = [
    of("CRDNN, CTC", lambda: Recognizer(crdnn(), 16), recorded, ctc),
    of("TransformerASR", lambda: Transformer("regularMHA"), transcribed, joint),
    of("TransformerASR, Conformer", lambda: Transformer("RelPosMHAXL", "conformer"), transcribed, joint),
    of("TransformerASR, Branchformer", lambda: Transformer("regularMHA", "branchformer"), transcribed, joint),
    of(
        "ECAPA-TDNN",
        lambda: Recognizer(
            ECAPA_TDNN(FEATURES, channels=[16] * 4 + [48], attention_channels=8, lin_neurons=16, se_channels=8), 16
        ),
        speakers,
        speaker,
    ),
    of("x-vector", lambda: Recognizer(xvector(), 16), speakers, speaker),
    of(
        "TransformerLM",
        lambda: Named(TransformerLM(WORDS, d_model=32, nhead=2, num_encoder_layers=3, d_ffn=64, dropout=0.0)),
        words,
        next_word,
    ),
    of(
        "RNNLM",
        lambda: Named(RNNLM(WORDS, embedding_dim=16, dropout=0.0, rnn_layers=2, rnn_neurons=16)),
        words,
        next_word,
        cutting("model.rnn"),
    ),
    of(
        "ConvTasNet's masks",
        lambda: Named(MaskNet(8, 8, 16, 3, 3, 2, C=2)),
        mixtures,
        masked,
        cutting("model.temporal_conv_net.temporalblock_0_0"),
    ),
    of("SepFormer's masks", dual_path, mixtures, masked),
]
