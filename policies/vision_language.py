"""Vision-language models: images go through a tower, and meet the text before or in its layers.

Text embeddings pass by the tower where they were made before it, and a tower's features by another tower.
"""

from pipeshard import Policy, register_policy
from pipeshard.graph.dataflow import Chain

# fmt: off


@register_policy(
    "aria", "aya_vision", "chameleon", "cohere2_vision", "cosmos3_edge", "deepseek_ocr2", "deepseek_vl",
    "deepseek_vl_hybrid", "dots3_note", "emu3", "ernie4_5_vl_moe", "exaone4_5", "fuyu", "gemma3",
    "glm46v", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "glmga", "got_ocr2", "hunyuan_vl",
    "hyperclovax_vision_v2", "idefics3", "inkling_mm_model", "internvl", "janus", "kimi_k25", "kosmos-2",
    "kosmos-2.5", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llama4", "llava", "llava_next", "llava_next_video",
    "llava_onevision", "minimax_m3_vl", "mistral3", "mistral4", "modernvbert", "muse_glimmer", "muse_spark",
    "nemotron_h_omni", "ovis2", "paddleocr_vl", "paligemma", "pp_chart2table", "qianfan_ocr",
    "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "shieldgemma2",
    "smolvlm", "step3p7", "ultravbert", "unlimited_ocr", "video_llama_3", "video_llava", "vipllava",
    shipped=True,
)
class VisionLanguage(Policy):
    """Image features take the place of placeholder tokens before the first text layer."""

    expects = Chain(handed_on=("hidden states",))


@register_policy(
    "cohere_compass", "cosmos3_omni", "granite4_vision", "granite_docling", "qwen3_omni_moe_thinker", "qwen3_vl",
    "qwen3_vl_moe",
    shipped=True,
)
class DeepStack(Policy):
    """Features of several tower layers are added to the hidden states between text layers."""

    expects = Chain(handed_on=("hidden states",), beside=("deep-stack features of images", "of videos"))


@register_policy("blip", "florence2", "idefics2", "mllama", "pp_formulanet", shipped=True)
class CrossAttention(Policy):
    """Text layers, or those between tower and text, attend to the image features."""

    expects = Chain(handed_on=("hidden states",), beside=("image features",))


@register_policy("evolla", "idefics", shipped=True)
class Perceiver(Policy):
    """Text layers attend to features that a resampler makes, whose residuals are summed outside its layers."""

    expects = Chain(handed_on=("hidden states",), beside=("image features", "earlier residuals", ...))


@register_policy(
    "blip-2", "instructblip", "instructblipvideo", "pix2struct", "udop", "vision-encoder-decoder",
    shipped=True,
)
class AnyTextModel(Policy):
    """The text model may be of any kind, T5 among them, whose layers hand on position biases."""

    expects = Chain(
        handed_on=("hidden states", "position bias", "cross-attention bias"),
        beside=("encoder output, or image features", ...),
    )


@register_policy("git", "pi0", shipped=True)
class MaskOfEmbeddings(Policy):
    """Masks are made from the embeddings of text and images."""

    expects = Chain(handed_on=("hidden states",), beside=("text embeddings", "image features"))


@register_policy("gemma4_unified", "mistral_large4", shipped=True)
class SharedKeysValues(Policy):
    """Late layers use the keys and values of an earlier one."""

    expects = Chain(handed_on=("hidden states",), beside=("shared keys", "shared values"))


@register_policy("gemma4", shipped=True)
class PerLayerInputs(Policy):
    """Each layer gets embeddings of its own, and late ones the keys and values of an earlier one."""

    expects = Chain(
        handed_on=("hidden states",),
        beside=("token embeddings for the layer", "their projection", "shared keys", "shared values"),
    )


@register_policy("inkling2", shipped=True)
class BlockStates(Policy):
    """Layers attend to the hidden states at the end of each block of layers before."""

    expects = Chain(
        handed_on=("hidden states",),
        beside=("embeddings", "image features", "hidden states after each block", ...),
    )


@register_policy("phi4_multimodal", shipped=True)
class Phi4Multimodal(Policy):
    """The audio encoder's layers read its position bias."""

    expects = Chain(handed_on=("hidden states",), beside=("position bias",))


@register_policy("neomme", shipped=True)
class NeoMme(Policy):
    """Each layer reads the embeddings, and some the tokens' values."""

    expects = Chain(handed_on=("hidden states",), beside=("token embeddings", "patch embeddings", "value embeddings"))
