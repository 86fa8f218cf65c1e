"""Report: what the rows of a sweep of other packages say, as a text with a table of each package and a chart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from tests.packages.catalog import FILES
from tests.packages.sweep import Timed
from tests.parity.report import (
    EXACT,
    KINDS,
    ORDER,
    Result,
    Totals,
    by_task,
    chart_path,
    draw,
    error_of,
    percent,
    results,
    table,
)


def markdown(rows: Sequence[Timed], versions: Mapping[str, str], path: Path) -> str:
    """The report, to be written to `path`, beside its chart of the same name."""
    found = results(rows, list(FILES))
    totals = Totals.of(found)
    count = {kind: totals.kinds.get(kind, 0) for kind in ORDER}
    exact = [row for row in rows if row.kind in EXACT]
    alone = {row.entry for row in exact if row.parts == 1}
    remedied = {row.entry for row in rows if row.remedied}
    ps = ", ".join(f"p = {p} for {count} of them" for p, count in sorted(Counter(row.p for row in rows).items()))
    lines = [
        "# Models of other packages",
        "",
        f"{totals.entries} models and kinds of training of {len({r.task for r in found})} packages, made tiny and with",
        f"random weights, each trained two steps of two microbatches by p processes ({ps}),",
        "and compared with the same model in one process: both losses, every gradient, and all parameters",
        "and buffers at the end. Boost is called as a script calls it, with the proof that it makes by default. The",
        "loss is the package's own where it has one. Dropout is taken out, and parameters that are zero are not left",
        "so. The unsplit model goes through the same microbatches where it has batch norm or where these make the",
        "batch's loss, and else through the whole batch. The verdict is the worst over the numbers of processes.",
        "",
        f"- **{totals.entries}** entries, of which **{totals.train}** train unsplit",
        f"- **{totals.exact}** exact, {count['bitwise']} to the bit: **{percent(totals.share)}** of those that train;",
        f"  {len(alone)} of them in one microbatch, as their samples depend on each other",
        f"- **{count['refused']}** refused with a reason; {len(remedied)} of them are exact once the remedy that the",
        "  refusal names has been followed, as the note says",
        f"- **{count['wrong']}** wrong, **{count['hang']}** hanging, **{count['crash']}** crashing",
        "",
        f"![Verdicts by package]({chart_path(path).name})",
        "",
        *table(["package", "entries", *reversed(ORDER), "exact of those that train"], by_task(found, list(FILES))),
        "",
        *table(["verdict", "meaning"], [[kind, KINDS[kind]] for kind in reversed(ORDER)]),
        "",
        *_times(exact),
        f"With {', '.join(f'{name} {version}' for name, version in versions.items())}. `make parity-packages` repeats",
        "it; `python -m tests.packages timm` or `timm/resnet` runs some. A model of your own is proven by",
        "`PipelinePlugin(verify=True)` or by [`pipeshard verify`](exact.md#proof-at-boost).",
    ]
    of = {row.entry: row for row in sorted(rows, key=lambda row: -row.p)}  # the times of the fewest stages
    for package in FILES:
        own = [result for result in found if result.task == package]
        if own:
            cells = [_cells(result, of[f"{package}/{result.model_type}"]) for result in own]
            head = ["model", "verdict", "largest error", "unsplit", "boost", "first step", "note"]
            lines += ["", f"## {package}", "", *table(head, cells)]
    return "\n".join(lines) + "\n"


def _cells(result: Result, row: Timed) -> list[str]:
    times = [f"{value:.2f}" if value else "" for value in (row.unsplit, row.boost, row.first)]
    return [result.model_type, result.kind, error_of(result), *times, result.note]


def _times(exact: Sequence[Timed]) -> list[str]:
    """What boost and the first step cost, which trace the model and prove it."""
    if not exact:
        return []
    boost, first = (median(times) for times in ([r.boost for r in exact], [r.first for r in exact]))
    slowest = max(exact, key=lambda row: row.boost + row.first)
    return [
        "The times are CPU seconds of the slowest of two processes: of an unsplit step, of boost (which traces the",
        f"model and proves it), and of the first step. Their medians are {boost:.1f} s for boost and {first:.1f} s for",
        f"the first step; {slowest.entry} takes longest, {slowest.boost:.0f} and {slowest.first:.0f} s.",
        "",
    ]


def chart(rows: Sequence[Timed], path: Path) -> None:
    draw(rows, chart_path(path), list(FILES), "models")
