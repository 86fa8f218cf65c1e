"""Tests of lists of layers: exact for every number of stages, and built only by the ranks that hold them."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeshard import LayerSpec, PipelineModule, TiedLayerSpec, build
from pipeshard.batch.read import read_batch
from pipeshard.errors import ConfigurationError, PipeshardError, UsageError
from pipeshard.split.ties import Ownership, names_of
from tests.checkpoint.test_sequential import sequential
from tests.hooks import register_unseen
from tests.pool import Pool, WorkerError
from tests.unsplit import LEARNING_RATE, Split, gradient_error, parameter_error

pytestmark = pytest.mark.local

V, H = 17, 8
BOTH = ["inner.weight", "inner.bias"]


class Block(nn.Module):
    """A layer with all that a constructor may make: parameters, buffers that are saved or not, attributes."""

    made = 0  # with memory

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.linear, self.scale = nn.LayerNorm(width), nn.Linear(width, width), scale
        self.register_buffer("gain", torch.rand(width))
        self.register_buffer("offset", torch.rand(width), persistent=False)
        self.table = torch.rand(width)
        self.parts = {"linear": self.linear}
        self.dropout = nn.Dropout(0.0)
        Block.made += not self.table.is_meta

    def forward(self, x: Tensor) -> Tensor:
        y = self.parts["linear"](self.norm(x)) * self.gain + self.offset
        return x + self.dropout(torch.tanh(y)) * self.table * self.scale


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(H, H), nn.Parameter(torch.randn(H))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * self.own


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias = nn.Parameter(torch.randn(V, H)), nn.Parameter(torch.randn(V))


def logits(head: Head, x: Tensor) -> Tensor:
    return x @ head.table.T + head.bias


def around(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x + (x @ embedding.weight.T).softmax(-1) @ embedding.weight


def halve(x: Tensor) -> Tensor:
    return x * 0.5


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten())


def tied() -> list[Any]:
    """Two keys of three occurrences each: one ties one parameter under two names, the other two parameters."""
    return [
        TiedLayerSpec("embed", nn.Embedding, V, H),
        LayerSpec(Block, H),
        TiedLayerSpec("mix", Mixer, tied_weight_attr=BOTH),
        halve,
        TiedLayerSpec("embed", nn.Embedding, V, H, forward_fn=around),
        LayerSpec(Block, H, scale=0.5),
        TiedLayerSpec("mix", Mixer, tied_weight_attr=BOTH),
        lambda x: x.sin(),
        TiedLayerSpec("mix", Mixer, tied_weight_attr=BOTH),
        LayerSpec(nn.LayerNorm, H),
        TiedLayerSpec("embed", Head, forward_fn=logits, tied_weight_attr="table"),
    ]


def batch(seed: int = 0, rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, V, (rows, 5), generator=generator) for _ in range(2))
    return ids, labels


def unsplit(layers: list[Any], **options: Any) -> PipelineModule:
    torch.manual_seed(0)
    return PipelineModule(layers, **options).build()


def split_of(module: PipelineModule, m: int = 3, **options: Any) -> Split:
    torch.manual_seed(dist.get_rank())  # the first rank's counts
    return Split(module, dist.get_world_size(), batch(), num_microbatches=m, **options)


def exact(m: int = 3, tie: Callable[[], Any] | None = None, **options: Any) -> list[int]:
    """Loss, gradients, norm and parameters of three steps; returns how often each layer of a spec was built here."""
    reference = unsplit(tied())
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE)
    specs, Block.made = tied(), 0
    with tie() if tie else contextlib.nullcontext():
        split = split_of(PipelineModule(specs, loss_fn=loss_fn), m, **options)
    assert parameter_error(split, reference) == 0
    builds = [spec.builds if isinstance(spec, LayerSpec) else -1 for spec in specs]
    policy = split.model.pipeline.policy
    here = {int(c.unit.split(".")[1]) for c, s in zip(policy.flow.calls, policy.stages) if s in policy.chunks}
    assert builds == [int(k in here) if isinstance(spec, LayerSpec) else -1 for k, spec in enumerate(specs)]
    assert Block.made == len({1, 5} & here)
    for seed in range(3):
        ids, labels = batch(seed)
        loss = loss_fn(reference(ids), labels)
        loss.backward()
        found = split.backward(batch(seed), return_outputs=True)
        assert float(found["loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
        assert gradient_error(split, reference) < 1e-5
        norm = nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
        assert split.optimizer.get_grad_norm() == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        split.step()
    assert parameter_error(split, reference) < LEARNING_RATE / 10
    return builds


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize("p", [1, 2, 4])
def test_two_ties_of_three_are_exact_and_built_by_their_owners(pool: Pool, p: int) -> None:
    builds = pool.run(exact, p)
    assert [sum(of_ranks) for of_ranks in zip(*builds)] == [
        1 if isinstance(entry, LayerSpec) else -p for entry in tied()
    ]


CHUNKS = {"schedule": "interleaved", "num_model_chunks": 2, "partition": [2, 3, 3, 3]}


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.processes  # each rank counts the blocks that it makes
@pytest.mark.parametrize("options", [CHUNKS, {"schedule": "zbv", "partition": "uniform"}], ids=["interleaved", "zbv"])
def test_chunks_are_exact(pool: Pool, options: dict[str, Any]) -> None:
    """Interleaved, of the key "mix" rank 1 has the first occurrence, and rank 0 the second."""
    pool.run(exact, 2, **options)


def no_ties() -> Any:
    return mock.patch("pipeshard.layers.pipeline_module.tie", lambda layers, specs: None)


def values_of_the_first_rank() -> Any:
    return mock.patch.object(Ownership, "initializer", lambda self, name: min(self.holders(name)))


@pytest.mark.processes
@pytest.mark.parametrize("tie", [no_ties, values_of_the_first_rank])
def test_a_mutation_is_seen(pool: Pool, tie: Callable[[], Any]) -> None:
    with pytest.raises(WorkerError, match="parameter_error"):
        pool.run(exact, 2, tie=tie, **CHUNKS)


def test_the_meaning_is_that_of_plain_torch() -> None:
    model, (ids, _) = unsplit(tied()), batch()
    weight, blocks, mixers = (
        model.layers[0].weight,
        [model.layers[k] for k in (1, 5)],
        [model.layers[k] for k in (2, 6, 8)],
    )
    assert weight is model.layers[4].module.weight is model.layers[10].module.table
    assert all(mixer.inner.weight is mixers[0].inner.weight for mixer in mixers)
    assert all(mixer.inner.bias is mixers[0].inner.bias for mixer in mixers)
    assert mixers[0].own is not mixers[1].own and not torch.equal(mixers[0].own, mixers[1].own)
    x = mixers[0](blocks[0](weight[ids])) * 0.5
    x = mixers[2](mixers[1](blocks[1](x + (x @ weight.T).softmax(-1) @ weight)).sin())
    x = model.layers[9](x)
    assert torch.equal(model(ids), x @ weight.T + model.layers[10].module.bias)


class Attending(nn.Module):
    """A module whose method comes later in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(V, H))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)

    def attend(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Times:
    """A callable object, with a tensor and a method."""

    def __init__(self, factor: float) -> None:
        self.factor = torch.tensor(factor)

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor

    def divide(self, x: Tensor) -> Tensor:
        return x / self.factor


def scaled(block: nn.Module, by: float, x: Tensor) -> Tensor:
    return block(x) * by


def of_all_kinds() -> list[Any]:
    torch.manual_seed(5)
    embedding, block, times = Attending(), Block(H), Times(3.0)
    return [
        embedding,
        halve,
        lambda x: x + 1,
        LayerSpec(Block, H),
        functools.partial(torch.mul, 2.0),
        functools.partial(scaled, block, 0.5),
        times,
        torch.tanh,
        LayerSpec(Block, H, scale=2.0),
        times.divide,
        lambda x: x,
        nn.Sequential(nn.Linear(H, H), nn.ReLU(inplace=True)),
        embedding.attend,
    ]


def back_in_one() -> dict[str, Tensor]:
    """To the bit what the stages have; recomputed by the stages alone, and trained on without them."""
    module = PipelineModule(of_all_kinds(), loss_fn=loss_fn, activation_checkpoint_interval=3)
    assert module.layers[12].carried[0] is module.layers[0] and len(names_of(module)) == 15
    split = split_of(module)
    for seed in range(2):
        split.backward(batch(seed))
        split.step()
    model = sequential(split)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = batch(9)
    outputs = split.evaluate(data, return_outputs=True)["outputs"]
    if outputs is not None:
        with torch.no_grad():
            parts = [part.call(model) for part in read_batch(model, data).split(num_microbatches=3)]
        assert torch.equal(outputs, torch.cat(parts))
    assert not any("pipeshard_blueprint" in vars(module) for module in model.modules())
    tables = [torch.zeros(2, H) for _ in range(dist.get_world_size())]
    mine = torch.stack([model.layers[k].table for k in (3, 8)])
    dist.all_gather(tables, mine)
    assert all(torch.equal(table, mine) for table in tables)

    runs: list[int] = []
    for norm in filter(lambda module: isinstance(module, nn.LayerNorm), model.modules()):
        norm.register_forward_pre_hook(lambda *_: runs.append(1))
    loss_fn(model(data[0]), data[1]).backward()
    assert len(runs) == 3
    for _ in range(2):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.layers[6].fn.factor *= 2
    assert all(torch.equal(tensor, state[name]) for name, tensor in sequential(split).state_dict().items())
    again = copy.deepcopy(model)
    assert torch.equal(again(data[0]), model(data[0]))
    split_of(model).backward(data)
    return state


@pytest.mark.turns
def test_back_in_one_module_to_the_bit(pool: Pool) -> None:
    (expected,) = pool.run(back_in_one, 1)
    for state in pool.run(back_in_one, 3):
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            assert torch.allclose(tensor, expected[name], rtol=0, atol=LEARNING_RATE / 10), name


def recomputed(interval: int, classes: list[str] | None = None, **options: Any) -> int:
    named = {"activation_checkpoint_interval": interval, "checkpointable_layers": classes}
    module = PipelineModule(of_all_kinds(), loss_fn=loss_fn, **named)
    split = split_of(module, m=1, **options)
    runs: list[int] = []
    policy = split.model.pipeline.policy
    for unit in policy.get_held_layers():
        for inner in unit.modules():
            if isinstance(inner, nn.LayerNorm):
                register_unseen(inner, lambda *_: runs.append(1))
    split.backward(batch())
    return len(runs)


@pytest.mark.turns
def test_layers_are_recomputed_in_a_pipeline_unless_the_plugin_says_which(pool: Pool) -> None:
    assert sum(pool.run(recomputed, 2, 0)) == 3
    assert sum(pool.run(recomputed, 2, 3)) == 6
    assert sum(pool.run(recomputed, 2, 3, activation_checkpoint_interval=4)) == 4

    assert sum(pool.run(recomputed, 2, 3, ["Block"])) == 5 and sum(pool.run(recomputed, 2, 3, [])) == 3


@pytest.mark.turns
def test_layers_in_any_iterable_and_arguments_in_deepspeed_s_order(pool: Pool) -> None:
    """`PipelineModule(net, 2, None, loss_fn)`, as DeepSpeed's documentation has it, was refused for the Sequential, or
    took loss_fn for the method of partition."""
    torch.manual_seed(0)
    modules = [nn.Embedding(V, H), *(nn.Linear(H, H) for _ in range(3)), nn.Linear(H, V)]
    losses = pool.run(losses_of_iterables, 2, modules)
    reference = nn.Sequential(*modules)
    expected = loss_fn(reference(batch()[0]), batch()[1]).item()
    assert losses[0] == pytest.approx([expected] * 4, rel=1e-6) and losses[0] == losses[1]


def losses_of_iterables(modules: list[nn.Module]) -> list[float]:
    kinds: list[Callable[..., Any]] = [nn.ModuleList, lambda each: nn.Sequential(*each), tuple, iter]
    made = [PipelineModule(kind(copy.deepcopy(modules)), 2, None, loss_fn) for kind in kinds]
    return [float(split_of(module).backward(batch())["loss"]) for module in made]


class Convolutions(nn.Module):
    """AlexNet's form: two nn.Sequentials with what writes in place, and glue between them."""

    def __init__(self) -> None:
        super().__init__()
        relu, pooling = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), relu, pooling, nn.Conv2d(4, 6, 3), relu, pooling)
        self.classifier = nn.Sequential(nn.Identity(), nn.Linear(6, H), nn.ReLU(inplace=True), nn.Linear(H, V))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.classifier(torch.flatten(self.features(x), 1))
        return {"loss": nn.functional.cross_entropy(y, labels)}


