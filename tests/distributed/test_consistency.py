"""Tests of what ranks compare before they train, and at the beginning of each call."""

from __future__ import annotations

import signal
import sys
import threading
from importlib.metadata import version
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipeshard import PipelinePlugin
from pipeshard.distributed import agreement
from pipeshard.errors import BatchError, ConfigurationError, PipeshardError, RankError, TraceError, UsageError
from tests import zoo
from tests.hooks import register_unseen
from tests.pool import Pool
from tests.unsplit import Split


def plugin_with(of_rank: dict[str, list[Any]], **options: Any) -> None:
    own = {name: values[dist.get_rank()] for name, values in of_rank.items()}
    boost(PipelinePlugin(**{"pp_size": dist.get_world_size(), "num_microbatches": 2, **options, **own}))


def boost(plugin: PipelinePlugin) -> None:
    plugin.configure(zoo.build("gpt2", layers=2))


@pytest.mark.parametrize(
    ("options", "sign"),
    [
        ({"schedule": ["1f1b", "gpipe"]}, "schedule='1f1b' on rank 0 of 2, but schedule='gpipe' on rank 1 of 2"),
        ({"num_microbatches": [2, 4]}, "num_microbatches=2 on rank 0 of 2, but num_microbatches=4 on rank 1 of 2"),
        ({"partition": ["uniform", [2, 4]]}, "partition='uniform' on rank 0 of 2, but partition=[2, 4] on rank 1 of 2"),
        ({"pp_size": [2, 1]}, "pp_size=2 on rank 0 of 2, but pp_size=1 on rank 1 of 2"),
        ({"precision": ["bf16", "fp32"]}, "precision='bf16' on rank 0"),
    ],
)
def test_other_arguments_are_named(pool: Pool, options: dict[str, list[Any]], sign: str) -> None:
    for message in pool.run_expecting(ConfigurationError, plugin_with, 2, options):
        assert sign in message


def old_transformers() -> None:
    def old(name: str) -> str:
        return "4.57.6" if name == "transformers" and dist.get_rank() == 1 else version(name)

    with mock.patch.object(agreement, "version", old):
        boost(PipelinePlugin(2, num_microbatches=2))


def test_other_packages_are_named(pool: Pool) -> None:
    for message in pool.run_expecting(ConfigurationError, old_transformers, 2):
        assert message.startswith("a version differs between ranks: transformers ")
        assert "but transformers 4.57.6 on rank 1" in message


def wrong_on_one_rank() -> None:
    boost(PipelinePlugin(2, num_microbatches=2, schedule="zigzag" if dist.get_rank() else "1f1b"))


def test_an_argument_that_one_rank_refuses_ends_the_others(pool: Pool) -> None:
    first, second = pool.run_expecting(PipeshardError, wrong_on_one_rank, 2)
    assert first.startswith("rank 1 of 2 failed in PipelinePlugin: ConfigurationError") and "zigzag" in second


def unwatched() -> tuple[list[str], bool, float]:
    """Threads after a step without a watch, and whether SIGTERM is left alone; calls are still compared."""
    before = signal.getsignal(signal.SIGTERM)
    split = split_of_two(watchdog=False, max_norm=1.0)
    loss = float(split.backward(zoo.batch("gpt2"))["loss"])
    with pytest.raises(UsageError, match=r"rank 0 \(stage 0\): optimizer.step.*rank 1 \(stage 1\): plugin.sync_grads"):
        split.optimizer.step() if dist.get_rank() == 0 else split.plugin.sync_grads()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("pipeshard")]
    return threads, signal.getsignal(signal.SIGTERM) is before, loss


@pytest.mark.turns
def test_a_watchdog_that_is_declined(pool: Pool) -> None:
    for threads, unhandled, loss in pool.run(unwatched, 2):
        assert threads == [] and unhandled and loss == loss


