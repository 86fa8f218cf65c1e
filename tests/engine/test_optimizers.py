"""Tests of torch's optimizers: with groups, schedulers and frozen parameters, they train as in one process."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from colossalai.booster import Booster
from torch import nn

from pipeshard import PipelinePlugin
from pipeshard.distributed.collectives import whole
from pipeshard.engine.groups import replace_parameters
from pipeshard.engine.mixed_precision import MasterWeight
from pipeshard.engine.optimizer_hooks import give_hooks
from pipeshard.engine.states import converted
from pipeshard.errors import ConfigurationError
from tests import zoo
from tests.hunt.loops import Sides
from tests.pool import Pool, WorkerError
from tests.unsplit import Split, largest_error

NAME = "llama-tied"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-3, foreach=True),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in parameters if p.ndim > 1]
    return [
        {"params": decay, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def trained(kind: str, frozen: str, options: dict[str, Any]) -> float:
    """The largest error of a parameter after four steps with a schedule, against one process; and norms on the way."""
    model = zoo.build("llama" if frozen == "model." else NAME, torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    alone = copy.deepcopy(model)
    optimizers = [OPTIMIZERS[kind](groups_of(m)) for m in (alone, model)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step) for o in optimizers]
    plugin = PipelinePlugin(2, num_microbatches=2, dry_run_input=zoo.part(zoo.batch(NAME), 0, [4]), **options)
    booster = Booster(plugin=plugin)
    boosted, optimizer, _, _, schedules[1] = booster.boost(model, optimizers[1], None, None, schedules[1])
    grid = plugin.grid
    for step in range(4):
        data = zoo.batch(NAME, seed=step)
        alone(**data).loss.backward()
        booster.execute_pipeline(
            iter([zoo.part(data, grid.replica, [8 // grid.dp_size] * grid.dp_size)]), boosted, None, optimizer
        )
        gradients = [p.grad for p in alone.parameters() if p.grad is not None]
        for order in (2.0, 1.0, "inf"):
            expected = float(nn.utils.get_total_norm(gradients, float(order)))
            assert optimizer.get_grad_norm(order) == pytest.approx(expected, rel=1e-5), order
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1, float("inf"))
        optimizer.clip_grad_by_norm(0.1, "inf")
        assert optimizer.get_grad_norm("inf") == pytest.approx(expected, rel=1e-5)  # before clipping
        for each in (optimizers[0], optimizer, *schedules):
            each.step()
        for each in (optimizers[0], optimizer):
            each.zero_grad()
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in optimizers[0].param_groups]
    reference, held = dict(alone.named_parameters()), boosted.pipeline.holdings.held
    return largest_error(float((whole(p) - reference[name]).detach().abs().max()) for name, p in held.items())


@pytest.mark.turns
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "frozen", "world", "options"),
    [
        ("sgd", "", 4, {}),
        ("foreach", "", 4, {"tp_size": 2}),
        ("fused", "", 4, {"fsdp": True}),
        ("adagrad", "", 4, {"zero_stage": 1}),
        ("adafactor", "", 4, {"zero_stage": 1}),
        ("foreach", "model.", 4, {}),  # all but the head: the first stage has nothing to train
        ("sgd", "model.layers.0", 2, {"schedule": "zb-h1"}),
        ("fused", "model.layers", 4, {"fsdp": True}),
        ("adagrad", "model.layers", 4, {"tp_size": 2}),
    ],
)
def test_trains_as_in_one_process(pool: Pool, kind: str, frozen: str, world: int, options: dict[str, Any]) -> None:
    assert largest_error(pool.run(trained, world, kind, frozen, options)) < 1e-6


def norms_with_a_nan(rank: int) -> list[str]:
    """Norms of gradients of which one, on this rank, is NaN, and how clipping by the largest element ends."""
    data = zoo.batch(NAME)
    split = Split(zoo.build(NAME), 2, data, num_microbatches=2)
    split.backward(data)
    if dist.get_rank() == rank:
        next(p for p in split.held.values() if p.grad is not None).grad.view(-1)[0] = float("nan")
    norms = [str(float(split.optimizer.get_grad_norm(order))) for order in (2.0, "inf")]
    with pytest.raises(ConfigurationError, match="the gradient norm is nan, and error_if_nonfinite=True"):
        split.optimizer.clip_grad_by_norm(1.0, "inf", error_if_nonfinite=True)
    return norms


@pytest.mark.parametrize("rank", [0, 1])
def test_the_largest_element_is_nan_if_a_gradient_of_any_rank_is(pool: Pool, rank: int) -> None:
    """A loop clipped by the largest element, and skipped steps whose norm was not finite: gloo's maximum ignored the
    NaN of each rank but the first, so the NaN reached the weights."""
    assert pool.run(norms_with_a_nan, 2, rank) == [["nan", "nan"]] * 2


class ByName(torch.optim.SGD):
    """Decays matrices and other parameters differently, by their names."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                parameter.mul_(0.9 if name.endswith("norm.weight") else 0.5)