def cut_in_sequentials(**options: Any) -> tuple[int, ...]:
    torch.manual_seed(0)
    model, data = Convolutions(), {"x": torch.randn(8, 3, 8, 8), "labels": torch.arange(8)}
    reference = copy.deepcopy(model)
    split = Split(model, dist.get_world_size(), data, num_microbatches=4, **options)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE)
    for _ in range(3):
        loss = reference(**data)["loss"]
        loss.backward()
        assert float(split.backward(data)["loss"]) == pytest.approx(float(loss), rel=1e-5)
        assert gradient_error(split, reference) < 1e-5
        optimizer.step()
        optimizer.zero_grad()
        split.step()
    assert parameter_error(split, reference) < LEARNING_RATE / 10
    return split.model.pipeline.policy.stages


@pytest.mark.turns
@pytest.mark.parametrize("options", [{}, {"schedule": "gpipe", "recompute": True, "partition": [2, 1, 4, 3]}])
def test_sequentials_inside_a_model_are_cut(pool: Pool, options: dict[str, Any]) -> None:
    """Each was one unit, so that AlexNet ran on two stages at most; cuts are between what writes in place, too."""
    stages = pool.run(cut_in_sequentials, 4, **options)
    assert stages == [stages[0]] * 4 and len(stages[0]) == 10 and max(stages[0]) == 3


