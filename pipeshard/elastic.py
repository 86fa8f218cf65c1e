"""Elastic: jobs that save their state when they receive a termination signal, and resume on the available ranks."""

import logging
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeshard.checkpoint.files import refuse_differing_folders
from pipeshard.checkpoint.training_state import (
    check_complete,
    check_contents,
    check_loader,
    has_step,
    load_training_state,
    save_training_state,
)
from pipeshard.distributed.collectives import gather, gather_objects, together_in
from pipeshard.distributed.groups import raising_errors
from pipeshard.distributed.mesh import backend_here
from pipeshard.distributed.signals import SignalHandler
from pipeshard.errors import ConfigurationError, UsageError, counted, summary
from pipeshard.options import POSITIVE, is_positive
from pipeshard.planner.autoconfig import Layout, ToldLayout, layouts
from pipeshard.verify.decide import standing_alone

logger = logging.getLogger("pipeshard")

NOTHING, SAVE, LEAVE = range(3)  # requests for the next step boundary; the highest request of any rank applies
WISHES = {signal.SIGUSR1: SAVE, signal.SIGTERM: LEAVE}
LEFT = 128 + signal.SIGTERM  # exit status of ranks after SIGTERM


class PreemptibleJob:
    """A training job that saves its state in a folder, regularly and when it receives a termination signal, such as
    the signal that Slurm sends before preemption.

    `resume` loads the newest state in `directory`. `step_done`, which you call after each step, saves the state there
    every `every` steps. If any rank receives SIGUSR1 or SIGTERM, the job saves the state at the next step boundary.
    After SIGTERM, all ranks then exit with status 143.

        job = PreemptibleJob("state")
        for step in range(job.resume(model, optimizer, scheduler, dataloader), 1000):
            ...
            job.step_done()

    Args:
        directory: the folder of the training states, visible to all ranks.
        every: the number of steps between saves.
        keep: the number of saved steps to keep.

    Raises ConfigurationError for an invalid `every` or `keep`, and UsageError outside the main thread, since only the
    main thread can handle signals.
    """

    _newest: ClassVar["weakref.ref[PreemptibleJob]"]  # the job that receives signals

    def __init__(self, directory: str | Path, every: int = 100, keep: int = 3) -> None:
        for name, value in (("every, a number of steps,", every), ("keep, a number of saved steps,", keep)):
            if not is_positive(value):
                raise ConfigurationError(f"{name} must be {POSITIVE}, got {value!r}")
        self.directory, self.every, self.keep = Path(directory), every, keep
        self.step = 0  # completed steps
        self._parts: tuple[Any, Any, Any, Any] | None = None
        self._saved = -1  # the step of the newest state
        self._is_savable = False  # whether step_done has checked that the state can be saved
        self._wishes: deque[int] = deque()  # append and popleft are atomic: signals may arrive at any time
        self._listen()

    @together_in("job.resume")
    def resume(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        dataloader: Any = None,
    ) -> int:
        """Load the newest state into the objects that `booster.boost` returned. Pass several models (such as the two
        models of a GAN, or a model and the average of its weights), optimizers or LR schedulers as a list. Returns the
        number of completed steps, which is 0 for a new job.

        Raises UsageError if `directory` differs between ranks. Raises CheckpointError, on every rank, if:
        - the state does not match these objects;
        - all saved steps in the directory are incomplete (an interrupted save does not count as a step);
        - only some of the optimizers that were boosted with the models are given;
        - an optimizer belongs to another model;
        - an object cannot be saved.
        """
        check_complete(model, optimizer)
        check_loader(model, dataloader)
        refuse_differing_folders(f"the directory of the {type(self).__name__}", self.directory, _world())
        self._parts = model, optimizer, lr_scheduler, dataloader
        if getattr(dataloader, "num_workers", 0):
            dataloader.worker_init_fn = Deaf(dataloader.worker_init_fn)
        if any(gather_objects(has_step(self.directory), _world())):
            self.step = self._saved = load_training_state(self.directory, *self._parts)
        return self.step

    def step_done(self) -> None:
        """Save the state if a save is due or requested, and exit if requested. Call it on every rank after each
        `optimizer.zero_grad()`.

        If any rank has received SIGTERM, every rank saves the state, and raises SystemExit with status 143. `pipeshard
        launch` then continues with the remaining ranks. Raises UsageError if another job was created after this job,
        since only one job receives signals. Also raises the errors of `save`. The first call raises CheckpointError if
        the state cannot be saved.
        """
        if self._step_done() == LEAVE:
            dist.destroy_process_group()
            sys.exit(LEFT)

    @together_in("job.step_done")
    def _step_done(self) -> int:
        """Count a step, save if a save is due or requested, and return the highest request that any rank received."""
        self._refuse_later_job()
        parts = self._given("step_done")
        if not self._is_savable:
            check_contents(*parts)
            self._is_savable = True
        self.step += 1
        mine = max((self._wishes.popleft() for _ in range(len(self._wishes))), default=NOTHING)
        wish = int(gather(torch.tensor([mine]), _world()).max())
        if wish or self.step % self.every == 0:
            self.save()
        return wish

    def save(self) -> None:
        """Save the state now, unless this step is already saved. Call it on every rank, between two steps.

        Raises UsageError before `resume`, and CheckpointError as `save_training_state` does.
        """
        parts = self._given("save")
        if self._saved != self.step:
            save_training_state(self.directory, self.step, *parts, self.keep)
            self._saved = self.step

    def _given(self, call: str) -> tuple[Any, Any, Any, Any]:
        """The objects that were passed to `resume`."""
        if self._parts is None:
            raise UsageError(f"{call} was called before resume: call job.resume(model, optimizer, ...) first")
        return self._parts

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            kind = type(self).__name__
            raise UsageError(
                f"{kind} was created outside the main thread, but Python handles signals only in the main thread: "
                f"create the {kind} there"
            )
        handler = SignalHandler(lambda number, frame: self._wishes.append(WISHES[signal.Signals(number)]))
        for number in WISHES:
            handler.install(number)
        PreemptibleJob._newest = weakref.ref(self)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WISHES)  # a launcher may have blocked these signals

    def _refuse_later_job(self) -> None:
        if self._newest() not in (None, self):
            raise UsageError(
                f"another job was created after this {type(self).__name__} and now receives the signals, so SIGTERM "
                "would save only the models of that job. Create one job, pass all models and optimizers to its resume, "
                "as in job.resume([generator, discriminator], [optimizer_g, optimizer_d]), and call step_done once per "
                "step. For a later phase of the script, create the next job after this job's last step"
            )


