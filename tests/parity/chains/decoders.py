"""Decoders: causal language models; only the hidden states cross a cut between two layers.

Every stage computes masks and rotary embeddings itself, with any attention (sliding, latent, linear) and with state
spaces instead of attention.
"""

from tests.parity.chains.chain import Chain

EXPECTED = {
    # Layer after layer on the hidden states alone.
    Chain(handed_on=("hidden states",)): """
        apertus arcee bamba bert-generation biogpt bitnet bloom codegen cohere cohere2 cohere_compass_text ctrl cwm
        diffllama doge emu3_text_model ernie4_5 exaone4 falcon falcon_h1 falcon_mamba gemma gemma2 gemma3_text glm
        glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj granite granite_swa helium hrm_text
        hunyuan_v1_dense hyperclovax internlm3 iquestcoder jais2 lfm2 lfm3 llama mamba mamba2 minicpm3 ministral
        ministral3 mistral mllama_text_model modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3 olmo_hybrid
        openai-gpt opt persimmon phi phi3 qwen2 qwen3 qwen3_5_text recurrent_gemma rwkv seed_oss smollm3 stablelm
        starcoder2 trocr vaultgemma xglm xlstm youtu
    """,
    # Layers that share one transformer read the embeddings with their hidden states.
    Chain(handed_on=("hidden states",), beside=("embeddings",)): "zamba zamba2",
    # Each layer gets embeddings of its own, and late ones the keys and values of an earlier one.
    Chain(
        handed_on=("hidden states",),
        beside=("token embeddings for the layer", "their projection", "shared keys", "shared values"),
    ): "gemma3n_text gemma4_text",
    # Late layers use the keys and values of an earlier one.
    Chain(handed_on=("hidden states",), beside=("shared keys", "shared values")): "gemma4_unified_text",
    # With `target_mapping`, queries that do not see their own token are a second stream.
    Chain(handed_on=("hidden states", "query stream")): "xlnet",
    # Every layer reads the position bias made before the first.
    Chain(handed_on=("hidden states",), beside=("position bias",)): "cpmant",
}
