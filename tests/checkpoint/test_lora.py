"""Tests of LoRA: peft adapters train, save and resume in a pipeline as they do in one process."""

from __future__ import annotations

import copy
import json
import logging
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from colossalai.booster import Booster
from peft import (
    IA3Config,
    LilyConfig,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptLearningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeshard import PipelinePlugin, Policy, load_training_state, register_policy, save_training_state, to_sequential
from pipeshard.checkpoint.hub import hub_name
from pipeshard.checkpoint.lora import enable_lora
from pipeshard.checkpoint.safetensors_files import StoredTensors
from pipeshard.distributed.collectives import whole
from pipeshard.engine import grad_sync as gradients
from pipeshard.errors import CheckpointError, ConfigurationError, PartitionError, UsageError, VerificationError
from pipeshard.split.adapters import adding, begin
from pipeshard.split.base_names import base_names
from pipeshard.split.blank import give
from pipeshard.split.policy import find_policy
from pipeshard.split.tensor_parallel import plan_of
from pipeshard.trainer.checkpoint import load_checkpoint_weights, save_weights
from pipeshard.verify.decide import is_known
from tests import zoo
from tests.covering import covering
from tests.messages import texts_of
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, compared, differences, parameter_error

pytestmark = pytest.mark.local

ATTENTION = ["q_proj", "v_proj"]
# The model of the zoo, and what of the LoraConfig is not the default.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": ATTENTION, "task_type": "CAUSAL_LM"}),
    "all-linear": ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    "head": ("llama-tied", {"target_modules": ["q_proj", "lm_head"]}),
    "dora": ("llama", {"target_modules": ATTENTION, "use_dora": True}),
    "only the first layer": ("llama-tied", {"target_modules": ATTENTION, "layers_to_transform": [0]}),
    "only the last layer": ("llama-tied", {"target_modules": ATTENTION, "layers_to_transform": [3]}),
    "embedding": ("llama-tied", {"target_modules": ["q_proj", "embed_tokens"]}),
    "both embeddings": ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "copied head": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "copied embedding": ("llama-tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "copied tie": (
        "llama-tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "gemma2": ("gemma2", {"target_modules": ATTENTION}),
    "mixtral": ("mixtral", {"target_modules": ATTENTION}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    "t5": ("t5", {"target_modules": ["q", "v"]}),
    "only T5's encoder": ("t5", {"target_modules": r".*encoder.block.1.*\.q"}),
    "bert": ("bert", {"target_modules": ["query", "value"], "bias": "lora_only"}),
    "vit": ("vit", {"target_modules": ATTENTION, "modules_to_save": ["classifier"]}),
    "ia3": ("llama", {"feedforward_modules": ["down_proj"], "target_modules": ["k_proj", "v_proj", "down_proj"]}),
}
SAVED = ["llama", "dora", "embedding", "copied head", "copied tie", "tokens", "gpt2", "bert", "experts", "t5", "ia3"]


def config(case: str, **fields: Any) -> Any:
    """The case's configuration, with weights at random from the start: LoRA's own begin at zero."""
    if case == "ia3":
        return IA3Config(**CASES[case][1], init_ia3_weights=False)
    return LoraConfig(r=4, lora_alpha=8, **{"init_lora_weights": False, **CASES[case][1], **fields})


def adapted(case: str, seed: int = 0, **fields: Any) -> tuple[nn.Module, Any]:
    """The case's model with its adapters, and a batch for it."""
    name = CASES[case][0]
    model = zoo.build(name)
    torch.manual_seed(seed)
    if case == "ia3":
        return get_peft_model(model, config(case)), zoo.batch(name)
    return booster().enable_lora(model, lora_config=config(case, **fields)), zoo.batch(name)


def booster() -> Booster:
    return Booster(plugin=PipelinePlugin(dist.get_world_size(), num_microbatches=2))


# Exactness


def three_steps(case: str) -> None:
    name = CASES[case][0]
    model, data = adapted(case)
    unsplit = Unsplit(copy.deepcopy(model), max_norm=0.5)
    split = Split(model, dist.get_world_size(), data, num_microbatches=3, max_norm=0.5)
    assert type(split.model.pipeline.policy) is find_policy(zoo.build(name))
    trained = {n for n, p in unsplit.model.named_parameters() if p.requires_grad}
    assert {n for n, p in split.held.items() if p.requires_grad} == trained & split.held.keys()
    for seed in range(3):
        same_sums = {"num_microbatches": 3} if seed == 0 else {}
        found = differences(split, unsplit, zoo.batch(name, seed=seed), 1e-6 if seed == 0 else 1e-4, **same_sums)
        assert not found, f"{case}, step {seed}: {found}"
        unsplit.step()
        split.step()
        assert split.optimizer.get_grad_norm() == pytest.approx(float(unsplit.norm), rel=1e-5)
    assert parameter_error(split, unsplit.model) < 1e-5


@pytest.mark.turns
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("case", "p"), covering(list(CASES), [2, 3], strength=1))
def test_three_steps(pool: Pool, case: str, p: int) -> None:
    pool.run(three_steps, p, case)


def sliced(folder: str, p: int, name: str, by: str, targets: Any) -> list[str]:
    """Two steps of adapters on ranks with slices, or with some of the experts, and what is saved of them."""
    model: Any = zoo.build(name)
    if by == "ep_size":
        model.set_experts_implementation("batched_mm")
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=targets)).double()
    unsplit, data = Unsplit(copy.deepcopy(model)), zoo.batch(name)
    split = Split(model, p, data, num_microbatches=2, **{by: 2})
    found = []
    for _ in range(2):
        found += compared(
            split, unsplit, split.backward(data)["loss"], unsplit.backward_in_parts(data, num_microbatches=2)
        )
        unsplit.step()
        split.step()
    split.booster.save_lora_as_pretrained(split.model, folder)
    saved = PeftModel.from_pretrained(zoo.build(name).double(), folder)
    for key, parameter in unsplit.model.named_parameters():
        if not torch.allclose(saved.get_parameter(key), parameter, atol=1e-9):
            found.append(f"{key} was saved with other values")
    assert any("lora_" in key and isinstance(q, DTensor) for key, q in split.held.items()) == (by == "tp_size")
    return found


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize(
    ("p", "name", "by", "targets"),
    [
        (1, "llama-tied", "tp_size", "all-linear"),
        (2, "llama", "tp_size", ["o_proj", "gate_proj"]),
        (1, "mixtral", "ep_size", ["q_proj", "o_proj"]),
    ],
)
def test_adapters_of_sliced_layers(pool: Pool, tmp_path: Path, p: int, name: str, by: str, targets: Any) -> None:
    assert not [
        what for found in pool.run(sliced, 2 * p, str(tmp_path / "lora"), p, name, by, targets) for what in found
    ]


@pytest.mark.parametrize(
    ("name", "sizes", "fields", "message"),
    [
        ("llama", (2, 1), {"target_modules": ["o_proj"], "use_dora": True}, "o_proj (rowwise in the tp_plan) has"),
        ("llama", (2, 1), {"target_modules": ["o_proj"], "lora_dropout": 0.1}, "has lora_dropout, which would differ"),
        ("llama", (2, 1), {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "lm_head (colwise_gather"),
        ("mixtral", (1, 2), {"target_parameters": ["experts.gate_up_proj"]}, "experts (ep_dispatch_experts in the"),
    ],
)
def test_adapters_that_cannot_be_sliced_are_refused(
    name: str, sizes: tuple[int, int], fields: dict[str, Any], message: str
) -> None:
    model = zoo.build(name)
    adapted, of_policy = get_peft_model(model, LoraConfig(**fields)), find_policy(model).tp_plan
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        plan_of(adapted, sizes[0], None, of_policy, sizes[1])


def without_gradients() -> None:
    """An optimizer of the adapters alone: it has nothing on the stages before theirs, to which no gradient goes."""
    model, data = adapted("only the last layer")
    plugin = PipelinePlugin(dist.get_world_size(), num_microbatches=2, dry_run_input=data, max_norm=0.1)
    raw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.LambdaLR(raw, lambda step: 0.5)
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, raw, lr_scheduler=scheduler)
    plugin.execute_pipeline(iter([data]), model, None, optimizer)
    pipeline = model.pipeline
    adapters = {s for s, names in enumerate(pipeline.policy.ownership.held) if any("lora_" in name for name in names)}
    assert adapters == {pipeline.num_stages - 1}
    [[route]] = pipeline.traces.routes._routes.values()
    assert route.enters.gradients == ()
    assert len(raw.param_groups) == 1 and bool(raw.param_groups[0]["params"]) == (pipeline.rank in adapters)
    assert optimizer.get_grad_norm() > 0
    optimizer.step()
    scheduler.step()
    assert optimizer.get_grad_norm() > 0


