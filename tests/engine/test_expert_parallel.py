"""Tests of expert parallelism: ranks that each hold some of the experts train as one process does with all experts."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from pipeshard.distributed.collectives import local
from pipeshard.distributed.mesh import TP
from pipeshard.errors import ConfigurationError
from pipeshard.split.tensor_parallel import DISPATCH, EXPERTS, PARTIAL, Experts, plan_of
from tests import zoo
from tests.families import AUXILIARY, build_with, entry_of, left_padded
from tests.parity.build import batch
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, compared, differences, parameter_error, refusal

NAMES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe")
PATH = "model.layers.*.mlp.experts"
PLAN = {PATH: DISPATCH, f"{PATH}.gate_up_proj": EXPERTS, f"{PATH}.down_proj": EXPERTS}


def exact(
    names: Sequence[str], pp: int, dp: int, kernel: str, wrong: Callable[[], Any] = nullcontext, **options: Any
) -> list[str]:
    """Three steps on padded rows, with the loss of the router if there is one; what differs from one process."""
    found, tolerance = [], 1e-5 if kernel == "grouped_mm" else 1e-6  # grouped_mm computes in fp32 or less
    for name in names:
        model: Any = build_with(entry_of(name), **AUXILIARY.get(name, {}))
        model.set_experts_implementation(kernel)
        model = model if kernel == "grouped_mm" else model.double()
        data, rows = left_padded(batch(entry_of(name), model)), [4 // dp] * dp
        unsplit = Unsplit(copy.deepcopy(model))
        with wrong():
            split = Split(model, pp, zoo.part(data, 0, rows), num_microbatches=2, ep_size=2, dp_size=dp, **options)
            placed = {p.placements[-1] for key, p in split.held.items() if ".experts." in key}  # type: ignore[attr-defined]
            assert placed == {Shard(0)}
            for group in (*unsplit.optimizer.param_groups, *split.optimizer.param_groups):
                group["eps"] = (
                    1e-4  # otherwise, AdamW's first updates have the size of lr, even where gradients are noise
                )
            for step in range(3):
                reference = unsplit.backward_in_parts(data, num_microbatches=2 * dp)
                loss = split.backward(zoo.part(data, split.plugin.grid.replica, rows))["loss"]
                differs = compared(split, unsplit, loss, reference, tolerance)
                found += [f"{name} step {step}: {what}" for what in differs]
                unsplit.step()
                split.step()
        if not (error := parameter_error(split, unsplit.model)) < tolerance:
            found.append(f"{name}: parameters differ by {error:.0e}")
    return found


@pytest.mark.turns
@pytest.mark.parametrize(
    ("names", "pp", "dp", "kernel", "options"),
    [
        *(((name,), 1, 1, "grouped_mm", {"recompute": True}) for name in NAMES),
        *(((name,), 2, 1, "batched_mm", {"schedule": "zb-h1"}) for name in NAMES),
        (NAMES[::3], 1, 2, "batched_mm", {"zero_stage": 1}),
        (NAMES[1::3], 1, 2, "batched_mm", {"fsdp": True}),
    ],
    ids=str,
)
def test_experts_on_several_ranks(
    pool: Pool, names: Sequence[str], pp: int, dp: int, kernel: str, options: dict[str, Any]
) -> None:
    found = pool.run(exact, 2 * pp * dp, names, pp, dp, kernel, timeout=240, **options)
    assert not [what for of_rank in found for what in of_rank]


@pytest.mark.turns
def test_a_plan_of_ones_own(pool: Pool) -> None:
    assert pool.run(exact, 2, ["qwen3_moe"], 1, 1, "batched_mm", ep_plan=PLAN) == [[], []]


class Loop(nn.Module):
    """Experts that run one after another, and only if a token has chosen them."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_experts = experts.num_experts
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if len(token):
                gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
                output.index_add_(
                    0, token, F.linear(gate.relu() * up, self.down_proj[expert]) * top_k_weights[token, place, None]
                )
        return output


class Scaled(Loop):
    """These experts, with a factor for all of them, and an output that depends on the tokens in any case."""

    def __init__(self, experts: Any) -> None:
        super().__init__(experts)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states * 0 + self.scale * super().forward(hidden_states, top_k_index, top_k_weights)


