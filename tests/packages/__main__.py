"""The command `python -m tests.packages`: sweeps all models of other packages, or the named ones."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.covering import sample
from tests.packages.catalog import COMPLETE, FILES, all_models, find, gaps
from tests.packages.model import Model
from tests.packages.report import chart, markdown
from tests.packages.sweep import WATCHDOG, Timed, applies, row_of
from tests.parity.report import EXACT, Totals, results, short
from tests.parity.sweep import Rows, sweep, versions
from tests.pool import Pool

INTERRUPTED = 130
WITH = ("torch", "transformers", "pipeshard", *FILES)


def main() -> int:
    arguments = parse()
    models = chosen(arguments)
    if wrong := gaps(package for package in COMPLETE if package in {model.package for model in models}):
        sys.exit("\n".join(wrong))
    ps = sorted({int(p) for p in arguments.p.split(",")})
    of = versions(WITH)
    try:
        rows = Rows(arguments.json, arguments.resume, Timed, of)
    except ValueError as error:
        sys.exit(str(error))
    wanted = {str(model) for model in models}
    if arguments.again:
        rows.forget(lambda row: row.kind not in EXACT and row.entry in wanted)
    console = Console(file=sys.stdout, soft_wrap=True)
    try:
        if not arguments.report:
            run(rows, models, ps, arguments.watchdog, console)
    except KeyboardInterrupt:
        console.print(f"interrupted after {len(rows.rows)} rows; --resume goes on from {arguments.json}")
        return INTERRUPTED
    final = [row for row in rows.rows if row.entry in wanted and row.p in ps and applies(row)]
    if arguments.output:
        arguments.output.write_text(markdown(final, of, arguments.output))
        chart(final, arguments.output)
    totals = Totals.of(results(final, list(FILES)))
    console.print(str(totals), highlight=False)
    return int(totals.failed > 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.packages", description=__doc__)
    parser.add_argument("models", nargs="*", help="packages, or package/name; all by default")
    parser.add_argument("--p", default="2,3", help="numbers of stages (default: %(default)s)")
    parser.add_argument("--sample", type=int, metavar="N", help="only N of the models, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="the report; its chart goes beside it")
    parser.add_argument("--json", type=Path, metavar="FILE", default=Path("outputs/packages.jsonl"),
                        help="the rows (default: %(default)s)")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there, and run the others")
    parser.add_argument("--again", action="store_true", help="with --resume: run what was not exact once more")
    parser.add_argument("--report", action="store_true", help="with --resume: report what is there, and run nothing")
    parser.add_argument("--watchdog", type=float, default=WATCHDOG, metavar="SECONDS",
                        help="when a model counts as hanging (default: %(default)s)")  # fmt: skip
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> list[Model]:
    unknown = [text for text in arguments.models if not find(text)]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}. Name a package ({', '.join(FILES)}), or package/name.")
    models = [model for text in arguments.models for model in find(text)] or all_models()
    return models if arguments.sample is None else sample(models, arguments.sample, arguments.seed)


def run(rows: Rows[Timed], models: list[Model], ps: list[int], watchdog: float, console: Console) -> None:
    """Sweep what has no row yet, one p after the other; what is not exact is printed as it comes."""
    fitting = {p: [model for model in models if model.most >= p] for p in ps}
    jobs = {p: rows.missing(fitting[p], [p])[p] for p in ps}
    total = sum(map(len, jobs.values()))
    if not total:
        return
    with Progress(
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=console
    ) as progress:
        bar = progress.add_task("importing", total=total)

        def save(row: Timed) -> None:
            rows.add(row)
            if row.kind not in EXACT and applies(row):
                line = f"{row.kind} {row.entry} p={row.p}: {short(row.reason)}"
                progress.console.print(line, markup=False, highlight=False)
            progress.update(bar, advance=1, description=row.entry)

        def row(pool: Pool, model: Model, p: int) -> Timed:
            return row_of(pool, model, p, watchdog)

        sweep({p: own for p, own in jobs.items() if own}, save, row, preload="tests.packages.preload")


if __name__ == "__main__":
    sys.exit(main())
