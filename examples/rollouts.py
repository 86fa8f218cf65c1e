"""Rollouts: TRL's GRPOTrainer in a pipeline, with a toy reward: a randomly initialized llama learns to echo a letter.

A prompt is a letter. The reward of a completion is the number of its tokens that equal this letter, as a fraction of
the maximum length. The stages generate the completions together. `python rollouts.py --pp 2` starts its own processes,
one per stage; under torchrun, the script is one of the processes. It writes `model/`, a Hugging Face folder with a
tokenizer, to `rollouts/` under --output.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pipeshard.launch import count, start
from pipeshard.schedule import SCHEDULES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGES = ("trl", "datasets")
LETTERS = "abcd"
SHOWN = {"reward": "reward", "completions/mean_length": "tokens", "grad_norm": "norm"}
TOKENS = 4  # per completion, at most
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


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
    add("--steps", type=count, default=30, help="optimizer steps")
    add("--pp", type=count, default=2, help="pipeline stages, one process each")
    add("--dp", type=count, default=1, help="replicas of the pipeline, each with its own batch")
    add("--microbatches", type=count, default=4, help="microbatches that each batch is split into")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="order of forward and backward passes")
    add("--batch-size", type=count, default=32, help="completions in a batch")
    add("--generations", type=count, default=8, help="completions per prompt")
    add("--lr", type=float, default=1e-2, help="highest learning rate")
    add("--output", type=Path, default=Path("outputs"), help="folder for all output")
    args = parser.parse_args(arguments)
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        parser.error(f"this example needs packages: pip install {' '.join(missing)}")
    for flag in ("microbatches", "generations"):
        if args.batch_size % getattr(args, flag):
            parser.error(
                f"argument --batch-size: {args.batch_size} is not a multiple of --{flag}, {getattr(args, flag)}"
            )
    return args


def run(args: argparse.Namespace, console: Console) -> None:
    # These imports take seconds, so the flags are checked before them.
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from pipeshard import PipelinePlugin
    from pipeshard.trainer import pipelined

    class Shown(TrainerCallback):
        """Print the reward, length and norm of each logged step."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "reward" in logs:
                line = "".join(f"  {name} {logs[key]:.3f}" for key, name in SHOWN.items())
                console.print(f"step {state.global_step}/{state.max_steps}{line}")

    output = args.output / "rollouts"
    config = GRPOConfig(
        output_dir=str(output), max_steps=args.steps, learning_rate=args.lr, seed=0, use_cpu=True, bf16=False,
        per_device_train_batch_size=args.batch_size // args.microbatches, gradient_accumulation_steps=args.microbatches,
        num_generations=args.generations, max_completion_length=TOKENS, logging_steps=1, save_strategy="no",
        gradient_checkpointing=False, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    model, tokenizer = toy()
    trainer = pipelined(GRPOTrainer)(
        model, echoed, config, train_dataset=Dataset.from_dict({"prompt": list(LETTERS) * 8}),
        processing_class=tokenizer, callbacks=[Shown()],
        pipeline=PipelinePlugin(pp_size=args.pp, dp_size=args.dp, schedule=args.schedule),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(output / "model"))
    console.print(f"wrote {output}/model")


def echoed(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Return the reward of each completion: how often it contains its prompt's letter, divided by `TOKENS`."""
    return [text.split().count(prompt) / TOKENS for prompt, text in zip(prompts, completions)]


def toy() -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Return a small llama with random weights, and a tokenizer of letters."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<end>", *LETTERS]
    made = Tokenizer(WordLevel({word: k for k, word in enumerate(words)}, unk_token="<end>"))
    made.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(words), bos_token_id=None, eos_token_id=1, pad_token_id=0, **SIZES)
    return LlamaForCausalLM(config), tokenizer


if __name__ == "__main__":
    sys.exit(main())
