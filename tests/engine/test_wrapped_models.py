"""Tests of wrapped models: a wrapper around a model or its layers is removed, ignored, or refused at boost."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from pipeshard import CutPoint, build
from pipeshard.errors import ConfigurationError, PartitionError, PipeshardError, TraceError
from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, differences
from tests.zoo import TINY

pytestmark = pytest.mark.local


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.dropout(torch.tanh(self.a(x))))


class Net(nn.Module):
    """Calls its blocks in groups of `each`; each group in a checkpoint of its own, where `checks`."""

    def __init__(self, dropout: float = 0.0, each: int = 1, checks: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(11, 8), nn.ModuleList(Block(dropout) for _ in range(4))
        self.head, self.between = nn.Linear(8, 11), nn.Dropout(dropout)
        self.each, self.checks, self.options = each, checks, {"use_reentrant": reentrant}
        self.cuts: Any = [nn.Identity()] * 4

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        def group(x: Tensor, first: int) -> Tensor:
            for k in range(first, first + self.each):
                x = self.cuts[k](self.between(self.layers[k](x)))
            return x

        x = self.embed(ids)
        for first in range(0, 4, self.each):
            x = checkpoint(group, x, first, **self.options) if self.checks else group(x, first)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def data() -> dict[str, Tensor]:
    ids = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids.flip(1)}


def compiled_layer() -> nn.Module:
    model = Net()
    model.layers[1].compile(backend="eager")
    return model


def compiled_body() -> nn.Module:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(Net(), backend="eager")

        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            return self.net(ids, labels)

    return Outer()


def sharded() -> nn.Module:
    model = Net()
    fully_shard(model.layers[2])
    return model


def listed() -> nn.Module:
    model = Net()
    model.cuts = [CutPoint() for _ in range(4)]
    return model


def recomputed() -> nn.Module:
    """Its save raised KeyError after hours of training: parameters have other names than in its state_dict."""
    model = Net()
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    return model


def flexible() -> nn.Module:
    config = LlamaConfig(**TINY, attn_implementation="flex_attention")
    return LlamaForCausalLM(config)


def scripted() -> nn.Module:
    model = Net()
    model.layers[1] = torch.jit.trace(model.layers[1], torch.ones(2, 8))
    return model


def synced() -> nn.Module:
    model = Net()
    model.layers[1] = nn.SyncBatchNorm(8)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "ddp": (lambda: DistributedDataParallel(Net()), "the model is wrapped in DistributedDataParallel.*dp_size"),
    "fsdp": (sharded, r"layers\.2 is wrapped in FSDPModule.*fsdp=True"),
    "layer.compile": (compiled_layer, r"layers\.1 \(Block\) was compiled separately.*compile=True"),
    "compiled body": (compiled_body, r"net \(OptimizedModule\) was compiled separately"),
    "checkpoint_wrapper": (recomputed, r"layers\.1 is wrapped in ActivationWrapper.*pass recompute=True"),
    "flex_attention": (flexible, r"flex_attention.*call model\.set_attn_implementation\('sdpa'\) before boost"),
    "scripted layer": (scripted, r"layers\.1 is wrapped in ScriptModule.*release TorchScript parameters"),
    "synced batch norm": (synced, r"layers\.1 is an nn\.SyncBatchNorm.*use nn\.BatchNorm.*deferred_batch_norm=True"),
    "cuts in a list": (listed, "CutPoint that is not one of its modules.*nn.ModuleList"),
}


def dispatched(removed: bool) -> bool:
    model = dispatch_model(Net(), {"": "cpu"}, force_hooks=True)
    if removed:
        remove_hook_from_module(model, recurse=True)
    split = Split(model, dist.get_world_size(), data(), num_microbatches=2)
    return bool(torch.isfinite(split.backward(data())["loss"]))


@pytest.mark.turns
def test_the_hooks_of_a_device_map_are_refused(pool: Pool) -> None:
    """A user kept `device_map="auto"` of a script for one process. A layer failed, since accelerate's hook moved its
    inputs to the device of another rank."""
    for message in pool.run_expecting(ConfigurationError, dispatched, 2, False):
        assert "has accelerate's hook AlignDevicesHook" in message and "omit device_map" in message
    assert pool.run(dispatched, 2, True) == [True, True]


def with_default_device(at_boost: bool) -> bool:
    with torch.device("meta"):
        model = Net()
        if at_boost:
            Split(model, dist.get_world_size(), data(), num_microbatches=2)
    split = Split(model, dist.get_world_size(), data(), num_microbatches=2)
    return bool(torch.isfinite(split.backward(data())["loss"]))


@pytest.mark.turns
def test_another_default_device_is_refused(pool: Pool) -> None:
    """A user called `torch.set_default_device("cuda")`. The first step failed: the search for the loss's rule passed a
    generator of the CPU to a function that drew on the GPU."""
    for message in pool.run_expecting(ConfigurationError, with_default_device, 2, True):
        assert "the default device of torch is meta" in message and "only while you build the model" in message
    assert pool.run(with_default_device, 2, False) == [True, True]


def boosted(kind: str) -> None:
    Split(REFUSED[kind][0](), dist.get_world_size(), data(), num_microbatches=2)


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_is_refused_at_boost(pool: Pool, kind: str) -> None:
    """DDP hung in the first step, layer.compile() ended in dynamo's recursion, marks in a list were passed over, a
    scripted layer ended in a KeyError, a SyncBatchNorm in an error of CPUs, or on GPUs in a wait for other stages."""
    error = TraceError if kind == "cuts in a list" else ConfigurationError
    for message in pool.run_expecting(error, boosted, 2, kind):
        assert re.search(REFUSED[kind][1], message), message


def losses(make: Callable[[], nn.Module], world: int, **options: Any) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(3)  # what dropout draws depends on it
    split = Split(make(), world, data(), num_microbatches=2, **options)
    loss = split.backward(data())["loss"]
    return float(loss), {name: p.grad for name, p in split.held.items() if p.grad is not None}


def same(make: Callable[[], nn.Module], other: Callable[[], nn.Module], world: int, **options: Any) -> list[str]:
    (loss, gradients), (expected, others) = losses(make, world, **options), losses(other, world, **options)
    found = [name for name in gradients if not torch.equal(gradients[name], others[name.replace("._orig_mod", "")])]
    return found + ([] if loss == expected else ["loss"])


def compiled_as_a_whole() -> list[str]:
    def in_place() -> nn.Module:
        model = Net()
        model.compile(backend="eager")
        return model

    def layers() -> nn.Module:
        model = Net()
        model.layers[1].a.compile(backend="eager")
        return model

    def layer() -> nn.Module:
        model = Net()
        model.layers[1] = torch.compile(model.layers[1], backend="eager")  # type: ignore[assignment]
        return model

    whole = lambda: torch.compile(Net(), backend="eager")  # noqa: E731
    found = [same(make, Net, 1) for make in (whole, in_place, layers, layer)]
    later = Split(Net(), 1, data(), num_microbatches=2)
    later.model.unwrap().layers[0].compile(backend="eager")
    with pytest.raises(ConfigurationError, match=r"layers\.0 \(Block\) was compiled separately"):
        later.backward(data())
    return [name for names in found for name in names]


@pytest.mark.turns
@pytest.mark.processes
def test_compiled_models_run_as_they_are_written(pool: Pool) -> None:
    """Dynamo compiled the tracer itself, for minutes. A layer that is wrapped, or inside of one, stays compiled."""
    assert pool.run(compiled_as_a_whole, 1) == [[]]


def own_checkpoints(world: int, each: int, reentrant: bool, options: dict[str, Any]) -> list[str]:
    plain = lambda: Net(0.5, each)  # noqa: E731
    return same(lambda: Net(0.5, each, True, reentrant), plain, world, **options)


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("world", "each", "reentrant", "options"),
    [(1, 1, False, {}), (1, 2, True, {}), (2, 1, False, {"partition": [3, 3]}), (2, 2, False, {})],
)
def test_own_checkpoints_draw_again_what_they_drew(
    pool: Pool, world: int, each: int, reentrant: bool, options: dict[str, Any]
) -> None:
    """Every unit is seeded by its place, which a checkpoint around it knew nothing of: with dropout, gradients were
    those of other masks."""
    assert pool.run(own_checkpoints, world, world, each, reentrant, options) == [[]] * world


def recomputed_around_a_cut() -> list[str]:
    """A layer that reruns its forward is cut inside: the error, and both of its remedies beside the unsplit model."""

    def split(enabled: bool, **options: Any) -> list[str]:
        model, data = zoo.build("gpt2").train(), zoo.batch("gpt2")
        unsplit = Unsplit(copy.deepcopy(model))
        if enabled:
            model.gradient_checkpointing_enable()
        return differences(Split(model, 2, data, num_microbatches=2, **options), unsplit, data, num_microbatches=2)

    inside, refused = ["transformer.h.1.mlp"], r"h\.1 \(GPT2Block\) reruns .* cut after transformer\.h\.1, or call"
    with pytest.raises(ConfigurationError, match=refused):
        split(True, partition=inside)
    return [*split(True, partition=["transformer.h.1"]), *split(False, partition=inside, recompute=True)]


@pytest.mark.turns
def test_a_cut_inside_a_layer_that_is_recomputed_is_refused_at_boost(pool: Pool) -> None:
    """A user enabled gradient checkpointing, and cut inside a layer. The first step advised to enable gradient
    checkpointing before boost, as the user had done."""
    assert pool.run(recomputed_around_a_cut, 2) == [[]] * 2


@pytest.mark.turns
def test_stages_of_build_rerun_whole_layers() -> None:
    """A user built stages with a cut inside such a layer: the backward pass ended in an error of torch's checkpoint."""
    model, data = zoo.build("gpt2").train(), zoo.batch("gpt2")
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigurationError, match="cut after"):
        build(copy.deepcopy(model), ["transformer.h.1.mlp"], batch=data)
    build(model, ["transformer.h.1"], batch=data)(**data).loss.backward()


def cut_inside() -> None:
    Split(Net(each=2, checks=True), 2, data(), num_microbatches=2, partition=[2, 4])


def cut_later() -> str:
    model = Net(each=2, checks=True)
    model.checks = False
    split = Split(model, 2, data(), num_microbatches=2, partition=[2, 4])
    model.checks = True
    model.eval()
    with pytest.raises(PipeshardError) as caught:
        split.backward(data())
    return str(caught.value)


@pytest.mark.turns
def test_no_cut_falls_inside_of_a_checkpoint(pool: Pool) -> None:
    """It was an error amid the first backward: the stage that ran the group again did not hold all of it."""
    for message in pool.run_expecting(PartitionError, cut_inside, 2):
        assert "no cut is possible before unit layers.1: the model's own torch.utils.checkpoint" in message
    assert all("units layers.0 to layers.1 in the backward" in message for message in pool.run(cut_later, 2))
