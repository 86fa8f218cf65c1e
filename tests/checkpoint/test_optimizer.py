"""Tests of optimizer states, stored by name: four stages save them, and any number of stages loads them."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from colossalai.booster import Booster
from torch import Tensor, nn, optim
from torch.distributed.checkpoint import HuggingFaceStorageReader

from pipeshard import PipelinePlugin
from pipeshard.checkpoint import files
from pipeshard.checkpoint import optimizer as subject
from pipeshard.checkpoint import optimizer_content as written
from pipeshard.checkpoint.safetensors_files import RANK_FILES
from pipeshard.config import PipelineConfig
from pipeshard.engine.optimizer_trial import check_separable
from pipeshard.errors import CheckpointError, ConfigurationError
from tests import zoo
from tests.messages import assert_told_alike, messages_of, texts_of
from tests.pool import Pool
from tests.unsplit import Split


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Embeddings, of which most stages have none, in a group of their own."""
    named = dict(model.named_parameters())
    embeddings = [p for name, p in named.items() if "wte" in name or "wpe" in name]
    matrices = [p for name, p in named.items() if p.ndim > 1 and "wte" not in name and "wpe" not in name]
    vectors = [p for p in named.values() if p.ndim == 1]
    return [{"params": embeddings, "lr": 1e-4}, {"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


class Matrices(optim.SGD):
    """Keeps a matrix for each dimension of a parameter, in lists, as SOAP and Shampoo; none for long dimensions.

    With an OrderedDict, whose tensors were not found, each rank would load the first rank's slices, with no error.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state, sizes = self.state[parameter], parameter.shape
            if not state:
                state["GG"] = [torch.zeros(n, n, dtype=torch.float64) if n < 64 else [] for n in sizes]
                state["Q"] = OrderedDict(left=(torch.eye(sizes[0]), None), sizes=list(sizes))
            for dim, matrix in enumerate(state["GG"]):
                if isinstance(matrix, Tensor):
                    rows = parameter.grad.movedim(dim, 0).reshape(len(matrix), -1).double()
                    matrix += rows @ rows.T
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "adamw": lambda model: optim.AdamW(groups(model), lr=1e-3, betas=(0.8, 0.95)),
    "amsgrad": lambda model: optim.Adam(model.parameters(), amsgrad=True, lr=torch.tensor(1e-3)),
    "named": lambda model: optim.AdamW(model.named_parameters()),
    "sgd": lambda model: optim.SGD(groups(model), lr=1e-2),
    "momentum": lambda model: optim.SGD(groups(model), lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda model: optim.Adafactor(groups(model)),
    "transformers": lambda model: transformers.Adafactor(model.parameters(), lr=None, beta1=0.9),
    "adagrad": lambda model: optim.Adagrad(groups(model)),
    "asgd": lambda model: optim.ASGD(groups(model)),
    "lists": lambda model: Matrices(groups(model), lr=1e-2),
}


class Run:
    """A model of the zoo, one layer of it frozen, with some optimizer behind the Booster."""

    def __init__(self, make: Callable[[nn.Module], optim.Optimizer], name: str = "gpt2", seed: int = 0) -> None:
        model = zoo.build(name, seed=seed)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(".1." not in key)
        plugin = PipelinePlugin(pp_size=dist.get_world_size(), num_microbatches=2, dry_run_input=zoo.batch(name))
        self.name, self.booster = name, Booster(plugin=plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, make(model))

    def renew(self, make: Callable[[nn.Module], optim.Optimizer]) -> Run:
        """Another optimizer for the same model."""
        _, self.optimizer, *_ = self.booster.boost(self.model, make(self.model.unwrap()))
        return self

    def train(self, steps: int) -> None:
        for seed in range(steps):
            self.booster.execute_pipeline(
                iter([zoo.batch(self.name, seed=seed)]), self.model, None, self.optimizer, return_loss=False
            )
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        """The options of all groups, and the states of the parameters held here, by name."""
        names = self.model.pipeline.held_parameters()
        options = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self.optimizer.param_groups
        ]
        states = {names[p]: state for p, state in self.optimizer.optim.state.items() if state}
        return copy.deepcopy({"options": options} | states)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def saving(folder: Path) -> None:
    states, run = {}, Run(OPTIMIZERS["sgd"])
    for kind, make in OPTIMIZERS.items():
        run.renew(make)
        run.booster.save_optimizer(run.optimizer, f"{folder}/{kind}-fresh", shard=True)
        run.train(2)
        run.booster.save_optimizer(run.optimizer, f"{folder}/{kind}", shard=True)
        run.booster.save_optimizer(run.optimizer, f"{folder}/{kind}.pt")
        states[kind] = run.state
    torch.save(states, folder / f"states{dist.get_rank()}")


def loading(folder: Path) -> None:
    parts = [torch.load(path, weights_only=True) for path in sorted(folder.glob("states*"))]
    run = Run(OPTIMIZERS["sgd"], seed=1)
    held = {"options", *run.model.pipeline.held_parameters().values()}
    for kind, make in OPTIMIZERS.items():
        expected = {name: state for part in parts for name, state in part[kind].items() if name in held}
        for name in (kind, f"{kind}.pt"):
            run.renew(make)
            run.optimizer.param_groups[0]["lr"] = 7.0
            run.booster.load_optimizer(run.optimizer, f"{folder}/{name}")
            assert same(expected, run.state), name
        run.train(1)
        run.booster.load_optimizer(run.optimizer, f"{folder}/{kind}-fresh")
        assert run.state.keys() == {"options"} or kind == "adagrad"  # which has states before its first step


@pytest.mark.turns
def test_any_number_of_stages_loads_what_four_saved(pool: Pool, tmp_path: Path) -> None:
    pool.run(saving, 4, tmp_path)
    content = torch.load(tmp_path / "adamw.pt", weights_only=True)
    assert content["state"].keys() == {n for n, _ in zoo.build("gpt2").named_parameters() if ".1." not in n}
    assert content["state"]["transformer.wte.weight"]["exp_avg"].shape == (zoo.VOCABULARY, 32)
    assert content["param_groups"][0]["params"] == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    # Every tensor is in one file, a tied one too, and nothing else is; the second stage is frozen.
    stored = HuggingFaceStorageReader(str(tmp_path / "adamw")).read_metadata()
    assert sorted(path.name for path in (tmp_path / "adamw").iterdir()) == [
        "optimizer.pt",
        *(f"rank-{rank:05d}-00000.safetensors" for rank in (0, 2, 3)),
    ]
    assert len(stored.storage_data) == len(stored.state_dict_metadata) == 3 * len(content["state"])
    # The description, which all ranks exchange, has no values, and so none of matrices in lists.
    described = torch.load(tmp_path / "lists" / "optimizer.pt", weights_only=True)["state"]
    of_one = described["transformer.h.0.mlp.c_fc.weight"]
    (matrix, none), nested = of_one["GG"], of_one["Q"]
    assert matrix.is_meta and none == [] and nested["left"][0].is_meta and nested["left"][1] is None
    stored = HuggingFaceStorageReader(str(tmp_path / "lists")).read_metadata()
    names = {name.partition("c_fc.weight.")[2] for name in stored.state_dict_metadata if ".0.mlp.c_fc.weight" in name}
    assert names == {"GG[0]", "Q['left'][0]"}
    for p in (1, 2, 3):
        pool.run(loading, p, tmp_path)


def mixed(folder: Path) -> None:
    """States in another precision than their parameters keep it; torch alone would cast them."""
    run = Run(OPTIMIZERS["adamw"])
    run.train(1)
    for state in run.optimizer.optim.state.values():
        state["exp_avg"] = state["exp_avg"].double() + 1e-12
    before = run.state
    run.booster.save_optimizer(run.optimizer, f"{folder}/mixed", shard=True)
    run.booster.load_optimizer(run.optimizer, f"{folder}/mixed")
    assert same(before, run.state)


class Counting(optim.SGD):
    """Counts its steps under a key of the state that is no parameter, as MADGRAD does."""

    def step(self, closure: Any = None) -> Any:
        count = self.state.setdefault("k", torch.tensor([0]))
        count += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 / int(count)
        return super().step(closure)


def counted(folder: Path) -> list[Any]:
    """The counts after a load from a folder and from a file, and what is said of counts that differ or have no name."""
    run, said = Run(lambda model: Counting(model.parameters())), list[Any]()
    run.train(2)
    for name in ("folder", "file.pt"):
        run.booster.save_optimizer(run.optimizer, f"{folder}/{name}", shard=name == "folder")
        other = Run(lambda model: Counting(model.parameters()))
        other.booster.load_optimizer(other.optimizer, f"{folder}/{name}")
        other.train(1)
        said.append(int(other.optimizer.state["k"]))
    fresh = Run(lambda model: Counting(model.parameters()))
    fresh.booster.save_optimizer(fresh.optimizer, f"{folder}/fresh", shard=True)
    other.booster.load_optimizer(other.optimizer, f"{folder}/fresh")
    said.append("k" in other.optimizer.state)
    run.optimizer.state["k"] += dist.get_rank()
    other.optimizer.state["step",] = 1
    return said + refused_saves(folder, run, other)


def refused_saves(folder: Path, *runs: Run) -> list[str]:
    """The errors of saves that must be refused."""
    errors = []
    for run in runs:
        with pytest.raises(CheckpointError) as caught:
            run.booster.save_optimizer(run.optimizer, f"{folder}/wrong", shard=True)
        errors.append(str(caught.value))
    return errors


@pytest.mark.turns
@pytest.mark.local
def test_states_of_no_parameter_are_saved(pool: Pool, tmp_path: Path) -> None:
    """A counter beside the states of the parameters began at 0 again after each resume: nothing was said, and the
    learning rate that follows from it was that of the first step."""
    ranks = pool.run(counted, 2, tmp_path)
    assert ranks[0] == ranks[1]
    assert ranks[0][:3] == [3, 3, False]
    assert "state 'k', which belongs to no parameter, differs between rank 1 and an earlier rank" in ranks[0][3]
    assert "the key ('step',), which is not a parameter in the optimizer's groups" in ranks[0][4]


class Scheduled(optim.SGD):
    """Counts its steps in an attribute, which its state_dict adds to torch's two entries."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict["calls"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class Outer(optim.SGD):
    """Has a state_dict of its own layout, as wrappers of the Lookahead kind."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}


def scheduled(folder: Path) -> list[Any]:
    """The calls after loads from a folder, a file and an older folder; what is said of other entries and layouts."""

    def make(kind: type[optim.SGD] = Scheduled) -> Run:
        return Run(lambda model: kind(model.parameters(), lr=0.1))

    run, said = make(), list[Any]()
    run.train(2)
    for name in ("folder", "file.pt"):
        run.booster.save_optimizer(run.optimizer, f"{folder}/{name}", shard=name == "folder")
        other = make()
        other.booster.load_optimizer(other.optimizer, f"{folder}/{name}")
        said.append(other.optimizer.calls)
    if dist.get_rank() == 0:  # as an earlier version wrote it
        content = torch.load(folder / "file.pt", weights_only=True)
        torch.save({key: value for key, value in content.items() if key != "extra"}, folder / "older.pt")
    dist.barrier()
    other.train(1)
    other.booster.load_optimizer(other.optimizer, f"{folder}/older.pt")
    said.append(other.optimizer.calls)
    run.optimizer.optim.calls += dist.get_rank()
    other.optimizer.optim.calls = {1}
    return said + refused_saves(folder, run, other, make(Outer))


@pytest.mark.turns
@pytest.mark.local
def test_further_entries_of_a_state_dict_are_saved(pool: Pool, tmp_path: Path) -> None:
    """An optimizer that adapts to the number of its calls, which its own state_dict contains, began at 0 again after
    each resume, without a word. In one process, torch restores the number."""
    ranks = pool.run(scheduled, 2, tmp_path)
    assert ranks[0] == ranks[1]
    assert ranks[0][:3] == [2, 2, 3]
    assert "state 'calls', which belongs to no parameter, differs between rank 1 and an earlier rank" in ranks[0][3]
    assert "'calls' in the state_dict() of Scheduled cannot be saved (TypeError: a value of type set" in ranks[0][4]
    assert "the state_dict() of Outer has no 'state', so its states cannot be saved by parameter name" in ranks[0][5]


class Packed(Tensor):
    """Two tensors that look like one, as the states of torchao's 8-bit optimizers."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packed = next(arg for arg in args if isinstance(arg, Packed))
        return Packed(packed.codes.clone(), packed.scale.clone())  # of detach, and of a copy


class OfTorchao(optim.SGD):
    """A stand-in for torchao's AdamW8bit."""

    def __init__(self, parameters: Any, block_size: float = 256) -> None:
        super().__init__(parameters, lr=0.1)
        self.block_size = block_size

    def step(self, closure: Any = None) -> Any:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            codes = torch.zeros(parameter.shape, dtype=torch.uint8)
            self.state[parameter].setdefault("exp_avg", Packed(codes, torch.ones(1)))
        return super().step(closure)


OfTorchao.__module__ = "torchao.optim.adam"


def packed(folder: Path) -> list[str]:
    run, problems = Run(lambda model: OfTorchao(model.parameters())), []
    run.train(1)
    for shard in (False, True):
        with pytest.raises(CheckpointError) as caught:
            run.booster.save_optimizer(run.optimizer, str(folder / f"packed-{shard}"), shard=shard)
        problems.append(str(caught.value))
    with pytest.raises(CheckpointError) as caught:
        subject.check_savable(run.optimizer)
    return [*problems, str(caught.value), *map(str, folder.iterdir())]


@pytest.mark.turns
def test_states_of_several_tensors_are_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    """torchao's AdamW8bit trained, and after hours its first checkpoint failed: files could not be read back, or the
    error advised freeing disk space. A Trainer's check after the first step noticed nothing."""
    for problems in pool.run(packed, 2, tmp_path):
        assert len(problems) == 3
        assert all("its class Packed wraps several tensors" in problem for problem in problems)
        assert all("Use bitsandbytes.optim.AdamW8bit" in problem for problem in problems)


def of_numpy_and_objects(folder: Path) -> list[str]:
    """What is said of a set and of an object among the options and the states; numbers of numpy are saved."""
    run, said = Run(lambda model: Counting(model.parameters())), list[str]()
    run.train(1)

    def holders() -> list[Any]:
        """The first group, the states of a parameter, and those of no parameter."""
        return [
            run.optimizer.param_groups[0],
            run.optimizer.optim.state[run.optimizer.parameters[0]],
            run.optimizer.state,
        ]

    for holder in holders():
        holder["number"] = np.float64(0.5)
    run.booster.save_optimizer(run.optimizer, f"{folder}/state", shard=True)
    run.booster.load_optimizer(run.optimizer, f"{folder}/state")
    for strange in ({"wte", "wpe"}, SimpleNamespace()):
        for holder in holders():
            holder["names"] = strange
            with pytest.raises(CheckpointError) as caught:
                run.booster.save_optimizer(run.optimizer, f"{folder}/wrong", shard=True)
            del holder["names"]
            said.append(str(caught.value))
    return [*said, *(repr(holder["number"]) for holder in holders())]


@pytest.mark.turns
@pytest.mark.local
def test_what_a_checkpoint_cannot_contain_is_named(pool: Pool, tmp_path: Path) -> None:
    """A set among the options was "a value of type set", of no optimizer, group or key. One among the states was
    written, and could not be read; a number of numpy among the states was refused. An object had no name."""
    problems = "TypeError: a value of type set cannot be saved", "MessageError: this SimpleNamespace must contain only"
    for said in pool.run(of_numpy_and_objects, 2, tmp_path):
        for (option, state, shared), problem in zip((said[:3], said[3:6]), problems, strict=True):
            why = f"of Counting cannot be saved ({problem}"
            assert f"option 'names' of group 0 {why}" in option
            assert "state 'names' of transformer." in state and why in state
            assert f"state 'names' {why}" in shared
            assert all("): use tensors, numbers, str" in text for text in (option, state, shared))
        assert said[6:] == ["0.5"] * 3


def test_blocks_of_torchao_are_not_sliced() -> None:
    """torchao's AdamW8bit has one scale for 256 values, which are other values in shards. The trial at boost did not
    notice: its parameters are so small that their states are in fp32."""
    model, config = nn.Linear(4, 4), PipelineConfig(pp_size=2, num_microbatches=2, fsdp=True)
    grid: Any = SimpleNamespace(pp_size=2, tp_size=1, dp_size=2, first=True)
    with pytest.raises(ConfigurationError, match=r"OfTorchao needs whole parameters.*use zero_stage=1 instead"):
        check_separable(OfTorchao(model.parameters()), model, config, grid)
    check_separable(OfTorchao(model.parameters(), math.inf), model, config, grid)


@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"dp_size": 2}])
def test_updates_that_are_rounded_at_random_are_refused(sizes: dict[str, int]) -> None:
    """torchao's AdamW rounds to bf16 with torch's random numbers, one parameter after another: the stages of a tied
    weight, and replicas with other seeds, rounded one weight to different values."""
    grid: Any = SimpleNamespace(**{"pp_size": 1, "tp_size": 1, "dp_size": 1, "size": 2, "first": True} | sizes)
    low, config = nn.Linear(4, 4, dtype=torch.bfloat16), PipelineConfig(pp_size=1, num_microbatches=2)
    rounding = OfTorchao(low.parameters(), math.inf)
    rounding.bf16_stochastic_round = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"OfTorchao rounds.*stochastically.*precision='bf16'"):
        check_separable(rounding, low, config, grid)
    check_separable(OfTorchao(low.parameters(), math.inf), low, config, grid)
    check_separable(rounding, low, replace(config, precision="bf16"), grid)  # its fp32 values are not rounded
    full = nn.Linear(4, 4)
    rounding.param_groups[0]["params"] = [*full.parameters()]
    check_separable(rounding, full, config, grid)


