"""Tests of training memory: what a plan counts in addition to the parameters equals what ranks hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from pipeshard import AutoConfig, PipelinePlugin, plan
from pipeshard.batch.read import read_batch
from pipeshard.config import PipelineConfig
from pipeshard.distributed.collectives import local
from pipeshard.engine.grad_sync import BUCKET
from pipeshard.errors import ConfigurationError, PartitionError
from pipeshard.planner.memory import Memory, Training
from pipeshard.planner.models import QUANTIZATIONS
from pipeshard.planner.plan import Estimate
from pipeshard.planner.planner import study
from pipeshard.split.materialize import is_released
from pipeshard.split.packed import packed_layers
from tests import zoo
from tests.engine.test_data_parallel import with_fused_head
from tests.pool import Pool

ROWS, LENGTH = 8, 12
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"precision": "bf16"}),
    (2, {"precision": "fp16", "optimizer": "sgd"}),
    (4, {"dp_size": 2, "zero_stage": 1}),
    (4, {"dp_size": 2, "zero_stage": 1, "precision": "bf16"}),
    (4, {"dp_size": 2, "fsdp": True, "precision": "bf16"}),
    (4, {"tp_size": 2}),
    (4, {"tp_size": 2, "precision": "bf16"}),
]


def held(options: dict[str, Any]) -> tuple[Memory, dict[str, int]]:
    """What the plan says that this rank takes, and what it holds after a step."""
    batch = zoo.batch("llama", ROWS, LENGTH)
    name = options.pop("optimizer", "adamw")
    planned = plan(zoo.build("llama"), batch, 2, num_microbatches=4, schedule="1f1b", optimizer=name, **options)
    counts = list(planned.counts)
    plugin = PipelinePlugin(2, num_microbatches=4, dry_run_input=batch, partition=counts, verify=False, **options)
    model = zoo.build("llama")
    kinds = {"adamw": torch.optim.AdamW, "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, kinds[name](model.parameters()))
    booster.execute_pipeline(iter([batch]), boosted, None, optimizer)
    gradients = sum(local(w.parameter.grad).nbytes for w in optimizer.weights.values() if w.parameter.grad is not None)
    optimizer.step()
    states = [value for state in optimizer.optim.state.values() for value in state.values()]
    weights = optimizer.weights.values()
    values = [w.master for w in weights if w.master.dtype != w.parameter.dtype]
    found = {
        "parameters": sum(local(w.parameter).nbytes for w in weights),
        "gradients": gradients,
        "values": sum(value.nbytes for value in values),
        "optimizer": sum(value.nbytes for value in states if isinstance(value, Tensor) and value.ndim),
    }
    return planned.estimate.memory[plugin.stage_manager.stage], found


@pytest.mark.turns
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("ranks", "options"), LAYOUTS, ids=str)
def test_what_is_planned_is_held(pool: Pool, ranks: int, options: dict[str, Any]) -> None:
    """Gradients, values and states were counted in the parameters' dtype: 8 bytes of the 18 that a parameter takes with
    AdamW in bf16."""
    found = pool.run(held, ranks, options)[:: options.get("tp_size", 1)]  # the first slices are the largest
    for planned, measured in found:
        if options.get("fsdp"):  # between steps nothing is whole
            whole = measured["parameters"] + measured["gradients"]
            assert planned.values == pytest.approx(measured["parameters"], rel=0.02)
            assert planned.gradients / 2 + planned.values == pytest.approx(whole, rel=0.02)
        else:
            alike = ("parameters", "gradients") if options.get("zero_stage") else ("parameters", "gradients", "values")
            assert {name: getattr(planned, name) for name in alike} == {name: measured[name] for name in alike}
    for name in ("optimizer",) if options.get("fsdp") else ("optimizer", "values"):  # ZeRO's parts are not all equal
        taken = sum(measured[name] for _, measured in found)
        assert sum(getattr(planned, name) for planned, _ in found) == pytest.approx(taken, rel=0.01)


def adapted() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = get_peft_model(zoo.build("llama"), LoraConfig(target_modules=["q_proj", "v_proj"]))
    return model


def test_adapters_alone_have_gradients_and_states() -> None:
    """And the activations that are kept for what is frozen are fewer."""
    model, batch = adapted(), zoo.batch("llama", ROWS, LENGTH)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    memories = plan(model, batch, 2, num_microbatches=4, schedule="1f1b").estimate.memory
    assert sum(memory.parameters for memory in memories) == sum(p.nbytes for p in model.parameters())
    assert sum(memory.gradients for memory in memories) == trained
    assert sum(memory.optimizer for memory in memories) == 2 * trained
    whole = plan(zoo.build("llama"), batch, 2, num_microbatches=4, schedule="1f1b").estimate.memory
    assert sum(memory.always for memory in memories) < sum(memory.always for memory in whole) / 2


def sharded() -> tuple[int, int]:
    """The bytes of the shards of adapters and their 16-bit base that the plan says that a rank has, and that it has."""
    torch.manual_seed(0)
    batch, config = zoo.batch("llama", ROWS, LENGTH), LoraConfig(target_modules="all-linear")
    model: nn.Module = get_peft_model(zoo.build("llama", torch.bfloat16), config)
    options: dict[str, Any] = {"num_microbatches": 2, "dp_size": 2, "fsdp": True, "precision": "bf16"}
    planned = plan(model, batch, 1, schedule="1f1b", **options).estimate.memory[0]
    booster = Booster(plugin=PipelinePlugin(1, dry_run_input=batch, verify=False, **options))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    boosted, *_ = booster.boost(model, torch.optim.AdamW(trained))
    return planned.values, sum(local(parameter).nbytes for parameter in boosted.unwrap().parameters())


@pytest.mark.turns
@pytest.mark.local
def test_shards_of_a_frozen_base_are_planned_in_its_dtype(pool: Pool) -> None:
    """With `fsdp`, the shards of a frozen 16-bit base were planned in fp32, twice what a rank has: a plan for adapters
    of a large model was refused that fits."""
    for planned, measured in pool.run(sharded, 2):
        assert planned == pytest.approx(measured, rel=0.05)


def packed(folder: Path, kind: str) -> tuple[Memory, dict[str, int]]:
    """What the plan says that this rank takes of adapters on packed weights, and what it holds after a step."""
    batch, config = zoo.batch("llama", ROWS, LENGTH), BitsAndBytesConfig(**QUANTIZATIONS[kind])
    whole = PipelinePlugin.from_pretrained(type(zoo.build("llama")), folder, quantization_config=config).train()
    booster = Booster(plugin=PipelinePlugin(2, num_microbatches=4, dry_run_input=batch))
    model = booster.enable_lora(whole, lora_config=LoraConfig(r=4, target_modules="all-linear"))
    planned = plan(model, batch, 2, num_microbatches=4, schedule="1f1b")
    trained = [p for p in model.parameters() if p.requires_grad]
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(trained))
    booster.execute_pipeline(iter([batch]), boosted, None, optimizer)
    gradients = sum(p.grad.nbytes for p in trained if p.grad is not None)
    optimizer.step()
    states = [value for state in optimizer.optim.state.values() for value in state.values()]
    scales = sum(layer.scales for _, layer in packed_layers(boosted.unwrap()) if not is_released(layer.weight))
    return planned.estimate.memory[dist.get_rank()], {
        "parameters": sum(p.nbytes for p in boosted.pipeline.held_parameters()) + scales,
        "gradients": gradients,
        "optimizer": sum(value.nbytes for value in states if value.ndim),
    }


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.local
@pytest.mark.parametrize("kind", list(QUANTIZATIONS))
def test_packed_weights_take_what_is_planned(pool: Pool, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    zoo.build("llama").save_pretrained(tmp_path)
    for planned, measured in pool.run(packed, 2, tmp_path, kind):
        assert {name: getattr(planned, name) for name in measured} == measured


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_trainer_keeps_the_states_of_embeddings_in_fp32(tmp_path: Path, name: str) -> None:
    """`optim="adamw_bnb_8bit"` was planned with 8-bit states of the embedding, although the Trainer has bitsandbytes
    keep them in 32 bits: a run that was planned to fit ran out of memory in its first step."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    sizes = zoo.TINY | {"vocab_size": 1024, "num_hidden_layers": 1, "intermediate_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    ids = torch.arange(4 * LENGTH).view(4, LENGTH)
    plain, in_trainer = (
        plan(model, {"input_ids": ids, "labels": ids}, 1, num_microbatches=2, optimizer=f"{kind}{name}_8bit")
        for kind in ("", "trainer_")
    )
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 1, "report_to": "none", "use_cpu": True}
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), optim=f"{name}_8bit", save_strategy="no", **settings),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    )
    try:
        trainer.train()
    finally:
        bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()
    kept = ("state1", "state2", "absmax1", "absmax2")
    states = [state[key] for state in trainer.optimizer.state.values() for key in kept if key in state]
    assert in_trainer.estimate.memory[0].optimizer == sum(state.nbytes for state in states)
    assert in_trainer.estimate.memory[0].optimizer > 1.5 * plain.estimate.memory[0].optimizer


