"""Encoder-decoder and speech models: what their tiny models need in addition to the general rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.images import insert
from tests.parity.inputs import text, uneven

Fix = Callable[[nn.Module, dict[str, Tensor], torch.Generator], dict[str, Tensor]]

FRAMES = 64
SOUNDS = (FRAMES, 44, FRAMES, 30)  # the frames of each sample's sound

_MEL = {"num_mel_bins": 16}
_WHISPER = {**_MEL, "max_source_positions": FRAMES // 2, "num_hidden_layers": 3, "encoder_layers": 3}
_PARAKEET = {**_MEL, "num_hidden_layers": 3, "conv_kernel_size": 5, "subsampling_conv_channels": 8}
_WAV2VEC2 = {
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "conv_dim": [16, 16, 16],
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 2, 2],
    "num_conv_pos_embedding_groups": 4,
    "num_conv_pos_embeddings": 8,
}
_GRANITE_SPEECH = {
    "downsample_rate": 3,
    "encoder_config": {"context_size": 6, "conv_kernel_size": 5, "input_dim": 16, "max_pos_emb": 8},
    "has_lora_adapter": False,
    "projector_config": {"num_hidden_layers": 2},
    "window_size": 6,
}
_SEAMLESS = {
    "adaptor_kernel_size": 4,
    "adaptor_stride": 4,
    "conv_depthwise_kernel_size": 5,
    "feature_projection_input_dim": 16,
    "speech_encoder_layers": 2,
}
_VIBEVOICE = {  # whose samples of the latents would be random
    "depths": [1, 1, 2],
    "downsampling_ratios": [2, 4],
    "num_filters": 4,
    "vae_std": 0.0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "audioflamingo3": {"audio_config": _WHISPER},
    "bigbird_pegasus": {"block_size": 4, "num_random_blocks": 1},
    "canary": {"encoder_config": _PARAKEET},
    "cohere_asr": {"encoder_config": _PARAKEET},
    "dia": {
        "decoder_config": {"cross_hidden_size": 32, "num_channels": 3, "num_hidden_layers": 3},
        "delay_pattern": [0, 1, 2],
        "encoder_config": {"num_hidden_layers": 3},
    },
    "fun_asr_nano": {
        "adaptor_config": {"intermediate_size": 8, "projector_hidden_size": 48},
        "audio_config": {**_MEL, "fsmn_kernel_size": 5, "num_stacked_frames": 2, "num_timestamp_prediction_layers": 1},
    },
    "glmasr": {"audio_config": {**_MEL, "intermediate_size": 128, "num_hidden_layers": 3}},
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": _GRANITE_SPEECH,
    "kyutai_speech_to_text": {
        "audio_bos_token_id": 6,
        "codec_config": {
            "codebook_dim": 8,
            "codebook_size": 16,
            "num_filters": 4,
            "num_hidden_layers": 1,
            "num_quantizers": 3,
            "upsample_groups": 32,
            "upsampling_ratios": [4, 2],
            "vector_quantization_hidden_dimension": 8,
        },
        "num_codebooks": 3,
    },
    "longt5": {"encoder_attention_type": "transient-global", "global_block_size": 4, "local_radius": 3},
    "moonshine": {"decoder_num_hidden_layers": 3, "encoder_num_hidden_layers": 3, "pad_token_id": 0},
    "moonshine_streaming": {
        "encoder_config": {"initializer_range": 0.1, "sample_rate": 1600},
        "initializer_range": 0.1,
        "num_key_value_heads": 4,
    },
    "moss_transcribe_diarize": {"audio_config": _WHISPER},
    "musicflamingo": {"audio_bos_token_id": 6, "audio_config": _WHISPER, "audio_eos_token_id": 7},
    "mvp": {"prompt_length": 4, "prompt_mid_dim": 8, "use_prompt": True},
    "nemo_speechlm": {
        "audio_config": {
            "asr_config": {**_MEL, "num_hidden_layers": 3, "num_key_value_heads": 4},
            "diarization_config": {
                "audio_config": {**_MEL, "num_hidden_layers": 2, "num_key_value_heads": 4},
                "chunk_left_context": 1,
                "chunk_length": 4,
                "chunk_right_context": 1,
                "fifo_length": 2,
                "head_config": {"audio_hidden_size": 32, "hidden_size": 16, "num_speakers": 3},
                "speaker_cache_update_period": 2,
                "streaming_config": {"num_speakers": 3, "speaker_cache_length": 6},
            },
        }
    },
    "nllb-moe": {"decoder_sparse_step": 2, "encoder_sparse_step": 2, "expert_capacity": 4},
    "pegasus_x": {"block_size": 8, "num_global_tokens": 4},
    "qwen2_audio": {"audio_config": _WHISPER},
    "qwen3_asr": {"audio_config": {**_MEL, "downsample_hidden_size": 8, "encoder_layers": 3, "n_window_infer": 100}},
    "seamless_m4t": _SEAMLESS,
    "seamless_m4t_v2": {**_SEAMLESS, "speech_encoder_left_chunk_num": 1},
    "speech-encoder-decoder": {"decoder_start_token_id": 1, "encoder": _WAV2VEC2, "pad_token_id": 0},
    "speech_to_text": {"conv_channels": 32, "input_feat_per_channel": 16},
    "speecht5": {**_WAV2VEC2, "vocab_size": 128},
    "switch_transformers": {"num_sparse_decoder_layers": 2, "num_sparse_encoder_layers": 2},
    "vibevoice": {
        "audio_bos_token_id": 6,
        "audio_config": _VIBEVOICE,
        "audio_eos_token_id": 7,
        "diffusion_head_config": {"frequency_embedding_size": 16, "num_hidden_layers": 1},
        "semantic_model_config": _VIBEVOICE,
    },
    "vibevoice_asr": {
        "acoustic_tokenizer_chunk_size": 32,
        "acoustic_tokenizer_encoder_config": _VIBEVOICE,
        "semantic_tokenizer_encoder_config": _VIBEVOICE,
    },
    "voxtral": {"audio_config": {**_WHISPER, "intermediate_size": 128}, "audio_token_id": 5},
    "voxtral_realtime": {"audio_config": {**_MEL, "num_hidden_layers": 3, "encoder_layers": 3}},
    "whisper": _WHISPER,
}


def _mask(sounds: Sequence[int] = SOUNDS, times: int = 1) -> Tensor:
    """1 for what is a sample's own sound, `times` values a frame."""
    return (torch.arange(times * max(sounds)) < times * torch.tensor(sounds)[:, None]).long()


