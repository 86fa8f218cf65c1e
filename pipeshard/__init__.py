"""pipeshard: exact pipeline parallelism for Hugging Face models that do not fit on one device."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeshard.checkpoint.to_sequential import to_sequential as to_sequential
    from pipeshard.checkpoint.training_state import load_training_state as load_training_state
    from pipeshard.checkpoint.training_state import save_training_state as save_training_state
    from pipeshard.distributed.p2p import P2P as P2P
    from pipeshard.elastic import ElasticJob as ElasticJob
    from pipeshard.elastic import PreemptibleJob as PreemptibleJob
    from pipeshard.entry import Engine as Engine
    from pipeshard.entry import initialize as initialize
    from pipeshard.graph.trace import trace as trace
    from pipeshard.graph.units import CutPoint as CutPoint
    from pipeshard.interop.build import Target as Target
    from pipeshard.interop.build import build as build
    from pipeshard.interop.build import register_target as register_target
    from pipeshard.layers.pipeline_module import PipelineModule as PipelineModule
    from pipeshard.layers.specs import LayerSpec as LayerSpec
    from pipeshard.layers.specs import TiedLayerSpec as TiedLayerSpec
    from pipeshard.notebook import notebook_launch as notebook_launch
    from pipeshard.planner.autoconfig import AutoConfig as AutoConfig
    from pipeshard.planner.planner import plan as plan
    from pipeshard.plugin import PipelinePlugin as PipelinePlugin
    from pipeshard.schedule.simulate import simulate as simulate
    from pipeshard.split.policy import Policy as Policy
    from pipeshard.split.policy import register_policy as register_policy
    from pipeshard.split.ties import analyze_tied_weights as analyze_tied_weights

__version__ = "0.2.0"
_MODULES = {
    "AutoConfig": "pipeshard.planner.autoconfig",
    "CutPoint": "pipeshard.graph.units",
    "ElasticJob": "pipeshard.elastic",
    "Engine": "pipeshard.entry",
    "LayerSpec": "pipeshard.layers.specs",
    "P2P": "pipeshard.distributed.p2p",
    "PipelineModule": "pipeshard.layers.pipeline_module",
    "PipelinePlugin": "pipeshard.plugin",
    "Policy": "pipeshard.split.policy",
    "PreemptibleJob": "pipeshard.elastic",
    "Target": "pipeshard.interop.build",
    "TiedLayerSpec": "pipeshard.layers.specs",
    "analyze_tied_weights": "pipeshard.split.ties",
    "build": "pipeshard.interop.build",
    "initialize": "pipeshard.entry",
    "load_training_state": "pipeshard.checkpoint.training_state",
    "notebook_launch": "pipeshard.notebook",
    "plan": "pipeshard.planner.planner",
    "register_policy": "pipeshard.split.policy",
    "register_target": "pipeshard.interop.build",
    "save_training_state": "pipeshard.checkpoint.training_state",
    "simulate": "pipeshard.schedule.simulate",
    "to_sequential": "pipeshard.checkpoint.to_sequential",
    "trace": "pipeshard.graph.trace",
}

# peft imports bitsandbytes if it is installed, and bitsandbytes logs that it has no fast 4-bit kernel for CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit_forward" not in record.msg)

__all__ = [*_MODULES]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import public names on first use: torch and transformers take seconds to import."""
    if name not in _MODULES:
        raise AttributeError(f"module 'pipeshard' has no attribute {name!r}")
    module = import_module(_MODULES[name])
    if name == "PipelinePlugin":
        compat = import_module("pipeshard.compat")
        compat.import_booster()
        compat.register_plugin(module.PipelinePlugin)
    globals()[name] = getattr(module, name)
    return globals()[name]
