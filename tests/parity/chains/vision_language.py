"""Vision-language models: images pass through a tower, and are merged with the text before or in the layers.

Text embeddings that are computed before the tower also cross the cuts in the tower, and so do the features of another
tower.
"""

from tests.parity.chains.chain import Chain

EXPECTED = {
    # Image features take the place of placeholder tokens before the first text layer.
    Chain(handed_on=("hidden states",)): """
        aria aya_vision chameleon cohere2_vision cosmos3_edge deepseek_ocr2 deepseek_vl deepseek_vl_hybrid dots3_note
        emu3 ernie4_5_vl_moe exaone4_5 fuyu gemma3 glm46v glm4v glm4v_moe glm5_next glm_ocr glmga got_ocr2 hunyuan_vl
        hyperclovax_vision_v2 idefics3 inkling_mm_model internvl janus kimi_k25 kosmos-2 kosmos-2.5 lfm2_vl lfm3_vl
        lighton_ocr llama4 llava llava_next llava_next_video llava_onevision minimax_m3_vl mistral3 mistral4
        modernvbert muse_glimmer muse_spark nemotron_h_omni ovis2 paddleocr_vl paligemma pp_chart2table qianfan_ocr
        qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen4_exp shieldgemma2 smolvlm step3p7 ultravbert
        unlimited_ocr video_llama_3 video_llava vipllava
    """,
    # Features of several tower layers are added to the hidden states between text layers.
    Chain(handed_on=("hidden states",), beside=("deep-stack features of images", "of videos")): """
        cohere_compass cosmos3_omni granite4_vision granite_docling qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
    """,
    # Text layers, or those between tower and text, attend to the image features.
    Chain(handed_on=("hidden states",), beside=("image features",)): "blip florence2 idefics2 mllama pp_formulanet",
    # Text layers attend to features that a resampler makes, whose residuals are summed outside its layers.
    Chain(handed_on=("hidden states",), beside=("image features", "earlier residuals", ...)): "evolla idefics",
    # The text model may be of any kind, T5 among them, whose layers hand on position biases.
    Chain(
        handed_on=("hidden states", "position bias", "cross-attention bias"),
        beside=("encoder output, or image features", ...),
    ): "blip-2 instructblip instructblipvideo pix2struct udop vision-encoder-decoder",
    # Masks are made from the embeddings of text and images.
    Chain(handed_on=("hidden states",), beside=("text embeddings", "image features")): "git pi0",
    # Late layers use the keys and values of an earlier one.
    Chain(handed_on=("hidden states",), beside=("shared keys", "shared values")): "gemma4_unified mistral_large4",
    # Each layer gets embeddings of its own, and late ones the keys and values of an earlier one.
    Chain(
        handed_on=("hidden states",),
        beside=("token embeddings for the layer", "their projection", "shared keys", "shared values"),
    ): "gemma4",
    # Layers attend to the hidden states at the end of each block of layers before.
    Chain(
        handed_on=("hidden states",), beside=("embeddings", "image features", "hidden states after each block", ...)
    ): "inkling2",
    # The audio encoder's layers read its position bias.
    Chain(handed_on=("hidden states",), beside=("position bias",)): "phi4_multimodal",
    # Each layer reads the embeddings, and some the tokens' values.
    Chain(handed_on=("hidden states",), beside=("token embeddings", "patch embeddings", "value embeddings")): "neomme",
}