class FirstTwo(Qwen3MoeTopKRouter):
    """A router that chooses experts 0 and 1, never 2 and 3."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = super().forward(hidden_states)
        return logits, weights, chosen % 2


def not_chosen(kind: type[Loop], schedule: str, pp: int) -> list[str]:
    """A step in which no token chooses an expert of the second rank; what differs from one process."""
    model: Any = build_with(entry_of("qwen3_moe")).double()
    for mlp in [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]:
        mlp.experts = kind(mlp.experts)
        mlp.gate.__class__ = FirstTwo
    data = batch(entry_of("qwen3_moe"), model)
    unsplit = Unsplit(copy.deepcopy(model))
    plan = PLAN | ({f"{PATH}.scale": PARTIAL} if kind is Scaled else {})
    split = Split(model, pp, data, num_microbatches=2, ep_size=2, ep_plan=plan, schedule=schedule)
    return differences(split, unsplit, data, num_microbatches=2)


@pytest.mark.turns
@pytest.mark.parametrize(("kind", "schedule", "pp"), [(Loop, "1f1b", 1), (Loop, "zb-h1", 2), (Scaled, "1f1b", 1)])
def test_no_token_chooses_the_experts_of_a_rank(pool: Pool, kind: type[Loop], schedule: str, pp: int) -> None:
    """The rank's output was a constant, so that the backward of this rank did not sum the gradients of the tokens: the
    other rank waited for this sum without end. Later, the same happened to the gradients of the weights if the output
    was not a constant, and a parameter without dimensions raised an IndexError."""
    assert not any(pool.run(not_chosen, 2 * pp, kind, schedule, pp))


def router_not_summed() -> Any:
    """The gradients of the tokens' weights, and so those of the router, are those of a rank's own experts."""
    from transformers.distributed import expert_parallel

    summed = expert_parallel._AllReduceBackward.apply
    apply = lambda x, group: x if x.shape[-1] == 2 else summed(x, group)  # noqa: E731
    return mock.patch.object(expert_parallel._AllReduceBackward, "apply", apply)


def experts_of_another_rank() -> Any:
    shard = Experts.shard_param

    def other(self: Experts, module: nn.Module, key: str, mesh: Any) -> None:
        module.get_parameter(key).data = module.get_parameter(key).data.roll(2, 0)
        shard(self, module, key, mesh)

    return mock.patch.object(Experts, "shard_param", other)


@pytest.mark.turns
@pytest.mark.parametrize("wrong", [router_not_summed, experts_of_another_rank])
def test_what_is_wrong_is_seen(pool: Pool, wrong: Callable[[], Any]) -> None:
    found = pool.run(exact, 2, ["qwen3_moe"], 1, 1, "batched_mm", wrong)
    assert all("gradients differ" in str(of_rank) for of_rank in found)


class Noise(torch.autograd.Function):
    """The identity, whose backward has another relative error on each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (1 + 1e-3 * dist.get_rank())


def noisy(name: str, pp: int, dp: int, **options: Any) -> tuple[int, int, dict[str, Tensor]]:
    """Two steps, the first of two batches, with gradients that differ between ranks; the stage and slice of this rank,
    and its parameters that are not sharded across slices."""
    model: Any = build_with(entry_of(name), tie_word_embeddings=pp > 1)
    plain = model.model.norm.forward
    model.model.norm.forward = lambda x: Noise.apply(plain(x))
    data = batch(entry_of(name), model)
    split = Split(model, pp, data, num_microbatches=2, dp_size=dp, verify=False, **options)
    with split.booster.no_sync(split.model, split.optimizer):
        split.backward(data)
    for _ in range(2):
        split.backward(data)
        split.step()
    grid = split.plugin.grid
    whole = {name: local(p).detach().clone() for name, p in split.held.items() if not grid.divides(p, TP)}
    return grid.stage, grid.slice, whole


def check_copies(ranks: Sequence[tuple[int, int, dict[str, Tensor]]]) -> None:
    for one, other in zip(ranks[::2], ranks[1::2], strict=True):
        assert one[0] == other[0] and (one[1], other[1]) == (0, 1) and len(one[2]) > 5
        assert [name for name, parameter in one[2].items() if not torch.equal(parameter, other[2][name])] == []