METHODS: list[Any] = ["uniform", "parameters", "type:block", "type:halve|Attending", "profile", [4, 9], ["layers.2"]]


def partitions() -> list[int]:
    """The layers on the first stage, by each method, and where the plugin's argument wins."""
    made = [PipelineModule(of_all_kinds(), loss_fn=loss_fn, partition_method=method) for method in METHODS]
    splits = [split_of(module) for module in made]
    splits.append(split_of(PipelineModule(of_all_kinds(), partition_method="uniform"), partition=[1, 12]))
    return [split.model.pipeline.policy.stages.count(0) for split in splits]


@pytest.mark.turns
def test_partition_methods(pool: Pool) -> None:
    first, second = pool.run(partitions, 2)
    uniform, parameters, of_type, of_function, _, counts, after, of_plugin = first
    assert first == second and (counts, after, of_plugin) == (4, 3, 1)
    assert uniform in (6, 7) and parameters < 12 and 4 <= of_type <= 8 and of_function == 1


def built_and_saved(folder: str) -> None:
    """Saved by three stages; read by other stages, by plain torch, and evaluated without labels."""
    split = split_of(PipelineModule(tied(), loss_fn=loss_fn))
    split.backward(batch())
    split.step()
    split.booster.save_model(split.model, folder, shard=True)
    torch.manual_seed(3)
    other = Split(PipelineModule(tied(), loss_fn=loss_fn), dist.get_world_size(), batch(), num_microbatches=2)
    other.booster.load_model(other.model, folder)
    plain = PipelineModule(tied())
    plain.load_state_dict({k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()})
    expected = dict(plain.named_parameters())
    for trained in (split, other):
        assert all(torch.equal(p, expected[name]) for name, p in trained.held.items())
    found = split.evaluate((batch()[0],), return_outputs=True)
    assert found["loss"] is None
    whole = sequential(split)
    if found["outputs"] is not None:
        with torch.no_grad():
            assert torch.allclose(found["outputs"], whole(batch()[0]), atol=1e-6)


