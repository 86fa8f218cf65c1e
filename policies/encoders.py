"""Encoders: bidirectional text models with a masked language modelling or classification head."""

from typing import ClassVar

from pipeshard import Policy, register_policy
from pipeshard.graph.dataflow import Chain

# fmt: off


@register_policy(
    "albert", "big_bird", "camembert", "canine", "convbert", "data2vec-text", "distilbert", "electra",
    "ernie", "esm", "esmc", "eurobert", "fnet", "gte", "ibert", "jina_embeddings_v3", "layoutlm", "longformer",
    "markuplm", "megatron-bert", "mobilebert", "modernbert", "mra", "nomic_bert", "nystromformer", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "squeezebert", "tapas", "ultrabert", "xlm-roberta",
    "xlm-roberta-xl", "xmod", "yoso",
    shipped=True,
)
class Encoder(Policy):
    """Layer after layer on the hidden states alone."""

    expects = Chain(handed_on=("hidden states",))


@register_policy("bert", shipped=True)
class Bert(Encoder):
    """The first of them, sliced by heads and by features between."""

    tp_plan: ClassVar = {
        "encoder.layer.*.attention.self.query": "colwise",
        "encoder.layer.*.attention.self.key": "colwise",
        "encoder.layer.*.attention.self.value": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    }


@register_policy("deberta", "deberta-v2", "layoutlmv3", "mpnet", "roformer", shipped=True)
class PositionBias(Policy):
    """Every layer reads positions that a module of its own makes once."""

    expects = Chain(handed_on=("hidden states",), beside=("position bias",))


@register_policy("luke", shipped=True)
class Luke(Policy):
    """Words and entities are two streams."""

    expects = Chain(handed_on=("hidden states", "entity states"))


@register_policy("lilt", shipped=True)
class Lilt(Policy):
    """Text and layout are two streams."""

    expects = Chain(handed_on=("hidden states", "layout states"))


@register_policy("reformer", shipped=True)
class Reformer(Policy):
    """Reversible layers hand on two streams; gradients of all go back in one call, so no cut is between them."""

    expects = Chain(handed_on=("hidden states", "attention output"))


@register_policy("flaubert", "xlm", shipped=True)
class Xlm(Policy):
    """Attention, norms and feed-forward networks are lists side by side; sums between them are made outside."""

    expects = Chain(handed_on=("hidden states", "residual"), beside=("earlier residuals", ...))


@register_policy("funnel", shipped=True)
class Funnel(Policy):
    """The decoder reads the first block's result; masks are made from the embeddings."""

    expects = Chain(
        handed_on=("hidden states",),
        beside=("embeddings, or the last block's result", "the first block's result"),
    )