@pytest.mark.turns
@pytest.mark.parametrize(
    ("pp", "dp", "options"),
    [(1, 1, {}), (2, 1, {"precision": "bf16"}), (1, 2, {"zero_stage": 1}), (1, 2, {"fsdp": True})],
    ids=str,
)
def test_copies_stay_equal(pool: Pool, pp: int, dp: int, options: dict[str, Any]) -> None:
    """On a GPU, the backward of attention is not deterministic: attention, norms and routers, which each rank of a
    stage trains, became others on each rank, and so did the experts that the ranks chose for a token."""
    check_copies(pool.run(noisy, 2 * pp * dp, "qwen3_moe", pp, dp, ep_size=2, timeout=240, **options))


@pytest.mark.parametrize(
    ("name", "size", "plan", "message"),
    [
        (
            "qwen3_moe",
            3,
            None,
            "ep_size=3 does not divide num_experts=4 of model.layers.0.mlp.experts: choose a size that does",
        ),
        (
            "llama4_text",
            2,
            None,
            "ep_size=2: Llama4ForCausalLM does not have an ep_plan. Use ep_size=1 with more stages, fsdp=True",
        ),
        ("llama", 2, None, "ep_size=2: LlamaForCausalLM does not have an ep_plan"),
        ("qwen3_moe", 2, {**PLAN, "model.experts": EXPERTS}, "ep_plan names model.experts, which Qwen3MoeForCausalLM"),
        ("qwen3_moe", 2, {**PLAN, PATH: "ep_router"}, "ep_plan contains the unknown style 'ep_router'"),
        ("llama", 2, {"model.layers.*.mlp": DISPATCH}, "model.layers.0.mlp, whose num_experts is missing"),
        ("gpt_oss", 2, PLAN, "'ep_dispatch_experts' to model.layers.0.mlp.experts.gate_up_proj_bias"),
        ("qwen3_moe", 2, {f"{PATH}.down_proj": EXPERTS}, "'grouped_gemm' to model.layers.0.mlp.experts.down_proj"),
    ],
)
def test_what_cannot_be_divided_is_refused(name: str, size: int, plan: Any, message: str) -> None:
    model = build_with(entry_of(name))
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        plan_of(model, 1, None, None, size, plan)


def test_experts_that_run_one_by_one_are_refused() -> None:
    """gpt-oss failed in the first step: its loop has no place for experts of other ranks. The kernel of Mega MoE failed
    in transformers when weights were sharded already, with the name of an argument that nobody had passed."""
    model: Any = build_with(entry_of("gpt_oss"))
    remedy = r"experts_implementation='grouped_mm' to from_pretrained"
    call = rf"{remedy}, or call model.set_experts_implementation\('grouped_mm'\)"
    for kernel, advice in {"deepgemm_megamoe": f"{remedy}$", "eager": call}.items():
        model.config._experts_implementation = kernel
        with pytest.raises(ConfigurationError, match=f"{kernel}.*{advice}"):
            plan_of(model, 1, None, None, 2)
    model.set_experts_implementation("grouped_mm")
    assert plan_of(model, 1, None, None, 2)


OF_ALL = "the first dimension of model.layers.3.mlp.experts.inside is num_experts=4"


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (nn.Buffer(torch.rand(4)), OF_ALL),
        (torch.rand(4, 2), OF_ALL),
        (nn.AlphaDropout(0.1), "experts has dropout"),
        (nn.Dropout(0.1), "experts has dropout"),
    ],
)
def test_what_is_not_of_a_rank_s_experts_is_refused(inside: Any, message: str) -> None:
    """Without an error, each rank multiplied its experts' outputs by the first entries of the buffer, and drew masks
    for its own experts only, from the random numbers of the first experts."""
    model: Any = build_with(entry_of("qwen3_moe"))
    model.model.layers[-1].mlp.experts.inside = inside
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        plan_of(model, 1, None, None, 2)


def test_slices_of_two_kinds_are_refused() -> None:
    assert "tp_size=2 is not supported with ep_size=2" in refusal(tp_size=2, ep_size=2)
    assert "expert-parallel ranks per stage, must be a positive integer, got 0" in refusal(ep_size=0)
    assert (
        "ep_plan must be a non-empty dict from names of modules and parameters to names of styles (strings such as "
        "'grouped_gemm'), got 'auto'"
    ) in refusal(ep_plan="auto")