def masters(split: Split) -> dict[str, Tensor]:
    """The fp32 values that this rank has."""
    weights = split.optimizer.weights.items()
    return {name: weight.master.detach().clone() for name, weight in weights if weight.master.dtype is torch.float32}


def optimizer_first(folder: Path, p: int, layout: dict[str, int]) -> None:
    """Loads the optimizer before the model, and then another model; into a model on meta, too."""
    data = zoo.batch("llama")

    def made(seed: int, device: str = "cpu", **options: Any) -> Split:
        with torch.device(device):
            model = zoo.build("llama", seed=seed, layers=2)
        return Split(model, p, data, num_microbatches=2, precision="bf16", **layout, **options)

    trained, other = made(0), made(1)
    for _ in range(2):
        trained.backward(data)
        trained.step()
    other.booster.save_model(other.model, f"{folder}/other", shard=True)
    trained.booster.save_model(trained.model, f"{folder}/model", shard=True)
    trained.booster.save_optimizer(trained.optimizer, f"{folder}/optimizer", shard=True)
    other.booster.load_optimizer(other.optimizer, f"{folder}/optimizer")
    other.booster.load_model(other.model, f"{folder}/model")
    assert same(masters(trained), masters(other))
    other.booster.load_model(other.model, f"{folder}/other")
    assert masters(other).keys() == masters(trained).keys()
    for name, value in masters(other).items():
        assert torch.equal(value, value.bfloat16().float()), name
    if not layout:
        blank = made(2, "meta", init_weights=False)
        assert all(bool(value.isnan().all()) for value in masters(blank).values())  # what was in memory is no value
        blank.booster.load_optimizer(blank.optimizer, f"{folder}/optimizer")
        blank.booster.load_model(blank.model, f"{folder}/model")
        assert same(masters(trained), masters(blank))


