"""Tests of the names of transformers and peft that pipeshard relies on: they exist, and have the assumed meaning."""

from __future__ import annotations

import functools
import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from pipeshard import hf
from pipeshard.batch.read import read_batch
from pipeshard.generate.entry import twin
from tests.zoo import TINY


def parameters(name: str) -> Any:
    """What the forward of a class of transformers takes."""
    return inspect.signature(getattr(transformers, name).forward).parameters


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, **options)).eval()


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=19, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def vit(**options: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, patch_size=4, **options))


def test_leaves_of_text_and_images() -> None:
    assert {hf.IDS, hf.MASK, hf.LABELS, hf.POSITIONS} <= parameters("LlamaForCausalLM").keys()
    assert {*hf.PER_TOKEN} <= parameters("BertForMaskedLM").keys()
    assert {hf.PIXELS, hf.LABELS} <= parameters("ViTForImageClassification").keys()
    assert (hf.main_input(llama()), hf.main_input(vit(image_size=8)), hf.main_input(nn.Linear(2, 2))) == (
        hf.IDS,
        hf.PIXELS,
        None,
    )


def test_the_first_of_several_main_inputs_counts_the_samples() -> None:
    """A user trained OneFormer, which names two main inputs: boost raised TypeError, unhashable type 'list'."""
    kind = transformers.OneFormerForUniversalSegmentation
    model = nn.Module()
    model.main_input_name = kind.main_input_name
    assert len(kind.main_input_name) == 2 and hf.main_input(model) == hf.PIXELS
    assert read_batch(model, {"task_inputs": torch.ones(3, 2), hf.PIXELS: torch.ones(4, 3, 2, 2)}).rows == 4


def test_positions_may_have_a_plane_for_each_rotary_axis() -> None:
    """Of what has three dimensions, the samples are dimension 1: (3, b, s)."""
    config = transformers.Qwen2VLTextConfig(
        **{**TINY, "num_hidden_layers": 1}, rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]}
    )
    model = transformers.Qwen2VLTextModel(config).eval()
    ids = torch.arange(10).view(2, 5)
    planes = torch.arange(5).expand(3, 2, 5)
    by_planes = model(ids, position_ids=planes).last_hidden_state
    assert torch.equal(by_planes, model(ids).last_hidden_state)


def test_a_label_that_counts_for_no_loss() -> None:
    ids = torch.arange(1, 9).view(1, 8)
    labels = ids.masked_fill(torch.arange(8) > 3, hf.IGNORED)
    model = llama()
    assert torch.allclose(model(ids, labels=labels).loss, model(ids[:, :4], labels=ids[:, :4]).loss)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Qwen2VLForConditionalGeneration", {"pixel_values": "image", "image_grid_thw": "image"}),
        ("Qwen2VLForConditionalGeneration", {"pixel_values_videos": "video", "video_grid_thw": "video"}),
        ("Qwen2_5_VLForConditionalGeneration", {"second_per_grid_ts": "video"}),
        ("Siglip2Model", {"spatial_shapes": "image"}),
        ("Qwen2AudioForConditionalGeneration", {"input_features": "audio", "feature_attention_mask": "audio"}),
        ("LlamaForCausalLM", {"input_ids": None, "labels": None, "attention_mask": None}),
    ],
)
def test_kinds_of_media(name: str, kinds: dict[str, str | None]) -> None:
    assert kinds.keys() <= parameters(name).keys()
    assert {path: hf.media_kind(path) for path in kinds} == kinds


def test_leaves_with_the_spacing_of_frames() -> None:
    for name, leaf in (
        ("Qwen2_5_VLForConditionalGeneration", "second_per_grid_ts"),
        ("Qwen2_5OmniThinkerForConditionalGeneration", "video_second_per_grid"),
        ("Qwen3OmniMoeThinkerForConditionalGeneration", "video_second_per_grid"),
    ):
        assert [path for path in parameters(name) if hf.is_spacing(path)] == [leaf]


def test_leaves_with_a_row_of_sizes_for_each_image() -> None:
    for name, leaf in (
        ("Qwen2VLForConditionalGeneration", "image_grid_thw"),
        ("LlavaNextForConditionalGeneration", "image_sizes"),
        ("Siglip2Model", "spatial_shapes"),
    ):
        assert leaf in parameters(name) and leaf.endswith(hf.SIZES)