@pytest.mark.turns
def test_stages_without_a_trained_parameter_get_no_gradient(pool: Pool) -> None:
    pool.run(without_gradients, 3)


def reductions(case: str) -> int:
    """How often the gradient of a tie is summed in a step."""
    model, data = adapted(case)
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    assert split.model.pipeline.sync.buckets
    with mock.patch.object(gradients.dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        split.backward(data)
    return reduced.call_count


@pytest.mark.turns
@pytest.mark.processes
def test_a_frozen_tie_costs_nothing(pool: Pool) -> None:
    assert pool.run(reductions, 2, "embedding") == [0, 0]
    assert pool.run(reductions, 2, "copied tie") == [1, 1]


def dropped(rate: float) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of two steps and the gradients of the second."""
    torch.manual_seed(5)
    model, data = adapted("llama", seed=5, lora_dropout=rate)
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    losses = [split.backward(data)["loss"].item()]
    split.step()
    losses.append(split.backward(data)["loss"].item())
    return losses, {n: p.grad for n, p in split.held.items() if p.requires_grad}


@pytest.mark.turns
def test_dropout_in_adapters_does_not_depend_on_the_stages(pool: Pool) -> None:
    ((losses, whole),) = pool.run(dropped, 1, 0.5)
    assert losses != pool.run(dropped, 1, 0.0)[0][0]
    for p in (2, 3):
        stages = pool.run(dropped, p, 0.5)
        assert all(stage_losses == losses for stage_losses, _ in stages)
        parts = {name: gradient for _, part in stages for name, gradient in part.items()}
        assert parts.keys() == whole.keys()
        assert all(torch.allclose(parts[name], whole[name], rtol=1e-5, atol=1e-8) for name in whole)


def recomputed(when: str, reentrant: bool) -> None:
    def enable(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    model = zoo.build("llama")
    if when == "before the adapters":
        enable(model)
    torch.manual_seed(0)
    model = get_peft_model(model, config("llama"))
    unsplit = Unsplit(copy.deepcopy(model))
    if when == "after the adapters":
        enable(model)
        if reentrant:
            model.enable_input_require_grads()
    split = Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    if when == "after boost":
        enable(split.model.unwrap())
    for seed in range(2):
        assert not differences(split, unsplit, zoo.batch("llama", seed=seed), num_microbatches=2)


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("when", "reentrant"),
    covering(["before the adapters", "after the adapters", "after boost"], [False, True], strength=1),
)
def test_activation_checkpointing(pool: Pool, when: str, reentrant: bool) -> None:
    pool.run(recomputed, 2, when, reentrant)


# Names


def by_names() -> None:
    model, data = adapted("llama")
    split = Split(model, 2, data, num_microbatches=2, partition=["model.layers.0"])
    policy = split.model.pipeline.policy
    assert policy.stages == (0, 0, *[1] * 5)
    prefix = "base_model.model."
    assert (
        policy.unit("model.layers.1")
        is policy.unit(f"{prefix}model.layers.1")
        is policy.units[f"{prefix}model.layers.1"]
    )
    assert policy.calls_of("model.layers") == [1, 2, 3, 4]
    with pytest.raises(PartitionError, match=r"did you mean base_model\.model\.model\.layers"):
        policy.unit("model.layers.9")


@pytest.mark.turns
def test_units_go_by_the_names_of_the_model_inside(pool: Pool) -> None:
    pool.run(by_names, 2)


def test_a_policy_registered_for_a_class_is_that_of_its_adapted_models() -> None:
    class Own(transformers.LlamaForCausalLM):
        pass

    @register_policy(Own)
    class OwnPolicy(Policy):
        pass

    model = get_peft_model(Own(zoo.build("llama").config), config("llama"))
    assert find_policy(model) is OwnPolicy


def made_up() -> None:
    classes = transformers.LlamaConfig(**zoo.TINY, num_labels=3)
    model = get_peft_model(transformers.LlamaForSequenceClassification(classes), config("llama", task_type=None))
    Split(model, dist.get_world_size(), None, num_microbatches=1)


@pytest.mark.turns
def test_a_batch_is_made_up_for_the_model_inside(pool: Pool) -> None:
    pool.run(made_up, 2)


# Saving and resuming


def saved(case: str, folder: Path) -> None:
    """Trained, saved, and read by peft: every adapter tensor is there, under peft's names, equal to the bit."""
    model, data = adapted(case)
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    for _ in range(2):
        split.backward(data)
        split.step()
    split.booster.save_lora_as_pretrained(split.model, str(folder / "split"), use_safetensors=True)
    assert not [path for path in folder.iterdir() if path.name != "split"]
    dist.barrier()
    module = split.model.unwrap()
    assert {c.inference_mode for c in module.peft_config.values()} == {False}
    whole = PeftModel.from_pretrained(zoo.build(CASES[case][0]), folder / "split")
    reloaded = dict(whole.named_parameters())
    for name, parameter in split.held.items():
        assert torch.equal(parameter, reloaded[name]), name
    changed = [n for n, p in unsplit.model.named_parameters() if not torch.equal(p, reloaded[n])]
    assert changed == [n for n, p in unsplit.model.named_parameters() if p.requires_grad]
    own = folder / f"unsplit{dist.get_rank()}"
    unsplit.model.save_pretrained(own)
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (folder / "split", own))
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}
    mine, its = (json.loads((path / "adapter_config.json").read_text()) for path in (folder / "split", own))
    assert {k: sorted(v) if isinstance(v, list) else v for k, v in mine.items()} == {
        k: sorted(v) if isinstance(v, list) else v for k, v in its.items()
    }


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", SAVED)
def test_saved_adapters_are_what_peft_would_save(pool: Pool, case: str, tmp_path: Path) -> None:
    pool.run(saved, 3, case, tmp_path)


def of_the_hub(cache: Path, folder: Path) -> None:
    model: Any = PipelinePlugin.from_pretrained(transformers.LlamaForCausalLM, "owner/name", cache_dir=cache).train()
    model = booster().enable_lora(model, lora_config=config("llama"))
    with adding(model):
        model.add_adapter("second", config("llama"))
    split = Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    split.booster.save_lora_as_pretrained(split.model, str(folder))


@pytest.mark.turns
def test_saved_adapters_of_a_model_of_the_hub_have_its_name(pool: Pool, tmp_path: Path) -> None:
    """Their base model was a path in this machine's cache, which no other machine, nor the Hub, could read."""
    cache = tmp_path / "models--owner--name"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    zoo.build("llama").save_pretrained(cache / "snapshots" / ("0" * 40))
    pool.run(of_the_hub, 2, tmp_path, tmp_path / "adapters")
    files = [*(tmp_path / "adapters").rglob("adapter_config.json")]
    assert {json.loads(file.read_text())["base_model_name_or_path"] for file in files} == {"owner/name"}
    card = (tmp_path / "adapters" / "README.md").read_text()
    assert len(files) == 2 and "base_model: owner/name" in card and str(tmp_path) not in card
    assert hub_name("some/folder") == "some/folder" and hub_name("models--a--b") == "models--a--b"
    assert hub_name(f"{cache}/snapshots/0/inner") == f"{cache}/snapshots/0/inner" and hub_name("/") == "/"
    assert hub_name("x/models--gpt2/snapshots/0") == "gpt2"


