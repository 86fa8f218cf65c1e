"""Mixtures of experts: causal language models that send each token to some experts of a layer.

Router, experts and dispatch are inside a layer, so no token crosses a cut because of its expert. Router logits leave a
layer only with `output_router_logits=True`, through the model's own hooks, and only the loss reads them.
"""

from tests.parity.chains.chain import Chain

EXPECTED = {
    # Layer after layer on the hidden states alone; router logits go to the loss, to no other layer.
    Chain(handed_on=("hidden states",)): """
        afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v32
        deepseek_v4 dots1 dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite glm_moe_dsa
        gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 inkling_text
        jamba jetmoe kimi_linear kolibri1 laguna lfm2_moe llama4_text longcat_flash mellum mimo_v2_flash minimax
        minimax_m2 minimax_m3_vl_text mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next
        qwen4_exp_text solar_open
    """,
    # The router of a layer reads the states of the one before.
    Chain(handed_on=("hidden states", "router states")): "zaya",
    # Layers attend to the hidden states at the end of each block of layers before.
    Chain(handed_on=("hidden states",), beside=("embeddings", "hidden states after each block", ...)): "inkling2_text",
}
