"""Tests of the plugin in the real Booster: its contract, and one clear error on every rank if something cannot work."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import nn
from torch.utils.data import Dataset

import pipeshard
from pipeshard import P2P, PipelinePlugin, Policy, register_policy
from pipeshard.checkpoint.io import io_of
from pipeshard.compat import INSTEAD, SPEED
from pipeshard.config import PipelineConfig
from pipeshard.errors import (
    BatchError,
    CheckpointError,
    ConfigurationError,
    PartitionError,
    PipeshardError,
    TraceError,
    UsageError,
)
from pipeshard.split.policy import find_policy
from tests import zoo
from tests.hunt import nets
from tests.messages import assert_told
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, differences, parameter_error

pytestmark = pytest.mark.local


def three_stages() -> None:
    PipelinePlugin(pp_size=3, num_microbatches=2)


def test_more_stages_than_processes(pool: Pool) -> None:
    for message in pool.run_expecting(ConfigurationError, three_stages, 2):
        assert _matches("pp_size=3, but the world has 2 processes.*torchrun --nproc-per-node 3", message)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"pp_size": 0}, "pp_size, the number of ranks in a pipeline, must be a positive integer, got 0"),
        ({"microbatch_size": 2}, "num_microbatches=2 and microbatch_size=2: pass exactly one"),
        ({"num_microbatches": 0}, "num_microbatches must be a positive integer, got 0"),
        ({"schedule": "1fb1"}, "unknown schedule '1fb1': did you mean '1f1b'"),
        ({"p2p": "nccl"}, r"p2p must be one of \['broadcast', 'isend'\] .* got 'nccl'"),
        ({"p2p": P2P}, "p2p must be one of .* with send and receive, got"),
        ({"policy": nn.Linear}, "policy must be a subclass of pipeshard.Policy"),
        ({"loss_reduction": "mean"}, "loss_reduction must be 'token', 'batch' or 'microbatch', got 'mean'"),
        (
            {"gradient_clipping": 1.0},
            "has no argument gradient_clipping: the known names are pp_size, num_microbatches",
        ),
        ({"micro_batch_size": 1}, "has no argument micro_batch_size: did you mean microbatch_size"),
        ({"sp_size": 2}, "sp_size=2 is a ColossalAI argument that is not supported: sequences are not sharded"),
        (
            {"pp_style": "zbv", "schedule": "gpipe"},
            "schedule='gpipe' and pp_style='zbv' differ: pass only one of the two",
        ),
    ],
)
def test_wrong_arguments(given: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PipelinePlugin(**{"pp_size": 2, "num_microbatches": 2, **given})
    assert _matches(what, str(caught.value))


def test_the_config_has_the_arguments_of_the_plugin() -> None:
    ours = {
        name: parameter.default
        for name, parameter in inspect.signature(PipelinePlugin).parameters.items()
        if name not in ("positional", "foreign")
    }
    defaults = {field.name: field.default for field in fields(PipelineConfig)}
    assert ours == defaults | {"pp_size": ours["pp_size"]} and defaults["pp_size"] is MISSING
    config = PipelineConfig(pp_size=2, num_microbatches=4, schedule="zbv")
    assert config.num_model_chunks == 2 and config.num_stages == 4 and config.placement == (0, 1, 1, 0) and config.is_v
    assert replace(config, microbatch_size=None) == config


def in_place_of_colossalai(name: str) -> dict[str, Any]:
    model, data = zoo.build(name), zoo.batch(name)
    plugin = PipelinePlugin(**{**OF_HYBRID_PARALLEL, "pp_size": dist.get_world_size()})
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.execute_pipeline(iter([data]), model, criterion, optimizer)
    groups = [dist.get_process_group_ranks(g) for g in (plugin.pp_group, plugin.dp_group, plugin.tp_group)]
    sizes = plugin.pp_size, plugin.dp_size, plugin.tp_size, plugin.pg_mesh.shape
    for missing in ("shard_config", "custom_policy", "scheduler", "sp_group", "zero_config"):
        assert not hasattr(plugin, missing)
        with pytest.raises(PipeshardError, match=f"plugin.{missing} is a ColossalAI attribute"):
            getattr(plugin, missing)
    axes = plugin.dp_axis, plugin.pp_axis, plugin.tp_axis
    assert plugin.precision == "fp16" and plugin.pp_style == plugin.schedule
    return {"groups": groups, "sizes": sizes, "axes": axes, "schedule": plugin.schedule}


# What ColossalAI's example that fine-tunes BERT passes, and what is said of all its other arguments.
OF_HYBRID_PARALLEL = {
    "tp_size": 1,
    "microbatch_size": 1,
    "pp_style": "interleaved",
    "num_model_chunks": 2,
    "enable_all_optimization": True,
    "zero_stage": 1,
    "precision": "fp16",
    "initial_scale": 1,
    "overlap_communication": False,
    "fp8_communication": True,
    "sp_size": 1,
    "custom_policy": None,
}


@pytest.mark.turns
def test_the_arguments_of_colossalai_s_plugin_are_known(pool: Pool) -> None:
    """Its names were TypeErrors, and groups and sizes that its scripts read AttributeErrors."""
    from colossalai.booster.plugin import HybridParallelPlugin

    theirs = dict(inspect.signature(HybridParallelPlugin).parameters)
    known = {*inspect.signature(PipelinePlugin).parameters, *SPEED, *INSTEAD, "pp_style"}
    assert len(theirs) == 46 and theirs.keys() <= known
    ours = {name: theirs[name].default for name in (*SPEED, *INSTEAD)}
    assert {name: SPEED.get(name) if name in SPEED else INSTEAD[name][0] for name in ours if name not in NOT_SAME} == {
        name: default for name, default in ours.items() if name not in NOT_SAME
    }
    for rank, said in enumerate(pool.run(in_place_of_colossalai, 2, "llama")):
        assert said["groups"] == [[0, 1], [rank], [rank]]
        assert said["sizes"] == (2, 1, 1, (1, 2, 1)) and said["axes"] == (0, 1, 2)
        assert said["schedule"] == "interleaved"


NOT_SAME = {"sp_size", "hysteresis"}  # None there means 1; 2 there, 1 here


def test_arguments_by_place_are_not_misread() -> None:
    """`HybridParallelPlugin(1, 2)` is tp_size and pp_size; here it was one stage and two microbatches."""
    with pytest.raises(
        ConfigurationError, match=r"takes only pp_size as a positional argument, got 1 more \(2\): pass"
    ):
        PipelinePlugin(1, 2)


def set_arguments() -> None:
    plugin = PipelinePlugin(pp_size=1, max_norm=1.0)
    for field in fields(PipelineConfig):
        before = getattr(plugin, field.name)
        with pytest.raises(UsageError, match=f"^plugin.{field.name} cannot be set: pass {field.name} to "):
            setattr(plugin, field.name, before)
        assert getattr(plugin, field.name) == before
    with pytest.raises(UsageError, match=r"clip_grad_by_norm\(limit\)"):
        plugin.max_norm = 0.5
    with pytest.raises(UsageError, match="pass pp_style to PipelinePlugin"):
        plugin.pp_style = "zbv"
    plugin.of_a_script = 1  # type: ignore[attr-defined]


def test_an_argument_that_is_set_on_the_plugin_is_refused(pool: Pool) -> None:
    """`plugin.max_norm = 0.5` was ignored, but read back as 0.5: a script trained without clipping."""
    pool.run(set_arguments, 1)


def boosting(data: Any = None, **given: Any) -> None:
    Split(zoo.build("llama"), dist.get_world_size(), data or zoo.batch("llama"), **{"num_microbatches": 2, **given})


@pytest.mark.turns
@pytest.mark.parametrize(
    ("given", "error", "what"),
    [
        ({"partition": "best"}, ConfigurationError, "partition='best' is unknown"),
        ({"partition": [7, 1]}, PartitionError, r"partition \[7, 1\]"),
        ({"partition": [7, 0]}, PartitionError, r"partition \[7, 0\]"),
        ({"partition": ["model.layers.9"]}, PartitionError, "partition names model.layers.9"),
        ({"data": {"input_ids": "text"}}, BatchError, "contains no tensor"),
        ({"data": {"pixels": torch.zeros(2, 3)}}, TraceError, "dry_run_input"),
    ],
)
def test_boosting_what_cannot_work(pool: Pool, given: dict[str, Any], error: type, what: str) -> None:
    for message in pool.run_expecting(error, boosting, 2, **given):
        assert _matches(what, message)


def too_many_stages() -> None:
    model = zoo.build("llama")
    model.model.layers = model.model.layers[:1]  # embedding, layer, norm, head
    model.config.num_hidden_layers = 1
    Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)


@pytest.mark.turns
def test_more_stages_than_units(pool: Pool) -> None:
    for message in pool.run_expecting(PartitionError, too_many_stages, 5):
        assert "fewer than pp_size=5. Use pp_size <= 4" in message


def mistakes() -> list[str]:
    """Every mistake in turn, and after all of them a step that is exact: nothing was harmed."""
    model = zoo.build("gpt2")
    unsplit = Unsplit(copy.deepcopy(model))
    data = zoo.batch("gpt2")
    split = Split(model, dist.get_world_size(), data, num_microbatches=3)
    execute, rank = split.booster.execute_pipeline, dist.get_rank()

    def run(batches: Any, criterion: Any = None) -> Any:
        return execute(batches, split.model, criterion, split.optimizer)

    other = zoo.batch("gpt2", seed=1) if rank == 1 else data
    shorter = zoo.batch("gpt2", length=9) if rank == 1 else data
    attempts = [
        lambda: split.model(**data),
        lambda: split.booster.backward(torch.zeros(()), split.optimizer),
        lambda: run(iter([])),
        lambda: run(iter([data] if rank == 0 else [])),
        lambda: run([data]),
        lambda: run(iter([{"input_ids": "text"}])),
        lambda: run(iter([{}])),
        lambda: run(iter([other])),
        lambda: run(iter([shorter])),
        lambda: run(iter([data]), lambda outputs, inputs: outputs.logits),
        lambda: run(iter([data]), lambda outputs, inputs: 1.0),
        lambda: run(iter([{k: v for k, v in data.items() if k != "labels"}])),
        lambda: execute(iter([data]), split.model.unwrap(), None, split.optimizer),
        lambda: split.plugin.execute_pipeline(iter([data]), split.model, None, split.optimizer, num_batches=0),
        lambda: split.plugin.execute_pipeline(iter([data]), split.model, num_batches=8 / 4),  # type: ignore[arg-type]
        lambda: split.booster.load_model(split.model, "nowhere"),
        lambda: split.booster.save_model(split.model.unwrap(), "nowhere"),
        lambda: run(iter([{**data, "labels": data["labels"].to("meta")} if rank else data])),
        lambda: (split.model.train(rank == 0), run(iter([data]))),
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(PipeshardError) as caught:
            attempt()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    split.model.train()
    assert not differences(split, unsplit, data, num_microbatches=3)
    return messages


@pytest.mark.turns
def test_mistakes_are_named_on_every_rank_and_harm_nothing(pool: Pool) -> None:
    expected = [
        r"UsageError: this process holds only a part of the model \(rank . of 2 in its pipeline.*use execute_pipeline",
        "UsageError: execute_pipeline already runs the backward pass",
        "BatchError: the data iterator is exhausted: create a new one",
        r"BatchError: (the data iterator is exhausted|stage 1 \(of 2 ranks\) got no usable batch)",
        r"BatchError: execute_pipeline expects .*batches, got an object of class list: pass iter\(dataloader\)",
        "BatchError: the batch contains no tensor with a batch dimension: it contains {'input_ids': 'str'}",
        "BatchError: the batch contains no tensor with a batch dimension: it contains nothing",
        "BatchError: the stages of one pipeline must read the same batch.*prepare_dataloader",
        "BatchError: the stages of one pipeline must read the same batch",
        r"ConfigurationError: the criterion returned a tensor of shape \(2, 12, 61\), not a scalar|shape \(2, 8, 61\)",
        "ConfigurationError: the criterion returned 1.0, not a scalar tensor",
        "UsageError: found no loss to train on: add labels to the batch, or pass a criterion",
        "UsageError: execute_pipeline got an instance of GPT2LMHeadModel: pass the model that booster.boost",
        "UsageError: num_batches must be a positive integer, got 0",
        "UsageError: num_batches must be a positive integer, got 2.0",
        "CheckpointError: nowhere does not exist",
        "CheckpointError: this GPT2LMHeadModel was not boosted",
        r"BatchError: .*labels: a tensor of shape \(.*\) is on the meta device, so it has no values: create it "
        "on the CPU",
        r"BatchError: .*\(stage 0\): .*model.train\(\); rank 1 \(stage 1\): .*model.eval\(\)",
    ]
    for messages in pool.run(mistakes, 2):
        assert_told(messages, expected)


class Unreadable(Iterator[Any]):
    """Batches of which one cannot be read."""

    def __init__(self, count: int, bad: int | None) -> None:
        self.batches = iter([zoo.batch("gpt2", seed=seed) for seed in range(count)])
        self.bad, self.count = bad, 0

    def __next__(self) -> Any:
        self.count += 1
        batch = next(self.batches)
        if self.count - 1 == self.bad:
            raise OSError("the file cannot be read")
        return batch


def one_rank_cannot_read() -> str:
    split = Split(zoo.build("gpt2"), dist.get_world_size(), zoo.batch("gpt2"), num_microbatches=2)
    batches = Unreadable(4, bad=0 if dist.get_rank() else None)
    with pytest.raises((PipeshardError, OSError)) as caught:
        split.plugin.execute_pipeline(batches, split.model, None, split.optimizer, num_batches=2)
    split.plugin.execute_pipeline(batches, split.model, None, split.optimizer, num_batches=2)
    return str(caught.value)


def test_a_rank_that_cannot_read_a_batch_reads_the_others_of_the_step(pool: Pool) -> None:
    """With num_batches=2, the rank on which the first batch failed had read one batch less than the others, and each
    later step of the epoch was refused, because its batches differed."""
    for message in pool.run(one_rank_cannot_read, 2):
        assert "the file cannot be read" in message


def contract() -> None:
    """What a Booster does around a plugin: schedulers, several groups, None for everything, a second boost."""
    model, p = zoo.build("gpt2", torch.float64), dist.get_world_size()
    unsplit = Unsplit(copy.deepcopy(model), max_norm=1.0)
    optimizers, schedulers = [], []
    for whole in (unsplit.model, model):
        matrices = [q for q in whole.parameters() if q.ndim > 1]
        groups = [{"params": matrices}, {"params": [q for q in whole.parameters() if q.ndim == 1], "weight_decay": 0.0}]
        optimizers.append(torch.optim.AdamW([*groups, {"params": []}], lr=1e-3))
        schedulers.append(torch.optim.lr_scheduler.LambdaLR(optimizers[-1], lambda step: 0.5**step))
    unsplit.optimizer = optimizers[0]

    split = object.__new__(Split)
    split.plugin = PipelinePlugin(pp_size=p, num_microbatches=2, max_norm=1.0)
    split.booster = Booster(plugin=split.plugin)
    boosted = split.booster.boost(model, optimizers[1], None, None, schedulers[1])
    assert len(boosted) == 5
    split.model, split.optimizer, _, _, scheduler = boosted
    assert scheduler is schedulers[1] and split.optimizer.unwrap() is optimizers[1]
    assert [len(group["params"]) > 0 for group in split.optimizer.param_groups] == [True, True, False]
    again, *rest = split.booster.boost(split.model)
    assert again is split.model and rest == [None] * 4

    for seed in range(3):
        found = differences(split, unsplit, zoo.batch("gpt2", seed=seed), tolerance=1e-5)
        assert not found, found
        unsplit.step()
        split.step()
        for s in schedulers:
            s.step()
    assert parameter_error(split, unsplit.model) < 1e-5
    out = split.booster.execute_pipeline(iter([zoo.batch("gpt2")]), split.model, None, None)
    assert out["outputs"] is None and out["loss"].shape == () and not out["loss"].requires_grad
    assert all(q.grad is None for q in split.model.parameters())  # without an optimizer there is no backward
    with torch.no_grad():
        nothing = split.booster.execute_pipeline(iter([zoo.batch("gpt2")]), split.model, None, None, return_loss=False)
    assert nothing == {"loss": None, "outputs": None}


@pytest.mark.turns
def test_the_booster_s_contract(pool: Pool) -> None:
    pool.run(contract, 2)


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) * (k + 3)) % zoo.VOCABULARY
        return {"input_ids": ids, "labels": ids}


def loading() -> list[list[int]]:
    """Two shuffled epochs through the pipeline; every rank starts with another random state."""
    torch.manual_seed(dist.get_rank())
    plugin = PipelinePlugin(pp_size=dist.get_world_size(), microbatch_size=2)
    dataloader = plugin.prepare_dataloader(Numbers(), batch_size=4, shuffle=True, seed=3)
    model, _, criterion, dataloader, _ = Booster(plugin=plugin).boost(
        zoo.build("llama"), None, lambda outputs, inputs: outputs.loss, dataloader
    )
    seen = []
    for _ in range(2):
        batches = list(dataloader)
        assert [len(batch["labels"]) for batch in batches] == [4, 4, 2]
        seen += [batch["input_ids"][:, 1].tolist() for batch in batches]
        for batch in batches:
            plugin.execute_pipeline(iter([batch]), model, criterion)
    return seen


@pytest.mark.turns
def test_every_stage_reads_the_same_batches_in_a_new_order_each_epoch(pool: Pool) -> None:
    ranks = pool.run(loading, 2)
    assert ranks[0] == ranks[1]
    assert ranks[0][:3] != ranks[0][3:]


def own_criterion() -> None:
    """Cross-entropy with a padding label, on the logits, given at boost, and another one given at the step."""
    data = zoo.batch("llama")
    data["labels"] = torch.where(data["labels"] < 0, 0, data["labels"])

    def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits.transpose(1, 2), inputs["labels"], ignore_index=0)

    def total(outputs: Any, inputs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits.transpose(1, 2), inputs["labels"], reduction="sum")

    model = zoo.build("llama")
    unsplit = copy.deepcopy(model)
    split = Split(model, dist.get_world_size(), data, num_microbatches=3)
    for one in (criterion, total, criterion):
        reference = one(unsplit(**data), data)
        loss = split.booster.execute_pipeline(iter([data]), split.model, one, split.optimizer)["loss"]
        assert float(loss) == pytest.approx(float(reference.detach()), rel=1e-6)


@pytest.mark.turns
def test_a_criterion_of_one_s_own_is_exact(pool: Pool) -> None:
    pool.run(own_criterion, 2)


class Backwards(Policy):
    def distribute_layers(self, num_layers: int, num_stages: int) -> list[int]:
        return [num_layers - num_stages + 1] + [1] * (num_stages - 1)


def with_policy() -> None:
    model = zoo.build("llama")
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2, policy=Backwards)
    assert not differences(split, unsplit, zoo.batch("llama"), num_microbatches=2)
    policy = split.model.pipeline.policy
    assert policy.stages == (0, 0, 0, 0, 0, 1, 2)
    assert [type(unit).__name__ for unit in policy.get_held_layers()][-1] in (
        "LlamaDecoderLayer",
        "LlamaRMSNorm",
        "Linear",
    )


@pytest.mark.turns
def test_a_policy_of_one_s_own_decides_the_cuts(pool: Pool) -> None:
    pool.run(with_policy, 3)


def test_policies_are_found_by_class_base_class_and_model_type() -> None:
    llama, bert = zoo.build("llama"), zoo.build("bert")
    assert find_policy(nn.Linear(1, 1)) is Policy
    assert find_policy(llama) is Policy and find_policy(bert).__name__ == "BertPolicy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeshard.split.policy._REGISTRY", {})
        register_policy("bert", type(llama).__mro__[1])(Backwards)
        assert find_policy(llama) is Backwards and find_policy(bert) is Backwards
        with pytest.raises(ConfigurationError, match="subclass of Policy"):
            register_policy("gpt2")(nn.Linear)  # type: ignore[type-var]


def partitions() -> list[tuple[int, ...]]:
    model, data = zoo.build("llama"), zoo.batch("llama")
    found = []
    for partition in ("auto", "uniform", "parameters", [1, 6], ["model.layers.1"]):
        split = Split(copy.deepcopy(model), dist.get_world_size(), data, num_microbatches=2, partition=partition)
        found.append(split.model.pipeline.policy.stages)
        split.backward(data)
    return found


@pytest.mark.turns
def test_partitions(pool: Pool) -> None:
    auto, uniform, parameters, counts, names = pool.run(partitions, 2)[0]
    assert sum(auto) in (3, 4) and sum(uniform) in (3, 4) and sum(parameters) in (3, 4)
    assert counts == (0, 1, 1, 1, 1, 1, 1)
    assert names == (0, 0, 0, 1, 1, 1, 1)


def saving(name: str, folder: str) -> None:
    """Save, sharded and not; load into another split of another initialisation; everything equal to the bit."""
    data, p = zoo.batch(name), dist.get_world_size()
    split = Split(zoo.build(name), p, data, num_microbatches=2)
    split.backward(data)
    split.step()
    split.booster.save_model(split.model, f"{folder}/sharded", shard=True)
    split.booster.save_model(split.model, f"{folder}/one.safetensors")
    for checkpoint in ("sharded", "one.safetensors"):
        other = Split(zoo.build(name, seed=1), p, data, num_microbatches=2)
        other.booster.load_model(other.model, f"{folder}/{checkpoint}")
        for key, parameter in other.held.items():
            assert torch.equal(parameter, split.held[key]), key
    torch.save({key: value.detach() for key, value in split.held.items()}, f"{folder}/held{dist.get_rank()}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_saved_model_is_what_plain_transformers_loads(pool: Pool, tmp_path: Path, name: str) -> None:
    pool.run(saving, 3, name, str(tmp_path))
    plain = type(zoo.build(name)).from_pretrained(tmp_path / "sharded")
    loaded = dict(plain.named_parameters())
    held: dict[str, torch.Tensor] = {}
    for rank in range(3):
        held |= torch.load(tmp_path / f"held{rank}", weights_only=True)
    assert held.keys() == loaded.keys()
    assert all(torch.equal(held[key], loaded[key]) for key in held)


def loading_wrong(folder: str) -> None:
    data = zoo.batch("llama")
    split = Split(zoo.build("llama"), dist.get_world_size(), data, num_microbatches=2)
    split.booster.load_model(split.model, folder)


@pytest.mark.turns
def test_a_checkpoint_that_does_not_fit_is_refused(pool: Pool, tmp_path: Path) -> None:
    zoo.build("gpt2").save_pretrained(tmp_path / "gpt2")
    for message in pool.run_expecting(CheckpointError, loading_wrong, 2, str(tmp_path / "gpt2")):
        assert "does not match LlamaForCausalLM: model.embed_tokens.weight is missing" in message
    (tmp_path / "bad").mkdir()
    index = '{"weight_map": {"lm_head.weight": "../gpt2/model.safetensors"}}'
    (tmp_path / "bad" / "model.safetensors.index.json").write_text(index)
    for message in pool.run_expecting(CheckpointError, loading_wrong, 2, str(tmp_path / "bad")):
        assert "may only list names of files in its own folder" in message
    (tmp_path / "cut").mkdir()
    whole = (tmp_path / "gpt2" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    for message in pool.run_expecting(CheckpointError, loading_wrong, 2, str(tmp_path / "cut")):
        assert "cannot be read as safetensors" in message


def _matches(pattern: str, message: str) -> bool:
    return re.search(pattern, message, re.DOTALL) is not None


def frozen(trained: str) -> None:
    """All parameters frozen but those with `trained` in their names; what cannot be reached sends no gradient."""
    model = zoo.build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=3)
    for seed in range(2):
        found = differences(split, unsplit, zoo.batch("llama", seed=seed), tolerance=1e-5)
        assert not found, found
        unsplit.step()
        split.step()
    assert parameter_error(split, unsplit.model) < 1e-5


@pytest.mark.turns
@pytest.mark.parametrize("trained", ["lm_head", "embed_tokens", "layers.1.mlp"])
def test_stages_with_nothing_to_train(pool: Pool, trained: str) -> None:
    pool.run(frozen, 3, trained)


def groups_of_models() -> list[int]:
    """The number of process groups after each of three models."""
    counts = []
    for _ in range(3):
        split = Split(zoo.build("gpt2"), 2, data := zoo.batch("gpt2"), num_microbatches=2, verify=False)
        split.backward(data)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


@pytest.mark.turns
def test_models_of_one_world_share_its_groups(pool: Pool) -> None:
    """A sweep in one process had four groups, twelve threads and the communicators of NCCL more with each model."""
    counts, others = pool.run(groups_of_models, 2)
    assert counts == others == counts[:1] * 3


def boosting_again() -> list[str]:
    """What is wrong when a model is boosted a second time, by another plugin."""
    data = zoo.batch("gpt2")
    first = Split(zoo.build("gpt2"), 2, data, num_microbatches=2)
    first.backward(data)
    engine = pipeshard.Engine(PipelinePlugin(pp_size=2, num_microbatches=4))
    errors = []
    for model, refused in ((first.model, "boosted with num_microbatches=2"), (first.model.module, "already boosted")):
        try:
            engine.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except PipeshardError as error:
            errors += [] if refused in str(error) else [str(error)]
        else:
            errors.append(f"not refused: {refused}")
    whole = pipeshard.to_sequential(first.model)
    model, optimizer, *_ = engine.boost(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    losses = [engine.execute_pipeline(iter([data]), model, None, optimizer)["loss"]]
    losses.append(first.evaluate(data)["loss"])
    return errors + ([] if abs(float(losses[0] - losses[1])) < 1e-6 else [str(losses)])


@pytest.mark.turns
def test_a_model_that_is_boosted_by_another_plugin_is_refused_and_the_remedy_works(pool: Pool) -> None:
    """The second plugin's microbatches and schedule were ignored. The inner model was said to differ between ranks."""
    assert pool.run(boosting_again, 2) == [[], []]


