"""Routes: caches the routes of traced microbatches through a rank's stages."""

import functools
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch.distributed as dist

from pipeshard.engine.sliced import SlicedRoutes
from pipeshard.errors import TraceError
from pipeshard.graph.dataflow import Dataflow, Wanted
from pipeshard.graph.places import format_path
from pipeshard.split.boundary import boundaries
from pipeshard.split.policy import Policy, refuse_hooks, refuse_unsplittable
from pipeshard.split.route import Recompute, Route

logger = logging.getLogger("pipeshard")

PREVENTED = (
    "%s is not recomputed, because its forward stores a value at %s, which recomputation would store again. This unit, "
    "and other units that store values, keep their activations. To recompute a unit, remove the code or the hook that "
    "stores the value"
)


class Routes:
    """Caches the routes of each Dataflow for each set of requested outputs."""

    def __init__(self, policy: Policy, recompute: Recompute) -> None:
        self.policy, self.recompute = policy, recompute
        self._routes: dict[tuple[int, Wanted], list[Route]] = {}
        self._sliced: dict[tuple[int, Wanted], SlicedRoutes] = {}

    def forget(self, flows: Collection[int]) -> None:
        """Discard the routes of these Dataflows, given by their ids."""
        self._routes = {key: routes for key, routes in self._routes.items() if key[0] not in flows}
        self._sliced = {key: routes for key, routes in self._sliced.items() if key[0] not in flows}

    def clear(self) -> None:
        self._routes.clear()
        self._sliced.clear()

    def of(self, flow: Dataflow, outputs: Wanted) -> list[Route]:
        """The routes of microbatches of this Dataflow, one for each stage of this rank."""
        key = id(flow), outputs  # a route references its flow, so the id is not reused
        if key not in self._routes:
            stages = self.policy.partition.of_calls(flow)
            refuse_unsplittable(self.policy.model, flow, stages, self.policy.placement)
            self.refuse_released(flow, outputs)
            refuse_hooks(flow, stages, len(self.policy.placement))
            crossing = boundaries(flow, stages, len(self.policy.placement), outputs)
            again = {s: self.recompute.calls(flow, stages, s, self.policy.units) for s in self.policy.chunks}
            self._warn_of_prevented(flow, stages)
            self._routes[key] = [Route.of(flow, stages, s, crossing, outputs, again[s]) for s in self.policy.chunks]
        return self._routes[key]

    def sliced(self, flow: Dataflow, outputs: Wanted) -> SlicedRoutes:
        """The routes of this Dataflow for a step with slices. The head is a separate stage after the last stage."""
        key = id(flow), outputs
        if key not in self._sliced:
            ordinary = self.of(flow, outputs)  # raises an error if the model cannot be split
            stages, head = self.policy.partition.of_calls(flow), len(self.policy.placement)
            crossing = boundaries(flow, stages, head + 1, outputs)
            again = [{k for k, step in enumerate(route.steps) if step.again} for route in ordinary]
            chunks = zip(self.policy.chunks, again, strict=True)
            of_chunks = [Route.of(flow, stages, s, crossing, outputs, recomputed) for s, recomputed in chunks]
            self._sliced[key] = SlicedRoutes(of_chunks, Route.of(flow, stages, head, crossing, outputs))
        return self._sliced[key]

    def _warn_of_prevented(self, flow: Dataflow, stages: Sequence[int]) -> None:
        """Warn, on the first rank, if units of any rank are not recomputed because they store values at places."""
        if dist.is_initialized() and dist.get_rank() > 0:
            return
        units, prevented = self.policy.units, set[int]()
        leaving_nothing = replace(flow, calls=tuple(replace(call, parts=()) for call in flow.calls))
        for stage in range(len(self.policy.placement)):
            chosen, wanted = (self.recompute.calls(f, stages, stage, units) for f in (flow, leaving_nothing))
            prevented |= wanted - chosen if len(wanted) > len(chosen) else set()
        if prevented:
            call = flow.calls[min(prevented)]
            place = next(part.source.place for part in call.parts if part.source.place)
            what = f"{call.unit} ({type(units[call.unit]).__name__})"
            _warn_once(PREVENTED % (what, format_path(place[1:]) or "its arguments"))

    def refuse_released(self, flow: Dataflow, outputs: Wanted = False) -> None:
        """Raise TraceError if glue, or a unit, reads a parameter that the stage has released. With another batch, the
        forward may take a different path than at boost, and read other parameters."""
        stages = self.policy.partition.of_calls(flow)
        uses = [(call.reads, stage) for call, stage in zip(flow.calls, stages, strict=True)]
        for use, stage in [*uses, (flow.needed(outputs), len(self.policy.placement) - 1)]:
            released = sorted(use.parameters - self.policy.ownership.held[self.policy.placement[stage]])
            if released:
                raise TraceError(
                    f"unlike in the trace at boost, the model reads {released[0]} outside its unit on stage {stage}, "
                    "which does not hold this parameter. If the read depends on the batch, pass dry_run_input=<a batch "
                    "of this kind> to PipelinePlugin. If the read depends on the mode (train or eval) or an attribute, "
                    "read the parameter in both modes and for every value of the attribute, or use one stage "
                    "(pp_size=1)"
                )


@functools.cache
def _warn_once(text: str) -> None:
    """Log a warning only once per process. The proof at boost has its own Routes, which would repeat the warning."""
    logger.warning(text)
