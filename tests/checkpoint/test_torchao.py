"""Tests of torchao: adapters on torchao's int8 weights train in a pipeline as they do in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import TorchAoConfig

from pipeshard import PipelinePlugin
from pipeshard.checkpoint.lora import enable_lora
from pipeshard.engine.refusals import uncompiled
from pipeshard.errors import ConfigurationError
from pipeshard.split import packed
from pipeshard.split.materialize import is_released
from pipeshard.split.packed import packed_layers
from pipeshard.verify.proof import EXACT
from tests.checkpoint.test_quantized import (
    LLAMA,
    adapters,
    blank,
    generated,
    of_one_process,
    of_stages,
    proving,
    quantization,
    replicas,
    resuming,
    rounded,
    saving,
    trained,
)
from tests.covering import covering
from tests.parity.build import batch, build
from tests.parity.entries import find
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, compared

torchao = pytest.importorskip("torchao.quantization")
linear_torchao = pytest.importorskip("pipeshard.split.linear_torchao")
pytestmark = pytest.mark.local
ENTRIES = [f"causal-lm/{name}" for name in ("llama", "gpt_neox", "opt", "gemma3_text", "mixtral", "gpt2")]
CASES = [
    ("causal-lm/llama", "1f1b", 2),
    ("causal-lm/llama", "zbv", 3),
    *covering(ENTRIES, ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"], [2, 3], strength=1),
]


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "schedule", "p"), CASES)
def test_adapters_on_int8_weights(pool: Pool, tmp_path: Path, name: str, schedule: str, p: int) -> None:
    (entry,) = find(name)
    build(entry).save_pretrained(tmp_path)
    assert pool.run(trained, p, tmp_path, name, "torchao", schedule=schedule) == [[]] * p


def differing(folder: Path, dtype: torch.dtype, **arguments: Any) -> list[str]:
    """What differs from one process in a backward; new adapters are in fp32."""
    model = build(LLAMA)
    data, load = batch(LLAMA, model), {"quantization_config": quantization("torchao"), "dtype": dtype}
    torch.manual_seed(3)
    unsplit = Unsplit(get_peft_model(type(model).from_pretrained(folder, **load).train(), adapters()))
    torch.manual_seed(3)
    made = enable_lora(PipelinePlugin.from_pretrained(type(model), folder, **load).train(), None, adapters(), None)
    split = Split(made, 2, data, num_microbatches=2, **arguments)
    reference = unsplit.backward_in_parts(data, num_microbatches=2)
    return compared(split, unsplit, split.backward(data)["loss"], reference, 5e-6)


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("dtype", "option"),
    [
        (torch.float32, {"recompute": True}),
        (torch.float32, {"num_slices": 2}),
        (torch.float32, {"verify": True}),
        (torch.bfloat16, {"schedule": "zbv"}),
    ],
    ids=str,
)
def test_int8_weights_with(pool: Pool, tmp_path: Path, dtype: torch.dtype, option: dict[str, Any]) -> None:
    build(LLAMA).save_pretrained(tmp_path)
    assert pool.run(differing, 2, tmp_path, dtype, **option) == [[], []]


@pytest.mark.turns
def test_int8_weights_in_replicas(pool: Pool, tmp_path: Path) -> None:
    build(LLAMA).save_pretrained(tmp_path)
    assert pool.run(replicas, 4, tmp_path, "torchao", zero_stage=1) == [[]] * 4


@pytest.mark.turns
def test_adapters_and_training_state(pool: Pool, tmp_path: Path) -> None:
    build(LLAMA).save_pretrained(tmp_path / "base")
    next_loss, of_peft = pool.run(saving, 2, tmp_path, "torchao")[0]
    assert next_loss == pytest.approx(of_peft, rel=1e-6)
    assert pool.run(resuming, 3, tmp_path, "torchao") == [pytest.approx(next_loss, rel=1e-6)] * 3


@pytest.mark.turns
def test_products_with_autocast(pool: Pool, tmp_path: Path) -> None:
    build(LLAMA).save_pretrained(tmp_path)
    assert pool.run(rounded, 2, tmp_path, "torchao", "bf16", True) == [[], []]


@pytest.mark.turns
def test_generation(pool: Pool, tmp_path: Path) -> None:
    build(LLAMA).save_pretrained(tmp_path)
    for found, expected in pool.run(generated, 2, tmp_path, "torchao"):
        assert found == expected


def held(folder: Path) -> list[str]:
    """What is wrong with the quantized weights of this rank."""
    model = build(LLAMA)
    split = Split(of_stages(type(model), folder, quantization("torchao")), 2, batch(LLAMA, model), num_microbatches=2)
    layers: list[tuple[str, Any]] = list(packed_layers(split.model.unwrap()))
    own = [layer for _, layer in layers if not is_released(layer.weight)]
    found = [name for name, layer in layers if (layer.scale is None) != is_released(layer.weight)]
    return found + ["no layers"] * (not 0 < len(own) < len(layers))


@pytest.mark.turns
def test_a_rank_has_scales_of_its_own_layers_alone(pool: Pool, tmp_path: Path) -> None:
    build(LLAMA).save_pretrained(tmp_path)
    assert pool.run(held, 2, tmp_path) == [[], []]


@pytest.mark.turns
def test_verify_draws_int8_weights(pool: Pool, tmp_path: Path) -> None:
    build(LLAMA).save_pretrained(tmp_path)
    assert pool.run(proving, 1, tmp_path, "torchao") == [(EXACT, "")]


def layer_of(linear: nn.Module, dtype: torch.dtype) -> Any:
    kind = linear_torchao.LinearTorchao
    blank: Any = nn.Linear(1, 1, device="meta")
    kind.take_over(blank, dtype, "layer")
    return blank.like(linear)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_is_that_of_torchao(dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, although rows are quantized in chunks; a row of zeros has a scale, too."""
    monkeypatch.setattr(packed, "CHUNK", 100)
    linear = nn.Linear(24, 40, bias=bias, dtype=dtype)
    linear.weight.data[3] = 0
    made = layer_of(linear, dtype)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    weight: Any = linear.weight
    assert torch.equal(made.weight, weight.qdata) and made.scale is not None and torch.equal(made.scale, weight.scale)
    x = torch.randn(2, 5, 24, dtype=dtype)
    results: list[list[Any]] = []
    for layer in (made, linear):
        layer.requires_grad_(False)
        if bias:
            layer.bias.requires_grad_()
        own = x.clone().requires_grad_()
        y = layer(own)
        y.backward(torch.ones_like(y))
        results.append([y, own.grad, *([layer.bias.grad] if bias else [])])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert made.scales == weight.scale.nbytes