def test_boundaries_of_documents_are_arguments_of_flash_attention() -> None:
    flash = transformers.modeling_flash_attention_utils._flash_attention_forward
    assert set(hf.BOUNDARIES) <= inspect.signature(flash).parameters.keys()


def test_what_the_output_is_compared_with() -> None:
    assert {"mask_labels", "class_labels"} <= parameters("Mask2FormerForUniversalSegmentation").keys()
    named = ["input_ids", "mask_labels", "class_labels", "targets"]
    assert hf.targets(named) == named[1:]
    assert hf.is_mask(hf.MASK) and hf.is_mask("decoder_attention_mask") and not hf.is_mask(hf.IDS)


def test_leaves_of_the_decoder() -> None:
    decoders = [name for name in parameters("T5ForConditionalGeneration") if hf.is_of_decoder(name, True)]
    assert {"decoder_input_ids", "decoder_attention_mask", "labels"} <= set(decoders)
    assert not {"input_ids", "attention_mask"} & set(decoders)
    assert hf.is_encoder_decoder(t5()) and not hf.is_encoder_decoder(llama()) and not hf.is_encoder_decoder(nn.ReLU())
    assert not hf.is_of_decoder("labels", False)  # of a language model: those of its inputs


def test_leaves_that_count_items() -> None:
    leaves = parameters("Step3p7ForConditionalGeneration")
    assert "num_local_patches" in leaves and hf.counts_items("num_local_patches")
    assert not any(map(hf.counts_items, parameters("LlamaForCausalLM")))


class Configured(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def test_placeholder_tokens() -> None:
    qwen = Configured(transformers.Qwen2VLConfig())
    assert hf.placeholder_token(qwen, "image") == qwen.config.image_token_id
    assert hf.placeholder_token(qwen, "video") == qwen.config.video_token_id
    audio = Configured(transformers.Qwen2AudioConfig())
    assert isinstance(hf.placeholder_token(audio, "audio"), int)
    omni = Configured(transformers.Qwen2_5OmniConfig())
    assert isinstance(hf.placeholder_token(omni, "audio"), int)  # in its thinker's part
    phi = Configured(transformers.Phi4MultimodalConfig())
    assert hf.placeholder_token(phi, "image") == phi.config.vision_config.image_token_id
    assert hf.placeholder_token(phi, "audio") == phi.config.audio_config.audio_token_id
    assert hf.placeholder_token(llama(), "image") is None and hf.placeholder_token(nn.ReLU(), "image") is None


def test_kinds_of_tokens() -> None:
    assert hf.TOKEN_KINDS in parameters("Glm4vForConditionalGeneration") and hf.MEDIA_KINDS.keys() == hf.MEDIA.keys()
    tokens = SimpleNamespace(**{f"{kind}_token_ids": [number] for kind, number in hf.MEDIA_KINDS.items()})
    assert transformers.ProcessorMixin.create_mm_token_type_ids(tokens, [[1, 2, 3, 4]]) == [[1, 2, 3, 0]]


def test_special_tokens() -> None:
    model = llama()
    assert hf.padding_token(model) == TINY["pad_token_id"] and hf.padding_token(nn.ReLU()) is None
    assert {TINY["bos_token_id"], TINY["eos_token_id"], TINY["pad_token_id"]} <= set(hf.special_tokens(model))


def test_the_part_of_a_config_that_is_about_text() -> None:
    model = llama()
    assert hf.text_config(model) is model.config
    qwen = Configured(transformers.Qwen2VLConfig())
    assert hf.text_config(qwen) is qwen.config.text_config
    assert hf.text_config(nn.ReLU()) is None


def test_images_of_one_size() -> None:
    for options in ({"image_size": 8}, {"image_size": (8, 12)}):
        model = vit(**options)
        shape = hf.image_shape(model)
        assert shape is not None and model(torch.zeros(2, *shape)).logits.shape[0] == 2
    assert hf.image_shape(llama()) is None


def test_classifiers_of_sequences_are_named_so() -> None:
    names = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
    odd = {name for name in names if not name.endswith("SequenceClassification")}
    assert odd <= {"OpenAIGPTForSequenceClassification", "PerceiverForSequenceClassification"}, odd
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**TINY))
    assert hf.has_label_per_sample(model) and not hf.has_label_per_sample(llama())


