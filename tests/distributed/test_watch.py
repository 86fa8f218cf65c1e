"""Tests of the watchdog when the store through which ranks report failures does not respond."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pipeshard
from pipeshard import PipelinePlugin
from pipeshard.checkpoint import files
from pipeshard.distributed import failures as alarm
from pipeshard.distributed import watching
from pipeshard.distributed.collectives import gather, share_value
from pipeshard.distributed.failures import GONE, Fault
from pipeshard.distributed.watch import PERIOD, SILENT, Watch
from pipeshard.engine.reader import Reader
from pipeshard.errors import BatchError, CheckpointError, PipeshardError, RankError
from pipeshard.generate.forward import Forward
from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split

SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
LIMIT = SILENT * PERIOD + 2.0  # seconds


def fail(error: Exception) -> None:
    """Raise it, where it is of a connection as torch does."""
    torch._check(str(error) != str(LOST), lambda: str(error))
    raise error


def fail_at_a_silent_store(call: str, error: Exception, silent: float) -> tuple[float, str, list[str], bool]:
    """What comes of an error, in a call or between two, where the store has been silent for so many seconds: how long
    it took, the error and its notes, and whether all threads of the watch have come to their end."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        store: Any = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), timeout=timedelta(seconds=30))
        with mock.patch.object(alarm, "default_store", lambda: store):
            watch = Watch(timeout=None, named="rank {} of 1".format)
        time.sleep(3 * PERIOD)
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(silent)
        begin = time.monotonic()
        try:
            if call:
                with watch.call(call):
                    fail(error)
            watch.leaving("raised", "ValueError: own")
            raised: Exception = error
        except Exception as other:
            raised = other
        seconds = time.monotonic() - begin
        return seconds, f"{type(raised).__name__}: {raised}", getattr(raised, "__notes__", []), watch.left()
    finally:
        server.kill()
        server.wait()


LOST = RuntimeError("Connection closed by peer")


def returns_though_aborted() -> str:
    """What a call ends with that returned, but whose groups were broken meanwhile."""
    watch = Watch(timeout=None, named="rank {} of 1".format)
    try:
        with pytest.raises(RankError) as caught, watch.call("execute_pipeline"):
            watch.fault = Fault(GONE, 3, "rank 3", message="rank 3 was killed")
        return str(caught.value)
    finally:
        watch.stop()


def test_what_an_aborted_wait_has_returned_is_not_handed_out(pool: Pool) -> None:
    """NCCL ends what waits in an aborted group without an error: a step gave the loss that happened to be there."""
    [said] = pool.run(returns_though_aborted, 1)
    assert "rank 3 was killed" in said


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("silent", [0.0, SILENT * PERIOD + 1.0], ids=["just now", "long since"])
def test_a_lost_connection_is_explained_by_the_silent_store(pool: Pool, silent: float) -> None:
    [(seconds, message, _, stopped)] = pool.run(fail_at_a_silent_store, 1, "save_training_state", LOST, silent)
    assert message.startswith("RankError: the rendezvous store does not respond: rank 0")
    assert seconds < (LIMIT if silent == 0 else 1.0) and not stopped


@pytest.mark.turns
def test_an_error_of_its_own_is_raised_though_nobody_can_be_told(pool: Pool) -> None:
    [(seconds, message, notes, _)] = pool.run(fail_at_a_silent_store, 1, "boost", ValueError("own"), 0.0)
    assert message == "ValueError: own" and seconds < LIMIT
    assert notes == ["pipeshard: this is rank 0 of 1, in boost"]


@pytest.mark.turns
def test_a_process_that_ends_between_two_calls_does_not_hang(pool: Pool) -> None:
    [(seconds, *_)] = pool.run(fail_at_a_silent_store, 1, "", ValueError("own"), 0.0)
    assert seconds < LIMIT


def test_a_question_is_put_where_no_thread_can_start() -> None:
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("at interpreter shutdown")):
        assert alarm.Alarm.ask(mock.Mock(gone=False), lambda: 3) == 3


def test_what_a_question_raises_is_raised_where_it_is_asked() -> None:
    with pytest.raises(RankError, match="as it is"):
        alarm.Alarm.ask(mock.Mock(gone=False), mock.Mock(side_effect=RankError("as it is")))


