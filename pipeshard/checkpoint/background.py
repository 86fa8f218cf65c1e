"""Background: a save that goes on while training does, in which stages meet by files."""

import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from pipeshard.errors import CheckpointError

logger = logging.getLogger("pipeshard")

PATIENCE = 1800.0  # seconds the first stage waits in the background for the others to have written


@dataclass
class Save:
    """A save that every stage writes its part of, of which the first one makes the checkpoint, once all have written.

    A subclass has `write` and `commit`, `abandon`, which removes what this stage has written, and `beside`, hidden
    files in which the stages meet.
    """

    target: Path
    stage: int
    stages: int
    token: str  # of this save
    failed: Exception | None = field(default=None, init=False)
    thread: threading.Thread | None = field(default=None, init=False, repr=False)

    def write(self) -> None:
        raise NotImplementedError

    def commit(self) -> None:
        raise NotImplementedError

    def abandon(self) -> None:
        raise NotImplementedError

    def beside(self, name: str) -> Path:
        raise NotImplementedError

    def start(self) -> None:
        """Write in the background; at its end Python waits for it."""
        self.thread = threading.Thread(target=self._in_background, name="pipeshard-save")
        self.thread.start()

    def _in_background(self) -> None:
        try:
            self.write()
            self._mark(self.stage).write_text("")
            if self.stage == 0:
                self._await_others()
                self.commit()
        except Exception as error:
            self.failed = error
            self.abandon()
            self._mark(self.stage).with_suffix(".failed").touch()
            logger.error("saving %s failed on stage %d: %s", self.target, self.stage, error)

    def _await_others(self) -> None:
        deadline = time.monotonic() + PATIENCE
        waiting = set(range(self.stages))
        while waiting:
            waiting = {stage for stage in waiting if not self._mark(stage).exists()}
            failed = [stage for stage in waiting if self._mark(stage).with_suffix(".failed").exists()]
            if failed or time.monotonic() > deadline:
                raise CheckpointError(
                    f"stages {failed or sorted(waiting)} have not written their part; it is kept as it was"
                )
            time.sleep(0.02)

    def _mark(self, stage: int) -> Path:
        return self.beside(f"stage{stage}.done")
