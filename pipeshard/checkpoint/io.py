"""Checkpoint IO: save and load plain Hugging Face checkpoints. Each stage writes and reads its own tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from pipeshard.checkpoint.files import Save, new_file, together, writes
from pipeshard.checkpoint.load import load_weights
from pipeshard.checkpoint.lora import save_lora
from pipeshard.checkpoint.merging import merged
from pipeshard.checkpoint.optimizer import load_optimizer, save_optimizer
from pipeshard.checkpoint.safetensors_files import PICKLED
from pipeshard.checkpoint.save import FileSave, FolderSave, owned, refuse_unsavable
from pipeshard.checkpoint.untrusted import load_plain, plain
from pipeshard.distributed.collectives import together_in
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.model import PipelineModel
from pipeshard.errors import CheckpointError, explained, summary
from pipeshard.hf import has_adapters, is_of_peft
from pipeshard.split.packed import UNWRITTEN, is_quantized

SHARD = 1024  # the default maximum size of a shard, in MB


class PipelineCheckpointIO:
    """Saves and loads checkpoints with the architecture's own parameter names. Each rank gathers only tensors of its
    own stage.

    Call each method on every rank. If one rank fails, all ranks raise CheckpointError. Without `use_async=True`, a save
    returns when its files are on disk. Until the new files are complete, the previous files remain.
    """

    def __init__(self, grid: Callable[[], Grid]) -> None:
        self._grid = grid  # a function, since the grid is created when a model is boosted
        self.pending: Save | None = None  # this rank's part of a background save
        self.saving = False  # whether a background save is running on any rank

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
        """Write the model to a folder (`shard=True`) or a file.

        The folder contains safetensors shards of at most `size_per_shard` MB, their index and the configs.
        `AutoModel.from_pretrained(checkpoint)` loads the folder. A file whose name ends in .pt, .pth or .bin has the
        format of `torch.save`. Other files are in the safetensors format. (`gather_dtensor` has no effect, and
        neither has `use_safetensors=False`, Booster's default.) In the safetensors format, a tensor to which the
        architecture ties several names is stored once.

        With `use_async=True`, a copy of the weights is written while training continues. The next save waits for this
        write, and raises an error if the write failed. At exit, the process also waits for the write. If the write
        failed, the process exits with code 1.

        With `merge=True`, the folder of a model with adapters can be read without peft: each stage merges its active
        adapters into copies of its weights.
        """
        boosted = boosted_model(model)
        self.wait()
        refuse_packed(boosted.unwrap())
        refuse_unwrapped_adapters(boosted.unwrap())
        is_adapted = is_of_peft(boosted.unwrap(), "PeftModel")
        if merge and not (is_adapted and shard):
            raise CheckpointError("merge=True requires shard=True (which writes a folder) and a model with adapters")
        if is_adapted and not merge:
            raise CheckpointError(
                "this model has adapters, which transformers cannot load from the same checkpoint as the base weights: "
                "save the adapters with booster.save_lora_as_pretrained, the training state with "
                "pipeshard.save_training_state, or the merged model with booster.checkpoint_io.save_model(model, "
                "folder, shard=True, merge=True)"
            )
        _refuse_prefix(prefix)
        refuse_unsavable(boosted)
        if shard:
            self.save_folder(boosted, Path(checkpoint), size_per_shard, use_async, merge)
            return
        if (suffix := Path(checkpoint).suffix) in PICKLED and use_safetensors:
            raise CheckpointError(
                f"use_safetensors=True contradicts the name {checkpoint}: a {suffix} file is written in the format of "
                "torch.save. Use the suffix .safetensors instead"
            )
        self._save(boosted, use_async, lambda tensors: FileSave.plan(boosted, tensors, Path(checkpoint), use_async))

    @together_in("save_model")
    def save_folder(
        self, model: nn.Module, folder: Path, size_per_shard: int = SHARD, use_async: bool = False, merge: bool = False
    ) -> None:
        """Like `save_model` with `shard=True`, but also accepts models with adapters or quantized weights. Adapters are
        merged only with `merge`, and quantized weights are omitted. If state_dict hooks convert tensors, the folder
        contains the model's own tensors. Without `merge`, `load_model` can load the folder into the same model."""
        boosted = boosted_model(model)
        self._save(
            boosted,
            use_async,
            lambda tensors: FolderSave.plan(boosted, tensors, folder, size_per_shard, use_async, of_base=merge),
            merge,
        )

    def planned(self, model: nn.Module, folder: Path) -> FolderSave | None:
        """Plan a save that writes copies of this stage's tensors to the folder. Returns None on ranks outside the first
        replica and slice, which do not write. Call it on all ranks."""
        boosted = boosted_model(model)
        with self._leading(boosted) as (leads, tensors):
            return FolderSave.plan(boosted, tensors, folder, SHARD, snapshot=True) if leads else None

    def start(self, save: Save) -> None:
        """Start this rank's background save. (On ranks that do not write, `_save` sets only `saving`, so that these
        ranks also take part in `wait`.)"""
        self.pending, self.saving = save, True
        save.start()

    def _save(
        self, boosted: PipelineModel, use_async: bool, plan: Callable[[dict[str, Tensor]], Save], merge: bool = False
    ) -> None:
        with self._leading(boosted, merge) as (leads, tensors):
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
    def _leading(self, boosted: PipelineModel, merge: bool = False) -> Iterator[tuple[bool, dict[str, Tensor]]]:
        """Context manager that yields whether this rank writes, and the tensors that its stage saves. Only ranks in the
        first replica and slice write. With `merge`, the tensors are copies with the adapters merged in. If one rank
        fails, all ranks raise CheckpointError: on entry if computing the tensors failed, otherwise on exit."""
        boosted.pipeline.gradients.settle()
        with together(self.grid.world):
            tensors = merged(boosted.unwrap(), owned(boosted)) if merge else owned(boosted)
        with together(self.grid.world):
            yield self.grid.leads, tensors

    def wait(self) -> None:
        """Wait until the background save is on disk. Raises CheckpointError on every rank if the save failed."""
        save, self.pending, saving, self.saving = self.pending, None, self.saving, False
        if save is not None:
            save.join()
        try:
            with together(self.grid.world) if saving else nullcontext():
                if save is not None and save.failed is not None:
                    raise CheckpointError(f"saving {save.target} in the background failed: {save.failed}")
        except CheckpointError:
            if save is not None:
                save.abandon()  # another stage may have failed
            raise

    @together_in("load_model")
    def load_model(self, model: nn.Module, checkpoint: str, strict: bool = True, **_: Any) -> nn.Module:
        """Load this stage's tensors in place from a Hugging Face folder, an index or a file, and return `model`.

        With `strict`, missing or unexpected names raise CheckpointError. If `PipelinePlugin.from_pretrained` created
        the model from the same `checkpoint`, `strict` has no effect: missing weights are initialized, with a warning,
        as in transformers' `from_pretrained`.
        """
        boosted = boosted_model(model)
        self.wait()
        first = getattr(boosted.unwrap(), "_pretrained", None) == str(checkpoint)
        load_weights(boosted, Path(checkpoint), strict, draw_missing=first)
        return model

    @together_in("load_training_state")
    def load_folder(self, model: nn.Module, folder: Path) -> None:
        """Load the result of `save_folder`, which contains every tensor of the model."""
        boosted = boosted_model(model)
        first = getattr(boosted.unwrap(), "_pretrained", None) == str(folder)
        load_weights(boosted, folder, strict=True, draw_missing=first, complete=True)

    @together_in("save_lr_scheduler")
    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        """Write the scheduler's state to a file. Only the first rank writes, since the state is the same on all
        ranks."""
        with new_file(Path(checkpoint), self.grid.world) as folder:
            if self.grid.first:
                state = plain(lr_scheduler.state_dict(), f"the state of this {type(lr_scheduler).__name__}")
                with writes(Path(checkpoint)):
                    torch.save(state, folder / Path(checkpoint).name)

    @together_in("load_lr_scheduler")
    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        with together(self.grid.world):
            kind, advice = "the state of an LR scheduler", "pass a file that booster.save_lr_scheduler wrote"
            state = load_plain(Path(checkpoint), kind, advice)
            name = type(lr_scheduler).__name__
            if not isinstance(state, dict) or state.keys().isdisjoint(lr_scheduler.state_dict()):
                raise CheckpointError(f"{checkpoint} is not {kind} (it contains no state of this {name}): {advice}")
            with explained(
                lambda error: CheckpointError(
                    f"{checkpoint} is not the state of this {name} ({summary(error)}): {advice} for the same scheduler"
                )
            ):
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
        """Write the optimizer's state to the file `checkpoint`. With `shard=True`, write one part per rank to the
        folder `checkpoint`. `gather_dtensor`, `size_per_shard` and `use_async` have no effect."""
        _refuse_prefix(prefix)
        self.wait()  # the model may be written to the same folder
        save_optimizer(optimizer, checkpoint, shard=shard)

    @together_in("load_optimizer")
    def load_optimizer(self, optimizer: Optimizer, checkpoint: str, prefix: str | None = None, **_: Any) -> None:
        """Load the optimizer's state from a folder or file that `save_optimizer` wrote. The number of stages may have
        changed since the save."""
        _refuse_prefix(prefix)
        load_optimizer(optimizer, checkpoint)

    @together_in("save_lora_as_pretrained")
    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: str, *_: Any, **__: Any) -> None:
        self.wait()  # as in save_optimizer
        save_lora(model, checkpoint)


