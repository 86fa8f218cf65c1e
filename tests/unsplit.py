"""Unsplit: the reference, which trains in one process with plain torch, and the comparison of a split model with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from peft import PeftModel
from torch import Tensor, nn

from pipeshard import PipelinePlugin
from pipeshard.batch.read import read_batch
from pipeshard.config import PipelineConfig
from pipeshard.distributed.collectives import whole
from pipeshard.errors import ConfigurationError
from pipeshard.split.materialize import is_released

LEARNING_RATE = 1e-3


class Unsplit:
    """A model trained with plain torch. `backward` runs a whole batch, and `backward_in_parts` its microbatches."""

    def __init__(self, model: nn.Module, max_norm: float = 0.0) -> None:
        self.model, self.max_norm = model, max_norm
        if hasattr(getattr(model, "config", None), "use_cache"):
            model.config.use_cache = False
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.norm: Tensor | None = None

    def backward(self, data: Any) -> Tensor:
        loss = self.model(**data).loss
        loss.backward()
        return loss.detach()

    def backward_in_parts(self, data: Any, **split: int) -> Tensor:
        """Run a backward with a pipeline's order of sums: the mean loss of each microbatch is weighted by the
        microbatch's share of the valid labels. Returns the sum."""
        parts = read_batch(self.model, data).split(**split)
        counts = [valid_labels(self.model, part.tensors["labels"]) for part in parts]
        total: Tensor | None = None
        for part, count in zip(parts, counts, strict=True):
            loss = part.call(self.model).loss
            weight = count / sum(counts) if len(parts) > 1 else 1.0
            if weight:
                loss.backward(torch.full_like(loss, weight))
            share = loss.detach() * weight if weight else torch.zeros_like(loss.detach())
            total = share if total is None else total + share
        assert total is not None
        return total

    def step(self) -> None:
        if self.max_norm:
            self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def refusal(**options: Any) -> str:
    """The error message for invalid arguments of PipelineConfig."""
    with pytest.raises(ConfigurationError) as caught:
        PipelineConfig(**{"pp_size": 1, "num_microbatches": 2, **options})
    return str(caught.value)


def valid_labels(model: nn.Module, labels: Tensor) -> int:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    causal = (labels.ndim == 2 and "CausalLM" in type(base).__name__) or "LMHead" in type(base).__name__
    return int((labels[:, 1:] if causal else labels).ne(-100).sum())


class Split:
    """A model that ColossalAI's Booster has boosted with a PipelinePlugin."""

    def __init__(self, model: nn.Module, pp_size: int, sample: Any, **arguments: Any) -> None:
        plugin = PipelinePlugin(pp_size=pp_size, dry_run_input=sample, **arguments)
        self.plugin, self.booster = plugin, Booster(plugin=plugin)
        raw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.model, self.optimizer, *_ = self.booster.boost(model, raw)

    def backward(self, data: Any, **options: Any) -> Any:
        return self.booster.execute_pipeline(iter([data]), self.model, None, self.optimizer, **options)

    def evaluate(self, data: Any, **options: Any) -> Any:
        with torch.no_grad():
            return self.booster.execute_pipeline(iter([data]), self.model, None, self.optimizer, **options)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def cut(self, num_microbatches: int) -> None:
        """Cut all later batches into `num_microbatches` microbatches."""
        cuts = self.model.pipeline.cuts
        cuts.config = replace(cuts.config, num_microbatches=num_microbatches)

    @property
    def held(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.unwrap().named_parameters() if not is_released(p)}


def differences(split: Split, unsplit: Unsplit, data: Any, tolerance: float = 1e-6, **parts: int) -> list[str]:
    """Run one backward of both on the same batch. Returns the differences on this rank. With `parts`, both models have
    the same order of sums, and the losses must be equal bit for bit."""
    reference = unsplit.backward_in_parts(data, **parts) if parts else unsplit.backward(data)
    return compared(split, unsplit, split.backward(data)["loss"], reference, tolerance, bitwise=bool(parts))


def compared(
    split: Split, unsplit: Unsplit, loss: Tensor, reference: Tensor, tolerance: float = 1e-6, bitwise: bool = False
) -> list[str]:
    """The differences on this rank after a backward of both with these losses; `bitwise` applies to the losses."""
    found = []
    close = abs(float(loss - reference)) <= tolerance * abs(float(reference))
    equal = torch.equal(loss, reference) if bitwise else close
    if not equal:
        found.append(f"loss {loss.item()!r}, unsplit {reference.item()!r}")
    error = gradient_error(split, unsplit.model)
    if not error < tolerance:
        found.append(f"gradients differ by {error:.2e}")
    norm, expected = (
        split.optimizer.get_grad_norm(),
        nn.utils.get_total_norm([p.grad for p in unsplit.model.parameters() if p.grad is not None]),
    )
    if not abs(norm - float(expected)) <= tolerance * float(expected):
        found.append(f"norm {norm}, unsplit {float(expected)}")
    return found


def largest_error(errors: Iterable[float | Tensor]) -> float:
    """The largest of these errors, without their signs. NaN, which max() passes over, is infinite."""
    sizes = [abs(float(error)) for error in errors]
    assert sizes, "nothing was compared"
    return max(size if size == size else float("inf") for size in sizes)


def gradient_error(split: Split, unsplit: nn.Module, single: float = 1e-3) -> float:
    """The largest error of a held gradient, relative to its norm or, if that is larger, to a thousandth of the largest
    norm. For a gradient with one element, in which terms may cancel out, `single` replaces this thousandth."""
    reference = {name: p.grad for name, p in unsplit.named_parameters()}
    largest = max(float(g.norm()) for g in reference.values() if g is not None)
    worst = 0.0
    for name, parameter in split.held.items():
        expected = reference[name]
        if (expected is None) != (parameter.grad is None):
            return float("inf")
        if expected is not None:
            floor = (single if expected.numel() == 1 else 1e-3) * largest
            error = float((whole(parameter.grad) - expected).norm()) / max(float(expected.norm()), floor)
            worst = max(worst, error if error == error else float("inf"))
    return worst


def relative_errors(model: nn.Module, unsplit: nn.Module, floor: float = 0.0) -> list[float]:
    """The errors of a boosted model's held gradients, relative to their norms, or to `floor` if it is larger."""
    reference = dict(unsplit.named_parameters())
    errors = []
    for name, parameter in model.named_parameters():
        if not is_released(parameter):
            expected = reference[name].grad
            assert parameter.grad is not None and expected is not None
            errors.append(float((parameter.grad - expected).norm() / expected.norm().clamp(min=floor)))
    return errors


def parameter_error(split: Split, unsplit: nn.Module) -> float:
    """The largest error of a parameter that this rank holds; a rank may hold none."""
    reference = dict(unsplit.named_parameters())
    errors = [(whole(p) - reference[name]).detach().abs().max() for name, p in split.held.items()]
    return largest_error(errors) if errors else 0.0