def test_no_converted_weight_is_kept_for_the_backward() -> None:
    """torchao's own layer keeps the whole weight in the dtype of the input, for each microbatch in flight."""
    kept: list[Tensor] = []
    layer = layer_of(nn.Linear(64, 64), torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(2, 64, requires_grad=True))
    assert max(tensor.nbytes for tensor in kept) == layer.weight.nbytes


def test_new_adapters_are_rounded_as_by_peft(tmp_path: Path) -> None:
    """peft rounds new adapters to the dtype of torchao's weight, which is that of the unquantized one."""
    kind: Any = type(build(LLAMA))
    build(LLAMA).save_pretrained(tmp_path)
    options = {"quantization_config": quantization("torchao"), "dtype": torch.bfloat16}
    config = LoraConfig(r=4, target_modules="all-linear")
    torch.manual_seed(3)
    whole = get_peft_model(kind.from_pretrained(tmp_path, **options), config)
    torch.manual_seed(3)
    made = enable_lora(PipelinePlugin.from_pretrained(kind, tmp_path, **options), None, config, None)
    assert all(torch.equal(p, whole.get_parameter(name)) for name, p in made.named_parameters() if "lora_" in name)
    assert all(layer.weight.is_meta and layer.weight.dtype is torch.int8 for _, layer in packed_layers(made))


def test_a_copy_on_meta(tmp_path: Path) -> None:
    model = blank(tmp_path, quantization("torchao"))
    made = copy.deepcopy(model)
    name, layer = next(packed_layers(made))
    assert layer.weight.is_meta and layer.weight is not model.get_parameter(name) and layer.weight.dtype is torch.int8


# Refused


@pytest.mark.parametrize(
    ("how", "options", "message"),
    [
        ("Int4WeightOnlyConfig", {}, "torchao's Int4WeightOnlyConfig is not supported. Pass BitsAndBytesConfig"),
        ("Int8DynamicActivationInt8WeightConfig", {}, "torchao's Int8DynamicActivationInt8WeightConfig is not supp"),
        ("IntxWeightOnlyConfig", {}, "torchao's IntxWeightOnlyConfig is not supported"),
        ("Float8WeightOnlyConfig", {}, "torchao's Float8WeightOnlyConfig is not supported"),
        ("Int8WeightOnlyConfig", {"include_input_output_embeddings": True}, "embeddings=True is not supported"),
        ("Int8WeightOnlyConfig", {"untie_embedding_weights": True}, "untie_embedding_weights=True is not supported"),
    ],
)
def test_other_ways_are_refused(tmp_path: Path, how: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        blank(tmp_path, TorchAoConfig(getattr(torchao, how)(), **options))


def test_scales_of_groups_are_refused(tmp_path: Path) -> None:
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(32)))
    with pytest.raises(ConfigurationError, match=r"granularity=PerGroup\(group_size=32\)\) is not supported\. Omit"):
        blank(tmp_path, config)


def test_layers_that_cannot_be_quantized_are_refused(tmp_path: Path) -> None:
    """transformers would quantize a head that is tied, and layers of a class of Falcon's own."""
    model = build(LLAMA, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "tied")
    how = torchao.Int8WeightOnlyConfig()
    config = TorchAoConfig(how, modules_to_not_convert=["q_proj"])
    with pytest.raises(ConfigurationError, match=r"lm_head\.weight is tied to .* Add 'lm_head' to modules_to_not"):
        PipelinePlugin.from_pretrained(type(model), tmp_path / "tied", quantization_config=config)
    with pytest.raises(ConfigurationError, match=r"\(FalconLinear\), .* Add '\.\*query_key_value' to modules_to_not"):
        blank(tmp_path / "own", TorchAoConfig(how), "causal-lm/falcon")


def test_a_model_that_torchao_has_quantized_is_refused(tmp_path: Path) -> None:
    """boost ended in torchao's NotImplementedError about slices with a step."""
    kind = type(build(LLAMA))
    build(LLAMA).save_pretrained(tmp_path)
    model = of_one_process(kind, tmp_path, quantization("torchao"))
    with pytest.raises(ConfigurationError, match=r"q_proj\.base_layer\.weight is a torchao Int8Tensor, which"):
        uncompiled(model)
