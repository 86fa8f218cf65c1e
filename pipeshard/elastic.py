"""Elastic: training that saves itself when it receives a signal to end, and that resumes with the available ranks."""

import logging
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeshard.checkpoint.training_state import load_training_state, newest_step, save_training_state
from pipeshard.distributed.collectives import gather, gather_objects, together_in
from pipeshard.distributed.groups import raising_errors
from pipeshard.errors import ConfigurationError, UsageError, summary
from pipeshard.planner.autoconfig import Layout, ToldLayout, layouts

logger = logging.getLogger("pipeshard")

NOTHING, SAVE, LEAVE = range(3)  # what a rank is asked to do at the next step boundary; the most of all ranks counts
WISHES = {signal.SIGUSR1: SAVE, signal.SIGTERM: LEAVE}
LEFT = 128 + signal.SIGTERM  # the exit status of a rank that was asked to leave


class PreemptibleJob:
    """Training whose state is kept in a folder, and saved when the job receives a signal to end, as from Slurm before
    it preempts the machines.

    `resume` continues from the newest state in `directory`, and `step_done`, called after each step, saves the state
    there. SIGUSR1, to any rank, has it saved at the next step boundary; SIGTERM too, and then all ranks exit, with
    status 143.

        job = PreemptibleJob("state")
        for step in range(job.resume(model, optimizer, scheduler, dataloader), 1000):
            ...
            job.step_done()

    Args:
        directory: for the training states; all ranks must see it.
        every: the number of steps between saves.
        keep: how many saved steps are kept.

    Raises UsageError if it is not created in the main thread, the only one that receives signals.
    """

    def __init__(self, directory: str | Path, every: int = 100, keep: int = 3) -> None:
        if not isinstance(every, int) or every < 1:
            raise ConfigurationError(f"every, a number of steps, must be a positive integer, got {every!r}")
        self.directory, self.every, self.keep = Path(directory), every, keep
        self.step = 0  # steps done
        self._parts: tuple[Any, Any, Any, Any] | None = None
        self._saved = -1  # the step of the newest state
        self._wishes: deque[int] = deque()  # appending and taking are atomic: signals come at any moment
        self._listen()

    @together_in("job.resume")
    def resume(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        dataloader: Any = None,
    ) -> int:
        """Resume from the newest state, with all that `booster.boost` returned; returns the completed steps, 0 in a new
        job.

        Raises CheckpointError, on every rank, for a state that does not fit.
        """
        self._parts = (model, optimizer, lr_scheduler, dataloader)
        if getattr(dataloader, "num_workers", 0):
            dataloader.worker_init_fn = Deaf(dataloader.worker_init_fn)
        if any(step is not None for step in gather_objects(newest_step(self.directory), _world())):
            self.step = self._saved = load_training_state(self.directory, *self._parts)
        return self.step

    def step_done(self) -> None:
        """After each `optimizer.zero_grad()`, on every rank: save if it is time or requested, and exit if requested.

        Raises SystemExit with status 143 on every rank when one of them received SIGTERM, after the state is saved; for
        `pipeshard launch` this means that the remaining ranks continue. Otherwise as `save`.
        """
        if self._step_done() == LEAVE:
            dist.destroy_process_group()
            sys.exit(LEFT)

    @together_in("job.step_done")
    def _step_done(self) -> int:
        """What all ranks must do now: the most that one of them was signalled to do."""
        self.step += 1
        mine = max((self._wishes.popleft() for _ in range(len(self._wishes))), default=NOTHING)
        wish = int(gather(torch.tensor([mine]), _world()).max())
        if wish or self.step % self.every == 0:
            self.save()
        return wish

    def save(self) -> None:
        """Save the state now, between two steps, unless it is saved. Call it on all ranks.

        Raises UsageError before `resume`, and CheckpointError as `save_training_state` does.
        """
        if self._parts is None:
            raise UsageError("save was called before resume: call job.resume(model, optimizer, ...) first")
        if self._saved != self.step:
            save_training_state(self.directory, self.step, *self._parts, self.keep)
            self._saved = self.step

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            kind = type(self).__name__
            raise UsageError(f"a {kind} handles signals, which only the main thread can do: create it there")
        for number in WISHES:
            signal.signal(number, lambda number, frame: self._wishes.append(WISHES[signal.Signals(number)]))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WISHES)  # those that came while this process was starting, too


