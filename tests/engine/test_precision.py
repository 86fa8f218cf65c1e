"""Tests of precision: 16-bit parameters with fp32 values, and one loss scale for all ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers.models.llama import modeling_llama

import pipeshard
from pipeshard.batch.read import read_batch
from pipeshard.batch.tree import tensors_in
from pipeshard.distributed.collectives import local, whole
from pipeshard.engine.mixed_precision import LossScale, Precision, filled_like
from pipeshard.errors import ConfigurationError, UsageError
from tests import zoo
from tests.covering import covering
from tests.parity import check as parity
from tests.parity.build import batch, build
from tests.parity.entries import find
from tests.pool import Pool
from tests.unsplit import LEARNING_RATE, Split, gradient_error, largest_error

pytestmark = pytest.mark.local

M = 4


class Reference:
    """One process with the same arithmetic: 16-bit parameters, gradients added up in fp32, fp32 values updated."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.values = [p.detach().clone() for p in model.parameters()]
        model.to(dtype)
        for value in self.values:
            value.requires_grad_()
        self.optimizer = torch.optim.AdamW(self.values, lr=LEARNING_RATE)

    def step(self, data: Any, microbatches: int = M) -> float:
        from tests.unsplit import valid_labels

        rows = len(data["labels"])
        parts = [
            {k: v[i : i + rows // microbatches] for k, v in data.items()} for i in range(0, rows, rows // microbatches)
        ]
        counts = [valid_labels(self.model, piece["labels"]) for piece in parts]
        total = 0.0
        for value in self.values:
            value.grad = torch.zeros_like(value)
        for piece, count in zip(parts, counts, strict=True):
            if not count:
                continue
            loss = self.model(**piece).loss
            share = count / sum(counts)
            loss.backward(torch.full_like(loss, share))
            total += float(loss) * share
            for value, parameter in zip(self.values, self.model.parameters(), strict=True):
                assert value.grad is not None
                if parameter.grad is not None:
                    value.grad += parameter.grad.float()
                parameter.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for value, parameter in zip(self.values, self.model.parameters(), strict=True):
                parameter.copy_(value)
        return total


def bf16(name: str, dp: int, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The losses of 50 steps, and on rank 0 those of one process."""
    model = zoo.build(name)
    reference = Reference(copy.deepcopy(model), torch.bfloat16)
    batches = [zoo.batch(name, seed=seed % 5) for seed in range(50)]
    rows = [8 // dp] * dp
    split = Split(
        model,
        dist.get_world_size() // dp,
        zoo.part(batches[0], 0, rows),
        num_microbatches=M // dp,
        precision="bf16",
        **options,
    )
    for parameter in split.held.values():
        assert options or parameter.dtype is torch.bfloat16
    losses, expected = [], []
    for data in batches:
        losses.append(float(split.backward(zoo.part(data, split.plugin.grid.replica, rows))["loss"]))
        for parameter in split.held.values():
            assert parameter.grad is None or local(parameter.grad).dtype is torch.float32
        split.step()
        if dist.get_rank() == 0:
            expected.append(reference.step(data))
    return losses, expected


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "dp", "world", "options"),
    [
        ("gpt2", 1, 2, {}),
        ("llama-tied", 2, 4, {"zero_stage": 1}),
        ("gpt2", 2, 4, {"fsdp": True}),
        ("llama", 1, 2, {"schedule": "zb-h1"}),
        ("llama", 1, 2, {"autocast": True}),
    ],
)
def test_bf16_follows_one_process(pool: Pool, name: str, dp: int, world: int, options: dict[str, Any]) -> None:
    losses, expected = pool.run(bf16, world, name, dp, options, timeout=120)[0]
    assert expected[-1] < 0.9 * expected[0]
    worst = largest_error((a - b) / b for a, b in zip(losses, expected, strict=True))
    print(name, options, worst)
    assert worst < 0.01, worst


class Likewise:
    """One process that computes as a pipeline in 16 bits does, whatever the architecture."""

    def __init__(self, model: torch.nn.Module, data: Any, precision: Precision, replicas: int = 1) -> None:
        self.model, self.precision, self.parts = model, precision, read_batch(model, data).split(M)
        self.each = M // replicas
        self.weights = parity.weights_of(model, data, self.parts)
        self.values = {p: p for p in model.parameters()}
        for parameter, value in precision.lower(precision.lowered(model)).items():
            self.values[parameter] = torch.nn.Parameter(value)
            parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
        self.optimizer = torch.optim.AdamW(self.values.values(), lr=LEARNING_RATE)

    def backward(self) -> Tensor:
        """The loss, which each replica adds up first, as in 16 bits the order of a sum can be seen."""
        of_replicas = [slice(first, first + self.each) for first in range(0, M, self.each)]
        losses = [parity.summed(self.model, self.parts[r], self.weights[r], self.precision) for r in of_replicas]
        return sum(losses[1:], losses[0])

    @torch.no_grad()
    def step(self) -> None:
        for parameter, value in self.values.items():
            value.grad = parameter.grad
        self.optimizer.step()
        for parameter, value in self.values.items():
            parameter.copy_(value)
            parameter.grad = None


def errors(name: str, options: dict[str, Any]) -> list[float]:
    """How far losses, gradients, and the trained parameters at last, are from those of one process."""
    (entry,) = find(name)
    model = build(entry)
    both = [batch(entry, model, seed) for seed in (0, 1)]  # 8 samples
    data = {key: torch.cat([part[key] for part in both]) for key in both[0]}
    precision = Precision("bf16", options.get("autocast", False), torch.device("cpu"))
    dp = options.get("dp_size", 1)
    reference = Likewise(copy.deepcopy(model), data, precision, dp)
    rows = [8 // dp] * dp
    sample = zoo.part(data, 0, rows)
    split = Split(model, dist.get_world_size() // dp, sample, num_microbatches=M // dp, precision="bf16", **options)
    own, found = zoo.part(data, split.plugin.grid.replica, rows), []
    for _ in range(3):
        loss, expected = split.backward(own)["loss"], reference.backward()
        found += [abs(float(loss - expected)) / float(expected), gradient_error(split, reference.model)]
        split.step()
        reference.step()
    now = {name: p.detach() for name, p in reference.model.named_parameters()}
    apart = [(whole(p.detach()).to(now[name]) - now[name]).float() / now[name].norm() for name, p in split.held.items()]
    return [*found, largest_error(difference.norm() for difference in apart)]


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    *((2, {"schedule": schedule}) for schedule in ("gpipe", "1f1b", "zb-h1", "zbv")),
    (2, {"schedule": "interleaved", "num_model_chunks": 2}),
    (2, {"recompute": True}),
    (2, {"autocast": True}),
    (2, {"autocast": True, "recompute": True, "schedule": "zb-h1"}),
    (4, {"dp_size": 2}),
    (4, {"dp_size": 2, "zero_stage": 1}),
    (4, {"dp_size": 2, "fsdp": True}),
    (4, {"dp_size": 2, "fsdp": True, "schedule": "zbv"}),
]


@pytest.mark.turns
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "layout"), covering(["causal-lm/deepseek_v3", "image-classification/resnet"], LAYOUTS, strength=1)
)
def test_bf16_is_that_of_one_process_in_every_layout(pool: Pool, name: str, layout: tuple[int, dict[str, Any]]) -> None:
    """Floating buffers beside parameters (routing biases, statistics of batch norms), and layers that return what a
    convolution made, once ended boost; what autocast had cast of a received value was summed in 16 bits."""
    world, options = layout
    for found in pool.run(errors, world, name, options):
        assert largest_error(found) < 1e-6, found


def without_replicas(precision: str) -> None:
    """Two steps with fsdp on one replica, which has nothing to shard, beside those without fsdp."""
    data, losses = zoo.batch("gpt2"), []
    for fsdp in (False, True):
        split = Split(zoo.build("gpt2"), 1, data, num_microbatches=2, precision=precision, fsdp=fsdp)
        losses.append([])
        for _ in range(2):
            losses[-1].append(float(split.backward(data)["loss"]))
            split.step()
    assert losses[0] == losses[1]


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp_with_one_replica_trains_as_without_it(pool: Pool, precision: str) -> None:
    """The units kept fp32 parameters, which FSDP should have cast as it gathers them, and met 16-bit activations."""
    pool.run(without_replicas, 1, precision)


def of_16_bits(options: dict[str, Any], frozen: tuple[str, ...]) -> tuple[list[float], set[torch.dtype]]:
    """The losses of a 16-bit model, and the dtypes of gradients and of what is updated. What is frozen before boost is
    trained from the second step on."""
    model, losses = zoo.build("llama-tied").bfloat16(), []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    split = Split(model, 1, zoo.batch("llama-tied"), num_microbatches=2, dp_size=2, precision="bf16", **options)
    dtypes = set()
    for step in range(4):
        for parameter in split.held.values() if step == 1 else ():
            parameter.requires_grad_(True)
        data = zoo.part(zoo.batch("llama-tied"), split.plugin.grid.replica, [4, 4])
        losses.append(float(split.backward(data)["loss"]))
        dtypes |= {local(p.grad).dtype for p in split.held.values() if p.grad is not None}
        split.step()
    return losses, dtypes | {p.dtype for group in split.optimizer.param_groups for p in group["params"]}


@pytest.mark.turns
@pytest.mark.parametrize("frozen", [(), ("model.layers.1",)])
def test_fsdp_updates_fp32_values_of_a_16_bit_model(pool: Pool, frozen: tuple[str, ...]) -> None:
    """A user trained a folder of the Hub, which is in bf16, with fsdp and precision="bf16". The shards stayed bf16, so
    AdamW's states and small updates were rounded to bf16."""
    for expected, (losses, dtypes) in zip(
        pool.run(of_16_bits, 2, {}, frozen), pool.run(of_16_bits, 2, {"fsdp": True}, frozen), strict=True
    ):
        assert dtypes == {torch.float32} == expected[1]
        assert losses == pytest.approx(expected[0], rel=1e-3)


def unfrozen() -> None:
    """A parameter that is 16 bits because it was frozen at boost, beside trained parameters of its layer."""
    model, name = zoo.build("llama-tied").bfloat16(), "model.layers.0.mlp.up_proj.weight"
    model.get_parameter(name).requires_grad_(False)
    data = zoo.part(zoo.batch("llama-tied"), dist.get_rank(), [4, 4])
    split = Split(model, 1, data, num_microbatches=2, dp_size=2, precision="bf16", fsdp=True)
    split.backward(data)
    split.held[name].requires_grad_(True)
    with pytest.raises(UsageError, match=rf"{name} has been unfrozen.*Unfreeze it before boost, or use zero_stage=1"):
        split.backward(data)


@pytest.mark.turns
def test_an_unfrozen_parameter_of_16_bits_is_refused_by_name(pool: Pool) -> None:
    """A user unfroze a weight of a bf16 base: torch asserted that dtypes of a layer are equal, and named nothing."""
    pool.run(unfrozen, 2)


def two_dtypes(options: dict[str, Any]) -> list[float]:
    """The losses of adapters, which peft keeps in fp32, and of norms of their bf16 base."""
    config = LoraConfig(target_modules=["q_proj"], r=4)
    model = get_peft_model(zoo.build("llama-tied").bfloat16(), config)
    for name, parameter in model.named_parameters():
        if "post_attention_layernorm" in name:
            parameter.requires_grad_(True)
    data = zoo.batch("llama-tied")
    split = Split(model, 1, data, num_microbatches=2, dp_size=2, **options)
    losses = []
    for _ in range(3):
        losses.append(float(split.backward(zoo.part(data, split.plugin.grid.replica, [4, 4]))["loss"]))
        split.step()
    return losses


@pytest.mark.turns
def test_fsdp_trains_parameters_of_two_dtypes_in_one_layer(pool: Pool) -> None:
    """A user trained adapters, which peft keeps in fp32, and the norms of a bf16 base: torch asserted that dtypes of a
    layer are equal, and named nothing."""
    for options in ({}, {"precision": "bf16"}):
        expected, losses = pool.run(two_dtypes, 2, options), pool.run(two_dtypes, 2, options | {"fsdp": True})
        assert losses == [pytest.approx(one, rel=1e-3) for one in expected]


DTYPES = "causal-lm/deepseek_v3", "causal-lm/xglm", "causal-lm/zamba", "sequence-classification/gemma3_text"


@pytest.mark.parametrize("name", [name for name in DTYPES if find(name)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_is_lowered_is_what_transformers_makes_so(name: str, dtype: str, tmp_path: Path) -> None:
    """Routing biases became 16 bits, where the architecture keeps them in fp32; tables of positions stayed fp32, and
    met a layer norm in 16 bits."""
    (entry,) = find(name)
    model, precision = build(entry), Precision(dtype, False, torch.device("cpu"))
    model.save_pretrained(tmp_path)
    theirs = getattr(transformers, entry.class_name).from_pretrained(tmp_path, dtype=precision.dtype)
    precision.lower(precision.lowered(model))
    ours = {key: tensor.dtype for key, tensor in (*model.named_parameters(), *model.named_buffers())}
    assert ours == {key: tensor.dtype for key, tensor in (*theirs.named_parameters(), *theirs.named_buffers())}


def test_what_is_lowered_in_a_wrapper_is_what_is_lowered_without_it() -> None:
    """A transformers model inside a module of a user lost what its architecture keeps in fp32: T5 overflows in fp16."""
    inner, precision = zoo.build("t5"), Precision("fp16", False, torch.device("cpu"))
    lowered = precision.lowered(inner)
    assert 0 < len(lowered) < len([*inner.parameters(), *inner.buffers()])
    assert precision.lowered(torch.nn.ModuleDict({"model": inner})) == lowered


class WithHeads(transformers.LlamaPreTrainedModel):
    """A model that cannot be built from its config alone."""

    def __init__(self, config: Any, heads: int) -> None:
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.rotary = modeling_llama.LlamaRotaryEmbedding(config)
        self.score = torch.nn.Linear(config.hidden_size, heads)


class Loading(transformers.PreTrainedModel):
    """A model whose constructor loads its backbone."""

    config_class, _supports_sdpa = transformers.LlamaConfig, True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.LlamaModel.from_pretrained(config.path)
        self.score = torch.nn.Linear(config.hidden_size, 2)


def test_what_is_lowered_in_a_model_that_cannot_be_built_from_its_config(tmp_path: Path) -> None:
    """The frequencies of RoPE were rounded to 16 bits inside a model with a second argument, and a backbone that the
    model's constructor loads stayed in fp32."""
    inner, precision = zoo.build("llama").model, Precision("bf16", False, torch.device("cpu"))
    inner.save_pretrained(tmp_path)
    config = copy.deepcopy(inner.config)
    config.path = str(tmp_path)
    for model in (WithHeads(config, 2), Loading(config)):
        lowered = precision.lowered(torch.nn.ModuleDict({"other": torch.nn.Linear(1, 1), "model": model}))
        assert lowered.issuperset(model.parameters())
        assert lowered.isdisjoint(model.buffers())
        assert [*model.buffers()]


def scales(scaling: LossScale, overflows: str) -> list[float]:
    """The scale after each step: "x" is an overflow."""
    values = []
    for step in overflows:
        scaling.update(step == "x")
        values.append(scaling.value)
    return values


def test_a_loss_scale_is_doubled_after_finite_steps_and_halved_by_an_overflow() -> None:
    scaling = LossScale(initial=8.0, interval=3)
    assert scales(scaling, "..x.......") == [8, 8, 4, 4, 4, 8, 8, 8, 16, 16]
    assert scales(LossScale(initial=2.0**31, interval=1), "..") == [2.0**32] * 2
    assert scales(LossScale(initial=2.0), "xx") == [1.0] * 2
    assert LossScale().interval == 1000
    assert scales(scaling, ".") == [16]
    resumed = LossScale(interval=3)
    resumed.load_state_dict(scaling.state_dict())
    assert scales(resumed, "....") == [32, 32, 32, 64]


def overflowing(world_stage: int) -> list[Any]:
    """fp16 training in which one stage's gradient overflows at the third step."""
    model = zoo.build("gpt2")
    split = Split(model, dist.get_world_size(), zoo.batch("gpt2"), num_microbatches=2, precision="fp16", max_norm=1.0)
    scaling: Any = split.model.pipeline.scaling
    seen: list[Any] = []
    for step in range(6):
        loss = float(split.backward(zoo.batch("gpt2", seed=0))["loss"])
        if step == 2 and split.plugin.grid.stage == world_stage:
            next(p for p in split.held.values() if p.grad is not None).grad.view(-1)[0] = float("inf")
        before = {name: p.detach().clone() for name, p in split.held.items()}
        scale = scaling.value
        split.step()
        moved = any(not torch.equal(p, before[name]) for name, p in split.held.items())
        seen.append((loss, scale, scaling.value, moved))
    if split.plugin.grid.stage == world_stage:
        parameter = next(iter(split.held.values()))
        parameter.grad = torch.full_like(parameter, float("inf"), dtype=torch.float32)
    with pytest.raises(ConfigurationError, match="norm is inf, and error_if_nonfinite=True"):
        split.optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)
    with pytest.raises(UsageError, match=r"step\(closure\) does not support precision='fp16'"):
        split.optimizer.step(lambda: None)
    return seen


@pytest.mark.turns
@pytest.mark.parametrize("stage", [0, 1])
def test_an_overflow_on_one_stage_leaves_the_step_out_on_all(pool: Pool, stage: int) -> None:
    for seen in pool.run(overflowing, 2, stage):
        assert [moved for *_, moved in seen] == [True, True, False, True, True, True]
        assert [after / before for _, before, after, _ in seen] == [1, 1, 0.5, 1, 1, 1]
        losses = [loss for loss, *_ in seen]
        assert losses[2] == losses[3] and losses[-1] < losses[0]


def scaled() -> float:
    """The largest relative difference between fp16's gradients, scale taken off, and fp32's."""
    model, data = zoo.build("llama"), zoo.batch("llama")
    unsplit = copy.deepcopy(model)
    unsplit(**data).loss.backward()
    split = Split(model, dist.get_world_size(), data, num_microbatches=2, precision="fp16", initial_scale=2.0**10)
    split.backward(data)
    norm = split.optimizer.get_grad_norm()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in unsplit.parameters() if p.grad is not None]))
    assert norm == pytest.approx(expected, rel=0.02)
    split.optimizer.clip_grad_by_norm(1e9, error_if_nonfinite=True)  # takes the scale off
    reference = {name: p.grad for name, p in unsplit.named_parameters()}
    for name, parameter in split.held.items():
        assert (parameter.grad is None) == (reference[name] is None), name
    return largest_error(_error(p.grad, reference[name]) for name, p in split.held.items() if p.grad is not None)


def _error(gradient: Tensor, expected: Tensor | None) -> float:
    assert expected is not None
    return float((gradient - expected).norm() / expected.norm())


def test_a_gradient_beyond_fp16_is_infinite() -> None:
    """A GPU raises RuntimeError where it fills an fp16 tensor with 2**17: training ended after 2,000 finite steps if
    the loss was in fp16 (T5, classifiers)."""
    with mock.patch("torch.full_like", wraps=torch.full_like) as filled:
        gradient = filled_like(torch.ones((), dtype=torch.float16), 2.0**17)
    assert gradient.isinf() and gradient.dtype is torch.float16
    assert filled.call_args.kwargs == {"dtype": torch.float32}


@pytest.mark.turns
def test_gradients_of_fp16_are_those_of_the_loss(pool: Pool) -> None:
    assert largest_error(pool.run(scaled, 2)) < 0.05


class Taught(torch.nn.Module):
    """A regression that takes images of different sizes, in a list, and optionally its targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))

    def forward(self, images: Any, targets: Any = None) -> Tensor:
        x = torch.stack([image.mean(0) for image in images]) if isinstance(images, list) else images
        for layer in self.layers:
            x = layer(x)
        return x


EXACT, LOW = 1234.5, torch.tensor(1234.5).bfloat16().item()
FIRST, SAMPLES = torch.full((4, 4), EXACT), [torch.full((1 + row, 4), EXACT) for row in range(4)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ((FIRST, FIRST), [LOW, EXACT]),  # positional targets
        ((FIRST, FIRST, {"teacher": FIRST}), [LOW, EXACT, EXACT]),  # the model takes two entries
        ({"images": FIRST, "criterion.teacher": FIRST}, [LOW, EXACT]),
        ({"images": FIRST, "criterion.of": {"teacher": FIRST}}, [LOW, EXACT]),
        ({"images": SAMPLES, "targets": SAMPLES}, [LOW, EXACT]),
        ((SAMPLES, [{"boxes": sample} for sample in SAMPLES]), [LOW, EXACT]),
        ((SAMPLES, FIRST, SAMPLES), [LOW, EXACT, EXACT]),
    ],
)
def test_what_only_the_loss_reads_stays_fp32(data: Any, expected: list[float]) -> None:
    """A teacher's logits lost 16 of their 24 bits before the loss; images of different sizes were not cast."""
    batch = Precision("bf16", False, torch.device("cpu")).of_batch(read_batch(Taught(), data))
    assert [tensors_in(leaf)[0].flatten()[0].item() for leaf in batch.leaves] == expected


def test_positions_of_videos_are_those_of_fp32() -> None:
    """A user trained Qwen2.5-VL on videos in bf16. The spacing of the frames was rounded to 8 bits, and with it the
    positions from the 15th frame on, without an error."""
    model = build(next(entry for entry in find("qwen2_5_vl") if entry.task == "image-text-to-text"))
    frames, spacing = 100, torch.tensor([2 / 1.94])
    kinds = torch.tensor([[0] + [2] * frames + [0]])
    sizes = {"mm_token_type_ids": kinds, "video_grid_thw": torch.tensor([[frames, 2, 2]])}
    data = {"input_ids": torch.ones_like(kinds), "pixel_values_videos": torch.rand(4 * frames, 6), **sizes}
    read = Precision("bf16", False, torch.device("cpu")).of_batch(
        read_batch(model, {**data, "second_per_grid_ts": spacing})
    )
    assert read.tensors["pixel_values_videos"].dtype is torch.bfloat16
    positions = [
        model.model.get_rope_index(data["input_ids"], **sizes, second_per_grid_ts=seconds)[0]
        for seconds in (spacing, read.tensors["second_per_grid_ts"])
    ]
    assert torch.equal(*positions)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_values_beyond_the_range_of_16_bits_stay_finite(name: str) -> None:
    """An additive mask of fp32's smallest values became -inf, and rows that it masked everywhere became NaN."""
    given = torch.tensor([[torch.finfo(torch.float32).min, -1e9, 0.5, torch.inf, -torch.inf, torch.nan]])
    read = Precision(name, False, torch.device("cpu")).of_batch(read_batch(Taught(), {"images": given}))
    tensor = read.tensors["images"]
    is_finite = torch.tensor([[True, True, True, False, False, False]])
    assert torch.equal(tensor.isfinite(), is_finite) and tensor[0, 2] == 0.5
    assert tensor[0, 0] == torch.finfo(tensor.dtype).min and tensor[0, 3:5].tolist() == [torch.inf, -torch.inf]


def priced() -> list[float]:
    """The losses of batches with targets beyond fp16's largest value."""
    x, y = torch.ones(4, 4), torch.full((4, 4), 1e5)
    kinds: list[tuple[torch.nn.Module, Any, Any]] = [
        (Taught().layers, (x, y), 1),
        (Taught(), {"images": x, "criterion.y": y}, "criterion.y"),
        (Taught(), {"images": [x[:1], x[:2], x[:3], x], "criterion.y": y}, "criterion.y"),
    ]
    losses = []
    for model, data, key in kinds:
        engine = pipeshard.initialize(
            model,
            torch.optim.SGD(model.parameters()),
            lambda out, batch, key=key: torch.nn.functional.l1_loss(out, batch[key]),
            pp_size=dist.get_world_size(),
            num_microbatches=2,
            precision="fp16",
            dry_run_input=data,
        )
        losses.append(float(engine.execute_pipeline(iter([data]))["loss"]))
    return losses


@pytest.mark.turns
def test_targets_beyond_fp16_are_finite(pool: Pool) -> None:
    """A price of 1e5 became inf where the model was cast to fp16: all steps were skipped."""
    assert pool.run(priced, 2)[0] == pytest.approx([1e5] * 3, rel=1e-4)


def cast_after_boost(precision: str) -> list[str]:
    """What is said of steps of a model that was cast after boost, in place and in an evaluation alone."""
    data, said = zoo.batch("gpt2"), list[str]()
    split = Split(zoo.build("gpt2"), 1, data, num_microbatches=2, precision=precision)
    before, other = split.model.unwrap().dtype, torch.float32 if precision == "bf16" else torch.bfloat16
    split.backward(data)
    split.step()
    split.model.unwrap().to(other)
    with torch.no_grad():
        assert split.model(**data).loss.isfinite()
    for step in (lambda: split.backward(data), lambda: split.model(**data)):
        with pytest.raises(UsageError) as caught:
            step()
        said.append(str(caught.value))
    split.model.unwrap().to(before)
    split.backward(data)
    split.step()
    return said


@pytest.mark.local
@pytest.mark.turns
@pytest.mark.parametrize(("precision", "told"), [("fp32", "float32 at boost, but is bfloat16"), ("bf16", "is float32")])
def test_a_model_that_is_cast_after_boost_does_not_train(pool: Pool, precision: str, told: str) -> None:
    """After .float() the optimizer updated values that the model no longer read, silently; after .bfloat16(), a step
    advised a sample for the trace, which did not help."""
    (said,) = pool.run(cast_after_boost, 1, precision)
    assert all(told in each and "cast the model before boost" in each for each in said)
