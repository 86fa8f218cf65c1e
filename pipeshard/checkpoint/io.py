"""Checkpoint IO: every stage writes and reads its own part of a plain Hugging Face folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeshard.checkpoint.files import Save, new_file, together, writes
from pipeshard.checkpoint.load import load_weights
from pipeshard.checkpoint.lora import save_lora
from pipeshard.checkpoint.merging import merged
from pipeshard.checkpoint.optimizer import load_optimizer, save_optimizer
from pipeshard.checkpoint.safetensors_files import PICKLED
from pipeshard.checkpoint.save import FileSave, FolderSave, owned
from pipeshard.checkpoint.untrusted import load_plain
from pipeshard.distributed.collectives import together_in
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.model import PipelineModel
from pipeshard.errors import CheckpointError
from pipeshard.hf import is_of_peft
from pipeshard.split.packed import UNWRITTEN, is_quantized

SHARD = 1024  # MB of a shard, at most


class PipelineCheckpointIO:
    """Saves with the architecture's own names, each tied tensor once, as safetensors; nothing is gathered.

    Make each call on every rank; all raise CheckpointError if one cannot do its part. Saved files are on disk
    when the call returns, unless `use_async=True`; the previous files stay complete until then.
    """

    def __init__(self, grid: Callable[[], Grid]) -> None:
        self._grid = grid  # which is made when a model is boosted
        self.pending: Save | None = None  # what this rank writes of a save in the background
        self.saving = False  # whether there is one

    @property
    def grid(self) -> Grid:
        return self._grid()

    @together_in("save_model")
    def save_model(
        self,
        model: nn.Module,
        checkpoint: str,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = SHARD,
        use_safetensors: bool = False,
        use_async: bool = False,
        merge: bool = False,
    ) -> None:
        """Write the folder `checkpoint` (`shard=True`: shards of at most `size_per_shard` MB, their index, the configs;
        `AutoModel.from_pretrained(checkpoint)` reads it) or one file: in the format of `torch.save` if its name ends in
        .pt, .pth or .bin, otherwise safetensors. (`use_safetensors=False` is Booster's default, and has no effect.)

        With `use_async=True` a copy of the weights is written while training continues; the next save waits for it, and
        so does the end of the process. An error in it is raised by the next save.

        `merge=True` writes the folder of a model with adapters in a form that plain transformers reads: each stage
        merges its active adapters into its weights.
        """
        boosted = boosted_model(model)
        self.wait()
        refuse_packed(boosted.unwrap())
        has_adapters = is_of_peft(boosted.unwrap(), "PeftModel")
        if merge and not (has_adapters and shard):
            raise CheckpointError("merge=True requires shard=True (which writes a folder) and a model with adapters")
        if has_adapters and not merge:
            raise CheckpointError(
                "this model has adapters, and plain transformers cannot load them together with its weights: save the "
                "adapters with booster.save_lora_as_pretrained, the training state with pipeshard.save_training_state, "
                "or the merged model with "
                "booster.checkpoint_io.save_model(model, folder, shard=True, merge=True)"
            )
        _refuse_prefix(prefix)
        if shard:
            self.save_folder(boosted, Path(checkpoint), size_per_shard, use_async, merge)
            return
        if (suffix := Path(checkpoint).suffix) in PICKLED and use_safetensors:
            raise CheckpointError(
                f"use_safetensors=True, but a file named {checkpoint} is loaded with torch.load: use the suffix "
                f".safetensors instead of {suffix}"
            )
        self._save(boosted, use_async, lambda tensors: FileSave.plan(boosted, tensors, Path(checkpoint), use_async))

    @together_in("save_model")
    def save_folder(
        self, model: nn.Module, folder: Path, size_per_shard: int = SHARD, use_async: bool = False, merge: bool = False
    ) -> None:
        """`save_model` with `shard=True`, also for a model with adapters; packed weights are omitted. It writes the
        tensors that `load_model` reads."""
        boosted = boosted_model(model)

        def plan(tensors: dict[str, Tensor]) -> FolderSave:
            if merge:
                with together(boosted.pipeline.group):
                    tensors = merged(boosted.unwrap(), tensors)
            return FolderSave.plan(boosted, tensors, folder, size_per_shard, use_async, of_base=merge)

        self._save(boosted, use_async, plan)

    def planned(self, model: nn.Module, folder: Path) -> FolderSave | None:
        """A save of the folder from copies, for `write` and `commit`; None if another rank writes."""
        boosted = boosted_model(model)
        with self._leading(boosted) as (leads, tensors):
            return FolderSave.plan(boosted, tensors, folder, SHARD, snapshot=True) if leads else None

    def start(self, save: Save) -> None:
        """Start the save in the background. Call it on all ranks; `saving` is set if this rank has none to start."""
        self.pending, self.saving = save, True
        save.start()

    def _save(self, boosted: PipelineModel, use_async: bool, plan: Callable[[dict[str, Tensor]], Save]) -> None:
        with self._leading(boosted) as (leads, tensors):
            self.saving = use_async
            if not leads:
                return
            save, group = plan(tensors), boosted.pipeline.group
            if use_async:
                self.start(save)
                return
            try:
                with together(group):
                    save.write()
                with together(group):
                    if self.grid.first:
                        save.commit()
            except CheckpointError:
                save.abandon()
                raise

    @contextmanager
    def _leading(self, boosted: PipelineModel) -> Iterator[tuple[bool, dict[str, Tensor]]]:
        """The tensors that this stage saves, and whether this rank writes them: the rank of the first replica and slice
        does; all others wait for it, and fail if it fails."""
        boosted.pipeline.gradients.settle()
        with together(self.grid.world):
            tensors = owned(boosted)
        with together(self.grid.world):
            yield self.grid.leads, tensors

    def wait(self) -> None:
        """Wait until the save in the background is on disk; raises CheckpointError on every rank if it failed."""
        save, self.pending, saving, self.saving = self.pending, None, self.saving, False
        if save is not None and save.thread is not None:
            save.thread.join()
        try:
            with together(self.grid.world) if saving else nullcontext():
                if save is not None and save.failed is not None:
                    raise CheckpointError(f"saving {save.target} in the background failed: {save.failed}")
        except CheckpointError:
            if save is not None:
                save.abandon()  # what this stage has written, where another one failed
            raise

    @together_in("load_model")
    def load_model(self, model: nn.Module, checkpoint: str, strict: bool = True, **_: Any) -> nn.Module:
        """Read this stage's tensors from a Hugging Face folder, an index or a file, in place.

        A model of `PipelinePlugin.from_pretrained` is filled as `from_pretrained` does: weights that the checkpoint
        lacks are initialized, with a warning.
        """
        boosted = boosted_model(model)
        self.wait()
        first = getattr(boosted.unwrap(), "_pretrained", None) == str(checkpoint)
        load_weights(boosted, Path(checkpoint), strict, draw_missing=first)
        return model

    @together_in("save_lr_scheduler")
    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        """Write the scheduler's state, which all ranks share, once."""
        with new_file(Path(checkpoint), self.grid.world) as folder:
            if self.grid.first:
                with writes(Path(checkpoint)):
                    torch.save(lr_scheduler.state_dict(), folder / Path(checkpoint).name)

    @together_in("load_lr_scheduler")
    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        with together(self.grid.world):
            kind, advice = "the state of an LR scheduler", "pass a file that booster.save_lr_scheduler wrote"
            state = load_plain(Path(checkpoint), kind, advice)
            if not isinstance(state, dict) or "last_epoch" not in state:
                raise CheckpointError(f"{checkpoint} is not {kind} (it has no last_epoch): {advice}")
            lr_scheduler.load_state_dict(state)

    @together_in("save_optimizer")
    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = SHARD,
        use_async: bool = False,
    ) -> None:
        """Write the folder (`shard=True`: each rank its own part) or the file `checkpoint`."""
        _refuse_prefix(prefix)
        save_optimizer(optimizer, checkpoint, shard=shard)

    @together_in("load_optimizer")
    def load_optimizer(self, optimizer: Optimizer, checkpoint: str, prefix: str | None = None, **_: Any) -> None:
        """Read a folder or a file that `save_optimizer` wrote, with any number of stages."""
        _refuse_prefix(prefix)
        load_optimizer(optimizer, checkpoint)

    @together_in("save_lora_as_pretrained")
    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: str, *_: Any, **__: Any) -> None:
        save_lora(model, checkpoint)


def refuse_packed(model: nn.Module) -> None:
    """Raise CheckpointError for a model whose weights cannot be written to a folder."""
    if is_quantized(model):
        raise CheckpointError(UNWRITTEN)


def _refuse_prefix(prefix: str | None) -> None:
    if prefix is not None:
        raise CheckpointError(
            f"prefix={prefix!r} is not supported: parameters are saved under the architecture's own names"
        )


def boosted_model(model: nn.Module) -> PipelineModel:
    """`model`, if `booster.boost` returned it; otherwise raises CheckpointError."""
    if not isinstance(model, PipelineModel):
        raise CheckpointError(f"this is a {type(model).__name__}: pass the model that booster.boost(...) returned")
    return model


def io_of(model: nn.Module) -> PipelineCheckpointIO:
    """The checkpoint IO of this boosted model."""
    io = boosted_model(model).checkpoint_io
    assert isinstance(io, PipelineCheckpointIO)
    return io