class ElasticJob(PreemptibleJob):
    """One run of a job that `pipeshard launch` restarts whenever ranks leave or join, until the script ends.

    It initializes the process group (gloo, and NCCL if there is a GPU) unless the script has, and finds the layout of
    its ranks: as many stages as they allow. If a rank receives a signal to end, the state is saved, and the remaining
    ranks continue.

        job = ElasticJob("state", pp_size=4, global_batch=16)
        plugin = PipelinePlugin(**job.layout.arguments)
        dataloader = plugin.prepare_dataloader(dataset, job.layout.batch_size)
        ...
        for step in range(job.resume(model, optimizer, scheduler, dataloader), 1000):
            ...
            job.step_done()

    Args:
        directory: for the training states; all ranks must see it.
        pp_size: the largest number of stages; or a function that returns a Layout for a number of ranks, such as
            `lambda ranks: AutoConfig.choose(model, batch, ranks, 16, ...)`. It is called on rank 0.
        global_batch: the samples of a step, over all replicas, for any number of ranks.
        microbatch_size: the samples of a microbatch.
        every: the number of steps between saves.
        keep: how many saved steps are kept.
        timeout: seconds after which a rank that waits in the default group gives up.

    Raises ConfigurationError, on every rank, if the available ranks have no legal layout; UsageError if it is not
    run by a launcher, or not in the main thread.
    """

    def __init__(
        self,
        directory: str | Path,
        pp_size: int | Callable[[int], Layout],
        global_batch: int,
        microbatch_size: int = 1,
        every: int = 100,
        keep: int = 3,
        timeout: float = 1800,
    ) -> None:
        super().__init__(directory, every, keep)
        _join(timeout)
        ranks = dist.get_world_size()
        if callable(pp_size):
            self.layout = _chosen_layout(pp_size, ranks, global_batch)
        else:
            self.layout = layouts(ranks, global_batch, microbatch_size, pp_size)[0]
        if dist.get_rank() == 0:
            logger.info("%d ranks: %s", ranks, self.layout)


@dataclass(frozen=True)
class Deaf:
    """A DataLoader's `worker_init_fn`, for workers that survive the SIGTERM which an agent sends to them too.

    Workers of the dataloader passed to `resume` do already: if one ended, the step would fail, and the save with it.
    """

    then: Callable[[int], None] | None = None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _join(timeout: float) -> None:
    if dist.is_initialized():
        return
    if not dist.is_torchelastic_launched():
        raise UsageError("an ElasticJob requires a launcher: start the script with python -m pipeshard.launch")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with raising_errors():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))


def _chosen_layout(choose: Callable[[int], Layout], ranks: int, global_batch: int) -> Layout:
    """The layout that rank 0 chooses (a measured profile may differ elsewhere), or its error, on every rank."""
    chosen: Any = None
    if dist.get_rank() == 0:
        try:
            chosen = choose(ranks)
        except Exception as error:  # the user's function; the other ranks have to learn of it
            chosen = summary(error)
    sizes = {f.name: getattr(chosen, f.name) for f in fields(Layout)} if isinstance(chosen, Layout) else None
    answer: tuple[Any, Any] = (sizes, chosen.arguments if sizes else str(chosen))
    sizes, told = gather_objects(answer, _world())[0]
    if sizes is None:
        raise ConfigurationError(f"the pp_size function returned no Layout for {ranks} ranks: {told}")
    layout = chosen if dist.get_rank() == 0 else ToldLayout(**sizes, told=told)
    if (layout.ranks, layout.global_batch) != (ranks, global_batch):
        raise ConfigurationError(
            f"the layout chosen for {ranks} ranks and global_batch={global_batch} is for {layout.ranks} ranks and "
            f"global_batch={layout.global_batch}"
        )
    return layout
