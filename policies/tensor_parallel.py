"""Tensor parallelism: plans for base models that transformers ships without a `tp_plan`, by model type.

Plans use transformers' styles and one additional style, `divide:ATTRIBUTES`, for a module whose forward reads the
number of heads or features from the module's own attributes.
"""


def _layers(path: str, colwise: str, rowwise: str) -> dict[str, str]:
    """A plan for the linear layers below `path`. `colwise` and `rowwise` contain names, separated by spaces."""
    plan = {f"{path}.{name}": "colwise" for name in colwise.split()}
    return plan | {f"{path}.{name}": "rowwise" for name in rowwise.split()}


def _heads(attention: str) -> dict[str, str]:
    """A plan for a Whisper attention module, whose forward reads the number of heads from the module's attribute."""
    return {attention: "divide:num_heads"} | _layers(attention, colwise="q_proj k_proj v_proj", rowwise="out_proj")


TP_PLANS = {
    "bert": _layers(
        path="encoder.layer.*",
        colwise="attention.self.query attention.self.key attention.self.value intermediate.dense",
        rowwise="attention.output.dense output.dense",
    ),
    # Only the MLPs are sharded: the attentions share a position bias of all heads, which is sent to later stages.
    "t5": {
        **_layers("encoder.block.*.layer.*.DenseReluDense", colwise="wi wi_0 wi_1", rowwise="wo"),
        **_layers("decoder.block.*.layer.*.DenseReluDense", colwise="wi wi_0 wi_1", rowwise="wo"),
    },
    "vit": _layers(
        path="layers.*",
        colwise="attention.q_proj attention.k_proj attention.v_proj mlp.fc1",
        rowwise="attention.o_proj mlp.fc2",
    ),
    "whisper": {
        **_layers("encoder.layers.*", colwise="fc1", rowwise="fc2"),
        **_layers("decoder.layers.*", colwise="fc1", rowwise="fc2"),
        **_heads("encoder.layers.*.self_attn"),
        **_heads("decoder.layers.*.self_attn"),
        **_heads("decoder.layers.*.encoder_attn"),
    },
}
