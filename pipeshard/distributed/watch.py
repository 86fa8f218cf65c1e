"""Watch: a thread that looks after this process's calls, so that what fails on one rank ends all of them, by name."""

import contextlib
import logging
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import torch.distributed as dist

from pipeshard.distributed.failures import (
    ENDED,
    GONE,
    RAISED,
    STALLED,
    Alarm,
    Fault,
    RollCall,
    abort_groups,
    has_agents,
)
from pipeshard.distributed.progress import NOW, main_stack
from pipeshard.errors import RankError

logger = logging.getLogger("pipeshard")
PERIOD = 0.25  # seconds between two looks at the store
SETTLED = 0.3  # seconds after which a wait is taken for one that will not end, where a rank has failed
GRACE = 3.0  # seconds that a call has to end by itself, where a rank has failed; then it is interrupted
LAST = 6.0  # seconds after which the process is ended
SILENT = 12  # looks after which a store is taken for one that does not answer, where nothing moves, or one asks it
PATIENCE = 0.5  # seconds in which a lost connection is explained by the rank that failed, or never
OTHERS = 3  # how much longer than a step's action a save, a load or a boost may stand still
LOST = re.compile(r"gloo/transport|pair closure|Connection (was )?(closed|reset)|Broken pipe|NCCL|nccl")
NOTE = "pipeshard: "  # how a line below an error begins that says where it was
STEPS = ("execute_pipeline", "optimizer.step")


class Interrupt(RankError):
    """What interrupts the thread that trains, wherever it is."""


