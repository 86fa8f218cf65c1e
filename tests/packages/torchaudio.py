"""torchaudio: speech recognition, separation and synthesis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchaudio import models

from tests.packages.model import Model

WORDS = 12


def ctc(output: Any, batch: Any) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    scores = logits.log_softmax(-1).transpose(0, 1)
    frames = torch.full((logits.shape[0],), logits.shape[1])
    letters = torch.full((logits.shape[0],), batch["criterion.text"].shape[1])
    return functional.ctc_loss(scores, batch["criterion.text"], frames, letters, reduction="sum") / logits.shape[0]


def spoken(frames: int, features: int) -> dict[str, Tensor]:
    return {"input": torch.randn(4, frames, features), "criterion.text": torch.randint(1, WORDS, (4, 3))}


def framed() -> dict[str, Tensor]:
    return spoken(20, 16) | {"lengths": torch.full((4,), 20)}


class Recognizer(nn.Module):
    """An encoder of torchaudio with a head for CTC."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, WORDS)

    def forward(self, input: Tensor, lengths: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(input, lengths)[0])
        return logits


def wave2vec() -> nn.Module:
    return models.wav2vec2_model(
        extractor_mode="group_norm",
        extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)],
        extractor_conv_bias=False,
        encoder_embed_dim=32,
        encoder_projection_dropout=0.0,
        encoder_pos_conv_kernel=8,
        encoder_pos_conv_groups=2,
        encoder_num_layers=3,
        encoder_num_heads=2,
        encoder_attention_dropout=0.0,
        encoder_ff_interm_features=64,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.0,
        encoder_layer_norm_first=False,
        encoder_layer_drop=0.0,
        aux_num_out=WORDS,
    )


class Wav2Letter(nn.Module):
    """Whose frames come after its letters."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.Wav2Letter(num_classes=WORDS, input_type="mfcc", num_features=16)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).transpose(1, 2)


def separated(output: Any, batch: Any) -> Tensor:
    return functional.l1_loss(output, batch["criterion.sources"])


def predicted(output: Any, batch: Any) -> Tensor:
    first = output[0] if isinstance(output, tuple) else output
    return functional.mse_loss(first, batch["criterion.target"])


MODELS = [
    Model(
        "torchaudio",
        "Wav2Vec2Model",
        wave2vec,
        lambda: {"waveforms": torch.randn(4, 800), "criterion.text": torch.randint(1, WORDS, (4, 3))},
        ctc,
    ),
    Model(
        "torchaudio",
        "Conformer",
        lambda: Recognizer(models.Conformer(16, 2, 32, 3, 7, use_group_norm=True), 16),
        framed,
        ctc,
    ),
    Model(
        "torchaudio",
        "Emformer",
        lambda: Recognizer(models.Emformer(16, 2, 32, 3, segment_length=4, right_context_length=4), 16),
        framed,
        ctc,
    ),
    Model(
        "torchaudio",
        "Wav2Letter",
        Wav2Letter,
        lambda: {"x": torch.randn(4, 16, 40), "criterion.text": torch.randint(1, WORDS, (4, 3))},
        ctc,
    ),
    Model(
        "torchaudio",
        "DeepSpeech",
        lambda: models.DeepSpeech(16, n_hidden=32, n_class=WORDS),
        lambda: {"x": torch.randn(4, 1, 20, 16), "criterion.text": torch.randint(1, WORDS, (4, 3))},
        ctc,
    ),
    Model(
        "torchaudio",
        "ConvTasNet",
        lambda: models.ConvTasNet(2, 8, 16, 3, 8, 16, 2, 2),
        lambda: {"input": torch.randn(4, 1, 160), "criterion.sources": torch.randn(4, 2, 160)},
        separated,
    ),
    Model(
        "torchaudio",
        "WaveRNN",
        lambda: models.WaveRNN([2, 2, 3], 8, 12, 2, 16, 16, 5, 8, 16, 8),
        lambda: {
            "waveform": torch.randn(4, 1, 12 * 4),
            "specgram": torch.randn(4, 1, 8, 8),
            "criterion.target": torch.randn(4, 1, 48, 8),
        },
        predicted,
    ),
]