def refuse_packed(model: nn.Module) -> None:
    """Raise CheckpointError for a model with quantized weights, which cannot be saved."""
    if is_quantized(model):
        raise CheckpointError(UNWRITTEN)


def refuse_unwrapped_adapters(model: nn.Module) -> None:
    """Raise CheckpointError for a transformers model that has adapters, but is not a PeftModel. In the saved folder,
    the adapted layers would have peft's inner names, and there would be no peft config. `from_pretrained` would
    therefore initialize these layers randomly."""
    if isinstance(model, PreTrainedModel) and has_adapters(model):
        raise CheckpointError(
            f"stages cannot save this {type(model).__name__}: it has adapters, but is not a PeftModel "
            "(model.add_adapter added the adapters, or from_pretrained loaded them). Before boost, add the adapters "
            "with booster.enable_lora(model, lora_config=...), or load them with booster.enable_lora(base, "
            "pretrained_dir=...). To save this model's adapters, call pipeshard.to_sequential(model, rank=0) on every "
            "rank, and then save_pretrained on the model that it returns on rank 0"
        )


def _refuse_prefix(prefix: str | None) -> None:
    if prefix is not None:
        raise CheckpointError(
            f"prefix={prefix!r} is not supported, since parameters have the architecture's own names: omit prefix"
        )


def boosted_model(model: nn.Module) -> PipelineModel:
    """Return `model` if `booster.boost` returned it, otherwise raise CheckpointError."""
    if not isinstance(model, PipelineModel):
        raise CheckpointError(
            f"this {type(model).__name__} was not boosted: pass the model that booster.boost(...) returned"
        )
    return model


def io_of(model: nn.Module) -> PipelineCheckpointIO:
    """The checkpoint IO of this boosted model."""
    io = boosted_model(model).checkpoint_io
    assert isinstance(io, PipelineCheckpointIO)
    return io
