"""Tests of quantized bases: adapters train in a pipeline as they do on bitsandbytes' own layers in one process."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from peft import (
    HRAConfig,
    LoraConfig,
    MissConfig,
    PeftModel,
    PromptTuningConfig,
    PveraConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, GPTQConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig
from transformers.utils.quantization_config import QuantizationConfigMixin, QuantizationMethod

from benchmarks.resident import peak, reset_peak, resident
from pipeshard import PipelinePlugin, load_training_state, save_training_state, to_sequential
from pipeshard.checkpoint.lora import enable_lora
from pipeshard.checkpoint.safetensors_files import StoredTensors
from pipeshard.errors import CheckpointError, ConfigurationError, TraceError, UsageError
from pipeshard.split.blank import give
from pipeshard.split.materialize import is_released, trim
from pipeshard.split.packed import packed_layers
from pipeshard.split.quantized import EXTRAS, quantization_of, quantize_blank, refuse_other_ways
from pipeshard.verify.decide import Proven, alone, is_known
from pipeshard.verify.proof import EXACT
from pipeshard.verify.small_config import layer_counts
from tests.covering import covering
from tests.messages import messages_of
from tests.parity.build import batch, build
from tests.parity.entries import find
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, compared, differences, largest_error
from tests.zoo import TINY

bitsandbytes = pytest.importorskip("bitsandbytes")
linear4bit = pytest.importorskip("pipeshard.split.linear4bit")
linear8bit = pytest.importorskip("pipeshard.split.linear8bit")
pytestmark = pytest.mark.local
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FOUR: dict[str, dict[str, Any]] = {
    "fp4": {"load_in_4bit": True},
    "nf4": NF4,
    "double": NF4 | {"bnb_4bit_use_double_quant": True},
}
EIGHT: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "int8 alone": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
KINDS = FOUR | EIGHT
TEXT = ["llama", "qwen3", "gemma3_text", "mistral", "phi3", "gpt_neox", "opt", "mixtral", "deepseek_v3", "gpt2"]
ENTRIES = [*(f"causal-lm/{name}" for name in TEXT), "image-text-to-text/llava"]
IN_EIGHT = [f"causal-lm/{name}" for name in ("llama", "gpt_neox", "opt", "gemma3_text", "mixtral", "gpt2")]
(LLAMA,) = find("causal-lm/llama")
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]


def quantization(kind: str, **options: Any) -> Any:
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    return BitsAndBytesConfig(**KINDS[kind], **options)


def adapters(**fields: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, **fields)


def of_one_process(kind: type[Any], folder: Path, config: BitsAndBytesConfig | None) -> nn.Module:
    """What a user of bitsandbytes trains: the model of the folder with packed weights, and adapters."""
    options = {"quantization_config": config} if config is not None else {}
    model = kind.from_pretrained(folder, dtype=torch.float32, **options)
    torch.manual_seed(3)
    return get_peft_model(model.train(), adapters())


def of_stages(kind: type[Any], folder: Path, config: BitsAndBytesConfig | None, stages: int = 0) -> nn.Module:
    model: Any = PipelinePlugin.from_pretrained(kind, folder, quantization_config=config, dtype=torch.float32).train()
    torch.manual_seed(3)
    plugin = PipelinePlugin(pp_size=stages or dist.get_world_size(), num_microbatches=2)
    return Booster(plugin=plugin).enable_lora(model, lora_config=adapters())


def trained(folder: Path, name: str, kind: str, **arguments: Any) -> list[str]:
    """What differs from one process in three steps; without a `kind`, the folder has packed weights."""
    (entry,) = find(name)
    model = build(entry)
    config = quantization(kind) if kind else None
    unsplit = Unsplit(of_one_process(type(model), folder, config), max_norm=0.5)
    batches = [batch(entry, model, seed=seed) for seed in range(3)]
    blank = of_stages(type(model), folder, config)
    split = Split(blank, dist.get_world_size(), batches[0], max_norm=0.5, num_microbatches=2, **arguments)
    for group in (*unsplit.optimizer.param_groups, *split.optimizer.param_groups) if "num_slices" in arguments else ():
        group["eps"] = 1e-4  # otherwise, AdamW's first updates have the size of lr, even where gradients are noise
    found: list[str] = []
    tolerance = 1e-6 if entry.task == "causal-lm" and "num_slices" not in arguments else 5e-6
    for number, data in enumerate(batches):
        if entry.task == "causal-lm":
            reference = unsplit.backward_in_parts(data, num_microbatches=2)  # with the same order of sums
        else:
            reference = unsplit.backward(data)
        loss = split.backward(data)["loss"]
        found += compared(split, unsplit, loss, reference, 1e-4 if number else tolerance)
        unsplit.step()
        split.step()
    whole = dict(unsplit.model.named_parameters())
    floats = {name: p for name, p in split.held.items() if p.is_floating_point()}
    error = largest_error((p - whole[name]).norm() / whole[name].norm().clamp(min=1e-9) for name, p in floats.items())
    return found + [f"parameters differ by {error:.1e}"] * (error > 1e-5)


CASES = [
    *covering(ENTRIES, SCHEDULES, list(FOUR), [2, 3], strength=1),
    *covering(IN_EIGHT, SCHEDULES, list(EIGHT), [2, 3], strength=1),
]


@pytest.mark.turns
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "schedule", "kind", "p"), CASES)
def test_adapters_on_packed_weights(pool: Pool, tmp_path: Path, name: str, schedule: str, kind: str, p: int) -> None:
    (entry,) = find(name)
    build(entry).save_pretrained(tmp_path)
    assert pool.run(trained, p, tmp_path, name, kind, schedule=schedule) == [[]] * p


def options(folder: Path, kind: str, **arguments: Any) -> list[str]:
    return trained(folder, "causal-lm/llama", kind, **arguments)


OPTIONS: dict[str, dict[str, Any]] = {
    "recomputed": {"recompute": True},
    "sliced": {"num_slices": 2},
    "proven": {"verify": True},
}


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["nf4", "int8 alone"])
@pytest.mark.parametrize("option", list(OPTIONS))
def test_packed_weights_with(pool: Pool, tmp_path: Path, option: str, kind: str) -> None:
    build(LLAMA).save_pretrained(tmp_path)
    assert pool.run(options, 2, tmp_path, kind, **OPTIONS[option]) == [[], []]


def replicas(folder: Path, kind: str, **arguments: Any) -> list[str]:
    """What differs from one process where two replicas of two stages each have half of the samples."""
    model = build(LLAMA)
    unsplit = Unsplit(of_one_process(type(model), folder, quantization(kind)), max_norm=0.5)
    data = batch(LLAMA, model)
    blank = of_stages(type(model), folder, quantization(kind), 2)
    rows = {key: value.chunk(2)[dist.get_rank() // 2] for key, value in data.items()}
    split = Split(blank, 2, rows, max_norm=0.5, num_microbatches=2, **arguments)
    found = compared(split, unsplit, split.backward(rows)["loss"], unsplit.backward(data), 5e-6)
    unsplit.step()
    split.step()
    return found + compared(split, unsplit, split.backward(rows)["loss"], unsplit.backward(data), 1e-4)


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_four_bits_in_replicas(pool: Pool, tmp_path: Path, zero_stage: int) -> None:
    build(LLAMA).save_pretrained(tmp_path)
    assert pool.run(replicas, 4, tmp_path, "nf4", zero_stage=zero_stage) == [[]] * 4


def saving(folder: Path, kind: str) -> tuple[float, float]:
    """The loss of the next step, and that of peft's own model with the saved adapters in one process."""
    model = build(LLAMA)
    data = batch(LLAMA, model)
    blank = of_stages(type(model), folder / "base", quantization(kind))
    split = Split(blank, dist.get_world_size(), data, num_microbatches=2)
    split.backward(data)
    split.step()
    split.booster.save_lora_as_pretrained(split.model, str(folder / "adapters"))
    save_training_state(folder / "state", 1, split.model, split.optimizer)
    base = type(model).from_pretrained(folder / "base", quantization_config=quantization(kind), dtype=torch.float32)
    whole = PeftModel.from_pretrained(base, folder / "adapters").train()
    return float(split.backward(data)["loss"]), float(whole(**data).loss)


