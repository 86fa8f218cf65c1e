"""Preferences: TRL's DPOTrainer, of which another run of a model, the reference, is part of the loss.

A pipeline runs one model in a step. So the reference's log-probabilities are computed before, by its own stages, or by
the model's with the adapters off, and put beside the batch, where TRL has them too if they are precomputed.
"""

import inspect
from pathlib import Path
from typing import Any

import torch

from pipeshard.checkpoint.files import together
from pipeshard.errors import ConfigurationError
from pipeshard.plugin import PipelinePlugin
from pipeshard.trainer.objective import Asking

CHOSEN, REJECTED, BOTH = "ref_chosen_logps", "ref_rejected_logps", "ref_logps"  # of B pairs, and of 2B rows


class Preferences:
    """Above a DPOTrainer, of whose public names are `precompute_ref_logps`, `ref_model` and `compute_ref_log_probs`."""

    pipeline: PipelinePlugin
    precompute_ref_logps: bool
    ref_model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= dict(zip(inspect.signature(super().__init__).parameters, args))
        given = kwargs.get("args")
        if getattr(given, "sync_ref_model", False):
            raise ConfigurationError(
                "sync_ref_model=True would mix the parameters of two models, which are in parts here: leave it out"
            )
        if getattr(given, "precompute_ref_log_probs", False):
            for name in ("train_dataset", "eval_dataset"):
                kwargs[name] = self._on_disk(kwargs.get(name), Path(kwargs["args"].output_dir) / "datasets" / name)
        super().__init__(**kwargs)

    def _on_disk(self, dataset: Any, folder: Path) -> Any:
        """A dataset in memory as one whose files all ranks share: the first one adds log-probabilities to them."""
        from datasets import Dataset  # which TRL needs, but transformers does not

        if isinstance(dataset, dict):
            return {name: self._on_disk(one, folder / name) for name, one in dataset.items()}
        if not isinstance(dataset, Dataset) or dataset.cache_files:
            return dataset
        grid = self.pipeline.grid
        with together(grid.world):
            if grid.first:
                dataset.save_to_disk(folder)
        return Dataset.load_from_disk(folder)

    def with_reference(self, inputs: dict[str, Any], is_sample: bool = False) -> dict[str, Any]:
        """The batch with the reference's log-probabilities, one for each of its rows; every rank calls it. A sample,
        by which the stages are yet to be made, gets zeros."""
        if BOTH in inputs:
            return inputs
        inputs = dict(inputs)
        if CHOSEN in inputs:
            chosen, rejected = inputs.pop(CHOSEN), inputs.pop(REJECTED)
        elif is_sample:
            chosen, rejected = torch.zeros(len(inputs["input_ids"])).chunk(2)
        else:
            model = self.ref_model if self.ref_model is not None else self._own_stages()  # type: ignore[attr-defined]
            chosen, rejected = self.compute_ref_log_probs(model, inputs)  # type: ignore[attr-defined]
        return inputs | {BOTH: torch.cat([chosen, rejected])}

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs = self.with_reference(inputs) if not isinstance(model, Asking) else dict(inputs)
        inputs[CHOSEN], inputs[REJECTED] = inputs.pop(BOTH).chunk(2)
        before, self.precompute_ref_logps = self.precompute_ref_logps, True
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.precompute_ref_logps = before
