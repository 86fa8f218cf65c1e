"""Policies: the tensor-parallel plans that pipeshard ships, by model type.

To add a policy, call `pipeshard.register_policy`.
"""

from pipeshard.policies.tensor_parallel import TP_PLANS

__all__ = ["TP_PLANS"]