def resuming(folder: Path, kind: str) -> float:
    model = build(LLAMA)
    data = batch(LLAMA, model)
    blank = of_stages(type(model), folder / "base", quantization(kind))
    split = Split(blank, dist.get_world_size(), data, num_microbatches=2)
    assert load_training_state(folder / "state", split.model, split.optimizer) == 1
    return float(split.backward(data)["loss"])


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_adapters_and_training_state(pool: Pool, tmp_path: Path, kind: str) -> None:
    build(LLAMA).save_pretrained(tmp_path / "base")
    next_loss, of_peft = pool.run(saving, 2, tmp_path, kind)[0]
    assert next_loss == pytest.approx(of_peft, rel=1e-6)
    saved = {file.name for file in (tmp_path / "state").rglob("*.safetensors")}
    assert saved
    assert pool.run(resuming, 3, tmp_path, kind) == [pytest.approx(next_loss, rel=1e-6)] * 3


def rounded(folder: Path, kind: str, precision: str, autocast: bool) -> list[str]:
    """Products in bf16: what an engine adds to their rounding is small beside it."""
    model = build(LLAMA)
    data = batch(LLAMA, model)
    config = quantization(kind, bnb_4bit_compute_dtype=torch.bfloat16)
    unsplit = Unsplit(of_one_process(type(model), folder, config))
    blank = of_stages(type(model), folder, config)
    split = Split(blank, 2, data, num_microbatches=2, precision=precision, autocast=autocast)
    packed = [name for name, p in split.held.items() if p.dtype in (torch.uint8, torch.int8)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        reference = unsplit.backward_in_parts(data, num_microbatches=2)
    found = compared(split, unsplit, split.backward(data)["loss"], reference, 5e-2)
    split.step()
    return found + ["a packed weight was cast"] * (not packed)


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize(("precision", "autocast"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_products_in_16_bits(pool: Pool, tmp_path: Path, kind: str, precision: str, autocast: bool) -> None:
    """With autocast a trace runs on throw-away values: layers whose scales were on meta did not.

    A Trainer with bf16=True trains so, and each stage has scales of its own layers alone.
    """
    build(LLAMA).save_pretrained(tmp_path)
    assert pool.run(rounded, 2, tmp_path, kind, precision, autocast) == [[], []]


def prompted(folder: Path) -> list[str]:
    """What differs from one process with prompts on a quantized base."""
    kind, config = type(build(LLAMA)), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    options = {"quantization_config": quantization("nf4"), "dtype": torch.float32}
    whole = kind.from_pretrained(folder, **options).train()
    torch.manual_seed(3)
    unsplit = Unsplit(get_peft_model(whole, config))
    blank = PipelinePlugin.from_pretrained(kind, folder, **options).train()
    torch.manual_seed(3)
    data = batch(LLAMA, whole)
    split = Split(enable_lora(blank, None, config, None), 2, data, num_microbatches=2)
    return differences(split, unsplit, data, 5e-6)


@pytest.mark.turns
def test_prompts_on_packed_weights(pool: Pool, tmp_path: Path) -> None:
    """A quantized base had no prompts: they were refused on meta, and boost refused the loaded model."""
    build(LLAMA).save_pretrained(tmp_path)
    assert pool.run(prompted, 2, tmp_path) == [[], []]


def generated(folder: Path, kind: str) -> tuple[list[int], list[int]]:
    model = build(LLAMA)
    whole = of_one_process(type(model), folder, quantization(kind)).eval()
    for module in whole.modules():  # some CPUs evaluate with scales in 16 bits
        module.support_avx512bf16_for_cpu = False
    data = batch(LLAMA, model)
    split = Split(of_stages(type(model), folder, quantization(kind)), 2, data, num_microbatches=2)
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    prompts = {"input_ids": data["input_ids"][:2, :6], "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    return split.model.generate(**prompts, **asked).tolist(), whole.generate(**prompts, **asked).tolist()


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_generation_from_packed_weights(pool: Pool, tmp_path: Path, kind: str) -> None:
    build(LLAMA).save_pretrained(tmp_path)
    for found, expected in pool.run(generated, 2, tmp_path, kind):
        assert found == expected


def packed_share(folder: Path, kind: str) -> float:
    """The bytes that this rank holds of the linear layers, of what they take in fp32."""
    model = build(LLAMA)
    data = batch(LLAMA, model)
    split = Split(of_stages(type(model), folder, quantization(kind)), 2, data, num_microbatches=2)
    layers = [layer for _, layer in packed_layers(split.model.unwrap()) if not is_released(layer.weight)]
    held = sum(layer.weight.nbytes + layer.scales for layer in layers)
    released: list[Any] = [layer for _, layer in packed_layers(split.model.unwrap()) if is_released(layer.weight)]
    assert all(layer.state.SCB is None if kind == "int8" else layer.quant_state.absmax.is_meta for layer in released)
    return held / sum(4 * math.prod(layer.whole_shape) for layer in layers)


@pytest.mark.turns
@pytest.mark.parametrize(("kind", "share"), [("nf4", 0.5 / 4 + 1 / 64), ("int8", 1 / 4 + 1 / 34)])
def test_a_rank_holds_an_eighth_or_a_quarter(pool: Pool, tmp_path: Path, kind: str, share: float) -> None:
    build(LLAMA).save_pretrained(tmp_path)
    for found in pool.run(packed_share, 2, tmp_path, kind):
        assert found == pytest.approx(share, rel=2e-2)


@pytest.mark.turns
def test_packing_on_meta_leaves_bitsandbytes_as_it_is() -> None:
    """A model with double quantization that was the first thing to be packed left a map on meta, for the whole process,
    and no weight could be packed."""
    code = (
        "import torch; torch.set_default_device('meta'); import pipeshard.split.linear4bit as made; "
        "print(made.functional.name2qmap['dynamic'].device)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout == "cpu\n"


def proving(folder: Path, kind: str) -> tuple[str, str]:
    """What `pipeshard verify` says of a script."""
    model = build(LLAMA)
    with alone(2), pytest.raises(Proven) as caught:
        Split(of_stages(type(model), folder, quantization(kind), 2), 2, batch(LLAMA, model), num_microbatches=2)
    return caught.value.proof.kind, caught.value.proof.reason


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["double", "int8"])
def test_verify_draws_packed_weights(pool: Pool, tmp_path: Path, kind: str) -> None:
    """`pipeshard verify` of a script whose weights are on meta proves a copy with drawn values.

    It drew packed weights as if they were numbers. And bitsandbytes keeps the first map of scales that it makes: on
    meta, where nothing was packed before, so that use_double_quant failed in any process, not in those of other tests.
    """
    build(LLAMA).save_pretrained(tmp_path)
    assert pool.run(proving, 1, tmp_path, kind) == [(EXACT, "")]


@pytest.mark.parametrize("kind", ["double", "int8"])
def test_a_copy_on_meta(tmp_path: Path, kind: str) -> None:
    """A user's copy of the model (copy.deepcopy, for a reference of DPO) is a packed one, on meta, of its own.

    bitsandbytes' weights in 4 bits copied no other values than those of a CPU.
    """
    model = blank(tmp_path, quantization(kind))
    made = copy.deepcopy(model)
    name, layer = next(packed_layers(made))
    own: Any = model.get_submodule(name.removesuffix(".weight"))
    copied: Any = made.get_parameter(name)
    assert copied.is_meta and copied is not model.get_parameter(name) and copied.shape == own.weight.shape
    state = "quant_state" if kind == "double" else "state"
    assert getattr(copied, "module", layer) is layer and getattr(layer, state) is not getattr(own, state)
    prepare_model_for_kbit_training(made)
    assert copied.dtype is own.weight.dtype


@pytest.mark.parametrize("kind", ["double", "int8"])
def test_a_quantized_class_of_transformers_is_known(tmp_path: Path, kind: str) -> None:
    """A class that docs/parity.md lists was proven again if it was quantized: a minute and 400 MB on the first rank."""
    model = blank(tmp_path, quantization(kind))
    assert any(packed_layers(model)) and is_known(get_peft_model(model, adapters()), None)


def stored(kind: str, rows: int, columns: int, folder: Path) -> tuple[Any, Tensor, Any]:
    """A quantized layer without values, a weight for it, and the weight in a file."""
    value = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    save_file({"weight": value}, folder / "model.safetensors")
    of_kind: tuple[Any, Any]
    if kind in FOUR:
        how = {"quant_type": kind if kind == "fp4" else "nf4", "compress_statistics": kind == "double"}
        of_kind = linear4bit.Linear4bit, bitsandbytes.nn.Linear4bit(columns, rows, bias=False, device="meta", **how)
    else:
        of_kind = (
            linear8bit.Linear8bit,
            bitsandbytes.nn.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False, device="meta"),
        )
    of_kind[0].take_over(of_kind[1], torch.float32, "layer")
    give(of_kind[1].weight, torch.empty_like(of_kind[1].weight.as_subclass(Tensor), device="cpu"))
    return of_kind[1], value, StoredTensors(folder).rows("weight")


@pytest.mark.parametrize("kind", ["fp4", "double", "int8"])
def test_packing_in_parts_gives_the_bits_of_bitsandbytes(tmp_path: Path, kind: str) -> None:
    """A block of 64 values may span two rows, but not two parts."""
    layer, value, rows = stored(kind, 517, 1000, tmp_path)
    layer.pack(rows)
    if kind == "int8":
        packed, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(value.half())
        assert torch.equal(layer.weight.data, packed) and torch.equal(layer.state.SCB, scales)
        return
    packed, state = bitsandbytes.functional.quantize_4bit(
        value, blocksize=64, compress_statistics=kind == "double", quant_type=layer.options["quant_type"]
    )
    assert torch.equal(layer.weight.data, packed)
    ours, theirs = layer.quant_state.as_dict(), state.as_dict()
    assert all(
        torch.equal(ours[name], value) if isinstance(value, Tensor) else ours[name] == value
        for name, value in theirs.items()
    )


@pytest.mark.turns
@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize("trains", [True, False])
def test_products_in_8_bits_keep_no_input(trains: bool, threshold: float) -> None:
    """bitsandbytes keeps the input for the gradient of the frozen weight: in every microbatch in flight, on the GPU
    despite `offload`, and beyond the memory that was planned."""
    torch.manual_seed(0)
    how = {"bias": False, "has_fp16_weights": False, "threshold": threshold, "device": "meta"}
    layer = bitsandbytes.nn.Linear8bitLt(16, 8, **how)
    linear8bit.Linear8bit.take_over(layer, torch.float32, "layer")
    layer = layer.like(torch.nn.Linear(16, 8, bias=False)).train(trains)
    start = torch.randn(2, 3, 16, requires_grad=True)
    x, kept = start + 7, start.detach() + 7
    alive, y = weakref.ref(x), layer(x)
    del x
    assert alive() is None
    expected = bitsandbytes.matmul(kept.requires_grad_(), layer.weight, state=state_of(layer))
    for one in (y, expected):
        one.square().sum().backward()
    assert torch.equal(start.grad, kept.grad) and start.grad.any()


def state_of(layer: Any) -> Any:
    state = copy.copy(layer.state)
    state.CB, state.is_training = layer.weight.data, layer.training
    return state


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["double", "int8"])
def test_packing_takes_little_memory(tmp_path: Path, kind: str) -> None:
    """A matrix was read as a whole to be packed, and a rank that holds 150 MB took up to 434 MB while loading."""
    layer, value, rows = stored(kind, 4096, 4096, tmp_path)
    layer.pack(rows)  # allocates the weight, and loads code
    trim()
    reset_peak()
    before = resident()
    layer.pack(rows)
    assert peak() - before < value.nbytes / 4


def whole_reads(folder: Path) -> set[str]:
    """The packed weights that this rank reads as a whole."""
    read = StoredTensors.read
    found: set[str] = set()

    def watched(self: StoredTensors, key: str) -> Tensor:
        found.add(key)
        return read(self, key)

    model = build(LLAMA)
    with mock.patch.object(StoredTensors, "read", watched):
        Split(of_stages(type(model), folder, quantization("nf4")), 2, batch(LLAMA, model), num_microbatches=2)
    return {key for key in found if "proj" in key}


@pytest.mark.turns
def test_weights_to_pack_are_read_in_rows(pool: Pool, tmp_path: Path) -> None:
    build(LLAMA).save_pretrained(tmp_path)
    assert pool.run(whole_reads, 2, tmp_path) == [set(), set()]


# Refused


def blank(folder: Path, config: Any, name: str = "causal-lm/llama") -> Any:
    (entry,) = find(name)
    model = build(entry)
    model.save_pretrained(folder)
    return PipelinePlugin.from_pretrained(type(model), folder, quantization_config=config, dtype=torch.float32)


def test_a_smaller_copy_of_a_quantized_model_has_few_layers() -> None:
    """The path of a quantized layer counted as a setting, so that the proof's copy kept all layers: it was often too
    large."""
    config = LlamaConfig(**{**TINY, "num_hidden_layers": 6})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    quantize_blank(model, quantization("nf4"))
    assert layer_counts(model, config, 1) == {6: 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True),
            "which keeps 16-bit weights, is not supported. Omit",
        ),
        (GPTQConfig(bits=4, dataset=["a"], tokenizer="none"), "the method gptq is not supported"),
        (BitsAndBytesConfig(), "load_in_4bit and load_in_8bit are both False. Pass BitsAndBytesConfig"),
        ({"load_in_4bit": True}, "quantization_config has the unsupported type dict"),
        (True, "quantization_config has the unsupported type bool. Pass BitsAndBytesConfig"),
    ],
)
def test_other_ways_to_quantize_are_refused(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        blank(tmp_path, config)


def stored_as_numbers(folder: Path, is_packed: bool, precision: str) -> list[str]:
    """What differs from one process, with bytes packed in bf16, and which packed weights were cast."""
    model = build(LLAMA)
    data, how = batch(LLAMA, model), quantization("nf4", bnb_4bit_quant_storage=torch.bfloat16)
    config = None if is_packed else how
    unsplit = Unsplit(of_one_process(type(model), folder, config))
    split = Split(of_stages(type(model), folder, config), 2, data, num_microbatches=2, precision=precision)
    reference = unsplit.backward_in_parts(data, num_microbatches=2)
    found = compared(split, unsplit, split.backward(data)["loss"], reference, 1e-6 if precision == "fp32" else 0.1)
    split.step()
    layers = packed_layers(split.model.unwrap())
    return found + [name for name, layer in layers if layer.weight.dtype is not torch.uint8]


@pytest.mark.turns
@pytest.mark.parametrize(("is_packed", "precision"), [(True, "fp32"), (True, "bf16"), (False, "bf16")])
def test_bytes_packed_in_a_floating_dtype(pool: Pool, tmp_path: Path, is_packed: bool, precision: str) -> None:
    """`bnb_4bit_quant_storage` of a recipe for FSDP: packed bytes were cast to the precision like numbers, and
    check_finite called some of them infinite. If a folder had it, the trace failed with an error about strides."""
    save_packed("causal-lm/llama", "nf4", tmp_path, bnb_4bit_quant_storage=torch.bfloat16)
    folder = tmp_path / ("packed" if is_packed else "whole")
    assert pool.run(stored_as_numbers, 2, folder, is_packed, precision) == [[], []]


def test_every_other_method_of_transformers_is_refused_by_name() -> None:
    """In a config, and in a folder with weights that were quantized with it."""
    others = {method.value for method in QuantizationMethod} - EXTRAS.keys()
    assert others >= {"gptq", "awq", "hqq", "fp8"}
    for method in others:
        with pytest.raises(ConfigurationError, match=f"the method {re.escape(method)} is not supported. Pass Bits"):
            refuse_other_ways(QuantizationConfigMixin(method))
    for method in (others | EXTRAS.keys()) - {"bitsandbytes"}:
        saved = LlamaConfig(quantization_config={"quant_method": method})
        with pytest.raises(
            ConfigurationError, match=rf"are quantized \(with {re.escape(method)}\), .* Load the unquantized original"
        ):
            quantization_of(saved, "folder", None)


def test_torchao_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pipeshard.split.linear_torchao", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ConfigurationError, match=r"needs torchao, which .* pip install 'pipeshard\[torchao\]'"):
        blank(tmp_path, QuantizationConfigMixin("torchao"))


def test_a_tied_layer_is_not_packed(tmp_path: Path) -> None:
    """With llm_int8_skip_modules transformers packs a tied head, too, and its forward fails.

    Stages said that the head was missing in the folder, or loaded it untied where the folder had both.
    """
    model = build(LLAMA, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["q_proj"])
    with pytest.raises(ConfigurationError, match=r"lm_head\.weight is tied to .* Add 'lm_head' to llm_int8"):
        PipelinePlugin.from_pretrained(type(model), tmp_path, quantization_config=config)


def save_packed(name: str, kind: str, folder: Path, **options: Any) -> Any:
    """Write what save_pretrained writes of a model that bitsandbytes has packed, and return the model."""
    (entry,) = find(name)
    model = build(entry)
    model.save_pretrained(folder / "whole")
    config = quantization(kind, **options)
    packed = type(model).from_pretrained(folder / "whole", quantization_config=config, dtype=torch.float32)
    packed.save_pretrained(folder / "packed")
    return packed


PACKED = covering([f"causal-lm/{name}" for name in ("llama", "gpt2", "opt", "mixtral")], ["1f1b", "zbv"], list(KINDS))


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "schedule", "kind"), PACKED)
def test_a_folder_with_packed_weights(pool: Pool, tmp_path: Path, name: str, schedule: str, kind: str) -> None:
    """Most 4-bit checkpoints on the Hub were saved packed; from_pretrained refused them."""
    save_packed(name, kind, tmp_path)
    assert pool.run(trained, 2, tmp_path / "packed", name, "", schedule=schedule) == [[], []]


