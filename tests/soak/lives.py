"""Lives: the runs between two restarts of a soak, and the memory and objects that their ranks held."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeshard.checkpoint.state_folder import LOCK
from tests.faults.ranks import Ranks
from tests.soak import job
from tests.soak.course import SIZE, Course, Stop
from tests.soak.plant import Plant

PATIENCE = 60.0  # seconds for a start and an end, and as many for a hundred steps
UNDISTURBED = "undisturbed"


@dataclass
class Life:
    """One run of all ranks, `lines[rank]` is what the meter of each wrote; `wrong` what was not as it should be."""

    name: str
    stop: Stop | None
    lines: list[list[dict[str, Any]]]
    digests: list[str]
    wrong: list[str]

    @property
    def is_killed(self) -> bool:
        return self.stop is not None and self.stop.victim is not None


def live(folder: Path, name: str, course: Course, stop: Stop | None, plants: Sequence[Plant]) -> Life | int:
    """Run a life to its end. In the ranks, which come out here too, it is the status to leave with."""
    ranks = Ranks(folder, name, SIZE)
    if ranks.rank is not None:
        return job.run(ranks, folder, name, course, stop, plants)
    deadline = time.monotonic() + PATIENCE * (1 + course.steps / 100)
    if stop is not None and stop.victim is not None:
        progress = folder / f"progress-{name}"
        ranks.wait(lambda: _step(progress) >= stop.step or time.monotonic() > deadline)
        time.sleep(stop.delay)
        ranks.signal(signal.SIGKILL, stop.victim)
        deadline = time.monotonic() + PATIENCE  # the others find out, and leave
    in_time = ranks.wait(lambda: time.monotonic() > deadline)
    wrong = [] if in_time else [f"{name}: ranks are still there"]
    ranks.kill()
    victim = None if stop is None else stop.victim
    for rank, status in sorted(ranks.statuses.items()):
        is_right = status == 0 if victim is None else status == -signal.SIGKILL if rank == victim else status > 0
        if not is_right:
            wrong.append(f"{name}: rank {rank} ended with status {status}\n{ranks.text(rank)[-2000:]}")
    lines = [_lines(folder / f"{name}-{rank}.jsonl") for rank in range(SIZE)]
    digests = [file.read_text() for file in sorted(folder.glob(f"{job.DIGEST}-{name}-*"))]
    return Life(name, stop, lines, digests, wrong)


def leftovers(folder: Path) -> list[str]:
    """Names of what saves, killed ones among them, have left beside the last two states and the last weights."""
    names = [path.name for path in (folder / job.STATES).iterdir() if path.name != LOCK]
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return hidden + sorted(names)[:-2] + [name for name in names if name.startswith(".")]


def _step(progress: Path) -> int:
    return int(progress.read_text() or -1) if progress.exists() else -1


def _lines(file: Path) -> list[dict[str, Any]]:
    """Those that are whole: a rank may have been killed while it wrote one."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]
