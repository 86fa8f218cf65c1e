"""Slicing: one entry trained in slices of its sequence, and compared with the same model unsplit.

`python -m tests.parity.slicing` runs all causal language models, or the named ones, and writes a page.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeshard import PipelinePlugin
from pipeshard.batch.batch import Batch
from pipeshard.batch.read import read_batch
from pipeshard.errors import ConfigurationError
from pipeshard.hf import media_kind, padding_token
from pipeshard.slices.cut import with_padding
from pipeshard.slices.refusals import refuse_unsliceable
from pipeshard.verify.decide import alone
from pipeshard.verify.proof import DIFFERENT, UNPROVEN, Proof, prove
from tests.parity.build import batch, build
from tests.parity.check import Verdict
from tests.parity.command import Page, run
from tests.parity.entries import Entry
from tests.parity.fixes import UNTRAINABLE
from tests.parity.inputs import make_batch
from tests.parity.report import Row
from tests.parity.sweep import judged, untrainable
from tests.pool import Pool

SLICES, M, STEPS = 3, 2, 3
PAGE = Page(
    command="tests.parity.slicing",
    target="make parity-slices",
    title="Parity of slices",
    tasks=("causal-lm",),
    has_notes=True,
    text=(
        "Of {entries} causal language models, {able} train unsplit. **{exact}** of these ({share:.1%}) train in slices "
        f"({SLICES} for each of {M} microbatches) on p = {{ps}} stages as they do unsplit: with the same loss, "
        "gradients, norm, and parameters after three steps. The table below lists all other models, and models for "
        "which pipeshard refuses batches with padding. Models of images and audio train on text alone, and encoders "
        "with a single stack (BERT) train as decoders (is_decoder=True)."
    ),
    meaning={
        "close": "the proof at boost finds no difference",
        "refused": "booster.boost, or the first step, raises an error that says why",
        "untrainable": "the model does not train unsplit",
        "crash": "an error that is not pipeshard's",
        "hang": "a rank waits forever",
    },
)


def check_slices(entry: Entry, p: int) -> Verdict:
    """Run three steps on p stages, all in this process, on batches without and with padding."""
    try:
        model = _built(entry)
        data = batch(entry, model)
        if any(map(media_kind, data)):
            data = make_batch(entry.task, model)
        unsplit = model(**data).loss
    except Exception as error:
        return Verdict("untrainable", reason=f"{type(error).__name__}: {error}")
    if unsplit is None:
        return Verdict("untrainable", reason="its forward gives no loss")
    try:
        refuse_unsliceable(model)
    except ConfigurationError as error:
        return Verdict("refused", reason=f"{type(error).__name__}: {error}")
    proof = _proof(model, read_batch(model, data), p)
    if proof.kind in (UNPROVEN, DIFFERENT):
        kind = "untrainable" if "the unsplit model" in proof.reason and proof.kind == UNPROVEN else "refused"
        return Verdict(kind, reason=proof.reason)
    sample = with_padding(read_batch(model, data), padding_token(model))
    of_padded = _proof(model, sample, p)
    if of_padded.kind == DIFFERENT:
        return Verdict("close", reason=f"batches with padding are refused: {of_padded.reason}")
    return Verdict("close", reason=of_padded.reason)


def _built(entry: Entry) -> nn.Module:
    """The model. If it can be an encoder or a decoder, it is a decoder."""
    model = build(entry)
    config: Any = model.config
    is_encoder = getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder
    return build(entry, is_decoder=True) if is_encoder else model


def _proof(model: nn.Module, sample: Batch, p: int) -> Proof:
    with alone():
        plugin = PipelinePlugin(p, num_microbatches=M, num_slices=SLICES, max_norm=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return prove(plugin.config, plugin.device, model, optimizer, None, sample, steps=STEPS)


WATCHDOG = 240.0  # seconds


def row_of(pool: Pool, entry: Entry, p: int) -> Row:
    """The result of the entry on p stages."""
    is_able = str(entry) not in UNTRAINABLE
    run_it = partial(pool.run, check_slices, 1, entry, p, timeout=WATCHDOG)
    return judged(entry, p, run_it if is_able else lambda: [untrainable(entry)])


if __name__ == "__main__":
    sys.exit(run(PAGE, row_of, ranks=lambda p: 1))