def slices(name: str, by: str, *changes: Callable[[Any], nn.Module]) -> dict[str, tuple[int, int]]:
    """Of every parameter here, how many numbers a rank is said to have, and has."""
    model, batch = zoo.build(name), zoo.batch(name, ROWS, LENGTH)
    for change in changes:
        model = change(model)
    microbatch = read_batch(model, batch).split(num_microbatches=2)[0]
    sizes = study(model, microbatch, None, None, "uniform", Training(**{by: 2}), None).forms.sliced
    named = {key: sizes.get(parameter, parameter.numel()) for key, parameter in model.named_parameters()}
    booster = Booster(plugin=PipelinePlugin(1, **{by: 2}, num_microbatches=2, dry_run_input=batch, verify=False))
    boosted, *_ = booster.boost(model)
    return {key: (named[key], local(p).numel()) for key, p in boosted.unwrap().named_parameters()}


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "by"), [(name, "tp_size") for name in ("llama-tied", "mixtral", "t5", "bert")] + [("mixtral", "ep_size")]
)
def test_what_is_said_to_be_sliced_is(pool: Pool, name: str, by: str) -> None:
    """By plans of the architecture's own and of its policy; fused weights and experts too."""
    first, second = pool.run(slices, 2, name, by)
    assert all(said == there for said, there in first.values()), first
    assert all(said >= there for said, there in second.values()), second
    for found in (first, second):
        assert sum(there for _, there in found.values()) < sum(p.numel() for p in zoo.build(name).parameters())


