"""Tests of models on disk: each stage reads and writes its own tensors of a plain Hugging Face folder."""

from __future__ import annotations

import copy
import errno
import functools
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from colossalai.booster import Booster
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeshard import PipelinePlugin, save_training_state
from pipeshard.checkpoint import files, safetensors_files
from pipeshard.checkpoint import load as load_module
from pipeshard.checkpoint import save as saving
from pipeshard.checkpoint.files import Save
from pipeshard.checkpoint.load import Conversion, load_weights, revert
from pipeshard.errors import CheckpointError, ConfigurationError
from pipeshard.split.adapters import stand_ins
from pipeshard.split.blank import refuse_changed_blank
from pipeshard.split.materialize import is_released
from tests import zoo
from tests.covering import ALL
from tests.engine.test_state import Net
from tests.families import build_with
from tests.messages import texts_of
from tests.parity.build import batch, build
from tests.parity.entries import find
from tests.pool import Pool, WorkerError
from tests.unsplit import Split, Unsplit, differences

pytestmark = pytest.mark.local

LAYOUTS = [  # experts one by one in the folder and stacked in the model, a vision tower, ties, Conv1D, other prefixes
    *("causal-lm/mixtral", "causal-lm/qwen3_moe", "causal-lm/llama", "causal-lm/llama+tied", "causal-lm/gpt2"),
    *("seq2seq-lm/t5", "seq2seq-lm/bart", "masked-lm/bert", "image-text-to-text/llava", "image-text-to-text/qwen2_vl"),
    *("image-classification/resnet", "causal-lm/gpt_oss", "causal-lm/deepseek_v3"),
]


