"""Report: the results of a sweep, as a page with a table for each task, and a chart."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.parity.check import CLOSE, CLOSE_FP64, MIXES, ROUNDINGS
from tests.parity.entries import TASKS, all_entries

KINDS = {  # the worst first
    "wrong": "a loss, a gradient or the norm is off",
    "hang": "a rank waits forever",
    "crash": "a rank dies, or raises an error other than pipeshard's own",
    "refused": "pipeshard refuses the model with an error that says why",
    "untrainable": "the model does not train unsplit either; the note says why",
    "close": f"every relative error is at most {CLOSE:.0e}, or {CLOSE_FP64:.0e} in fp64 if rounding alone exceeds this",
    "bitwise": "loss and gradients equal those of the unsplit model bit for bit",
}
ORDER = tuple(KINDS)
EXACT, FAILED = ("bitwise", "close"), ("wrong", "hang", "crash")
BARS = {  # label: kinds, color
    "bitwise": (("bitwise",), "#5aae61"),
    "close": (("close",), "#a6dba0"),
    "refused": (("refused",), "#f1a340"),
    "does not train unsplit": (("untrainable",), "#cccccc"),
    "wrong, hanging or crashing": (FAILED, "#b2182b"),
}
NOTE = 160  # characters
SPECIAL = re.compile(r"[|<*]|(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9])")  # what markdown would not show as it is


@dataclass(frozen=True)
class Row:
    """The result of one entry ("task/model_type") on p ranks.

    `kind` is one of KINDS. The first line of `reason` is the cause; further lines may show all ranks. `seconds` is the
    duration.
    """

    entry: str
    p: int
    kind: str
    error: float = 0.0
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """The worst verdict of an entry over all p, with the largest error and a note."""

    task: str
    model_type: str
    kind: str
    error: float
    note: str


@dataclass(frozen=True)
class Totals:
    """The number of entries of each kind."""

    kinds: Mapping[str, int]

    @classmethod
    def of(cls, results: Sequence[Result]) -> Totals:
        return cls(Counter(result.kind for result in results))

    @property
    def entries(self) -> int:
        return sum(self.kinds.values())

    @property
    def train(self) -> int:
        return self.entries - self.kinds.get("untrainable", 0)

    @property
    def exact(self) -> int:
        return sum(self.kinds.get(kind, 0) for kind in EXACT)

    @property
    def failed(self) -> int:
        return sum(self.kinds.get(kind, 0) for kind in FAILED)

    @property
    def share(self) -> float:
        """The fraction of exact entries among the entries that train unsplit."""
        return self.exact / self.train if self.train else 1.0

    def __str__(self) -> str:
        kinds = [f"{self.kinds[kind]} {kind}" for kind in reversed(ORDER) if self.kinds.get(kind)]
        exact = f"exact: {percent(self.share)} of the {self.train} that train unsplit"
        return f"{self.entries} entries: {', '.join(kinds)}; {exact}"


def passed(results: Sequence[Result], version: str) -> str:
    """The contents of verify/passed.json: the classes whose entries are all exact and have independent samples."""
    kinds: dict[str, set[str]] = {}
    classes = {str(entry): entry.class_name for entry in all_entries()}
    for result in results:
        kind = MIXES if result.note.endswith(MIXES) else result.kind
        kinds.setdefault(classes[f"{result.task}/{result.model_type}"], set()).add(kind)
    names = sorted(name for name, own in kinds.items() if own <= set(EXACT))
    return json.dumps({"transformers": version, "classes": names}, indent=1) + "\n"


def worst(kinds: Sequence[str]) -> str:
    return min(kinds, key=ORDER.index)


def results(rows: Sequence[Row], tasks: Sequence[str] = tuple(TASKS)) -> list[Result]:
    """One Result for each entry, sorted by task and then by name."""
    by_entry: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.p):
        by_entry.setdefault(row.entry, []).append(row)
    found = [_result(entry, own) for entry, own in by_entry.items()]
    return sorted(found, key=lambda result: (tasks.index(result.task), result.model_type))


def _result(entry: str, rows: Sequence[Row]) -> Result:
    task, model_type = entry.split("/", 1)
    kind = worst([row.kind for row in rows])
    noted = [row for row in rows if row.kind == kind and row.reason]
    where = f"p = {noted[0].p}: " if 0 < len(noted) < len(rows) else ""
    note = (where + short(noted[0].reason)).replace("[", "\\[") if noted else ""  # which begins a link in Markdown
    return Result(task, model_type, kind, max(row.error for row in rows), note)


def short(reason: str) -> str:
    """The first line of a reason, shortened for a table, without the folders of installed packages.

    If the first line ends with a colon, the second line is included.
    """
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    text = re.sub(r"\S*/(site-packages|python3\.\d+)/", "", text)
    return text if len(text) <= NOTE else text[: NOTE - 1].rstrip() + "…"


def markdown(
    rows: Sequence[Row],
    versions: Mapping[str, str],
    path: Path,
    others: Mapping[str, Sequence[Row]] = MappingProxyType({}),
    sides: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> str:
    """The text of the page at `path`, next to the chart of the same name; `others` are rows in 16 bits, `sides` are
    columns with the verdicts of other pages."""
    found = results(rows)
    low = {name: {(r.task, r.model_type): r for r in results(own)} for name, own in others.items()}
    totals = Totals.of(found)
    ps = " and ".join(f"p = {p}" for p in sorted({row.p for row in rows}))
    count = {kind: totals.kinds.get(kind, 0) for kind in ORDER}
    lines = [
        "# Parity",
        "",
        "Each architecture of transformers, as a tiny model with random weights, trains for one step of p",
        f"microbatches on p processes ({ps}). The loss, every gradient and the norm are compared with the same model",
        "in one process. An entry is an architecture trained for one task. Its verdict is the worst verdict over all",
        "values of p and all ranks.",
        "",
        f"- **{totals.entries}** entries, of which **{totals.train}** train unsplit",
        f"- **{totals.exact}** exact (**{percent(totals.share)}** of the trainable entries),",
        f"  {count['bitwise']} of these bit for bit",
        f"- **{count['refused']}** refused with a reason",
        f"- **{count['wrong']}** wrong, **{count['hang']}** hanging, **{count['crash']}** crashing",
        "",
        f"![Verdicts by task]({chart_path(path).name})",
        "",
        *table(["task", "entries", *reversed(ORDER), "exact, of trainable"], by_task(found)),
        "",
        *table(["verdict", "meaning"], [[kind, KINDS[kind]] for kind in reversed(ORDER)]),
        "",
        *(_in_16_bits(found, low) if low else ()),
        f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}. `make parity` repeats the",
        "comparison (`make parity-4.57` with the oldest transformers); `python -m tests.parity causal-lm/llama` runs",
        "one entry, and the name of a task or an architecture runs all of its entries.",
    ]
    for task in TASKS:
        own = [result for result in found if result.task == task]
        if own:
            shown = {name: of for name, of in sides.items() if any(f"{task}/{r.model_type}" in of for r in own)}
            cells = [
                [
                    *(r.model_type, r.kind, error_of(r), r.note),
                    *_in_each(low, task, r.model_type),
                    *(of.get(f"{task}/{r.model_type}", "") for of in shown.values()),
                ]
                for r in own
            ]
            head = ["architecture", "verdict", "largest error", "note", *low, *shown]
            lines += ["", f"## {task}", "", *table(head, cells)]
    return "\n".join(lines) + "\n"


def _in_16_bits(found: Sequence[Result], low: Mapping[str, Mapping[Any, Result]]) -> list[str]:
    """The number of entries of each kind in each precision, and the reasons for entries that are not exact."""
    counted = [["fp32", Totals.of(found)], *([name, Totals.of(list(of.values()))] for name, of in low.items())]
    cells = [
        [name, str(t.entries), *(str(t.kinds.get(kind, 0)) for kind in reversed(ORDER)), percent(t.share)]
        for name, t in counted
    ]
    fine = {(r.task, r.model_type) for r in found if r.kind in EXACT}
    notes = [
        [f"{r.task}/{r.model_type}", name, r.kind, r.note]
        for name, of in low.items()
        for at, r in of.items()
        if r.kind not in EXACT and at in fine
    ]
    return [
        "## In 16 bits",
        "",
        'The comparison is repeated with `precision="bf16"`, `"fp16"`, and `autocast=True` (bf16). One process then',
        "uses the same precision: parameters that transformers casts are in 16 bits, and gradients are summed in fp32",
        "over the same microbatches. Sums have the same order, so most results are equal bit for bit. Results differ",
        "if several stages use one weight, whose gradients are then summed in fp32, or if kernels round differently",
        "because their inputs have another memory layout. Such an entry is close if no error exceeds the smaller of",
        f"two limits: the unsplit model's own distance from fp32, and {ROUNDINGS} times the machine epsilon of the",
        "16-bit dtype. Models that overflow unsplit count as untrainable.",
        "",
        *table(["precision", "entries", *reversed(ORDER), "exact, of trainable"], cells),
        "",
        *(table(["entry", "precision", "verdict", "note"], notes) if notes else []),
        *([""] if notes else []),
    ]


def _in_each(low: Mapping[str, Mapping[Any, Result]], task: str, model_type: str) -> Iterator[str]:
    """The verdict of an entry in each precision, with its error."""
    for of in low.values():
        result = of.get((task, model_type))
        error = error_of(result) if result is not None and result.error else ""
        yield f"{result.kind} {error}".strip() if result is not None else ""


def by_task(found: Sequence[Result], tasks: Sequence[str] = tuple(TASKS)) -> list[list[str]]:
    cells = []
    for task in [*tasks, "all"]:
        totals = Totals.of([result for result in found if task in (result.task, "all")])
        if totals.entries:
            counts = [str(totals.kinds.get(kind, 0)) for kind in reversed(ORDER)]
            cells.append([task, str(totals.entries), *counts, percent(totals.share)])
    return cells


def table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *cells]
    return ["| " + " | ".join(SPECIAL.sub(r"\\\g<0>", cell) for cell in row) + " |" for row in rows]


def error_of(result: Result) -> str:
    return f"{result.error:.0e}" if result.error else "0" if result.kind in EXACT else ""


def percent(share: float) -> str:
    return f"{int(share * 1000) / 10} %"  # never rounded up


def verdicts(text: str) -> dict[str, str]:
    """The verdict of each entry, read from a report."""
    found, task = {}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            task = line.removeprefix("## ")
        elif task and line.startswith("| "):
            model_type, kind = (cell.strip().replace("\\", "") for cell in line.split(" | ")[:2])
            if kind in KINDS:
                found[f"{task}/{model_type.removeprefix('| ')}"] = kind
    return found


def chart_path(path: Path) -> Path:
    return path.with_suffix(".svg")


def draw(rows: Sequence[Row], path: Path, tasks: Sequence[str] = tuple(TASKS), what: str = "architectures") -> None:
    """Draw a bar for each task with the number of entries of each kind. The same rows give the same file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = results(rows, tasks)
    tasks = [task for task in tasks if any(result.task == task for result in found)]
    style: dict[Any, Any] = {"svg.hashsalt": "parity", "svg.fonttype": "none", "font.size": 9}
    with rc_context(style):
        figure = Figure(figsize=(8, 0.8 + 0.36 * len(tasks)), layout="constrained")
        axes = figure.subplots()
        left = [0] * len(tasks)
        for label, (kinds, color) in BARS.items():
            counts = [sum(result.task == task and result.kind in kinds for result in found) for task in tasks]
            bars = axes.barh(tasks, counts, left=left, color=color, label=label)
            narrow = 0.012 * len(found)
            axes.bar_label(bars, ["" if n < narrow else str(n) for n in counts], label_type="center", fontsize=8)
            left = [start + count for start, count in zip(left, counts)]
        axes.invert_yaxis()
        axes.set_xlabel(what)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=len(BARS), frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
