"""Tests of data parallelism: replicas on parts of a batch train as one process does on the whole batch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from colossalai.booster import Booster
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from pipeshard import PipelinePlugin, to_sequential
from pipeshard.engine import grad_sync, reader, zero
from pipeshard.engine.weight_grad import Deferral
from pipeshard.errors import ConfigurationError
from pipeshard.split.policy import find_policy
from pipeshard.split.tensor_parallel import LatentProjection, plan_of, style_of
from tests import zoo
from tests.covering import covering
from tests.engine.test_expert_parallel import check_copies, noisy
from tests.graph.test_randomness import with_dropout
from tests.messages import texts_of
from tests.parity.build import batch, build
from tests.parity.entries import find
from tests.pool import Pool, WorkerError
from tests.test_exact import CHUNKS
from tests.unsplit import Split, Unsplit, compared, gradient_error, parameter_error


def split_of(name: str, p: int, model: Any, **options: Any) -> Split:
    options = {"num_microbatches": 2, "max_norm": 0.5, **options}
    return Split(model, p, zoo.part(zoo.batch(name), 0, [4, 4]), **options)


def replicas(name: str, p: int, schedule: str = "1f1b", steps: int = 5, **options: Any) -> None:
    """Some AdamW steps on batches whose labels, and at last whose samples, are spread unevenly over the replicas.

    Replicas and slices add up in another order, of which AdamW makes a difference: they are compared in fp64, in which
    heads and norms still compute in fp32.
    """
    model = zoo.build(name, torch.float64, layers=4 if CHUNKS[schedule] == 1 else 6)
    unsplit = Unsplit(copy.deepcopy(model), max_norm=0.5)
    split = split_of(name, p, model, schedule=schedule, num_model_chunks=CHUNKS[schedule], **options)
    grid = split.plugin.grid
    assert grid.dp_size * p * options.get("tp_size", 1) == dist.get_world_size()
    for seed in range(steps):
        rows = [8] if grid.dp_size == 1 else [4, 4] if seed < 2 else [5, 3]
        data = zoo.batch(name, seed=seed)
        reference = unsplit.backward(data)
        loss = split.backward(zoo.part(data, grid.replica, rows))["loss"]
        found = compared(split, unsplit, loss, reference, 1e-6 if seed == 0 else 1e-5)
        assert not found, f"{name} {schedule} step {seed}: {found}"
        unsplit.step()
        split.step()
        assert split.optimizer.get_grad_norm() == pytest.approx(float(unsplit.norm), rel=1e-5)
    assert parameter_error(split, unsplit.model) < 1e-5


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "schedule"), covering(["llama-tied", "gpt2"], ["1f1b", "interleaved", "zbv"], strength=1)
)
def test_replicas_of_a_pipeline(pool: Pool, name: str, schedule: str) -> None:
    pool.run(replicas, 4, name, 2, schedule)


@pytest.mark.turns
@pytest.mark.local
def test_replicas_without_a_pipeline(pool: Pool) -> None:
    pool.run(replicas, 2, "gpt2", 1)


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "options"), covering(["llama-tied", "gpt2"], [{"zero_stage": 1}, {"fsdp": True}], strength=1)
)
def test_divided_over_the_replicas(pool: Pool, name: str, options: dict[str, Any]) -> None:
    pool.run(replicas, 4, name, 2, "1f1b", **options)
    pool.run(replicas, 4, name, 2, "interleaved", 3, **options)
    pool.run(replicas, 2, name, 1, "1f1b", 3, **options)


class Scaled(nn.Module):
    """A layer of a vision model, in channels_last, that scales its output by a learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.alpha = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * torch.tanh(self.conv(x))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.float().square().mean()}


