"""Vision: image classifiers, both transformers and hierarchies of convolutions.

The stages of a hierarchy (swin, resnet) are cut inside; each of their lists is a chain of its own.
"""

from typing import ClassVar

from pipeshard import Policy, register_policy
from pipeshard.graph.dataflow import Chain

# fmt: off


@register_policy(
    "bit", "clip", "convnext", "convnextv2", "cvt", "deit", "dinov2", "dinov2_with_registers", "donut-swin",
    "efficientnet", "focalnet", "hgnet_v2", "hiera", "ijepa", "imagegpt", "levit", "metaclip_2", "mobilenet_v1",
    "mobilenet_v2", "mobilevit", "mobilevitv2", "perceiver", "poolformer", "pvt", "pvt_v2", "regnet", "resnet",
    "segformer", "siglip", "siglip2", "swiftformer", "swin", "swinv2", "textnet", "vit_msn",
    shipped=True,
)
class Vision(Policy):
    """Layer after layer on the hidden states or feature map alone."""

    expects = Chain(handed_on=("hidden states",))


@register_policy("vit", shipped=True)
class Vit(Vision):
    """The first transformer among them, sliced by heads and by features between."""

    tp_plan: ClassVar = {
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    }


@register_policy("beit", "data2vec-vision", shipped=True)
class PositionBias(Policy):
    """Every layer reads a position bias, of its own or all the same."""

    expects = Chain(handed_on=("hidden states", "position bias"), beside=("shared position bias",))