def loading(folder: Path) -> None:
    model = build(LLAMA)
    Split(of_stages(type(model), folder, None), 2, batch(LLAMA, model), num_microbatches=2)


WEIGHT = "model.layers.0.mlp.down_proj.weight"
DAMAGES = {  # tensors, and how many of their elements are left
    "weight": (WEIGHT, 767, r"has shape \(767, 1\), but \(768, 1\)"),
    "scales": (f"{WEIGHT}.absmax", 23, "the quantized .* cannot be read: ValueError: its scales have"),
    "values": (f"{WEIGHT}.quant_map", 8, "the quantized .* cannot be read: ValueError: its scales have"),
    "description": (f"{WEIGHT}.quant_state.bitsandbytes__nf4", 20, "the quantized .* cannot be read: JSONDecodeError"),
    "none": (f"{WEIGHT}.absmax", 0, "the quantized .* cannot be read: KeyError"),
}


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damaged_packed_weights_are_refused(pool: Pool, tmp_path: Path, damage: str) -> None:
    """A kernel reads as many scales as the weight has blocks, however many the file has."""
    save_packed("causal-lm/llama", "nf4", tmp_path)
    file, (key, left, message) = tmp_path / "packed" / "model.safetensors", DAMAGES[damage]
    tensors = load_file(file)
    tensors[key] = tensors[key][:left].clone()
    save_file({name: tensor for name, tensor in tensors.items() if len(tensor)}, file, {"format": "pt"})
    for error in pool.run_expecting(CheckpointError, loading, 2, tmp_path / "packed"):
        assert re.search(message, error)