def scaled(options: dict[str, Any]) -> list[float]:
    """The losses of three steps, and the last values of the numbers that scale."""
    torch.manual_seed(0)
    model, x = Vision(), torch.randn(8, 4, 6, 6).to(memory_format=torch.channels_last)
    split = Split(model, 1, {"x": x[:4]}, num_microbatches=2, dp_size=2, **options)
    losses = []
    for _ in range(3):
        losses.append(float(split.backward({"x": x.chunk(2)[split.plugin.grid.replica]})["loss"]))
        split.step()
    return losses + [float(p) for p in split.held.values() if p.ndim == 0]


@pytest.mark.local
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.turns
def test_fsdp_trains_numbers_and_weights_in_channels_last(pool: Pool, precision: str) -> None:
    """A user trained a vision model in channels_last, whose layers scale by a learned number, with fsdp: torch raised
    an error at boost that no parameter without dimensions, and then that no other layout, can be sharded."""
    options = {"precision": precision}
    found, expected = (pool.run(scaled, 2, options | more)[0] for more in ({"fsdp": True}, {}))
    assert len(found) == 6 and found == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 1e-2)


def fused(folder: Path, precision: str) -> None:
    """Fused updates in channels_last, without and with resumes in between, match updates that are not fused."""

    def trained(fused: bool, resumes: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, x = Vision(), torch.randn(8, 4, 6, 6).to(memory_format=torch.channels_last)
        laid_out = {name: p.stride() for name, p in model.named_parameters()}
        plugin = PipelinePlugin(1, num_microbatches=2, dp_size=2, precision=precision, dry_run_input={"x": x[:4]})
        booster = Booster(plugin=plugin)
        boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused))
        for step in range(3):
            batch = {"x": x.chunk(2)[plugin.grid.replica]}
            booster.execute_pipeline(iter([batch]), boosted, None, optimizer, return_loss=False)
            optimizer.step()
            optimizer.zero_grad()
            if resumes and step < 2:
                booster.save_optimizer(optimizer, folder / f"{step}", shard=step == 0)
                booster.load_optimizer(optimizer, folder / f"{step}")
                booster.save_model(boosted, str(folder / f"{step}.pt"))
                booster.load_model(boosted, str(folder / f"{step}.pt"))
        assert all(p.stride() == laid_out[name] for name, p in model.named_parameters())
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = trained(fused=False, resumes=False)
    for resumes in (False, True):
        for name, value in trained(fused=True, resumes=resumes).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4, msg=f"{name}, {resumes}")


@pytest.mark.local
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.turns
def test_fused_updates_of_weights_in_channels_last(pool: Pool, tmp_path: Path, precision: str) -> None:
    """A user trained a vision model in channels_last with AdamW(fused=True), the default of a Trainer: summed
    gradients, and the states and weights of a resume, were contiguous, and each element was updated with another's."""
    pool.run(fused, 2, tmp_path, precision)


def warnings_of_repeated() -> list[str]:
    """The warnings of steps on one batch of both replicas, after a step on different batches and an evaluation."""
    data = zoo.batch("gpt2")
    split = split_of("gpt2", 1, zoo.build("gpt2"))
    with mock.patch.object(reader.logger, "warning") as warning:
        split.backward(zoo.part(data, split.plugin.grid.replica, [4, 4]))
        split.evaluate(data)
        assert not warning.called
        for _ in range(2):
            split.backward(data)
    return texts_of(warning)


@pytest.mark.turns
@pytest.mark.local
def test_replicas_that_read_one_batch_are_told(pool: Pool) -> None:
    """With a DataLoader of one's own and no DistributedSampler, all replicas trained on the same samples, and nothing
    said so."""
    first, second = pool.run(warnings_of_repeated, 2)
    assert len(first) == 1 and not second
    assert (
        "in this step, replicas 0, 1 read batches that other replicas also read" in first[0]
        and "plugin.prepare_dataloader" in first[0]
    )


