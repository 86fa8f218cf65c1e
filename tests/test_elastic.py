"""Tests of elastic jobs: real agents that are killed, join and get signals, compared with an uninterrupted run."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.utils.data import DataLoader

import elastic
from pipeshard import AutoConfig, ElasticJob, PreemptibleJob, cli, launch, load_training_state, save_training_state
from pipeshard.checkpoint.io import io_of
from pipeshard.checkpoint.training_state import newest_step
from pipeshard.distributed import watching
from pipeshard.elastic import WISHES, Deaf, _join
from pipeshard.errors import CheckpointError, ConfigurationError, PipeshardError, UsageError
from pipeshard.planner.autoconfig import Layout, layouts
from pipeshard.split.materialize import is_released
from tests import zoo
from tests.agents import Agents, Line, lines
from tests.messages import assert_told, assert_told_alike, messages_of
from tests.pool import Pool
from tests.unsplit import Split

STEPS = 40


def alone(folder: Path, *arguments: str) -> list[Line]:
    """The example on the ranks of a pool, whose signals stay their own."""
    with mock.patch("signal.signal"):
        elastic.train(elastic.parse(["--output", str(folder), *arguments]))
    return lines(folder)


@pytest.fixture(scope="module")
def losses(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Those of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    written = workers.run(alone, 4, folder, "--steps", str(STEPS), "--every", "1000")[0]
    assert [(line.step, line.pp_size) for line in written] == [(step, 4) for step in range(STEPS)]
    return [line.loss for line in written]


def assert_same(written: list[Line], losses: list[float]) -> None:
    """Every step is there, and has the same loss, as often as it ran."""
    assert {line.step for line in written} == set(range(STEPS))
    for line in written:
        assert line.loss == pytest.approx(losses[line.step], abs=1e-5), line


@pytest.mark.slow  # a minute or two each
@pytest.mark.parametrize(("ranks", "event"), [(4, signal.SIGKILL), (2, signal.SIGTERM)])
def test_a_rank_goes_and_comes_back(tmp_path: Path, losses: list[float], ranks: int, event: signal.Signals) -> None:
    every = 2 if event == signal.SIGKILL else 1000
    arguments = ["--steps", str(STEPS), "--pp", str(ranks), "--every", str(every)]
    with Agents(tmp_path, f"{ranks - 1}:{ranks}", arguments) as agents:
        for _ in range(ranks):
            agents.start()
        agents.until("three steps", lambda seen: sum(line.pp_size == ranks for line in seen) >= 3)

        lost = time.monotonic()
        if event == signal.SIGKILL:
            agents.kill(agents.all[-1])
        else:
            agents.all[-1].send_signal(event)
        seen_by_fewer = agents.until("fewer stages", lambda seen: seen[-1].pp_size == ranks - 1)
        print(f"{ranks} to {ranks - 1} stages in {time.monotonic() - lost:.1f} s")
        agents.until("two more steps", lambda seen: len(seen) > len(seen_by_fewer) + 1)

        returned = time.monotonic()
        agents.start()
        agents.until("all stages again", lambda seen: seen[-1].pp_size == ranks)
        print(f"{ranks - 1} to {ranks} stages in {time.monotonic() - returned:.1f} s")
        agents.hurry()
        assert agents.statuses([agent for k, agent in enumerate(agents.all) if k != ranks - 1]) == [0] * ranks

    written = lines(tmp_path)
    assert_same(written, losses)
    written = list(itertools.dropwhile(lambda line: line.pp_size < ranks, written))  # until the last agent was up
    sizes = [(line.pp_size, line.dp_size) for line in written]
    changes = [k for k in range(1, len(written)) if sizes[k] != sizes[k - 1]]
    assert [sizes[k] for k in (0, *changes)] == [(ranks, 1), (ranks - 1, 1), (ranks, 1)]
    fewer, again = (written[k - 1].step + 1 - written[k].step for k in changes)  # steps that are done twice
    assert again == 0  # who is told to go saves first
    assert 0 <= fewer <= every if event == signal.SIGKILL else fewer == 0


@pytest.mark.slow
def test_signals_save_at_a_step_boundary(pool: Pool, tmp_path: Path, losses: list[float]) -> None:
    arguments = ["--steps", str(STEPS), "--every", "1000"]
    state = tmp_path / "state"
    with Agents(tmp_path, "1", [*arguments, "--workers", "1"]) as agents:
        agent = agents.start(2)
        agents.until("a step", lambda seen: len(seen) > 1)
        agent.send_signal(signal.SIGUSR1)
        agents.until("a save", lambda seen: newest_step(state) is not None)
        saved = newest_step(state)
        assert saved is not None
        agents.until("two more steps", lambda seen: seen[-1].step > saved + 1)
        assert newest_step(state) == saved
        psutil.Process(agent.pid).children()[1].send_signal(signal.SIGUSR1)  # one rank alone
        agents.until("another save", lambda seen: newest_step(state) != saved)
        agent.send_signal(signal.SIGTERM)
        assert agents.statuses([agent]) == [128 + signal.SIGTERM]
    written = lines(tmp_path)
    assert [(line.step, line.pp_size) for line in written] == [(step, 2) for step in range(len(written))]
    assert newest_step(state) == len(written)
    going_on = pool.run(alone, 1, tmp_path, *arguments)[0]
    assert len(going_on) == STEPS and going_on[-1].pp_size == 1
    assert_same(going_on, losses)


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (1, "gloo"), (2, None)])
def test_an_agent_with_fewer_gpus_than_ranks_joins_with_gloo(gpus: int, backend: str | None) -> None:
    """Two ranks of an agent on a machine with one GPU joined with NCCL, which refuses to share a GPU; every other
    entry point uses gloo there."""
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}),
        mock.patch("torch.cuda.is_available", lambda: gpus > 0),
        mock.patch("torch.cuda.device_count", lambda: gpus),
        mock.patch.object(dist, "is_initialized", lambda: False),
        mock.patch.object(dist, "is_torchelastic_launched", lambda: True),
        mock.patch.object(dist, "init_process_group") as joined,
    ):
        _join(60.0)
    assert joined.call_args.args == (backend,)


@pytest.mark.parametrize(
    ("ranks", "pp_size", "microbatches", "expected"),
    [
        (4, 4, 16, [(4, 1), (2, 2), (1, 4)]),
        (3, 4, 16, [(3, 1)]),  # three replicas do not divide 16
        (3, 4, 12, [(3, 1), (1, 3)]),
        (2, 4, 16, [(2, 1), (1, 2)]),
        (1, 4, 16, [(1, 1)]),
        (6, 4, 12, [(3, 2), (2, 3), (1, 6)]),
        (8, 4, 4, [(4, 2), (2, 4)]),
        (5, 8, 1, [(5, 1)]),
    ],
)
def test_legal_layouts(ranks: int, pp_size: int, microbatches: int, expected: list[tuple[int, int]]) -> None:
    for size in (1, 3):
        found = layouts(ranks, microbatches * size, size, pp_size)
        assert [(layout.pp_size, layout.dp_size) for layout in found] == expected
        for layout in found:
            assert layout.ranks == ranks
            assert layout.dp_size * layout.batch_size == microbatches * size
            assert layout.num_microbatches * layout.microbatch_size == layout.batch_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (5, 16, 1, 4),
            r"5 ranks .* pp_size=4 or less: a step has 16 microbatches .* replicas \(5 with pp_size=1\) divides",
        ),
        (
            (6, 16, 4, 2),
            r"a step has 4 microbatches.*global_batch=16.* number of replicas \(3 with pp_size=2, 6 with pp_size=1\)",
        ),
        ((4, 10, 4, 4), "global_batch=10 must be a multiple of microbatch_size=4"),
        ((4, 0, 1, 4), "global_batch must be a positive integer, got 0"),
        ((4, 8, 1, "auto"), "pp_size must be a positive integer, got 'auto'"),
    ],
)
def test_where_no_layout_is_legal(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        layouts(*arguments)


def planned(folder: Path) -> dict[str, Any]:
    model, batch = zoo.build("llama"), zoo.batch("llama")
    with mock.patch("signal.signal"):
        job = ElasticJob(folder, lambda ranks: AutoConfig.choose(model, batch, ranks, 16, schedules=["1f1b"]), 16)
    return job.layout.arguments


def refused(folder: Path) -> list[str]:
    def fails(ranks: int) -> Layout:
        raise ValueError(f"nothing for {ranks}")

    attempts: list[Any] = [
        lambda: ElasticJob(folder, 2, 9, 3, every=0),
        lambda: ElasticJob(folder, 1, 3),
        lambda: ElasticJob(folder, fails, 4),
        lambda: ElasticJob(folder, lambda ranks: Layout(2, 1, 8, 1), 4),
        lambda: ElasticJob(folder, 2, 4).save(),
    ]
    with mock.patch("signal.signal"):
        return messages_of(attempts, ConfigurationError, UsageError)


def test_the_layout_may_be_planned(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(planned, 2, tmp_path)
    assert first == second and first["pp_size"] * first["dp_size"] == 2 and first["schedule"] == "1f1b"


def test_jobs_that_cannot_work_are_refused_alike_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    expected = [
        "every, a number of steps, must be a positive integer, got 0",
        "2 ranks cannot train with pp_size=1",
        r"the pp_size function must return a Layout.* but pp_size\(2\) raised ValueError: nothing for 2",
        "chosen for ranks=2 and global_batch=4 is for ranks=2 and global_batch=8",
        "save was called before resume: call job.resume",
    ]
    assert_told_alike(pool.run(refused, 2, tmp_path), expected)


def preempted(folder: Path, begins: int) -> tuple[int, int]:
    """What a rank leaves with when one of them is told to end in its second step, and where it began."""
    split = Split(zoo.build("gpt2"), dist.get_world_size(), zoo.batch("gpt2"), num_microbatches=2)
    before = [signal.getsignal(number) for number in WISHES]
    job = PreemptibleJob(folder, every=100)
    try:
        begun = job.resume(split.model, split.optimizer)
        with pytest.raises(SystemExit) as left, mock.patch.object(dist, "destroy_process_group"):
            for step in range(begun, begun + 5):
                split.backward(zoo.batch("gpt2"))
                split.step()
                if step == begun + 1 and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                job.step_done()
        assert job.step == begun + 2
        return left.value.code, begun
    finally:
        for number, handler in zip(WISHES, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.turns
def test_a_job_that_is_told_to_end_leaves_its_state(pool: Pool, tmp_path: Path) -> None:
    """Without the launcher that starts ranks again, SIGTERM ended a job, and all since its last save was lost."""
    assert pool.run(preempted, 2, tmp_path, 0) == [(143, 0)] * 2
    assert pool.run(preempted, 2, tmp_path, 2) == [(143, 2)] * 2
    assert newest_step(tmp_path) == 4


@pytest.mark.parametrize("earlier", [signal.SIG_DFL, watching._on_sigterm], ids=["before boost", "after boost"])
def test_a_forked_child_of_a_job_ends_when_it_is_terminated(tmp_path: Path, earlier: Any) -> None:
    """The workers of a multiprocessing.Pool inherited the job's handler, so the end of `with Pool(4)` could wait for
    them forever, and with it the job."""
    before = {number: signal.getsignal(number) for number in WISHES}
    signal.signal(signal.SIGTERM, earlier)
    try:
        PreemptibleJob(tmp_path)
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
        child.start()
        child.terminate()
        child.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert child.exitcode == -signal.SIGTERM


def test_a_worker_of_a_job_exits_with_its_rank_alone() -> None:
    """The workers of a job's dataloader ignored SIGTERM, also that of their own rank at its exit: a script whose loop
    was at module level never ended, and a rank that had failed waited for its workers until the agent killed it."""
    batches = iter(DataLoader(range(64), num_workers=1, worker_init_fn=Deaf()))  # type: ignore[arg-type]
    worker = batches._workers[0]  # type: ignore[attr-defined]
    next(batches)
    subprocess.run(["kill", str(worker.pid)], check=True)
    assert len([*itertools.islice(batches, 60)]) == 60 and worker.is_alive()
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 0


def resumed(folder: Path) -> int | str:
    split = Split(zoo.build("gpt2"), dist.get_world_size(), zoo.batch("gpt2"), num_microbatches=2)
    with mock.patch("signal.signal"), mock.patch("signal.pthread_sigmask"):
        try:
            return PreemptibleJob(folder).resume(split.model, split.optimizer)
        except CheckpointError as error:
            return str(error)


@pytest.mark.turns
def test_a_job_whose_steps_are_incomplete_does_not_begin_anew(pool: Pool, tmp_path: Path) -> None:
    """After a copy that was broken off, a job began at step 0, and its saves took the place of what could be repaired.
    What a killed first save leaves is no step."""
    (tmp_path / ".step-00000003.writing").mkdir()
    assert pool.run(resumed, 2, tmp_path) == [0, 0]
    (tmp_path / "step-00000003" / "model").mkdir(parents=True)
    first, second = pool.run(resumed, 2, tmp_path)
    assert first == second
    assert_told([first], ["contains no complete step; step-00000003 is not complete .*or move these steps away"])


def averaged(folder: Path) -> tuple[bool, bool, str]:
    """Whether a job and a background save restore an average of the weights, and the error if a state has no
    average."""
    model, batch = zoo.build("gpt2"), zoo.batch("gpt2")
    copied = copy.deepcopy(model)
    split = Split(model, dist.get_world_size(), batch, num_microbatches=2)
    average: Any = split.booster.boost(copied)[0]
    held = [p for p in average.unwrap().parameters() if not is_released(p)]
    with torch.no_grad():
        for parameter in held:
            parameter.mul_(0.5)
    before = [p.detach().clone() for p in held]
    found = []
    save_training_state(folder / "background", 1, [split.model, average], use_async=True)
    with mock.patch("signal.signal"), mock.patch("signal.pthread_sigmask"):
        job = PreemptibleJob(folder / "job", every=1)
        job.resume([split.model, average], split.optimizer)
        job.step_done()
        io_of(split.model).wait()
        with torch.no_grad():
            for parameter in held:
                parameter.zero_()
        assert PreemptibleJob(folder / "job").resume([split.model, average], split.optimizer) == 1
    found.append(all(map(torch.equal, held, before)))
    with torch.no_grad():
        for parameter in held:
            parameter.zero_()
    load_training_state(folder / "background", [split.model, average])
    found.append(all(map(torch.equal, held, before)))
    save_training_state(folder / "without", 1, split.model)
    with pytest.raises(CheckpointError) as refused:
        load_training_state(folder / "without", [split.model, average])
    return found[0], found[1], str(refused.value)


@pytest.mark.turns
def test_a_job_resumes_averages_of_the_weights(pool: Pool, tmp_path: Path) -> None:
    """After each preemption, the average of the weights began again from the initial weights, without an error: no
    argument of the job took it, and a script cannot know the step in which the job saves."""
    for of_job, in_background, said in pool.run(averaged, 2, tmp_path):
        assert of_job and in_background and "was saved without model-1" in said


def two_jobs(folder: Path) -> tuple[int, str]:
    """The step to which a later job for both models counts, and the error of the earlier of two jobs in turns."""
    split, batch = Split(zoo.build("gpt2"), 2, zoo.batch("gpt2"), num_microbatches=2), zoo.batch("gpt2")
    other = Split(zoo.build("gpt2", seed=1), 2, batch, num_microbatches=2)
    before = [signal.getsignal(number) for number in WISHES]
    try:
        jobs = [PreemptibleJob(folder / name) for name in ("generator", "discriminator")]
        for job, each in zip(jobs, (split, other), strict=True):
            job.resume(each.model, each.optimizer)
        with pytest.raises(UsageError) as refused:
            jobs[0].step_done()
        both = PreemptibleJob(folder, every=1)
        both.resume([split.model, other.model], [split.optimizer, other.optimizer])
        both.step_done()
        return both.step, str(refused.value)
    finally:
        for number, handler in zip(WISHES, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.turns
def test_two_jobs_in_turns_are_refused(pool: Pool, tmp_path: Path) -> None:
    """SIGTERM reached only the job created last: the other model of a GAN lost its steps since its last save, and the
    two resumed from different steps."""
    for step, said in pool.run(two_jobs, 2, tmp_path):
        assert step == 1 and "Create one job, pass all models" in said
    assert newest_step(tmp_path) == 1


class Warmup:
    """A factor of the learning rate, which a LambdaLR saves with its state."""

    def __init__(self) -> None:
        self.peaks = {2, 4}

    def __call__(self, step: int) -> float:
        return 1.0 if step in self.peaks else 0.5


class Counting(torch.nn.LayerNorm):
    """Has an extra state that is not a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}


