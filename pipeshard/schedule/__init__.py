"""Schedules: programs as data, and their analysis without running a model.

A schedule is a pure function from (p ranks, m microbatches, v chunks per rank) to a `Program`. `add_communication` adds
a program's messages, `simulate` proves that the program terminates and computes its time, and `draw_text` and
`draw_timeline` draw the program. If messages run as GPU kernels, use `add_ordered_communication` instead of
`add_communication`.
"""

from pipeshard.schedule.draw import draw_text, draw_timeline
from pipeshard.schedule.given import program_of
from pipeshard.schedule.passes import add_communication, shorten_cooldown
from pipeshard.schedule.program import Action, Kind, Program, forward_only
from pipeshard.schedule.schedules import (
    SCHEDULES,
    gpipe,
    interleaved,
    make_program,
    num_chunks,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zbv,
)
from pipeshard.schedule.simulate import Simulation, Span, simulate, simulate_parts
from pipeshard.schedule.streams import add_ordered_communication

__all__ = ["SCHEDULES", "Action", "Kind", "Program", "forward_only", "gpipe", "interleaved", "make_program"]
__all__ += ["num_chunks", "one_f_one_b", "program_of", "shorten_cooldown", "v_half", "v_min", "zb_h1", "zbv"]
__all__ += ["Simulation", "Span", "add_communication", "add_ordered_communication", "draw_text", "draw_timeline"]
__all__ += ["simulate", "simulate_parts"]