@pytest.mark.turns
@pytest.mark.processes
def test_saved_and_loaded(pool: Pool, tmp_path: Path) -> None:
    pool.run(built_and_saved, 3, str(tmp_path / "model"))


def filled(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def initialised(folder: str) -> None:
    """Drawn by a function of one's own, on other numbers of stages alike, or not at all, until they are loaded."""
    torch.manual_seed(0)
    one = Split(PipelineModule(tied(), loss_fn=loss_fn), 1, batch(), num_microbatches=1, dp_size=2, init_weights=filled)
    two = split_of(PipelineModule(tied(), loss_fn=loss_fn), init_weights=filled)
    built = unsplit(tied())
    for name, parameter in two.held.items():
        assert torch.equal(parameter, one.held[name]) and not torch.equal(parameter, built.get_parameter(name))
    assert torch.equal(two.model.unwrap().layers[0].weight, two.model.unwrap().layers[10].module.table)
    two.booster.save_model(two.model, folder, shard=True)
    blank = split_of(PipelineModule(tied(), loss_fn=loss_fn), init_weights=False)
    with pytest.raises(UsageError, match="have no values yet"):
        blank.backward(batch())
    blank.booster.load_model(blank.model, folder)
    assert torch.equal(blank.backward(batch())["loss"], two.backward(batch())["loss"])


@pytest.mark.turns
def test_other_initial_values(pool: Pool, tmp_path: Path) -> None:
    pool.run(initialised, 2, str(tmp_path / "model"))


def pair(x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return x[0] + x[1], x[0] - x[1]


def of_pairs() -> None:
    """A tuple stays one argument, of the first layer too, with labels or without."""
    module = PipelineModule([pair, LayerSpec(Paired), pair, lambda x: x[0] * x[1]], loss_fn=nn.MSELoss())
    a, b, y = torch.randn(3, 6, H, generator=torch.Generator().manual_seed(0))
    split = Split(module, 2, ((a, b), y), num_microbatches=2)
    loss = split.backward(((a, b), y))["loss"]
    model = sequential(split)
    assert torch.allclose(loss, nn.functional.mse_loss(model((a, b)), y))
    outputs = split.evaluate(((a, b),), return_outputs=True)["outputs"]
    assert outputs is None or torch.allclose(outputs, model((a, b)), atol=1e-6)


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(x[0]), x[1]


@pytest.mark.turns
def test_a_tuple_is_one_argument(pool: Pool) -> None:
    pool.run(of_pairs, 2)


def seeded(module: PipelineModule) -> dict[str, Tensor]:
    split = split_of(module)
    return {name: p.detach().clone() for name, p in split.held.items()}


@pytest.mark.turns
def test_seeds_of_layers(pool: Pool) -> None:
    def layers() -> list[Any]:
        return [LayerSpec(nn.Embedding, V, H), LayerSpec(nn.Linear, H, H), torch.tanh, LayerSpec(nn.Linear, H, V)]

    torch.manual_seed(1240)
    last = nn.Linear(H, V)
    state = torch.get_rng_state()
    model = PipelineModule(layers(), seed_layers=True, base_seed=1237).build()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.layers[3].weight, last.weight) and torch.equal(model.layers[3].bias, last.bias)
    model = PipelineModule(layers(), seed_layers=True, base_seed=617, seed_fn=doubled).build()
    assert torch.equal(model.layers[3].weight, last.weight)
    for held in pool.run(seeded, 2, PipelineModule(layers(), seed_layers=True, base_seed=1237)):
        assert all(torch.equal(last.get_parameter(name[9:]), p) for name, p in held.items() if name[:9] == "layers.3.")


def doubled(seed: int) -> None:
    torch.manual_seed(2 * seed)


def test_unsplit_it_is_an_ordinary_module() -> None:
    specs = tied()
    state = torch.get_rng_state()
    model = PipelineModule(specs)
    assert all(p.is_meta for p in model.parameters()) and not any(getattr(s, "builds", 0) for s in specs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copied = copy.deepcopy(model)
    model.layers[5].linear.requires_grad_(False)
    model.layers[1].dropout.p = 0.5
    model.eval()
    first = model(batch()[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert [s.builds for s in specs if isinstance(s, LayerSpec)] == [1] * 9
    assert not model.layers[5].linear.weight.requires_grad and model.layers[1].dropout.p == 0.5
    assert not model.layers[1].training and model.layers[1].parts["linear"] is model.layers[1].linear
    assert torch.equal(copied(batch()[0]), first)
    loss_fn(first, batch()[1]).backward()
    optimizer.step()
    assert not torch.equal(model(batch()[0]), first)
    assert PipelineModule(tied()).double()(batch()[0]).dtype == torch.float64
    assert not any(tensor.is_meta for tensor in PipelineModule(tied()).to("cpu").state_dict().values())


class Deciding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, int(torch.arange(width).sum()))


WEIGHT = nn.Linear(2, 2)


def with_a_default(x: Tensor, module: nn.Module = WEIGHT) -> Tensor:
    return module(x)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ([], {}, "requires a list or another iterable of at least one layer"),
        (nn.Linear(2, 2), {}, "requires a list or another iterable of at least one layer"),
        (Residual(nn.Linear(2, 2)), {}, "the Residual has its own forward, which would not run"),
        (hooked(nn.Sequential(nn.Linear(2, 2))), {}, "the Sequential has hooks, which would not run"),
        ([nn.Linear(2, 2), 3], {}, "layer 1 has type int, which is not callable: pass a module, a LayerSpec"),
        ([nn.ReLU], {}, r"layer 0 is the class ReLU, not an instance: pass LayerSpec\(ReLU, ...\) or ReLU\(...\)"),
        ([LayerSpec(Deciding, 4)], {}, r"layer 0, LayerSpec\(Deciding\), cannot be built on meta.*device='cpu'"),
        ([LayerSpec(torch.ones, 4)], {}, "must build an nn.Module, got an object of class Tensor"),
        ([LayerSpec(nn.Linear, 4)], {}, "missing 1 required positional argument"),
        (
            [with_a_default],
            {},
            "layer 0, the function with_a_default, uses an instance of Linear in its closure or defaults",
        ),
        (
            [functools.partial(torch.mul, WEIGHT.weight)],
            {},
            "uses an instance of Parameter as an argument or attribute, where pipeshard cannot track it",
        ),
        ([WEIGHT.weight.mul], {}, "the function mul, uses an instance of Parameter as an argument or attribute"),
        (
            [TiedLayerSpec("t", nn.Linear, 2, 2, tied_weight_attr="weigth")],
            {},
            r"TiedLayerSpec\('t'\) names 0.weigth.*did you mean 0.weight",
        ),
        (
            [TiedLayerSpec("t", nn.Linear, 2, n) for n in (2, 3)],
            {},
            r"TiedLayerSpec\('t'\): 0.weight is \(2, 2\) .*, but 1.weight is \(3, 2\)",
        ),
        (
            [TiedLayerSpec("t", Mixer, tied_weight_attr=names) for names in (BOTH, BOTH[:1])],
            {},
            "name different numbers of parameters",
        ),
        ([nn.Linear(2, 2)], {"partition_method": "best"}, "partition='best' is unknown"),
        ([nn.Linear(2, 2)], {"num_stages": 0}, "num_stages must be a positive integer, got 0"),
        ([nn.Linear(2, 2)], {"activation_checkpoint_interval": -1}, "activation_checkpoint_interval must be .* got -1"),
        ([nn.Linear(2, 2)], {"topology": loss_fn}, "topology=.*pass it as loss_fn="),
        ([nn.Linear(2, 2)], {"activation_checkpoint_func": max}, "activation_checkpoint_func=.*Omit this argument"),
        (
            [nn.Linear(2, 2)],
            {"checkpointable_layers": "Linear"},
            "checkpointable_layers must be a list of class names, got 'Linear'",
        ),
    ],
)
def test_what_cannot_work_is_named(layers: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PipelineModule(layers, **options)


class Growing(nn.Module):
    """Another shape each time."""

    made = 1

    def __init__(self) -> None:
        super().__init__()
        Growing.made += 1
        self.weight = nn.Parameter(torch.ones(Growing.made))


def test_a_layer_that_is_built_otherwise_is_named() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"layer 0 \(Growing\) was built on meta, but cannot be built with allocated .*weight has shape \(3,\)",
    ):
        PipelineModule([LayerSpec(Growing)]).build()


def mistakes() -> list[str]:
    messages = []
    split = split_of(PipelineModule(tied(), num_stages=2, loss_fn=loss_fn))
    attempts = [
        lambda: split_of(PipelineModule(tied(), num_stages=4, loss_fn=loss_fn)),
        lambda: split.model.unwrap().build(),
        lambda: split.model.unwrap()(batch()[0]),
        lambda: split.backward((batch()[0],)),
    ]
    for attempt in attempts:
        with pytest.raises(PipeshardError) as error:
            attempt()
        messages.append(str(error.value))
    split.backward(batch())
    return messages


@pytest.mark.turns
def test_mistakes_of_a_pipeline_are_named(pool: Pool) -> None:
    for messages in pool.run(mistakes, 2):
        assert "built for num_stages=4, but pp_size=2 and num_model_chunks=1 result in num_stages=2" in messages[0]
        assert "to_sequential" in messages[1] and "booster.execute_pipeline" in messages[2]
        assert "found no loss to train on" in messages[3]


def growing() -> None:
    split_of(PipelineModule([LayerSpec(nn.Embedding, V, H), LayerSpec(Wider), nn.Linear(H, V)], loss_fn=loss_fn))


class Choosing(nn.Module):
    """Other modules each time."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Choosing.made += 1
        self.layers = nn.ModuleList(nn.Identity() for _ in range(Choosing.made))


def test_initial_values_of_a_script_are_kept_or_refused() -> None:
    """A user initialized a PipelineModule by `apply`, as with DeepSpeed, or by a loop over its parameters. The layers
    were built later, with the values of their constructors."""

    def module() -> PipelineModule:
        return PipelineModule([LayerSpec(nn.Linear, 8, 8), torch.tanh, LayerSpec(nn.Linear, 8, 3)])

    def zero(layer: nn.Module) -> None:
        for parameter in layer.parameters(recurse=False):
            parameter.data.zero_()

    assert not any(p.is_meta or p.any() for p in module().apply(zero).parameters())
    written = module()
    nn.init.ones_(next(written.layers[2].parameters()))
    with pytest.raises(ConfigurationError, match=r"weight of layer 2 \(Linear\) was modified before"):
        written.build()
    for written in (module().build(), copy.deepcopy(module()).build()):
        nn.init.ones_(written.layers[2].weight)
        assert written.build().layers[2].weight.eq(1).all()


def test_a_layer_with_other_modules_is_named() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"layer 0 \(Choosing\).*the modules differ from the modules on meta \(the first difference is layers.1\)",
    ):
        PipelineModule([LayerSpec(Choosing)]).build()


class Wider(Growing):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


@pytest.mark.processes
def test_what_fails_on_one_stage_is_told_on_all(pool: Pool) -> None:
    first, second = pool.run_expecting(PipeshardError, growing, 2)
    assert "was built on meta, but cannot be built with allocated tensors" in first and "cannot be built" in second
    assert {"failed in booster.boost" in text for text in (first, second)} == {True, False}


@pytest.mark.parametrize(
    "make",
    [
        lambda: LayerSpec(nn.Linear(2, 2)),
        lambda: LayerSpec(nn.Sequential, nn.Linear(2, 2)),
        lambda: LayerSpec(nn.TransformerEncoder, encoder_layer=nn.TransformerEncoderLayer(4, 2), num_layers=2),
    ],
)
def test_a_spec_of_a_module_that_is_built_is_refused(make: Callable[[], LayerSpec]) -> None:
    """Two ended in an error of torch about copies of tensors on meta. In the third, torch copies the layer: its values
    were those of each rank's own random numbers, so replicas began to train from different weights."""
    with pytest.raises(UsageError, match=r"LayerSpec got an instance of \w+,.*the layer directly"):
        make()


class Listed(nn.Sequential):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(*layers)


@pytest.mark.parametrize(
    "spec",
    [
        lambda layer: LayerSpec(Listed, [layer]),
        lambda layer: LayerSpec(lambda: layer),
        lambda layer: LayerSpec(functools.partial(nn.Sequential, layer)),
    ],
)
def test_a_spec_keeps_the_values_of_modules_that_exist(spec: Callable[[nn.Module], LayerSpec]) -> None:
    """A user passed pretrained layers to specs in a list, a function and a partial. Their values were lost, and stages
    trained random ones without a word."""
    layer = nn.Linear(2, 2)
    with pytest.raises(
        UsageError, match=r"layer 1, LayerSpec\(.*contains an existing module \(Linear\).*the existing module directly"
    ):
        PipelineModule([nn.Linear(2, 2), spec(layer)])
    assert not layer.weight.is_meta


def test_a_spec_takes_a_constructor_of_tensors_on_the_cpu() -> None:
    shared = nn.GELU()
    build = lambda: nn.Sequential(nn.Linear(2, 2, device="cpu"), shared)  # noqa: E731
    model = PipelineModule([nn.Linear(2, 2), LayerSpec(build)])
    assert model.layers[1][0].weight.is_meta and model(torch.ones(1, 2)).shape == (1, 2)


def test_a_spec_takes_modules_without_values() -> None:
    model = PipelineModule([LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.Sequential, nn.GELU())])
    assert model(torch.ones(1, 2)).shape == (1, 2)


