"""The command `python -m tests.faults`: injects every fault on every stage at every moment, and reports the results."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")  # sums that do not depend on where in memory the numbers are
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process that has started threads cannot be forked safely

from rich.console import Console

from pipeshard.checkpoint.state_folder import LOCK
from tests.covering import SEED
from tests.faults import job
from tests.faults.job import SIZE
from tests.faults.mechanisms import MECHANISMS, RELIES
from tests.faults.plant import CHILD, KINDS, Case, Planter, all_cases
from tests.faults.ranks import Ranks
from tests.faults.report import Result, write_table

PATIENCE = 20.0  # seconds for a run without a fault
NEVER = "the fault never happened"


def main() -> int:
    arguments = parse()
    own, folder = os.getpid(), Path(tempfile.mkdtemp(prefix="faults-"))
    gc.freeze()  # else each rank copies all of this process's objects when it ends, to look at them
    try:
        return run(arguments, folder, Console(soft_wrap=True, highlight=False))
    finally:
        if os.getpid() == own:  # the ranks come out here, too
            shutil.rmtree(folder)


def run(arguments: argparse.Namespace, folder: Path, console: Console) -> int:
    undisturbed = Ranks(folder, "undisturbed", SIZE)
    if undisturbed.rank is not None:
        return job.run(undisturbed, folder)
    if not ended_well(undisturbed):
        console.print("the run without a fault failed:\n" + undisturbed.text(0), markup=False)
        return 1
    digests, results, bad = read_digests(folder), [], 0
    for case, mechanism in chosen(arguments):
        here = folder / "case"
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        ranks = Ranks(here, "rank", SIZE)
        if ranks.rank is not None:
            if mechanism is not None:
                MECHANISMS[mechanism]()
            return job.run(ranks, here, Planter(case, here / "mark"), case.timeout)
        results.append(result := judged(case, ranks, here))
        if mechanism is None:
            again = Ranks(here, "again", SIZE)
            if again.rank is not None:
                return job.run(again, here)
            result.wrong += resumed(again, here, digests)
        unexpected = bool(result.wrong) == (mechanism is None) or NEVER in result.wrong
        bad += unexpected
        show(console, case, result, mechanism, ranks if unexpected else None)
    if arguments.output:
        write_table(results, arguments.output)
    times = sorted(result.seconds for result in results if result.kind == "exception")
    if times and not arguments.disable:
        median = statistics.median(times)
        console.print(f"from an exception to all ranks down: median {median:.2f} s, {times[-1]:.2f} s at most")
    console.print(f"{len(results) - bad} of {len(results)} cases are as they should be")
    return int(bad > 0)


def chosen(arguments: argparse.Namespace) -> list[tuple[Case, str | None]]:
    """The cases, and what is disabled in each."""
    cases = [case for case in all_cases() if all(part in str(case) for part in arguments.only)]
    if arguments.sample:  # of some kinds one, on all stages and at all moments in turn
        kinds = [[case for case in cases if case.kind == kind] for kind in KINDS]
        cases = [of_kind[(7 * k + SEED) % len(of_kind)] for k, of_kind in enumerate(kinds) if of_kind]
        first = SEED % max(1, len(cases))
        cases = spread(cases[first:] + cases[:first], arguments.sample)
    if not arguments.disable:
        return [(case, None) for case in cases]
    return [
        (case, name)
        for name, relies in RELIES.items()
        for case in spread([case for case in cases if relies(case)], arguments.disable)
    ]


def spread(cases: list[Case], number: int) -> list[Case]:
    """So many of them, from the first to the last."""
    number = min(number, len(cases))
    return [cases[k * len(cases) // number] for k in range(number)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("only", nargs="*", help="parts of the names of the cases that are run, as 'hang' or 'middle'")
    parser.add_argument("--sample", type=int, metavar="N", help="one case each of N kinds")
    parser.add_argument("--output", type=Path, help="the page whose table of results is written")
    parser.add_argument(
        "--disable", type=int, metavar="N", help="run N cases of each mechanism without it: all of them are to fail"
    )
    return parser.parse_args()


def judged(case: Case, ranks: Ranks, folder: Path) -> Result:
    """Wait for what the fault does, and look at it."""
    start, mark, wrong = time.monotonic(), folder / "mark", []
    ranks.wait(lambda: mark.exists() or time.monotonic() > start + PATIENCE)
    at = float(mark.read_text()) if mark.exists() else time.monotonic()
    others = [rank for rank in range(SIZE) if rank != case.rank]
    deadline = at + case.seconds

    def are_down() -> bool:
        down = all(rank in ranks.statuses for rank in others)
        return time.monotonic() > deadline or (case.kind == "SIGSTOP" and down)

    ranks.wait(are_down)
    seconds = max((ranks.ended[rank] for rank in others if rank in ranks.ended), default=time.monotonic()) - at
    if case.kind == "SIGSTOP" and all(rank in ranks.statuses for rank in others):
        ranks.signal(signal.SIGCONT, case.rank)  # then it learns that the others have given it up
        again = time.monotonic()
        ranks.wait(lambda: time.monotonic() > again + 10)
    elif case.rank in ranks.ended:
        seconds = max(seconds, ranks.ended[case.rank] - at)
    if not mark.exists():
        wrong.append(NEVER)
    wrong += [f"rank {rank} is still there" for rank in range(SIZE) if rank not in ranks.statuses]
    ranks.kill()
    wrong += [f"rank {rank} ended with status 0" for rank, status in ranks.statuses.items() if status == 0]
    wrong += [f"rank {rank} crashed with {-s}" for rank, s in ranks.statuses.items() if s < 0 and rank in others]
    for rank in others:
        wrong += [f"rank {rank} does not say {sign!r}" for sign in case.signs if sign not in ranks.text(rank)]
    if not (folder / "crash").is_dir():
        wrong.append("nobody left a report")
    if not ranks.port_is_free and case.kind != CHILD:  # whose child has it, as long as it lives
        wrong.append(f"port {ranks.port} is still taken")
    return Result(case.kind, case.stage, case.phase, seconds, wrong)


def resumed(ranks: Ranks, folder: Path, digests: list[str]) -> list[str]:
    """What is wrong with the next run, which goes on from the last state to the end."""
    if not ended_well(ranks):
        return ["\n".join(["the next run failed:", *(ranks.text(rank)[-3000:] for rank in range(SIZE))])]
    wrong = [] if read_digests(folder) == digests else ["the next run comes to other parameters"]
    left = {path.name for path in (folder / "states").iterdir() if path.name.startswith(".")} - {LOCK}
    return wrong + [f"{name} is left in the folder of the states" for name in sorted(left)]


def ended_well(ranks: Ranks) -> bool:
    start = time.monotonic()
    well = ranks.wait(lambda: time.monotonic() > start + PATIENCE)
    ranks.kill()
    return well and not any(ranks.statuses.values())


def read_digests(folder: Path) -> list[str]:
    return [(folder / f"digest{rank}").read_text() for rank in range(SIZE)]


def show(console: Console, case: Case, result: Result, mechanism: str | None, ranks: Ranks | None) -> None:
    what = f" without {mechanism}" if mechanism else ""
    word = "BAD" if ranks else "ok "
    console.print(f"{word} {case}{what}: {result.seconds:.2f} s  {'; '.join(result.wrong)}", markup=False)
    if ranks:
        for rank in range(SIZE):
            said = f"--- rank {rank}, status {ranks.statuses.get(rank)}\n{ranks.text(rank)[-2500:]}"
            console.print(said, markup=False)


if __name__ == "__main__":
    sys.exit(main())
