"""Watch: threads that supervise this process's calls, so that if one rank fails, all ranks stop and name the cause."""

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

import torch.distributed as dist

from pipeshard.distributed.crash import leave_report
from pipeshard.distributed.failures import (
    ENDED,
    GONE,
    ORPHANED,
    RAISED,
    STALLED,
    THROUGH,
    Alarm,
    Fault,
    RollCall,
    abort_groups,
    ending,
    has_agents,
    is_lost,
    text_of,
)
from pipeshard.distributed.monitor import Monitor
from pipeshard.distributed.peers import KILLED, Peers
from pipeshard.distributed.progress import NOW, Timeout, allowed, collective_of, main_stack
from pipeshard.errors import RankError, is_of_all

logger = logging.getLogger("pipeshard")
PERIOD = 0.25  # seconds between two checks of the store
SETTLED = 0.3  # seconds after which a wait is considered stuck, if a rank has failed
HEARD = 2 * PERIOD + SETTLED + 0.2  # seconds after which all other ranks have left a call that failed on one rank
GRACE = 3.0  # seconds in which a call can end by itself if a rank has failed, before the watch interrupts it
END_AFTER = 6.0  # seconds after which the watch kills the process
SILENT = 12  # unanswered checks after which the store counts as gone, if this process waits for the store or is stalled
PATIENCE = 0.5  # seconds to wait for a report of the failed rank after a lost connection
BEAT = 4  # checks per heartbeat to the monitor
AGENT = "TORCHELASTIC_RUN_ID"  # set by torchrun for its workers
NOTE = "pipeshard: "  # prefix of the note that records where an error occurred


class Interrupt(RankError):
    """Raised in the training thread, at any point of its code, to interrupt the thread."""


