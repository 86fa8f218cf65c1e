"""Policies: the architectures that are supported by name, a file per family; `pipeshard.register_policy` adds one.

Each class lists its model types (`config.model_type`) and says what its layers read (`expects`).
"""

from pipeshard.policies import audio, decoders, encoder_decoders, encoders, mixture_of_experts, vision, vision_language

__all__ = ["audio", "decoders", "encoder_decoders", "encoders", "mixture_of_experts", "vision", "vision_language"]