@pytest.mark.turns
def test_a_model_with_other_layers_than_a_packed_folder(pool: Pool, tmp_path: Path) -> None:
    packed, folder = save_packed("causal-lm/llama", "nf4", tmp_path), tmp_path / "packed"
    with pytest.raises(ConfigurationError, match="are already quantized: omit quantization_config"):
        PipelinePlugin.from_pretrained(type(packed), folder, quantization_config=quantization("nf4"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["llm_int8_skip_modules"] = ["down_proj", "lm_head"]
    (folder / "config.json").write_text(json.dumps(config))
    for error in pool.run_expecting(CheckpointError, loading, 2, folder):
        assert f"{WEIGHT} is quantized, but the weight in the model is not" in error


def test_a_folder_quantized_otherwise_is_refused(tmp_path: Path) -> None:
    model = build(LLAMA)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ConfigurationError, match=r"are quantized \(with awq\), and stages cannot load such weights"):
        PipelinePlugin.from_pretrained(type(model), tmp_path)


def test_adapters_that_are_computed_from_weights_are_refused(tmp_path: Path) -> None:
    model = blank(tmp_path, quantization("nf4"))
    for fields in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(ConfigurationError, match=r"the weights of this model are quantized\. Use plain LoRA"):
            enable_lora(model, None, LoraConfig(target_modules="all-linear", **fields), None)


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (LoraConfig(use_dora=True), "DoRA, PiSSA and OLoRA are computed from the weights"),
        (HRAConfig(), "HRA adapters may use the weights of their layers"),
        (MissConfig(r=4, init_weights="bat"), "MISS adapters with init_weights='bat' are computed"),
    ],
    ids=["dora", "hra", "miss"],
)
def test_saved_adapters_that_are_computed_from_weights_are_refused(tmp_path: Path, made: Any, what: str) -> None:
    """Only new DoRA adapters were refused. Saved ones failed with "has no adapter for this model" in 4 bits; on
    torchao's int8 weights, they were computed from the integers, without their scales."""
    made.target_modules = {"q_proj"}
    model = blank(tmp_path / "base", quantization("nf4"))
    get_peft_model(build(LLAMA), made).save_pretrained(tmp_path / "adapters")
    with pytest.raises(ConfigurationError, match=f"{what}.*, but the weights of this model are quant"):
        enable_lora(model, str(tmp_path / "adapters"), None, None)


