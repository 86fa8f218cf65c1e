"""Planner: what a pipeline would take and how fast it would be, without running it.

`plan` traces a model (on meta too) at the sizes of a microbatch, cuts it for every schedule, simulates them, and says
which to use. `profile_units` measures the units where estimates are not good enough.
"""

from pipeshard.planner.plan import Plan
from pipeshard.planner.planner import plan
from pipeshard.planner.profile import Profile, profile_units

__all__ = ["Plan", "Profile", "plan", "profile_units"]