def pairs_names(tied: bool) -> list[str]:
    """What is paired with a wrong name in the groups, or is wrongly updated."""
    sample, model = zoo.batch(NAME), zoo.build(NAME if tied else "llama")
    names, before = [n for n, _ in model.named_parameters()], dict(copy.deepcopy(model).named_parameters())
    optimizer: Any = ByName([*model.named_parameters()][::-1], lr=0.1)
    dp_size = 1 if tied else 2
    plugin = PipelinePlugin(2, dp_size=dp_size, zero_stage=int(not tied), num_microbatches=4, dry_run_input=sample)
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    booster.execute_pipeline(iter([sample]), boosted, None, optimizer)
    optimizer.step()
    found = []
    for group in optimizer.param_groups:
        of_group = zip(group["param_names"], group["params"], strict=True)
        found += [name for name, parameter in of_group if optimizer.names[parameter] != name]
    for name, parameter in boosted.pipeline.holdings.held.items():
        factor = 0.9 if name.endswith("norm.weight") else 0.5
        found += [name] if not torch.allclose(parameter, factor * before[name]) else []
    return found + [name for group in optimizer.param_groups for name in group["param_names"] if name not in names]


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.parametrize("tied", [False, True])
def test_names_in_the_groups_are_those_of_their_parameters(pool: Pool, tied: bool) -> None:
    """An optimizer of `named_parameters()` decided by name what to decay. On each rank but the first, the groups had
    the names of all parameters beside some parameters, so the first stage's names met the last stage's parameters."""
    assert pool.run(pairs_names, 2 if tied else 4, tied) == [[]] * (2 if tied else 4)


def hooks_of(hooks: type[dict[Any, Any]] | None, has_scheduler: bool) -> tuple[int, list[str]]:
    """The number of updates that are counted in 4 steps, and what differs from the unsplit loop."""

    class Around(torch.optim.Optimizer):
        """Wraps AdamW, and does not call Optimizer.__init__, as many classes that wrap an optimizer."""

        def __init__(self, model: nn.Module) -> None:
            self.base = torch.optim.AdamW(model.parameters(), lr=1e-2)
            self.param_groups, self.defaults, self.state = self.base.param_groups, self.base.defaults, self.base.state
            if hooks is not None:
                self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = hooks(), hooks()  # type: ignore[assignment]

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return self.base.step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.base.zero_grad(set_to_none)

    rates = []

    def made(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = Around(model)
        if has_scheduler:
            rates.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step))
        return optimizer

    sides = Sides({}, made)
    for step in range(4):
        sides.train(sides.batches(step))
        sides.step()
        with warnings.catch_warnings(action="error"):
            for rate in rates:
                rate.step()
    return sides.optimizer.gradients.updates.count, sides.done()


@pytest.mark.turns
@pytest.mark.parametrize("hooks", [None, dict, OrderedDict])
@pytest.mark.parametrize("has_scheduler", [False, True])
def test_an_optimizer_that_does_not_call_its_base_class_has_hooks(pool: Pool, hooks: Any, has_scheduler: bool) -> None:
    """Boost raised TypeError or AttributeError for lack of torch's ordered dicts of hooks; with these, the step called
    no hooks, so no update was counted or compared."""
    assert pool.run(hooks_of, 2, hooks, has_scheduler) == [(4, []), (4, [])]


def test_an_optimizer_that_got_hooks_is_freed_at_once() -> None:
    """The step that boost gave such an optimizer referenced it, so its states stayed until Python's collector ran."""

    class Plain(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.param_groups, self.defaults, self.state, self.steps = [], {}, defaultdict(dict), 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.steps += 1

    optimizer, called = Plain(), list[Any]()
    give_hooks(optimizer)
    optimizer.register_step_pre_hook(lambda each, *_: called.append(type(each)))
    optimizer.step()
    assert optimizer.steps == 1 and called == [Plain]
    reference = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert reference() is None
    finally:
        gc.enable()


class Bare(torch.optim.SGD):
    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


def cleared() -> None:
    sample, model = zoo.batch("llama"), zoo.build("llama")
    booster = Booster(plugin=PipelinePlugin(1, dry_run_input=sample, verify=False))
    boosted, optimizer, *_ = booster.boost(model, Bare(model.parameters(), lr=0.1))
    booster.execute_pipeline(iter([sample]), boosted, None, optimizer)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in boosted.parameters())


@pytest.mark.local
def test_a_zero_grad_without_an_argument_is_called_without_one(pool: Pool) -> None:
    """An optimizer of one's own, whose zero_grad takes no argument, raised TypeError in the loop."""
    pool.run(cleared, 1)