def running_a_cell_again(folder: Path) -> bool:
    """Whether a second plugin with the same arguments has the model of the first, and its saves."""
    data = zoo.batch("gpt2")
    arguments: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2, "dry_run_input": data}
    model: Any = zoo.build("gpt2")
    first = pipeshard.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
    first.save_model(first.model, str(folder / "model"), shard=True, use_async=True)
    again = pipeshard.initialize(first.model, first.optimizer, **arguments)
    assert (folder / "model" / "config.json").exists()
    again.execute_pipeline(iter([data]))
    assert again.plugin.recording().summary()
    with again.no_sync():
        again.execute_pipeline(iter([data]))
    again.plugin.sync_grads()
    return again.model is first.model and again.checkpoint_io is io_of(again.model)


@pytest.mark.processes
@pytest.mark.turns
def test_a_cell_that_boosts_a_boosted_model_runs_again(pool: Pool, tmp_path: Path) -> None:
    """The second plugin had no model, so its recording was refused, and its saves did not wait for those of the
    first."""
    assert pool.run(running_a_cell_again, 2, tmp_path) == [True, True]


def losses_in_two_worlds() -> list[float]:
    """The loss of a step in this world, and of the same step in the next world, with the same plugin."""
    data, found = nets.data(), []
    plugin = PipelinePlugin(pp_size=1, num_microbatches=2, dry_run_input=data)
    for is_first in (True, False):
        if not is_first:
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        torch.manual_seed(0)
        model = nets.Net()
        engine = pipeshard.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), plugin=plugin)
        found.append(float(engine.execute_pipeline(iter([data]))["loss"]))
        assert plugin.grid.world is dist.group.WORLD
    return found


@pytest.mark.processes
@pytest.mark.turns
def test_a_plugin_is_used_in_a_second_world(pool: Pool) -> None:
    """A script trained one model per fold, each in a process group of its own, with one plugin. The error of the
    second fold advised what the script had done: a new process group, and a new model."""
    [(first, second)] = pool.run(losses_in_two_worlds, 1)
    assert first == second