def saved_shards(folder: Path) -> list[str]:
    """The adapters of this rank's shards that were saved with other values or another dtype."""
    model, data = adapted("copied head")
    split = Split(model, 2, data, num_microbatches=2, fsdp=True, precision="bf16")
    split.backward(zoo.part(data, split.plugin.grid.replica, [4, 4]))
    split.step()
    split.booster.save_lora_as_pretrained(split.model, str(folder))
    reloaded = dict(PeftModel.from_pretrained(zoo.build("llama"), folder).named_parameters())
    saved = {tensor.dtype for tensor in load_file(folder / "adapter_model.safetensors").values()}
    shards = {name: p for name, p in split.held.items() if p.requires_grad}
    assert any("modules_to_save" in name or "lora_B" in name for name in shards) and saved == {torch.float32}
    return [name for name, shard in shards.items() if not torch.equal(whole(shard.detach()), reloaded[name])]


@pytest.mark.turns
@pytest.mark.processes
def test_saved_adapters_of_shards_in_16_bits(pool: Pool, tmp_path: Path) -> None:
    """A user trained adapters with fsdp in bf16 on two stages. The save broadcast the fp32 shards of the second stage
    into 16-bit tensors, which gloo refused after the whole training, and NCCL does not notice."""
    assert pool.run(saved_shards, 4, tmp_path / "lora") == [[]] * 4


def several(folder: Path) -> None:
    model, data = adapted("llama")
    model.add_adapter("second", config("dora"))
    model.set_adapter("second")
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    assert not differences(split, Unsplit(adapted_twice()), data, num_microbatches=2)
    split.step()
    split.booster.save_lora_as_pretrained(split.model, str(folder))
    whole = PeftModel.from_pretrained(zoo.build("llama"), folder)
    whole.load_adapter(folder / "second", "second")
    reloaded = dict(whole.named_parameters())
    assert all(torch.equal(parameter, reloaded[name]) for name, parameter in split.held.items())


def adapted_twice() -> nn.Module:
    model, _ = adapted("llama")
    model.add_adapter("second", config("dora"))
    model.set_adapter("second")
    return model


@pytest.mark.turns
def test_several_adapters(pool: Pool, tmp_path: Path) -> None:
    pool.run(several, 2, tmp_path / "adapters")


def training(folder: Path, seed: int) -> float:
    """Train and save over what may be there; the loss afterwards."""
    model, data = adapted("copied tie", seed=seed)
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    split.backward(data)
    split.step()
    split.booster.save_lora_as_pretrained(split.model, str(folder))
    return split.evaluate(data)["loss"].item()


def resuming(folder: Path) -> float:
    data = zoo.batch("llama-tied")
    model = booster().enable_lora(zoo.build("llama-tied"), pretrained_dir=str(folder))
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    loss = split.evaluate(data)["loss"].item()
    assert not differences(split, unsplit, data, num_microbatches=2)
    return loss


@pytest.mark.turns
def test_training_goes_on_from_saved_adapters_with_any_number_of_stages(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    losses = pool.run(training, 2, folder, 0)
    assert pool.run(resuming, 3, folder) == [losses[0]] * 3
    losses = pool.run(training, 3, folder, 1)  # over the other
    assert pool.run(resuming, 2, folder) == [losses[0]] * 2


def whole_state(folder: Path, saving: bool) -> dict[str, Tensor]:
    """All of training at once: base, adapters, moments."""
    model, data = adapted("llama", seed=0 if saving else 1)
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    if saving:
        split.backward(data)
        split.step()
        with pytest.raises(CheckpointError, match="save_lora_as_pretrained"):
            split.booster.save_model(split.model, str(folder / "model"), shard=True)
        save_training_state(folder, 1, split.model, split.optimizer)
    else:
        assert load_training_state(folder, split.model, split.optimizer) == 1
    split.backward(data)
    split.step()
    return {name: p.detach() for name, p in split.held.items()}


@pytest.mark.turns
def test_the_whole_state_of_training(pool: Pool, tmp_path: Path) -> None:
    expected = {name: p for stage in pool.run(whole_state, 2, tmp_path, True) for name, p in stage.items()}
    (found,) = pool.run(whole_state, 1, tmp_path, False)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in found)


def prompts(folder: Path, kind: Any, fields: dict[str, Any]) -> list[float]:
    """A step is exact: the losses afterwards, of the stages and of what two ways of saving write."""
    model, data = zoo.build("llama"), zoo.batch("llama")
    model = get_peft_model(model, kind(task_type="CAUSAL_LM", num_virtual_tokens=3, **fields))
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    assert not differences(split, unsplit, data)
    split.step()
    split.booster.save_lora_as_pretrained(split.model, str(folder / "split"))
    computed = pytest.raises(CheckpointError, match=r"peft saves the prompts of .* so training cannot resume from")
    with computed if fields else nullcontext():  # as a Trainer that resumes
        load_checkpoint_weights(split.model, folder / "split")
    losses = [split.evaluate(data)["loss"].item()]
    whole = to_sequential(split.model, rank=0)
    if whole is not None:
        whole.save_pretrained(folder / "whole")
        loaded = [PeftModel.from_pretrained(zoo.build("llama"), folder / name) for name in ("split", "whole")]
        losses += [one(**data).loss.item() for one in loaded]
    return losses


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (PromptTuningConfig, {}),
        (PromptEncoderConfig, {"encoder_hidden_size": 8}),
        (PrefixTuningConfig, {}),
        (PrefixTuningConfig, {"prefix_projection": True, "encoder_hidden_size": 8}),
    ],
)
def test_prompts_train_and_are_saved_whole(pool: Pool, tmp_path: Path, kind: Any, fields: dict[str, Any]) -> None:
    """A Trainer's first checkpoint of a prompt was an error, after 500 steps: stages did not save prompts."""
    losses = [loss for of_rank in pool.run(prompts, 2, tmp_path, kind, fields) for loss in of_rank]
    assert len(losses) == 4 and losses == pytest.approx([losses[0]] * 4, rel=1e-6)


