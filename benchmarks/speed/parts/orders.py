"""Orders: the schedules of torch's pipelining and of pipeshard, simulated for more ranks than the machine has cores."""

import csv
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from torch.distributed.pipelining import schedules as torchs
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.speed.parts import Effort
from benchmarks.speed.section import Bar, Section, Table
from pipeshard.planner.candidate import Subject
from pipeshard.planner.devices import Devices
from pipeshard.planner.memory import Training
from pipeshard.planner.planner import automatic, first_microbatch, study
from pipeshard.planner.profile import profile_units
from pipeshard.schedule import Program, make_program, program_of, shorten_cooldown, simulate_parts

TEXT = """\
The schedules in this section are simulated, since the machine has only two cores. The simulation uses measured costs:
the F, B and W times of each unit of a llama with 32 layers, hidden size 384 and a vocabulary of 8,192 entries. For
torch, the simulation uses the compute actions that torch's schedule classes generate; for pipeshard, it uses the
actions that pipeshard runs. All schedules except "auto" cut the model into stages with equal numbers of layers. "Auto"
(`schedule="auto"`) searches for a program and its cuts within the memory that 1F1B needs. In the simulation, messages
take no time. "Idle" is the share of the ranks' time in which they compute nothing. "Time" is the step time relative to
torch's 1F1B. "Activations" is the largest number of microbatches whose activations a rank keeps. torch's DualPipeV
requires at least one microbatch per stage."""

LAYERS, ROWS, LENGTH = 32, 2, 128
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6, "vocab_size": 8192}
PEERS = {
    "torch Interleaved1F1B": (torchs.ScheduleInterleaved1F1B, 2),
    "torch InterleavedZeroBubble": (torchs.ScheduleInterleavedZeroBubble, 2),
    "torch ZBVZeroBubble": (torchs.ScheduleZBVZeroBubble, 2),
    "torch DualPipeV": (torchs.ScheduleDualPipeV, 2),
}
OURS = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "v-half": 2, "v-min": 2}
FIRST = "torch 1F1B"  # torch's class has no valid order for the last rank, but runs the published schedule
AUTO = "pipeshard auto"


class Costs(NamedTuple):
    """Seconds of F, B and W of a microbatch: in each layer, in the units before the layers, and in those after them."""

    layers: list[tuple[float, ...]]
    before: tuple[float, ...]
    after: tuple[float, ...]

    def of_stages(self, stages: int) -> list[list[float]]:
        """The F, B and W of stages with equal numbers of layers."""
        count = len(self.layers) // stages
        runs = [self.layers[k * count : (k + 1) * count] for k in range(stages)]
        runs[0], runs[-1] = [self.before, *runs[0]], [*runs[-1], self.after]
        return [[sum(each) for each in kind] for kind in zip(*(map(tuple, zip(*run)) for run in runs))]


def torch_order(schedule: Callable[..., Any], p: int, m: int, v: int) -> Program:
    """Return the compute actions of a torch schedule. To generate them, its class needs only the numbers of stages and
    microbatches."""
    stages = [
        SimpleNamespace(
            group_size=p,
            group_rank=0,
            num_stages=p * v,
            stage_index=k * p,
            is_first=k == 0,
            is_last=False,
            has_backward=True,
            submod=torch.nn.Identity(),
        )
        for k in range(v)
    ]
    made = schedule(stages, m, loss_fn=torch.nn.functional.mse_loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(made.pipeline_order.values())
        return program_of(Program.from_csv(path), p, m)


def measured(layers: int) -> tuple[Subject, Costs]:
    """A llama on meta with the measured costs of its units."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES, num_key_value_heads=6))
    microbatch, _ = first_microbatch(model, None, 1, ROWS, LENGTH)
    flow = study(model, microbatch, None, None, "auto", Training(), None).flow
    profile = profile_units(model, flow, microbatch, "cpu", repeats=15)
    subject = study(model, microbatch, None, None, "auto", Training(), profile)
    costs = {call.unit: tuple(cost) for call, cost in zip(flow.calls, subject.costs, strict=True)}
    repeated = [name for name in costs if ".layers." in name]
    places = [name in repeated for name in costs]
    first, last = places.index(True), len(places) - places[::-1].index(True)
    names = list(costs)

    def total(some: list[str]) -> tuple[float, ...]:
        return tuple(map(sum, zip(*(costs[name] for name in some))))

    return subject, Costs([costs[name] for name in repeated], total(names[:first]), total(names[last:]))


def programs(p: int, m: int) -> Iterator[tuple[str, Program]]:
    yield FIRST, make_program("1f1b", p, m)
    for name, (schedule, v) in PEERS.items():
        if m >= 2 * p or schedule is not torchs.ScheduleDualPipeV:  # DualPipeV requires a microbatch per stage
            yield name, torch_order(schedule, p, m, v)
    for name, v in OURS.items():
        yield f"pipeshard {name}", shorten_cooldown(make_program(name, p, m, v))


def run(effort: Effort, progress: Progress) -> Section:
    torch.set_num_threads(1)
    subject, costs = measured(16 if effort.quick else LAYERS)
    work = sum(map(sum, (costs.before, costs.after, *costs.layers)))
    tables, bars, raw = [], [], {}
    steps = [(p, times * p) for p in ((2,) if effort.quick else (4, 8)) for times in (1, 2, 4)]
    task = progress.add_task("orders", total=len(steps))
    for p, m in steps:
        rows: dict[str, tuple[float, float | None]] = {}
        for name, program in programs(p, m):
            stages = len(program.placement)
            simulation = simulate_parts(program, *costs.of_stages(stages))
            rows[name] = simulation.makespan, max(simulation.peak_memory(p / stages))
        rows[AUTO] = automatic(subject.on(Devices.parse(p)), p, m).candidate.estimate(1.0).time, None
        cells = [
            [
                name,
                f"{1 - m * work / p / time:.1%}",
                f"{time / rows[FIRST][0]:.3f}",
                "" if peak is None else f"{peak:.1f}",
            ]
            for name, (time, peak) in rows.items()
        ]
        tables.append(Table(f"p={p}, m={m}", ["schedule", "idle", "time", "activations"], cells))
        ours = min(time for name, (time, _) in rows.items() if name.startswith("pipeshard"))
        peer = min(time for name, (time, _) in rows.items() if name.startswith("torch"))
        text = f"p={p}, m={m}: pipeshard's fastest schedule takes {ours / peer:.3f} times as long as torch's fastest"
        bars.append(Bar(f"{text} (target: at most 1)", effort.quick or ours <= peer))
        raw[f"{p},{m}"] = {name: time for name, (time, _) in rows.items()}
        progress.advance(task)
    return Section("More ranks, simulated", TEXT, tables, bars, [], raw)
