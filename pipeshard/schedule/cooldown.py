"""Cooldown: the end of a program, where a rank has no forward left and others wait for its gradients."""

import dataclasses
from collections.abc import Iterator, Sequence

from pipeshard.schedule.action import Action, Kind
from pipeshard.schedule.program import Program


def shorten_cooldown(program: Program) -> Program:
    """`program` with each whole B after its rank's last F split in B and W, if its gradient goes to another rank.

    W comes right after B, so that all there is to it is that the gradient leaves in between. 1F1B with p=3, m=4, where
    a whole B takes as long as B and W:

    rank 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- B2 -- B3 --
    rank 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 W2 B3 W3 ..
    rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 W3 .. ..

    In 1F1B and GPipe rank 0 then idles for (p-1)(F+B) instead of (p-1)(F+B+W), as long as W <= F, and no rank keeps
    more microbatches of activations. It is the start of what a zero bubble schedule does (Qi et al. 2023,
    arXiv:2401.10241); Megatron-LM does it for the weight of the head alone.
    """
    ranks = (tuple(_with_weights(program, actions)) for actions in program.ranks)
    return dataclasses.replace(program, ranks=tuple(ranks))


def _with_weights(program: Program, actions: Sequence[Action]) -> Iterator[Action]:
    forwards_left = sum(action.kind is Kind.F for action in actions)
    split = {action[1:] for action in actions if action.kind is Kind.W}
    for action in actions:
        kind, i, stage = action
        yield action
        forwards_left -= kind is Kind.F
        sends = kind is Kind.B and program.crosses(Kind.SEND_B, stage)
        if sends and not forwards_left and (i, stage) not in split:
            yield Action(Kind.W, i, stage)
