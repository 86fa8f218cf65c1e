"""The sweep: entries checked with several p, in worker processes that may crash or hang, with one row each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import asdict
from importlib.metadata import version
from multiprocessing import forkserver
from pathlib import Path
from threading import Event, Lock
from typing import Any, Generic, TypeVar

import psutil

from tests.parity.check import Verdict, check
from tests.parity.entries import Entry
from tests.parity.fixes import UNTRAINABLE
from tests.parity.prove import prove
from tests.parity.report import Row, worst
from tests.pool import ENVIRONMENT, PRELOAD, Pool, WorkerError

E = TypeVar("E")
R = TypeVar("R", bound=Row)

WATCHDOG = 60.0  # seconds
START = 300.0  # seconds for importing every architecture


def sweep(
    jobs: Mapping[int, Sequence[Any]],
    save: Callable[[Any], None],
    row: Callable[[Pool, Any, int], Any],
    ranks: Callable[[int], int] = lambda p: p,
    preload: str = "tests.parity.preload",
    worlds: int = 1,
    method: str = "forkserver",
) -> None:
    """Make the `row` of each p's entries on so many `ranks`, all p at the same time, in `worlds` worlds for each p;
    `save` gets the rows, one at a time.

    Workers are forked from a process that has imported `preload`, or started by another `method`. Whatever ends the
    sweep, no process is left.
    """
    stop, lock = Event(), Lock()

    def work(p: int, entries: Sequence[Any]) -> None:
        pool = Pool(method)
        pool.run(os.getpid, ranks(p), timeout=START)
        for entry in entries:
            found = row(pool, entry, p)
            with lock:
                if stop.is_set():
                    return  # the row is of workers that were killed
                save(found)

    _start(preload, method)
    parts = [(p, entries[k::worlds]) for p, entries in jobs.items() for k in range(worlds)]
    with contextlib.redirect_stdout(None), ThreadPoolExecutor(len(parts)) as threads:  # what the workers print
        futures = [threads.submit(work, *part) for part in parts]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            stop.set()
            _kill_all()
            while wait(futures, timeout=0.1).not_done:  # one may just have started a worker
                _kill_all()


def row_of(
    pool: Pool,
    entry: Entry,
    p: int,
    watchdog: float = WATCHDOG,
    verify: bool = False,
    precision: str = "fp32",
    device: str = "cpu",
) -> Row:
    """What comes of the entry on p ranks: the worst of their verdicts, or how they failed."""

    def verdicts() -> list[Verdict]:
        if verify:
            return pool.run(prove, 1, entry, p, timeout=watchdog)
        return pool.run(check, p, entry, precision, device, timeout=watchdog)

    return judged(entry, p, verdicts if str(entry) not in UNTRAINABLE else lambda: [untrainable(entry)])


def untrainable(entry: Entry) -> Verdict:
    """That of an entry which cannot be trained here."""
    return Verdict("untrainable", reason=UNTRAINABLE[str(entry)])


def judged(entry: Entry, p: int, verdicts: Callable[[], Sequence[Verdict]]) -> Row:
    """The row of an entry: the worst verdict of its ranks, or how they failed."""
    started = time.monotonic()
    try:
        found = verdicts()
    except WorkerError as failed:
        kind, error, reason = failure(str(failed))
    else:
        kind = worst([verdict.kind for verdict in found])
        reason = next(verdict.reason for verdict in found if verdict.kind == kind)
        error = max(verdict.error for verdict in found)
    return Row(str(entry), p, kind, error, reason, round(time.monotonic() - started, 2))


def failure(message: str) -> tuple[str, float, str]:
    """The kind and the reason of a WorkerError: the error of the rank that failed first, then the whole message."""
    first = message.partition("\n")[0]
    if first.startswith("Timeout"):
        return "hang", 0.0, message
    traceback = re.split(r"^===== .* =====$", message, flags=re.MULTILINE)[1].rpartition("Traceback (most recent")[2]
    raised = re.search(r"^([\w.]+)(?::.*)?$", traceback, re.MULTILINE)  # all other lines are indented
    if " died first" in first or raised is None:
        return "crash", 0.0, message
    kind = "refused" if raised[1].startswith("pipeshard.errors.") else "crash"
    return kind, 0.0, f"{raised[0].removeprefix('pipeshard.errors.')}\n{message}"


def _start(preload: str, method: str) -> None:
    """Start the process that workers are forked from, if they are."""
    os.environ.update(ENVIRONMENT)
    if method == "spawn":
        return
    forkserver.set_forkserver_preload([preload, *PRELOAD])
    forkserver.ensure_running()


def _kill_all() -> None:
    for process in psutil.Process().children(recursive=True):
        process.kill()


def versions(names: Sequence[str] = ("torch", "transformers", "colossalai", "pipeshard")) -> dict[str, str]:
    python = ".".join(map(str, sys.version_info[:3]))
    return {name: version(name) for name in names} | {"python": python}


class Rows(Generic[R]):
    """The rows of a sweep, in a file if there is one: a line of versions, and then a line of JSON for each row."""

    def __init__(
        self, file: Path | None, resume: bool, row: type[R] = Row, of: Mapping[str, str] | None = None
    ) -> None:
        """Takes the file's rows with `resume`, else begins it anew. Raises ValueError: they are `of` other versions."""
        self.rows: list[R] = []
        self._file = file
        of = dict(of or versions())
        if file and resume and file.exists():
            head, *lines = map(json.loads, file.read_text().splitlines())
            if head != of:
                raise ValueError(f"The rows in {file} are of {head}, not {of}: sweep anew, without --resume.")
            self.rows = [row(**line) for line in lines]
        elif file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(of) + "\n")

    def add(self, row: R) -> None:
        self.rows.append(row)
        if self._file:
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def forget(self, which: Callable[[R], bool]) -> None:
        """Drop these rows, of the file too."""
        self.rows = [row for row in self.rows if not which(row)]
        if self._file:
            head = self._file.read_text().splitlines()[0]
            lines = [head, *(json.dumps(asdict(row)) for row in self.rows)]
            self._file.write_text("\n".join(lines) + "\n")

    def missing(self, entries: Sequence[E], ps: Sequence[int]) -> dict[int, list[E]]:
        """For each p the entries that have no row yet."""
        done = {(row.entry, row.p) for row in self.rows}
        return {p: [entry for entry in entries if (str(entry), p) not in done] for p in ps}