def constructed() -> tuple[list[str], bool]:
    before = sys.excepthook
    PipelinePlugin(2, num_microbatches=2)
    return [thread.name for thread in threading.enumerate() if "pipeshard" in thread.name], sys.excepthook is before


def test_a_plugin_that_has_boosted_nothing_watches_nothing(pool: Pool) -> None:
    assert pool.run(constructed, 2) == [([], True)] * 2


def boosted_with(change: str) -> None:
    model = zoo.build("gpt2", layers=2 + (change == "layers" and dist.get_rank()))
    if change == "frozen" and dist.get_rank():
        model.transformer.wte.requires_grad_(False)
    options: dict[str, Any] = {"lr": 1e-3 * (1 + (change in ("lr", "tensor") and dist.get_rank()))}
    if change == "tensor":
        options["lr"] = torch.tensor(options["lr"])
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    plugin = PipelinePlugin(2, num_microbatches=2, dry_run_input=zoo.batch("gpt2"))
    plugin.configure(model, optimizer)


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        ("layers", "on rank 0 (stage 0), but transformer.h.2.ln_1.weight of shape (32,)"),
        (
            "frozen",
            "the set of trained parameters differs between ranks: transformer.wte.weight.requires_grad=True on rank 0",
        ),
        ("lr", "the optimizer differs between ranks: group 0 with lr=0.001"),
        ("tensor", "the optimizer differs between ranks: group 0 with lr=tensor(0.001"),  # was "lr=Tensor" on all ranks
    ],
)
def test_another_model_or_optimizer_is_named(pool: Pool, change: str, sign: str) -> None:
    for message in pool.run_expecting(ConfigurationError, boosted_with, 2, change):
        assert sign in message


def split_of_two(**options: Any) -> Split:
    return Split(zoo.build("gpt2"), 2, zoo.batch("gpt2"), num_microbatches=2, **options)


def frozen_after_boost() -> tuple[str, float]:
    """A tied weight that one rank freezes between two steps is refused; the ranks go on once it is mended."""
    split = split_of_two()
    split.backward(zoo.batch("gpt2"))
    tied = split.held["transformer.wte.weight"]
    if dist.get_rank():
        tied.requires_grad_(False)
    with pytest.raises(UsageError) as refused:
        split.backward(zoo.batch("gpt2"))
    tied.requires_grad_(True)
    return str(refused.value), float(split.backward(zoo.batch("gpt2"))["loss"])


@pytest.mark.turns
def test_a_tied_weight_frozen_on_one_rank_is_refused(pool: Pool) -> None:
    for message, loss in pool.run(frozen_after_boost, 2):
        assert (
            "transformer.wte.weight is held by several ranks" in message
            and "set the same value on every rank" in message
        )
        assert loss == loss


def other_calls() -> float:
    """Ranks at different calls learn so, and go on."""
    split = split_of_two(max_norm=1.0)
    split.backward(zoo.batch("gpt2"))
    with pytest.raises(UsageError, match=r"rank 0 \(stage 0\): optimizer.step.*rank 1 \(stage 1\): execute_pipeline"):
        split.optimizer.step() if dist.get_rank() == 0 else split.backward(zoo.batch("gpt2"))
    split.optimizer.step()
    return float(split.backward(zoo.batch("gpt2"))["loss"])


@pytest.mark.turns
def test_ranks_at_different_calls_are_told_apart(pool: Pool) -> None:
    first, second = pool.run(other_calls, 2)
    assert first == second


def broken_data() -> None:
    split = split_of_two()
    good = iter([zoo.batch("gpt2")])

    def broken() -> Any:
        raise OSError("the disk is gone")
        yield

    split.booster.execute_pipeline(broken() if dist.get_rank() else good, split.model, None, split.optimizer)


@pytest.mark.turns
def test_the_reason_for_a_missing_batch_is_told_everywhere(pool: Pool) -> None:
    first, second = pool.run_expecting(Exception, broken_data, 2)
    assert "rank 1 (stage 1): OSError: the disk is gone" in first and second == "the disk is gone"