def updates_in_small_messages() -> None:
    """As `replicas`, with messages of ZeRO that have room for a few parameters, or for none of the larger ones."""
    sent: list[int] = []
    whole = dist.broadcast

    def broadcast(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        sent.append(tensor.nbytes)
        return whole(tensor, *arguments, **keywords)

    with mock.patch.object(grad_sync, "BUCKET", 9_000), mock.patch.object(dist, "broadcast", broadcast):
        replicas("llama-tied", 1, zero_stage=1, steps=3)
    largest = max(parameter.numel() * 8 for parameter in zoo.build("llama-tied").parameters())
    assert max(sent) == largest and len(sent) > 2 * 20


@pytest.mark.turns
def test_zero_tells_updates_in_messages_of_a_limited_size(pool: Pool) -> None:
    """All parameters of a stage were copied into one message for each owner."""
    pool.run(updates_in_small_messages, 2)


def frozen_base(precision: str) -> tuple[list[int], list[int], bool]:
    """The bytes that three steps broadcast, the elements of trained weights that each replica owns, and whether the
    replicas have equal values after a loop has written to a frozen weight of the first replica's groups."""
    data, sent = zoo.batch("llama"), [0] * 3
    torch.manual_seed(0)
    model = get_peft_model(zoo.build("llama"), LoraConfig(target_modules=["q_proj"], r=4))
    split = Split(model, 1, zoo.part(data, 0, [4, 4]), num_microbatches=2, zero_stage=1, precision=precision)
    replica, whole = split.plugin.grid.replica, zero.broadcast
    weights, owned = split.optimizer.weights, [0, 0]
    frozen = [weight for weight in weights.values() if not weight.parameter.requires_grad and weight.owner == 0]
    for weight in weights.values():
        owned[weight.owner] += weight.parameter.numel() if weight.parameter.requires_grad else 0
    for step in range(3):

        def broadcast(tensor: Tensor, *arguments: Any, step: int = step, **keywords: Any) -> Any:
            sent[step] += tensor.nbytes
            return whole(tensor, *arguments, **keywords)

        split.backward(zoo.part(data, replica, [4, 4]))
        if step == 2 and replica == 0:
            with torch.no_grad():
                frozen[0].master.mul_(2)
        with mock.patch.object(zero, "broadcast", broadcast):
            split.step()
    values = [torch.empty_like(frozen[0].parameter) for _ in range(2)]
    dist.all_gather(values, frozen[0].parameter.detach())
    return sent, owned, torch.equal(*values)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.turns
def test_zero_sends_no_frozen_weights(pool: Pool, precision: str) -> None:
    """A user trained adapters of some MB with ZeRO-1, and gave the optimizer all parameters: each step also broadcast
    the frozen base, and one replica could own the states of all adapters."""
    size = torch.tensor([], dtype=torch.bfloat16 if precision == "bf16" else torch.float32).element_size()
    for (_, second, third), owned, is_equal in pool.run(frozen_base, 2, precision):
        assert 0 < second == sum(owned) * size < third and owned[0] == owned[1] and is_equal


def owners() -> tuple[list[str], list[str]]:
    """What this rank has fp32 values of, before and after another optimizer for some parameters is boosted."""
    data = zoo.batch("llama")
    split = Split(zoo.build("llama"), 1, data, num_microbatches=2, precision="bf16", zero_stage=1)
    split.backward(data)
    split.step()

    def with_master() -> dict[str, Any]:
        return {name: w for name, w in split.optimizer.weights.items() if w.master is not w.parameter}

    masters = {name: weight.master for name, weight in with_master().items()}
    some = [weight.parameter for name, weight in split.optimizer.weights.items() if "layers.1" in name]
    _, second, *_ = split.booster.boost(split.model, torch.optim.AdamW(some, lr=1e-3))
    before = {name: weight.parameter.clone() for name, weight in split.optimizer.weights.items()}
    split.booster.execute_pipeline(iter([data]), split.model, None, second)
    second.step()
    now = with_master()
    assert all(weight.master is masters[name] for name, weight in now.items())
    assert all(torch.equal(weight.parameter, weight.master.bfloat16()) for weight in now.values())
    after = {name: weight.parameter for name, weight in split.optimizer.weights.items()}
    moved = [name for name, parameter in after.items() if not torch.equal(before[name], parameter)]
    assert moved and all("layers.1" in name for name in moved)
    return sorted(masters), sorted(now)


@pytest.mark.turns
@pytest.mark.local
def test_fp32_values_stay_with_their_owner(pool: Pool) -> None:
    """Every replica kept those of all weights, and another optimizer could give a weight another owner, whose values
    were those from before training."""
    (first, still), (second, too) = pool.run(owners, 2)
    assert first == still and second == too and not set(first) & set(second)
    assert len(first) + len(second) == len([*zoo.build("llama").parameters()])


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "world"), [("llama", 4), ("llama-tied", 4), ("llama-tied", 8), ("qwen3", 4)])
def test_sliced_stages(pool: Pool, name: str, world: int) -> None:
    pool.run(replicas, world, name, 2, "1f1b", tp_size=2, timeout=120)


