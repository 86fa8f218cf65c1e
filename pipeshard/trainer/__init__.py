"""Trainer: transformers' Trainer, and any subclass of it, trained through a pipeline."""

from pipeshard.trainer.trainer import PipelineTrainer as PipelineTrainer
from pipeshard.trainer.trainer import pipelined as pipelined

__all__ = ["PipelineTrainer", "pipelined"]
