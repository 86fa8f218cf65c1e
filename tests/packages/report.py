"""Report: the results of a sweep of other packages, as a page with a table for each package, and a chart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from tests.packages.catalog import FILES
from tests.packages.check import SHRINKS
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

MEANINGS = {**KINDS, "close": f"{KINDS['close']}, or {SHRINKS:.0e} of the error in fp32 if training multiplies it"}


def markdown(rows: Sequence[Timed], versions: Mapping[str, str], path: Path) -> str:
    """The text of the page at `path`, next to the chart of the same name."""
    found = results(rows, list(FILES))
    totals = Totals.of(found)
    count = {kind: totals.kinds.get(kind, 0) for kind in ORDER}
    exact = [row for row in rows if row.kind in EXACT]
    alone = {row.entry for row in exact if row.parts == 1}
    remedied = {row.entry for row in rows if row.remedied}
    ps = ", ".join(f"p = {p} for {count} entries" for p, count in sorted(Counter(row.p for row in rows).items()))
    lines = [
        "# Models of other packages",
        "",
        f"This page covers {totals.entries} models and kinds of training of {len({r.task for r in found})} packages.",
        f"Each model is tiny, has random weights, and trains for two steps of two microbatches on p processes ({ps}).",
        "We compare the losses of both steps, every gradient, and the parameters and buffers at the end with those of",
        "the same model in one process. Each model is boosted as in a training script, with the default setting",
        "of `verify`. The loss is the package's own, if it has one. Dropout is disabled, and parameters that are zero",
        "are replaced. The unsplit model processes the same microbatches if it has batch norm, with",
        '`loss_reduction="microbatch"`, or if the gradients of the microbatches add up to those of the batch;',
        "otherwise, it processes the whole batch. The verdict is the worst over the numbers of processes.",
        "",
        f"- **{totals.entries}** entries, of which **{totals.train}** train unsplit",
        f"- **{totals.exact}** exact (**{percent(totals.share)}** of the trainable entries),",
        f"  {count['bitwise']} of these bit for bit;",
        f"  {len(alone)} of the exact entries run as one microbatch, because their samples depend on each other",
        f"- **{count['refused']}** refused with a reason; {len(remedied)} of them are exact with the remedy that the",
        "  error names, as the note says",
        f"- **{count['wrong']}** wrong, **{count['hang']}** hanging, **{count['crash']}** crashing",
        "",
        f"![Verdicts by package]({chart_path(path).name})",
        "",
        *table(["package", "entries", *reversed(ORDER), "exact, of trainable"], by_task(found, list(FILES))),
        "",
        *table(["verdict", "meaning"], [[kind, MEANINGS[kind]] for kind in reversed(ORDER)]),
        "",
        *_times(exact),
        f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}. `make parity-packages`",
        "repeats the comparison; `python -m tests.packages timm` runs one package, and `timm/resnet` one model. To",
        "verify your own model, use `PipelinePlugin(verify=True)` or [`pipeshard verify`](exact.md#proof-at-boost).",
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
    """The CPU time of boost, which traces the model and runs the proof, and of the first step."""
    if not exact:
        return []
    boost, first = (median(times) for times in ([r.boost for r in exact], [r.first for r in exact]))
    slowest = max(exact, key=lambda row: row.boost + row.first)
    return [
        "The times are CPU seconds of the slower of two processes: for an unsplit step, for boost (which traces the",
        f"model and runs the proof), and for the first step. The medians are {boost:.1f} s for boost and {first:.1f} s",
        f"for the first step; {slowest.entry} takes longest ({slowest.boost:.0f} s and {slowest.first:.0f} s).",
        "",
    ]


def chart(rows: Sequence[Timed], path: Path) -> None:
    draw(rows, chart_path(path), list(FILES), "models")
