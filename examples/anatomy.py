"""Anatomy: how a small llama and a small T5 are cut into two stages; the worked example of docs/design.md.

For each model, `python examples/anatomy.py` prints the unit calls, the values that each call reads, the stage that runs
the call, and the values that cross the cut; `--draw docs/anatomy.svg` also draws them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeshard import trace
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.taint import Value
from pipeshard.split.boundary import boundaries

COLOURS = ("#56B4E9", "#E69F00")  # one per stage
CENTRED: dict[str, Any] = {"ha": "center", "va": "center", "size": 7}


def llama() -> tuple[nn.Module, dict[str, Any], int]:
    """Return a model, a batch, and the number of unit calls before the cut."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = torch.arange(16).reshape(2, 8)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), {"input_ids": ids, "labels": ids}, 3


def t5() -> tuple[nn.Module, dict[str, Any], int]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    ids = torch.arange(16).reshape(2, 8)
    return T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes)), {"input_ids": ids, "labels": ids}, 6


def label(flow: Dataflow, value: Value) -> str:
    """Return the name of a value: `layers.1`, or `block.0[1]` if the unit returns several values."""
    call = flow.calls[value.call]
    several = sum(hasattr(leaf, "shape") for leaf in call.leaves) > 1
    return call.unit + (f"[{value.leaf}]" if several else "")


def describe(flow: Dataflow, stages: Sequence[int]) -> str:
    """Return a table of the unit calls, and a line for each value that crosses the cut: its name and dtype, and whether
    its gradient returns."""
    rows = [("call", "unit", "stage", "reads")]
    for k, (call, stage) in enumerate(zip(flow.calls, stages)):
        reads = ", ".join(label(flow, value) for value in sorted(call.reads.values)) or "the batch alone"
        rows.append((str(k), call.unit, str(stage), reads))
    loss = ", ".join(label(flow, value) for value in sorted(flow.needed().values))
    rows.append(("", "the loss", str(max(stages)), loss))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    boundary = boundaries(flow, stages, max(stages) + 1)[1]
    lines.append("")
    for value in boundary.values:
        spec = flow.spec(value)
        back = "its gradient returns" if value in boundary.gradients else "no gradient returns"
        lines.append(f"crosses: {label(flow, value)}, {str(spec.dtype).removeprefix('torch.')}; {back}")
    return "\n".join(lines)


def draw(models: Sequence[tuple[str, Dataflow, Sequence[int]]], path: Path) -> None:
    """Draw a row of boxes for each stage of each model, and an arrow from each value that crosses the cut to the first
    call that reads it. A box is coloured if the stage runs the unit, grey if the stage replays it, and white if the
    stage does not reach it."""
    from matplotlib.figure import Figure

    longest = max(len(flow.calls) for _, flow, _ in models)
    figure = Figure(figsize=(1.05 * longest + 1.5, 2.9 * len(models)), layout="constrained")
    for axes, (name, flow, stages) in zip(figure.subplots(len(models), squeeze=False)[:, 0], models):
        for stage in range(2):
            for k, call in enumerate(flow.calls):
                done = stage == 0 and stages[k] > 0
                colour = COLOURS[stage] if stages[k] == stage else "white" if done else "#DDDDD8"
                line = ":" if done else "-"
                axes.barh(-stage, 0.9, left=k, height=0.5, color=colour, edgecolor="#888", linestyle=line)
                words = call.unit.removeprefix("model.").replace(".block.", ".block ").replace("layers.", "layer ")
                axes.text(k + 0.45, -stage, words.replace(".", "\n").replace("final_layer_", "final_\n"), **CENTRED)
        for n, value in enumerate(boundaries(flow, stages, 2)[1].values):
            reader = min(k for k, call in enumerate(flow.calls) if stages[k] == 1 and value in call.reads.values)
            arrow = {"arrowstyle": "->", "connectionstyle": f"arc3,rad={0.12 * (n + 1):.2f}", "lw": 1.2}
            axes.annotate("", (reader + 0.45, -0.74), (value.call + 0.45, -0.26), arrowprops=arrow)
        axes.set_yticks([0, -1], ["rank 0: stage 0", "rank 1: stage 1"])
        axes.set(xlim=(-0.1, longest), ylim=(-1.5, 0.5), xticks=[])
        axes.set_title(f"{name}: coloured units run, grey ones replay, dotted ones are not reached", size=9, loc="left")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=Path, help="the picture to write, such as docs/anatomy.svg")
    path = parser.parse_args().draw
    torch.manual_seed(0)
    models = []
    for build in (llama, t5):
        model, batch, before = build()
        flow = trace(model, batch)
        stages = [int(k >= before) for k in range(len(flow.calls))]
        models.append((type(model).__name__, flow, stages))
        sys.stdout.write(f"{type(model).__name__}\n\n{describe(flow, stages)}\n\n")
    if path is not None:
        draw(models, path)


if __name__ == "__main__":
    main()
