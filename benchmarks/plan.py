"""Plan: the time and memory of `pipeshard plan` for a model of 405 billion parameters.

`python -m benchmarks.plan [--rounds 9]` runs, in turns, the command with and without a plot, and a process that only
imports the model's code. It prints the median and the range of the times, and the peak resident memory.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

LLAMA = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
OPTIONS = "--pp 16 --microbatches 64 --schedule interleaved --chunks 3"
SECONDS, BYTES = 5.0, 1e9


def run(command: list[str]) -> tuple[float, int]:
    """Run a process. Returns its seconds and its peak resident memory in bytes."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        sys.exit(f"failed: {' '.join(command)}")
    return seconds, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="runs of each command after the first (default: 9)")
    rounds = parser.parse_args().rounds
    plan = [str(Path(sys.executable).with_name("pipeshard")), "plan", "llama"]
    plan += [*(f"{name}={value}" for name, value in LLAMA.items()), *OPTIONS.split()]
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "plan": plan,
            "plan --draw": [*plan, "--draw", f"{folder}/step.png"],
            "import of torch, transformers' llama": [
                sys.executable,
                "-c",
                "import transformers.models.llama.modeling_llama",
            ],
        }
        runs = [[run(command) for command in commands.values()] for _ in track(range(rounds + 1), transient=True)]
    table = Table("", "s", "from", "to", "MB", title="pipeshard plan, Llama-405B, p=16, v=3, m=64")
    figures = []
    for name, found in zip(commands, zip(*runs[1:], strict=True), strict=True):
        seconds, sizes = zip(*found, strict=True)
        figures.append((statistics.median(seconds), max(sizes)))
        row = (figures[-1][0], min(seconds), max(seconds))
        table.add_row(name, *(f"{value:.2f}" for value in row), f"{max(sizes) / 1e6:.0f}")
    Console().print(table)
    seconds, size = figures[0]
    Console().print(f"plan: {seconds:.2f} s (target: {SECONDS:.0f}); {size / 1e6:.0f} MB (target: {BYTES / 1e6:.0f})")
    raise SystemExit(seconds > SECONDS or size > BYTES)


if __name__ == "__main__":
    main()
