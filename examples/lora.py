"""LoRA: adapters of peft on SmolLM2-135M, trained on the standard library's text while its weights stay frozen.

`python examples/lora.py --pp 2` starts its own processes, one a stage; under torchrun it is one of them. It writes
`training.png` and `adapter/`, which `PeftModel.from_pretrained` reads, into `lora/` under --output.
"""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

import launcher
from packages import SMOLLM2
from pipeshard.launch import count

if TYPE_CHECKING:
    from torch import Tensor

    from loop import Batch

HELD_OUT = 16


def main() -> int:
    return launcher.main(parse(sys.argv[1:]), run)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = launcher.flags(__doc__, steps=30, batch_size=8, lr=2e-3)
    parser.add_argument("--rank", type=count, default=8, help="rank of the adapters' matrices")
    return launcher.parse(parser, arguments, SMOLLM2)


def run(args: argparse.Namespace, console: Console) -> None:
    # They take seconds, so wrong flags are told before.
    from peft import LoraConfig

    from loop import Loop, Metric, make_booster
    from models import load
    from text import Samples

    with console.status("loading smollm2"):
        model, tokenizer = load("smollm2", args.output)
        training, held_out = Samples(tokenizer, length=64).divided(HELD_OUT)
    booster = make_booster(args)
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: Any = booster.enable_lora(model, lora_config=config)
    trained, total = adapted.get_nb_trainable_parameters()
    console.print(f"adapters: {trained:,} of {total:,} parameters ({trained / total:.1%})")
    loop = Loop(args, booster, adapted, training, held_out, Metric("next tokens", _next_tokens))
    loop.run(console)
    folder = args.output / "lora"
    booster.save_lora_as_pretrained(loop.model, str(folder / "adapter"))
    loop.report(console, f"{HELD_OUT} unseen passages", folder)


def _next_tokens(predicted: "Tensor", batch: "Batch") -> "Tensor":
    return predicted[:, :-1] == batch["labels"][:, 1:]


if __name__ == "__main__":
    sys.exit(main())