@pytest.mark.turns
@pytest.mark.parametrize(
    ("p", "layout"),
    [(2, {}), (1, {"tp_size": 2}), (1, {"dp_size": 2, "zero_stage": 1})],
    ids=["stages", "slices", "zero"],
)
def test_an_optimizer_may_be_loaded_before_its_model(
    pool: Pool, tmp_path: Path, p: int, layout: dict[str, int]
) -> None:
    """The weights in 16 bits were written over the fp32 values that the optimizer's checkpoint had just loaded: a
    resume in this order lost half of their digits without a word."""
    pool.run(optimizer_first, 2, tmp_path, p, layout)


@pytest.mark.turns
def test_states_keep_their_precision(pool: Pool, tmp_path: Path) -> None:
    pool.run(mixed, 2, tmp_path)


def of_another_model(folder: Path, p: int, layout: dict[str, int]) -> tuple[list[str], list[str]]:
    """Loads the optimizer of one run and the weights of another, in both orders. Returns the warnings of each order."""
    data = zoo.batch("llama")

    def made(seed: int, precision: str = "bf16") -> Split:
        model = zoo.build("llama", seed=seed, layers=2)
        return Split(model, p, data, num_microbatches=2, precision=precision, **layout)

    def step(split: Split) -> None:
        split.backward(data)
        split.step()

    def load(split: Split, *names: str) -> list[str]:
        with mock.patch.object(subject.logger, "warning") as warning:
            for name in names:
                if name == "optimizer":
                    split.booster.load_optimizer(split.optimizer, f"{folder}/{name}")
                else:
                    split.booster.load_model(split.model, f"{folder}/{name}")
        return texts_of(warning)

    trained, other = made(0), made(1)
    step(trained)
    other.booster.save_model(other.model, f"{folder}/other", shard=True)
    trained.booster.save_model(trained.model, f"{folder}/model", shard=True)
    trained.booster.save_optimizer(trained.optimizer, f"{folder}/optimizer", shard=True)
    expected = {name: value.float() for name, value in other.held.items()}
    for precision in ("fp32", "bf16"):
        one, two = made(2, precision), made(3, precision)
        warnings = load(one, "other", "optimizer"), load(two, "optimizer", "other")
        for split in (one, two):
            assert same({name: value.float() for name, value in split.held.items()}, expected)
            assert all(torch.equal(value, expected[name]) for name, value in masters(split).items())
            assert same(split.optimizer.state_dict()["state"], trained.optimizer.state_dict()["state"])
        step(one)  # then these are no longer the loaded weights: the run goes back to its own checkpoint
        assert load(one, "optimizer", "model") == []
        assert precision == "fp32" or same(masters(one), masters(trained))
    return warnings