def unsavable(folder: Path) -> list[str]:
    split = Split(zoo.build("gpt2"), dist.get_world_size(), zoo.batch("gpt2"), num_microbatches=2)
    model, optimizer = split.model, split.optimizer

    def after_a_step(lr_scheduler: Any = None) -> None:
        job = PreemptibleJob(folder)
        job.resume(model, optimizer, lr_scheduler)
        split.backward(zoo.batch("gpt2"))
        split.step()
        job.step_done()

    def with_a_foreign_state() -> None:
        optimizer.unwrap().state[-1] = {"steps": 1}
        try:
            after_a_step()
        finally:
            del optimizer.unwrap().state[-1]

    def with_a_strange_entry() -> None:
        model.unwrap().get_submodule("transformer.ln_f").__class__ = Counting
        after_a_step()

    attempts: list[Callable[[], Any]] = [
        lambda: PreemptibleJob(folder, keep=None),  # type: ignore[arg-type]
        lambda: PreemptibleJob(folder, keep=0),
        lambda: PreemptibleJob(folder).resume(model, optimizer, dataloader=DataLoader([1, 2])),  # type: ignore[arg-type]
        lambda: PreemptibleJob(folder).resume([model, model.unwrap()], optimizer),
        lambda: PreemptibleJob(folder / f"at-{dist.get_rank()}").resume(model, optimizer),
        lambda: PreemptibleJob(folder).step_done(),
        lambda: after_a_step(torch.optim.lr_scheduler.LambdaLR(optimizer, Warmup())),
        with_a_foreign_state,
        with_a_strange_entry,
    ]
    with mock.patch("signal.signal"), mock.patch("signal.pthread_sigmask"):
        return messages_of(attempts, PipeshardError)