def steps_of_a_late_rank() -> tuple[str, float, str]:
    """What an empty iterator on rank 0 comes to, where rank 1 leaves the call a second later, and the step after it."""
    data = zoo.batch("gpt2")
    split, step = Split(zoo.build("gpt2"), dist.get_world_size(), data, num_microbatches=2), Reader.next
    saves = files.gather_objects

    def late(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                time.sleep(1.0 * dist.get_rank())

        return call

    with mock.patch.object(Reader, "next", late(step)), pytest.raises(BatchError) as caught:
        split.booster.execute_pipeline(iter([data] * dist.get_rank()), split.model, None, split.optimizer)
    loss = float(split.backward(data)["loss"])
    with mock.patch.object(files, "gather_objects", late(saves)), pytest.raises(CheckpointError) as failed:
        split.booster.save_model(split.model, "/proc/nowhere", shard=True)
    split.backward(data)
    return str(caught.value), loss, str(failed.value)


def caught_on_one_rank() -> list[str]:
    """What a program raises that catches an error which rank 1 alone has, and trains another model."""

    def criterion(output: Any, batch: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("mine")
        return output.loss

    data = zoo.batch("gpt2")
    split, errors = Split(zoo.build("gpt2"), 2, data, num_microbatches=2), []
    for call in (lambda: refused(criterion), lambda: split.backward(data), lambda: split.backward(data)):
        try:
            call()
        except PipeshardError as error:
            errors.append(str(error))
    return errors


def refused(criterion: Any) -> None:
    model = zoo.build("gpt2")
    plugin = PipelinePlugin(pp_size=2, num_microbatches=2, dry_run_input=zoo.batch("gpt2"))
    pipeshard.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion, plugin=plugin)


@pytest.mark.turns
def test_a_rank_that_catches_its_own_error_goes_no_further_alone(pool: Pool) -> None:
    """Its next message met those that waited in boost: gloo aborted the process, since sizes differed."""
    for errors in pool.run(caught_on_one_rank, 2):
        assert "mine" in errors[0] and len(errors) == 3
        assert all(
            re.search(r"cannot continue, because rank 1 \(stage 1\) failed in booster.boost", e) for e in errors[1:]
        )


@pytest.mark.turns
def test_an_error_of_all_ranks_ends_nobody_who_leaves_it_late(pool: Pool) -> None:
    """One lost packet, and the others took the rank for one that hangs: a full disk ended the job."""
    (first, loss, failed), (second, other, later) = pool.run(steps_of_a_late_rank, 2)
    assert "iterator is exhausted" in first and "iterator is exhausted" in second
    assert loss == other > 0 and failed == later


def failing_while_generating() -> tuple[bool, str]:
    """Whether generate works after an error of a criterion of the loop on all ranks, and what it raises after errors of
    all ranks in other microbatches."""

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("planted")

    split, microbatches = Split(zoo.build("llama"), 2, zoo.batch("llama"), num_microbatches=1), itertools.count()
    prompts, replayed = zoo.batch("llama", rows=3)["input_ids"], Forward._replayed

    def in_microbatch(*args: Any) -> Any:
        return fail() if next(microbatches) == (2 if dist.get_rank() == 0 else 0) else replayed(*args)

    def generated(**options: Any) -> Any:
        return split.model.generate(input_ids=prompts, max_new_tokens=2, num_microbatches=3, do_sample=False, **options)

    expected = generated()
    with pytest.raises(ValueError, match="planted"):
        generated(logits_processor=[fail])
    works = torch.equal(generated(), expected)
    with mock.patch.object(Forward, "_replayed", in_microbatch), pytest.raises((ValueError, RankError)):
        generated()
    with pytest.raises(RankError) as caught:
        generated()
    return works, str(caught.value)


@pytest.mark.turns
def test_messages_of_a_generate_that_failed_are_not_read_by_the_next(pool: Pool) -> None:
    """Where each rank had an error of its own, as out of memory, the next generate read those messages, and hung."""
    for works, error in pool.run(failing_while_generating, 2):
        assert works and "cannot continue" in error and "model.generate" in error


def waits_between_calls() -> tuple[str, str, float]:
    """What ends a wait of pipeshard's own between two calls for a rank that sleeps, why, and after how many seconds."""
    watching.watch_world({"between": 1.0}, watchdog=True)
    watch, group, begin = watching._here.watch, dist.group.WORLD, time.monotonic()
    assert watch is not None and group is not None
    with pytest.raises(RuntimeError) as caught:
        if dist.get_rank() == 0:
            time.sleep(40)
        share_value(3, 0, group)
    why, seconds = watch.why(), time.monotonic() - begin
    watch.stop()  # it would kill this process, which goes on
    return type(caught.value).__name__, why, seconds


@pytest.mark.turns
def test_a_wait_between_two_calls_has_a_limit(pool: Pool) -> None:
    """A reward function of GRPO did not return on the first rank. The others waited for half an hour whatever the
    timeout was, as did those that waited in a Trainer's checkpoint."""
    (slow, _, seconds), (waiting, why, later) = pool.run(waits_between_calls, 2)
    assert slow == "Interrupt" and waiting == "RuntimeError" and seconds < 20 and later < 20
    assert re.search(r"no progress for 1 seconds, because of rank 0 of 2:(.|\n)*rank 1 of 2 has waited", why), why


def timeouts_of_groups(watchdog: bool) -> list[tuple[timedelta, timedelta]]:
    """The shortest and the longest timeout of the groups after a boost. One of them waits longer than its first
    timeout for rank 0."""
    own = timedelta(hours=2)
    dist.new_group(timeout=own)
    Split(zoo.build("gpt2"), 2, zoo.batch("gpt2"), num_microbatches=2, watchdog=watchdog)
    made = [backend for group, backend in alarm._backends() if group is not dist.group.WORLD]
    found = {backend.options._timeout for backend in made} - {own}
    if watchdog:
        short = dist.new_group(timeout=timedelta(seconds=1))
        with mock.patch.object(dist, "default_pg_timeout", timedelta(seconds=1)):
            alarm.outlast_watch()
        time.sleep(2.0 * (dist.get_rank() == 0))
        gather(torch.ones(1), short)
    return [(min(found), max(found))]


@pytest.mark.turns
@pytest.mark.parametrize(("watchdog", "expected"), [(True, timedelta(days=1)), (False, timedelta(minutes=30))])
def test_the_timeout_of_the_plugin_expires_before_that_of_gloo(pool: Pool, watchdog: bool, expected: Any) -> None:
    """timeout=7200 was not kept: rank 0 uploaded its state for 40 minutes, the wait of rank 1 ended after half an hour,
    and the error advised to check the network."""
    assert pool.run(timeouts_of_groups, 2, watchdog) == [[(expected, expected)]] * 2