def sliced(name: str, pp: int, changed: Callable[[Any], Any] = lambda model: model, **options: Any) -> str:
    """Two steps under a plan that is not the model's own, and the whole model back; how a weight is sliced."""
    entry = None if name in zoo.MODELS else find(name)[0]
    model = changed(zoo.build(name, torch.float64) if entry is None else build(entry).double())
    data = zoo.batch(name, dtype=torch.float64) if entry is None else batch(entry, model)
    data = {key: value.double() if value.is_floating_point() else value for key, value in data.items()}
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, pp, data, num_microbatches=2, tp_size=2, **options)
    assert sum(isinstance(p, DTensor) and not p.placements[0].is_replicate() for p in split.held.values()) > 2
    for step in range(2):
        found = compared(split, unsplit, split.backward(data)["loss"], unsplit.backward(data), 1e-6 * 10**step)
        assert not found, f"{name} step {step}: {found}"
        unsplit.step()
        split.step()
    assert parameter_error(split, unsplit.model) < 1e-5
    back = to_sequential(split.model)
    assert back is not None
    for key, parameter in back.named_parameters():
        assert torch.allclose(parameter, unsplit.model.get_parameter(key), atol=1e-5), key
    return str(next(p.placements[0] for p in split.held.values() if isinstance(p, DTensor)))


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["bert", "vit", "t5", "speech-seq2seq/whisper"])
def test_plans_of_policies(pool: Pool, name: str) -> None:
    """Architectures of which transformers has no plan were refused; their policies slice them, exactly."""
    pool.run(sliced, 2, name, 1, timeout=120)
    pool.run(sliced, 4, name, 2, timeout=120)


def in_fp64(model: Any) -> Any:
    """Experts, if there are any, in a kernel for fp64."""
    if "experts" in str(model):
        model.set_experts_implementation("batched_mm")
    return model


@pytest.mark.turns
@pytest.mark.parametrize("name", ["causal-lm/minicpm3", "causal-lm/deepseek_v2"])
def test_latent_attention_is_sliced(pool: Pool, name: str) -> None:
    """A user trained DeepSeek-V2 with tp_size=2: the first forward raised AttributeError about a Linear without config,
    since transformers' style of the latent projection reads a config that only its own loading assigns."""
    if not find(name):
        pytest.skip(f"transformers has no {name}")
    pool.run(sliced, 2, name, 1, in_fp64, timeout=120)


def test_a_latent_projection_needs_its_number_of_rotary_features() -> None:
    with pytest.raises(
        ConfigurationError, match="the config of LlamaForCausalLM has no qk_rope_head_dim: omit the modules"
    ):
        LatentProjection(zoo.build("llama"))


@pytest.mark.turns
def test_a_plan_of_one_s_own(pool: Pool) -> None:
    layer = "model.layers.*.mlp"
    plan = {f"{layer}.gate_proj": "colwise", f"{layer}.up_proj": "colwise", f"{layer}.down_proj": "rowwise"}
    assert pool.run(sliced, 2, "llama", 1, tp_plan=plan, recompute=True, schedule="zb-h1") == ["S(0)"] * 2


