"""Trainer: transformers' Trainer, and any subclass of it, with a model that is trained in a pipeline."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeshard.plugin import PipelinePlugin as PipelinePlugin
    from pipeshard.trainer.trainer import PipelineTrainer as PipelineTrainer
    from pipeshard.trainer.trainer import pipelined as pipelined

__all__ = ["PipelinePlugin", "PipelineTrainer", "pipelined"]


def __getattr__(name: str) -> Any:
    """Import transformers' Trainer only on first use, since the import takes a second. Planning a recipe does not
    require it, but imports other modules of this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("pipeshard.trainer.trainer"), name)
