"""Audio: speech and music, as encoder-decoders, and as language models that hear."""

from typing import ClassVar

from pipeshard import Policy, register_policy
from pipeshard.graph.dataflow import Chain

# fmt: off


@register_policy(
    "audioflamingo3", "fun_asr_nano", "glmasr", "kyutai_speech_to_text", "moshi", "moss_transcribe_diarize",
    "musicflamingo", "musicgen_decoder", "musicgen_melody_decoder", "nemo_speechlm", "qwen2_audio", "qwen3_asr",
    "vibevoice", "vibevoice_asr", "voxtral", "voxtral_realtime",
    shipped=True,
)
class AudioLanguage(Policy):
    """Audio features take the place of placeholder tokens before the first text layer."""

    expects = Chain(handed_on=("hidden states",))


@register_policy(
    "canary", "cohere_asr", "moonshine", "seamless_m4t", "seamless_m4t_v2", "speech_to_text",
    shipped=True,
)
class SpeechEncoderDecoder(Policy):
    """Each decoder layer reads the encoder's output."""

    expects = Chain(handed_on=("hidden states",), beside=("encoder output",))


@register_policy("whisper", shipped=True)
class Whisper(SpeechEncoderDecoder):
    """Its attention has the number of heads from the module."""

    tp_plan: ClassVar = {
        f"{side}.layers.*.{path}": style
        for side, attentions in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn")))
        for path, style in (
            *((attention, "divide:num_heads") for attention in attentions),
            *((f"{attention}.{key}_proj", "colwise") for attention in attentions for key in "qkv"),
            *((f"{attention}.out_proj", "rowwise") for attention in attentions),
            ("fc1", "colwise"),
            ("fc2", "rowwise"),
        )
    }


@register_policy("speecht5", shipped=True)
class SpeechT5(Policy):
    """Encoder layers read relative positions, decoder layers the encoder's output."""

    expects = Chain(handed_on=("hidden states",), beside=("encoder output, or relative positions",))


@register_policy("granite_speech", "granite_speech_plus", shipped=True)
class GraniteSpeech(Policy):
    """A layer amid the encoder adds its guess at the text; the projector's layers read the audio features."""

    expects = Chain(handed_on=("hidden states", "guess at the text"), beside=("audio features",))


@register_policy("pop2piano", shipped=True)
class Pop2Piano(Policy):
    """T5: the first layer of each side makes its position biases, and all hand them on."""

    expects = Chain(handed_on=("hidden states", "position bias", "cross-attention bias"), beside=("encoder output",))


@register_policy("speech-encoder-decoder", shipped=True)
class Composed(Policy):
    """Any two models: what an encoder or decoder of its own kind reads."""

    expects = Chain(
        handed_on=("hidden states", "position bias", "cross-attention bias"),
        beside=("encoder output", ...),
    )
