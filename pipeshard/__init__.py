"""pipeshard: trains Hugging Face models across pipeline stages, as a plugin of ColossalAI's Booster."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeshard.checkpoint.to_sequential import to_sequential
    from pipeshard.checkpoint.training_state import load_training_state, save_training_state
    from pipeshard.elastic import ElasticJob
    from pipeshard.engine.interpreter import P2P
    from pipeshard.graph.trace import trace
    from pipeshard.graph.units import CutPoint
    from pipeshard.interop.build import Target, build, register_target
    from pipeshard.layers.pipeline_module import PipelineModule
    from pipeshard.layers.specs import LayerSpec, TiedLayerSpec
    from pipeshard.planner.autoconfig import AutoConfig
    from pipeshard.planner.planner import plan
    from pipeshard.plugin import PipelinePlugin
    from pipeshard.schedule.simulate import simulate
    from pipeshard.split.policy import Policy, register_policy
    from pipeshard.split.ties import analyze_tied_weights

MISSING = (
    "pipeshard needs colossalai 0.5.0 ({}). Its own pins are stale, so install it without its dependencies, "
    "and those it does use:\n"
    "    pip install --no-deps colossalai==0.5.0\n"
    "    pip install psutil peft einops galore_torch rich click packaging"
)
__version__ = "0.1.0"
__all__ = [
    "P2P",
    "AutoConfig",
    "CutPoint",
    "ElasticJob",
    "LayerSpec",
    "PipelineModule",
    "PipelinePlugin",
    "Policy",
    "Target",
    "TiedLayerSpec",
    "analyze_tied_weights",
    "build",
    "load_training_state",
    "plan",
    "register_policy",
    "register_target",
    "save_training_state",
    "simulate",
    "to_sequential",
    "trace",
]
_MODULES = {
    "AutoConfig": "pipeshard.planner.autoconfig",
    "CutPoint": "pipeshard.graph.units",
    "ElasticJob": "pipeshard.elastic",
    "LayerSpec": "pipeshard.layers.specs",
    "P2P": "pipeshard.engine.interpreter",
    "PipelineModule": "pipeshard.layers.pipeline_module",
    "PipelinePlugin": "pipeshard.plugin",
    "Policy": "pipeshard.split.policy",
    "Target": "pipeshard.interop.build",
    "TiedLayerSpec": "pipeshard.layers.specs",
    "analyze_tied_weights": "pipeshard.split.ties",
    "build": "pipeshard.interop.build",
    "load_training_state": "pipeshard.checkpoint.training_state",
    "plan": "pipeshard.planner.planner",
    "register_policy": "pipeshard.split.policy",
    "register_target": "pipeshard.interop.build",
    "save_training_state": "pipeshard.checkpoint.training_state",
    "simulate": "pipeshard.schedule.simulate",
    "to_sequential": "pipeshard.checkpoint.to_sequential",
    "trace": "pipeshard.graph.trace",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are used: the command line and the schedules need no colossalai (seconds)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'pipeshard' has no attribute {name!r}")
    try:
        module = import_module(_MODULES[name])
    except ImportError as error:
        if "colossalai" in (error.name or "") or name == "PipelinePlugin":
            raise ImportError(MISSING.format(error)) from error
        raise
    globals()[name] = getattr(module, name)
    return globals()[name]
