"""Planner: estimates of a pipeline's memory and time, without running it.

`plan` traces a model, which may be on meta, with the sizes of a microbatch. It cuts the model for each schedule,
simulates the schedules, and recommends one. If the estimates are not accurate enough, `profile_units` measures the
times of the units.
"""

from pipeshard.planner.plan import Plan
from pipeshard.planner.planner import plan
from pipeshard.planner.profile import Profile, profile_units

__all__ = ["Plan", "Profile", "plan", "profile_units"]
