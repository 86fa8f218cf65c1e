"""Policies: the architectures that are supported by name, a table per family; `pipeshard.register_policy` adds one.

Each table lists the model types (`config.model_type`) whose layers read what a Chain says.
"""

from pipeshard.policies import audio, decoders, encoder_decoders, encoders, mixture_of_experts, vision, vision_language
from pipeshard.policies.tensor_parallel import TP_PLANS

__all__ = ["EXPECTED", "TP_PLANS"]

FAMILIES = (audio, decoders, encoder_decoders, encoders, mixture_of_experts, vision, vision_language)
EXPECTED = {
    model_type: chain for family in FAMILIES for chain, types in family.EXPECTED.items() for model_type in types.split()
}
