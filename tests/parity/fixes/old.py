"""Old: what tiny models need before transformers 5, in addition to the other files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.fixes import multimodal_lz, seq2seq, text, vision
from tests.parity.tiny import OLD

_DECODER = {"model_type": "bert", "is_decoder": True, "add_cross_attention": True}
_ROPE = {"rope_scaling": {"rope_type": "default"}}
_SPEECH, _IMAGE = seq2seq.CONFIGS["speech-encoder-decoder"], multimodal_lz.CONFIGS["vision-encoder-decoder"]


def _without_mask(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "attention_mask"}


def _with_positions(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """It counts the positions itself only with a cache."""
    batch = vision.BATCHES["imagegpt"](model, batch, generator)
    return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1])[None]}


def _in_sixes(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """No microbatch of one image: on CPU, batch norm of torch 2.13 mistakes the memory format of its gradient."""
    return {name: torch.cat([value, value[:2]]) for name, value in batch.items()}


_CONFIGS: dict[str, dict[str, Any]] = {
    "encoder-decoder": {"encoder": {"model_type": "bert"}, "decoder": _DECODER, "decoder_start_token_id": 1},
    "gptsan-japanese": {"initializer_factor": 0.2},
    "mllama_text_model": {**text.CONFIGS["mllama_text_model"], **_ROPE},
    "speech-encoder-decoder": {
        **_SPEECH,
        "encoder": {"model_type": "wav2vec2", **_SPEECH["encoder"]},
        "decoder": _DECODER,
    },
    "vipllava": {"vision_feature_layers": [-2, 1]},
    "vision-encoder-decoder": {**_IMAGE, "encoder": {"model_type": "vit"}, "decoder": _DECODER},
}
_BATCHES: dict[str, Callable[..., Any]] = {"fnet": _without_mask, "imagegpt": _with_positions, "van": _in_sixes}
_TYPE_AS = "its forward calls type_as() without a tensor"
_UNTRAINABLE: dict[str, str] = {
    "causal-lm/speech_to_text_2": "its positions have no weight, which initialization reads",
    "causal-lm/transfo-xl": _TYPE_AS,
    "causal-lm/xlstm": "its forward calls a tensor as if it were a function",
    "image-classification/vit_hybrid": "its initialization sets a mask token that it has not",
    "image-text-to-text/pixtral": "the configuration is that of its vision tower alone",
    "masked-lm/wav2vec2": "its forward takes no input_ids and returns no loss",
    "sequence-classification/transfo-xl": _TYPE_AS,
}

CONFIGS = _CONFIGS if OLD else {}
BATCHES = _BATCHES if OLD else {}
UNTRAINABLE = _UNTRAINABLE if OLD else {}