def made(text: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """The entry's model, "+tied" if so, and its batch."""
    name, _, tied = text.partition("+")
    entry = find(name)[0]
    model = build_with(entry, tie_word_embeddings=True) if tied else build(entry, seed)
    return model, batch(entry, model)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as content:
            found |= {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118
    return found


def values(split: Split) -> dict[str, Tensor]:
    return {key: p.detach().clone() for key, p in split.held.items()}


def through_a_folder(text: str, original: str, saved: str) -> tuple[dict[str, Tensor], int, int]:
    """Boost on meta, load, save; what is held, the bytes that were read, and those that are held."""
    model, data = made(text, seed=1)
    with torch.device("meta"):
        blank = type(model)(model.config).train()  # type: ignore[arg-type]
    split = Split(blank, dist.get_world_size(), data, num_microbatches=2, init_weights=False)
    read = load_weights(split.model, Path(original), strict=True)
    split.booster.save_model(split.model, saved, shard=True)
    split.booster.save_model(split.model, f"{saved}.safetensors")
    held = sum(p.nbytes for p in split.held.values())
    assert torch.isfinite(split.backward(data)["loss"])
    return values(split), read, held


@pytest.mark.turns
@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", LAYOUTS)
def test_load_save_reload(pool: Pool, tmp_path: Path, text: str) -> None:
    model: Any = made(text)[0]
    model.save_pretrained(tmp_path / "plain")
    expected = dict(model.named_parameters())
    for held, read, size in pool.run(through_a_folder, 2, text, str(tmp_path / "plain"), str(tmp_path / "ours")):
        assert all(torch.equal(value, expected[key]) for key, value in held.items())
        assert size <= read <= size + sum(b.nbytes for b in model.buffers())
    plain, ours = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "ours")
    assert plain.keys() == ours.keys()
    assert all(torch.equal(plain[key], ours[key]) for key in plain)
    one = tensors_of(tmp_path)
    assert one.keys() == plain.keys() and all(torch.equal(plain[key], one[key]) for key in plain)
    reloaded = type(model).from_pretrained(tmp_path / "ours")
    assert all(torch.equal(value, expected[key]) for key, value in reloaded.named_parameters())


@pytest.mark.skipif(not hasattr(transformers, "Qwen4ExpTextConfig"), reason="transformers is too old")
def test_numbered_shards_of_a_weight_are_joined_by_number() -> None:
    """The tenth shard of an embedding follows the ninth, not the first."""
    model = build_with(find("causal-lm/qwen4_exp_text")[0], split_ngram_parts=16)
    state = model.state_dict()
    stored = revert(model, state)
    assert any("shard_15" in key for key in stored)
    conversion = Conversion(model, reversed(stored), state)
    made = {
        name: value
        for piece in conversion.pieces.values()
        for name, value in piece.convert(model, stored.__getitem__).items()
    }
    assert made.keys() == state.keys()
    assert [name for name in state if not torch.equal(made[name], state[name])] == []


def several_chunks(schedule: str, folder: str) -> None:
    """Save everything that one rank writes or completes for all, where each has two chunks of the model."""
    model, data = made("causal-lm/llama")
    chunks = {"schedule": schedule, "num_model_chunks": 2}
    split = Split(model, dist.get_world_size(), data, num_microbatches=2, **chunks)
    split.booster.save_model(split.model, folder, shard=True)
    split.booster.save_model(split.model, f"{folder}.safetensors")
    constant = torch.optim.lr_scheduler.ConstantLR(split.optimizer.optim)
    split.booster.save_lr_scheduler(constant, f"{folder}.pt")
    split.booster.load_lr_scheduler(constant, f"{folder}.pt")
    split.booster.load_model(split.model, folder)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_stages_of_several_chunks(pool: Pool, tmp_path: Path, schedule: str) -> None:
    pool.run(several_chunks, 2, schedule, str(tmp_path / "ours"))
    model: Any = made("causal-lm/llama")[0]
    model.save_pretrained(tmp_path / "plain")
    plain = tensors_of(tmp_path / "plain")
    for folder in (tmp_path, tmp_path / "ours"):
        saved = tensors_of(folder)
        assert saved.keys() == plain.keys() and all(torch.equal(plain[key], saved[key]) for key in plain)


def save_in_16_bits(folder: str) -> None:
    model, data = made("causal-lm/llama")
    split = Split(model, dist.get_world_size(), data, num_microbatches=2, precision="bf16")
    split.booster.save_model(split.model, folder, shard=True)


@pytest.mark.turns
def test_the_config_has_the_dtype_that_is_saved(pool: Pool, tmp_path: Path) -> None:
    """It had that of the model before it was boosted: plain transformers loaded a model of 16 bits in fp32."""
    pool.run(save_in_16_bits, 2, str(tmp_path))
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    assert transformers.AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16


class Limited(nn.Linear):
    """Keeps the largest input that it has seen beside its parameters and buffers, as layers in 8 bits do."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.most = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.most = torch.cat([self.most, x.detach().abs().amax((0, 1, 2)).view(1)]).amax(0, keepdim=True)
        return super().forward(x).tanh()

    def get_extra_state(self) -> Any:
        return self.most

    def set_extra_state(self, state: Any) -> None:
        self.most = state


class LimitedByDict(Limited):
    """The same as an object that no checkpoint of tensors has room for."""

    def get_extra_state(self) -> Any:
        return {"most": self.most}


def extra_states(folder: str) -> str:
    """Saves and loads what modules keep as extra state; what is said of one that is no tensor."""
    data = {"ids": torch.arange(24).view(4, 6) % 11, "labels": torch.arange(24).view(4, 6) % 11}

    def made(kind: type[nn.Module]) -> Split:
        return Split(type("Limits", (Net,), {"block": kind})(), 2, data, num_microbatches=2)

    trained, loaded, refused = made(Limited), made(Limited), made(LimitedByDict)
    trained.backward(data)
    trained.booster.save_model(trained.model, folder, shard=True)
    saved = {name: value for name, value in tensors_of(Path(folder)).items() if "extra" in name}
    assert len(saved) == 5 and all(value > 0 for value in saved.values())
    loaded.booster.load_model(loaded.model, folder)
    held = loaded.model.unwrap().state_dict(keep_vars=True)  # without values of the other stage
    assert {name: value for name, value in held.items() if "extra" in name} == saved
    with pytest.raises(CheckpointError) as caught:
        refused.booster.save_model(refused.model, folder, shard=True)
    return str(caught.value)


@pytest.mark.turns
def test_extra_states(pool: Pool, tmp_path: Path) -> None:
    """A tensor of `get_extra_state` was saved and never set again, though the load was strict. Anything else ended each
    save in an AttributeError."""
    for message in pool.run(extra_states, 2, str(tmp_path / "saved")):
        assert "state_dict of Limits contains layers.0._extra_state of type dict, but" in message


UNSAVABLE = {
    "layout torch.sparse_coo": torch.eye(2).to_sparse(),
    "dtype torch.complex32": torch.zeros(2, dtype=torch.complex32),
    "dtype torch.quint8": torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.quint8),
}


def save_unsavable(folder: str) -> list[str]:
    data = {"ids": torch.arange(24).view(4, 6) % 11, "labels": torch.arange(24).view(4, 6) % 11}
    split = Split(Net(), 2, data, num_microbatches=2)
    said = []
    for value in UNSAVABLE.values():
        split.model.unwrap().layers[0].register_buffer("graph", value)
        with pytest.raises(CheckpointError) as caught:
            split.booster.save_model(split.model, folder, shard=True)
        said.append(str(caught.value))
    return said


@pytest.mark.turns
def test_a_tensor_that_files_cannot_contain_is_named(pool: Pool, tmp_path: Path) -> None:
    """The save ended in an error of torch about a data pointer, or one of the disk's free space for complex32."""
    for said in pool.run(save_unsavable, 2, str(tmp_path / "saved")):
        for what, text in zip(UNSAVABLE, said, strict=True):
            assert f"do not support the {what} of layers.0.graph in this Net" in text, text


MASK = torch.ones(8, 8).tril()


class Masked(nn.Linear):
    """A layer whose buffers are one mask of all layers, and a part of it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("mask", MASK)
        self.register_buffer("part", MASK[:2])

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask, self.bias) + self.part.sum()


def shared_buffers(place: Path) -> list[set[str]]:
    """The names of layers' buffers that a save of each kind wrote."""
    data = {"ids": torch.arange(24).view(4, 6) % 11, "labels": torch.arange(24).view(4, 6) % 11}
    split = Split(type("Masks", (Net,), {"block": Masked})(), 2, data, num_microbatches=2)
    split.booster.save_model(split.model, str(place / "folder"), shard=True)
    split.booster.save_model(split.model, str(place / "one.pt"))
    save_training_state(place / "state", 1, split.model)
    split.booster.load_model(split.model, str(place / "folder"))
    states = tensors_of(place / "folder"), torch.load(place / "one.pt"), tensors_of(place / "state/step-00000001/model")
    return [{name for name, value in state.items() if torch.equal(value, MASK[: len(value)])} for state in states]


@pytest.mark.turns
def test_a_buffer_of_several_layers_is_saved(pool: Pool, tmp_path: Path) -> None:
    """On the CPU no save of a model with one mask of all layers worked: the disk was full, it said."""
    expected = {f"layers.{k}.{name}" for k in range(5) for name in ("mask", "part")}
    assert pool.run(shared_buffers, 2, tmp_path) == [[expected] * 3] * 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def bars(folder: str) -> str:
    model, data = made("causal-lm/llama")
    split = Split(model, 1, data, num_microbatches=2)
    with mock.patch("sys.stderr", Terminal()) as shown:
        split.booster.save_model(split.model, folder, shard=True)
        split.booster.load_model(split.model, folder)
    return shown.getvalue()


def test_a_terminal_shows_how_much_is_saved_and_loaded(pool: Pool, tmp_path: Path) -> None:
    (shown,) = pool.run(bars, 1, str(tmp_path))
    assert re.search(r"saving stage 0: 100%.*loading stage 0: 100%", shown, re.DOTALL)


def from_a_folder(text: str, folder: str, **arguments: Any) -> list[str]:
    _, data = made(text, seed=1)
    auto = getattr(transformers, arguments.pop("auto", "AutoModelForCausalLM"))
    blank = PipelinePlugin.from_pretrained(auto, folder, **arguments).train()
    assert all(p.is_meta for p in blank.parameters())
    split = Split(blank, dist.get_world_size(), data, num_microbatches=2)
    unsplit = Unsplit(auto.from_pretrained(folder, **arguments).train())
    return differences(split, unsplit, data, num_microbatches=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", ["causal-lm/llama", "causal-lm/mixtral", "causal-lm/gpt2"])
def test_from_pretrained(pool: Pool, tmp_path: Path, text: str) -> None:
    made(text)[0].save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert not [what for found in pool.run(from_a_folder, 2, text, str(tmp_path)) for what in found]


@pytest.mark.turns
def test_parameters_that_a_constructor_creates_on_the_cpu(pool: Pool, tmp_path: Path) -> None:
    """ImageGPT creates its norms with `torch.Tensor(n)`, which ignores the default device. Such parameters counted as
    values of the script, which the folder does not replace: a user trained uninitialized memory."""
    text = "image-classification/imagegpt"
    made(text)[0].save_pretrained(tmp_path)  # type: ignore[operator]
    load = functools.partial(from_a_folder, auto="AutoModelForImageClassification")
    assert not [what for found in pool.run(load, 2, text, str(tmp_path)) for what in found]


BIAS = "e_score_correction_bias"


def routing_biases(folder: Path, sample: Any) -> list[Tensor]:
    """The biases of the layers that this rank holds, which may not stay on meta."""
    auto = transformers.AutoModelForCausalLM
    blank = PipelinePlugin.from_pretrained(auto, folder).train()
    split = Split(blank, dist.get_world_size(), sample, num_microbatches=2)
    of_held = {name.rpartition(".")[0] for name in split.held}
    named = split.model.unwrap().named_buffers()
    return [buffer for name, buffer in named if name.endswith(BIAS) and name.rpartition(".")[0] in of_held]


@pytest.mark.turns
def test_from_pretrained_keeps_routing_biases_in_fp32(pool: Pool, tmp_path: Path) -> None:
    """The biases of a bf16 DeepSeek-V3 are fp32. They were rounded to bf16 when a stage read them, so that near ones
    were equal and other experts were chosen, silently."""
    model, sample = made("causal-lm/deepseek_v3")
    model.bfloat16()
    routers = [module for module in model.modules() if hasattr(module, BIAS)]
    for router in routers:
        setattr(router, BIAS, torch.linspace(3, 3.01, len(getattr(router, BIAS))))
    model.config.dtype = torch.bfloat16
    model.save_pretrained(tmp_path)
    biases = [bias for found in pool.run(routing_biases, 2, tmp_path, sample) for bias in found]
    assert len(biases) == len(routers) > 0
    for bias in biases:
        assert torch.equal(bias, torch.linspace(3, 3.01, len(bias)))


class OwnConfig(transformers.PretrainedConfig):  # type: ignore[misc]
    model_type = "pipeshard-test-own"

    def __init__(self, width: int = 4, **options: Any) -> None:
        self.width = width
        super().__init__(**options)


class OwnModel(transformers.PreTrainedModel):  # type: ignore[misc]
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.first, self.second = (nn.Linear(config.width, config.width) for _ in range(2))
        self.post_init()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def of_a_class(kind: Any, folder: str, sample: Any) -> set[str]:
    """The names of the weights that some stage has from the folder, as transformers has them."""
    blank = PipelinePlugin.from_pretrained(kind, folder).train()
    split = Split(blank, dist.get_world_size(), sample, num_microbatches=2)
    expected = kind.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in split.held.items())
    return set(split.held)


@pytest.mark.parametrize("kind", [OwnModel, transformers.CLIPTextModel])
@pytest.mark.turns
def test_from_pretrained_of_a_class_reads_its_own_config(pool: Pool, tmp_path: Path, kind: Any) -> None:
    """A user's model whose config AutoConfig does not know was refused (update transformers, said the error), and so
    was the text model of a CLIP folder, which got the config of the whole CLIP: AttributeError."""
    if kind is OwnModel:
        model, sample = OwnModel(OwnConfig(width=6)), {"x": torch.ones(4, 6)}
    else:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = {**sizes, "vocab_size": 16, "max_position_embeddings": 8, "eos_token_id": 1}
        config = transformers.CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4})
        model, sample = transformers.CLIPModel(config), {"input_ids": torch.ones(4, 8, dtype=torch.int64)}
    model.save_pretrained(tmp_path)
    held = pool.run(of_a_class, 2, kind, str(tmp_path), sample)
    assert set.union(*held) == {name for name, _ in kind.from_pretrained(tmp_path).named_parameters()}