class NormedForImageClassification(transformers.ViTForImageClassification):
    """A ViT whose head has running statistics, as that of a SegFormer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.classifier = nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, config.num_labels))  # type: ignore[assignment]
        self.post_init()


def with_normed_head() -> Any:
    torch.manual_seed(0)
    return NormedForImageClassification(zoo.build("vit").config)  # type: ignore[arg-type]


NORMED = LoraConfig(r=4, target_modules=ATTENTION, modules_to_save=["classifier"], init_lora_weights=False)
STATISTICS = "base_model.model.classifier.modules_to_save.default.0.running_mean"


def returning_to_saved_statistics(folder: Path) -> list[Tensor]:
    """The running mean of a trained head: when it is saved, after another step, and when the save is loaded again."""
    model, data = get_peft_model(with_normed_head(), copy.deepcopy(NORMED)), zoo.batch("vit")
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    mean, found = split.model.unwrap().get_buffer(STATISTICS), []
    for then in (
        lambda: split.booster.save_lora_as_pretrained(split.model, str(folder)),
        lambda: None,
        lambda: load_checkpoint_weights(split.model, folder),  # as load_best_model_at_end
    ):
        split.backward(data)
        split.step()
        then()
        found.append(mean.clone())
    return found


@pytest.mark.turns
def test_running_statistics_of_a_trained_head_are_those_of_the_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """A Trainer that resumed, or loaded its best model, kept the statistics that the head had before: those of the last
    step, or of the base model."""
    *_, (saved, later, loaded) = pool.run(returning_to_saved_statistics, 2, tmp_path)
    assert saved.any() and not torch.equal(later, saved)
    assert torch.equal(loaded, saved)


# Wrong uses


def on_meta(where: str) -> None:
    with torch.device("cpu" if where == "adapters" else "meta"):
        model: Any = zoo.build("llama")
    if where == "of transformers":
        model.add_adapter(config("llama"))
    else:
        model = get_peft_model(model, config("llama"), low_cpu_mem_usage=True)
    Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)


@pytest.mark.parametrize("where", ["all", "adapters", "of transformers"])
def test_adapters_on_meta_are_refused(pool: Pool, where: str) -> None:
    for message in pool.run_expecting(ConfigurationError, on_meta, 2, where):
        assert "on the meta device" in message and "call booster.enable_lora(model, lora_config=...)" in message


def unwrapped(folder: Path) -> tuple[list[str], bool]:
    """What is said to saves of a model with transformers' own adapters, and whether a whole model's can be read."""
    model: Any = zoo.build("llama")
    model.add_adapter(config("llama"))
    unsplit = copy.deepcopy(model)
    split = Split(model, 2, zoo.batch("llama"), num_microbatches=2)
    said = []
    for save in (
        lambda: split.booster.save_model(split.model, str(folder / "out"), shard=True),
        lambda: split.booster.save_model(split.model, str(folder / "out.pt")),
    ):
        with pytest.raises(CheckpointError) as caught:
            save()
        said.append(str(caught.value))
    whole: Any = to_sequential(split.model, rank=0)
    if whole is None:
        return said, True
    whole.save_pretrained(folder / "whole")
    zoo.build("llama").save_pretrained(folder / "base")  # type: ignore[operator]
    back = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    back.load_adapter(str(folder / "whole"))
    expected = dict(unsplit.named_parameters())
    return said, all(torch.equal(value, expected[name]) for name, value in back.named_parameters())


@pytest.mark.turns
def test_adapters_of_transformers_are_not_saved_under_names_that_nobody_reads(pool: Pool, tmp_path: Path) -> None:
    """A model with `model.add_adapter` was saved with its layers' inner names: `from_pretrained` drew these layers at
    random, with no more than a report, and the adapters were lost."""
    for said, is_whole in pool.run(unwrapped, 2, tmp_path):
        assert len(said) == 2 and all(
            "call pipeshard.to_sequential(model, rank=0) on every rank" in one for one in said
        )
        assert is_whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "whole"]


# Merged


def merged_as_one(case: str, folder: Path, active: str = "default", second: dict[str, Any] | None = None) -> list[str]:
    """The tensors of a merged folder that are not those of `merge_and_unload().save_pretrained` in one process. Trained
    tokens lost the embedding, and a trained copy of an embedding the head, which was tied to the original. With
    `second`, the model has another adapter, whose configuration differs in these fields."""
    model, data = adapted(case)
    if second is not None:
        model.add_adapter("second", config(case, **second))
        model.set_adapter(active)
        for k, copied in enumerate(p for name, p in model.named_parameters() if "modules_to_save" in name):
            copied.data += 0.1 * (k + 1)
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    split.backward(data)
    split.step()
    split.booster.checkpoint_io.save_model(split.model, str(folder / "split"), shard=True, merge=True)
    changed = differences(split, Unsplit(gathered(split)), data, num_microbatches=2)
    assert not changed, changed
    whole = to_sequential(split.model, rank=0)
    if whole is None:
        return []
    whole.merge_and_unload(safe_merge=True).save_pretrained(folder / "one")
    found, wanted = (
        {name: value for file in (folder / which).glob("*.safetensors") for name, value in load_file(file).items()}
        for which in ("split", "one")
    )
    configs = [json.loads((folder / which / "config.json").read_text()) for which in ("split", "one")]
    for field in ("architectures", "tie_word_embeddings"):
        assert configs[0].get(field) == configs[1].get(field)
    wrong = [name for name in found.keys() & wanted.keys() if not torch.equal(found[name], wanted[name])]
    return [*wrong, *(found.keys() ^ wanted.keys())]


def gathered(split: Split) -> nn.Module:
    """The whole model on every rank."""
    made = [to_sequential(split.model, rank=rank) for rank in range(dist.get_world_size())]
    return next(model for model in made if model is not None)


MERGED = ["llama", "all-linear", "dora", "copied head", "copied embedding", "copied tie", "tokens"]
MERGED += ["gpt2", "gemma2", "experts", "t5", "bert", "vit", "ia3"]


@pytest.mark.turns
@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", MERGED)
def test_merged_weights_are_saved_stage_by_stage(pool: Pool, tmp_path: Path, case: str) -> None:
    assert pool.run(merged_as_one, 2, case, tmp_path) == [[], []]


@pytest.mark.turns
@pytest.mark.parametrize(("active", "second"), [("default", {}), ("second", {}), ("second", {"modules_to_save": None})])
def test_the_active_adapters_copy_is_saved(pool: Pool, tmp_path: Path, active: str, second: dict[str, Any]) -> None:
    """A model whose head was trained under `default` was merged with the copy of the adapter that was added last. It
    has the active adapter's head or, if this adapter trains none, the original."""
    assert pool.run(merged_as_one, 2, "copied head", tmp_path, active, second) == [[], []]


