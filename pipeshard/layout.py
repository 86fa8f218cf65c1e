"""Layout: how many stages and replicas the ranks at hand make, so that a step is the same whatever their number."""

from dataclasses import dataclass
from typing import Any

from pipeshard.errors import ConfigurationError


@dataclass(frozen=True)
class Layout:
    """`dp_size` replicas of a pipeline of `pp_size` stages, which together read `global_batch` samples a step.

    A step has the same microbatches under every layout: they are dealt out to the replicas whole. So its loss and its
    gradients are the same sums, in another order, and dropout draws the same.
    """

    pp_size: int
    dp_size: int
    global_batch: int
    microbatch_size: int

    @property
    def ranks(self) -> int:
        return self.pp_size * self.dp_size

    @property
    def batch_size(self) -> int:
        """The samples of a replica's batch: what its dataloader is made with."""
        return self.global_batch // self.dp_size

    @property
    def num_microbatches(self) -> int:
        """m, the microbatches of a replica's batch."""
        return self.batch_size // self.microbatch_size

    @property
    def arguments(self) -> dict[str, Any]:
        """What it says to the plugin: `PipelinePlugin(**layout.arguments, ...)`."""
        return {"pp_size": self.pp_size, "dp_size": self.dp_size, "microbatch_size": self.microbatch_size}


@dataclass(frozen=True)
class ToldLayout(Layout):
    """A layout that another rank has chosen, of whatever class, with the `arguments` that it is `told` to have."""

    told: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        return self.told


def layouts(ranks: int, global_batch: int, microbatch_size: int = 1, pp_size: int | None = None) -> list[Layout]:
    """Every layout of `ranks` that is legal, with at most `pp_size` stages; the most stages come first.

    Raises ConfigurationError, with the numbers, where there is none.
    """
    most = ranks if pp_size is None else pp_size
    sizes = {"ranks": ranks, "global_batch": global_batch, "microbatch_size": microbatch_size, "pp_size": most}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name}={value!r} is no positive integer")
    microbatches, rest = divmod(global_batch, microbatch_size)
    if rest:
        raise ConfigurationError(
            f"global_batch={global_batch} is no multiple of microbatch_size={microbatch_size}: the microbatches of a "
            "step, which are dealt out to the replicas, have to be whole"
        )
    stages = [p for p in range(min(ranks, most), 0, -1) if ranks % p == 0]
    legal = [p for p in stages if microbatches % (ranks // p) == 0]
    if not legal:
        tried = ", ".join(f"{ranks // p} of {p} stages" for p in stages)
        raise ConfigurationError(
            f"{ranks} ranks cannot train with pp_size={most} or less: the replicas they would make ({tried}) do not "
            f"divide the {microbatches} microbatches of a step (global_batch={global_batch}, microbatch_size="
            f"{microbatch_size}). Choose a global_batch that more numbers divide, such as 12 or 24 microbatches, or "
            "another number of ranks"
        )
    return [Layout(p, ranks // p, global_batch, microbatch_size) for p in legal]
