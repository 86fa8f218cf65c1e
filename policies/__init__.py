"""Policies: the ones shipped for architectures by name; `pipeshard.register_policy` adds one."""

from pipeshard.policies.tensor_parallel import TP_PLANS

__all__ = ["TP_PLANS"]
