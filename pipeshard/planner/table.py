"""Table: a plan for people, on a terminal of 120 columns."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pipeshard.planner.plan import Estimate, Plan, StagePlan
from pipeshard.planner.sizes import UNITS, format_bytes

WIDTH = 120


def show(plan: Plan, console: Console | None = None) -> None:
    """Print it: the stages, the schedules, and what is recommended."""
    console = console or Console(width=WIDTH, highlight=False, soft_wrap=True)
    for part in render(plan):
        console.print(part)


def render(plan: Plan) -> Iterator[RenderableType]:
    """The parts of the output, from top to bottom."""
    shapes = ", ".join(f"{path} {'×'.join(map(str, shape))}" for path, shape in plan.microbatch.items())
    limit = "" if plan.limit is None else f", {format_bytes(plan.limit)} for each rank"
    yield Text(f"{plan.model}, {_count(plan.parameters)} parameters, on {plan.pp_size} ranks", style="bold")
    yield Text(f"{plan.num_microbatches} microbatches of {shapes}")
    yield Text(f"{plan.training}, partition {plan.partition}{limit}\n")
    yield _stages(plan)
    yield Text()
    yield _schedules(plan)
    yield Text(f"\n{plan.reason}", style="bold", justify="left", overflow="fold")


def _stages(plan: Plan) -> Table:
    """One row a stage. All of its memory is in one unit, that of the largest, and so are all messages."""
    size = _unit(max(stage.memory.total for stage in plan.stages))
    crossing = _unit(max(max(stage.received, stage.returned) for stage in plan.stages))
    title = f"Stages of {plan.estimate.name}: memory in {size}, F B W in {_TIMES[plan.unit]}, messages in {crossing}"
    table = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 1, 0, 0))
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    again, full = (any(getattr(s.memory, name) for s in plan.stages) for name in ("recomputed", "values"))
    beside = (*(["fp32"] if full else []), "optim.", "activations", *(["recomp."] if again else []))
    sizes = ("weights", "grads", *beside, "total")
    table.add_column("units", overflow="ellipsis", no_wrap=True, max_width=32 - 7 * full)
    for name in ("params", *sizes, "F", "B", "W", "in", "back"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in plan.stages:
        table.add_row(*_row(plan, stage, size, crossing, again, full))
    return table


def _row(plan: Plan, stage: StagePlan, size: str, crossing: str, again: bool, full: bool) -> list[str]:
    memory = stage.memory
    values = [memory.values] if full else []
    state = [_in(part, size) for part in (memory.parameters, memory.gradients, *values, memory.optimizer)]
    state.append(f"{stage.alive}×{_in(stage.kept, size)}")
    state += [_in(memory.recomputed, size)] if again else []
    times = [_time(plan, time) for time in (stage.forward, stage.backward, stage.weight)]
    messages = [_in(part, crossing) if part else "-" for part in (stage.received, stage.returned)]
    name = [str(stage.stage), str(stage.rank), stage.units, _count(stage.parameters)]
    return [*name, *state, _in(memory.total, size), *times, *messages]


def _schedules(plan: Plan) -> Table:
    unit = "a step takes" if plan.unit == "seconds" else "a step / one without idle time"
    table = Table(title="Schedules", title_justify="left", title_style="", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in (unit, "idle", "fullest rank", "takes", "fits"):
        table.add_column(name, justify="right")
    table.add_column("")
    for estimate in plan.schedules:
        table.add_row(*_line(plan, estimate))
    return table


def _line(plan: Plan, estimate: Estimate) -> list[str]:
    if estimate.problem:
        return [estimate.name, "-", "-", "-", "-", "-", "cannot be cut so"]
    time = f"{_digits(estimate.time)} s" if plan.unit == "seconds" else f"{estimate.time / plan.num_microbatches:.3f}"
    fits = {None: "", True: "yes", False: "no"}[estimate.fits]
    mark = "recommended" if estimate.name == plan.recommended else ""
    peak = format_bytes(estimate.peak)
    return [estimate.name, time, f"{estimate.bubble:.1%}", str(estimate.fullest), peak, fits, mark]


_TIMES = {"seconds": "ms", "relative": "a microbatch's time / p"}


def _time(plan: Plan, time: float) -> str:
    return _digits(time * 1e3) if plan.unit == "seconds" else f"{time:.3f}"


def _unit(largest: int) -> str:
    return format_bytes(largest).split()[1]


def _in(size: int, unit: str) -> str:
    return _digits(size / UNITS[unit.lower()])


def _digits(number: float) -> str:
    """Three digits, or fewer where they would be thousandths."""
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


def _count(number: int) -> str:
    """A number of parameters: 405B."""
    digits, unit = format_bytes(number).split()
    return digits + {"B": "", "kB": "k", "MB": "M", "GB": "B", "TB": "T"}[unit]
