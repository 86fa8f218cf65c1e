"""The command `python -m tests.soak`: thousands of steps, with evaluations, saves and restarts between them."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")  # sums that do not depend on where in memory the numbers are
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process that has started threads cannot be forked safely

from rich.console import Console

from tests.soak.course import Course
from tests.soak.flatness import growths, holdings
from tests.soak.lives import UNDISTURBED, Life, leftovers, live
from tests.soak.plant import KINDS, Plant
from tests.soak.plot import draw


def main() -> int:
    arguments = parse()
    own, folder = os.getpid(), arguments.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    gc.freeze()  # else each rank copies all of this process's objects when it ends, to look at them
    try:
        return run(arguments, folder, Console(soft_wrap=True, highlight=False))
    finally:
        if os.getpid() == own and not arguments.folder:  # the ranks come out here, too
            shutil.rmtree(folder)


def run(arguments: argparse.Namespace, folder: Path, console: Console) -> int:
    course, start = Course(arguments.seed, arguments.steps), time.monotonic()
    lives: list[Life] = []
    for k, stop in enumerate([None, *course.stops()]):
        life = live(folder, f"life{k}" if stop else UNDISTURBED, course, stop, arguments.plant)
        if isinstance(life, int):
            return life
        lives.append(life)
        console.print(f"{life.name}: {said(life)}")
        if life.wrong:
            break
    wrong = [*(text for life in lives for text in life.wrong)] or found(lives, folder)
    if arguments.output:
        draw(lives, arguments.output)
    for line in (*holdings(lives), *wrong):
        console.print(line, markup=False)
    seconds, verdict = time.monotonic() - start, "failed" if wrong else "passed"
    console.print(f"{course.steps} steps twice, {len(lives) - 2} restarts, {seconds:.0f} s: {verdict}")
    return int(bool(wrong))


def said(life: Life) -> str:
    lines = life.lines[0] or [{"step": -1}]
    end = "to the end" if life.stop is None else f"rank {life.stop.victim} killed" if life.is_killed else "ended"
    return f"steps {lines[0]['step']} to {lines[-1]['step']}, {end}"


def found(lives: list[Life], folder: Path) -> list[str]:
    """What is wrong with a soak all of whose lives ended as they should."""
    undisturbed, last = lives[0].digests, lives[-1].digests
    wrong = [
        f"rank {rank}: the restarts led to other parameters ({b}) than the undisturbed run ({a})"
        for rank, (a, b) in enumerate(zip(undisturbed, last, strict=True))
        if a != b
    ]
    return wrong + growths(lives) + [f"{name} is left on disk" for name in leftovers(folder)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where the plot goes")
    parser.add_argument("--folder", type=Path, help="for states and records, which are then kept; it must be empty")
    parser.add_argument(
        "--plant", nargs="*", type=Plant, default=[], metavar="KIND:RANK", help=f"put in what is to be found: {KINDS}"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
