"""Generating: the tokens that one entry generates on several stages, compared with those of the unsplit model.

`python -m tests.parity.generating` runs all entries, or the named ones, and writes a page.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeshard
from pipeshard.errors import PipeshardError
from tests.parity.build import batch, build
from tests.parity.check import Verdict
from tests.parity.command import Page, run
from tests.parity.entries import Entry
from tests.parity.report import Row
from tests.parity.sweep import judged
from tests.parity.tiny import FIRST_TEXT, SPECIAL, VOCABULARY
from tests.pool import Pool
from tests.unsplit import largest_error

GENERATING = ("causal-lm", "seq2seq-lm", "image-text-to-text", "speech-seq2seq")  # tasks of models that generate
NEW, PADDED, SEED = 5, 3, 11
CLOSE = 1e-5  # of a score, relative to the largest one
GREEDY: dict[str, Any] = {"do_sample": False}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "left-padded": GREEDY,
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 2, "do_sample": False},
    "scores": GREEDY | {"return_dict_in_generate": True, "output_scores": True},
}
PAGE = Page(
    command="tests.parity.generating",
    target="make parity-generate",
    title="Parity of generation",
    tasks=GENERATING,
    text=(
        f"Of {{entries}} architectures in {len(GENERATING)} tasks, {{able}} generate unsplit. **{{exact}}** of these "
        "({share:.1%}) generate the same tokens with p = {ps} stages, in each mode that the unsplit model supports. "
        f"The {len(MODES)} modes are: {', '.join(MODES)}. The table below lists all other architectures."
    ),
    meaning={
        "bitwise": "tokens and scores are equal, bit for bit",
        "close": f"tokens are equal, and scores differ only by rounding (at most {CLOSE:.0e} of the largest score)",
        "refused": "pipeshard refuses the model with an error that says why",
        "untrainable": "the model does not generate unsplit, or two runs differ",
        "wrong": "tokens differ, or scores differ by more than rounding",
    },
)


def check_generation(entry: Entry) -> Verdict:
    """Compare the tokens in every mode in which the unsplit model generates. Call on every rank of the world."""
    try:
        model = build(entry).eval()
    except Exception as error:
        return Verdict("untrainable", reason=f"{type(error).__name__}: {error}")
    data = {name: value for name, value in batch(entry, model).items() if "labels" not in name}
    prompts = {mode: padded(entry, data) if mode == "left-padded" else data for mode in MODES}
    alone = copy.deepcopy(model)
    with_caches(alone)
    expected: dict[str, Any] = {}
    failure = ""
    for mode, options in MODES.items():
        try:
            expected[mode] = generated(alone, prompts[mode], options)
        except Exception as error:
            failure = failure or f"{mode}: {type(error).__name__}: {error}"
    if "greedy" not in expected:
        return Verdict("untrainable", reason=failure)
    if draws(alone, data):
        return Verdict("untrainable", reason="it draws random numbers in its forward, so that no two runs are alike")
    with_caches(model)
    sample = batch(entry, model)
    try:
        engine = pipeshard.initialize(
            model.train(), pp_size=dist.get_world_size(), num_microbatches=1, dry_run_input=sample, verify=False
        )
    except PipeshardError as error:
        return Verdict("refused", reason=f"{type(error).__name__}: {error}")
    assert engine.model is not None
    engine.model.eval()
    same, worst = True, 0.0
    for mode, unsplit in expected.items():
        split = generated(engine.model, prompts[mode], MODES[mode])
        if not torch.equal(tokens(split), tokens(unsplit)):
            return Verdict("wrong", 1.0, f"{mode}: {tokens(split).tolist()}, unsplit {tokens(unsplit).tolist()}")
        pairs = [*zip(scores(split), scores(unsplit), strict=True)]
        same = same and all(torch.equal(a, b) for a, b in pairs)
        worst = largest_error([worst, *(score_error(a, b) for a, b in pairs)])
        if worst > CLOSE:
            return Verdict("wrong", worst, f"{mode}: scores differ by {worst:.1e} of the largest one")
    return Verdict("bitwise" if same else "close", worst, ", ".join(expected))


def draws(model: Any, prompt: dict[str, Tensor]) -> bool:
    """Whether the forward uses random numbers (noise in an encoder). A pipeline uses other numbers than one process."""
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    model.generate(**prompt, max_new_tokens=1, **GREEDY)
    return not torch.equal(before, torch.get_rng_state())


def generated(model: Any, prompt: dict[str, Tensor], options: dict[str, Any]) -> Any:
    torch.manual_seed(SEED)
    given = {name: value.clone() for name, value in prompt.items()}
    return model.generate(**given, max_new_tokens=NEW, min_new_tokens=NEW, **options)


def tokens(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.sequences


def scores(output: Any) -> tuple[Tensor, ...]:
    return () if isinstance(output, Tensor) else output.scores


def score_error(split: Tensor, unsplit: Tensor) -> float:
    """The largest difference of a token's scores, relative to the largest one. Both must be finite alike."""
    finite = unsplit.isfinite()
    if not torch.equal(split.isfinite(), finite):
        return float("inf")
    difference = (split - unsplit)[finite]
    return float(difference.abs().max() / unsplit[finite].abs().max().clamp(min=1e-6)) if finite.any() else 0.0


def padded(entry: Entry, data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Prompts of unequal lengths, padded on the left, if the model continues its prompt; otherwise the given batch."""
    ids, mask = data.get("input_ids"), data.get("attention_mask")
    if entry.task not in ("causal-lm", "image-text-to-text") or ids is None or mask is None or ids.ndim != 2:
        return data
    more = torch.full((len(ids), PADDED), SPECIAL["pad_token_id"])
    real = torch.arange(PADDED) >= torch.tensor([PADDED - row % (PADDED + 1) for row in range(len(ids))])[:, None]
    text = torch.randint(FIRST_TEXT, VOCABULARY, more.shape, generator=torch.Generator().manual_seed(SEED))
    longer = dict(data)
    longer["input_ids"] = torch.cat([torch.where(real, text, more), ids], 1)
    longer["attention_mask"] = torch.cat([real.to(mask.dtype), mask], 1)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in data:
            longer[name] = nn.functional.pad(data[name], (PADDED, 0))
    return longer


def with_caches(model: nn.Module) -> None:
    """Enable the model's caches, as for a user: the models of the parity sweep are built without caches."""
    config: Any = model.config
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "use_cache", None) is False:
            part.use_cache = True


WATCHDOG = 90.0  # seconds


def row_of(pool: Pool, entry: Entry, p: int) -> Row:
    """The result of the entry on p ranks."""
    return judged(entry, p, lambda: pool.run(check_generation, p, entry, timeout=WATCHDOG))


if __name__ == "__main__":
    sys.exit(run(PAGE, row_of))
