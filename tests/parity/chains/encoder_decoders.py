"""Encoder-decoders for text: every layer of the decoder reads the encoder's output.

The encoder is also a chain, whose layers read only the hidden states. Cuts may be in either chain.
"""

from tests.parity.chains.chain import Chain

EXPECTED = {
    # Each decoder layer reads the encoder's output.
    Chain(handed_on=("hidden states",), beside=("encoder output",)): """
        bart bigbird_pegasus blenderbot blenderbot-small fsmt led m2m_100 marian mbart nllb-moe pegasus plbart
        prophetnet t5gemma t5gemma2 umt5
    """,
    # The first layer of each side makes its position biases, and all hand them on.
    Chain(
        handed_on=("hidden states", "position bias", "cross-attention bias"), beside=("encoder output",)
    ): "longt5 mt5 switch_transformers t5",
    # Encoder layers hand on global tokens.
    Chain(handed_on=("hidden states", "global tokens"), beside=("encoder output",)): "pegasus_x",
    # Each layer reads prompts of its own, which are made before the first.
    Chain(
        handed_on=("hidden states",), beside=("encoder output", "self-attention prompt", "cross-attention prompt")
    ): "mvp",
    # Any two models: what an encoder or decoder of its own kind reads.
    Chain(
        handed_on=("hidden states", "position bias", "cross-attention bias"), beside=("encoder output", ...)
    ): "encoder-decoder",
}
