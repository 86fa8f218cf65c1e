"""Decoders: causal language models; what crosses a cut between two layers is the hidden states.

Masks and rotary embeddings are made anew on every stage, whatever the attention (sliding, latent, linear) or in its
place a state space.
"""

from typing import ClassVar

from pipeshard import Policy, register_policy
from pipeshard.graph.dataflow import Chain

# fmt: off


@register_policy(
    "apertus", "arcee", "bamba", "bert-generation", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2",
    "cohere_compass_text", "ctrl", "cwm", "diffllama", "doge", "emu3_text_model", "ernie4_5", "exaone4", "falcon",
    "falcon_h1", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_bigcode", "gpt_neo",
    "gpt_neox", "gpt_neox_japanese", "gptj", "granite", "granite_swa", "helium", "hrm_text", "hunyuan_v1_dense",
    "hyperclovax", "internlm3", "iquestcoder", "jais2", "lfm2", "lfm3", "llama", "mamba", "mamba2", "minicpm3",
    "ministral", "ministral3", "mistral", "mllama_text_model", "modernbert-decoder", "mpt", "nanochat", "nemotron",
    "olmo", "olmo2", "olmo3", "olmo_hybrid", "openai-gpt", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3",
    "qwen3_5_text", "recurrent_gemma", "rwkv", "seed_oss", "smollm3", "stablelm", "starcoder2", "trocr",
    "vaultgemma", "xglm", "xlstm", "youtu",
    shipped=True,
)
class Decoder(Policy):
    """Layer after layer on the hidden states alone."""

    expects = Chain(handed_on=("hidden states",))


@register_policy("gpt2", shipped=True)
class Gpt2(Decoder):
    """One layer makes queries, keys and values."""

    tp_plan: ClassVar = {
        "h.*.attn": "divide:split_size",
        "h.*.attn.c_attn": "conv1d_qkv",
        "h.*.attn.c_proj": "conv1d_rowwise",
        "h.*.mlp.c_fc": "conv1d_colwise",
        "h.*.mlp.c_proj": "conv1d_rowwise",
    }


@register_policy("zamba", "zamba2", shipped=True)
class Zamba(Policy):
    """Layers that share one transformer read the embeddings with their hidden states."""

    expects = Chain(handed_on=("hidden states",), beside=("embeddings",))


@register_policy("gemma3n_text", "gemma4_text", shipped=True)
class PerLayerInputs(Policy):
    """Each layer gets embeddings of its own, and late ones the keys and values of an earlier one."""

    expects = Chain(
        handed_on=("hidden states",),
        beside=("token embeddings for the layer", "their projection", "shared keys", "shared values"),
    )


@register_policy("gemma4_unified_text", shipped=True)
class SharedKeysValues(Policy):
    """Late layers use the keys and values of an earlier one."""

    expects = Chain(handed_on=("hidden states",), beside=("shared keys", "shared values"))


@register_policy("xlnet", shipped=True)
class XlNet(Policy):
    """With `target_mapping`, queries that do not see their own token are a second stream."""

    expects = Chain(handed_on=("hidden states", "query stream"))


@register_policy("cpmant", shipped=True)
class CpmAnt(Policy):
    """Every layer reads the position bias made before the first."""

    expects = Chain(handed_on=("hidden states",), beside=("position bias",))
