"""SFT: TRL's SFTTrainer trains a chat model in a pipeline on your chats, with all weights or with adapters.

`python sft.py --model MODEL --data chats.jsonl --pp 2` starts its own processes, one per stage; under torchrun, the
script is one of the processes. MODEL is a Hugging Face folder or a model id on the Hub. The data is a `datasets`
folder, a dataset id on the Hub, or a file with one chat per line: {"messages": [{"role": "user", "content": "..."},
{"role": "assistant", "content": "..."}]} (or "prompt" and "completion", or "text"). It writes to `sft/` under --output:
checkpoints, from which --resume continues; logs for tensorboard; and `model/`, a Hugging Face folder with a tokenizer,
or adapters. With --quantize, it also writes `memory.png`: the peak memory of each stage, and the planned memory with
and without quantization.
"""

import argparse
import os
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeshard.launch import count, start
from pipeshard.schedule import SCHEDULES

PACKAGES = ("trl", "datasets", "tensorboard")
SHOWN = {"loss": "loss", "eval_loss": "held-out loss", "learning_rate": "lr", "grad_norm": "norm",
         "train_tokens_per_second": "tokens/s"}  # fmt: skip


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
    add("--model", required=True, help="a Hugging Face folder, or a model id on the Hub")
    add("--data", required=True, help="a JSON Lines file, a `datasets` folder, or a dataset id on the Hub")
    add("--steps", type=count, default=100, help="optimizer steps")
    add("--pp", type=count, default=2, help="pipeline stages, one process each")
    add("--dp", type=count, default=1, help="replicas of the pipeline, each with its own batch")
    add("--microbatches", type=count, default=4, help="microbatches that each batch is split into")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="order of forward and backward passes")
    add("--batch-size", type=count, default=8, help="samples in a batch")
    add("--lr", type=float, default=1e-4, help="highest learning rate")
    add("--output", type=Path, default=Path("outputs"), help="folder for all output")
    add("--held-out", type=float, default=0.05, help="share of the data that the model is evaluated on")
    add("--max-length", type=count, default=1024, help="tokens in a sample; longer samples are truncated")
    add("--packing", action="store_true", help="fill each sample with several chats")
    add("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank; 0 trains all weights")
    add("--quantize", choices=["nf4", "fp4", "int8"], help="quantize the base weights; needs --lora and bitsandbytes")
    add("--chat-template", type=Path, help="a file with a Jinja template, if the tokenizer has none")
    add("--every", type=count, default=50, help="steps between evaluations and between checkpoints")
    add("--resume", action="store_true", help="resume from the newest checkpoint")
    add("--tracker", default="tensorboard", help="tensorboard, wandb, trackio, or none")
    args = parser.parse_args(arguments)
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        parser.error(f"this example needs packages: pip install {' '.join(missing)}")
    for flag in ("model", "data", "chat_template"):
        name = str(getattr(args, flag) or ".")
        if not Path(name).exists() and (flag == "chat_template" or not re.fullmatch(r"[\w-]+/[\w.-]+", name)):
            parser.error(f"argument --{flag.replace('_', '-')}: {name} does not exist")
    if args.batch_size % args.microbatches:
        parser.error(
            f"argument --batch-size: {args.batch_size} is not a multiple of --microbatches, {args.microbatches}"
        )
    if args.quantize and not args.lora:
        parser.error("--quantize freezes the base weights: add adapters with --lora RANK")
    return args