class Watch:
    """Supervises the collective calls of this process.

    Ranks report failures in the rendezvous store, each under the number of the failed call. This number is the same on
    all ranks. One thread of this class polls the store. If another rank has failed while this rank waits, a second
    thread aborts the process groups, and the wait raises an error. Errors raised in `call` are reported to the other
    ranks.

    If all ranks raise an error in the same call (such as for a batch that no rank can use), no groups are aborted: each
    rank leaves the call before the watch would interrupt the rank, and the next call has another number. After any
    other failure, the groups are aborted, and every later call raises RankError.

    Args:
        timeout: seconds after which an action of a step, or a wait, is considered stalled, or None for no limit.
            "adaptive" means 20 times the longest action so far. Its minimum is 30 seconds, or 600 seconds until
            `optimizer.step()` has completed once. Outside a step, the limit is three times as long. A mapping has
            separate limits for actions of a "step", for "other" calls (a save, a load, a boost), and for waits of the
            user's own code "between" calls.
        named: returns the name of a rank in errors, such as `rank 2 (stage 2)`.
        well: the number of the last call that succeeded before the watch started, or -1 if there is none.
        monitor: receives the heartbeats of this process.
    """

    def __init__(
        self, timeout: Timeout, named: Callable[[int], str], well: int = -1, monitor: Monitor | None = None
    ) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.world: dist.ProcessGroup = world
        self.rank, self.timeout = dist.get_rank(), timeout
        self.named = named
        self.fault: Fault | None = None  # why the groups were aborted
        self._alarm = Alarm(self.rank, dist.get_world_size())
        self._run = self._alarm.store.compare_set("run", "", f"{time.time()} {os.getpid()}").decode()  # of all ranks
        self._roll = RollCall(self._alarm.store, self.rank, dist.get_world_size())
        self._peers = Peers(self._alarm.store, self.rank, dist.get_world_size())
        self._monitor, self._parent = monitor, os.getppid()
        self._lost: tuple[Fault, float] | None = None  # a fault detected without the store, and when
        self._outside: tuple[FrameType | None, float] | None = None  # a wait between two calls, and its start time
        self._heard: tuple[Fault, int, float] | None = None  # a reported fault, the call's number, and when
        self.interrupt: Callable[[], None] = lambda: None  # makes the training thread raise an Interrupt
        self._broken = False
        self._failed: tuple[Fault, float] | None = None  # this rank's own fault in the previous call, and when
        self._interrupted, self._well = -1, well  # numbers of the interrupted call and of the last successful call
        self._ticks = 0  # checks since the store last responded
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.start()

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Context manager for a collective call of the user's program, outside any other call. Raises RankError instead
        of an error that another rank's failure caused."""
        self._let_others_leave()
        NOW.enter(name)
        try:
            self._refuse_broken()
            yield
            self._refuse_broken()  # with NCCL, a wait in an aborted group returns without an error
            self._well, self._failed = NOW.number, None
        except BaseException as error:
            if is_of_all(error) or (told := self._explained(error)) is None:
                raise
            raise told from None if told.fault.kind in (RAISED, ENDED) else error
        finally:
            NOW.leave()

    def _let_others_leave(self) -> None:
        """If the program caught an error of this rank, wait until the other ranks have left the failed call. Otherwise,
        these ranks could mistake messages of the next call for messages of the failed call."""
        if self._failed is not None:
            time.sleep(max(0.0, self._failed[1] + HEARD - time.monotonic()))

    def _refuse_broken(self) -> None:
        if self.fault is not None:
            raise self._no_further(self.fault)

    @staticmethod
    def _no_further(fault: Fault) -> RankError:
        return RankError(f"this process cannot continue, because {fault}. Restart all ranks", fault)

    def start(self) -> None:
        self._stop.clear()
        targets = {"pipeshard-watch": self._look, "pipeshard-listen": self._listen}
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for name, target in targets.items()]
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """Stop the threads of the watch. Return False if a thread hangs because the store does not respond."""
        self._stop.set()
        for thread in self._threads[: 1 if self._alarm.gone else 2]:  # the thread that polls a dead store hangs
            thread.join(timeout=2)
        return not any(thread.is_alive() for thread in self._threads)

    # Called in the training thread.

    def _explained(self, error: BaseException) -> RankError | None:
        """The error to raise instead of an error that another rank has caused, or None for this rank's own error."""
        lost, number = is_lost(error), NOW.number
        if lost and self._failed is not None:  # only this rank failed, and the other ranks have aborted their waits
            self._break(self._failed[0], error)
            return self._no_further(self._failed[0])
        own, mine = not lost and not isinstance(error, Interrupt), self._fault_of(error, lost)

        def ask() -> Fault:
            fault = self._told(0.0 if own else PATIENCE) or self._alarm.tell(self._killed(mine, lost), number)
            return self._roll.result(fault, self.named) if fault.is_asked and not own else fault

        try:
            fault = self._alarm.ask(ask)
        except RuntimeError:
            fault = self._without_store()
        if not own or NOW.in_flight:
            self._break(fault, error)
        if own:
            self._failed = mine, time.monotonic()
            error.add_note(f"{NOTE}this is {self.named(self.rank)}, in {NOW.where}")
            return None
        return RankError(self._met(fault), fault)

    def _met(self, fault: Fault) -> str:
        """The text of a fault. If the rank at fault has reached the end of its program, the text names the call that is
        missing in this program."""
        if fault.kind != ENDED or fault.message != THROUGH:
            return str(fault)
        return (
            f"{fault}, but {self.named(self.rank)} waits for it in {NOW.where}: every rank must call {NOW.call}. If "
            "the call is inside a condition on the rank (if rank == 0), move the call out of the condition"
        )

    def _fault_of(self, error: BaseException, lost: bool) -> Fault:
        if isinstance(error, RankError) and error.fault is not None:  # raised by an earlier call
            return error.fault
        if lost:
            return Fault(GONE, -1, "", NOW.where, message=f"a connection broke in {NOW.where}", told_by=self.rank)
        if isinstance(error, Exception):
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            return self._own(RAISED, text_of(error), NOW.module(frames))
        return self._own(ENDED, ending(error))

    def _own(self, kind: str, message: str, module: str = "") -> Fault:
        return Fault(kind, self.rank, self.named(self.rank), NOW.where, module, message, self.rank)

    def leaving(self, kind: str, message: str) -> None:
        """Report that this process ends between two calls, to ranks that will wait for it in the next call."""
        with contextlib.suppress(RuntimeError, ValueError):
            if not NOW.call and self.fault is None and self._is_last:
                fault = self._own(kind, message)
                self._alarm.ask(lambda: self._alarm.tell(fault, NOW.present))

    def ended(self, error: BaseException) -> None:
        """Report an uncaught error that ends this process. If the error is a lost connection, log why the connection
        was lost."""
        if is_lost(error):
            until = time.monotonic() + GRACE
            while not (why := self.why()) and time.monotonic() < until:
                time.sleep(0.1)
            if why:
                logger.error("the connection was lost because %s. Every rank must make the call that failed here", why)
            self._break(self.fault or (self._heard[0] if self._heard else self._fault_of(error, lost=True)), error)
        self.leaving(RAISED, text_of(error))
        if not self._broken:
            self._leave_report(self._own(RAISED, text_of(error)), error)

    def left(self) -> bool:
        """Stop and sign off when the process exits. Return False if a thread hangs because the store does not
        respond."""
        stopped = self.stop()
        if stopped and self._is_last:
            gone = [self.fault.rank] if self.fault is not None and self.fault.kind == GONE else []
            self._alarm.leave(without=[*self._roll.silent, *gone])
        return stopped

    @property
    def _is_last(self) -> bool:
        """Whether the watched world is the latest world of this process. The world may have been destroyed."""
        return dist.group.WORLD in (self.world, None)

    def why(self) -> str:
        """The reason why another rank ended, or "" if the reason is unknown. The reason is shown if this process ends
        because of the other rank."""
        fault = self.fault or (self._heard[0] if self._heard else None)
        if fault is not None and fault.is_asked:
            with contextlib.suppress(RuntimeError):
                fault = self._roll.result(fault, self.named)
        if fault is None and (rank := self._peers.killed()) >= 0:
            return f"{self.named(rank)} {KILLED}"
        return "" if fault is None or fault.rank == self.rank else str(fault)

    # Called in all threads.

    def _killed(self, otherwise: Fault, lost: bool) -> Fault:
        """The fault of a killed rank of this host, if a connection was lost and such a rank exists. If not, returns
        `otherwise`."""
        rank = self._peers.killed() if lost else -1
        return otherwise if rank < 0 else self._gone(rank, KILLED)

    def _gone(self, rank: int, how: str) -> Fault:
        return Fault(GONE, rank, self.named(rank), NOW.where, message=f"{self.named(rank)} {how}")

    def _told(self, patience: float = 0.0) -> Fault | None:
        """The fault reported in the current call (between calls, in the next call), or None. If this rank succeeded in
        the previous call, a fault reported in that call takes precedence."""
        number = NOW.present
        return self._alarm.told([*([number - 1] if self._well == number - 1 else []), number], patience)

    def _break(self, fault: Fault, error: BaseException | None = None) -> None:
        self.fault = fault
        if not self._broken:
            self._broken = True
            self._leave_report(fault, error)
            abort_groups()

    def _leave_report(self, fault: Fault, error: BaseException | None) -> None:
        leave_report(self.rank, self.named(self.rank), fault, error, self._run)

    def _without_store(self) -> Fault:
        holder = "the agent of the first machine" if has_agents() else f"{self.named(0)}"
        why = f"{holder}, which hosts the store, was killed, is suspended, or is disconnected"
        return Fault(GONE, 0, self.named(0), message=f"the rendezvous store does not respond: {why}")

    # Called in the watch's threads: one polls the store, which may not respond, and the other checks timeouts.

    def _listen(self) -> None:
        with contextlib.suppress(dist.DistError):  # the store has ended, with the last ranks or before them
            while self._goes_on():
                self._once()
                self._ticks = 0
        if not self._stop.is_set():
            self._alarm.gone = True

    def _look(self) -> None:
        beats = 0
        while self._goes_on():
            self._ticks += 1
            beats += 1
            if self._monitor is not None and beats % BEAT == 1:
                self._monitor.beat(self.limit)
            self._look_outside()
            if self._ticks > SILENT and (self._alarm.asked or self._is_stalled()):
                self._alarm.gone = True
            if self._lost is None and (fault := self._find_out()) is not None:
                self._lost = fault, time.monotonic()
            number = NOW.present
            if self._lost is not None and (self._heard is None or self._heard[1] != number):
                self._heard = self._lost[0], number, self._lost[1]
            self._press()
        if self._monitor is not None:
            self._monitor.beat(float("inf"))

    def _find_out(self) -> Fault | None:
        """Return a fault that the failed process cannot report: a rank of this host was killed or is stopped, this
        process's agent is gone, or the store does not respond. Return None if no such fault is found."""
        if AGENT in os.environ and os.getppid() != self._parent:
            agent = "the agent of this process (torchrun or pipeshard.launch) is gone, and cannot restart this process"
            return Fault(ORPHANED, -1, "", message=agent)
        if self._alarm.gone and NOW.call:
            return self._without_store()
        found = self._peers.look(self._ticks)
        return None if found is None else self._gone(*found)

    def _look_outside(self) -> None:
        """Record a wait for other ranks between two calls, in pipeshard or in the user's code. The frame is kept alive,
        so that its address is not reused."""
        if NOW.waits and not NOW.call:
            self._outside = None, NOW.since
            return
        frame = None if NOW.call else collective_of(main_stack())
        if frame is None or self._outside is None or self._outside[0] is not frame:
            self._outside = None if frame is None else (frame, time.monotonic())

    def _goes_on(self) -> bool:
        return not self._stop.wait(PERIOD) and dist.is_initialized() and dist.group.WORLD is self.world

    def _once(self) -> None:
        number = NOW.present
        fault = self._told()  # queried even if known, to notice if the store stops responding
        self._peers.meet()
        if fault is None and self._lost is not None and (NOW.call or self._outside):
            fault = self._alarm.tell(self._lost[0], number)  # ranks of other hosts cannot detect this fault
        if self._heard is not None and self._heard[1] == number:
            return
        if fault is None and self._is_stalled():
            still = f"there was no progress for {self.limit:.3g} seconds"
            fault = self._alarm.tell(Fault(STALLED, -1, "", message=still, told_by=self.rank), number)
        self._heard = None
        if fault is not None and fault.rank != self.rank:
            if fault.is_asked:
                self._roll.answer(fault.number)
            self._heard = fault, number, time.monotonic()

    def _press(self) -> None:
        """If another rank has failed in the current call, abort this rank's waits. If the call still does not end,
        interrupt the training thread, and then kill the process."""
        heard = self._heard
        if heard is None or not self.interrupts:
            return
        fault, number, at = heard
        now = time.monotonic()
        if fault.is_asked or fault.kind == GONE or (NOW.waits and now - NOW.since > SETTLED) or now - at > GRACE:
            self._break(fault)
        if now - at > GRACE and self._interrupted != number:
            self._interrupted = number
            self.interrupt()
        if now - at > END_AFTER:
            self._end(fault)

    @property
    def interrupts(self) -> bool:
        """Whether the training thread is still in the call or wait that the watch must interrupt."""
        heard = self._heard
        if heard is None or heard[1] != NOW.present:
            return False
        if heard[0].kind == GONE and not NOW.call:
            return bool(NOW.waits) or collective_of(main_stack()) is not None  # otherwise the wait would never end
        return bool(NOW.call) or heard[0].kind in (STALLED, ORPHANED)

    def _end(self, fault: Fault) -> None:
        """Kill this process, which hangs in code that cannot be interrupted."""
        if fault.is_asked and self._ticks < SILENT // 3:  # otherwise, this thread could hang in a call to the store
            with contextlib.suppress(RuntimeError):
                fault = self._roll.result(fault, self.named)
        self._leave_report(fault, None)
        stack = "".join(traceback.format_stack(main_stack()[-1]))
        logger.error("this process did not stop after a failure, and is killed: %s\nIts stack:\n%s", fault, stack)
        os._exit(1)

    @property
    def limit(self) -> float:
        """The number of seconds that may pass without progress, in the current call or between calls."""
        return allowed(self.timeout)

    def _is_stalled(self) -> bool:
        since = NOW.since if NOW.call else self._outside[1] if self._outside else float("inf")
        return time.monotonic() - since > self.limit
