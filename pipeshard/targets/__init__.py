"""Targets: the runtimes that are shipped, one file each; importing one needs nothing of the runtime itself."""

from pipeshard.targets import colossalai, deepspeed, one_process, torch

__all__ = ["colossalai", "deepspeed", "one_process", "torch"]
