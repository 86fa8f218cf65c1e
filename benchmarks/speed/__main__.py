"""The command: `python -m benchmarks.speed [--part NAME ...] [--rounds N] [--quick] [--require]`."""

import argparse
import platform
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.speed.contender import ROOT
from benchmarks.speed.parts import (
    Effort,
    Part,
    generation,
    guards,
    lengths,
    links,
    memory,
    orders,
    overhead,
    partition,
    replay,
    slices,
    work,
)
from benchmarks.speed.report import write
from benchmarks.speed.section import Section

PARTS: dict[str, Part] = {
    "work": work.run,
    "orders": orders.run,
    "links": links.run,
    "overhead": overhead.run,
    "lengths": lengths.run,
    "memory": memory.run,
    "partition": partition.run,
    "replay": replay.run,
    "guards": guards.run,
    "slices": slices.run,
    "generation": generation.run,
}
FIGURES = ROOT / "outputs" / "benchmarks"


def main() -> int:
    args = _arguments()
    if platform.system() != "Linux":
        sys.exit("make bench reads /proc, which only Linux has: run it on Linux")
    effort = Effort(args.rounds or (2 if args.quick else 9), args.quick)
    figures = FIGURES / "quick" if args.quick else FIGURES
    console = Console(width=None if sys.stdout.isatty() else 140)
    columns = (BarColumn(20), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
    failed = missed = False
    for name in args.part:
        with Progress(*columns, console=console, transient=True) as progress:
            section = PARTS[name](effort, progress)
        section.print(console)
        section.save(figures / f"{name}.json")
        failed |= bool(section.failed)
        missed |= not all(bar.met for bar in section.bars)
    found = {name: Section.load(figures / f"{name}.json") for name in PARTS if (figures / f"{name}.json").exists()}
    folder = args.docs if len(found) == len(PARTS) and not args.quick else figures
    write(found, folder)
    console.print(f"wrote {folder}/benchmarks.md, and the figures in {figures}/*.json", soft_wrap=True)
    return int(args.require and (failed or missed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default: all)")
    parser.add_argument("--rounds", type=int, help="rounds after the warm-up (default: 9, or 2 with --quick)")
    parser.add_argument("--quick", action="store_true", help="use small models, to check that everything runs")
    parser.add_argument("--require", action="store_true", help="exit with 1 if a contender fails or a target is missed")
    parser.add_argument(
        "--docs", type=Path, default=ROOT / "docs", help="folder for benchmarks.md if all parts have run"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
