"""Run: a case on one rank, compared with the unsplit model."""

from __future__ import annotations

import copy

import torch
from colossalai.booster import Booster
from torch import Tensor

from pipeshard import PipelinePlugin
from pipeshard.split.materialize import is_released
from tests.hunt.cases import Case

LEARNING_RATE = 0.1


def dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def run(case: Case) -> list[str]:
    """What differs on this rank from the unsplit model, step by step: loss, every gradient (none is not zeros), and
    the parameters at the end."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(case.make())
        if case.prepare is not None:
            case.prepare(models[-1])
    unsplit, model = models
    reference = case.optimizer(unsplit.parameters(), lr=LEARNING_RATE)
    size = torch.distributed.get_world_size()
    options = {"num_microbatches": 1, "dry_run_input": dict(case.batches[0]), **case.options}
    booster = Booster(plugin=PipelinePlugin(pp_size=size, **options))
    made = [None, None] if case.criterion is None else [case.criterion() for _ in range(2)]
    boosted, optimizer, criterion, *_ = booster.boost(
        model, case.optimizer(model.parameters(), lr=LEARNING_RATE), made[0]
    )
    found = []
    for step, batch in enumerate(case.batches):
        for one in (unsplit, boosted.unwrap()):
            if case.between is not None:
                case.between(step, one)
        mine = copy.deepcopy(dict(batch))
        loss = booster.execute_pipeline(iter([mine]), boosted, criterion, optimizer)["loss"]
        output = unsplit(**copy.deepcopy(dict(batch)))
        expected = output["loss"] if made[1] is None else made[1](output, batch)
        expected.backward()
        if not torch.allclose(loss, expected.detach(), rtol=1e-5, atol=1e-6):
            found.append(f"step {step}: loss {float(loss)}, unsplit {float(expected)}")
        wanted = dict(unsplit.named_parameters())
        for name, parameter in boosted.unwrap().named_parameters():
            if is_released(parameter):
                continue
            gradient, right = dense(parameter.grad), dense(wanted[name].grad)
            if (gradient is None) != (right is None):
                found.append(f"step {step}: {name} has {'no' if gradient is None else 'a'} gradient")
            elif gradient is None or right is None:
                continue
            elif not torch.allclose(gradient, right, rtol=1e-4, atol=1e-6):
                found.append(f"step {step}: gradient of {name} by {float((gradient - right).abs().max()):.2g}")
        for one in (reference, optimizer):
            one.step()
            one.zero_grad()
    for name, parameter in boosted.unwrap().named_parameters():
        if not is_released(parameter) and not torch.allclose(parameter, wanted[name], rtol=1e-4, atol=1e-5):
            found.append(f"{name} after all steps")
    return found