@pytest.mark.turns
@pytest.mark.parametrize(("pp", "dp", "options"), [(1, 1, {}), (2, 1, {}), (1, 2, {"fsdp": True})], ids=str)
def test_copies_of_unsharded_weights_stay_equal(pool: Pool, pp: int, dp: int, options: dict[str, Any]) -> None:
    """A plan of feed-forward layers, as T5's, leaves attention to each slice, whose backward is not deterministic on a
    GPU: the slices' weights of attention became others, and only one slice's were saved."""
    layer = "model.layers.*.mlp"
    plan = {f"{layer}.gate_proj": "colwise", f"{layer}.up_proj": "colwise", f"{layer}.down_proj": "rowwise"}
    check_copies(pool.run(noisy, 2 * pp * dp, "llama", pp, dp, tp_size=2, tp_plan=plan, timeout=240, **options))


class FusedHead(transformers.LlamaForCausalLM):
    """Reads the weight of its head, as a fused loss does, and never calls the head."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        hidden = self.model(input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        logits = hidden @ self.lm_head.weight.T
        return CausalLMOutput(loss=self.loss_function(logits, labels, zoo.VOCABULARY), logits=logits)


def with_fused_head(model: Any) -> Any:
    model.__class__ = FusedHead
    return model


@pytest.mark.turns
@pytest.mark.parametrize("pp", [1, 2])
def test_a_weight_that_glue_reads_is_not_sliced(pool: Pool, pp: int) -> None:
    """TRL reads a tied head's weight without a call of the head: the first stage sharded the weight, the last did not,
    and the two summed gradients of different sizes."""
    pool.run(sliced, 2 * pp, "llama-tied", pp, with_fused_head, timeout=120)


def packed(folder: str) -> str:
    """Weights and optimizer of fused experts, saved and read in slices; under FSDP they are refused."""
    data, splits = zoo.batch("mixtral"), []
    for seed in range(2):
        split = Split(zoo.build("mixtral", seed=seed), 1, data, num_microbatches=2, tp_size=2, dp_size=1)
        splits.append(split)
    trained, loaded = splits
    trained.backward(data)
    trained.step()
    trained.booster.save_model(trained.model, f"{folder}/model", shard=True)
    trained.booster.save_optimizer(trained.optimizer, f"{folder}/optimizer", shard=True)
    loaded.booster.load_model(loaded.model, f"{folder}/model")
    loaded.booster.load_optimizer(loaded.optimizer, f"{folder}/optimizer")
    for split in splits:
        split.backward(data)
        split.step()
    first, second = (dict(to_sequential(split.model).named_parameters()) for split in splits)
    assert all(torch.equal(parameter, second[name]) for name, parameter in first.items())
    return str(trained.held["model.layers.0.mlp.experts.gate_up_proj"].placements[0])


def divided_twice() -> None:
    Split(zoo.build("mixtral"), 1, zoo.batch("mixtral"), num_microbatches=2, tp_size=2, fsdp=True)


@pytest.mark.turns
def test_slices_of_what_is_fused(pool: Pool, tmp_path: Path) -> None:
    """The slice of a fused weight is in several places: its optimizer's states were saved as if in one, and could not
    be read, and FSDP's gradients of it were others."""
    assert pool.run(packed, 2, str(tmp_path)) == ["_S(1, 2)"] * 2
    with pytest.raises(
        WorkerError, match=r"gate_up_proj across replicas, because it is a fused weight.*Use zero_stage=1"
    ):
        pool.run(divided_twice, 4)


