"""Rollouts: TRL's GRPOTrainer through a pipeline, on a toy reward: a llama from random weights learns to echo a letter.

A prompt is a letter, and the reward of a completion is the share of its tokens that are this letter. The stages
generate the completions together. `python examples/rollouts.py --pp 2` starts its own processes, one a stage; under
torchrun it is one of them. `model/`, a Hugging Face folder with its tokenizer, gets into `rollouts/` under --output.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

import launcher
from packages import Package

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LETTERS = "abcd"
SHOWN = {"reward": "reward", "completions/mean_length": "tokens", "grad_norm": "norm"}
TOKENS = 4  # of a completion, at most
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def main() -> int:
    return launcher.main(parse(sys.argv[1:]), run)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = launcher.flags(__doc__, steps=30, batch_size=32, lr=1e-2)
    parser.add_argument("--generations", type=launcher.count, default=8, help="completions of each prompt")
    args = launcher.parse(parser, arguments, Package("trl", "trl datasets"))
    if args.batch_size % args.microbatches or args.batch_size % args.generations:
        parser.error("give a --batch-size that is a multiple of --microbatches, and of --generations")
    return args


def run(args: argparse.Namespace, console: Console) -> None:
    # They take seconds, so wrong flags are told before.
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from pipeshard import PipelinePlugin
    from pipeshard.trainer import pipelined

    class Shown(TrainerCallback):
        """Prints what is logged."""

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
    """The reward: how much of each completion is its prompt's letter."""
    return [text.split().count(prompt) / TOKENS for prompt, text in zip(prompts, completions)]


def toy() -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """A small llama from random weights, and a tokenizer of letters."""
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