def test_names_of_replaced_parameters_are_kept_with_the_first_place() -> None:
    """The names of a group were those of all parameters, also of those that a tie replaced."""
    tied, *others = (nn.Parameter(torch.ones(2)) for _ in range(4))
    groups = [{"params": [("a", others[0]), ("b", others[1]), ("c", tied)]}, {"params": [("d", others[2])]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    replace_parameters(optimizer, {others[1]: tied, others[2]: tied})
    assert [group["param_names"] for group in optimizer.param_groups] == [["a", "b"], []]
    assert [[*map(id, group["params"])] for group in optimizer.param_groups] == [[id(others[0]), id(tied)], []]


class Slow(torch.optim.SGD):
    """Keeps a copy of the weights from its constructor on, as Lookahead."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            self.state[parameter]["slow"] = parameter.detach().clone()


def of_meta(folder: str, kind: Callable[[Any], torch.optim.Optimizer], is_whole: bool = False) -> float:
    """The largest error of a parameter, trained by an optimizer that was created while the model was on meta (or, with
    `is_whole`, had its values)."""
    alone, data = zoo.build(NAME), zoo.batch(NAME)
    if dist.get_rank() == 0:
        alone.save_pretrained(folder)
    dist.barrier()
    booster = Booster(plugin=PipelinePlugin(dist.get_world_size(), num_microbatches=2, dry_run_input=data))
    auto = transformers.AutoModelForCausalLM
    model: Any = (auto.from_pretrained(folder) if is_whole else PipelinePlugin.from_pretrained(auto, folder)).train()
    reference, (boosted, optimizer, *_) = kind(alone.parameters()), booster.boost(model, kind(model.parameters()))
    for _ in range(2):
        alone(**data).loss.backward()
        booster.execute_pipeline(iter([data]), boosted, None, optimizer)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    held = boosted.pipeline.holdings.held
    return largest_error(float((p - alone.get_parameter(name)).detach().abs().max()) for name, p in held.items())


@pytest.mark.turns
@pytest.mark.local
def test_states_of_a_constructor_have_values(pool: Pool, tmp_path: Path) -> None:
    """Adagrad creates its states in its constructor, on meta if the model was: the first step failed with torch's error
    about the device meta."""
    for start in (0.0, 0.1):
        kind = partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=start, eps=1e-3)
        assert largest_error(pool.run(of_meta, 2, str(tmp_path), kind)) < 1e-6
    assert largest_error(pool.run(of_meta, 2, str(tmp_path), Slow, True)) < 1e-6
    with pytest.raises(WorkerError, match="ConfigurationError: Slow created its state 'slow' in its constructor"):
        pool.run(of_meta, 2, str(tmp_path), Slow)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.AdamW])
def test_states_from_before_boost_follow_the_parameter_to_its_device(kind: Any, fused: bool) -> None:
    """Boost moves a model from the CPU to the GPU, but states that Adagrad creates in its constructor, or that were
    loaded, stayed on the CPU: the first step raised torch's error about devices. Here, meta stands for the GPU."""
    parameter = nn.Parameter(torch.ones(4, 2))
    optimizer = kind([parameter], fused=fused)
    parameter.grad = torch.ones(4, 2)
    optimizer.step()
    (group,), states = optimizer.param_groups, optimizer.state[parameter]
    moved = nn.Parameter(parameter.detach().to("meta"))
    weight = MasterWeight("weight", moved, 1)
    devices = {key: converted(key, value, moved, weight, group).device.type for key, value in states.items()}
    assert devices.pop("step") == ("meta" if fused else "cpu")
    assert len(devices) > 0 and {*devices.values()} == {"meta"}


def refused(options: dict[str, Any], name: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        plugin = PipelinePlugin(num_microbatches=2, dry_run_input=zoo.batch(name), **options)
        model = zoo.build(name)
        Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters()))
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        (
            {"pp_size": 1, "zero_stage": 2},
            NAME,
            "zero_stage=2 is not supported: a pipeline accumulates gradients over the microbatches",
        ),
        ({"pp_size": 1, "zero_stage": 1, "fsdp": True}, NAME, "fsdp=True already shards the optimizer state"),
        ({"pp_size": 1, "tp_size": 2}, "gpt2", "tp_size=2: GPT2LMHeadModel does not have a tp_plan"),
        ({"pp_size": 3}, NAME, "pp_size=3, but the world has 2 processes"),
        ({"pp_size": 1, "ep_size": 3}, NAME, "pp_size=1 and ep_size=3, but the world has 2 processes"),
        ({"pp_size": 1, "dp_size": 3}, NAME, "pp_size=1 and dp_size=3, but the world has 2 processes"),
        ({"pp_size": 1, "tp_size": 0}, NAME, "tensor-parallel ranks per stage, must be a positive integer, got 0"),
        ({"pp_size": 2, "precision": "int8"}, NAME, "precision='int8' is unknown"),
        ({"pp_size": 2, "autocast": True}, NAME, "autocast=True requires precision="),
    ],
)
def test_what_cannot_work_is_refused(pool: Pool, options: dict[str, Any], name: str, message: str) -> None:
    for told in pool.run(refused, 2, options, name):
        assert message in told