@pytest.mark.turns
@pytest.mark.parametrize(("p", "layout"), [(2, {}), (1, {"dp_size": 2, "zero_stage": 1})], ids=["stages", "zero"])
def test_weights_of_another_model_are_kept_in_either_order(
    pool: Pool, tmp_path: Path, p: int, layout: dict[str, int]
) -> None:
    """A user loaded averaged weights, and then the optimizer of the run. In 16 bits, the optimizer's fp32 values were
    written over the averaged weights, so training silently continued from the run's own weights."""
    first, second = pool.run(of_another_model, 2, tmp_path, p, layout)
    assert first[1] == second[0] == second[1] == []  # the order without a warning, and the other rank
    (warning,) = first[0]
    assert f"{tmp_path}/optimizer was saved with weights that differ from the weights loaded into the model" in warning
    assert "first load the model that was saved with this optimizer" in warning


def wrong(folder: Path) -> list[str]:
    """Every mistake in turn; afterwards the optimizer is what it was, and can be saved and loaded."""

    def plain(model: nn.Module) -> optim.Optimizer:
        return optim.AdamW(model.parameters())

    def partly(model: nn.Module) -> optim.Optimizer:
        return optim.AdamW([p for name, p in model.named_parameters() if "ln_f" not in name])

    run, rank = Run(plain), dist.get_rank()
    run.train(1)
    foreign, strange, uneven = Run(plain), Run(plain), Run(plain)
    groups = foreign.optimizer.param_groups
    groups.append({**groups[0], "params": [nn.Parameter(torch.zeros(2))]})  # past add_param_group, which refuses it
    strange.optimizer.param_groups[0]["betas"] = lambda: 0.9
    uneven.optimizer.param_groups[0]["lr"] = float(rank)
    for name, other in {"llama": Run(plain, "llama"), "partly": Run(partly), "groups": Run(groups_of_three)}.items():
        other.booster.save_optimizer(other.optimizer, f"{folder}/{name}", shard=True)
    run.booster.save_optimizer(run.optimizer, f"{folder}/good", shard=True)
    run.booster.save_optimizer(run.optimizer, f"{folder}/good.pt")
    if rank == 0:
        _damage(folder)
    dist.barrier()

    def load(name: str, which: Run = run) -> None:
        which.booster.load_optimizer(which.optimizer, f"{folder}/{name}")

    def save(name: str, shard: bool = True, which: Run = run) -> None:
        which.booster.save_optimizer(which.optimizer, f"{folder}/{name}", shard=shard)

    def full_disk(name: str, shard: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(subject, "write_files" if shard else "_compact", _no_space)
            save(name, shard)

    attempts: list[Callable[[], Any]] = [
        lambda: load("llama"),
        lambda: load("partly"),
        lambda: load("good", Run(partly)),
        lambda: load("groups"),
        lambda: load("wide.pt"),
        lambda: load("nowhere"),
        lambda: load("else"),
        lambda: load("junk.pt"),
        lambda: load("torch.pt"),
        lambda: load("torn"),
        lambda: load("empty"),
        lambda: load("halved"),
        lambda: load("endless"),
        lambda: load("older"),
        lambda: load("good" if rank == 0 else "nowhere"),
        lambda: run.booster.load_optimizer(run.optimizer.unwrap(), f"{folder}/good"),
        lambda: run.booster.save_optimizer(run.optimizer.unwrap(), f"{folder}/good"),
        lambda: save("good.pt", shard=True),
        lambda: save("good", shard=False),
        lambda: save("foreign", which=foreign),
        lambda: save("strange", which=strange),
        lambda: save("uneven", which=uneven),
        lambda: full_disk("good", shard=True),
        lambda: full_disk("good.pt", shard=False),
    ]
    before = run.state
    messages = messages_of(attempts, CheckpointError)
    assert same(before, run.state)
    for name in ("good", "good.pt"):
        load(name)
        assert same(before, run.state)
        save(name, shard=name == "good")
    return messages


def groups_of_three(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(groups(model))


def _no_space(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def _damage(folder: Path) -> None:
    content = torch.load(folder / "good.pt", weights_only=True)
    content["parameters"]["transformer.wpe.weight"] = torch.empty(65, 32, device="meta")
    torch.save(content, folder / "wide.pt")
    (folder / "else").mkdir()
    (folder / "else" / "thesis.txt").write_text("years of work")
    (folder / "junk.pt").write_bytes(b"junk")
    torch.save(optim.AdamW([nn.Parameter(torch.zeros(2))]).state_dict(), folder / "torch.pt")
    for name in ("torn", "empty", "halved", "endless", "older"):
        shutil.copytree(folder / "good", folder / name)
    for path in (folder / "torn").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:1000])
    for path in (folder / "empty").glob("*.safetensors"):
        path.unlink()
    min((folder / "halved").glob("*.safetensors")).unlink()
    content = torch.load(folder / "good" / "optimizer.pt", weights_only=True)
    torch.save(content | {"format": "pipeshard optimizer 1"}, folder / "older" / "optimizer.pt")
    content["state"]["transformer.wpe.weight"]["exp_avg"] = torch.empty(2**40, 2**20, device="meta")
    torch.save(content, folder / "endless" / "optimizer.pt")


@pytest.mark.turns
def test_what_does_not_fit_is_refused_alike_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    expected = [
        "llama does not match this optimizer: transformer.wte.weight is missing; .*; and .* more",
        "partly does not match this optimizer: transformer.ln_f.weight is missing; transformer.ln_f.bias is missing"
        "[.] ",
        "good does not match this optimizer: transformer.ln_f.bias is unexpected; .*ln_f.weight is unexpected[.] Load ",
        "its number of parameter groups is 3, but the optimizer's is 1; "
        ".*h.0.ln_1.weight is in group 2, but in group 0 of",
        r"transformer.wpe.weight has shape \(65, 32\), but \(64, 32\) in the optimizer[.] Load a ",
        "nowhere is not an optimizer checkpoint .*does not exist",
        "else/optimizer.pt is not an optimizer checkpoint .*does not exist.*.*that booster.save_optimizer wrote",
        "junk.pt is not an optimizer checkpoint",
        "torch.pt is not in the format 'pipeshard optimizer 2'",
        "torn is damaged: SafetensorError: ",
        "empty is damaged: state.transformer.h.0.*exp_avg is missing; .* more[.] Load another checkpoint$",
        "halved is damaged: state.transformer.h.0.*exp_avg is missing; .* more[.] Load another checkpoint$",
        r"endless is damaged: .*exp_avg .* of shape \(64, 32\), but is described as .* \(1099511627776, 1048576\)",
        "older is not in the format 'pipeshard optimizer 2'",
        "nowhere is not an optimizer checkpoint .*does not exist",
        "this AdamW was not boosted",
        "this AdamW was not boosted",
        "good.pt is a file, but the save writes a folder",
        "good is a folder, but the save writes a file",
        r"group 1 has a parameter of shape \(2,\) that does not belong to the model",
        "contain only tensors, numbers and strings: .*lambda",
        "lr of group 0 is 0.0 on rank 0, but 1.0 on rank 1",
        "OSError: .*No space left on device",
        "OSError: .*No space left on device",
    ]
    assert_told_alike(pool.run(wrong, 2, tmp_path), expected)
    assert (tmp_path / "else" / "thesis.txt").read_text() == "years of work"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def described(*groups: dict[str, Any]) -> written.Content:
    return {"format": written.OPTIMIZER_FORMAT, "parameters": {}, "param_groups": [*groups], "state": {}, "shared": {}}


def test_options_of_a_group_are_compared_where_it_has_parameters() -> None:
    """An optimizer that counts steps in its groups (apex' FusedAdam) counts none for a group without parameters, as on
    a stage without embeddings: no checkpoint could be written."""
    counted, empty = {"params": ["wte.weight"], "lr": 0.1, "step": 3}, {"params": [], "lr": 0.1}
    whole, _ = written.merged_description([described(empty), described(counted), described(empty)])
    assert whole["param_groups"] == [counted]
    with pytest.raises(CheckpointError, match="step of group 0 is 3 on rank 1, but 4 on rank 2: use the same options"):
        written.merged_description([described(empty), described(counted), described({**counted, "step": 4})])


def checked(rate: float) -> None:
    run = Run(OPTIMIZERS["sgd"])
    run.optimizer.param_groups[1]["lr"] = rate * dist.get_rank()
    with pytest.raises(CheckpointError, match=r"lr of group 1 is 0.0 on rank 0, but 0.5 on rank 1"):
        subject.check_savable(run.optimizer)


@pytest.mark.turns
@pytest.mark.local
def test_options_that_differ_are_told_before_the_first_save(pool: Pool) -> None:
    """The check after a Trainer's first step looked at one rank's options only."""
    pool.run(checked, 2, 0.5)


def added_later(folder: Path) -> str:
    """What is said of a group that only the stage with its parameters has; a group that all ranks have is saved."""
    run = Run(lambda model: optim.AdamW([p for name, p in model.named_parameters() if "ln_f" not in name]))
    norm = list(run.model.unwrap().get_submodule("transformer.ln_f").parameters())
    if norm[0] in run.model.pipeline.held_parameters():
        run.optimizer.add_param_group({"params": norm})
    run.train(1)
    with pytest.raises(CheckpointError) as caught:
        run.booster.save_optimizer(run.optimizer, f"{folder}/state", shard=True)
    if norm[0] not in run.model.pipeline.held_parameters():
        run.optimizer.add_param_group({"params": norm})
    run.booster.save_optimizer(run.optimizer, f"{folder}/state", shard=True)
    before = run.state
    run.train(1)
    run.booster.load_optimizer(run.optimizer, f"{folder}/state")
    assert same(before, run.state)
    return str(caught.value)


@pytest.mark.turns
@pytest.mark.local
def test_a_group_that_only_some_ranks_have_is_told(pool: Pool, tmp_path: Path) -> None:
    """Training went on, and each save ended with "zip() argument 2 is longer than argument 1"."""
    first, second = pool.run(added_later, 2, tmp_path)
    assert first == second
    assert "the optimizer's numbers of parameter groups on the ranks are [1, 2]: call optimizer.add_par" in first


def interrupted(folder: Path) -> None:
    run = Run(OPTIMIZERS["adamw"])
    run.train(1)
    run.booster.save_optimizer(run.optimizer, f"{folder}/state", shard=True)
    before = run.state
    if dist.get_rank() == 0:
        (folder / "state").rename(folder / ".state.old")  # as if killed between the two renames
        (folder / ".state.writing").mkdir()
    dist.barrier()
    run.booster.load_optimizer(run.optimizer, f"{folder}/state")
    assert same(before, run.state)
    run.train(1)
    run.booster.save_optimizer(run.optimizer, f"{folder}/state", shard=True)
    after = run.state
    run.train(1)
    run.booster.load_optimizer(run.optimizer, f"{folder}/state")
    assert same(after, run.state) and not same(before, after)


@pytest.mark.turns
def test_a_save_that_was_killed_at_its_renames_is_undone(pool: Pool, tmp_path: Path) -> None:
    pool.run(interrupted, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def beside_a_model(folder: Path) -> list[str]:
    """Two saves of model and optimizer into one folder, in which the user also keeps a file."""
    run = Run(OPTIMIZERS["adamw"])
    for epoch in range(2):
        run.train(1)
        run.booster.save_model(run.model, f"{folder}/all", shard=True)
        run.booster.save_optimizer(run.optimizer, f"{folder}/all", shard=True)
        if dist.get_rank() == 0 and epoch == 0:
            (folder / "all" / "tokenizer.json").write_text("mine")
            (folder / "all" / "rank-00007-00000.safetensors").touch()  # of a rank that is no longer there
            (folder / ".all.old").mkdir()
            (folder / ".all.old" / "notes.txt").write_text("of a save that was killed after its renames")
        dist.barrier()
        if epoch == 0:
            run.booster.save_optimizer(run.optimizer, f"{folder}/all", shard=True)
            found = sorted(path.name for path in (folder / "all").iterdir())
    before = run.state
    run.train(1)
    run.booster.load_optimizer(run.optimizer, f"{folder}/all")
    assert same(before, run.state)
    return found


@pytest.mark.turns
def test_an_optimizer_is_saved_beside_other_files(pool: Pool, tmp_path: Path) -> None:
    """The second save of an optimizer removed all else in its folder: the model, and files of the user's own. Beside a
    model, it could be saved, and not loaded; after the model, it was refused, as if it would delete the model."""
    for found in pool.run(beside_a_model, 2, tmp_path):
        assert {"tokenizer.json", "notes.txt", "config.json", "optimizer.pt"} <= set(found)
        assert [name for name in found if name.startswith("model")]
        assert "rank-00007-00000.safetensors" not in found
    assert [path.name for path in tmp_path.iterdir()] == ["all"]


def killed_beside_a_model(folder: Path) -> list[bool]:
    """Saves of an optimizer beside a model's file are killed, and a model in shards replaces it. Whether the weights of
    the model were read, and at last those of its shards."""
    run, there = Run(OPTIMIZERS["adamw"]), folder / "all"

    def is_read() -> bool:
        other = Run(OPTIMIZERS["adamw"], seed=1)
        other.booster.load_model(other.model, str(there))
        return all(map(torch.equal, other.model.unwrap().parameters(), run.model.unwrap().parameters()))

    run.booster.save_model(run.model, str(there), shard=True)
    run.booster.save_optimizer(run.optimizer, str(there), shard=True)
    with (
        mock.patch.object(files, "complete_save", side_effect=[None, OSError("killed")]),
        pytest.raises(CheckpointError),
    ):
        run.booster.save_optimizer(run.optimizer, str(there), shard=True)  # after its two renames
    read = [is_read()]
    there.rename(folder / "other")
    read.append(is_read())  # as if killed between the two renames
    (folder / "other").rename(there)
    run.train(1)
    run.booster.save_model(run.model, str(there), shard=True, size_per_shard=0.05)  # type: ignore[arg-type]
    run.booster.save_optimizer(run.optimizer, str(there), shard=True)
    return [*read, is_read(), (there / "model.safetensors").exists()]


@pytest.mark.turns
@pytest.mark.local
def test_a_model_is_read_if_a_save_of_its_optimizer_was_killed(pool: Pool, tmp_path: Path) -> None:
    """The model of a folder was moved away, and back once the optimizer was there: killed in between, the folder had no
    checkpoint. The next model's shards were saved, and then the file of the previous one came back beside them."""
    assert pool.run(killed_beside_a_model, 1, tmp_path) == [[True, True, True, False]]
    assert [path.name for path in tmp_path.iterdir()] == ["all"]


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("moment", range(4))
def test_what_a_folder_also_contains_is_there_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, has_links: bool
) -> None:
    """A save that was killed as it replaced a folder left the user's other files in a hidden one. On a disk without
    hard links, they still move there, and the next save brings them back."""
    target, writing, shard = tmp_path / "all", tmp_path / ".all.writing", "rank-00000-00000.safetensors"
    for path in (target / "model.safetensors", target / "code" / "rows.py", target / shard, writing / shard):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("new" if path == writing / shard else "old")
    (target / "link").symlink_to("code")
    moments = itertools.count()

    def until_killed(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any) -> Any:
            if next(moments) == moment:
                raise Killed
            return original(*args)

        return step

    if not has_links:
        monkeypatch.setattr(os, "link", mock.Mock(side_effect=PermissionError(1, "Operation not permitted")))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", until_killed(os.rename))
        patch.setattr(files, "complete_save", until_killed(files.complete_save))
        with contextlib.suppress(Killed):
            files.place(writing, target, RANK_FILES)
    if has_links or moment < 2:
        there = files.existing(target)
        assert (there / "model.safetensors").read_text() == (there / "link" / "rows.py").read_text() == "old"
    files.complete_save(target, RANK_FILES)
    assert {path.name for path in target.iterdir()} == {"code", "link", "model.safetensors", shard}
    assert (target / "link").is_symlink() and not (tmp_path / ".all.old").exists()
    assert (target / shard).read_text() == ("old" if moment < 2 else "new")


def test_a_file_of_the_previous_folder_may_be_open_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that had its log beside its optimizer was ended by the save that had just succeeded: NFS keeps a file that
    is open in its folder, and the previous folder could not be removed. Neither could it at any later save."""
    target, writing, shard = tmp_path / "all", tmp_path / ".all.writing", "rank-00000-00000.safetensors"
    (target / "logs").mkdir(parents=True)
    (target / "logs" / "train.log").write_text("a line")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", mock.Mock(side_effect=OSError(errno.EBUSY, "Device or resource busy")))
        for step in ("1", "2"):
            writing.mkdir()
            (writing / shard).write_text(step)
            files.place(writing, target, RANK_FILES)
            assert (target / shard).read_text() == step and (target / "logs" / "train.log").read_text() == "a line"
            assert files.existing(target) == target
    assert len(list(tmp_path.glob(".all.removed-*"))) == 2
    files.complete_save(target, RANK_FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["all"]


def test_links_to_folders_are_kept_as_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save beside a link to a data set walked through its million files, and one beside a link to a parent of the
    folder never ended: the link was in the previous and in the new folder, and both were followed."""
    target, writing, walked = tmp_path / "all", tmp_path / ".all.writing", files._keep_others

    def walk(old: Path, *rest: Any) -> None:
        assert not old.is_symlink()
        walked(old, *rest)

    monkeypatch.setattr(files, "_keep_others", walk)
    links = {"gone": "nowhere", "parent": ".."}
    writing.mkdir()
    target.mkdir()
    for name, to in links.items():
        (target / name).symlink_to(to)
    files.place(writing, target, RANK_FILES)
    assert {path.name: os.readlink(path) for path in target.iterdir()} == links


def schedules(folder: Path) -> list[str]:
    parameter = [nn.Parameter(torch.zeros(1))]

    def scheduler(peak: float = 4.0) -> optim.lr_scheduler.LRScheduler:
        sgd = optim.SGD(parameter, lr=1.0)
        parts = [
            optim.lr_scheduler.LinearLR(sgd, 0.1, 1.0, 3),
            optim.lr_scheduler.LambdaLR(sgd, lambda step: peak / (step + 1)),
        ]
        return optim.lr_scheduler.SequentialLR(sgd, parts, [3])  # type: ignore[arg-type]

    booster = Booster(plugin=PipelinePlugin(pp_size=dist.get_world_size(), num_microbatches=1))
    one, other = scheduler(), scheduler()
    for _ in range(5):
        one.optimizer.step()
        one.step()
    booster.save_lr_scheduler(one, f"{folder}/schedule.pt")
    booster.load_lr_scheduler(other, f"{folder}/schedule.pt")
    assert other.last_epoch == 5 and other.get_last_lr() == one.get_last_lr() != [1.0]
    torch.save([1], folder / f"list{dist.get_rank()}.pt")
    messages = []
    for name in ("nowhere.pt", f"list{dist.get_rank()}.pt"):
        with pytest.raises(CheckpointError) as caught:
            booster.load_lr_scheduler(other, f"{folder}/{name}")
        messages.append(str(caught.value))
    with pytest.raises(CheckpointError) as caught:
        booster.save_lr_scheduler(other, str(folder))
    return [*messages, str(caught.value)]


@pytest.mark.local
def test_learning_rate_schedules(pool: Pool, tmp_path: Path) -> None:
    ranks = pool.run(schedules, 2, tmp_path)
    assert ranks[0] == ranks[1]
    expected = "nowhere.pt is not the state", "list0.pt is not the state", "is a folder"
    for what, message in zip(expected, ranks[0], strict=True):
        assert what in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["list0.pt", "list1.pt", "schedule.pt"]


def chains(folder: Path) -> list[str]:
    """A chain of schedulers is saved and loaded; what is said of a file of another chain, and of one of none."""

    def chain(count: int = 2) -> Any:
        sgd = optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        parts = [optim.lr_scheduler.LinearLR(sgd, 0.1, 1.0, 3), optim.lr_scheduler.ExponentialLR(sgd, 0.9)]
        return optim.lr_scheduler.ChainedScheduler(parts[:count])

    booster = Booster(plugin=PipelinePlugin(pp_size=dist.get_world_size(), num_microbatches=1))
    one, other = chain(), chain()
    for _ in range(4):
        one.step()
    booster.save_lr_scheduler(one, f"{folder}/chain.pt")
    booster.load_lr_scheduler(other, f"{folder}/chain.pt")
    assert other.state_dict() == one.state_dict() != chain().state_dict()
    if dist.get_rank() == 0:
        torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    dist.barrier()
    said = []
    for into, name in ((chain(1), "chain.pt"), (other, "optimizer.pt")):
        with pytest.raises(CheckpointError) as caught:
            booster.load_lr_scheduler(into, f"{folder}/{name}")
        said.append(str(caught.value))
    return said


@pytest.mark.local
def test_schedulers_without_an_epoch(pool: Pool, tmp_path: Path) -> None:
    """The file that `save_lr_scheduler` wrote of a ChainedScheduler was refused when the run was resumed: it had no
    last_epoch."""
    for longer, none in pool.run(chains, 2, tmp_path):
        assert "chain.pt is not the state of this ChainedScheduler (IndexError" in longer
        assert "optimizer.pt is not the state of an LR scheduler (it contains no state of this Chained" in none


def through_a_link(folder: Path) -> str:
    """Saves an optimizer through a link of the user's, and from its own working folder. Returns what is said."""
    run = Run(OPTIMIZERS["adamw"])
    run.train(1)
    for _ in range(2):
        run.booster.save_optimizer(run.optimizer, f"{folder}/link", shard=True)
    run.booster.load_optimizer(run.optimizer, f"{folder}/link")
    with contextlib.chdir(folder / "disk"), pytest.raises(CheckpointError) as error:
        run.booster.save_optimizer(run.optimizer, ".", shard=True)
    return str(error.value)


@pytest.mark.turns
def test_a_link_of_the_user_s_still_leads_to_his_disk(pool: Pool, tmp_path: Path) -> None:
    """The save renamed the link, and moved what was on the larger disk to a folder in its place. The working folder was
    renamed too, so that the script's next file went to a folder that was deleted."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    told = pool.run(through_a_link, 2, tmp_path)
    assert told[0] == told[1] and "is the working folder or one of its parents" in told[0]
    assert (tmp_path / "link").is_symlink()
    assert {"notes.txt", "optimizer.pt"} <= {path.name for path in (tmp_path / "disk").iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