def test_saved_adapters_that_use_only_outputs_are_loaded(tmp_path: Path) -> None:
    """PVeRA adapters call the layer that they adapt, but were refused as computed from its weights."""
    model = blank(tmp_path / "base", quantization("nf4"))
    made = get_peft_model(build(LLAMA), PveraConfig(r=4, target_modules=["q_proj"]))
    made.save_pretrained(str(tmp_path / "adapters"))
    assert isinstance(enable_lora(model, str(tmp_path / "adapters"), None, None), PeftModel)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules="all-linear", trainable_token_indices=[3]),
        LoraConfig(target_modules="all-linear", init_lora_weights="pissa_niter_4"),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, prompt_tuning_init="SAMPLE_VOCAB"),
    ],
    ids=["tokens", "pissa_niter_4", "prompts"],
)
def test_a_refusal_of_adapters_does_not_advise_to_load_the_quantized_model(tmp_path: Path, config: Any) -> None:
    """It advised to load the model with its weights. boost refused that model, and advised to leave it on meta."""
    model = blank(tmp_path, quantization("nf4"))
    with pytest.raises(ConfigurationError, match=r"Use plain LoRA, IA3 or random prompts .*, or load an unquantized"):
        enable_lora(model, None, config, None)


def test_each_layer_is_quantized_from_values_of_its_own_dtype(tmp_path: Path) -> None:
    """Every layer had the dtype of the model's first parameter: with an embedding kept in fp32, 16-bit weights were
    quantized in fp32, unlike in one process, and biases were fp32."""
    build(LLAMA, attention_bias=True).save_pretrained(tmp_path)
    model: Any = PipelinePlugin.from_pretrained(type(build(LLAMA)), tmp_path, dtype=torch.bfloat16)
    model.model.embed_tokens.float()
    model.model.layers[1].self_attn.q_proj.float()
    quantize_blank(model, quantization("nf4"))
    first, second = (layer.self_attn.q_proj for layer in model.model.layers[:2])
    assert (first.values_dtype, first.bias.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (second.values_dtype, second.bias.dtype) == (torch.float32, torch.float32)


def casting(folder: Path, kind: str) -> None:
    model = build(LLAMA)
    made: Any = of_stages(type(model), folder, quantization(kind), 1)
    layer = made.get_base_model().model.layers[1].self_attn.q_proj.base_layer
    layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0].to(layer.weight.dtype),))
    Split(made, 1, batch(LLAMA, model), num_microbatches=2)


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_integers_in_a_quantized_layer_are_refused(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Some models cast inputs to the dtype of a layer's weight (`x.to(self.proj.weight.dtype)`): pixels became
    integers, and the trace failed in a later layer. Then the error named no layer, and advised another batch."""
    build(LLAMA).save_pretrained(tmp_path)
    (message,) = pool.run_expecting(TraceError, casting, 1, tmp_path, kind)
    assert "the quantized layer model.layers.1.self_attn.q_proj got an input of dtype torch." in message
    assert "leave this layer unquantized" in message and "dry_run_input" not in message


def boosting(folder: Path, **arguments: Any) -> None:
    model = build(LLAMA)
    made = of_stages(type(model), folder, quantization("nf4"), 1)
    Split(made, 1, batch(LLAMA, model), num_microbatches=2, **arguments)


@pytest.mark.turns
@pytest.mark.parametrize("arguments", [{"tp_size": 2}, {"fsdp": True}])
def test_packed_weights_are_not_sharded(pool: Pool, tmp_path: Path, arguments: dict[str, Any]) -> None:
    build(LLAMA).save_pretrained(tmp_path)
    for message in pool.run_expecting(ConfigurationError, boosting, 2, tmp_path, **arguments):
        assert (
            "the weights of this model are quantized, so fsdp=True, tp_size and ep_size cannot shard them: omit these "
            "arguments, and use more stages" in message
        )


@pytest.mark.turns
def test_a_folder_without_a_packed_weight_is_refused(pool: Pool, tmp_path: Path) -> None:
    model = build(LLAMA)
    state = {name: value for name, value in model.state_dict().items() if "layers.0.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    for message in pool.run_expecting(CheckpointError, boosting, 1, tmp_path):
        assert "model.layers.0.mlp.up_proj.weight is missing, and a quantized weight cannot be initialized" in message


def writing(folder: Path) -> list[str]:
    """What is said to each call that would write or copy the packed weights."""
    model = build(LLAMA)
    made = of_stages(type(model), folder / "base", quantization("nf4"))
    split = Split(made, 2, batch(LLAMA, model), num_microbatches=2)
    calls = (
        lambda: split.booster.checkpoint_io.save_model(split.model, str(folder / "a"), shard=True, merge=True),
        lambda: split.booster.save_model(split.model, str(folder / "b"), shard=True),
        lambda: to_sequential(split.model),
    )
    return messages_of(calls, CheckpointError, UsageError)


def saving_all(folder: Path) -> None:
    model = build(LLAMA)
    split = Split(of_stages(type(model), folder, quantization("nf4"), 1), 1, batch(LLAMA, model), num_microbatches=2)
    base: Any = split.model.unwrap()
    base.get_base_model().save_pretrained(folder / "saved")


@pytest.mark.turns
def test_one_stage_does_not_write_packed_weights(pool: Pool, tmp_path: Path) -> None:
    """transformers' own save_pretrained of a single stage wrote packed weights without their scales.

    Nothing guards it there: a single stage has all parameters.
    """
    build(LLAMA).save_pretrained(tmp_path)
    for message in pool.run_expecting(CheckpointError, saving_all, 1, tmp_path):
        assert "base weights of this model are quantized" in message and "save_lora_as_pretrained" in message


@pytest.mark.turns
def test_packed_weights_are_not_written(pool: Pool, tmp_path: Path) -> None:
    """Without its scales a packed weight is noise."""
    build(LLAMA).save_pretrained(tmp_path / "base")
    for said in pool.run(writing, 2, tmp_path):
        assert all("base weights" in message and "save_lora_as_pretrained" in message for message in said)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def merging(folder: Path, kind: str, p: int) -> list[str]:
    """What is said to each call that would merge the adapters into packed weights."""
    model = build(LLAMA)
    made = of_stages(type(model), folder, quantization(kind), p)
    boosted: Any = Split(made, p, batch(LLAMA, model), num_microbatches=2).model
    return messages_of((boosted.merge_adapter, boosted.unmerge_adapter, boosted.merge_and_unload), UsageError)


@pytest.mark.turns
@pytest.mark.parametrize(("kind", "p"), [("int8", 1), ("nf4", 1), ("nf4", 2)])
def test_adapters_are_not_merged_into_packed_weights(pool: Pool, tmp_path: Path, kind: str, p: int) -> None:
    """On one stage, peft's merge_adapter replaced 8-bit weights without their scales: `generate` returned noise.
    On two, the error advised to_sequential, which refused the quantized model."""
    build(LLAMA).save_pretrained(tmp_path)
    for said in pool.run(merging, p, tmp_path, kind, p):
        for name, message in zip(("merge_adapter", "unmerge_adapter", "merge_and_unload"), said, strict=True):
            assert message.startswith(f"{name}: the base weights of this model are quantized")


def merged_head(folder: Path) -> bool:
    """Whether merge_adapter merges an adapter on the head, which is not quantized."""
    model = build(LLAMA)
    made: Any = PipelinePlugin.from_pretrained(type(model), folder, quantization_config=quantization("nf4")).train()
    config = LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    boosted: Any = Split(enable_lora(made, None, config, None), 1, batch(LLAMA, model), num_microbatches=2).model
    head = boosted.get_base_model().lm_head
    expected = head.weight + head.get_delta_weight("default")
    boosted.merge_adapter()
    return torch.equal(head.weight, expected)


@pytest.mark.turns
def test_adapters_are_merged_into_weights_that_are_not_packed(pool: Pool, tmp_path: Path) -> None:
    """merge_adapter of a quantized model was refused even if adapters were only on layers in 16 or 32 bits."""
    build(LLAMA).save_pretrained(tmp_path)
    assert pool.run(merged_head, 1, tmp_path) == [True]
