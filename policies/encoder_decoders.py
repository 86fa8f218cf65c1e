"""Encoder-decoders for text: every layer of the decoder reads the encoder's output.

The encoder is a chain too, on its hidden states alone; cuts may lie in either of the two.
"""

from typing import ClassVar

from pipeshard import Policy, register_policy
from pipeshard.graph.dataflow import Chain

# fmt: off


@register_policy(
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "fsmt", "led", "m2m_100", "marian", "mbart",
    "nllb-moe", "pegasus", "plbart", "prophetnet", "t5gemma", "t5gemma2", "umt5",
    shipped=True,
)
class EncoderDecoder(Policy):
    """Each decoder layer reads the encoder's output."""

    expects = Chain(handed_on=("hidden states",), beside=("encoder output",))


@register_policy("longt5", "mt5", "switch_transformers", shipped=True)
class T5(Policy):
    """The first layer of each side makes its position biases, and all hand them on."""

    expects = Chain(handed_on=("hidden states", "position bias", "cross-attention bias"), beside=("encoder output",))


@register_policy("t5", shipped=True)
class SlicedT5(T5):
    """Sliced between its attentions alone: a position bias is of all heads, and handed on to the next stage."""

    tp_plan: ClassVar = {
        f"{side}.block.*.layer.*.DenseReluDense.{key}": "rowwise" if key == "wo" else "colwise"
        for side in ("encoder", "decoder")
        for key in ("wi", "wi_0", "wi_1", "wo")
    }


@register_policy("pegasus_x", shipped=True)
class PegasusX(Policy):
    """Encoder layers hand on global tokens."""

    expects = Chain(handed_on=("hidden states", "global tokens"), beside=("encoder output",))


@register_policy("mvp", shipped=True)
class Mvp(Policy):
    """Each layer reads prompts of its own, which are made before the first."""

    expects = Chain(
        handed_on=("hidden states",),
        beside=("encoder output", "self-attention prompt", "cross-attention prompt"),
    )


@register_policy("encoder-decoder", shipped=True)
class Composed(Policy):
    """Any two models: what an encoder or decoder of its own kind reads."""

    expects = Chain(
        handed_on=("hidden states", "position bias", "cross-attention bias"),
        beside=("encoder output", ...),
    )
