"""Calls: the collective calls of the user's, by which ranks tell whether they are at the same one."""

from collections.abc import Callable, Sequence

from pipeshard.errors import UsageError
from pipeshard.runtime.progress import Progress

CALLS = (
    "",
    "PipelinePlugin",
    "booster.boost",
    "execute_pipeline",
    "optimizer.step",
    "optimizer.clip_grad_by_norm",
    "optimizer.get_grad_norm",
    "booster.backward",
    "plugin.sync_grads",
    "plugin.recording",
    "save_model",
    "load_model",
    "save_optimizer",
    "load_optimizer",
    "save_lr_scheduler",
    "load_lr_scheduler",
    "save_lora_as_pretrained",
    "save_training_state",
    "load_training_state",
    "job.resume",
    "job.step_done",
)


def call_of(now: Progress) -> tuple[int, int]:
    """A number for the call that runs, and how many have begun."""
    return CALLS.index(now.call), now.number


def compare_calls(said: Sequence[tuple[int, ...]], named: Callable[[int], str]) -> None:
    """Raise UsageError where ranks are at other calls, or after another number of them."""
    if len(set(said)) > 1:
        table = "; ".join(
            f"{named(rank)}: {CALLS[code]}, its call {number}" for rank, (code, number) in enumerate(said)
        )
        raise UsageError(
            f"the ranks are not at the same call: {table}. Every rank has to make each collective call of the plugin, "
            "the optimizer and the booster, in the same order: look for what runs on some ranks only"
        )