@pytest.mark.turns
def test_what_glue_reads_is_said_to_be_whole(pool: Pool) -> None:
    """A plan for TRL halved the tied embedding, which no rank can shard."""
    for found in pool.run(slices, 2, "llama-tied", "tp_size", with_fused_head):
        said, there = found["model.embed_tokens.weight"]
        assert said == there == zoo.VOCABULARY * 32
        assert all(said >= there for said, there in found.values()), found


def test_the_end_of_a_step_counts_where_it_takes_more() -> None:
    """AdamW's roots of all second moments, and with replicas two messages, when there are no activations any more."""
    model, batch = zoo.build("llama"), zoo.batch("llama", 4, 2)
    (memory,) = plan(model, batch, 1, num_microbatches=4, schedule="1f1b").estimate.memory
    assert memory.update == memory.gradients > memory.activations
    assert memory.total == memory.always + memory.update
    (momentum,) = plan(model, batch, 1, num_microbatches=4, schedule="1f1b", optimizer="sgd").estimate.memory
    assert momentum.update == 0 and momentum.total == momentum.always + momentum.backward
    training = Training("adamw", dp_size=4, zero_stage=1)
    assert training.update(2**30) == 2**28 and training.update(2**20) == 2**20 and training.update(2**27) == 2 * BUCKET
    limit = memory.total
    assert plan(model, batch, 1, num_microbatches=4, device_memory=limit).estimate.fits
    with pytest.raises(PartitionError, match="update"):
        plan(model, batch, 1, num_microbatches=4, device_memory=limit - 1)


def test_json_has_every_option_that_was_counted() -> None:
    options: dict[str, Any] = {"precision": "bf16", "dp_size": 2, "zero_stage": 1, "tp_size": 2, "optimizer": "sgd"}
    made = plan(zoo.build("llama"), zoo.batch("llama", ROWS, LENGTH), 2, num_microbatches=4, **options)
    counted = json.loads(made.to_json())["training"]
    assert counted == {**options, "ep_size": 1, "fsdp": False, "offload": None}
    assert str(made.training) == "optimizer sgd, precision bf16, 2 replicas, zero_stage=1, tp_size 2"