class Sharing(nn.Module):
    """A layer with a config that has a list of losses, and another object from outside, as in Megatron's layers."""

    def __init__(self, config: SimpleNamespace, other: Any) -> None:
        super().__init__()
        self.linear, self.config, self.other = nn.Linear(H, H), config, other
        self.known = {"config": config, "linear": self.linear}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.config.temperature
        self.known["config"].losses.append(y.square().mean())
        return y


@pytest.mark.parametrize("other", [math, threading.Lock(), None])
def test_layers_of_specs_share_what_they_are_given(other: Any) -> None:
    """A build copied the config: layers did not see later changes, and their losses did not reach the criterion. A lock
    or a Python module in an attribute was refused."""
    config = SimpleNamespace(temperature=1.0, losses=[])
    model = PipelineModule([LayerSpec(Sharing, config, other) for _ in range(3)])
    if other is None:  # modules and locks cannot be copied
        model = copy.deepcopy(model)
        config = model.layers[0].config
    first = model(torch.ones(2, H))
    config.temperature = 0.0
    assert first.any() and not model(torch.ones(2, H)).any() and len(config.losses) == 6
    assert all(layer.config is config and layer.other is other for layer in model.layers)
    assert all(layer.known["linear"] is layer.linear for layer in model.layers)


class WithFunctions(nn.Module):
    """A layer with functions that its constructor defines: of parameters, of other functions, and of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.alpha = nn.Linear(H, H), nn.Parameter(torch.ones(H))
        noise = torch.rand(H, device="cpu")

        def scale(x: Tensor) -> Tensor:
            return x * self.alpha

        self.act = lambda x: scale(x) + noise
        self.steps = [self.linear, lambda x, linear=self.linear: linear(x)]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return self.act(x)


def test_functions_of_a_layer_of_a_spec_use_its_parameters() -> None:
    """Functions belonged to the module that was built for the values, so alpha was not trained."""
    model = PipelineModule([LayerSpec(WithFunctions) for _ in range(2)])
    calls: list[nn.Module] = []
    model(torch.ones(2, H)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.layers[0].linear.register_forward_hook(lambda module, *_: calls.append(module))
    model(torch.ones(2, H))
    assert calls == [model.layers[0].linear] * 2


class WithCaptured(nn.Module):
    """A layer with functions that capture tensors, a lock and a counter as well as the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.noise, self.count = 3.0, torch.rand(H, device="cpu"), 0
        noise, slopes, lock, calls = self.noise, torch.linspace(1, 2, H), threading.Lock(), 0

        def noisy(x: Tensor) -> Tensor:
            nonlocal calls
            with lock:
                calls += 1
            return x + noise * self.scale

        def by_slopes(layer: nn.Module, x: Tensor) -> Tensor:
            layer.count = calls
            return x * slopes

        self.steps = (noisy, SimpleNamespace(call=MethodType(by_slopes, self)).call)

    def forward(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda y, step: step(y), self.steps, x)