def test_from_pretrained_wrongly(tmp_path: Path) -> None:
    auto = transformers.AutoModelForCausalLM
    with pytest.raises(CheckpointError, match="neither a folder nor the name of a model"):
        PipelinePlugin.from_pretrained(auto, tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="does not contain a valid model config"):
        PipelinePlugin.from_pretrained(auto, tmp_path)
    zoo.build("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(ConfigurationError, match="LlamaConfig has no num_layerz"):
        PipelinePlugin.from_pretrained(auto, tmp_path, num_layerz=3)
    with pytest.raises(ConfigurationError, match="for a head of another size, call transformers'"):
        PipelinePlugin.from_pretrained(auto, tmp_path, ignore_mismatched_sizes=True)  # was refused without a remedy
    with pytest.raises(ConfigurationError, match="dtype='bf16' is unknown: use 'auto', or a torch dtype"):
        PipelinePlugin.from_pretrained(auto, tmp_path, dtype="bf16")  # was an AttributeError of torch's
    eager = PipelinePlugin.from_pretrained(auto, tmp_path, dtype="bfloat16", attn_implementation="eager")
    assert eager.dtype == torch.bfloat16 and eager.config._attn_implementation == "eager"


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_a_config_without_dtype_takes_that_of_its_weights(tmp_path: Path, safe: bool) -> None:
    """A 16-bit folder whose config names no dtype was trained in fp32, at twice the memory."""
    model: Any = zoo.build("llama").bfloat16()
    model.save_pretrained(tmp_path)
    if not safe:
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "dtype"}))
    assert PipelinePlugin.from_pretrained(transformers.AutoModelForCausalLM, tmp_path).dtype == torch.bfloat16
    for weights in tmp_path.glob("*model*"):
        weights.unlink()
    assert PipelinePlugin.from_pretrained(transformers.AutoModelForCausalLM, tmp_path).dtype == torch.float32


def of_two_heads(folder: str, tied: bool) -> list[str]:
    model = from_tied_config(folder, tied)
    split = Split(model, 2, zoo.batch("llama"), num_microbatches=2)
    unsplit = Unsplit(transformers.AutoModelForCausalLM.from_pretrained(folder).train())
    return differences(split, unsplit, zoo.batch("llama"), num_microbatches=2)


