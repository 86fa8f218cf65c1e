"""Schedules: programs as data, and what can be said about them without running a model.

A schedule is a pure function from (p ranks, m microbatches) to a `Program`; `add_communication` adds its messages,
`simulate` proves that it ends and says how long it takes, `draw_text` and `draw_timeline` show it.
"""

from pipeshard.schedule.communicate import add_communication
from pipeshard.schedule.draw import draw_text, draw_timeline
from pipeshard.schedule.program import (
    SCHEDULES,
    Action,
    Kind,
    Program,
    check,
    forward_only,
    gpipe,
    make_program,
    one_f_one_b,
    partner,
)
from pipeshard.schedule.simulate import Simulation, Span, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Program",
    "Simulation",
    "Span",
    "add_communication",
    "check",
    "draw_text",
    "draw_timeline",
    "forward_only",
    "gpipe",
    "make_program",
    "one_f_one_b",
    "partner",
    "simulate",
]
