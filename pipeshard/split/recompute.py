"""Recompute: which unit calls keep no activations, and run again in the backward pass.

torch.utils.checkpoint restores the global random state and trusts that arguments are what they were. In a pipeline the
microbatches of one stage interleave, so each run restores the random state of its own microbatch, and lists or objects
among the arguments are brought back to what they held; a tensor changed in place is refused.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.graph.dataflow import Call, Dataflow
from pipeshard.graph.snapshot import Snapshot
from pipeshard.hf import recomputes


@dataclass(frozen=True)
class Recompute:
    """Of the unit calls of stage s the share `ratios[s]`, and of the whole model's every `interval`-th (0: none).

    A share, rounded up to whole calls, is made of repeated layers first, in the order of the model: the first are
    recomputed when what the later ones kept is gone. Units that come once (an embedding, a head), which keep little of
    their own, are the last. With `classes`, only units whose class has one of these names are.
    """

    ratios: tuple[float, ...]
    interval: int = 0
    classes: Collection[str] | None = None

    @classmethod
    def of(cls, recompute: bool | float | Sequence[float], interval: int, num_stages: int) -> Self:
        """What the plugin's arguments ask for, for a model of `num_stages` parts; else ConfigurationError."""
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 0:
            raise ConfigurationError(
                f"activation_checkpoint_interval must be 0, or k > 0 to recompute every k-th unit, got {interval!r}"
            )
        is_list = isinstance(recompute, Sequence) and not isinstance(recompute, str)
        ratios: list[Any] = list(recompute) if is_list else [recompute] * num_stages  # type: ignore[arg-type]
        if not all(isinstance(ratio, bool | int | float) and 0 <= ratio <= 1 for ratio in ratios):
            raise ConfigurationError(
                f"recompute={recompute!r}: use True, False, a share of each stage's units from 0 to 1, or a list of "
                f"such shares, one for each of {num_stages} stages"
            )
        if len(ratios) != num_stages:
            raise ConfigurationError(
                f"recompute={recompute!r} has {len(ratios)} shares for {num_stages} stages (pp_size times the chunks "
                "of the model on each process): give one for each, in the order of the model"
            )
        if any(ratios) and interval:
            raise ConfigurationError(
                f"recompute={recompute!r} and activation_checkpoint_interval={interval}: give one of the two"
            )
        return cls(ratios=tuple(map(float, ratios)), interval=interval)

    def calls(
        self, flow: Dataflow, stages: Sequence[int], stage: int, units: Mapping[str, nn.Module]
    ) -> frozenset[int]:
        """The numbers of the calls of `stage` that are recomputed; `stages[k]` is that of call k."""
        here = [k for k, s in enumerate(stages) if s == stage and not flow.calls[k].is_cut]
        able = [k for k in here if can_run_again(flow.calls[k], units[flow.calls[k].unit])]
        if self.classes is not None:
            able = [k for k in able if type(units[flow.calls[k].unit]).__name__ in self.classes]
        if self.interval:
            return frozenset(k for k in able if (k + 1) % self.interval == 0)
        repeated = Counter(type(units[unit]) for unit in dict.fromkeys(call.unit for call in flow.calls))
        able.sort(key=lambda k: repeated[type(units[flow.calls[k].unit])] == 1)
        share = math.ceil(round(self.ratios[stage] * len(here), 6))
        return frozenset(able[:share])


def can_run_again(call: Call, unit: nn.Module) -> bool:
    """Whether a second run does what the first did: it writes to no argument, and moves no state."""
    statistics = any(getattr(module, "track_running_stats", False) for module in unit.modules())
    return not (call.writes or call.moves or statistics)


def recomputes_itself(unit: nn.Module) -> bool:
    """Whether transformers' activation checkpointing recomputes this unit, or something inside it, in this mode."""
    return unit.training and any(map(recomputes, unit.modules()))


def run_again(
    forward: Callable[..., Any], name: str, second: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    """The forward of unit `name`, of which only the arguments are kept for the backward pass.

    `second` gives what is around the run there; it has to bring the random numbers of the first one back. What lists,
    mappings and objects among the arguments held is there again. That raises UsageError where a tensor has been changed
    in place since.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_inference()]
        versions = [tensor._version for tensor in tensors]
        before, runs = Snapshot({"": (args, kwargs)}), itertools.count()

        def checked() -> Any:
            if not next(runs):
                return forward(*args, **kwargs)
            changes = list(before.changes())
            written = any(change.before is change.now for change in changes)
            if written or [tensor._version for tensor in tensors] != versions:
                raise UsageError(
                    f"unit {name} cannot be recomputed: after its forward an argument of it was changed in place. "
                    "Change a copy there, or leave this unit out (the recompute argument of PipelinePlugin)"
                )
            now = Snapshot({"": (args, kwargs)}) if changes else None
            before.restore()
            try:
                return forward(*args, **kwargs)
            finally:
                if now is not None:
                    now.restore()

        contexts: Any = {"context_fn": lambda: (nullcontext(), second()), "preserve_rng_state": False}
        return checkpoint(checked, use_reentrant=False, **contexts)

    return run
