"""Training: what a plan counts beside the parameters is what ranks hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from torch import Tensor

from pipeshard import AutoConfig, PipelinePlugin, plan
from pipeshard.distributed.collectives import local
from pipeshard.errors import ConfigurationError
from pipeshard.planner.memory import Memory
from tests import zoo
from tests.pool import Pool

ROWS, LENGTH = 8, 12
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"precision": "bf16"}),
    (2, {"precision": "fp16", "optimizer": "sgd"}),
    (4, {"dp_size": 2, "zero_stage": 1}),
    (4, {"dp_size": 2, "zero_stage": 1, "precision": "bf16"}),
    (4, {"dp_size": 2, "fsdp": True, "precision": "bf16"}),
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
    values = [w.full if w.master is None else w.master for w in weights if w.full is not None or w.master is not None]
    found = {
        "parameters": sum(local(w.parameter).nbytes for w in weights),
        "gradients": gradients,
        "values": sum(value.nbytes for value in values),
        "optimizer": sum(value.nbytes for value in states if isinstance(value, Tensor) and value.ndim),
    }
    return planned.estimate.memory[plugin.stage_manager.stage], found


@pytest.mark.parametrize(("ranks", "options"), LAYOUTS, ids=str)
def test_what_is_planned_is_held(pool: Pool, ranks: int, options: dict[str, Any]) -> None:
    """Gradients, values and states were counted in the parameters' dtype: 8 bytes of the 18 that a parameter takes with
    AdamW in bf16."""
    found = pool.run(held, ranks, options)
    for planned, measured in found:
        if options.get("fsdp"):  # between steps nothing is whole
            whole = measured["parameters"] + measured["gradients"]
            assert planned.values == pytest.approx(measured["parameters"], rel=0.02)
            assert planned.gradients / 2 + planned.values == pytest.approx(whole, rel=0.02)
        else:
            assert {name: getattr(planned, name) for name in ("parameters", "gradients", "values")} == {
                name: measured[name] for name in ("parameters", "gradients", "values")
            }
    states = sum(measured["optimizer"] for _, measured in found)
    assert sum(planned.optimizer for planned, _ in found) == pytest.approx(states, rel=0.01)


def test_eighteen_bytes_a_parameter() -> None:
    """And two of one that is frozen."""
    model = zoo.build("llama")
    (stage,) = plan(model, zoo.batch("llama", ROWS, LENGTH), 1, num_microbatches=4, precision="bf16").stages
    memory, count = stage.memory, sum(p.numel() for p in model.parameters())
    assert memory.total - memory.activations == 18 * count
    assert plan(model, zoo.batch("llama", ROWS, LENGTH), 1, num_microbatches=4).stages[0].kept > 1.6 * stage.kept
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.lm_head.weight)
    frozen = plan(model, zoo.batch("llama", ROWS, LENGTH), 1, num_microbatches=4, precision="bf16").stages[0].memory
    assert frozen.total - frozen.activations == 2 * count + 16 * model.lm_head.weight.numel()


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
        ({"zero_stage": 2}, "zero_stage=2: a pipeline adds up"),
        ({"dp_size": 0}, "dp_size must be a positive integer, got 0"),
    ],
)
def test_what_the_plugin_would_refuse_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(zoo.build("llama"), zoo.batch("llama", ROWS, LENGTH), 2, num_microbatches=4, **options)
