"""Vision: image classifiers, both transformers and convolutional hierarchies.

The stages of a hierarchy (swin, resnet) are divided; each of their lists is a separate chain.
"""

from tests.parity.chains.chain import Chain

EXPECTED = {
    # Layer after layer on the hidden states or feature map alone.
    Chain(handed_on=("hidden states",)): """
        bit clip convnext convnextv2 cvt deit dinov2 dinov2_with_registers donut-swin efficientnet focalnet hgnet_v2
        hiera ijepa imagegpt levit metaclip_2 mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 perceiver poolformer pvt
        pvt_v2 regnet resnet segformer siglip siglip2 swiftformer swin swinv2 textnet vit vit_msn
    """,
    # Every layer reads a position bias, of its own or all the same.
    Chain(handed_on=("hidden states", "position bias"), beside=("shared position bias",)): "beit data2vec-vision",
}
