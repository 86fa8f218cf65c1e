"""Commands: the output of `pipeshard plan`, and the implementation of `pipeshard verify`."""

import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from pipeshard.batch.read import dummy_inputs
from pipeshard.errors import PipeshardError, counted, summary
from pipeshard.hf import IGNORED, LABELS, MASK, config_of, text_config
from pipeshard.planner.memory import UNITS, format_bytes
from pipeshard.planner.models import build_on_meta
from pipeshard.planner.plan import UNUSABLE, Estimate, InSlices, Plan
from pipeshard.verify.decide import Proven, alone
from pipeshard.verify.proof import DIFFERENT, EXACT, PARTLY, UNPROVEN, Proof

WIDTH = 80


def show(plan: Plan, console: Console | None = None, slices: Sequence[InSlices] = (), advice: str = "") -> None:
    """Print a plan: the stages, the schedules, the recommendation, and any estimates in `slices`. `advice` says how to
    train with the plan's cuts, if they are not the cuts of the plan's partition."""
    console = console or Console(width=WIDTH, highlight=False)
    for part in render(plan, slices, advice or f"Pass partition={plan.cuts} to PipelinePlugin."):
        console.print(part)


def render(plan: Plan, slices: Sequence[InSlices], advice: str) -> Iterator[RenderableType]:
    """Yield the lines and tables of the output, from top to bottom."""
    shapes = ", ".join(f"{path} {'×'.join(map(str, shape))}" for path, shape in plan.microbatch.items())
    devices = plan.devices
    limit = f", {devices.limits} for each rank" if devices.memory and not devices.are_unequal else ""
    ranks = counted(plan.pp_size, "rank")
    yield Text(f"{plan.model}, {_count(plan.parameters)} parameters, on {ranks}", style="bold")
    m = plan.num_microbatches
    yield Text(f"{counted(m, 'microbatch')} of {shapes}")
    yield Text(f"{plan.training}, partition {plan.partition}{limit}")
    if devices.are_unequal or devices.links:
        yield Text(str(devices))
    if plan.unused:
        yield Text(
            f"not used by this batch: {', '.join(plan.unused)} ({_count(sum(plan.unused.values()))} parameters), whose "
            "memory is planned without activations. To plan a batch that uses them, such as one with images, call "
            "pipeshard.plan(model, batch, ...)"
        )
    yield Text()
    yield _memory(plan)
    yield Text()
    yield _times(plan)
    yield Text()
    yield _schedules(plan)
    if any(estimate.moved for estimate in plan.schedules):
        yield Text(f"*: with different cuts, since the cuts of partition {plan.partition} do not fit")
    lead = ""
    if slices:
        yield Text()
        yield _slices(plan, slices)
        fitting = [one for one in slices if one.fits is not False] or slices
        best = min(fitting, key=lambda one: one.time).n
        lead = f"{best} slices take the least time. Without slices, " if best > 1 else "Slices do not reduce the time. "
    yield Text(f"\n{lead}{plan.reason}", style="bold", justify="left", overflow="fold")
    if devices.are_unequal or plan.estimate.moved:
        yield Text(advice)


