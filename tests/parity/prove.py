"""Prove: one entry, compared with the unsplit model by `pipeshard.verify`, with all stages in this process."""

from __future__ import annotations

import torch

from pipeshard import PipelinePlugin
from pipeshard.batch.read import read_batch
from pipeshard.verify.decide import alone
from pipeshard.verify.proof import EXACT, PARTLY, UNPROVEN, Proof
from pipeshard.verify.proof import prove as prove_model
from tests.parity.build import batch, build
from tests.parity.check import Verdict
from tests.parity.entries import Entry


def prove(entry: Entry, p: int) -> Verdict:
    """Two steps of p stages, in two microbatches or, where its inputs cannot be cut, in one."""
    try:
        model = build(entry)
        data = batch(entry, model)
    except Exception as error:
        return Verdict("untrainable", reason=f"{type(error).__name__}: {error}")
    for m in (2, 1):
        with alone():
            plugin = PipelinePlugin(p, num_microbatches=m)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        proof = prove_model(plugin.config, plugin.device, model, optimizer, None, read_batch(model, data))
        if proof.kind != UNPROVEN:
            break
    return _verdict(proof, m)


def _verdict(proof: Proof, m: int) -> Verdict:
    if proof.kind in (EXACT, PARTLY):
        notes = [*(["in one microbatch: its inputs cannot be cut"] if m == 1 else []), *proof.but]
        return Verdict("close", reason="; ".join(notes))
    if proof.kind == UNPROVEN:
        return Verdict("untrainable" if "the unsplit model" in proof.reason else "refused", reason=proof.reason)
    return Verdict("wrong", reason=proof.reason)