def merged_shards(folder: Path, p: int, targets: Any, options: dict[str, Any]) -> list[str]:
    """The tensors of a merged folder of sharded layers that are not those of `merge_and_unload` in one process."""
    data, config = zoo.batch("llama"), LoraConfig(r=4, init_lora_weights=False, target_modules=targets)
    torch.manual_seed(0)
    model = get_peft_model(zoo.build("llama"), config)
    split = Split(model, p, data, num_microbatches=2, **options)
    grid = split.plugin.grid
    split.backward(zoo.part(data, grid.replica, [8 // grid.dp_size] * grid.dp_size))
    split.step()
    split.booster.checkpoint_io.save_model(split.model, str(folder), shard=True, merge=True)
    split.backward(zoo.part(data, grid.replica, [8 // grid.dp_size] * grid.dp_size))
    split.optimizer.zero_grad()
    whole: Any = to_sequential(split.model)
    expected = whole.merge_and_unload(safe_merge=True).state_dict()
    found = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    wrong = [name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])]
    return [*wrong, *(found.keys() ^ expected.keys())]


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize(
    ("p", "targets", "options"),
    [
        (2, "all-linear", {"fsdp": True, "dp_size": 2}),
        (1, ["q_proj", "lm_head"], {"fsdp": True, "dp_size": 2}),
        (1, "all-linear", {"tp_size": 2}),
    ],
)
def test_merged_weights_of_sharded_layers(
    pool: Pool, tmp_path: Path, p: int, targets: Any, options: dict[str, Any]
) -> None:
    """A user trained adapters with fsdp or tp_size, and saved the merged model. With fsdp, only the first replica
    merged, and waited for the other replicas forever; with tp_size, peft multiplied a shard by a plain tensor."""
    assert not [name for wrong in pool.run(merged_shards, 2 * p, tmp_path, p, targets, options) for name in wrong]


def merging(case: str, folder: Path) -> None:
    model, data = adapted(case)
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    split.booster.checkpoint_io.save_model(split.model, str(folder), shard=True, merge=True)


@pytest.mark.turns
def test_a_tied_weight_is_not_merged(pool: Pool, tmp_path: Path) -> None:
    for message in pool.run_expecting(CheckpointError, merging, 2, "head", tmp_path):
        assert "is tied to another weight" in message and "merge_and_unload" in message


def merged_in_place() -> list[str]:
    """The methods of peft that changed weights or adapters before they were refused, or are not refused at all."""
    model, data = adapted("llama")
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    unsplit, wrong = Unsplit(gathered(split)), []
    for name in ("merge_adapter", "unmerge_adapter", "merge_and_unload", "add_weighted_adapter"):
        arguments = (["default"], [0.5], "half") if name == "add_weighted_adapter" else ()
        with pytest.raises(UsageError, match=f"^{name}: .*to_sequential.*merge=True"):
            getattr(split.model, name)(*arguments)
        if differences(split, unsplit, data, num_microbatches=2) or "half" in split.model.peft_config:
            wrong.append(name)
    return wrong


@pytest.mark.turns
def test_adapters_of_a_boosted_model_are_not_merged_in_place(pool: Pool) -> None:
    """The first rank merged its own layers and failed at the next stage's, the others merged nothing: "matmul: ... In a
    training loop, skip the parameters for which ..."."""
    assert pool.run(merged_in_place, 2) == [[], []]


def beside_adapters(folder: Path) -> list[str]:
    model, data = adapted("llama")
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    split.booster.save_lora_as_pretrained(split.model, str(folder))
    with mock.patch.object(logging.getLogger("pipeshard"), "warning") as warning:
        split.booster.checkpoint_io.save_model(split.model, str(folder), shard=True, merge=True)
    return texts_of(warning)


@pytest.mark.turns
def test_weights_beside_adapters_are_warned_of(pool: Pool, tmp_path: Path) -> None:
    """transformers finds the adapters in the folder, and applies them to the merged weights again, silently."""
    (said,), others = pool.run(beside_adapters, 2, tmp_path)
    assert "which from_pretrained will apply to the weights" in said and not others
    assert (tmp_path / "config.json").exists()


def beside_weights(folder: Path, base: bool, by_trainer: bool) -> list[str]:
    """Save adapters beside the weights of their base, or beside merged weights."""
    model: Any = zoo.build("llama")
    if base:
        model = PipelinePlugin.from_pretrained(transformers.AutoModelForCausalLM, folder)
    torch.manual_seed(0)
    model = booster().enable_lora(model.train(), lora_config=config("llama"))
    split = Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    if not base:
        split.booster.checkpoint_io.save_model(split.model, str(folder), shard=True, merge=True)
    with mock.patch.object(logging.getLogger("pipeshard"), "warning") as warning:
        if by_trainer:
            save_weights(split.model, folder)
        else:
            split.booster.save_lora_as_pretrained(split.model, str(folder))
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    data = zoo.batch("llama")
    assert not base or torch.allclose(split.evaluate(data)["loss"], loaded(**data).loss, atol=1e-6)
    return texts_of(warning)


@pytest.mark.parametrize("by_trainer", [False, True])
def test_adapters_beside_merged_weights_are_warned_of(pool: Pool, tmp_path: Path, by_trainer: bool) -> None:
    """transformers applies them to the merged weights, silently; beside the weights of their base, they are right.
    An error at the end of a run lost the adapters."""
    (said,), others = pool.run(beside_weights, 2, tmp_path / "merged", False, by_trainer)
    assert "contains weights" in said and "which from_pretrained will apply the adapters" in said and not others
    assert (tmp_path / "merged" / "adapter_config.json").exists()
    zoo.build("llama").save_pretrained(tmp_path / "base")
    assert pool.run(beside_weights, 2, tmp_path / "base", True, by_trainer) == [[], []]


# Models on meta


def of_folder_with_adapters(folder: Path, loads: bool, adds: bool = False) -> None:
    model, data = PipelinePlugin.from_pretrained(transformers.AutoModelForCausalLM, folder), zoo.batch("llama")
    if loads:
        model = enable_lora(model, str(folder), None, None)
    if adds:
        model = enable_lora(model, None, config("llama"), None)
    split = Split(model.train(), dist.get_world_size(), data, num_microbatches=2)
    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(split.evaluate(data)["loss"], whole(**data).loss, atol=1e-6)


@pytest.mark.turns
def test_adapters_of_a_models_folder_are_not_ignored(pool: Pool, tmp_path: Path) -> None:
    """transformers applies them, so training began with another model; the remedy loads them."""
    base: Any = zoo.build("llama")
    base.save_pretrained(tmp_path)
    get_peft_model(base, LoraConfig(target_modules=ATTENTION, init_lora_weights=False)).save_pretrained(str(tmp_path))
    for message in pool.run_expecting(CheckpointError, of_folder_with_adapters, 2, tmp_path, False):
        assert "contains adapters" in message and "booster.enable_lora(model, pretrained_dir=" in message
    for message in pool.run_expecting(CheckpointError, of_folder_with_adapters, 2, tmp_path, False, True):
        assert "contains adapters" in message and "booster.enable_lora(model, pretrained_dir=" in message
    pool.run(of_folder_with_adapters, 2, tmp_path, True)


BLANK: dict[str, dict[str, Any]] = {
    "random": {"target_modules": ATTENTION, "init_lora_weights": False},
    "gaussian": {"target_modules": ATTENTION, "init_lora_weights": "gaussian", "use_rslora": True},
    "dora": {"target_modules": ATTENTION, "init_lora_weights": False, "use_dora": True},
    "pissa": {"target_modules": ATTENTION, "init_lora_weights": "pissa"},
    "olora": {"target_modules": "all-linear", "init_lora_weights": "olora"},
    "pissa beside an embedding": {"target_modules": ["q_proj", "embed_tokens"], "init_lora_weights": "pissa"},
    "copied head": {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
    "copies": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


def of_folder(folder: Path, case: str, name: str = "llama") -> list[str]:
    """What differs, in three steps, from the model that one process loads before it gets its adapters."""
    fields = {"r": 4, "lora_alpha": 8, **BLANK[case]}
    torch.manual_seed(3)
    unsplit = Unsplit(get_peft_model(zoo.build(name), LoraConfig(**fields)), max_norm=0.5)
    state = torch.get_rng_state()
    model: Any = PipelinePlugin.from_pretrained(transformers.LlamaForCausalLM, folder).train()
    zoo.build(name)  # which seeds the generator, as above
    model = booster().enable_lora(model, lora_config=LoraConfig(**fields))
    assert torch.equal(state, torch.get_rng_state())
    assert model.peft_config["default"].init_lora_weights == fields.get("init_lora_weights", True)
    split = Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2, max_norm=0.5)
    found = [f"begins {error:.1e} off"] if (error := parameter_error(split, unsplit.model)) else []
    for seed in range(3):
        found += differences(split, unsplit, zoo.batch("llama", seed=seed), 1e-6 if seed == 0 else 1e-4)
        unsplit.step()
        split.step()
    return found if parameter_error(split, unsplit.model) < 1e-5 else [*found, "parameters differ"]


@pytest.mark.turns
@pytest.mark.parametrize(("case", "p"), covering(list(BLANK), [2, 3], strength=1))
def test_adapters_of_a_model_on_meta_are_those_of_the_loaded_one(pool: Pool, tmp_path: Path, case: str, p: int) -> None:
    """Every process had to load the whole model for its adapters, eight times 141 GB for 70 B on a host.

    peft begins an embedding's adapter as usual with `pissa`: the stage of the embedding raised a KeyError in boost.
    """
    zoo.build("llama").save_pretrained(tmp_path)
    assert pool.run(of_folder, p, tmp_path, case) == [[]] * p


PROMPTS: dict[str, Any] = {
    "prompts": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def prompts_of_folder(folder: Path, case: str) -> list[str]:
    """What differs, in two steps, from the model that one process loads before it gets its prompts."""
    base = zoo.build("llama")
    torch.manual_seed(3)
    unsplit = Unsplit(get_peft_model(base, PROMPTS[case]))
    model: Any = PipelinePlugin.from_pretrained(transformers.LlamaForCausalLM, folder).train()
    torch.manual_seed(3)
    model = enable_lora(model, None, PROMPTS[case], None)
    split = Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    found = differences(split, unsplit, zoo.batch("llama"), 1e-5)
    unsplit.step()
    split.step()
    return found + differences(split, unsplit, zoo.batch("llama", seed=1), 1e-4)


@pytest.mark.turns
@pytest.mark.parametrize("case", list(PROMPTS))
def test_prompts_of_a_model_on_meta_are_those_of_the_loaded_one(pool: Pool, tmp_path: Path, case: str) -> None:
    """Prompts were refused on meta, although random values need no weights. A quantized base, which is always on meta,
    therefore had no prompts."""
    zoo.build("llama").save_pretrained(tmp_path)
    assert pool.run(prompts_of_folder, 2, tmp_path, case) == [[], []]


@pytest.mark.turns
@pytest.mark.parametrize(("case", "is_saved"), [("copied head", False), ("copied head", True), ("copies", False)])
def test_the_copy_of_a_tied_head_begins_with_the_embedding(
    pool: Pool, tmp_path: Path, case: str, is_saved: bool
) -> None:
    """`modules_to_save=["lm_head"]` on a tied model on meta: the copy of the head got no values, and the first step
    asked for a load_model that did not help."""
    model: Any = zoo.build("llama-tied")
    model.save_pretrained(tmp_path)
    if is_saved:
        state = load_file(tmp_path / "model.safetensors")
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert pool.run(of_folder, 2, tmp_path, case, "llama-tied") == [[]] * 2


@pytest.mark.parametrize("case", ["dora", "pissa", "olora"])
def test_adapters_of_a_base_in_16_bits_begin_as_on_the_loaded_one(case: str) -> None:
    """peft computes these in the 16 bits of the base; stages computed them in fp32, so runs began with other values."""
    loaded = zoo.build("llama", dtype=torch.bfloat16)
    values = {name: parameter.detach().clone() for name, parameter in loaded.named_parameters()}
    torch.manual_seed(3)
    expected = dict(get_peft_model(loaded, LoraConfig(r=4, **BLANK[case])).named_parameters())
    with torch.device("meta"):
        model = zoo.build("llama", dtype=torch.bfloat16)
    torch.manual_seed(3)
    model = enable_lora(model, None, LoraConfig(r=4, **BLANK[case]), None)
    for full, name in base_names(model).items():
        if name in values:
            give(model.get_parameter(full), values[name])
    begin(model)
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def new_head(folder: Path) -> bool:
    """Whether a head that the folder lacks, and the copy of it that is trained, begin alike where they are held."""
    model: Any = PipelinePlugin.from_pretrained(transformers.BertForSequenceClassification, folder).train()
    model = booster().enable_lora(model, lora_config=LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    data = zoo.batch("bert") | {"labels": torch.arange(8) % 2}
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    heads = [p for name, p in split.held.items() if name.endswith("weight") and "classifier" in name]
    assert torch.isfinite(split.backward(data)["loss"])
    return not heads or (len(heads) == 2 and torch.equal(*heads) and bool(heads[0].any()))


@pytest.mark.turns
def test_a_new_head_is_drawn_once(pool: Pool, tmp_path: Path) -> None:
    base: Any = zoo.build("bert")
    base.base_model.save_pretrained(tmp_path)
    assert pool.run(new_head, 2, tmp_path) == [True, True]


def saved_adapters(folder: Path, name: str) -> list[str]:
    """What differs from one process where a model on meta gets adapters that were saved."""
    unsplit = Unsplit(PeftModel.from_pretrained(zoo.build(name), folder / "adapters", is_trainable=True))
    model: Any = PipelinePlugin.from_pretrained(transformers.LlamaForCausalLM, folder / "whole").train()
    model = booster().enable_lora(model, pretrained_dir=str(folder / "adapters"))
    split = Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    return differences(split, unsplit, zoo.batch("llama"))


@pytest.mark.turns
@pytest.mark.parametrize("case", ["dora", "embedding", "both embeddings"])
def test_saved_adapters_on_a_model_on_meta(pool: Pool, tmp_path: Path, case: str) -> None:
    """peft saves adapted embeddings with their base weights; the folder was refused as one without adapters."""
    model: Any = zoo.build(CASES[case][0])
    model.save_pretrained(tmp_path / "whole")
    if case == "both embeddings":
        model.lm_head.weight.data.mul_(2)  # as in one process, the values beside the adapters are those that count
    get_peft_model(model, config(case)).save_pretrained(tmp_path / "adapters")
    assert pool.run(saved_adapters, 2, tmp_path, CASES[case][0]) == [[], []]


def trained_copies(folder: Path, case: str) -> list[str]:
    """What differs from one process where a model on meta gets adapters with a trained head."""
    classes = transformers.LlamaConfig(**zoo.TINY, num_labels=3)
    kind, data = {
        "copied head": (transformers.LlamaForCausalLM, zoo.batch("llama")),
        "missing head": (
            transformers.LlamaForSequenceClassification,
            {"input_ids": zoo.batch("llama")["input_ids"], "labels": torch.arange(8) % 3},
        ),
    }[case]
    base = kind.from_pretrained(folder / "whole", config=classes)
    unsplit = Unsplit(PeftModel.from_pretrained(base, folder / "adapters", is_trainable=True))
    model: Any = PipelinePlugin.from_pretrained(kind, folder / "whole", num_labels=3).train()
    model = booster().enable_lora(model, pretrained_dir=str(folder / "adapters"))
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    return differences(split, unsplit, data)


@pytest.mark.turns
@pytest.mark.parametrize(("case", "copied"), [("copied head", "lm_head"), ("missing head", "score")])
def test_trained_copies_are_kept_when_the_base_is_loaded(pool: Pool, tmp_path: Path, case: str, copied: str) -> None:
    """Each stage that loaded its base weights also wrote them over the trained copies of the head; a head that the
    folder lacks was drawn anew, and its trained copy with it."""
    model = zoo.build("llama")
    model.save_pretrained(tmp_path / "whole")
    if case == "missing head":
        model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**zoo.TINY, num_labels=3))
    adapters: Any = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=[copied]))
    with torch.no_grad():
        adapters.get_submodule(f"base_model.model.{copied}.modules_to_save.default").weight.mul_(-2)
    adapters.save_pretrained(tmp_path / "adapters")
    assert pool.run(trained_copies, 2, tmp_path, case) == [[], []]


def statistics_of_a_copy(folder: Path, is_saved: bool) -> list[str]:
    """The buffers that differ from one process where a model on meta gets a trained head with running statistics."""
    loaded = NormedForImageClassification.from_pretrained(folder / "whole")
    model: Any = PipelinePlugin.from_pretrained(NormedForImageClassification, folder / "whole").train()
    if is_saved:
        unsplit = PeftModel.from_pretrained(loaded, folder / "adapters")
        model = booster().enable_lora(model, pretrained_dir=str(folder / "adapters"))
    else:
        unsplit = get_peft_model(loaded, copy.deepcopy(NORMED))
        model = booster().enable_lora(model, lora_config=copy.deepcopy(NORMED))
    split = Split(model, dist.get_world_size(), zoo.batch("vit"), num_microbatches=2)
    found = dict(split.model.unwrap().named_buffers())
    return [name for name, buffer in unsplit.named_buffers() if not torch.equal(buffer, found[name])]


@pytest.mark.turns
@pytest.mark.parametrize("is_saved", [False, True])
def test_the_copy_of_a_head_begins_with_its_running_statistics(pool: Pool, tmp_path: Path, is_saved: bool) -> None:
    """On a model on meta, the trained copy of a head had a mean of 0 and a variance of 1 instead of the statistics of
    the base model, or of the saved adapters."""
    model = with_normed_head()
    with torch.no_grad():
        model.classifier[0].running_mean.fill_(3)
    model.save_pretrained(tmp_path / "whole")
    adapters: Any = get_peft_model(model, copy.deepcopy(NORMED))
    with torch.no_grad():
        adapters.get_buffer(STATISTICS).fill_(5)
    adapters.save_pretrained(tmp_path / "adapters")
    assert pool.run(statistics_of_a_copy, 2, tmp_path, is_saved) == [[], []]


@pytest.mark.parametrize("how", ["pissa", "olora"])
def test_saved_adapters_that_change_the_base_are_refused_on_meta(tmp_path: Path, how: str) -> None:
    """Adapters that were begun by PiSSA or OLoRA trained on the unchanged base weights: another model."""
    get_peft_model(zoo.build("llama"), LoraConfig(target_modules=ATTENTION, init_lora_weights=how)).save_pretrained(
        tmp_path
    )
    with torch.device("meta"):
        model = zoo.build("llama")
    with pytest.raises(ConfigurationError, match=f"init_lora_weights='{how}'.*Load the model with its weights before"):
        enable_lora(model, str(tmp_path), None, None)


SMALL: dict[str, Any] = {  # what a config of peft needs to fit the tiny llama, if it has such a field
    "target_modules": ["q_proj", "o_proj", "down_proj"],
    "r": 4,
    "block_size": 4,
    "group_size": 4,
    "vector_length": 4,
    "n_frequency": 8,
    "total_step": 10,
}
NEEDED: dict[str, dict[str, Any]] = {
    "BOFT": {"boft_block_size": 4},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "OFT": {"r": 0, "oft_block_size": 4},
    "SHIRA": {"r": 2},
}
OTHERS = ("ADAMSS", "ADAPTION_PROMPT", "TRAINABLE_TOKENS", "XLORA")  # with more packages, or not on these layers


def compared_on_meta(kind: str, made: Any, folder: Path) -> list[str]:
    """The tensors that differ where saved adapters of this kind are loaded on a model on meta."""
    fields = {name: value for name, value in SMALL.items() if name in made.__dataclass_fields__}
    fields |= NEEDED.get(kind, {})
    get_peft_model(zoo.build("llama"), made(task_type="CAUSAL_LM", **fields)).save_pretrained(folder)
    loaded: Any = enable_lora(zoo.build("llama"), str(folder), None, None)
    with torch.device("meta"):
        model = zoo.build("llama")
    zoo.build("llama")  # which seeds the generator, as above
    blank: Any = enable_lora(model, str(folder), None, None)
    expected = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    found = {**dict(blank.named_parameters()), **dict(blank.named_buffers())}
    blanks = base_names(blank)  # whose values boost reads
    of_adapters = {name: value for name, value in expected.items() if name not in blanks or not found[name].is_meta}
    return [name for name, value in of_adapters.items() if found[name].is_meta or not torch.equal(found[name], value)]


@pytest.mark.turns
def test_saved_adapters_that_read_the_base_are_refused_on_meta(tmp_path: Path) -> None:
    """PSOFT, FRoD and OSF save trained tensors only: the rest was computed from zeros, without an error."""
    refused = set[str]()
    for kind, made in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        if issubclass(made, PromptLearningConfig) or kind.value in OTHERS:
            continue
        try:
            assert compared_on_meta(kind.value, made, tmp_path / kind.value) == [], kind
        except ConfigurationError as error:
            assert f"when peft loads saved {kind.value} adapters, it computes some of their tensors from" in str(error)
            refused.add(kind.value)
    assert refused == {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} & {"FROD", "OSF", "PSOFT"}


def test_more_adapters_of_a_model_on_meta() -> None:
    """TRL copies saved adapters to a reference, also on meta: the values of the copies were lost. New ones that peft
    computes from weights would be those of no weights."""
    with torch.device("meta"):
        model = zoo.build("llama")
    fields: dict[str, Any] = {"target_modules": ATTENTION, "modules_to_save": ["lm_head"], "init_lora_weights": False}
    model: Any = enable_lora(model, None, LoraConfig(**fields), None)
    with pytest.raises(UsageError, match="load the model with its weights, and call"):
        enable_lora(model, None, LoraConfig(**fields), None)
    with adding(model):
        model.add_adapter("copies", LoraConfig(**fields))
    added = {name: parameter.is_meta for name, parameter in model.named_parameters() if ".copies." in name}
    assert len(added) == 17 and [name for name, blank in added.items() if blank] == [
        "base_model.model.lm_head.modules_to_save.copies.weight"
    ]
    with adding(model):
        model.add_adapter("given", LoraConfig(**fields))
        model.get_submodule("base_model.model.lm_head.modules_to_save.given").weight.data.fill_(2)
    assert model.get_submodule("base_model.model.lm_head.modules_to_save.given").weight[0, 0] == 2
    for name, value in {"use_dora": True, "trainable_token_indices": [3]}.items():
        with pytest.raises(ConfigurationError, match="depend on weights, but the model is on meta"), adding(model):
            model.add_adapter(name, LoraConfig(**fields, **{name: value}))


@pytest.mark.parametrize("fields", [{"kasa_config": {"beta": 1e-4}}, {"layer_replication": [[1, 4], [0, 1]]}])
def test_adapters_that_make_another_base_are_refused_on_meta(tmp_path: Path, fields: dict[str, Any]) -> None:
    """KaSA truncates the weights of its layers when it is added, and `layer_replication` renumbers the layers: stages
    loaded the weights of the folder, of another model than in one process."""
    config = LoraConfig(r=4, target_modules=ATTENTION, **fields)
    get_peft_model(zoo.build("llama"), config).save_pretrained(tmp_path)
    for folder, given in ((None, LoraConfig(r=4, target_modules=ATTENTION, **fields)), (str(tmp_path), None)):
        with torch.device("meta"):
            model = zoo.build("llama")
        with pytest.raises(ConfigurationError, match=r"the model is on meta\. Load the model with its weights"):
            enable_lora(model, folder, given, None)


def test_an_initialization_that_changes_a_tied_weight_is_refused_on_meta() -> None:
    """peft changes the weight under both names. Only the stage of the head did, and the values of the embedding's stage
    then replaced its own: the head computed W + BA instead of W."""
    with torch.device("meta"):
        model = zoo.build("llama-tied")
    config = LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights="pissa")
    with pytest.raises(ConfigurationError, match=r"'pissa' changes .*lm_head.*tied to .*embed_tokens.*Load the model"):
        enable_lora(model, None, config, None)


def test_a_cast_of_the_base_on_meta_is_kept() -> None:
    """A Trainer's constructor that called `prepare_model_for_kbit_training` lost its cast: norms trained in bf16."""
    with torch.device("meta"):
        model = zoo.build("llama", dtype=torch.bfloat16)
    model = enable_lora(model, None, LoraConfig(target_modules=ATTENTION), None)
    with adding(model):
        norm = model.get_submodule("base_model.model.model.norm").float()
    assert norm.weight.is_meta and norm.weight.dtype == torch.float32


def on_a_blank(fields: dict[str, Any], **arguments: Any) -> None:
    with torch.device("meta"):
        model = zoo.build("llama")
    kind = PromptTuningConfig if "num_virtual_tokens" in fields else LoraConfig
    model = PipelinePlugin(2, num_microbatches=2).enable_lora(model, lora_config=kind(task_type="CAUSAL_LM", **fields))
    Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2, **arguments)


@pytest.mark.parametrize(
    ("fields", "arguments", "says"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, {}, "'pissa_niter_4' is not supported for a model on meta"),
        (
            {"num_virtual_tokens": 3, "prompt_tuning_init": "SAMPLE_VOCAB"},
            {},
            "the initial values of the adapter parameter prompt_encoder.default.embedding.weight depend on weights",
        ),
        ({"trainable_token_indices": [3]}, {}, "needs the values of the embedding"),
        ({"use_dora": True}, {"precision": "bf16"}, "the weights are cast or sharded before they are loaded"),
    ],
)
def test_adapters_that_need_more_than_their_layer_are_refused(
    pool: Pool, fields: dict[str, Any], arguments: dict[str, Any], says: str
) -> None:
    targets = {} if "num_virtual_tokens" in fields else {"target_modules": ATTENTION}
    for message in pool.run_expecting(ConfigurationError, on_a_blank, 2, targets | fields, **arguments):
        assert says in message