def test_functions_of_a_layer_of_a_spec_use_its_tensors() -> None:
    """They used the meta tensors of the first build, or its random numbers, which were the same in every layer."""
    model = PipelineModule([LayerSpec(WithCaptured) for _ in range(2)])
    assert model(torch.ones(2, H)).shape == (2, H)
    for layer in model.layers:
        expected = (torch.ones(2, H) + layer.noise * 3) * torch.linspace(1, 2, H)
        assert torch.equal(layer(torch.ones(2, H)), expected) and layer.count == 2
    assert not torch.equal(model.layers[0].noise, model.layers[1].noise)


class WithPatched(nn.Module):
    """A layer with a patched forward, and functions that capture a bound method or a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        steps = [nn.Linear(H, H), nn.ReLU()]
        self.patched, self.linear, self.steps = nn.Linear(H, H), nn.Linear(H, H), nn.ModuleList(steps)
        original, linear = self.patched.forward, self.linear.forward
        self.patched.forward = lambda x: original(x) * 0.5
        self.act = functools.partial(lambda call, x: call(x), lambda x: linear(x) * 0.5)
        self.run = MethodType(lambda layer, x: functools.reduce(lambda y, step: step(y), steps, x), self)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.act(self.patched(x)))


def test_functions_of_a_layer_of_a_spec_may_capture_methods_and_lists() -> None:
    """Such functions used the modules of the second build: no parameter of the layer was trained."""
    model = PipelineModule([LayerSpec(WithPatched) for _ in range(2)])
    model(torch.ones(2, H)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(layer.run.__self__ is layer for layer in model.layers)


class Optioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.options: dict[str, Any] = {"scale": 1.0, "taps": [1], "linear": self.linear}
        self.options["self"] = self.options

    def forward(self, x: Tensor) -> Tensor:
        return self.options["linear"](x) * self.options["scale"]


def test_changes_of_dicts_and_lists_before_the_build_are_kept() -> None:
    """A build put the constructor's entries back."""
    model = PipelineModule([LayerSpec(Optioned) for _ in range(3)])
    model.layers[0].options["scale"] = 0.0
    model.layers[1].options["taps"].append(2)
    assert not model.build()(torch.ones(2, H)).isnan().any()
    assert [layer.options["scale"] for layer in model.layers] == [0.0, 1.0, 1.0]
    assert [layer.options["taps"] for layer in model.layers] == [[1], [1, 2], [1]]
    assert all(layer.options["linear"] is layer.linear for layer in model.layers)