def test_caches_are_turned_off_and_on() -> None:
    model = llama()
    ids = torch.ones(1, 3, dtype=torch.long)
    assert model(ids).past_key_values is not None
    configs = hf.disable_caches(model)
    assert model(ids).past_key_values is None
    hf.enable_caches(configs)
    assert model(ids).past_key_values is not None


def test_a_cache_without_a_config_gets_an_entry_for_each_layer() -> None:
    caches = [transformers.DynamicCache() for _ in range(3)]
    assert hasattr(caches[0], hf.LAYER_CLASS)
    hf.complete_cache(caches[0], llama().config)
    hf.complete_cache(transformers.EncoderDecoderCache(*caches[1:]), t5().config)
    assert [len(cache.layers) for cache in caches] == [TINY["num_hidden_layers"], 1, 1]
    empty = transformers.DynamicCache()
    hf.complete_cache(empty, transformers.PretrainedConfig())
    hf.complete_cache(empty, None)
    assert not empty.layers


def test_caches_that_quantize_their_states() -> None:
    config = llama().config
    plain, quantized = transformers.DynamicCache(config=config), transformers.QuantizedCache("fp8", config)
    assert not hf.is_quantized_cache(plain) and hf.is_quantized_cache(quantized)
    assert hf.is_quantized_cache(transformers.EncoderDecoderCache(quantized, plain))


def test_the_argument_that_is_a_cache() -> None:
    """transformers 5.24 renamed past_key_values and cache_params: its caches were kept as inputs, and no model
    generated."""

    class Renamed(nn.Module):
        def forward(self, input_ids: Tensor, cache: Any = None) -> None: ...

    model, ids = Renamed(), torch.ones(1, 3, dtype=torch.long)
    assert hf.cache_argument(model) == "cache" and hf.cache_argument(llama()) is not None
    assert twin(model, "", {"input_ids": ids, "cache": object()}, model.forward) == {"input_ids": ids}


def test_layers_that_recompute_themselves() -> None:
    model = llama().train()
    layer = model.model.layers[0]
    assert hf.can_recompute(model) and not hf.recomputes(layer)
    model.gradient_checkpointing_enable()
    assert hf.recomputes(layer) and not hf.recomputes(layer.mlp) and not hf.can_recompute(nn.ReLU())


def test_frequencies_that_depend_on_the_number_of_positions() -> None:
    def limit(kind: Any, make: Any, rope: dict[str, Any], **options: Any) -> int | None:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        options |= {"vocab_size": 9, "pad_token_id": 0, "rope_parameters": rope | {"rope_theta": 1e4, "factor": 2.0}}
        return hf.rope_limit(make(kind(**sizes, **options)).rotary_emb)

    llama_config, llama_model = transformers.LlamaConfig, transformers.LlamaModel
    assert limit(llama_config, llama_model, {"rope_type": "linear"}) is None
    assert limit(llama_config, llama_model, {"rope_type": "dynamic"}, max_position_embeddings=64) == 64
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = {"max_position_embeddings": 64, "original_max_position_embeddings": 32}
    assert limit(transformers.Phi3Config, transformers.Phi3Model, factors, **sizes) == 32


@pytest.mark.parametrize("config", [None, {"max_position_embeddings": 64, "rope_scaling": {"factor": 2.0}}])
def test_a_rotary_module_of_another_package(config: Any) -> None:
    """Without transformers' config, its limit is unknown: "vars() argument must have __dict__ attribute"."""
    rotary = nn.Module()
    rotary.rope_type = "dynamic"  # type: ignore[assignment]
    if config is not None:
        rotary.config = config
    assert hf.rope_limit(rotary) == (64 if config else 0)


def test_the_name_of_neftune() -> None:
    embedding = nn.Embedding(2, 2).train()
    assert not hf.adds_noise(embedding)
    setattr(embedding, hf.NOISE, 1.0)
    embedding.register_forward_hook(neftune_post_forward_hook)
    assert hf.adds_noise(embedding) and not torch.equal(embedding(torch.zeros(1, 1).long()), embedding.weight[:1, None])


