"""Tests of layouts: a run that was saved with one layout of ranks resumes with another."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pipeshard import PipelinePlugin, initialize, load_training_state, save_training_state, to_sequential
from pipeshard.distributed.collectives import local
from tests import zoo
from tests.hunt.nets import H, Net, data
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, largest_error, parameter_error

pytestmark = pytest.mark.local

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and arguments of the plugin
    "one": (1, {"pp_size": 1}),
    "stages": (2, {"pp_size": 2}),
    "replicas": (4, {"pp_size": 2}),
    "zero": (4, {"pp_size": 2, "zero_stage": 1}),
    "fsdp": (4, {"pp_size": 2, "fsdp": True}),
    "slices": (4, {"pp_size": 2, "tp_size": 2}),
    "wide": (2, {"pp_size": 1, "fsdp": True}),
    "experts": (2, {"pp_size": 1, "ep_size": 2}),
}


def run(layout: str, folder: str, first: int, steps: int, precision: str = "fp32", name: str = "llama-tied") -> float:
    """Go on from `folder`, if `first` is not 0, for some steps, and save there; the error against one process."""
    torch.manual_seed(0)
    model = zoo.build(name)
    unsplit = Unsplit(copy.deepcopy(model))
    options = dict(LAYOUTS[layout][1])
    split = Split(model, options.pop("pp_size"), zoo.batch(name), num_microbatches=2, precision=precision, **options)
    grid = split.plugin.grid
    if first:
        assert load_training_state(folder, split.model, split.optimizer) == first
    for step in range(first + steps):
        data = zoo.batch(name, seed=step)
        unsplit.backward(data)
        unsplit.step()
        if step >= first:
            split.backward(zoo.part(data, grid.replica, [8 // grid.dp_size] * grid.dp_size))
            split.step()
    save_training_state(folder, first + steps, split.model, split.optimizer)
    split.booster.save_model(split.model, f"{folder}/weights", shard=True)
    split.booster.save_optimizer(split.optimizer, f"{folder}/optimizer.pt")
    split.booster.load_optimizer(split.optimizer, f"{folder}/optimizer.pt")
    whole: Any = to_sequential(split.model)
    assert type(whole) is type(unsplit.model) and type(whole.lm_head).__name__ == "Linear"
    plain = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/weights", dtype="auto")
    for (key, p), q in zip(whole.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), key
    if precision == "fp32":
        expected, got = unsplit.model(**zoo.batch(name)).loss, whole(**zoo.batch(name)).loss
        assert float(got.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    return parameter_error(split, unsplit.model)


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "layouts",
    [
        ("replicas", "stages", "zero"),
        ("zero", "fsdp", "replicas"),
        ("fsdp", "slices", "one"),
        ("slices", "wide", "slices"),
        ("one", "fsdp", "stages"),
    ],
    ids="-".join,
)
def test_a_run_goes_on_in_another_layout(pool: Pool, tmp_path: Path, layouts: tuple[str, ...]) -> None:
    for k, layout in enumerate(layouts):
        errors = pool.run(run, LAYOUTS[layout][0], layout, str(tmp_path), 2 * k, 2)
        assert largest_error(errors) < 2e-5, (layout, errors)


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize("layouts", [("experts", "one", "experts"), ("stages", "experts", "wide")], ids="-".join)
def test_experts_go_on_in_another_layout(pool: Pool, tmp_path: Path, layouts: tuple[str, ...]) -> None:
    for k, layout in enumerate(layouts):
        errors = pool.run(run, LAYOUTS[layout][0], layout, str(tmp_path), 2 * k, 2, name="mixtral")
        assert largest_error(errors) < 2e-5, (layout, errors)


def repeated(folder: str, **options: Any) -> list[str]:
    """A step of a model whose vocabulary two slices do not divide, a save, another step, and this step again after a
    load of the save. Returns the names of the parameters on this rank whose values differ."""
    sizes = {"vocab_size": 129, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**zoo.TINY | sizes, tie_word_embeddings=True)
    batch = zoo.batch("llama")
    split = Split(transformers.LlamaForCausalLM(config), 1, batch, num_microbatches=2, tp_size=2, **options)
    values: list[dict[str, torch.Tensor]] = []
    for step in range(3):
        if step == 1:
            save_training_state(folder, 1, split.model, split.optimizer)
            split.booster.save_optimizer(split.optimizer, f"{folder}/optimizer.pt")
        if step == 2:
            assert load_training_state(folder, split.model, split.optimizer) == 1
            split.booster.load_optimizer(split.optimizer, f"{folder}/optimizer.pt")
        split.backward(batch)
        split.step()
        values.append({name: local(parameter).detach().clone() for name, parameter in split.held.items()})
    return [name for name, value in values[1].items() if not torch.equal(value, values[2][name])]


@pytest.mark.turns
@pytest.mark.processes
def test_slices_of_different_sizes_have_the_same_owner(pool: Pool, tmp_path: Path) -> None:
    """An embedding with an odd number of rows made each slice assign the owners of later weights by itself: a sharded
    save lacked some slices and could not be loaded, and a save in one file gathered slices of different weights."""
    assert pool.run(repeated, 4, str(tmp_path), zero_stage=1, timeout=120) == [[]] * 4


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "precision"), [(4, "fp32"), (8, "fp32"), (8, "bf16")])
def test_slices_of_different_sizes_are_saved_and_loaded_with_fsdp(
    pool: Pool, tmp_path: Path, ranks: int, precision: str
) -> None:
    """On four replicas, FSDP's shards of an embedding with an odd number of rows were not those that DTensor computes:
    a state was saved with wrong offsets, and could not be loaded; nor could the model."""
    options = {"fsdp": True, "precision": precision}
    assert pool.run(repeated, ranks, str(tmp_path), timeout=240, **options) == [[]] * ranks


def lowered(layout: str, folder: str, interrupted: bool) -> list[torch.Tensor]:
    """The fp32 values after four bf16 steps, with or without a save and a load amid them."""
    options = dict(LAYOUTS[layout][1])
    p = options.pop("pp_size")

    def fresh() -> Split:
        return Split(zoo.build("gpt2"), p, zoo.batch("gpt2"), num_microbatches=2, precision="bf16", **options)

    split = fresh()
    for step in range(4):
        grid = split.plugin.grid
        split.backward(zoo.part(zoo.batch("gpt2", seed=step), grid.replica, [8 // grid.dp_size] * grid.dp_size))
        split.step()
        if step == 1 and interrupted:
            save_training_state(folder, 2, split.model, split.optimizer)
            split = fresh()
            load_training_state(folder, split.model, split.optimizer)
    return [q.detach().clone() for group in split.optimizer.param_groups for q in group["params"]]


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["stages", "zero"])
def test_values_in_full_precision_are_saved(pool: Pool, tmp_path: Path, layout: str) -> None:
    world = LAYOUTS[layout][0]
    for straight, resumed in zip(
        pool.run(lowered, world, layout, str(tmp_path), False), pool.run(lowered, world, layout, str(tmp_path), True)
    ):
        assert straight and all(torch.equal(a, b) and a.dtype is torch.float32 for a, b in zip(straight, resumed))


def converted(layout: str) -> tuple[set[torch.dtype], float, float]:
    """The dtypes of the converted model after a bf16 step, its loss, and that of the stages."""
    options, data = dict(LAYOUTS[layout][1]), zoo.batch("gpt2")
    split = Split(zoo.build("gpt2"), options.pop("pp_size"), data, num_microbatches=2, precision="bf16", **options)
    grid = split.plugin.grid
    own = zoo.part(data, grid.replica, [8 // grid.dp_size] * grid.dp_size)
    split.backward(own)
    split.step()
    whole: Any = to_sequential(split.model)
    with torch.no_grad():
        return {p.dtype for p in whole.parameters()}, float(whole(**data).loss), float(split.evaluate(own)["loss"])


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize("layout", ["fsdp", "wide"])
def test_a_converted_model_has_the_dtype_in_which_the_stages_compute(pool: Pool, layout: str) -> None:
    """A user trained with fsdp in bf16, and converted the model back. Its layers of the first stage were in fp32, and
    the others in bf16, so its first call raised an error about the dtypes of two matrices. With one stage, the whole
    model was in fp32, unlike after a run without fsdp."""
    for dtypes, loss, expected in pool.run(converted, LAYOUTS[layout][0], layout):
        assert dtypes == {torch.bfloat16} and loss == pytest.approx(expected, rel=1e-3)


class Positioned(Net):
    """Its own forward reads a parameter, which fsdp does not shard."""

    def __init__(self) -> None:
        super().__init__()
        self.position = torch.nn.Parameter(torch.randn(H))

    def body(self, x: torch.Tensor) -> Any:
        return super().body(x + self.position)


def loaded_in_turn(layout: str, folder: str, parts: list[str], omits: str) -> None:
    """A bf16 run's model and optimizer (which omits some parameters) are loaded one after the other into others."""

    def fresh(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Positioned()
        optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if name != omits], lr=0.01)
        options = {"num_microbatches": 2, "dry_run_input": data(rows=6), "precision": "bf16", "verify": False}
        return initialize(model, optimizer, plugin=PipelinePlugin(**LAYOUTS[layout][1], **options))

    def values(engine: Any) -> list[torch.Tensor]:
        return [p.detach().clone() for group in engine.optimizer.param_groups for p in group["params"]]

    saved, engine = fresh(0), fresh(1)
    for step in range(2):
        saved.execute_pipeline(iter([data(step)]))
        saved.optimizer.step()
        saved.optimizer.zero_grad()
    saved.save_model(saved.model, f"{folder}/model", shard=True)
    saved.save_optimizer(saved.optimizer, f"{folder}/optimizer", shard=True)
    for part in parts:
        if part == "model":
            engine.load_model(engine.model, f"{folder}/model")
        else:
            engine.load_optimizer(engine.optimizer, f"{folder}/optimizer")
    assert all(map(torch.equal, values(engine), values(saved)))


@pytest.mark.turns
@pytest.mark.parametrize(("layout", "omits"), [("wide", ""), ("stages", "head.bias")])
@pytest.mark.parametrize("parts", [["optimizer", "model"], ["model", "optimizer"]])
def test_a_model_is_loaded_before_or_after_its_optimizer(
    pool: Pool, tmp_path: Path, layout: str, omits: str, parts: list[str]
) -> None:
    """The optimizer was loaded first. The model's files have fp32 shards with fsdp, and a parameter may be in no
    optimizer: the model seemed to be another one, and the fp32 values of other parameters were rounded to bf16."""
    pool.run(loaded_in_turn, 2, layout, str(tmp_path), parts, omits, timeout=120)
