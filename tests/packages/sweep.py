"""Sweep: the row of one model on p ranks, in worker processes that may crash or hang."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.packages.catalog import find
from tests.packages.check import Verdict, check
from tests.packages.model import Model
from tests.parity.report import EXACT, Row, worst
from tests.parity.sweep import failure
from tests.pool import Pool, WorkerError

WATCHDOG = 150.0  # seconds
TOO_FEW = ", fewer than"
ONE = re.compile("num_microbatches=1|use one microbatch")  # the remedy for losses and layers that mix samples


@dataclass(frozen=True)
class Timed(Row):
    """A row with CPU seconds, those of the slowest rank: of an unsplit step, boost, and the first step.

    `parts` is the number of microbatches: one, where more were refused with that as the remedy. `remedied` is whether
    what is refused trains exactly by the remedies that its refusals name.
    """

    unsplit: float = 0.0
    boost: float = 0.0
    first: float = 0.0
    parts: int = 2
    remedied: bool = False


def row_of(pool: Pool, model: Model, p: int, watchdog: float = WATCHDOG) -> Timed:
    """What comes of the model on p ranks: the worst of their verdicts, or how they failed."""
    parts = model.options.get("num_microbatches", 2)
    row = _row(pool, model, p, watchdog, {}, parts)
    if row.kind == "refused" and ONE.search(row.reason) and parts > 1:
        note = f"two microbatches are refused: {row.reason}"
        again = _row(pool, model, p, watchdog, {"num_microbatches": 1}, 1, note)
        row = again if again.kind not in ("refused", "untrainable") else row
    return _remedied(pool, model, p, watchdog, row)


def _remedied(pool: Pool, model: Model, p: int, watchdog: float, row: Timed) -> Timed:
    """The row of a refused entry whose refusals' remedies are followed; a remedy that does not help is wrong."""
    if row.kind != "refused" or not model.remedies:
        return row
    found = row
    for count, remedy in enumerate(model.remedies, start=1):
        if found.kind != "refused" or not re.search(remedy.says, found.reason):
            reason = f"no refusal says {remedy.says!r}, but {found.kind}: {found.reason}"
            return replace(row, kind="wrong", reason=reason)
        found = _row(pool, model, remedy.stages or p, watchdog, {}, row.parts, remedies=count)
    done = ", ".join(remedy.done for remedy in model.remedies)
    if found.kind not in EXACT:
        return replace(row, kind="wrong", reason=f"with {done} {found.kind}: {found.reason}; without: {row.reason}")
    return replace(row, reason=f"{found.kind} with {done}; {row.reason}", remedied=True)


def _row(
    pool: Pool,
    model: Model,
    p: int,
    watchdog: float,
    options: Mapping[str, Any],
    parts: int,
    note: str = "",
    remedies: int = 0,
) -> Timed:
    seconds: Mapping[str, float] = {}
    try:
        verdicts = pool.run(checked, p, str(model), options, remedies, timeout=watchdog)
    except WorkerError as error:
        kind, worst_error, reason = failure(str(error))
    else:
        kind = worst([verdict.kind for verdict in verdicts])
        worst_error = max(verdict.error for verdict in verdicts)
        reason = next(verdict.reason for verdict in verdicts if verdict.kind == kind) or note
        names = {name for verdict in verdicts for name in verdict.seconds}
        seconds = {name: max(verdict.seconds.get(name, 0.0) for verdict in verdicts) for name in names}
    times = {
        "unsplit": seconds.get("unsplit", 0.0),
        "boost": seconds.get("boost", 0.0),
        "first": seconds.get("first step", 0.0),
    }
    return Timed(str(model), p, kind, worst_error, reason, sum(times.values()), **times, parts=parts)


def checked(name: str, options: Mapping[str, Any], remedies: int = 0) -> Verdict:
    """The check of the model of this name, which is looked up here: what it is made of cannot be pickled."""
    (model,) = find(name)
    return check(model.following(remedies), options)


def applies(row: Timed) -> bool:
    """Whether a row says something of the model: not that it has fewer parts than stages, where two were enough."""
    return not (row.p > 2 and row.kind == "refused" and TOO_FEW in row.reason)