@pytest.mark.parametrize(
    ("plan", "config", "message"),
    [
        (
            {"model.layers.*.mlp.up_prox": "colwise"},
            {},
            "names model.layers.*.mlp.up_prox, which LlamaForCausalLM does",
        ),
        ({"model.layers.*.mlp.up_proj": "colwize"}, {}, "the unknown style 'colwize': did you mean colwise"),
        (
            {"model.layers.*.input_layernorm": "sequence_parallel"},
            {},
            "the style 'sequence_parallel', which requires inputs that are sharded along the sequence dimension",
        ),
        (
            {"model.embed_tokens": "colwise"},
            {},
            "'colwise', a style for linear layers, to model.embed_tokens (Embedding), which has no out_features",
        ),
        (
            {"model.embed_tokens.weight": "embedding_rowwise"},
            {},
            "to model.embed_tokens.weight, but not to its module model.embed_tokens, whose forward would then fail",
        ),
        ({"lm_head": "colwise"}, {}, "'colwise' to lm_head, which would give each rank only a part of the logits"),
        (None, {"attention_dropout": 0.1}, "attention_dropout=0.1 of LlamaForCausalLM would drop heads"),
        (None, {"num_attention_heads": 3}, "does not divide num_attention_heads=3"),
    ],
)
def test_plans_that_cannot_be(plan: dict[str, str] | None, config: dict[str, Any], message: str) -> None:
    """The style "sequence_parallel" doubled the gradients of norms without an error. An embedding with "colwise" raised
    ValueError in transformers at boost, when some weights were sharded already. A style of its weight alone sharded the
    weight, and the first step failed in torch. A head with "colwise" generated tokens of half of the vocabulary."""
    model = zoo.build("llama")
    model.config.update(config)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        plan_of(model, 2, plan, find_policy(model).tp_plan)


@pytest.mark.parametrize("rule", ["transformer.h.*.mlp.c_fc", "transformer.h.*.mlp.c_fc.weight"])
def test_a_transposed_linear_layer_is_not_sliced(rule: str) -> None:
    """A user of GPT-2 with tp_size=2 was told to use tp_size=1, but GPT-2 did not fit into the memory of one rank: the
    alternatives of the changelog were not in the error."""
    alternatives = re.escape("tp_size=1 with more stages, fsdp=True or zero_stage=1")
    model = zoo.build("gpt2")
    with pytest.raises(
        ConfigurationError, match=rf"tp_plan shards transformer\.h\.0\.mlp\.c_fc, a Conv1D.*{alternatives}"
    ):
        plan_of(model, 2, {rule: "colwise"}, find_policy(model).tp_plan)
    with pytest.raises(ConfigurationError, match=f"tp_size=2: GPT2LMHeadModel does not have a tp_plan.*{alternatives}"):
        plan_of(model, 2, None, find_policy(model).tp_plan)


@pytest.mark.skipif(not find("causal-lm/gemma4_text"), reason="transformers has no Gemma 4")
def test_layers_with_fewer_heads_are_sharded_or_refused() -> None:
    """A user sharded Gemma 4, whose layers with full attention have fewer key heads than the others: transformers
    raised an error about an ambiguous field of the config at boost, also if tp_size divided both numbers."""
    (entry,) = find("causal-lm/gemma4_text")
    for heads in (4, 1):
        few = {layer: {"head_dim": 16, "num_key_value_heads": heads} for layer in ("1", "3")}
        fields = build(entry).config.to_dict() | {"per_layer_config": few}
        model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**fields))
        fits = nullcontext() if heads == 4 else pytest.raises(ConfigurationError, match="num_key_value_heads=1 of Gem")
        with fits:
            plan = plan_of(model, 2, None, find_policy(model).tp_plan)
            assert plan["model.layers.1.self_attn.k_proj"] == "colwise"


