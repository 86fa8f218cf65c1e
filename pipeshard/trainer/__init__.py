"""Trainer: trains a model in a pipeline with transformers' Trainer or any subclass of it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeshard.plugin import PipelinePlugin as PipelinePlugin
    from pipeshard.trainer.trainer import PipelineTrainer as PipelineTrainer
    from pipeshard.trainer.trainer import pipelined as pipelined

__all__ = ["PipelinePlugin", "PipelineTrainer", "pipelined"]


def __getattr__(name: str) -> Any:
    """Import transformers' Trainer only on first use, since the import takes a second. Planning a recipe imports other
    modules of this package, but does not use Trainer."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("pipeshard.trainer.trainer"), name)
