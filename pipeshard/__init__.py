"""pipeshard: trains Hugging Face models across pipeline stages, as a plugin of ColossalAI's Booster."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeshard.checkpoint.training_state import load_training_state, save_training_state
    from pipeshard.layers import PipelineModule
    from pipeshard.model.policy import Policy, register_policy
    from pipeshard.model.ties import analyze_tied_weights
    from pipeshard.model.trace import trace
    from pipeshard.planner.planner import plan
    from pipeshard.plugin import PipelinePlugin
    from pipeshard.runtime.p2p import P2P
    from pipeshard.schedule.simulate import simulate
    from pipeshard.sequential import to_sequential
    from pipeshard.specs import LayerSpec, TiedLayerSpec

MISSING = (
    "pipeshard needs colossalai 0.5.0 ({}). Its own pins are stale, so install it without its dependencies, "
    "and those it does use:\n"
    "    pip install --no-deps colossalai==0.5.0\n"
    "    pip install psutil peft einops galore_torch rich click packaging"
)
if find_spec("colossalai") is None:
    raise ImportError(MISSING.format("it is not installed"))

__version__ = "0.1.0"
__all__ = [
    "P2P",
    "LayerSpec",
    "PipelineModule",
    "PipelinePlugin",
    "Policy",
    "TiedLayerSpec",
    "analyze_tied_weights",
    "load_training_state",
    "plan",
    "register_policy",
    "save_training_state",
    "simulate",
    "to_sequential",
    "trace",
]
_MODULES = {
    "LayerSpec": "pipeshard.specs",
    "P2P": "pipeshard.runtime.p2p",
    "PipelineModule": "pipeshard.layers",
    "PipelinePlugin": "pipeshard.plugin",
    "Policy": "pipeshard.model.policy",
    "TiedLayerSpec": "pipeshard.specs",
    "analyze_tied_weights": "pipeshard.model.ties",
    "load_training_state": "pipeshard.checkpoint.training_state",
    "plan": "pipeshard.planner.planner",
    "register_policy": "pipeshard.model.policy",
    "save_training_state": "pipeshard.checkpoint.training_state",
    "simulate": "pipeshard.schedule.simulate",
    "to_sequential": "pipeshard.sequential",
    "trace": "pipeshard.model.trace",
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