def test_eighteen_bytes_a_parameter() -> None:
    """And two of one that is frozen."""
    model = zoo.build("llama")
    (stage,) = plan(model, zoo.batch("llama", ROWS, LENGTH), 1, num_microbatches=4, precision="bf16").stages
    memory, count = stage.memory, sum(p.numel() for p in model.parameters())
    assert memory.always == 18 * count
    assert plan(model, zoo.batch("llama", ROWS, LENGTH), 1, num_microbatches=4).stages[0].kept > 1.6 * stage.kept
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.lm_head.weight)
    frozen = plan(model, zoo.batch("llama", ROWS, LENGTH), 1, num_microbatches=4, precision="bf16").stages[0].memory
    assert frozen.always == 2 * count + 16 * model.lm_head.weight.numel()


def test_layouts_of_ranks_that_slice() -> None:
    model, batch = zoo.build("llama"), zoo.batch("llama", ROWS, LENGTH)
    found = AutoConfig.choose(model, batch, 4, 8, 2, tp_size=2)
    assert found.arguments["tp_size"] == 2 and found.ranks == 4
    assert {(c.layout.pp_size, c.layout.dp_size) for c in found.considered} == {(1, 2), (2, 1)}
    whole = AutoConfig.choose(model, batch, 2, 8, 2)
    assert "tp_size" not in whole.arguments
    assert min(c.estimate.peak for c in found.considered) < min(c.estimate.peak for c in whole.considered)
    with pytest.raises(ConfigurationError, match="tp_size=2 does not divide ranks=3: use a divisor"):
        AutoConfig.choose(model, batch, 3, 8, 2, tp_size=2)


def test_a_layout_is_chosen_by_what_its_replicas_take() -> None:
    """States are divided by as many replicas as the layout has."""
    model, batch = zoo.build("llama"), zoo.batch("llama", ROWS, LENGTH)
    found = {zero: AutoConfig.choose(model, batch, 4, 8, 2, precision="bf16", zero_stage=zero) for zero in (0, 1)}
    peaks = {zero: {c.layout.dp_size: c.estimate.peak for c in config.considered if not c.estimate.problem}
             for zero, config in found.items()}  # fmt: skip
    assert peaks[0][1] == peaks[1][1] and peaks[1][4] < peaks[0][4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf8"}, "precision='bf8' is unknown"),
        ({"zero_stage": 2}, "zero_stage=2 is not supported: a pipeline accumulates"),
        ({"dp_size": 0}, "dp_size must be a positive integer, got 0"),
        ({"tp_size": 0}, "tp_size must be a positive integer, got 0"),
        ({"tp_size": 3}, "tp_size=3 does not divide num_attention_heads"),
    ],
)
def test_what_the_plugin_would_refuse_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(zoo.build("llama"), zoo.batch("llama", ROWS, LENGTH), 2, num_microbatches=4, **options)


def accepted(estimate: Estimate, pp_size: int, dp_size: int, options: dict[str, Any]) -> bool:
    try:
        PipelineConfig(
            pp_size=pp_size,
            dp_size=dp_size,
            num_microbatches=4,
            schedule=estimate.schedule,
            num_model_chunks=estimate.num_model_chunks,
            **options,
        )
    except ConfigurationError:
        return False
    return True


@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("divided", [{}, {"zero_stage": 1}, {"fsdp": True}], ids=str)
def test_what_is_recommended_is_what_the_plugin_accepts(divided: dict[str, Any], tp_size: int, precision: str) -> None:
    """A plan with fsdp showed other steps than the plugin ran."""
    model, batch = zoo.build("llama"), zoo.batch("llama", ROWS, LENGTH)
    options: dict[str, Any] = {"tp_size": tp_size, "precision": precision, **divided}
    made = plan(model, batch, 2, num_microbatches=4, dp_size=2, **options)
    assert all(accepted(estimate, 2, 2, options) for estimate in made.schedules)
    assert made.recommended == made.estimate.name and accepted(made.estimate, 2, 2, options)
    assert made.estimate.time == pytest.approx(made.simulate().makespan)
    chosen = AutoConfig.choose(model, batch, 4 * tp_size, 8, 2, **options)
    PipelineConfig(**chosen.arguments, **{name: value for name, value in options.items() if name != "tp_size"})
    for each in chosen.considered:
        assert accepted(each.estimate, each.layout.pp_size, each.layout.dp_size, options)


def test_a_step_is_simulated_as_the_plugin_runs_it() -> None:
    """With slices the gradients of the last microbatches do not leave before W."""
    model, batch = zoo.build("llama"), zoo.batch("llama", ROWS, LENGTH)
    times = [plan(model, batch, 2, num_microbatches=4, schedule="1f1b", tp_size=n).estimate.time for n in (1, 2)]
    assert times[0] < times[1]