class Tabled(nn.Module):
    """A layer with tensors and modules beside settings, in a dict that its function captures as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        steps = [[self.linear, 1.0], [nn.Linear(H, H), 1.0]]
        tables = self.tables = {"places": torch.arange(float(H)), "scale": 1.0, "steps": steps}
        self.act = lambda x: (self.linear(x) + tables["places"]) * tables["scale"]

    def forward(self, x: Tensor) -> Tensor:
        return sum((step(self.act(x)) * factor for step, factor in self.tables["steps"]), self.tables["places"])


def test_unchanged_entries_beside_changed_ones_get_values() -> None:
    """A changed setting kept all of the dict, also its tensors and modules on meta, and the first call failed."""
    plain, model = (PipelineModule([LayerSpec(Tabled) for _ in range(2)]) for _ in range(2))
    layer = model.layers[0]
    layer.tables["scale"] = layer.tables["steps"][1][1] = 0.0
    assert not model(torch.ones(2, H)).isnan().any() and layer.tables["steps"][0][0] is layer.linear
    places = torch.arange(float(H)).expand(2, H)
    assert torch.equal(layer(torch.ones(2, H)), places + layer.linear(torch.zeros(2, H)))
    built = plain.build().layers[0].tables["steps"][1]
    assert torch.equal(layer.tables["steps"][1][0].weight, built[0].weight) and built[1] == 1.0


class Wrapper(nn.Module):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.gain = base_layer, nn.Parameter(torch.full((H,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * self.gain


def test_layers_of_specs_that_are_wrapped_or_parametrized_before_the_build() -> None:
    """Both ended in a KeyError, without a remedy."""
    plain, model = (PipelineModule([LayerSpec(Optioned), LayerSpec(nn.LayerNorm, H)]) for _ in range(2))
    model.layers[0].options["linear"] = model.layers[0].linear = Wrapper(model.layers[0].linear)
    assert torch.equal(model.build().layers[0].linear.base_layer.weight, plain.build().layers[0].linear.weight)
    assert model(torch.ones(2, H)).shape == (2, H) and model.layers[0].linear.gain.eq(2).all()
    parametrized = PipelineModule([LayerSpec(nn.Linear, H, H)])
    nn.utils.parametrizations.weight_norm(parametrized.layers[0])
    with pytest.raises(ConfigurationError, match=r"does not create .*original0.*Call model.build\(\) before you add"):
        parametrized.build()


class TiedInside(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(H, H), nn.Linear(H, H))
        self[1].weight = self[0].weight


def test_a_wrapped_layer_with_tied_weights() -> None:
    """The second name of the weight was unknown, and ended in a KeyError."""
    model = PipelineModule([LayerSpec(TiedInside)])
    model.layers[0][1] = Wrapper(model.layers[0][1])
    first, second = model.build().layers[0]
    assert second.base_layer.weight is first.weight and model(torch.ones(2, H)).shape == (2, H)


def test_a_spec_of_an_lstm() -> None:
    """The recorded attributes had weak references to its parameters, with which no values could be set."""
    model = PipelineModule([LayerSpec(nn.LSTM, H, H), lambda outputs: outputs[0]])
    model(torch.ones(2, 3, H)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Scaling(PipelineModule):
    """The usual way to subclass DeepSpeed's class, with a method of its own as a layer."""

    def __init__(self) -> None:
        super().__init__([LayerSpec(nn.Linear, H, H), self.scale, functools.partial(self.scale, by=3.0), nn.ReLU()])
        self.alpha = nn.Parameter(torch.ones(H))

    def scale(self, x: Tensor, by: float = 2.0) -> Tensor:
        return x * self.alpha * by