def test_a_head_is_not_cut() -> None:
    """A user sharded pi0, whose action expert has one key head, unlike its text config: the first step raised an error
    about the shape of a view. A plan without these attentions shards the rest. MiMo has values of another width."""
    model: Any = zoo.build("llama")
    attention = model.model.layers[1].self_attn
    heads = attention.k_proj.out_features // attention.head_dim
    attention.v_proj, attention.v_head_dim = nn.Linear(attention.v_proj.in_features, 4 * heads), 4
    assert plan_of(model, 2, None, find_policy(model).tp_plan)
    attention.k_proj = nn.Linear(attention.k_proj.in_features, attention.head_dim, bias=False)
    message = r"tp_size=2 would cut a head of .*layers\.1\.self_attn\.k_proj.*, which computes 1 head of 8 features"
    for adapted in (model, get_peft_model(model, LoraConfig(target_modules=["k_proj"]))):
        with pytest.raises(ConfigurationError, match=message):
            plan_of(adapted, 2, None, find_policy(adapted).tp_plan)
        assert plan_of(adapted, 2, {"model.layers.*.mlp.up_proj": "colwise"}, None)


def test_a_style_that_does_not_fit_its_module() -> None:
    mesh = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ConfigurationError, match="tp_plan cannot divide scale=None of Linear"):
        style_of("divide:scale").install_forward(torch.nn.Linear(2, 2), mesh)


def accumulating(name: str, options: dict[str, Any]) -> list[list[int]]:
    """Two batches under no_sync and one after; for each, the sizes of the gradients that were reduced."""
    model = zoo.build(name)
    unsplit = Unsplit(copy.deepcopy(model))
    split = split_of(name, 2, model, max_norm=0.0, **options)
    reduced: list[list[int]] = []
    whole, scatter = dist.all_reduce, dist.reduce_scatter_single

    def all_reduce(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        reduced[-1] += [tensor.numel()] * (tensor.numel() > 1)
        return whole(tensor, *arguments, **keywords)

    def reduce_scatter(output: Any, *arguments: Any, **keywords: Any) -> Any:
        reduced[-1].append(output.numel())
        return scatter(output, *arguments, **keywords)

    def backward(seed: int) -> None:
        data = zoo.batch(name, seed=seed)
        unsplit.backward(data)
        reduced.append([])
        with (
            mock.patch("torch.distributed.all_reduce", all_reduce),
            mock.patch("torch.distributed.reduce_scatter_single", reduce_scatter),
        ):
            split.backward(zoo.part(data, split.plugin.grid.replica, [4, 4]))

    with split.booster.no_sync(split.model, split.optimizer):
        backward(0)
        backward(1)
    backward(2)
    assert (error := gradient_error(split, unsplit.model)) < 1e-6, error
    with split.booster.no_sync(split.model, split.optimizer):
        backward(3)
    reduced.append([])
    with mock.patch("torch.distributed.all_reduce", all_reduce):
        split.plugin.sync_grads()
    assert (error := gradient_error(split, unsplit.model)) < 1e-6, error
    split.step()
    unsplit.step()
    with split.booster.no_sync(split.model, split.optimizer):
        split.backward(zoo.part(zoo.batch(name, seed=4), split.plugin.grid.replica, [4, 4]))
    split.optimizer.zero_grad()  # of what was not reduced, too
    backward(5)
    assert (error := gradient_error(split, unsplit.model)) < 1e-4, error
    return reduced


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"zero_stage": 1}, {"fsdp": True}], ids=["plain", "zero", "fsdp"])
def test_nothing_is_reduced_under_no_sync(pool: Pool, options: dict[str, Any]) -> None:
    for first, second, synced, third, later, last in pool.run(accumulating, 4, "gpt2", options):
        assert first == second == third == []
        assert len(synced) == len(last)
        if "fsdp" not in options:  # one bucket of the stage's own parameters, and one of the tie
            assert len(synced) == len(later) == 2 and synced == later