def _memory(plan: Plan) -> Table:
    """One row per stage. Sizes are in the byte unit (such as MB) of the largest total. Columns of zeros are omitted."""
    size = _unit(max(stage.memory.total for stage in plan.stages))
    parts = {"weights": "parameters", "grads": "gradients", "fp32": "values", "optim.": "optimizer"}
    rest = {"temp.": "temporary", "absent": "absent", "update": "update"}
    kept = [name for name in (*parts, *rest) if any(getattr(s.memory, (parts | rest)[name]) for s in plan.stages)]
    late = any(s.memory.update > s.memory.backward for s in plan.stages)
    before, after = [n for n in kept if n in parts], [n for n in kept if n in rest and (n != "update" or late)]
    table = _table(f"Memory of the stages of {plan.estimate.name}, in {size}")
    hosts = any(stage.memory.host for stage in plan.stages)
    for name in ("stage", "rank", *before, "activations", *after, "total", *(["host"] if hosts else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in plan.stages:
        sizes = {name: _in(getattr(stage.memory, (parts | rest)[name]), size) for name in kept}
        row = [str(stage.stage), str(stage.rank), *(sizes[name] for name in before)]
        recomputed = stage.memory.activations - stage.alive * stage.kept  # > 0 if the peak is between a B and its W
        more = f"+{_in(recomputed, size)}" if recomputed > 0 else ""
        row += [f"{stage.alive}×{_in(stage.kept, size)}{more}", *(sizes[name] for name in after)]
        table.add_row(*row, _in(stage.memory.total, size), *([_in(stage.memory.host, size)] if hosts else []))
    return table


def _times(plan: Plan) -> Table:
    """One row per stage: the stage's units, times and messages. Message sizes are in the byte unit (such as MB) of the
    largest message."""
    crossing = _unit(max(max(stage.received, stage.returned) for stage in plan.stages))
    table = _table(f"Times of the stages in {_TIMES[plan.unit]}, messages in {crossing}")
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("units", overflow="ellipsis", no_wrap=True, max_width=32)
    for name in ("params", "F", "B", "W", "in", "back"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in plan.stages:
        times = [_time(plan, time) for time in (stage.forward, stage.backward, stage.weight)]
        messages = [_in(part, crossing) if part else "-" for part in (stage.received, stage.returned)]
        table.add_row(str(stage.stage), stage.units, _count(stage.parameters), *times, *messages)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 1, 0, 0))


def _schedules(plan: Plan) -> Table:
    unit = "time in seconds" if plan.unit == "seconds" else "time relative to a step without idle time"
    table = _table(f"Schedules; step: {unit}")
    table.padding = (0, 1 if _has_speed(plan) else 2, 0, 0)
    table.add_column("", no_wrap=True)
    for name in ("step", *(["tokens/s"] if _has_speed(plan) else []), "idle", "peak rank", "memory", "fits"):
        table.add_column(name, justify="right")
    table.add_column("")
    for estimate in plan.schedules:
        table.add_row(*_line(plan, estimate))
    return table


def _slices(plan: Plan, estimates: Sequence[InSlices]) -> Table:
    table = _table(f"Slices of {plan.estimate.name}")
    for name in ("slices", "step", "idle", "memory", *(["fits"] if estimates[0].limits else [])):
        table.add_column(name, justify="right")
    for found in estimates:
        fits = [_FITS[found.fits]] if found.limits else []
        table.add_row(
            str(found.n), _step_time(plan, found.time), f"{found.bubble:.1%}", format_bytes(found.peak), *fits
        )
    return table


def _has_speed(plan: Plan) -> bool:
    return plan.unit == "seconds" and plan.tokens > 0


def _line(plan: Plan, estimate: Estimate) -> list[str]:
    if estimate.problem:
        return [estimate.name, *["-"] * (5 + _has_speed(plan)), UNUSABLE]
    speed = [f"{plan.tokens / estimate.time:,.0f}"] if _has_speed(plan) else []
    fits = _FITS[estimate.fits] + "*" * estimate.moved
    mark = "recommended" if estimate.name == plan.recommended else ""
    peak = format_bytes(estimate.peak)
    time, idle = _step_time(plan, estimate.time), f"{estimate.bubble:.1%}"
    return [estimate.name, time, *speed, idle, str(estimate.fullest), peak, fits, mark]


def _step_time(plan: Plan, time: float) -> str:
    return f"{_digits(time)} s" if plan.unit == "seconds" else f"{time / plan.num_microbatches:.3f}"


_FITS = {None: "", True: "yes", False: "no"}
_TIMES = {"seconds": "ms", "relative": "a microbatch's time / p"}


def _time(plan: Plan, time: float) -> str:
    return _digits(time * 1e3) if plan.unit == "seconds" else f"{time:.3f}"


def _unit(largest: int) -> str:
    return format_bytes(largest).split()[1]


def _in(size: int, unit: str) -> str:
    return _digits(size / UNITS[unit.lower()])


def _digits(number: float) -> str:
    """Format a number with three significant digits, but at most two decimals."""
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


def _count(number: int) -> str:
    """Format a number of parameters, such as 405B."""
    digits, unit = format_bytes(number).split()
    return digits + {"B": "", "kB": "k", "MB": "M", "GB": "B", "TB": "T"}[unit]


CODES = {EXACT: 0, DIFFERENT: 1, PARTLY: 2, UNPROVEN: 2}  # exit codes of `pipeshard verify`


def prove_script(path: Path, arguments: Sequence[str], pp_size: int | None) -> Proven:
    """In one process that acts for all ranks, run a training script until it calls booster.boost. Returns the proof."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")  # as torchrun sets them
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with alone(pp_size):
            runpy.run_path(str(path), run_name="__main__")
    except Proven as proven:
        return proven
    except PipeshardError as error:
        why = summary(error)
    except SystemExit as ended:
        why = f"the script exited with {ended.code!r} before it called booster.boost"
    except Exception as error:  # raised by the script
        sys.stderr.write(traceback.format_exc())
        why = f"the script raised {summary(error)}"
    else:
        why = "the script ended without calling booster.boost"
    return Proven(Proof(UNPROVEN, why), path.name)


def prove_model(
    source: str, fields: Sequence[str], seq_len: int, dtype: str, make_booster: Callable[[Any], Any]
) -> Proven:
    """Boost a model with random weights (see `planner.models.build_on_meta`) using `make_booster(batch)`. Returns the
    proof."""
    model = build_on_meta(source, fields, dtype)
    data = drawn_batch(model, 10, seq_len)
    store = dist.HashStore()  # type: ignore[attr-defined]  # a FileStore's file would be gone when the watchdog ends
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with alone():
            make_booster(data).boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    except Proven as proven:
        return proven
    finally:
        dist.destroy_process_group()
    raise AssertionError("booster.boost ended without a proof")


def drawn_batch(model: nn.Module, rows: int, length: int) -> dict[str, Tensor]:
    """A batch of random samples. If labels are per token, the samples have different numbers of valid labels."""
    config = config_of(model)
    generator = torch.Generator().manual_seed(0)
    text = text_config(model)

    def drawn(name: str, leaf: Tensor) -> Tensor:
        if name == MASK:
            return leaf
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator)
        many = getattr(config, "num_labels", 2) if leaf.ndim == 1 else getattr(text, "vocab_size", 2)
        return torch.randint(many, leaf.shape, generator=generator)

    batch = {name: drawn(name, leaf) for name, leaf in dummy_inputs(model, rows, length).items()}
    if (labels := batch.get(LABELS)) is not None and labels.ndim == 2:
        first = torch.arange(rows)[:, None] % max(1, length - 1)
        batch[LABELS] = labels.masked_fill(torch.arange(length) < first, IGNORED)
    return batch