def test_a_layer_may_be_a_method_of_the_model() -> None:
    """The model was registered below itself: eval(), state_dict() and to() ended in a RecursionError."""
    model = Scaling().double().eval().build()
    copied, x = copy.deepcopy(model), torch.ones(2, H).double()
    assert list(model.state_dict()) == ["alpha", "layers.0.weight", "layers.0.bias"]
    with torch.no_grad():
        copied.alpha.fill_(2.0)
    assert torch.allclose(copied(x), 4 * model(x)) and torch.equal(build(model, 2, batch=(x,))(x), model(x))


class WithOwnHead(PipelineModule):
    def __init__(self) -> None:
        head = TiedLayerSpec("words", nn.Embedding, V, H, forward_fn=self.logits)
        super().__init__([TiedLayerSpec("words", nn.Embedding, V, H), LayerSpec(nn.Linear, H, H), head])
        self.bias = nn.Parameter(torch.ones(V))

    def logits(self, embedding: nn.Embedding, x: Tensor) -> Tensor:
        return x @ embedding.weight.T + self.bias


def test_the_function_of_a_tied_layer_may_be_a_method_of_the_model() -> None:
    """eval() ended in a RecursionError."""
    model, x = WithOwnHead().eval().build(), torch.arange(V)[None]
    assert "layers.2.carried" not in dict(model.named_modules())
    assert torch.equal(build(model, 2, batch=(x,))(x), model(x))