class ElasticJob(PreemptibleJob):
    """A PreemptibleJob that continues on the available ranks. `pipeshard launch` restarts the script whenever ranks
    leave or join, until the script ends.

    The job initializes the process group (gloo, and NCCL if the agent has a GPU for each of its ranks) unless the
    script has already initialized it. The job chooses the layout with the most stages that the ranks allow, unless
    `pp_size` is a function. If a rank receives a termination signal, the job saves the state, and the remaining ranks
    continue.

        job = ElasticJob("state", pp_size=4, global_batch=16)
        plugin = PipelinePlugin(**job.layout.arguments)
        dataloader = plugin.prepare_dataloader(dataset, job.layout.batch_size)
        ...
        for step in range(job.resume(model, optimizer, scheduler, dataloader), 1000):
            ...
            job.step_done()

    Args:
        directory: the folder of the training states, visible to all ranks.
        pp_size: the largest number of stages, or a function that returns a Layout for a number of ranks, such as
            `lambda ranks: AutoConfig.choose(model, batch, ranks, 16, ...)`. The function is called only on rank 0.
        global_batch: the number of samples that all replicas together read per step, for any number of ranks.
        microbatch_size: the number of samples per microbatch.
        every: the number of steps between saves.
        keep: the number of saved steps to keep.
        timeout: the timeout of the default process group, in seconds.

    Raises ConfigurationError, on every rank, if the sizes do not fit together or do not fit the available ranks, if the
    function `pp_size` fails or does not return a Layout for these ranks and `global_batch`, or if `every` or `keep` is
    invalid. Raises UsageError without a launcher, and outside the main thread.
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
            logger.info("%s: %s", counted(ranks, "rank"), self.layout)


@dataclass(frozen=True)
class Deaf:
    """A DataLoader `worker_init_fn` that makes the workers ignore SIGTERM, which an agent also sends to the workers. A
    SIGTERM of the rank itself, which ends its workers when it exits, still ends them.

    `resume` installs this function in the dataloader: if a worker exited, the step would fail, and so would the save.
    """

    then: Callable[[int], None] | None = None

    def __call__(self, worker: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a handler does not learn who has sent the signal
        threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()
        if self.then is not None:
            self.then(worker)


def _exit_with(parent: int) -> None:
    """Exit when the process `parent` sends SIGTERM."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)  # as torch's own handler does: the parent takes another status for a failure


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _join(timeout: float) -> None:
    if dist.is_initialized():
        return
    if not dist.is_torchelastic_launched() and standing_alone() is None:  # pipeshard verify uses no launcher
        raise UsageError(
            "ElasticJob requires a launcher, but no launcher started this process: start the script with pipeshard "
            "launch"
        )
    with raising_errors():
        dist.init_process_group(backend_here(), timeout=timedelta(seconds=timeout))


def _chosen_layout(choose: Callable[[int], Layout], ranks: int, global_batch: int) -> Layout:
    """Return the layout that rank 0 chooses, since measured profiles differ between ranks. Raises ConfigurationError on
    every rank if the choice fails, is not a Layout, or is for another number of ranks or another global batch."""
    chosen: Any = None
    failed = ""
    if dist.get_rank() == 0:
        try:
            chosen = choose(ranks)
        except Exception as error:  # user code: the error is sent to the other ranks
            failed = f"raised {summary(error)}"
    sizes = {f.name: getattr(chosen, f.name) for f in fields(Layout)} if isinstance(chosen, Layout) else None
    answer: tuple[Any, Any] = (sizes, chosen.arguments if sizes else failed or f"returned {chosen}")
    sizes, told = gather_objects(answer, _world())[0]
    if sizes is None:
        raise ConfigurationError(
            "the pp_size function must return a Layout, such as the result of AutoConfig.choose, but "
            f"pp_size({ranks}) {told}"
        )
    layout = chosen if dist.get_rank() == 0 else ToldLayout(**sizes, told=told)
    if (layout.ranks, layout.global_batch) != (ranks, global_batch):
        raise ConfigurationError(
            f"the layout chosen for ranks={ranks} and global_batch={global_batch} is for ranks={layout.ranks} and "
            f"global_batch={layout.global_batch}: return a Layout for the requested numbers"
        )
    return layout
