"""The command `python -m tests.fuzz`: passes inputs to the parsers of checkpoints, and reports the results."""

import argparse
import os
import sys
import time
from pathlib import Path

from tests.fuzz.campaign import Tally, campaign
from tests.fuzz.parsers import PARSERS

SHOWN = 8  # kinds of refusals, the most frequent first


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all, about (default: %(default)s)")
    parser.add_argument("--parser", action="append", help="one of them, and no other; may be given several times")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=Path("outputs/fuzz"), help="a folder for inputs that crash")
    arguments = parser.parse_args()
    begin = time.monotonic()
    chosen = [parser for parser in PARSERS if not arguments.parser or parser.name in arguments.parser]
    tallies = campaign(chosen, arguments.inputs, arguments.seed, arguments.processes)
    report(tallies, time.monotonic() - begin)
    return save(tallies, arguments.output)


def report(tallies: dict[str, Tally], seconds: float) -> None:
    for name, tally in tallies.items():
        print(
            f"{name}: {tally.inputs:,} inputs, {tally.accepted:,} read, {tally.refused:,} refused in "
            f"{len(tally.refusals)} ways, {len(tally.crashes)} crashes, {tally.peak} MiB at most; mostly refused as"
        )
        for kind, count in tally.refusals.most_common(SHOWN):
            print(f"  {count:9,} {kind}")
    total = sum(tally.inputs for tally in tallies.values())
    print(f"{total:,} inputs in {seconds:.0f} s, {total / seconds:,.0f} a second")


def save(tallies: dict[str, Tally], folder: Path) -> int:
    """Keep the inputs that crashed; the exit status, 1 where there is one."""
    crashes = [crash for tally in tallies.values() for crash in tally.crashes]
    if crashes:
        folder.mkdir(parents=True, exist_ok=True)
    for k, crash in enumerate(crashes):
        file = folder / f"{crash.parser.replace(' ', '-')}-{crash.number}-{k}"
        file.write_bytes(crash.content)
        print(f"{crash.parser}, input {crash.number}, kept as {file}: {crash.what}", file=sys.stderr)
    return int(bool(crashes))


if __name__ == "__main__":
    sys.exit(main())
