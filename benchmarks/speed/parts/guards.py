"""Guards: the share of a step that guards take, and the time of the proof at boost, in steps."""

import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.progress import Progress
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.speed.parts import Effort
from benchmarks.speed.parts.work import spread
from benchmarks.speed.section import Bar, Section, Table
from pipeshard import PipelinePlugin
from pipeshard.batch.read import read_batch
from pipeshard.engine.parameters import HeldParameters
from pipeshard.engine.stage import Stage
from pipeshard.engine.step_guard import StepGuard
from pipeshard.engine.updates import FIRST, Updates
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.flags import Flags
from pipeshard.split.replay import Replay
from pipeshard.verify.decide import alone
from pipeshard.verify.proof import prove

TEXT = """\
Guards are the checks that pipeshard runs in every step. Guards check that the following match the trace or have not
changed:

- the results of units (modules that are never split, such as layers);
- the values that receive gradients;
- flags of the model;
- the results of conditions that the model's code evaluates on a batch;
- the set of trained parameters;
- before an update, the gradients and the options of the update.

The benchmark times every call of every guard, and includes the cost of the clock. Two stages run in two processes. The
table shows the CPU time of the training thread, on the rank on which guards take the larger share of a step.

The proof is the comparison with the unsplit model that `verify=True` runs. Here, the proof covers two stages, with all
ranks in one process. "Proof (s)" is the CPU time of the proof over all threads. "Proof (unsplit steps)" is the number
of training steps of the unsplit model on the whole batch that take the same time."""

Work = tuple[int, int, int, int, int]
# name: hidden size, layers, sequence length, microbatches, samples per microbatch
WORKS: dict[str, Work] = {"20 M parameters": (256, 8, 128, 8, 2), "bound by overhead": (64, 8, 32, 64, 1)}
QUICK: dict[str, Work] = {"quick": (32, 2, 8, 2, 1)}
GUARDS: list[tuple[Any, str]] = [
    (Replay, "_checked"),
    (Replay, "_prove"),
    (Replay, "_observed"),
    (Replay, "_refuse_observed"),
    (Stage, "_refuse_lost"),
    (Stage, "_note_reached"),
    (Stage, "_refuse_none"),
    (Flags, "number"),
    (Flags, "stepped"),
    (HeldParameters, "trained"),
    (HeldParameters, "problems"),
    (Updates, "added"),
    (Updates, "judge"),
    (Updates, "hooks_begin"),
    (Updates, "hooks_end"),
    (Updates, "numbers"),
    (StepGuard, "check"),
    (Dataflow, "deltas"),
]
STAGES, STEPS = 2, 3  # per pipeline; per round
WARM = FIRST + 1  # steps that trace, verify places and compare updates
BAR = 0.01  # share of a step
PROOF_BARS = {"20 M parameters": 3.0}  # steps of the unsplit model


def run(effort: Effort, progress: Progress) -> Section:
    works = QUICK if effort.quick else WORKS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    task = progress.add_task("guards", total=len(works) * (effort.rounds * STEPS + 1))
    rows, bars, raw = [], [], {}
    for name, work in works.items():
        ranks = measured(work, effort.rounds * STEPS)
        progress.advance(task, effort.rounds * STEPS)
        steps = max(ranks, key=lambda steps: statistics.median(shares_of(steps)))
        shares = shares_of(steps)
        whole = statistics.median(step for step, _ in steps)
        low, middle, high = (f"{share:.2%}" for share in spread(shares))
        proof, step = proven(work)
        progress.advance(task)
        rows.append([name, f"{1e3 * whole:.0f}", middle, f"{low} to {high}", f"{proof:.2f}", f"{proof / step:.1f}"])
        met = effort.quick or statistics.median(shares) < BAR
        bars.append(Bar(f"{name}: guards take {middle} of a step (target: below {BAR:.0%})", met))
        if bar := PROOF_BARS.get(name):
            text = f"{name}: the proof takes {proof / step:.1f} unsplit steps (target: below {bar:.0f})"
            bars.append(Bar(text, proof / step < bar))
        raw[name] = {"steps": ranks, "proof": proof, "unsplit": step}
    torch.set_num_threads(threads)
    progress.remove_task(task)
    columns = ["", "ms/step", "guards", "quartiles", "proof (s)", "proof (unsplit steps)"]
    return Section("Guards and the proof", TEXT, [Table("llama", columns, rows)], bars, raw=raw)


Steps = list[tuple[float, float]]  # CPU seconds of each step, and of its guards


def shares_of(steps: Steps) -> list[float]:
    return [guards / step for step, guards in steps]


def measured(work: Work, count: int) -> list[Steps]:
    """Measure `count` steps on each rank."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(STAGES, get_context("spawn")) as ranks:
        started = [ranks.submit(of_rank, rank, f"file://{folder}/meeting", work, count) for rank in range(STAGES)]
        return [steps.result() for steps in started]


def of_rank(rank: int, meeting: str, work: Work, count: int) -> Steps:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=STAGES)
    model, batch, microbatches = made(work)
    plugin = PipelinePlugin(STAGES, num_microbatches=microbatches, max_norm=1.0, dry_run_input=batch, verify=False)
    boosted, trained, *_ = plugin.configure(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    steps: Steps = []
    for k in range(WARM + count):
        with timed() as spent:
            start = time.thread_time()
            plugin.execute_pipeline(iter([batch]), boosted, None, trained)
            trained.step()  # type: ignore[union-attr]
            trained.zero_grad()  # type: ignore[union-attr]
            end = time.thread_time()
        if k >= WARM:
            steps.append((end - start, spent[0]))
    dist.destroy_process_group()
    return steps


def proven(work: Work) -> tuple[float, float]:
    """Return the CPU seconds of the proof, which runs all ranks in this process, and of a step of the unsplit model."""
    model, batch, microbatches = made(work)
    with alone():
        plugin = PipelinePlugin(STAGES, num_microbatches=microbatches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    start = time.process_time()
    prove(plugin.config, torch.device("cpu"), model, optimizer, None, read_batch(model, batch))
    proof, steps = time.process_time() - start, []
    for _ in range(1 + STEPS):
        start = time.process_time()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.process_time() - start)
    return proof, statistics.median(steps[1:])


@contextlib.contextmanager
def timed() -> Iterator[list[float]]:
    """Add up the CPU seconds of all guards that run inside this context."""
    spent = [0.0]

    def timing(guard: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(guard)
        def run(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return guard(*args)
            finally:
                spent[0] += time.thread_time() - start

        return run

    with contextlib.ExitStack() as stack:
        for owner, name in GUARDS:
            guard: Any = vars(owner)[name]
            is_property = isinstance(vars(owner)[name], property)
            timed_guard = property(timing(guard.fget)) if is_property else timing(guard)
            stack.enter_context(mock.patch.object(owner, name, timed_guard))
        yield spent


def made(work: Work) -> tuple[PreTrainedModel, dict[str, torch.Tensor], int]:
    hidden, layers, length, microbatches, size = work
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=32000 if hidden > 64 else 256,
    )
    ids = torch.randint(0, config.vocab_size, (microbatches * size, length))
    return AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}, microbatches