@pytest.mark.turns
def test_a_job_that_could_not_save_ends_before_its_second_step(pool: Pool, tmp_path: Path) -> None:
    """Only the first save checked what was passed to the job: a hundred steps later, or after SIGTERM, when the work
    was lost."""
    expected = [
        "keep, a number of saved steps, must be a positive integer, got None",
        "keep, a number of saved steps, must be a positive integer, got 0",
        "this DataLoader cannot save its position in the data, since it has no state_dict or load_state_dict",
        "this GPT2LMHeadModel was not boosted",
        "the directory of the PreemptibleJob differs between ranks: .*at-0 on rank 0.*, but .*at-1 on rank 1",
        "step_done was called before resume: call job.resume",
        "the state of this LambdaLR cannot be saved .*a value of type set cannot be saved",
        "the optimizer's state has the key -1, which is not a parameter",
        "contains transformer.ln_f._extra_state of type dict, but a checkpoint contains only tensors",
    ]
    assert_told_alike(pool.run(unsavable, 2, tmp_path), expected)
    assert not list(tmp_path.glob("step-*"))


def test_a_script_without_a_launcher_is_told() -> None:
    with mock.patch("signal.signal"), pytest.raises(UsageError, match=r"with pipeshard launch"):
        ElasticJob("nowhere", 2, 4)