def dropping() -> dict[str, Any]:
    """Gradients with dropout, by a pipeline of 2 stages on 2 replicas, or on one with all of the microbatches."""
    p, m = (2, 2) if dist.get_world_size() == 4 else (2, 4)
    model = with_dropout(zoo.build("gpt2"))
    split = split_of("gpt2", p, model, num_microbatches=m)
    data = {k: v.masked_fill(v == -100, 5) if k == "labels" else v for k, v in zoo.batch("gpt2").items()}
    torch.manual_seed(7)
    rows = [8 // split.plugin.grid.dp_size] * split.plugin.grid.dp_size
    split.backward(zoo.part(data, split.plugin.grid.replica, rows))
    return {name: q.grad for name, q in split.held.items()}


@pytest.mark.turns
@pytest.mark.local
def test_dropout_does_not_depend_on_the_replicas(pool: Pool) -> None:
    four, two = pool.run(dropping, 4), pool.run(dropping, 2)
    for rank, gradients in enumerate(four):
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, two[rank % 2][name], rtol=1e-4, atol=1e-7), name


@pytest.mark.turns
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {"fsdp": True, "recompute": True},
        {"tp_size": 2, "recompute": True},
        {"tp_size": 2, "schedule": "zb-h1"},
        {"zero_stage": 1, "schedule": "zbv", "recompute": 0.5},
        {"fsdp": True, "schedule": "gpipe", "p2p": "isend"},
        {"fsdp": True, "schedule": "zb-h1"},
        {"fsdp": True, "schedule": "zbv"},
        {"fsdp": True, "schedule": "v-half", "recompute": 0.5},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_combinations(pool: Pool, options: dict[str, Any]) -> None:
    pool.run(replicas, 4, "llama-tied", 2, steps=2, **options)


def leaving_out() -> float:
    """The largest error of a gradient where fsdp's last weight gradient of each stage and microbatch is left out."""
    whole, model = Deferral.finish, zoo.build("llama-tied", torch.float64, layers=4)
    unsplit, data = Unsplit(copy.deepcopy(model)), zoo.batch("llama-tied")
    unsplit.backward(data)
    split = split_of("llama-tied", 2, model, schedule="zb-h1", fsdp=True, verify=False)
    with mock.patch.object(Deferral, "finish", staticmethod(lambda pending: whole(pending[:-1]))):
        split.backward(zoo.part(data, split.plugin.grid.replica, [4, 4]))
    return gradient_error(split, unsplit.model)


@pytest.mark.turns
@pytest.mark.local
def test_weight_gradients_of_gathered_parameters_are_deferred(pool: Pool) -> None:
    """fsdp excluded zb-h1 and the schedules in a V; they defer to the gathered parameters, before these are reduced."""
    assert all(error > 0.1 for error in pool.run(leaving_out, 4))


def everything(folder: str) -> float:
    """Two replicas, two stages and two slices of a model that is loaded, in bf16, under FSDP and recompute."""
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        zoo.build("llama-tied").save_pretrained(folder)
    dist.barrier()
    data = zoo.batch("llama-tied")
    plugin = PipelinePlugin(
        2,
        num_microbatches=2,
        dp_size=2,
        tp_size=2,
        fsdp=True,
        recompute=True,
        precision="bf16",
        max_norm=1.0,
        dry_run_input=zoo.part(data, 0, [4, 4]),
    )
    model = plugin.from_pretrained(AutoModelForCausalLM, folder).train()
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(4):
        batch = zoo.part(data, plugin.grid.replica, [4, 4])
        losses.append(float(booster.execute_pipeline(iter([batch]), boosted, None, optimizer)["loss"]))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        out = booster.execute_pipeline(iter([batch]), boosted, None, return_outputs="logits")
    if plugin.grid.stage == 1:
        assert out["outputs"].logits.shape == (4, 12, zoo.VOCABULARY)
    assert losses == sorted(losses, reverse=True) and float(out["loss"]) < losses[-1]
    return losses[0]


@pytest.mark.turns
def test_all_of_it_at_once(pool: Pool, tmp_path: Path) -> None:
    losses = pool.run(everything, 8, str(tmp_path), timeout=120)
    torch.manual_seed(0)
    whole = zoo.build("llama-tied")
    expected = float(whole(**zoo.batch("llama-tied")).loss)
    assert len(set(losses)) == 1 and losses[0] == pytest.approx(expected, rel=0.01)
