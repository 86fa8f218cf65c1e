"""Audio: speech and music, as encoder-decoders, and as language models with audio inputs."""

from tests.parity.chains.chain import Chain

EXPECTED = {
    # Audio features take the place of placeholder tokens before the first text layer.
    Chain(handed_on=("hidden states",)): """
        audioflamingo3 fun_asr_nano glmasr kyutai_speech_to_text moshi moss_transcribe_diarize musicflamingo
        musicgen_decoder musicgen_melody_decoder nemo_speechlm qwen2_audio qwen3_asr vibevoice vibevoice_asr voxtral
        voxtral_realtime
    """,
    # Each decoder layer reads the encoder's output.
    Chain(handed_on=("hidden states",), beside=("encoder output",)): """
        canary cohere_asr moonshine seamless_m4t seamless_m4t_v2 speech_to_text whisper
    """,
    # Encoder layers read relative positions, decoder layers the encoder's output.
    Chain(handed_on=("hidden states",), beside=("encoder output, or relative positions",)): "speecht5",
    # A layer amid the encoder adds its guess at the text; the projector's layers read the audio features.
    Chain(handed_on=("hidden states", "guess at the text"), beside=("audio features",)): """
        granite_speech granite_speech_plus
    """,
    # T5: the first layer of each side makes its position biases, and all hand them on.
    Chain(
        handed_on=("hidden states", "position bias", "cross-attention bias"), beside=("encoder output",)
    ): "pop2piano",
    # Any two models: what an encoder or decoder of its own kind reads.
    Chain(
        handed_on=("hidden states", "position bias", "cross-attention bias"), beside=("encoder output", ...)
    ): "speech-encoder-decoder",
}
