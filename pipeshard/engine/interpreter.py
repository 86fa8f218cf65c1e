"""Interpreter: runs one rank's actions of a Program on the rank's stages, and sends and receives messages with a P2P.

torch.distributed.pipelining has a hand-written loop for each schedule. In pipeshard, a schedule is data, and its
messages are also actions, so one loop runs every schedule. It runs exactly the Program that was proven deadlock-free.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from pipeshard.distributed.collectives import as_bytes
from pipeshard.distributed.p2p import P2P, wait_for
from pipeshard.distributed.progress import own_progress
from pipeshard.engine.stage import Stage
from pipeshard.engine.timeline import Timeline
from pipeshard.private import profiler_is_enabled
from pipeshard.schedule.program import Action, Kind

MAX_PENDING_SENDS = 4  # for a P2P that does not report completion


class Interpreter:
    """Runs actions in order. Waits for a receive when its tensors are needed, and for sends at the end of the run. If
    the P2P does not report whether sends have completed, at most `MAX_PENDING_SENDS` sends are pending at a time.

    `placement[s]` is the rank of stage s. `timeline` contains the times of the last run. Under torch.profiler, each
    action appears as a range named after the action, such as `F3@1`.
    """

    def __init__(self, placement: Sequence[int], p2p: P2P | None, device: torch.device) -> None:
        self.placement, self.device, self.p2p = placement, device, p2p
        self.timeline = Timeline(device)
        self._stages: Mapping[int, Stage] = {}
        self._incoming: dict[Action, tuple[list[Tensor], list[dist.Work]]] = {}
        self._outgoing: dict[Action, list[Tensor]] = {}
        self._sends: deque[tuple[list[dist.Work], list[Tensor], int]] = deque()

    def run(
        self, stages: Mapping[int, Stage], actions: Sequence[Action], stage_done: Callable[[int], None] | None = None
    ) -> None:
        """Run all actions on this rank's `stages`, a map from stage index to Stage. `stage_done(s)` is called as soon
        as the last backward of stage s has finished."""
        self._stages = stages
        self.timeline.begin()
        ends = {action.stage: action for action in actions if action.kind in (Kind.B, Kind.W)} if stage_done else {}
        profiled = profiler_is_enabled()
        try:
            for action in actions:
                own_progress().start(action)
                with record_function(str(action)) if profiled else contextlib.nullcontext():
                    if action.kind.is_compute:
                        self._compute(action)
                    elif action.kind.is_receive:
                        self._receive(action)
                    else:
                        self._send(action)
                self._release_sent()
                if stage_done and ends.get(action.stage) is action:
                    stage_done(action.stage)
            self.timeline.end()
            while self._sends:
                self._release()
        finally:
            self._stages = {}
            self._incoming.clear()
            self._outgoing.clear()
            self._sends.clear()

    def _compute(self, action: Action) -> None:
        kind, i, stage = action.kind, action.microbatch, self._stages[action.stage]
        self.timeline.turn(action)
        taken = self._take(action) if kind is not Kind.W else []
        results: list[Tensor] = []
        if kind is Kind.F:
            results = stage.forward(i, taken)
        elif kind is Kind.B:
            results = stage.backward(i, taken)
        else:
            stage.weight(i)
        if results:
            self._outgoing[action] = results
        self.timeline.done()

    def _take(self, action: Action) -> list[Tensor]:
        """The input tensors of a compute action, received from another rank or taken from the adjacent stage on this
        rank. The list is empty for a forward of the first stage and for a backward of the last stage."""
        receive = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
        message = Action(receive, action.microbatch, action.stage)
        if message not in self._incoming:
            return self._outgoing.pop(Action(action.kind, action.microbatch, message.partner.stage), [])
        tensors, works = self._incoming.pop(message)
        if works:
            assert self.p2p is not None
            source = self.placement[message.partner.stage]
            wait_for(works, self.p2p, source)
            self.timeline.received(source, (self.p2p.ranks[source],))
        return tensors

    def _receive(self, action: Action) -> None:
        assert self.p2p is not None
        stage = self._stages[action.stage]
        specs = stage.values_in if action.kind is Kind.RECV_F else stage.gradients_in
        source = self.placement[action.partner.stage]
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in specs(action.microbatch)]
        works = [self.p2p.receive(as_bytes(tensor), source) for tensor in tensors]
        self._incoming[action] = tensors, works

    def _send(self, action: Action) -> None:
        assert self.p2p is not None
        compute = Kind.F if action.kind is Kind.SEND_F else Kind.B
        destination = self.placement[action.partner.stage]
        tensors = self._outgoing.pop(Action(compute, action.microbatch, action.stage), [])
        self._sends.append(([self.p2p.send(as_bytes(tensor), destination) for tensor in tensors], tensors, destination))

    def _release_sent(self) -> None:
        while self._sends and all(work.is_completed() for work in self._sends[0][0]):
            self._release()  # returns immediately, or raises the send's error
        while self.p2p is not None and not self.p2p.tells and len(self._sends) > MAX_PENDING_SENDS:
            self._release()

    def _release(self) -> None:
        assert self.p2p is not None
        works, _, destination = self._sends.popleft()
        wait_for(works, self.p2p, destination)