def shifted(*args: Any, **kwargs: Any) -> Tensor:
    return ForCausalLMLoss(*args, **kwargs) + 1


def registered(model: Any, patch: pytest.MonkeyPatch) -> None:
    wrapper = functools.wraps(ForCausalLMLoss)(lambda *args, **kwargs: shifted(*args, **kwargs))
    patch.setitem(LOSS_MAPPING, "ForCausalLM", wrapper)


def selected(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(LOSS_MAPPING, "Shifted", shifted)
    model.loss_type = "Shifted"


def passed(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.loss_function = shifted


def replaced(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.forward = lambda **batch: {"loss": shifted(**batch)}


def replaced_in_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(model), "forward", lambda self, **batch: {"loss": shifted(**batch)})


@pytest.mark.parametrize("change", [registered, selected, passed, replaced, replaced_in_class])
def test_a_loss_or_forward_that_was_replaced_is_not_known(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user replaced a forward, or a loss in transformers' registry, by a mean of means of 16 positions: it was taken
    for transformers' own loss, which holds at all sizes, so longer batches trained with a wrong loss."""
    model, other = llama(), vit(image_size=8)
    wrapped = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    bases = model, wrapped.get_base_model()
    assert all(map(hf.has_known_loss, (model, wrapped, other, t5())))
    for base in bases:
        change(base, monkeypatch)
    assert not hf.has_known_loss(model) and not hf.has_known_loss(wrapped) and hf.has_known_loss(other)


def test_registries_have_the_functions_that_a_config_selects() -> None:
    config = transformers.MixtralConfig(attn_implementation="sdpa", **TINY)
    found = hf.registered_functions(transformers.MixtralForCausalLM(config).config)
    expected = {getattr(config, field) for field in hf.IMPLEMENTATIONS}
    registries = [getattr(importlib.import_module(path), name) for path, name in hf.REGISTRIES.items()]
    assert [*found.values()] == [registry[name] for registry in registries for name in expected if name in registry]
    assert len(found) == 3


def fields() -> set[str]:
    """The fields of all configs of transformers."""
    return {name for kind in transformers.CONFIG_MAPPING.values() for name in inspect.signature(kind).parameters}


@pytest.mark.turns
def test_heads_and_dropouts_are_fields_of_configs() -> None:
    known = fields() | transformers.BartConfig.attribute_map.keys() | set(vars(transformers.BartConfig()))
    assert not {*hf.HEADS, *hf.DROPOUTS} - known


def test_adapters_are_around_the_model() -> None:
    base = llama()
    assert hf.without_adapters(base) == ("", base)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2))
    prefix, inner = hf.without_adapters(model)
    assert inner is base and model.get_submodule(f"{prefix}lm_head") is base.lm_head
    assert hf.is_of_transformers(model) and hf.is_of_transformers(base) and not hf.is_of_transformers(nn.ReLU())


def test_the_classes_of_adapters() -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2)
    model = peft.get_peft_model(llama(), config)
    layer, head = (
        model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj"),
        model.base_model.model.lm_head,
    )
    assert hf.is_of_peft(model, "PeftModel") and not hf.is_of_peft(llama(), "PeftModel")
    assert hf.is_of_peft(layer, "LoraLayer") and hf.is_of_peft(layer, "BaseTunerLayer")
    assert hf.is_of_peft(head, "ModulesToSaveWrapper") and hf.is_of_peft(head, "AuxiliaryTrainingWrapper")


def test_the_file_that_names_an_adapter(tmp_path: Any) -> None:
    peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], r=2)).save_pretrained(tmp_path)
    assert (tmp_path / hf.ADAPTER_CONFIG).exists()


def test_classes_that_are_saved_with_their_code() -> None:
    own: Any = type("Own", (transformers.LlamaForCausalLM,), {})
    own.register_for_auto_class("AutoModelForCausalLM")
    assert hf.is_of_custom_code(own(transformers.LlamaConfig(**TINY))) and not hf.is_of_custom_code(llama())