# The launcher's flags


def test_defaults_are_those_of_elastic_pipelines() -> None:
    args = launch.parse(["--nnodes", "2:4", "script.py", "--nnodes", "9"])
    assert (args.rdzv_backend, args.max_restarts, args.nnodes) == ("c10d", launch.RESTARTS, "2:4")
    assert args.rdzv_conf == "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=5"
    assert (args.rdzv_endpoint, args.local_addr) == ("localhost:29400", "localhost")
    assert (args.training_script, args.training_script_args) == ("script.py", ["--nnodes", "9"])
    assert launch.parse(["script.py"]).rdzv_endpoint == "localhost:0"


def test_what_is_said_counts() -> None:
    flags = ["--rdzv-endpoint", "host:29400", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=60"]
    args = launch.parse([*flags, "script.py"])
    assert (args.rdzv_endpoint, args.local_addr, args.max_restarts) == ("host:29400", None, 3)
    assert args.rdzv_conf.endswith("last_call_timeout=5,last_call_timeout=60")
    with mock.patch.dict(os.environ, {"PET_RDZV_BACKEND": "etcd-v2", "PET_MAX_RESTARTS": "7"}):
        args = launch.parse(["script.py"])
    assert (args.rdzv_backend, args.max_restarts, args.rdzv_conf) == ("etcd-v2", 7, "")


def test_the_address_of_a_static_rendezvous_is_used() -> None:
    """With torchrun's --master-addr, or Kubeflow's PET_MASTER_ADDR, each machine waited ten minutes at its own
    localhost."""
    flags = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "host1", "--master-port", "29500", "script.py"]
    args = launch.parse(flags)
    assert (args.rdzv_backend, args.rdzv_endpoint, args.local_addr) == ("c10d", "host1:29500", None)
    assert args.rdzv_conf.startswith("is_host=0,keep_alive") and args.node_rank == 0
    with mock.patch.dict(os.environ, {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "host1"}):
        args = launch.parse(["script.py"])
        assert args.rdzv_endpoint == "host1:29400" and "is_host" not in args.rdzv_conf
        assert launch.parse(["--rdzv-endpoint", "host2:1", "script.py"]).rdzv_endpoint == "host2:1"
        assert launch.parse(["--nnodes", "1", "script.py"]).rdzv_endpoint == "localhost:0"


def test_wrong_flags_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--nnodes", "two"], ["--rdzv-endpoint", "host:port"]):
        with pytest.raises(SystemExit, match="2"):
            launch.parse([*flags, "script.py"])
        assert "argument --nnodes or --rdzv-endpoint: " in capsys.readouterr().err


def test_the_command_line_has_it_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    script = str(tmp_path / "script.py")
    with mock.patch("pipeshard.launch.run") as run, mock.patch("pipeshard.launch._forward"):
        result = CliRunner().invoke(cli.main, ["launch", "--nnodes", "1:2", script, "--steps", "3"])
    assert result.exit_code == 0, result.output
    (args,) = run.call_args.args
    assert (args.nnodes, args.module, args.training_script) == ("1:2", True, "pipeshard.script")
    assert args.training_script_args == [script, "--steps", "3"]