def failing_once() -> list[str]:
    """After a failure amid a step, every further call is refused with its reason, on every rank."""
    split = split_of_two()
    split.backward(zoo.batch("gpt2"))

    def fail(*_: Any) -> None:
        raise ValueError("planted")

    if dist.get_rank():
        register_unseen(next(iter(split.model.pipeline.policy.get_held_layers())), fail)
    messages = []
    for _ in range(2):
        with pytest.raises((ValueError, RankError)) as raised:
            split.backward(zoo.batch("gpt2"))
        messages.append(str(raised.value))
    return messages


def failing_in_a_trace() -> str:
    """A hook of one stage's layer, which causes a new trace, raises an error."""
    split = split_of_two()
    split.backward(zoo.batch("gpt2"))

    def fail(*_: Any) -> None:
        raise ValueError("planted")

    if dist.get_rank():
        next(iter(split.model.pipeline.policy.get_held_layers())).register_forward_pre_hook(fail)
    with pytest.raises(TraceError) as raised:
        split.backward(zoo.batch("gpt2"))
    return str(raised.value)


def test_the_error_of_a_trace_on_one_rank_is_told_everywhere(pool: Pool) -> None:
    """The error said that a rank could not trace a batch, and how to see the error."""
    for message in pool.run(failing_in_a_trace, 2):
        assert "planted" in message, message


@pytest.mark.turns
def test_a_broken_step_is_the_last_one(pool: Pool) -> None:
    (first, again), (own, own_again) = pool.run(failing_once, 2)
    where = "rank 1 (stage 1) failed in execute_pipeline, F0@1 (forward of microbatch 0 on stage 1), in transformer.h."
    assert first.startswith(where) and first.endswith("ValueError: planted") and own == "planted"
    assert again.startswith("this process cannot continue, because rank 1 (stage 1) failed")
    assert own_again.startswith("this process cannot continue, because rank 1 (stage 1) failed")


def different_batches() -> None:
    split_of_two().backward(zoo.batch("gpt2", seed=dist.get_rank()))


def taught_on_the_last_rank() -> None:
    labels = {"criterion.teacher": torch.ones(4)} if dist.get_rank() == 1 else {}
    split_of_two().backward(zoo.batch("gpt2", rows=4) | labels)


@pytest.mark.turns
def test_an_entry_that_one_rank_has_is_refused_with_a_remedy(pool: Pool) -> None:
    """A loop put a boosted teacher's outputs into the student's batch, where there were any: on the last stage's rank.
    The error advised seeds and samplers."""
    for message in pool.run_expecting(BatchError, taught_on_the_last_rank, 2):
        assert "broadcast the entry to the other ranks" in message


def loss_of_one_rank() -> list[str]:
    """The messages of evaluations and training steps that return the loss on one rank only."""
    split, data, rank = split_of_two(), zoo.batch("gpt2", rows=4), dist.get_rank()
    found = []
    for trains in (False, True):
        for first in (True, False):
            with torch.set_grad_enabled(trains), pytest.raises(BatchError) as caught:
                returned = (rank == 0) == first
                split.booster.execute_pipeline(iter([data]), split.model, None, split.optimizer, return_loss=returned)
            found.append(str(caught.value))
    split.backward(data)
    return found


@pytest.mark.turns
def test_a_loss_that_one_rank_wants_is_named(pool: Pool) -> None:
    """A loop passed return_loss=(rank == 0), since only rank 0 logs. In an evaluation, or on a GPU, the ranks then
    waited for each other until the timeout, and the error's table named the same call on both."""
    for messages in pool.run(loss_of_one_rank, 2, timeout=30):
        assert len(messages) == 4
        for message in messages:
            assert "in the same mode" in message and "return_loss=True" in message and "return_loss=False" in message


@pytest.mark.turns
def test_other_batches_are_named(pool: Pool) -> None:
    for message in pool.run_expecting(BatchError, different_batches, 2):
        assert "must read the same batch" in message