class Watch:
    """Ranks tell each other of failures by the store in which they met, each under the number of its call, which is the
    same on all of them. The thread of this class looks there; where another rank has failed while this one waits, it
    breaks the connections, and the wait raises. What raises in `call` is told to the others.

    An error that all ranks raise in the same call (a batch that none can use) breaks nothing: each has left the call
    before it is interrupted, and the next call has a number of its own. After any other failure groups are broken, and
    each further call raises RankError.

    Args:
        timeout: seconds after which an action of a step, or a wait, is taken for stalled; None for never. "adaptive":
            20 times the longest one so far, but 30 seconds at least, and 600 until a step is done.
        named: what errors call a rank, as `rank 2 (stage 2)`.
        well: the number of the last call before, if it ended well.
    """

    def __init__(self, timeout: float | str | None, named: Callable[[int], str], well: int = -1) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.world: dist.ProcessGroup = world
        self.rank, self.timeout = dist.get_rank(), timeout
        self.named = named
        self.fault: Fault | None = None  # why groups are broken
        self._alarm = Alarm(self.rank, dist.get_world_size())
        self._roll = RollCall(self._alarm.store, self.rank, dist.get_world_size())
        self._heard: tuple[Fault, int, float] | None = None  # with the number of the call, and when
        self.interrupt: Callable[[], None] = lambda: None  # makes the thread that trains raise an Interrupt
        self._broken = False
        self._interrupted, self._well = -1, well  # the number of the call that was, and of the last one that ended well
        self._ticks = 0  # looks since the store has last answered
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.start()

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A call of the user's that every rank makes, and none inside of another.

        Raises RankError instead of what came of another rank's failure.
        """
        NOW.enter(name)
        try:
            if self.fault is not None:
                raise RankError(f"this process cannot go on, since {self.fault}. Start the ranks again", self.fault)
            yield
            self._well = NOW.number
        except BaseException as error:
            told = self._explained(error)
            if told is None:
                raise
            raise told from None if told.fault.kind == RAISED else error
        finally:
            NOW.leave()

    def start(self) -> None:
        self._stop.clear()
        targets = {"pipeshard-watch": self._look, "pipeshard-listen": self._listen}
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for name, target in targets.items()]
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """End the threads, if the process is to go on without them, or to end; False if one hangs at a silent store."""
        self._stop.set()
        for thread in self._threads[: 1 if self._alarm.gone else 2]:  # who asks a silent store hangs there
            thread.join(timeout=2)
        return not any(thread.is_alive() for thread in self._threads)

    # In the thread that trains.

    def _explained(self, error: BaseException) -> RankError | None:
        """What to raise in the place of an error that another rank has caused; None where it is this one's own."""
        lost, number = _is_lost(error), NOW.number
        own, mine = not lost and not isinstance(error, Interrupt), self._fault_of(error, lost)

        def ask() -> Fault:
            fault = self._told(0.0 if own else PATIENCE) or self._alarm.tell(mine, number)
            return self._roll.result(fault, self.named) if fault.is_asked and not own else fault

        try:
            fault = self._alarm.ask(ask)
        except RuntimeError:
            fault = self._without_store()
        if not own or NOW.in_flight:
            self._break(fault)
        if own:
            error.add_note(f"{NOTE}this is {self.named(self.rank)}, in {NOW.where}")
            return None
        return RankError(str(fault), fault)

    def _fault_of(self, error: BaseException, lost: bool) -> Fault:
        if isinstance(error, RankError) and error.fault is not None:  # of an earlier call
            return error.fault
        if lost:
            return Fault(GONE, -1, "", NOW.where, message=f"a connection broke in {NOW.where}", told_by=self.rank)
        if isinstance(error, Exception):
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            return self._own(RAISED, f"{type(error).__name__}: {error}", NOW.module(frames))
        return self._own(ENDED, _ending(error))

    def _own(self, kind: str, message: str, module: str = "") -> Fault:
        return Fault(kind, self.rank, self.named(self.rank), NOW.where, module, message, self.rank)

    def leaving(self, kind: str, message: str) -> None:
        """Tell what ends this process between two calls, to ranks that will wait for it in the next."""
        with contextlib.suppress(RuntimeError):
            if not NOW.call and self.fault is None and dist.group.WORLD is self.world:
                fault = self._own(kind, message)
                self._alarm.ask(lambda: self._alarm.tell(fault, NOW.number + 1))

    def left(self) -> bool:
        """At the end of the process; False if a thread hangs at a silent store."""
        stopped = self.stop()
        if stopped and dist.group.WORLD is self.world:
            self._alarm.leave(without=self._roll.silent)
        return stopped

    # In both.

    def _told(self, patience: float = 0.0) -> Fault | None:
        """What was told of the call before, if that went well here, or of this one (or the next, between two)."""
        number = NOW.number + (not NOW.call)
        return self._alarm.told([*([number - 1] if self._well == number - 1 else []), number], patience)

    def _break(self, fault: Fault) -> None:
        self.fault = fault
        if not self._broken:
            self._broken = True
            abort_groups()

    def _without_store(self) -> Fault:
        holder = "the agent of the first machine holds it" if has_agents() else f"{self.named(0)} holds it"
        why = f"{holder}, which was killed, is stopped, or is cut off"
        return Fault(GONE, 0, self.named(0), message=f"the store in which the ranks met does not answer: {why}")

    # In the threads that watch: one listens to the store, which may be silent, the other one looks at the clock.

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone, with the last ranks or too early
            while self._goes_on():
                self._once()
                self._ticks = 0
        if not self._stop.is_set():
            self._alarm.gone = True

    def _look(self) -> None:
        while self._goes_on():
            self._ticks += 1
            if self._ticks > SILENT and (self._alarm.asked or self._is_stalled()):
                self._alarm.gone = True
            if NOW.call and self._alarm.gone and self._heard is None:
                self._heard = self._without_store(), NOW.number, time.monotonic()
            self._press()

    def _goes_on(self) -> bool:
        return not self._stop.wait(PERIOD) and dist.is_initialized() and dist.group.WORLD is self.world

    def _once(self) -> None:
        number = NOW.number + (not NOW.call)
        fault = self._told()  # asked also where it is known, so that a store which falls silent is noticed
        if self._heard is not None and self._heard[1] == number:
            return
        if fault is None and self._is_stalled():
            still = f"nothing has moved for {self.limit:.3g} seconds"
            fault = self._alarm.tell(Fault(STALLED, -1, "", message=still, told_by=self.rank), number)
        self._heard = None
        if fault is not None and fault.rank != self.rank:
            if fault.is_asked:
                self._roll.answer(fault.number)
            self._heard = fault, number, time.monotonic()

    def _press(self) -> None:
        """Where a rank has failed in the call that runs here: first its waits raise, then anything, then it ends."""
        heard = self._heard
        if heard is None or not self.interrupts:
            return
        fault, number, at = heard
        now = time.monotonic()
        if fault.is_asked or (NOW.waits and now - NOW.since > SETTLED) or now - at > GRACE:
            self._break(fault)
        if now - at > GRACE and self._interrupted != number:
            self._interrupted = number
            self.interrupt()
        if now - at > LAST:
            self._end(fault)

    @property
    def interrupts(self) -> bool:
        """Whether the thread that trains is still where it is to be interrupted."""
        heard = self._heard
        if heard is None or heard[1] != NOW.number + (not NOW.call):
            return False
        return bool(NOW.call) or heard[0].kind == STALLED

    def _end(self, fault: Fault) -> None:
        """End a process that hangs in code that cannot be interrupted."""
        if fault.is_asked and self._ticks < SILENT // 3:  # else the store may be silent, and this thread hang there
            with contextlib.suppress(RuntimeError):
                fault = self._roll.result(fault, self.named)
        stack = "".join(traceback.format_stack(main_stack()[-1]))
        logger.error("this process does not stop by itself, so it is ended, since %s\nIt is at\n%s", fault, stack)
        os._exit(1)

    @property
    def limit(self) -> float:
        """Seconds that may pass without a change, in the call that runs."""
        if self.timeout is None:
            return float("inf")
        if isinstance(self.timeout, str):
            limit = 600.0 if NOW.longest == 0 else max(30.0, 20 * NOW.longest)
        else:
            limit = self.timeout
        return limit if NOW.call in STEPS else OTHERS * limit

    def _is_stalled(self) -> bool:
        return bool(NOW.call) and time.monotonic() - NOW.since > self.limit


def _is_lost(error: BaseException) -> bool:
    """Whether an error is that of a broken connection, and so not this rank's own."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and bool(LOST.search(str(error))))


def _ending(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "by Ctrl-C"
    sigterm = isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM
    return "by SIGTERM" if sigterm else f"by {type(error).__name__}: {error}"
