"""The sweep: entries checked at several p, in worker processes that may crash or hang, one row of each."""

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

import psutil

from tests.parity.check import check
from tests.parity.entries import Entry
from tests.parity.fixes import UNTRAINABLE
from tests.parity.prove import prove
from tests.parity.report import Row, worst
from tests.pool import ENVIRONMENT, PRELOAD, Pool, WorkerError

WATCHDOG = 60.0  # seconds
START = 300.0  # seconds for importing every architecture


def sweep(
    jobs: Mapping[int, Sequence[Entry]],
    save: Callable[[Row], None],
    watchdog: float = WATCHDOG,
    verify: bool = False,
    precision: str = "fp32",
) -> None:
    """Check the entries of each p, all p at the same time; `save` gets the rows, one at a time.

    With `verify` each is proven in one process. Whatever ends it, no process is left.
    """
    stop, lock = Event(), Lock()

    def work(p: int, entries: Sequence[Entry]) -> None:
        pool = Pool()
        pool.run(os.getpid, 1 if verify else p, timeout=START)
        for entry in entries:
            row = row_of(pool, entry, p, watchdog, verify, precision)
            with lock:
                if stop.is_set():
                    return  # the row is of workers that were killed
                save(row)

    _start()
    with contextlib.redirect_stdout(None), ThreadPoolExecutor(len(jobs)) as threads:  # what the workers print
        futures = [threads.submit(work, p, entries) for p, entries in jobs.items()]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            stop.set()
            _kill_all()
            while wait(futures, timeout=0.1).not_done:  # one may just have started a worker
                _kill_all()


def row_of(
    pool: Pool, entry: Entry, p: int, watchdog: float = WATCHDOG, verify: bool = False, precision: str = "fp32"
) -> Row:
    """What comes of the entry on p ranks: the worst of their verdicts, or how they failed."""
    started = time.monotonic()
    kind, error, reason = _outcome(pool, entry, p, watchdog, verify, precision)
    return Row(str(entry), p, kind, error, reason, round(time.monotonic() - started, 2))


def _outcome(pool: Pool, entry: Entry, p: int, watchdog: float, verify: bool, precision: str) -> tuple[str, float, str]:
    if str(entry) in UNTRAINABLE:
        return "untrainable", 0.0, UNTRAINABLE[str(entry)]
    try:
        if verify:
            verdicts = pool.run(prove, 1, entry, p, timeout=watchdog)
        else:
            verdicts = pool.run(check, p, entry, precision, timeout=watchdog)
    except WorkerError as error:
        return failure(str(error))
    kind = worst([verdict.kind for verdict in verdicts])
    reason = next(verdict.reason for verdict in verdicts if verdict.kind == kind)
    return kind, max(verdict.error for verdict in verdicts), reason


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


def _start() -> None:
    """Start the process that workers are forked from."""
    os.environ.update(ENVIRONMENT)
    forkserver.set_forkserver_preload([*PRELOAD, "tests.parity.preload"])
    forkserver.ensure_running()


def _kill_all() -> None:
    for process in psutil.Process().children(recursive=True):
        process.kill()


def versions() -> dict[str, str]:
    python = ".".join(map(str, sys.version_info[:3]))
    return {name: version(name) for name in ("torch", "transformers", "colossalai", "pipeshard")} | {"python": python}


class Rows:
    """The rows of a sweep, in a file if there is one: a line of versions, and then a line of JSON for each row."""

    def __init__(self, file: Path | None, resume: bool) -> None:
        """Takes the file's rows with `resume`, else begins it anew. Raises ValueError: they are of other versions."""
        self.rows: list[Row] = []
        self._file = file
        if file and resume and file.exists():
            head, *lines = map(json.loads, file.read_text().splitlines())
            if head != versions():
                raise ValueError(f"The rows in {file} are of {head}, not {versions()}: sweep anew, without --resume.")
            self.rows = [Row(**line) for line in lines]
        elif file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(versions()) + "\n")

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self._file:
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def missing(self, entries: Sequence[Entry], ps: Sequence[int]) -> dict[int, list[Entry]]:
        """For each p the entries that have no row yet."""
        done = {(row.entry, row.p) for row in self.rows}
        return {p: [entry for entry in entries if (str(entry), p) not in done] for p in ps}
