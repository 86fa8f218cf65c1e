"""Crash: the report that a rank writes when a failure ends it, and the page that summarizes all ranks.

Each rank that can still run code writes `crash/rank-N.json` in its working directory. The file contains the fault, the
stacks of all threads, the rank's last actions, and the rank's memory use. The environment variable PIPESHARD_CRASH sets
another folder. If the variable is empty, ranks write no reports. `pipeshard crash FOLDER` summarizes the reports.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from pipeshard.distributed.failures import Fault
from pipeshard.distributed.progress import NOW
from pipeshard.errors import CheckpointError, summary

logger = logging.getLogger("pipeshard")
VARIABLE = "PIPESHARD_CRASH"
SHOWN, LINES = 8, 12  # the maximum numbers of actions and of error lines that the page shows per rank
LONGEST_REPORT = 16 * 2**20  # bytes; a larger report is an error


def leave_report(rank: int, name: str, fault: Fault, error: BaseException | None, run: str) -> None:
    """Write this rank's report. `run` is a string that identifies the run. If writing fails, logs a warning instead of
    raising an error."""
    if not (folder := os.environ.get(VARIABLE, "crash")):
        return
    try:
        path = Path(folder) / f"rank-{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report(rank, name, fault, error, run), indent=1))
    except (OSError, ValueError) as why:
        remedy = f"set {VARIABLE} to a folder that this process can write"
        logger.warning("rank %d could not write its crash report to %r: %s (%s)", rank, folder, why, remedy)


def report(rank: int, name: str, fault: Fault, error: BaseException | None, run: str = "") -> dict[str, Any]:
    """The content of a rank's report, as a JSON-serializable dict. `ago` is in seconds, and memory is in bytes."""
    now, names = time.monotonic(), {thread.ident: thread.name for thread in threading.enumerate()}
    memory = {"resident": psutil.Process().memory_info().rss, "of the host": psutil.virtual_memory().total}
    is_training = threading.current_thread() is threading.main_thread()
    # If the training thread hangs while it holds the allocator's lock, a thread of the watch would wait for the lock,
    # and hold the GIL.
    if is_training and torch.cuda.is_available() and torch.cuda.is_initialized():
        memory |= {"allocated": torch.cuda.memory_allocated(), "allocated at most": torch.cuda.max_memory_allocated()}
    return {
        "rank": rank,
        "name": name,
        "run": run,
        "time": time.time(),
        "where": NOW.where,
        "fault": asdict(fault),
        "text": str(fault),
        "error": "" if error is None else "".join(traceback.format_exception(error))[-20_000:],
        "actions": [{"ago": round(now - at, 3), "what": str(action)} for at, action in list(NOW.history)],
        "memory": memory,
        "stacks": {
            names.get(ident, str(ident)): traceback.format_stack(frame)
            for ident, frame in sys._current_frames().items()
        },
    }


def page(folder: Path) -> Iterator[str]:
    """Summarize the last run's reports in a folder, and yield the summary's lines: the cause, and then each rank's
    error and last actions, in the order in which the ranks wrote their reports.

    Raises CheckpointError if the folder contains no report, or a report that cannot be read.
    """
    reports = sorted(map(_read_report, folder.glob("rank-*.json")), key=lambda report: report.time)
    if not reports:
        raise CheckpointError(
            f"{folder} contains no crash report (rank-0.json, ...): pass the folder that contains the crash reports"
        )
    earlier = [report for report in reports if report.run != reports[-1].run]
    reports = [report for report in reports if report.run == reports[-1].run]
    own = [report.text for report in reports if report.culprit == report.rank]
    yield f"What happened: {(own or [report.text for report in reports])[0]}"
    for rank in sorted({report.culprit for report in reports} - {report.rank for report in reports} - {-1}):
        yield f"Rank {rank} has no report here: it was killed, is suspended, or has a different working directory"
    if earlier:
        files = ", ".join(f"rank-{report.rank}.json" for report in earlier)
        yield f"Not shown: {files}, of an earlier run or attempt"
    for report in reports:
        after = f"{report.time - reports[0].time:.2f} s after the first"
        yield f"\n{report.name}, {after}, in {report.where} ({report.resident / 2**30:.2f} GiB resident)"
        yield from (f"  {line}" for line in (report.error or report.text).splitlines()[-LINES:])
        yield from (f"  {ago:9.3f} s before: {what}" for ago, what in report.actions[-SHOWN:])


@dataclass(frozen=True)
class _Report:
    """The fields of a report file that the page shows."""

    rank: int
    culprit: int
    run: str
    name: str
    time: float
    where: str
    text: str
    error: str
    resident: float
    actions: Sequence[tuple[float, str]]


def _read_report(path: Path) -> _Report:
    try:
        if path.stat().st_size > LONGEST_REPORT:
            raise ValueError(f"the file has more than {LONGEST_REPORT} bytes")
        found = json.loads(path.read_text())
        texts = {key: str(found[key]) for key in ("name", "where", "text", "error")}
        return _Report(
            rank=int(found["rank"]),
            culprit=int(found["fault"]["rank"]),
            run=str(found.get("run", "")),
            time=float(found["time"]),
            resident=float(found["memory"]["resident"]),
            actions=[(float(action["ago"]), str(action["what"])) for action in found["actions"]],
            **texts,
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a valid crash report: {summary(error)}. Delete this file, or pass another folder"
        ) from error