def _causal(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Labels of the input itself."""
    return {**batch, "labels": uneven(batch["input_ids"])}


def _spoken(
    tokens: Callable[[int], int],
    mask: str | None = "input_features_mask",
    mels: Callable[[Any], int] = lambda config: config.audio_config.num_mel_bins,
    sounds: Sequence[int] = SOUNDS,
    transposed: bool = False,
) -> Fix:
    """A sound in each text, of `tokens(frames)` audio tokens."""

    def fix(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        config: Any = model.config
        own = _mask(sounds)
        features = torch.randn(*own.shape, mels(config), generator=generator) * own[..., None]
        batch = insert(
            _causal(model, batch, generator), [[config.audio_token_id] * tokens(frames) for frames in sounds]
        )
        features = features if transposed else features.transpose(1, 2).contiguous()
        return {**batch, "input_features": features, **({mask: own} if mask else {})}

    return fix


def _heard(
    name: str, width: Callable[[Any], int] | None = None, times: int = 1, mask: bool = True, transposed: bool = False
) -> Fix:
    """A sound for the encoder: `width(config)` values a frame, or `times` samples."""

    def fix(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        own = _mask(times=times)
        shape = (*own.shape, width(model.config)) if width else own.shape
        sounds = torch.randn(shape, generator=generator) * (own[..., None] if width else own)
        inputs = {name: sounds.transpose(1, 2).contiguous() if transposed else sounds, "labels": batch["labels"]}
        return inputs | ({"attention_mask": own} if mask else {})

    return fix


def _pooled(frames: int) -> int:
    """Two strides of two, as of Whisper's encoder and what averages two of its frames."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def _merged(frames: int) -> int:
    """A stride of two, and four of its frames merged."""
    return ((frames - 1) // 2 + 1 + 3) // 4


def _chunks(frames: int) -> int:
    """Three strides of two in each chunk of 100 frames."""
    return sum((min(100, frames - start) + 7) // 8 for start in range(0, frames, 100))


def _long(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Enough tokens for several blocks."""
    ids = torch.cat([text(4, 28, generator), batch["input_ids"]], 1)
    return {**batch, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _global_first(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The first token attends to all, and all to it."""
    attention = torch.zeros_like(batch["input_ids"])
    attention[:, 0] = 1
    return {**batch, "global_attention_mask": attention}


def _own_shift(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """It does not make the decoder's inputs of the labels."""
    shifted = batch["labels"].roll(1, 1).masked_fill(batch["labels"].roll(1, 1) == -100, 0)
    shifted[:, 0] = 2
    return {**batch, "decoder_input_ids": shifted}


def _channels(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Labels of the three channels of each sample, as rows of their own."""
    codes = torch.randint(3, 128, (4, 9, 3), generator=generator)
    labels = codes.transpose(1, 2).masked_fill((batch["labels"] == -100)[:, None], -100).reshape(12, 9)
    inputs = torch.cat([torch.ones_like(codes[:, :1]), codes[:, :-1]], 1)
    return {**batch, "decoder_input_ids": inputs, "labels": labels}


def _codes(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """A text token and three codes of sound at each position."""
    codes = torch.randint(6, 128, (*batch["input_ids"].shape, 3), generator=generator)
    ids = torch.cat([batch["input_ids"][..., None], codes], -1)
    return {**batch, "input_ids": ids, "labels": uneven(batch["input_ids"])}


def _blocks(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Two tokens for each six of 15 frames; as many of them as a sound has."""
    config: Any = model.config
    kept = torch.arange(6) < torch.tensor([6, 4, 6, 2])[:, None]
    return {
        **insert(_causal(model, batch, generator), [[config.audio_token_id] * int(count) for count in kept.sum(1)]),
        "input_features": torch.randn(4, 15, 16, generator=generator),
        "input_features_mask": kept,
    }


def _stacked(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """A token for every frame."""
    config: Any = model.config
    own = (torch.arange(8) < torch.tensor([8, 6, 8, 4])[:, None]).long()
    return {
        **insert(_causal(model, batch, generator), [[config.audio_token_id] * int(count) for count in own.sum(1)]),
        "input_features": torch.randn(4, 8, config.audio_config.input_size, generator=generator) * own[..., None],
        "input_features_mask": own,
    }


def _added(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Eight frames a token, added to its embedding."""
    config: Any = model.config
    length = batch["input_ids"].shape[1]
    sounds = torch.randn(4, config.audio_config.num_mel_bins, 8 * length, generator=generator)
    return {**batch, "input_features": sounds, "labels": uneven(batch["input_ids"])}


def _waves(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Eight samples an audio token."""
    config: Any = model.config
    own = _mask()
    return {
        **insert(
            _causal(model, batch, generator), [[config.audio_token_id] * ((frames + 7) // 8) for frames in SOUNDS]
        ),
        "input_values": torch.randn(4, 1, FRAMES, generator=generator) * own[:, None],
        "padding_mask": own.bool(),
    }


def _mels(config: Any) -> int:
    return config.num_mel_bins


BATCHES: dict[str, Fix] = {
    "audioflamingo3": _spoken(_pooled),
    "bigbird_pegasus": _long,
    "canary": _heard("input_features", lambda config: config.encoder_config.num_mel_bins),
    "cohere_asr": _heard("input_features", lambda config: config.encoder_config.num_mel_bins),
    "dia": _channels,
    "fsmt": _own_shift,
    "fun_asr_nano": _stacked,
    "glmasr": _spoken(lambda frames: ((frames - 1) // 2 + 1) // 4),
    "gptsan-japanese": _causal,
    "granite_speech": _blocks,
    "granite_speech_plus": _blocks,
    "kyutai_speech_to_text": _codes,
    "led": _global_first,
    "moonshine": _heard("input_values", times=48),
    "moonshine_streaming": _heard("input_values", times=4),
    "moss_transcribe_diarize": _spoken(_merged),
    "musicflamingo": _spoken(_pooled),
    "nemo_speechlm": _spoken(
        lambda frames: (frames + 7) // 8,
        mels=lambda config: config.audio_config.asr_config.num_mel_bins,
        transposed=True,
    ),
    "pegasus_x": _long,
    "pop2piano": _heard("input_features", lambda config: config.d_model),
    "qwen2_audio": _spoken(_pooled, "feature_attention_mask"),
    "qwen3_asr": _spoken(_chunks, sounds=(200, 150, 200, 80)),
    "speech-seq2seq/seamless_m4t": _heard("input_features", lambda config: config.feature_projection_input_dim),
    "speech-seq2seq/seamless_m4t_v2": _heard("input_features", lambda config: config.feature_projection_input_dim),
    "speech-encoder-decoder": _heard("input_values", times=8),
    "speech_to_text": _heard("input_features", lambda config: config.input_feat_per_channel),
    "speecht5": _heard("input_values", times=8),
    "vibevoice": _waves,
    "vibevoice_asr": _waves,
    "voxtral": _spoken(lambda frames: FRAMES // 8, None),
    "voxtral_realtime": _added,
    "whisper": _heard("input_features", _mels, mask=False, transposed=True),
}

# What cannot be trained unsplit, and why.
UNTRAINABLE: dict[str, str] = {}