def run(args: argparse.Namespace, console: Console) -> None:
    # These imports take seconds, so the flags are checked before them.
    import torch
    import torch.distributed as dist
    from huggingface_hub import snapshot_download
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PrinterCallback, set_seed
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from pipeshard import PipelinePlugin, plan
    from pipeshard.distributed.mesh import backend_here
    from pipeshard.planner.models import QUANTIZATIONS
    from pipeshard.trainer import pipelined

    class Sft(SFTTrainer):
        """An SFTTrainer that also logs the peak memory of each rank, and prints its logs and the remaining time."""

        first: tuple[int, float] | None = None  # the first logged step, and its time

        def log(self, logs: dict[str, float], *rest: Any) -> None:
            usage, every = resource.getrusage(resource.RUSAGE_SELF), [0.0] * dist.get_world_size()
            dist.all_gather_object(every, torch.cuda.max_memory_allocated() / 2**30 if gpu else usage.ru_maxrss / 2**20)
            super().log(logs | {f"memory_gib/rank{rank}": most for rank, most in enumerate(every)}, *rest)
            shown, last = self.state.log_history[-1], self.state.max_steps
            step, begun = self.first = self.first or (shown["step"], time.monotonic())
            left = (time.monotonic() - begun) / max(1, shown["step"] - step) * (last - shown["step"])
            line = "".join(f"  {name} {shown[key]:.4g}" for key, name in SHOWN.items() if key in shown)
            if line:
                memory = " ".join(f"{most:.2f}" for most in every)
                console.print(f"step {shown['step']}/{last}{line}  GiB {memory}  {left / 60:.1f} min left")

    set_seed(0)  # initializes the same adapters on every rank
    output, gpu = args.output / "sft", torch.cuda.is_available()
    config = SFTConfig(
        output_dir=str(output), max_steps=args.steps, learning_rate=args.lr, warmup_steps=args.steps // 20,
        per_device_train_batch_size=args.batch_size // args.microbatches, gradient_accumulation_steps=args.microbatches,
        max_length=args.max_length, packing=args.packing, bf16=gpu, use_cpu=not gpu,
        ddp_backend=backend_here(),
        eval_strategy="steps", eval_steps=args.every, save_steps=args.every, save_total_limit=2, logging_steps=1,
        include_num_input_tokens_seen="non_padding", report_to=args.tracker, disable_tqdm=True,
    )  # fmt: skip
    with config.main_process_first():
        folder = Path(args.model if Path(args.model).is_dir() else snapshot_download(args.model))
        data = rows(args.data).train_test_split(args.held_out, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if args.chat_template:
        tokenizer.chat_template = args.chat_template.read_text()
    adapters: Any = (
        LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear") if args.lora else None
    )

    def load(quantize: str | None) -> Any:
        """Return the model on meta, so that no process holds the whole model."""
        packing = {"quantization_config": BitsAndBytesConfig(**QUANTIZATIONS[quantize])} if quantize else {}
        return PipelinePlugin.from_pretrained(AutoModelForCausalLM, folder, dtype=torch.float32, **packing)

    trainer = pipelined(Sft)(
        load(args.quantize), config, train_dataset=data["train"], eval_dataset=data["test"], processing_class=tokenizer,
        peft_config=adapters,
        pipeline=PipelinePlugin(pp_size=args.pp, dp_size=args.dp, schedule=args.schedule),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model(str(output / "model"))
    console.print(f"wrote {output}/model")

    def planned(quantize: str | None) -> list[float]:
        """Return the planned GiB of each stage."""
        model = get_peft_model(load(quantize).train(), adapters)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        made = plan(
            model, None, args.pp, num_microbatches=args.microbatches,
            microbatch_size=config.per_device_train_batch_size, seq_len=args.max_length, schedule=args.schedule,
        )  # fmt: skip
        return [memory.total / 2**30 for memory in made.estimate.memory]

    if args.quantize and trainer.is_world_process_zero():
        taken = [each for key, each in trainer.state.log_history[-1].items() if key.startswith("memory_gib")]
        bars = {"taken, with libraries": by_stage(taken, args.pp), f"planned, {args.quantize}": planned(args.quantize)}
        bars["planned, not quantized"] = planned(None)
        draw(bars, f"{folder.name}, LoRA of rank {args.lora}", output / "memory.png")
        console.print(f"wrote {output}/memory.png")


def rows(data: str) -> Any:
    from datasets import load_dataset, load_from_disk

    if Path(data).is_dir():
        return load_from_disk(data)
    return load_dataset(*("json", None, None, data) if Path(data).is_file() else (data,), split="train")


def by_stage(taken: Sequence[float], stages: int) -> list[float]:
    """Return, for each stage, the largest value of its ranks; consecutive ranks are the stages of one replica."""
    return [max(taken[stage::stages]) for stage in range(stages)]


def draw(bars: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Draw a group of bars for each stage, with sizes in GiB."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes, width = figure.subplots(), 0.8 / len(bars)
    for k, (label, sizes) in enumerate(bars.items()):
        places = [rank + (k - (len(bars) - 1) / 2) * width for rank in range(len(sizes))]
        axes.bar_label(axes.bar(places, sizes, width, label=label), fmt="%.2f", fontsize=8)
    axes.set(title=title, xlabel="rank", ylabel="GiB", xticks=range(max(map(len, bars.values()))))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