def from_tied_config(folder: str, tied: bool) -> nn.Module:
    options = {} if tied else {"tie_word_embeddings": False}
    return PipelinePlugin.from_pretrained(transformers.AutoModelForCausalLM, folder, **options).train()


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_two_matrices_for_one_tie_are_refused(pool: Pool, tmp_path: Path, kind: str) -> None:
    """The head of a checkpoint was trained apart from the embedding, but its config said that they are tied: the stages
    took the embedding for both, where transformers takes each for itself."""
    model: Any = zoo.build("llama")
    state = model.state_dict()
    for equal in (False, True):
        if equal:
            state |= {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
        folder = tmp_path / str(equal)
        model.config.tie_word_embeddings = True
        model.config.save_pretrained(folder)
        save = save_file if kind.endswith("safetensors") else torch.save
        save(state, folder / kind)
    for message in pool.run_expecting(CheckpointError, of_two_heads, 2, str(tmp_path / "False"), True):
        assert "different values for model.embed_tokens.weight and lm_head.weight" in message or (
            "different values for lm_head.weight and model.embed_tokens.weight" in message
        )
    assert pool.run(of_two_heads, 2, str(tmp_path / "False"), False) == [[], []]
    assert pool.run(of_two_heads, 2, str(tmp_path / "True"), True) == [[], []]


def with_a_layer_of_zeros(folder: str, when: str) -> list[str]:
    """What differs if the last layer's MLP returns zeros from the beginning."""

    def change(model: Any) -> None:
        weight = model.model.layers[-1].mlp.down_proj.weight
        if not is_released(weight):
            nn.init.zeros_(weight)

    auto: Any = transformers.AutoModelForCausalLM
    unsplit = Unsplit(auto.from_pretrained(folder).train())
    change(unsplit.model)
    model = auto.from_pretrained(folder) if when == "loaded" else PipelinePlugin.from_pretrained(auto, folder)
    if when != "after":
        change(model)
    if when == "adapters":
        plugin = PipelinePlugin(pp_size=dist.get_world_size(), num_microbatches=2)
        model = Booster(plugin=plugin).enable_lora(model, lora_config=LoraConfig())
    split = Split(model.train(), dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    if when == "after":
        change(split.model.unwrap())
    return differences(split, unsplit, zoo.batch("llama"))


@pytest.mark.turns
def test_values_that_a_model_on_meta_would_lose(pool: Pool, tmp_path: Path) -> None:
    """A user initialized the last layers of a model of `PipelinePlugin.from_pretrained` again. Boost silently loaded
    the folder's values into them."""
    zoo.build("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    for when in ("before", "adapters"):
        for message in pool.run_expecting(ConfigurationError, with_a_layer_of_zeros, 2, str(tmp_path), when):
            assert "this parameter was modified before boost: model.layers.3.mlp.down_proj.weight." in message
    for when in ("loaded", "after"):
        assert pool.run(with_a_layer_of_zeros, 2, str(tmp_path), when) == [[], []]


def test_stand_ins_of_changed_parameters_are_refused(tmp_path: Path) -> None:
    """A user modified such a model and loaded adapters of a folder. Loading renewed the versions of its parameters, so
    boost did not refuse the model."""
    zoo.build("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    model = PipelinePlugin.from_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    nn.init.zeros_(model.lm_head.weight)  # type: ignore[arg-type,union-attr]
    with pytest.raises(ConfigurationError, match=r"modified before boost: lm_head\.weight"), stand_ins(model):
        pass


def test_a_body_of_another_folder_is_refused(tmp_path: Path) -> None:
    """A user put the body of a fine-tuned model under a new head. The head's folder was loaded into the body."""
    for name in ("base", "tuned"):
        zoo.build("llama").save_pretrained(tmp_path / name)  # type: ignore[operator]
    auto: Any = transformers.AutoModelForCausalLM
    model, tuned = (PipelinePlugin.from_pretrained(auto, tmp_path / name) for name in ("base", "tuned"))
    model.model = tuned.model
    with pytest.raises(ConfigurationError, match=r"another name or model before boost: model\.embed_tokens"):
        refuse_changed_blank(model)


class Around(nn.Module):
    """A user's model around one that was loaded."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def wrapped(folder: str, loaded: bool) -> list[str]:
    auto: Any = transformers.AutoModelForCausalLM
    unsplit = Unsplit(Around(auto.from_pretrained(folder).train()))
    model = auto.from_pretrained(folder) if loaded else PipelinePlugin.from_pretrained(auto, folder)
    split = Split(Around(model.train()), dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    return differences(split, unsplit, zoo.batch("llama"))


@pytest.mark.turns
def test_a_model_around_one_on_meta(pool: Pool, tmp_path: Path) -> None:
    """A user boosted a module that contained a model of `PipelinePlugin.from_pretrained`. Its weights were not loaded,
    but silently initialized."""
    zoo.build("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    for message in pool.run_expecting(ConfigurationError, wrapped, 2, str(tmp_path), False):
        assert (
            "without values: inner.model.embed_tokens.weight;" in message
            and "only into the model that from_pretrained returned" in message
        )
    assert pool.run(wrapped, 2, str(tmp_path), True) == [[], []]


def with_fewer_layers(folder: str, loaded: bool) -> list[str]:
    auto: Any = transformers.AutoModelForCausalLM
    unsplit = Unsplit(auto.from_pretrained(folder).train())
    model = auto.from_pretrained(folder) if loaded else PipelinePlugin.from_pretrained(auto, folder)
    for body in (model.train().model, unsplit.model.model):
        body.layers = nn.ModuleList(body.layers[k] for k in (0, 2, 3))
    split = Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    return differences(split, unsplit, zoo.batch("llama"))


@pytest.mark.turns
def test_layers_that_a_model_on_meta_would_load_from_others(pool: Pool, tmp_path: Path) -> None:
    """A user removed a layer in the middle of a model of `PipelinePlugin.from_pretrained`. Boost loaded the weights of
    other layers into the layers after it, with a warning only about the last ones."""
    zoo.build("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    for message in pool.run_expecting(ConfigurationError, with_fewer_layers, 2, str(tmp_path), False):
        assert "moved to another name or model before boost: model.layers.1.self_attn.q_proj" in message
    assert pool.run(with_fewer_layers, 2, str(tmp_path), True) == [[], []]


def with_a_head_of_the_script(folder: str, labels: int) -> list[str]:
    auto: Any = transformers.AutoModelForImageClassification
    torch.manual_seed(5)
    head = nn.Linear(32, labels)
    unsplit = Unsplit(auto.from_pretrained(folder).train())
    unsplit.model.classifier = copy.deepcopy(head)
    model: Any = PipelinePlugin.from_pretrained(auto, folder).train()
    model.classifier = head
    data = zoo.batch("vit")
    for each in (model, unsplit.model):
        each.num_labels = each.config.num_labels = labels
    return differences(Split(model, dist.get_world_size(), data, num_microbatches=2), unsplit, data)


@pytest.mark.turns
@pytest.mark.parametrize("labels", [5, 7])
def test_a_head_of_the_script(pool: Pool, tmp_path: Path, labels: int) -> None:
    """A user assigned a new head to a model of `PipelinePlugin.from_pretrained`. The folder's head was silently loaded
    into a head of the same size, and did not fit one of another size."""
    zoo.build("vit").save_pretrained(tmp_path)  # type: ignore[operator]
    assert pool.run(with_a_head_of_the_script, 2, str(tmp_path), labels) == [[], []]


def resized(folder: str) -> None:
    blank = PipelinePlugin.from_pretrained(transformers.AutoModelForCausalLM, folder).train()
    blank.resize_token_embeddings(zoo.VOCABULARY + 2, mean_resizing=False)
    Split(blank, dist.get_world_size(), zoo.batch("llama-tied"), num_microbatches=2)


@pytest.mark.turns
def test_new_tokens_of_a_model_on_meta(pool: Pool, tmp_path: Path) -> None:
    """The folder has no rows for the new tokens of a model without values: docs/troubleshooting.md has the remedy."""
    model: Any = zoo.build("llama-tied")
    model.save_pretrained(tmp_path / "old")
    for message in pool.run_expecting(CheckpointError, resized, 2, str(tmp_path / "old")):
        assert "embed_tokens.weight has shape" in message and "Pass this model's checkpoint" in message
    model.resize_token_embeddings(zoo.VOCABULARY + 2)
    model.save_pretrained(tmp_path / "new")
    blank = PipelinePlugin.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "new")
    assert blank.get_input_embeddings().weight.shape[0] == zoo.VOCABULARY + 2


def with_a_new_head(folder: str) -> tuple[dict[str, Tensor], list[str]]:
    """The weights of this rank, and the warnings about the checkpoint."""
    blank = PipelinePlugin.from_pretrained(
        transformers.AutoModelForSequenceClassification, folder, num_labels=3
    ).train()
    ids = zoo.batch("llama")["input_ids"]
    data = {"input_ids": ids, "labels": ids[:, 0] % 3}
    torch.manual_seed(5)
    with mock.patch.object(load_module.logger, "warning") as warning:
        split = Split(blank, dist.get_world_size(), data, num_microbatches=2)
    assert torch.isfinite(split.backward(data)["loss"])
    return values(split), texts_of(warning)


@pytest.mark.turns
def test_a_new_head_is_drawn(pool: Pool, tmp_path: Path) -> None:
    """As from_pretrained does, with a warning; and the same for every p."""
    zoo.build("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    ((whole, warnings),) = pool.run(with_a_new_head, 1, str(tmp_path))
    for stage, _ in pool.run(with_a_new_head, 2, str(tmp_path)):
        assert all(torch.equal(value, whole[key]) for key, value in stage.items())
    assert 0.01 < float(whole["score.weight"].std()) < 0.03
    assert any("newly initialized" in warning for warning in warnings)


class TaggerForSequenceClassification(transformers.LlamaForSequenceClassification):
    """A model around a base whose checkpoint has no head, which its class says."""

    _keys_to_ignore_on_load_missing = (r"^score\.",)


def with_a_head_that_may_be_missing(folder: str, create: bool) -> tuple[float, bool]:
    """The loss, and whether a warning says that the head is new."""
    cls, config = TaggerForSequenceClassification, transformers.AutoConfig.from_pretrained(folder, num_labels=3)
    with torch.device("meta"):
        blank = PipelinePlugin.from_pretrained(cls, folder, num_labels=3) if create else cls(config)
    ids = zoo.batch("llama")["input_ids"]
    data = {"input_ids": ids, "labels": ids[:, 0] % 3}
    with mock.patch.object(load_module.logger, "warning") as warning:
        split = Split(blank.train(), dist.get_world_size(), data, num_microbatches=2, init_weights=create)
        if not create:
            split.booster.load_model(split.model, folder)
    is_new = any("newly initialized" in text for text in texts_of(warning))
    return float(split.backward(data)["loss"]), is_new


@pytest.mark.turns
def test_a_head_that_may_be_missing_is_drawn(pool: Pool, tmp_path: Path) -> None:
    """A class listed its head in `_keys_to_ignore_on_load_missing`: the head was never drawn, and the first step was
    refused with the advice to call load_model, which had run."""
    zoo.build("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    (one, warned), (two, _) = pool.run(with_a_head_that_may_be_missing, 2, str(tmp_path), True)
    assert one == pytest.approx(two) and not warned
    for message in pool.run_expecting(CheckpointError, with_a_head_that_may_be_missing, 2, str(tmp_path), False):
        assert "score.weight is missing" in message


def loading(name: str, folder: str, strict: bool = True) -> dict[str, Tensor]:
    split = Split(zoo.build(name, seed=1), dist.get_world_size(), zoo.batch(name), num_microbatches=2)
    before = values(split)
    try:
        split.booster.load_model(split.model, folder, strict)
    except CheckpointError:
        assert all(torch.equal(value, before[key]) for key, value in values(split).items())
        raise
    return values(split)


@pytest.mark.turns
def test_a_pickled_checkpoint(pool: Pool, tmp_path: Path) -> None:
    model = zoo.build("llama")
    expected = dict(model.named_parameters())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for held in pool.run(loading, 2, "llama", str(tmp_path)):
        assert all(torch.equal(value, expected[key]) for key, value in held.items())
    torch.save({"a": os.system}, tmp_path / "pytorch_model.bin")
    for message in pool.run_expecting(CheckpointError, loading, 2, "llama", str(tmp_path)):
        assert "weights_only=True" in message and "convert it to safetensors" in message


@pytest.mark.turns
def test_strict_means_strict(pool: Pool, tmp_path: Path) -> None:
    """What is missing, unexpected or of another shape, on whichever stage, is told on every rank."""
    model = zoo.build("llama")
    state = model.state_dict()
    state["model.layers.3.mlp.up_proj.weight"] = state["model.layers.3.mlp.up_proj.weight"][:5].clone()
    state["extra"] = torch.zeros(1)
    del state["model.layers.0.input_layernorm.weight"]
    model.save_pretrained(tmp_path, state_dict=state)  # type: ignore[operator]
    for message in pool.run_expecting(CheckpointError, loading, 2, "llama", str(tmp_path)):
        assert "model.layers.3.mlp.up_proj.weight has shape (5, 32), but (48, 32) in the model" in message
        assert "model.layers.0.input_layernorm.weight is missing" in message and "extra is unexpected" in message
    for message in pool.run_expecting(CheckpointError, loading, 2, "llama", str(tmp_path), False):
        assert "has shape (5, 32)" in message and "missing" not in message
    state = {**model.state_dict(), "extra": torch.zeros(1)}
    kept = [f"model.layers.{k}.mlp.up_proj.weight" for k in (0, 3)]
    for key in kept:
        del state[key]
    model.save_pretrained(tmp_path / "shards", state_dict=state, max_shard_size="20KB")  # type: ignore[operator]
    initial = zoo.build("llama", seed=1).state_dict()
    expected = model.state_dict() | {key: initial[key] for key in kept}
    index = tmp_path / "shards/model.safetensors.index.json"
    for key, held in zip(kept, pool.run(loading, 2, "llama", str(index), False), strict=True):
        assert key in held and all(torch.equal(value, expected[name]) for name, value in held.items())


@pytest.mark.turns
def test_buffers_of_older_checkpoints_are_ignored(pool: Pool, tmp_path: Path) -> None:
    """A folder from the Hub contained `rotary_emb.inv_freq` of every layer, which transformers ignores: load_model
    refused it as unexpected. Keys of buffers that the model lacks stay unexpected."""
    model = zoo.build("llama")
    old = {f"model.layers.{k}.self_attn.rotary_emb.inv_freq": torch.ones(4) for k in range(2)}
    model.save_pretrained(tmp_path, state_dict={**model.state_dict(), **old})  # type: ignore[operator]
    _, info = type(model).from_pretrained(tmp_path, output_loading_info=True)  # type: ignore[attr-defined]
    assert not info["unexpected_keys"]
    pool.run(loading, 2, "llama", str(tmp_path))
    old = {"model.position_ids": torch.ones(4)}
    model.save_pretrained(tmp_path, state_dict={**model.state_dict(), **old})  # type: ignore[operator]
    for message in pool.run_expecting(CheckpointError, loading, 2, "llama", str(tmp_path)):
        assert "model.position_ids is unexpected" in message


def spoilt(folder: Path, how: str) -> str:
    index = folder / "model.safetensors.index.json"
    shard = folder / sorted({*json.loads(index.read_text())["weight_map"].values()})[-1]
    if how == "empty":
        (folder / "nothing").mkdir()
        return str(folder / "nothing")
    if how == "cut":
        os.truncate(shard, shard.stat().st_size // 2)
    elif how == "lost":
        shard.unlink()
    elif how == "text":
        shard.write_text("nothing of the kind")
    elif how == "outside":
        index.write_text('{"weight_map": {"lm_head.weight": "../x.safetensors"}}')
    elif how == "no index":
        index.write_text("[1, 2")
    elif how == "elsewhere":
        content = json.loads(index.read_text())
        content["weight_map"] |= {"model.layers.7.mlp.up_proj.weight": shard.name}
        index.write_text(json.dumps(content))
    return str(folder)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("empty", "does not contain a checkpoint: it has none of model.safetensors"),
        ("cut", "cannot be read as safetensors"),
        ("lost", "which is missing: the checkpoint is incomplete"),
        ("text", "cannot be read as safetensors"),
        ("outside", "lists '../x.safetensors', but may only list names of files in its own folder"),
        ("no index", "cannot be read as a checkpoint index"),
        ("elsewhere", "but that file does not contain this tensor"),
    ],
)
def test_bad_folders(pool: Pool, tmp_path: Path, how: str, message: str) -> None:
    zoo.build("llama").save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    assert all(message in found for found in pool.run_expecting(
        CheckpointError, loading, 2, "llama", spoilt(tmp_path, how)
    ))  # fmt: skip


def saving_twice(folder: str, sizes: tuple[int, int], victim: int = -1, moment: int = -1) -> int:
    """Save seed 0, then seed 1, each in shards of so many MB (0: one shard); the victim is killed before its
    `moment`-th touch of the disk in the second. Returns how often this rank touched it."""
    for seed, size in enumerate(sizes):
        split = Split(zoo.build("llama", seed=seed), dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
        touches = 0
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in (
                (os, "replace"),
                (os, "fsync"),
                (safetensors_files, "save_file"),
                (Path, "unlink"),
                (Path, "write_text"),
            ):
                original = getattr(owner, name)

                def touch(*args: Any, original: Any = original, seed: int = seed, **kwargs: Any) -> Any:
                    nonlocal touches
                    if seed == 1 and dist.get_rank() == victim and touches == moment:
                        os.kill(os.getpid(), signal.SIGKILL)
                    touches += 1
                    return original(*args, **kwargs)

                patch.setattr(owner, name, touch)
            if size == 0:
                patch.setattr(saving, "split_torch_state_dict_into_shards", _in_halves)
            split.booster.save_model(split.model, folder, shard=True, size_per_shard=size or 1)
        assert split.held
    return touches


def _in_halves(state: dict[str, Tensor], max_shard_size: int) -> Any:
    """Shards smaller than a megabyte."""
    names = list(state)
    halves = {"a": names[: len(names) // 2], "b": names[len(names) // 2 :]}

    class Split:
        filename_to_tensors = halves

    return Split


def is_whole(folder: Path, seed: int) -> bool:
    expected = dict(zoo.build("llama", seed=seed).named_parameters())
    found = type(zoo.build("llama")).from_pretrained(folder)  # type: ignore[attr-defined]
    return all(torch.equal(value, expected[key]) for key, value in found.named_parameters())


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize("p", [2])
def test_killed_at_any_moment(pool: Pool, tmp_path: Path, p: int) -> None:
    """From one file or shards to shards or one file; whoever is killed, the folder holds one whole model."""
    kinds = [(1, 1), (0, 1), (1, 0), (0, 0)] if p == 1 else [(1, 1), (0, 0)]
    seen, moments, step = set(), 0, 2 if ALL else 6
    for kind in kinds:
        for victim, touches in enumerate(pool.run(saving_twice, p, str(tmp_path / f"whole{kind}"), kind)):
            assert is_whole(tmp_path / f"whole{kind}", 1)
            for moment in range(touches - 1 - moments % 2, -1, -step):
                folder = tmp_path / f"{kind}{victim}{moment}"
                with pytest.raises(WorkerError):
                    pool.run(saving_twice, p, str(folder), kind, victim, moment, timeout=20)
                whole = [seed for seed in (0, 1) if is_whole(folder, seed)]
                assert len(whole) == 1, f"killed stage {victim} at {moment} of {touches} in {kind}"
                seen |= set(whole)
                moments += 1
    assert seen == {0, 1} and moments > (15 if ALL else 3)


def without_cleaning(folder: str, what: str, options: dict[str, Any]) -> list[str]:
    """Save on a disk that refuses to remove what earlier saves left, or to sync a folder; the warnings."""
    original = getattr(saving, what)

    def refused(path: Path) -> None:
        if path.is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        original(path)

    split = Split(zoo.build("llama"), dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    with mock.patch.object(saving, what, refused), mock.patch.object(saving.logger, "warning") as warning:
        split.booster.save_model(split.model, folder, shard=True, **options)
        split.booster.checkpoint_io.wait()
    return texts_of(warning)


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize(("what", "options"), [("remove", {}), ("remove", {"use_async": True}), ("sync", {})])
def test_a_complete_save_is_kept_if_its_folder_cannot_be_cleaned(
    pool: Pool, tmp_path: Path, what: str, options: dict[str, Any]
) -> None:
    """A killed save of another user left a folder that could not be removed: the stages then removed their new shards,
    and neither the previous checkpoint nor the new one could be loaded."""
    pool.run(saving_beside, 2, tmp_path)
    (left := tmp_path / ".pipeshard-1234-stage0.writing").mkdir()
    told, others = pool.run(without_cleaning, 2, str(tmp_path), what, options)
    refused = tmp_path if what == "sync" else left
    assert all(f"{tmp_path} contains the complete new checkpoint, but" in said for said in told) and not others
    assert any(repr(str(refused)) in said for said in told)
    assert is_whole(tmp_path, 0)


@pytest.mark.turns
@pytest.mark.processes
def test_what_a_killed_save_left_is_removed(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError):
        pool.run(saving_twice, 2, str(tmp_path), (0, 0), 0, 4, timeout=20)
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    (left := tmp_path / ".pipeshard-1234-stage0.writing").mkdir()
    (left / ".tmpAbCdEf").touch()  # safetensors' own, where a save is killed amid a file
    (tmp_path / "tokenizer.json").write_text("mine")
    pool.run(saving_twice, 2, str(tmp_path), (0, 0))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    kept = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert {path.name for path in tmp_path.iterdir()} == kept | set(index["weight_map"].values())
    assert is_whole(tmp_path, 1)


def saving_beside(folder: Path) -> None:
    split = Split(zoo.build("llama"), dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    split.booster.save_model(split.model, str(folder), shard=True)


@pytest.mark.local
def test_files_that_no_save_has_written_are_kept(pool: Pool, tmp_path: Path) -> None:
    """A save removed the user's own `model-ema.safetensors`, as if it were a shard of an earlier save."""
    own = [f"model-{name}.safetensors" for name in ("ema", "epoch3", "v2", "1-of-2")]
    earlier = ["model-00001-of-00003.safetensors", "model-v2-00001-of-00003.safetensors"]
    for name in own + earlier:
        (tmp_path / name).touch()
    pool.run(saving_beside, 2, tmp_path)
    found = {path.name for path in tmp_path.iterdir()}
    assert set(own) <= found and not found & set(earlier)
    assert is_whole(tmp_path, 0)


def on_a_full_disk(folder: str, full: int) -> None:
    split = Split(zoo.build("llama"), dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    split.booster.save_model(split.model, folder, shard=True)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with torch.no_grad():
        for parameter in split.held.values():
            parameter.add_(1)
    try:
        if dist.get_rank() == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, unlimited[1]))
        split.booster.save_model(split.model, folder, shard=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk(pool: Pool, tmp_path: Path, full: int) -> None:
    for message in pool.run_expecting(CheckpointError, on_a_full_disk, 2, str(tmp_path), full):
        assert "File too large" in message
    assert is_whole(tmp_path, 0)
    assert not list(tmp_path.glob(".pipeshard-*"))


def in_the_background(folder: str) -> dict[str, Tensor]:
    data = zoo.batch("llama")
    split = Split(zoo.build("llama"), dist.get_world_size(), data, num_microbatches=2)
    first = values(split)
    split.booster.save_model(split.model, f"{folder}/first", shard=True, use_async=True)
    split.backward(data)
    split.step()  # while it is being written
    assert not all(torch.equal(value, first[key]) for key, value in values(split).items())
    split.booster.save_model(split.model, f"{folder}/second", shard=True, use_async=True)
    split.booster.checkpoint_io.wait()
    return values(split)


@pytest.mark.turns
@pytest.mark.processes
def test_in_the_background(pool: Pool, tmp_path: Path) -> None:
    stages = pool.run(in_the_background, 2, str(tmp_path))
    assert is_whole(tmp_path / "first", 0)
    second = type(zoo.build("llama")).from_pretrained(tmp_path / "second")  # type: ignore[attr-defined]
    loaded = dict(second.named_parameters())
    assert all(torch.equal(value, loaded[key]) for stage in stages for key, value in stage.items())


def failing_in_the_background(folder: str, failing: int) -> None:
    split = Split(zoo.build("llama"), dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if dist.get_rank() == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, unlimited[1]))
        split.booster.save_model(split.model, folder, shard=True, use_async=True)
        split.booster.checkpoint_io.pending.thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    split.booster.save_model(split.model, folder, shard=True)


@pytest.mark.processes  # which have limits of their own
@pytest.mark.sampled(1)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_in_the_background_is_told(pool: Pool, tmp_path: Path, failing: int) -> None:
    """Where the first stage failed, the finished part of the other one stayed."""
    for message in pool.run_expecting(CheckpointError, failing_in_the_background, 2, str(tmp_path), failing):
        assert "in the background failed" in message and ("File too large" in message or "stage 1 " in message)
    assert not list(tmp_path.glob("*.safetensors"))


LAST_SAVE = """
import sys, time
from pathlib import Path
from pipeshard.checkpoint.files import Save

class Full(Save):
    def write(self):
        time.sleep(0.5)
        if sys.argv[2] != "written":
            raise OSError("no space left")
    def commit(self):
        (self.target / "whole").touch()
    def abandon(self): ...
    def beside(self, name):
        return self.target / name

save = Full(Path(sys.argv[1]), 0, 1, "")
save.start()
if sys.argv[2] == "raised":
    save.join()
"""


@pytest.mark.turns
@pytest.mark.parametrize(("how", "status"), [("", 1), ("raised", 0), ("written", 0)])
def test_a_script_waits_for_its_last_save_and_fails_with_it(tmp_path: Path, how: str, status: int) -> None:
    """The job's last checkpoint was missing, but its exit code was 0: the next job of a chain started without it."""
    ended = subprocess.run([sys.executable, "-c", LAST_SAVE, tmp_path, how], capture_output=True, text=True)
    assert ended.returncode == status, ended.stderr
    assert ("no space left" in ended.stderr) != (tmp_path / "whole").exists() == (how == "written"), ended.stderr


@dataclass
class Slow(Save):
    """A save of a stage that takes so many seconds to write."""

    seconds: float = 0.0
    committed: bool = False

    def write(self) -> None:
        time.sleep(self.seconds)

    def commit(self) -> None:
        self.committed = True

    def abandon(self) -> None: ...

    def beside(self, name: str) -> Path:
        return self.target / name


@pytest.mark.turns
@pytest.mark.parametrize("alive", [True, False])
def test_a_save_does_not_wait_for_a_stage_that_is_gone(
    alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After kill -9 of a rank in a save in the background the first one waited half an hour, beyond its own end."""
    monkeypatch.setattr(files, "BEAT", 0.1)
    monkeypatch.setattr(files, "SILENT", 2.0 if alive else 1.0)  # less than the second one takes
    first, second = Slow(tmp_path, 0, 2, "a"), Slow(tmp_path, 1, 2, "a", seconds=3.0)
    first.start()
    if alive:
        second.start()
    assert first.thread is not None
    first.thread.join(10)
    assert not first.thread.is_alive() and first.committed == alive
    assert alive or "stage 1 stopped before the checkpoint was complete" in str(first.failed)


@dataclass
class Removing(Slow):
    """A save that removes all hidden files when it is complete, and keeps the names of those that come later."""

    later: list[str] = field(default_factory=list)

    def commit(self) -> None:
        for path in self.target.iterdir():
            path.unlink()
        time.sleep(0.2)  # a hundred heartbeats
        self.later = [path.name for path in self.target.iterdir()]


@pytest.mark.turns
def test_heartbeats_end_before_a_save_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training state was complete, but its folder of marks could not be removed, since the first stage wrote its
    heartbeat into it: the save failed, and its step was lost."""
    monkeypatch.setattr(files, "BEAT", 0.002)
    saves = [Removing(tmp_path, stage, 2, "a", seconds=0.1) for stage in range(2)]
    for save in saves:
        save.start()
    for save in saves:
        save.join()
    assert [save.failed for save in saves] == [None, None] and not saves[0].later


@pytest.mark.turns
def test_a_background_save_reads_only_files_that_exist(tmp_path: Path) -> None:
    """NFS remembers for 30 seconds that a file did not exist: the first stage looked for the marks of the others before
    they were written, and might not see them in time."""
    first, second = Slow(tmp_path, 0, 2, "a"), Slow(tmp_path, 1, 2, "a", seconds=0.3)
    missing = list[Path]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("exists", "read_text"):
            original = getattr(Path, name)

            def look(path: Path, *args: Any, original: Any = original) -> Any:
                if not os.path.lexists(path):
                    missing.append(path)
                return original(path, *args)

            patch.setattr(Path, name, look)
        for save in (first, second):
            save.start()
        for save in (first, second):
            save.join()
    assert first.committed and not missing


def modes(folder: str) -> None:
    os.umask(0o027)
    split = Split(zoo.build("llama"), dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    split.booster.save_model(split.model, folder, shard=True)
    split.booster.save_model(split.model, f"{folder}/one.safetensors")
    os.umask(0o022)


@pytest.mark.processes
@pytest.mark.turns
def test_files_may_be_read_by_whom_the_umask_says(pool: Pool, tmp_path: Path) -> None:
    """Safetensors writes files that the user alone can read, whatever the umask: nobody else could load an export."""
    pool.run(modes, 2, str(tmp_path))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.*")} == {0o640}


def wrongly(folder: str, what: dict[str, Any]) -> None:
    split = Split(zoo.build("llama"), dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    split.booster.save_model(split.model, folder, **what)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "what", "message"),
    [
        ("file", {"shard": True}, "is a file, but the save writes a folder"),
        ("new", {"shard": True, "size_per_shard": "5GB"}, "must be a positive number of MB, such as 5000, got '5GB'"),
        ("new", {"shard": True, "size_per_shard": 0}, "size_per_shard must be a positive number of MB"),
        ("folder", {}, "is a folder, but shard=False writes a file"),
        ("new", {"shard": True, "prefix": "x"}, "the architecture's own names"),
        ("new.pt", {"use_safetensors": True}, "a .pt file is written in the format of torch.save. Use the suffix"),
    ],
)
def test_saving_wrongly(pool: Pool, tmp_path: Path, name: str, what: dict[str, Any], message: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    assert all(message in m for m in pool.run_expecting(CheckpointError, wrongly, 2, str(tmp_path / name), what))
    assert (tmp_path / "file").read_text() == "mine"


def apart(folder: Path) -> None:
    split = Split(zoo.build("llama"), dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    own = folder / f"disk-{dist.get_rank()}"
    own.mkdir()
    split.booster.save_model(split.model, str(own), shard=True)


@pytest.mark.turns
def test_stages_that_write_to_several_folders_are_told(pool: Pool, tmp_path: Path) -> None:
    """Each machine has a folder of this name on its own disk: the save succeeded, and no folder had all shards."""
    for message in pool.run_expecting(CheckpointError, apart, 2, tmp_path):
        assert "another stage has written" in message and "that all ranks share" in message
    assert not list(tmp_path.glob("*/*"))


def one_file(folder: str, name: str) -> dict[str, Tensor]:
    """One file of each kind, the second in the background while training goes on; each is loaded by another split."""
    data = zoo.batch("llama-tied")
    split = Split(zoo.build("llama-tied"), dist.get_world_size(), data, num_microbatches=2)
    first = values(split)
    split.booster.save_model(split.model, f"{folder}/{name}")
    split.booster.save_model(split.model, f"{folder}/later-{name}", use_async=True)
    split.backward(data)
    split.step()
    split.booster.checkpoint_io.wait()
    for file in (name, f"later-{name}"):
        other = Split(zoo.build("llama-tied", seed=1), dist.get_world_size(), data, num_microbatches=2)
        other.booster.load_model(other.model, f"{folder}/{file}")
        assert all(torch.equal(value, first[key]) for key, value in values(other).items())
    return first


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["x.pt", "x.pth", "pytorch_model.bin", "x.safetensors", "x"])
def test_one_file_is_what_its_name_says(pool: Pool, tmp_path: Path, name: str) -> None:
    """`save_model(model, "x.pt")` wrote safetensors under that name, which neither torch.load nor load_model read."""
    pool.run(one_file, 2, str(tmp_path), name)
    model, read = zoo.build("llama-tied", seed=1), torch.load if "x.pt" in name or ".bin" in name else load_file
    for file in (name, f"later-{name}"):
        state = read(tmp_path / file)
        if read is torch.load:
            model.load_state_dict(state)  # strictly: tied tensors have all of their names
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), zoo.build("llama-tied").parameters()))
        else:
            assert set(dict(model.state_dict())) - set(state) == {"lm_head.weight"}
    assert {path.name for path in tmp_path.iterdir()} == {name, f"later-{name}"}


def state_dict_of(text: str, place: Path) -> None:
    """Save a state_dict, load it into another split, and save a folder from there."""
    model, data = made(text)
    split = Split(model, 2, data, num_microbatches=2)
    split.booster.save_model(split.model, str(place / "x.pt"))
    other = Split(made(text, seed=1)[0], 2, data, num_microbatches=2)
    other.booster.load_model(other.model, str(place / "x.pt"))
    other.booster.save_model(other.model, str(place / "ours"), shard=True)


@pytest.mark.turns
@pytest.mark.parametrize("text", ["causal-lm/mixtral", "image-text-to-text/llava", "image-text-to-text/qwen2_vl"])
def test_a_pt_file_is_a_state_dict(pool: Pool, tmp_path: Path, text: str) -> None:
    """`model.load_state_dict(torch.load("x.pt"))` did not know the names of a file of a mixture of experts or a
    vision-language model: they were those of the Hub."""
    pool.run(state_dict_of, 2, text, tmp_path)
    model, same = made(text, seed=1)[0], made(text)[0]
    model.load_state_dict(torch.load(tmp_path / "x.pt"))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), same.parameters(), strict=True))
    same.save_pretrained(tmp_path / "plain")  # type: ignore[operator]
    plain, ours = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "ours")
    assert plain.keys() == ours.keys() and all(torch.equal(plain[key], ours[key]) for key in plain)


