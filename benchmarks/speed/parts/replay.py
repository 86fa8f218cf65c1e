"""Replay: the cost, in a stage's forward, of each unit that another stage holds."""

import statistics
import time
from collections.abc import Callable

import torch
from rich.progress import Progress
from torch import Tensor, nn

from benchmarks.speed.parts import Effort
from benchmarks.speed.parts.work import spread
from benchmarks.speed.section import Bar, Section, Table
from pipeshard import trace
from pipeshard.batch.read import read_batch
from pipeshard.split.boundary import boundaries
from pipeshard.split.policy import Policy
from pipeshard.split.route import Route

TEXT = """\
Each stage runs the model's own forward. If another stage holds a unit (a module that is never split, such as a layer),
the forward calls the unit, but does not compute it. This section measures the cost of such a call. The measured stage
is the last stage, which has one layer. This stage is measured in a model with few layers and in a model with many
layers. The cost per unit is the difference between the stage's forward times for the two models, divided by the
difference between their numbers of layers. This cost includes the call itself, finding the call's position in the
trace, and creating a tensor that replaces the unit's result."""

FEW, MANY = 4, 68
WIDTH = 16
BAR = 10e-6  # seconds


def run(effort: Effort, progress: Progress) -> Section:
    repeats = 20 if effort.quick else 200
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    task = progress.add_task("replay", total=effort.rounds * repeats)
    forwards = {layers: last_stage(layers) for layers in (FEW, MANY)}
    costs = []
    for _ in range(effort.rounds):
        times: dict[int, list[float]] = {layers: [] for layers in forwards}
        for _ in range(repeats):
            for layers, forward in forwards.items():
                start = time.perf_counter()
                forward()
                times[layers].append(time.perf_counter() - start)
            progress.advance(task)
        few, many = map(statistics.median, times.values())
        costs.append((many - few) / (MANY - FEW))
    torch.set_num_threads(threads)
    progress.remove_task(task)
    low, middle, high = (f"{1e6 * cost:.1f}" for cost in spread(costs))
    rows = [["a unit on another stage", middle, f"{low} to {high}"]]
    table = Table("linear layers in sequence", ["", "µs", "quartiles"], rows)
    cost = statistics.median(costs)
    bar = Bar(f"a unit on another stage costs {1e6 * cost:.1f} µs (target: below {1e6 * BAR:.0f})", cost < BAR)
    return Section("Units on other stages", TEXT, [table], [bar], raw={"costs": costs})


class Layers(nn.Module):
    """Linear layers in sequence."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.mean()}


def last_stage(layers: int) -> Callable[[], None]:
    """Return the forward of the last stage for one microbatch, without autograd."""
    model, data = Layers(layers), {"x": torch.ones(2, WIDTH)}
    batch, flow = read_batch(model, data), trace(model, data)
    policy = Policy(model, flow, 1, 2, [layers - 1, 1])
    crossing = boundaries(flow, policy.stages, 2)
    route, deltas = Route.of(flow, policy.stages, 1, crossing), flow.axes.deltas(batch)
    assert deltas is not None
    specs = [flow.spec(value) for value in crossing[1].values]
    received = {value: torch.zeros(spec.at(deltas)) for value, spec in zip(crossing[1].values, specs)}
    fed = route.feed(batch, policy.replay.device)
    policy.replace_forward()

    def forward() -> None:
        with torch.no_grad():
            policy.replay.run(route, deltas, received, fed)

    return forward