def frozen() -> None:
    model, data = adapted("llama")
    model.requires_grad_(False)
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    assert torch.isfinite(split.evaluate(data)["loss"])
    split.backward(data)


@pytest.mark.turns
def test_training_with_every_parameter_frozen_is_refused(pool: Pool) -> None:
    for message in pool.run_expecting(UsageError, frozen, 2):
        assert "nothing to train" in message and "is_trainable=True" in message


def mistakes(folder: Path) -> list[str]:
    """Each mistake in turn; afterwards what was saved before is there, and a step is exact."""
    model, data = adapted("llama")
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    plain = Split(zoo.build("llama"), dist.get_world_size(), data, num_microbatches=2)
    enable, save = split.booster.enable_lora, split.booster.save_lora_as_pretrained
    lora, gpt2 = config("llama"), config("gpt2")
    (folder / "file").touch()
    (folder / "other").mkdir(exist_ok=True)
    (folder / "other" / "notes").touch()
    save(split.model, str(folder / "good"))
    before = load_file(folder / "good" / "adapter_model.safetensors")
    attempts: list[tuple[type[Exception], Any]] = [
        (UsageError, lambda: enable(split.model, lora_config=lora)),
        (UsageError, lambda: enable(split.model.unwrap(), lora_config=lora)),
        (ConfigurationError, lambda: enable(zoo.build("llama"), lora_config=lora, quantize=True)),
        (ConfigurationError, lambda: enable(zoo.build("llama"), lora_config=gpt2)),
        (CheckpointError, lambda: enable(zoo.build("llama"), pretrained_dir=str(folder / "other"))),
        (CheckpointError, lambda: enable(zoo.build("gpt2"), pretrained_dir=str(folder / "good"))),
        (CheckpointError, lambda: enable(deeper(), pretrained_dir=str(folder / "good"))),
        (CheckpointError, lambda: save(plain.model, str(folder / "new"))),
        (CheckpointError, lambda: save(split.model.unwrap(), str(folder / "new"))),
        (CheckpointError, lambda: save(split.model, str(folder / "file"))),
        (CheckpointError, lambda: failing(lambda: save(split.model, str(folder / "good")))),
    ]
    messages = []
    for kind, attempt in attempts:
        with pytest.raises(kind) as caught:
            attempt()
        messages.append(str(caught.value))
        dist.barrier()
    after = load_file(folder / "good" / "adapter_model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not differences(split, unsplit, data, num_microbatches=2)
    return messages


def saving_beside(folder: Path) -> None:
    model, data = adapted("only the first layer")
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    if dist.get_rank() == 0:
        folder.mkdir()
        (folder / "tokenizer.json").write_text("mine")
    dist.barrier()
    for epoch in range(2):
        split.booster.save_lora_as_pretrained(split.model, str(folder))
        if dist.get_rank() == 0 and epoch == 0:
            (folder / "checkpoint-3").mkdir()
            (folder / "checkpoint-3" / "optimizer.pt").write_text("a state")
            card = folder / "README.md"
            card.write_text(card.read_text() + "\nTrained on my data.\n")
        dist.barrier()


@pytest.mark.turns
def test_adapters_are_saved_beside_other_files(pool: Pool, tmp_path: Path) -> None:
    """The second save of adapters removed all else in their folder: a tokenizer, checkpoints, an edited model card.
    The first was refused in a folder with a tokenizer."""
    pool.run(saving_beside, 2, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "mine"
    assert (tmp_path / "out" / "checkpoint-3" / "optimizer.pt").read_text() == "a state"
    assert "Trained on my data." in (tmp_path / "out" / "README.md").read_text()
    assert PeftModel.from_pretrained(zoo.build("llama-tied"), str(tmp_path / "out")).peft_config
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def failing(save: Any) -> None:
    """The disk of the first rank is full."""
    target = "peft.peft_model.safe_save_file" if dist.get_rank() == 0 else "os.nothing"
    with mock.patch(target, side_effect=OSError("disk full"), create=dist.get_rank() != 0):
        save()


def tied_adapters() -> None:
    config = LoraConfig(target_modules=["embed_tokens"], ensure_weight_tying=True)
    Split(get_peft_model(zoo.build("llama-tied"), config), 2, zoo.batch("llama"), num_microbatches=2)


@pytest.mark.turns
def test_tied_adapters_of_several_stages_are_refused(pool: Pool) -> None:
    """peft ties the adapters of the embedding and the head: one is the other transposed. The advice was to make
    them one parameter, but their shapes differ."""
    for message in pool.run_expecting(ConfigurationError, tied_adapters, 2):
        assert "omit ensure_weight_tying=True" in message


MIXING: dict[str, Any] = {
    "velora": LoraConfig(target_modules=ATTENTION, init_lora_weights=False, velora_config={"num_groups": 4}),
    "lily": LilyConfig(r=4, target_modules=ATTENTION, init_weights=False, num_B=2),
}


def mixing_samples(kind: str) -> None:
    Split(get_peft_model(zoo.build("llama"), MIXING[kind]), 2, zoo.batch("llama"), num_microbatches=2)


@pytest.mark.turns
@pytest.mark.parametrize("kind", MIXING)
def test_adapters_that_mix_samples_are_found_by_the_proof(pool: Pool, kind: str) -> None:
    """VeLoRA's backward and Lily's router use the mean of all tokens in a microbatch. A class of docs/parity.md counted
    as exact with any adapters, so gradients differed from those of the whole batch, without an error."""
    for message in pool.run_expecting(VerificationError, mixing_samples, 2, kind):
        assert "num_microbatches=1" in message


KNOWN: dict[str, Any] = {
    "modules_to_save": LoraConfig(target_modules=ATTENTION, modules_to_save=["lm_head"]),
    "dora": LoraConfig(target_modules=ATTENTION, use_dora=True),
    "alora": LoraConfig(target_modules=ATTENTION, alora_invocation_tokens=[1]),
    "ia3": IA3Config(target_modules=ATTENTION, feedforward_modules=[]),
    "trained tokens": LoraConfig(target_modules=ATTENTION, trainable_token_indices=[1, 2]),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def test_which_adapters_are_known() -> None:
    """With a peft without LoRA variants, a boost with LoRA raised AttributeError."""
    for name, config in KNOWN.items():
        assert is_known(get_peft_model(zoo.build("llama"), config), None), name
    for config in (*MIXING.values(), LoHaConfig(target_modules=ATTENTION)):
        assert not is_known(get_peft_model(zoo.build("llama"), config), None)
    older = get_peft_model(zoo.build("llama"), LoraConfig(target_modules=ATTENTION))
    for layer in older.modules():
        vars(layer).pop("lora_variant", None)
    assert is_known(older, None)


def deeper() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**zoo.TINY, "num_hidden_layers": 6}))


