"""Advice: which schedule to use and why, and what would help where none fits."""

from collections.abc import Sequence

from pipeshard.planner.candidate import Candidate
from pipeshard.planner.plan import Estimate
from pipeshard.planner.sizes import format_bytes

# From the simplest on: less to go wrong, fewer messages, less memory.
SIMPLEST = ("1f1b", "zb-h1", "gpipe", "zbv", "interleaved")
NEAR = 0.03  # what a simpler schedule may be slower


def recommend(estimates: Sequence[Estimate], limit: int | None) -> tuple[Estimate, str]:
    """The fastest schedule that fits, or a simpler one that is nearly as fast, and why, in one sentence."""
    possible = [e for e in estimates if not e.problem]
    fitting = [e for e in possible if e.fits is not False] or possible
    fastest = min(fitting, key=lambda e: (e.time, SIMPLEST.index(e.schedule), e.num_model_chunks))
    near = [e for e in fitting if e.time <= fastest.time * (1 + NEAR)]
    best = min(near, key=lambda e: (SIMPLEST.index(e.schedule), e.num_model_chunks))
    if best is not fastest:
        why = f"simpler than {fastest.name}, which would be {1 - fastest.time / best.time:.1%} faster"
    elif len(fitting) == 1:
        why = "nothing else can be used" if len(possible) == 1 else "nothing else fits"
    else:
        other = min((e for e in fitting if e is not best), key=lambda e: e.time)
        lead = 1 - best.time / other.time
        fits = "" if limit is None else " that fits"
        ahead = f"the fastest{fits}, {lead:.1%} ahead of {other.name}"
        why = ahead if lead else f"as fast as {other.name}, and simpler"
    memory = f"rank {best.fullest} takes most memory, {format_bytes(best.peak)}"
    return best, f"{best.name}: {why}; {memory}{'' if limit is None else f' of {format_bytes(limit)}'}."


def what_would_help(candidate: Candidate, others: Sequence[Estimate]) -> str:
    """What one could do where `candidate` takes too much."""
    limit = candidate.subject.limit or 0
    fitting = [e.name for e in others if e.fits]
    static = sum(memory.total - memory.activations for memory in candidate.memory)
    least = -(-static // limit)
    hints = [f"schedule {' or '.join(fitting)}, which fits"] if fitting else []
    if any(memory.activations > memory.total // 4 for memory in candidate.memory):
        hints.append("shorter or fewer samples in a microbatch")
        subject = candidate.subject
        if not subject.recomputed and getattr(subject.model, "supports_gradient_checkpointing", False):
            hints.append("activation recompute (model.gradient_checkpointing_enable())")
    p = len(candidate.memory)
    needs = f" (parameters, gradients and optimizer states alone take at least {least} ranks)" if least > p else ""
    return ", ".join([*hints, f"more stages than {p}{needs}"])
