"""Chains: the inputs of the layers of each architecture, in one table per family.

If a release of transformers changes which values cross a cut, the model still trains exactly, since the trace
determines which values are sent. The sweep compares every trace with these tables, so that such a change is noticed.
"""

from torch import nn

from tests.parity.chains import audio, decoders, encoder_decoders, encoders, mixture_of_experts, vision, vision_language
from tests.parity.chains.chain import Chain

FAMILIES = (audio, decoders, encoder_decoders, encoders, mixture_of_experts, vision, vision_language)
EXPECTED = {
    model_type: chain for family in FAMILIES for chain, types in family.EXPECTED.items() for model_type in types.split()
}


def chain_of(model: nn.Module) -> Chain | None:
    """What the table has for a model's architecture."""
    return EXPECTED.get(str(getattr(getattr(model, "config", None), "model_type", "")))