@pytest.mark.turns
@pytest.mark.processes
def test_mistakes_are_refused_on_every_rank_and_harm_nothing(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(mistakes, 2, tmp_path)
    assert first == second
    for message, what in zip(
        first,
        [
            "already boosted: call booster.enable_lora(model, ...) before booster.boost",
            "already has adapters",
            "quantize=True",
            "adapters of this lora_config to LlamaForCausalLM",
            "other has no adapter for this LlamaForCausalLM",
            "good has no adapter for this GPT2LMHeadModel",
            "missing adapter keys",
            "this LlamaForCausalLM is not a boosted model with adapters",
            "this PeftModel",
            "file is a file",
            "disk full",
        ],
        strict=True,
    ):
        assert what in message


def test_a_gguf_file_has_the_weights_of_a_model_with_adapters(tmp_path: Path) -> None:
    """transformers knows a file's tensors by the model's names, which were those of layers with adapters: the base of
    these was initialized at random, and trained from a loss of 36."""
    gguf = pytest.importorskip("gguf")
    model = zoo.build("llama", layers=1)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for key, value in model.state_dict().items():
        writer.add_tensor(f"{names.get_name(key.removesuffix('.weight'))}.weight", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shapes = StoredTensors(tmp_path / "model.gguf", model).shapes
    assert shapes == {key: tuple(value.shape) for key, value in model.state_dict().items()}
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    assert StoredTensors(tmp_path / "model.gguf", adapted).shapes == shapes
