"""Recorder: gathers what every rank did in a step, on one clock."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from pipeshard.runtime.agreement import gather
from pipeshard.runtime.clock import offsets
from pipeshard.runtime.recording import Recording
from pipeshard.schedule import Program, Span


class Recorder:
    """Makes a Recording of each rank's own times; the ranks of `group`, which runs the program, do so together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self._clocks = group, list[float]()

    def recording(self, program: Program, spans: Sequence[Span], waited: Mapping[int, float], step: int) -> Recording:
        """Of step `step`: this rank's compute actions, and how long it waited for messages of each other rank."""
        rank, clocks = self.group.rank(), self._clocks or offsets(self.group)
        self._clocks = clocks
        lengths = [sum(action.kind.is_compute for action in actions) for actions in program.ranks]
        longest = max(lengths)
        times = torch.zeros(longest + len(lengths), 2, dtype=torch.float64)
        for k, span in enumerate(spans):
            times[k, 0], times[k, 1] = span.start - clocks[rank], span.end - clocks[rank]
        for other, seconds in waited.items():
            times[longest + other, 0] = seconds
        tables = gather(times, self.group).tolist()
        of_others = [[seconds for seconds, _ in table[longest:]] for table in tables]
        return Recording.of(program, [table[:n] for table, n in zip(tables, lengths)], of_others, step)
