"""pipeshard: trains Hugging Face models across pipeline stages, as a plugin of ColossalAI's Booster."""

try:
    import colossalai.booster  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"pipeshard needs colossalai 0.5.0 ({error}). Its own pins are stale, so install it without its dependencies, "
        "and those it does use:\n"
        "    pip install --no-deps colossalai==0.5.0\n"
        "    pip install psutil peft einops galore_torch rich click packaging"
    ) from error

from pipeshard.checkpoint.training_state import load_training_state, save_training_state
from pipeshard.model.policy import Policy, register_policy
from pipeshard.model.ties import analyze_tied_weights
from pipeshard.model.trace import trace
from pipeshard.plugin import PipelinePlugin
from pipeshard.runtime.p2p import P2P
from pipeshard.schedule.simulate import simulate
from pipeshard.sequential import to_sequential

__version__ = "0.1.0"
__all__ = [
    "P2P",
    "PipelinePlugin",
    "Policy",
    "analyze_tied_weights",
    "load_training_state",
    "register_policy",
    "save_training_state",
    "simulate",
    "to_sequential",
    "trace",
]
