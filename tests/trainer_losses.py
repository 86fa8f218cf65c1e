"""Trainer losses: 50 steps of each kind of training, on two stages and in one process, and their differences.

`python -m tests.trainer_losses` runs all of them, and writes the table in docs/trainer.md.
"""

from __future__ import annotations

import re
import tempfile
from typing import Any

from tests import trls
from tests.pool import Pool
from tests.trainer_features import PAGE
from tests.trainers import run, run_pipeline
from tests.unsplit import largest_error

BEGIN, END = "<!-- losses -->\n", "<!-- end of losses -->"
STEPS, CLOSE = 50, 1e-6
TRAINERS = {
    "causal LM, 3 accumulation steps": "causal",
    "classification (BERT, cosine schedule)": "classifier",
    "sequence to sequence (T5)": "seq2seq",
}
OF_TRL = {
    "SFT with packing": "packing",
    "SFT with LoRA": "lora",
    "DPO with LoRA: the reference is the model with adapters disabled": "dpo-lora",
    "DPO: the reference is a second model": "dpo",
}


def losses(pool: Pool, kind: str, folder: str, steps: int = STEPS) -> tuple[list[float], list[float]]:
    """The losses of one process, and the losses of two stages, which must be equal on both ranks."""
    options: dict[str, Any] = {"max_steps": steps, "timeout": 600}
    if kind in OF_TRL.values():
        expected = trls.run(kind, folder, max_steps=steps, eval_strategy="no")
        found = pool.run(trls.run, 2, kind, folder, {"pp_size": 2}, eval_strategy="no", **options)
    else:
        expected = run(kind, folder, max_steps=steps)
        found = pool.run(run_pipeline, 2, kind, folder, plugin={"pp_size": 2}, **options)
    one, *two = ([entry["loss"] for entry in logs if "loss" in entry] for logs in (expected, *found))
    assert two[0] == two[1] and len(one) == len(two[0]) == steps
    return one, two[0]


def farthest(one: list[float], two: list[float]) -> float:
    """The largest relative difference."""
    return largest_error((a - b) / a for a, b in zip(one, two, strict=True))


def main() -> int:
    pool, rows = Pool(), []
    for name, kind in {**TRAINERS, **OF_TRL}.items():
        with tempfile.TemporaryDirectory() as folder:
            one, two = losses(pool, kind, folder)
        rows.append((name, one[0], one[-1], farthest(one, two)))
        print(*rows[-1], flush=True)
    pool.shutdown()
    lines = [f"| {name} | {first:.4f} | {last:.4f} | {far:.1e} |" for name, first, last, far in rows]
    table = "\n".join(["| training | first loss | last loss | largest difference |", "|---|---|---|---|", *lines, ""])
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: f"{BEGIN}{table}{END}", PAGE.read_text()))
    return int(any(far > CLOSE for *_, far in rows))


if __name__ == "__main__":
    raise SystemExit(main())
