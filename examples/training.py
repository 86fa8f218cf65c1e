"""Training: one rank's part of fine-tuning, from the weights to the charts, the saved model and the samples."""

import argparse

import torch.distributed as dist
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from loop import Loop, Meter, draw, make_booster
from models import load
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.recording import Recording
from text import Samples

PROMPT = "This module provides"
NEW_TOKENS = 40


def run(args: argparse.Namespace, console: Console) -> None:
    with console.status(f"loading {args.model}"):
        model, tokenizer = load(args.model, args.output)
        samples = Samples(tokenizer, args.sequence_length)
    training, held_out = samples.divided(2 * args.batch_size)
    loop = Loop(args, make_booster(args), model, training, held_out)
    _print_sample(console, "before", loop.model, tokenizer)
    loop.evaluate()
    recording = _train(args, console, loop)
    loop.evaluate()
    _print_sample(console, "after", loop.model, tokenizer)

    folder = args.output / "model"
    loop.booster.save_model(loop.model, str(folder), shard=True)
    if console.quiet:
        return
    tokenizer.save_pretrained(folder)
    draw(loop.losses, loop.scores, args.output / "loss.png")
    title = f"{args.model}, {args.schedule}, {args.microbatches} microbatches"
    recording.draw(args.output / "timeline.png", title=title)
    before, after = loop.scores
    console.print(f"loss on held-out text: {before.loss:.3f} before, {after.loss:.3f} after {args.steps} steps")
    console.print(f"wrote {args.output}/loss.png, {args.output}/timeline.png, {folder}/")


def _train(args: argparse.Namespace, console: Console, loop: Loop) -> Recording:
    """All steps. Returns how the last one ran."""
    tokens = args.batch_size * args.sequence_length * (dist.get_world_size() // args.pp)
    with Meter(console, args.steps) as meter:
        for _ in range(args.steps):
            seconds = loop.step()
            recording: Recording = loop.booster.plugin.recording()
            meter.advance(
                f"loss {loop.losses[-1]:.3f}  {tokens / seconds:.0f} tokens/s  {1000 * seconds:.0f} ms/step  "
                f"bubble {recording.bubble:.0%} (simulated {recording.simulation().bubble:.0%})"
            )
    return recording


def _print_sample(console: Console, when: str, model: PipelineModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """What the stages make of the prompt, taking the likeliest token each time; repeating itself makes one less so."""
    inputs = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    model.eval()
    tokens = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        repetition_penalty=1.2,
        pad_token_id=tokenizer.eos_token_id,
    )
    model.train()
    console.rule(f"sample {when}", align="left")
    console.print(tokenizer.decode(tokens[0], skip_special_tokens=True), markup=False)
    console.rule()
