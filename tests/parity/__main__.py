"""The command `python -m tests.parity`: sweeps all entries, or the named ones, and reports the results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import pipeshard.verify
from tests.covering import sample
from tests.parity.check import PRECISIONS
from tests.parity.command import outcomes
from tests.parity.entries import Entry, all_entries, find
from tests.parity.report import EXACT, Row, Totals, chart_path, draw, markdown, passed, results, short
from tests.parity.sweep import WATCHDOG, Rows, row_of, sweep, versions
from tests.pool import Pool

INTERRUPTED = 130
PAGES = {"generates": "generate", "slices": "slices"}  # columns, by the ends of the names of pages that have them
PASSED = Path(pipeshard.verify.__path__[0]) / "passed.json"


def main() -> int:
    arguments = parse()
    entries = chosen(arguments)
    ps = sorted({int(p) for p in arguments.p.split(",")})
    file = arguments.json or (rows_of(arguments.output, arguments.precision) if arguments.output else None)
    if arguments.output and arguments.precision != "fp32" and not rows_of(arguments.output, "fp32").exists():
        sys.exit(
            f"{arguments.output} shows 16 bits beside fp32, of which there are no rows yet: run `make parity` first"
        )
    try:
        rows = Rows(file, arguments.resume)
    except ValueError as error:
        sys.exit(str(error))
    console = Console(file=sys.stdout, soft_wrap=True)
    try:
        run(rows, entries, ps, console, arguments)
    except KeyboardInterrupt:
        console.print(f"interrupted after {len(rows.rows)} rows" + (f"; --resume goes on from {file}" if file else ""))
        return INTERRUPTED
    wanted = {str(entry) for entry in entries}
    final = [row for row in rows.rows if row.entry in wanted and row.p in ps]
    totals = Totals.of(results(final))
    if output := arguments.output:
        there = {name: rows_of(output, name) for name in PRECISIONS}
        others = {name: Rows(own, resume=True).rows for name, own in there.items() if own.exists()}
        others[arguments.precision] = final
        pages = {name: output.with_name(f"{output.stem}-{page}.md") for name, page in PAGES.items()}
        sides = {name: outcomes(page) for name, page in pages.items()}
        output.write_text(markdown(others.pop("fp32"), versions(), output, others, sides))
        if arguments.precision == "fp32":
            draw(final, chart_path(output))
            if wanted == {str(entry) for entry in all_entries()}:
                PASSED.write_text(passed(results(final), versions()["transformers"]))
    console.print(str(totals), highlight=False)
    return int(totals.failed > 0 or totals.share < arguments.at_least)


def rows_of(output: Path, precision: str) -> Path:
    """The file of the rows that a report is made of, one for each precision."""
    return Path("outputs") / f"{output.stem}{'' if precision == 'fp32' else f'-{precision}'}.jsonl"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("entries", nargs="*", help="tasks, model types, or task/model_type; all by default")
    parser.add_argument("--p", default="2,3", help="numbers of stages (default: %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32",
                        help="autocast: of bf16 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="of the unsplit model; stages use any GPU (default: %(default)s)")  # fmt: skip
    parser.add_argument("--worlds", type=int, default=1, help="at a time, for each p (default: %(default)s)")
    parser.add_argument("--sample", type=int, metavar="N", help="only N of the entries, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="the report; its chart goes beside it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the rows (default: outputs/, by the report's name)")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there, and run the others")
    parser.add_argument("--watchdog", type=float, default=WATCHDOG, metavar="SECONDS",
                        help="when an entry counts as hanging (default: %(default)s)")  # fmt: skip
    parser.add_argument("--verify", action="store_true",
                        help="prove each as PipelinePlugin(verify=True) does, in one process")  # fmt: skip
    parser.add_argument("--at-least", type=float, default=0.98, metavar="SHARE",
                        help="fail where fewer of those that train are exact (default: %(default)s)")  # fmt: skip
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> list[Entry]:
    entries = all_entries()
    if arguments.entries:
        unknown = [text for text in arguments.entries if not find(text)]
        if unknown:
            sys.exit(f"unknown: {', '.join(unknown)}. Name a task, a model type, or task/model_type.")
        named = {entry for text in arguments.entries for entry in find(text)}
        entries = [entry for entry in entries if entry in named]
    return entries if arguments.sample is None else sample(entries, arguments.sample, arguments.seed)


def run(rows: Rows[Row], entries: list[Entry], ps: list[int], console: Console, arguments: argparse.Namespace) -> None:
    """Sweep what has no row yet, behind a progress bar; what is not exact is printed as it comes."""
    jobs = rows.missing(entries, ps)
    total = len(entries) * len(ps)
    if not any(jobs.values()):
        return
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(
        BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.description}"), console=console
    ) as progress:
        bar = progress.add_task("importing", total=total, completed=total - sum(map(len, jobs.values())))

        def save(row: Row) -> None:
            rows.add(row)
            if row.kind not in EXACT:
                line = f"{row.kind} {row.entry} p={row.p}: {short(row.reason)}"
                progress.console.print(line, markup=False, highlight=False)
            progress.update(bar, advance=1, description=row.entry)

        def row(pool: Pool, entry: Entry, p: int) -> Row:
            return row_of(pool, entry, p, arguments.watchdog, arguments.verify, arguments.precision, arguments.device)

        ranks = (lambda p: 1) if arguments.verify else (lambda p: p)
        method = "forkserver" if arguments.device == "cpu" else "spawn"
        sweep(jobs, save, row, ranks, worlds=arguments.worlds, method=method)


if __name__ == "__main__":
    sys.exit(main())
