"""Tests of two hosts: torchrun trains over a cable that is cut during a step, and resumes once it is restored."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from pipeshard.checkpoint.training_state import newest_step
from tests.faults.job import FAULTY, STEPS, TIMEOUT, Job, digest
from tests.hosts import ADDRESSES, INTERFACE, Hosts, missing
from tests.pool import ENVIRONMENT, Pool

PORT = 29500
PATIENCE = 150.0  # seconds for what takes a few, on a machine that has nothing else to do
DOWN = TIMEOUT + 10  # seconds after the cut in which both hosts have ended, on such a machine

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as hosts:
        yield hosts


def busy() -> float:
    """How much longer than by itself a process takes here now."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def alone(folder: Path) -> str:
    """The same job on the ranks of a pool, which nothing happens to."""
    job = Job(folder)
    job.train(lambda job: None)
    return digest(job.model)


class Run:
    """An agent on each host, torchrun's or pipeshard's, with some ranks. In the faulty step, the first rank of the
    second host stands still in a forward until the cable is cut."""

    def __init__(self, hosts: Hosts, folder: Path, rendezvous: str, ranks: int = 1, timeout: float | None = TIMEOUT):
        self.hosts, self.folder, self.rendezvous, self.ranks = hosts, folder, rendezvous, ranks
        self.script = folder / "script.py"
        self.script.write_text(
            textwrap.dedent(f"""
            import pathlib, time
            import torch, torch.distributed as dist
            from tests.faults import job as jobs
            from tests.hooks import register_unseen
            jobs.TIMEOUT = {timeout}
            folder = pathlib.Path({str(folder)!r})
            def stand(*_):
                (folder / "middle").touch()
                while not (folder / "cut").exists():
                    time.sleep(0.01)
            def plant(job):
                if job.rank == {ranks}:
                    units = job.model.pipeline.policy.get_held_layers()
                    register_unseen(next(unit for unit in units if hasattr(unit, "mlp")).mlp, stand)
            torch.set_num_threads(1)
            dist.init_process_group("gloo")
            job = jobs.Job(folder)
            job.train(plant)
            (folder / f"digest{{job.rank}}").write_text(jobs.digest(job.model))
            dist.destroy_process_group()
            """)
        )

    def start(self) -> None:
        agent = "torch.distributed.run" if self.rendezvous == "static" else "pipeshard.launch"
        for host in range(2):
            command = [sys.executable, "-W", "ignore", "-m", agent, "--nnodes", "2"]
            command += ["--nproc-per-node", str(self.ranks), *self._flags(host), str(self.script)]
            unset = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
            environment = {name: value for name, value in os.environ.items() if name not in unset}
            environment |= {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self.hosts.start(host, command, self._output(host), environment | {"GLOO_SOCKET_IFNAME": INTERFACE})

    def cut_in_a_step(self, end: int) -> float:
        """When, in seconds of `time.monotonic`."""
        self.until("the middle of a step", (self.folder / "middle").exists)
        self.hosts.cut(end)
        (self.folder / "cut").touch()
        return time.monotonic()

    def until(self, what: str, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        start = time.monotonic()
        while not condition():
            assert time.monotonic() < start + seconds, f"not in {seconds} seconds: {what}\n{self.said(0, 1)}"
            time.sleep(0.05)

    def is_down(self, host: int) -> bool:
        return not self.hosts.processes(host)

    def said(self, *hosts: int) -> str:
        return "\n".join(f"--- host {host}\n{self._output(host).read_text(errors='replace')}" for host in hosts)

    def _flags(self, host: int) -> list[str]:
        if self.rendezvous == "static":
            return ["--node-rank", str(host), "--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
        # These hosts have no names, by which the first one would know itself.
        where = ["--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--rdzv-conf", f"is_host={int(host == 0)}"]
        return [*where, "--local-addr", ADDRESSES[host], "--max-restarts", "0"]

    def _output(self, host: int) -> Path:
        return self.folder / f"host{host}.txt"


@pytest.mark.parametrize(("rendezvous", "ranks", "end"), [("c10d", 1, 0), ("static", 2, 1)])
def test_a_cut_ends_both_by_name_and_the_next_run_goes_on(
    pool: Pool, tmp_path: Path, hosts: Hosts, rendezvous: str, ranks: int, end: int
) -> None:
    run = Run(hosts, tmp_path, rendezvous, ranks)
    run.start()
    at, seconds = run.cut_in_a_step(end), DOWN * busy()
    for host in range(2):
        run.until(f"host {host} is down", partial(run.is_down, host), at + seconds - time.monotonic())
        print(f"{rendezvous}: from the cut to host {host} being down: {time.monotonic() - at:.1f} s")
    print(run.said(0, 1))
    assert f"there was no progress for {TIMEOUT:.3g} seconds, because of rank {ranks} (stage {ranks})" in run.said(0)
    assert f"rank {ranks} (stage {ranks}) does not respond" in run.said(0)
    assert "RankError: the rendezvous store does not respond" in run.said(1)
    assert newest_step(tmp_path / "states") == FAULTY

    hosts.mend()
    run.start()
    run.until("the end", lambda: run.is_down(0) and run.is_down(1))
    assert newest_step(tmp_path / "states") == STEPS, run.said(0, 1)
    digests = [(tmp_path / f"digest{rank}").read_text() for rank in range(2 * ranks)]
    (other := tmp_path / "undisturbed").mkdir()
    assert digests == pool.run(alone, 2 * ranks, other)


def test_what_listens_and_that_nothing_ends_without_the_watch(tmp_path: Path, hosts: Hosts) -> None:
    run = Run(hosts, tmp_path, "static", timeout=None)
    run.start()
    run.until("the middle of a step", (tmp_path / "middle").exists)
    for host, stores in enumerate([[("*", PORT)], []]):  # torch's store listens everywhere
        sockets = hosts.listening(host)
        named = [address for address, _ in sockets if address == ADDRESSES[host]]
        assert named and len(named) + len(stores) == len(sockets)
        assert [socket for socket in sockets if socket[0] != ADDRESSES[host]] == stores

    at = run.cut_in_a_step(0)
    while time.monotonic() < at + DOWN:
        assert not run.is_down(0) and not run.is_down(1), run.said(0, 1)
        time.sleep(0.5)