def tied_in_a_bin_file(text: str, place: Path) -> None:
    """Save the names of the Hub with those of tied tensors, and load them into another split."""
    model, data = made(text)
    split = Split(model, 2, data, num_microbatches=2)
    expected = values(split)
    split.booster.save_model(split.model, str(place / "x.bin"))
    other = Split(made(text, seed=1)[0], 2, data, num_microbatches=2)
    other.booster.load_model(other.model, str(place / "x.bin"))
    assert all(torch.equal(value, expected[key]) for key, value in values(other).items())


@pytest.mark.turns
def test_a_bin_file_has_all_names_of_a_tied_tensor_that_the_class_renames(pool: Pool, tmp_path: Path) -> None:
    """The head was sought under the name of the module, and lacked in the file under that of the Hub."""
    text = "image-text-to-text/gemma3"
    pool.run(tied_in_a_bin_file, 2, text, tmp_path)
    model: Any = made(text)[0]
    model.save_pretrained(tmp_path / "plain")
    plain, ours = tensors_of(tmp_path / "plain"), torch.load(tmp_path / "x.bin")
    head, embedding = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
    assert ours.keys() == plain.keys() | {head} and head not in plain
    assert torch.equal(ours[head], plain[embedding]) and all(torch.equal(plain[key], ours[key]) for key in plain)
