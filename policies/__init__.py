"""Policies: the tensor-parallel plans that pipeshard ships by model type; `pipeshard.register_policy` adds policies."""

from pipeshard.policies.tensor_parallel import TP_PLANS

__all__ = ["TP_PLANS"]
