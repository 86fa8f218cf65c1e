"""Copies: keeps all copies of an optimizer's weight equal when the training loop writes to one copy.

A weight may have an fp32 master weight in addition to its 16-bit parameter, a copy on the host in addition to the copy
on the device, or a copy on each replica.
"""

import itertools
import logging
from collections.abc import Mapping
from itertools import compress
from operator import attrgetter

import torch
from torch import Tensor

from pipeshard.distributed.collectives import gather, local
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.hosted import HostedWeight, HostParameter
from pipeshard.engine.mixed_precision import MasterWeight, States
from pipeshard.engine.zero import share_updates
from pipeshard.errors import UsageError
from pipeshard.graph.writes import Noted, count_reads, is_written, note, reads, sum_of_words

logger = logging.getLogger("pipeshard")

VERSION = attrgetter("_version")  # the number of in-place writes to a tensor
UNSHARED = (
    "the loop has not written the same value to {name} on every replica, so model(...) would compute with different "
    "weights on each replica. The loop may have written through optimizer.param_groups or a method of the optimizer: "
    "with zero_stage=1, optimizer.param_groups contains only the weights that this replica updates. Write to "
    "model.parameters() on every rank, or use booster.execute_pipeline(...) instead of model(...). execute_pipeline "
    "sends writes to the other replicas, as optimizer.train() and optimizer.eval() do"
)
DRIFTED = (
    "the data-parallel replicas of stage %d have different values of %s at step %d, so each replica trains a different "
    "model, and a save contains only the first replica's values. Your loop must write the same values to weights "
    "and gradients on all replicas. If the values are random numbers, seed the generator with the same number on every "
    "rank (torch.manual_seed(0)). If the values depend on a replica's batch, sum them over the ranks with "
    "torch.distributed.all_reduce"
)


class WeightCopies:
    """Tracks writes to weights that have several copies. `weights` are the weights of one optimizer, or of all
    optimizers of a model. The recorded states are stored on the MasterWeights, so a write is copied only once even if
    several optimizers contain the weight.

    Attributes:
        zero: whether only one replica, the owner, updates each weight (ZeRO).
    """

    def __init__(self, weights: Mapping[str, MasterWeight], grid: Grid) -> None:
        self._weights, self._grid = weights, grid
        self.zero = False
        self._watched: list[MasterWeight] = []
        self._tensors: list[Tensor] = []
        self._locals: list[Tensor] = []
        self._has_drifted = False  # whether a comparison has found different values on replicas
        self._has_frozen: bool | None = None  # whether a weight was frozen at boost (the same on all replicas)

    def watch(self) -> None:
        """Track the weights that now have several copies. Tensors that are already tracked keep their recorded states,
        so earlier writes to these tensors are still detected."""
        self.zero = any(weight.owner is not None for weight in self._weights.values())
        self._watched = [weight for weight in self._weights.values() if self.zero or weight.is_double]
        if self._has_frozen is None:
            self._has_frozen = not all(weight.parameter.requires_grad for weight in self._watched)
        self._tensors = [tensor for w in self._watched for tensor in (w.parameter, w.master)]
        self._locals = [*map(local, self._tensors)]
        for tensor in self._tensors:
            count_reads(tensor)
        self._note(self._noted(self._states()))

    def _states(self) -> list[States]:
        """The states of each tracked weight's parameter and `master`. A state consists of the tensor's version, the
        version and the address of its shard, and the number of uses of its `data`. A loop can write through `data`
        without changing a version. A write to a DTensor changes the DTensor's version, and a write to the DTensor's
        shard changes the shard's version."""
        places = map(Tensor.data_ptr, self._locals)
        states = zip(map(VERSION, self._tensors), map(VERSION, self._locals), places, map(reads, self._tensors))
        return [*zip(states, states)]

    def _noted(self, now: list[States]) -> list[States]:
        """The recorded states of each tracked weight. For a tensor without a recorded state, its state `now`."""
        rows = zip(self._watched, self._tensors[::2], self._tensors[1::2], now, strict=True)
        return [(w.noted.get(id(p), one), w.noted.get(id(master), other)) for w, p, master, (one, other) in rows]

    def _note(self, states: list[States]) -> None:
        """Record the states of the tracked weights."""
        for weight, (one, other) in zip(self._watched, states, strict=True):
            weight.noted = {id(weight.parameter): one, id(weight.master): other}
        for tensor in self._tensors if self.zero else ():
            note(tensor)

    def follow(self, adopts: bool, is_updated: bool = False) -> bool:
        """If the loop has written to one copy of a weight, make the copies on this rank equal again
        (`MasterWeight.follow`). With `is_updated`, also copy `master` to the parameter if no write is detected, since
        some kernels do not change a tensor's version. Returns whether the replicas must call `share` after this or an
        earlier `follow`."""
        now = self._states()
        noted = self._noted(now)
        if now == noted and not is_updated:
            return self._is_due
        followed = []
        for weight, (one, other), (one_before, other_before) in zip(self._watched, now, noted):
            # If `master` was written, a use of the parameter's `data` alone does not count as a write.
            is_master, is_parameter = other != other_before, one[:3] != one_before[:3]
            if is_master or one != one_before:
                followed.append(weight.follow(is_parameter or not is_master, is_master, adopts))
                weight.is_due |= followed[-1]
            elif is_updated:
                weight.take_value()
        if all(followed):
            self._note(self._states())
        return self._is_due

    @property
    def _is_due(self) -> bool:
        return self.zero and any(weight.is_due for weight in self._watched)

    def _written(self) -> dict[str, tuple[bool, bool]]:
        """With ZeRO, the weights that have been written to since their states were recorded. Maps each weight's name to
        a pair: whether the parameter was written, and whether `master` was written. A read of `data` does not count as
        a write."""
        states = itertools.chain(*self._noted(self._states()))
        each = (is_written(tensor, Noted(s[0], s[3])) for tensor, s in zip(self._tensors, states, strict=True))
        return {weight.name: pair for weight, pair in zip(self._watched, zip(each, each)) if any(pair)}

    def refuse_unshared(self) -> None:
        """With ZeRO, raise UsageError if the loop has written through the optimizer's groups, which contain only the
        weights of this replica. In 16-bit training, such a write changes a master weight. In fp32, the groups contain
        the parameters themselves. This method therefore assumes such a write if the loop has written to all trained
        weights of this replica (at least two), and to no trained weight of other replicas. `refuse_differing` later
        finds other writes that make replicas differ."""
        written = self._written()
        masters = [name for name, (is_parameter, _) in written.items() if not is_parameter]
        trained = [weight for weight in self._watched if weight.parameter.requires_grad]
        own = {weight.name for weight in trained if weight.owner == self._grid.replica and not weight.is_double}
        others = {weight.name for weight in trained if weight.owner != self._grid.replica}
        is_own = len(own) > 1 and own <= written.keys() and bool(others) and others.isdisjoint(written)
        if masters or is_own:
            raise UsageError(UNSHARED.format(name=min(masters or own)))

    def refuse_differing(self) -> None:
        """With ZeRO, raise UsageError on every replica if the loop has written to a weight on only some of the
        replicas, and the replicas now have different values of this weight. Call it on all ranks."""
        written = self._written()
        flags = gather(torch.tensor([w.name in written or w.is_due for w in self._watched]), self._grid.replicas)
        for weight in compress(self._watched, (flags != flags[0]).any(dim=0).tolist()):
            is_parameter, _ = written.get(weight.name, (True, False))
            value = weight.parameter if is_parameter else weight.master.to(weight.parameter.dtype)
            sums = gather(sum_of_words(value), self._grid.replicas)
            if bool((sums != sums[0]).any()):
                raise UsageError(UNSHARED.format(name=weight.name))

    def warn_of_drift(self, steps: int) -> None:
        """Warn once if the replicas have different values of a trained weight after `steps` steps. Reads all trained
        weights. Does nothing with ZeRO, which broadcasts updates. Call it on all ranks."""
        if self.zero or self._has_drifted:
            return
        trained = {name: weight for name, weight in self._weights.items() if weight.parameter.requires_grad}
        if not trained:
            return
        own = torch.stack([sum_of_words(weight.parameter) for weight in trained.values()])
        sums = gather(own.cpu(), self._grid.replicas)
        differing = [*compress(trained, (sums != sums[0]).any(dim=0).tolist())]
        self._has_drifted = bool(differing)
        if differing and self._grid.replica == 0:
            logger.warning(DRIFTED, self._grid.stage, min(differing), steps)

    def take_values(self) -> None:
        """Copy the updated values to the parameters on this rank. If an optimizer with its own list of parameters
        (LBFGS) has updated the parameters themselves, copy the parameters' values to the master weights instead."""
        self.follow(adopts=True, is_updated=True)

    def share(self) -> None:
        """With ZeRO, broadcast the weights that may have changed on any replica, each from its owner to the other
        replicas. Unchanged frozen weights (the base model of adapters) are not sent again. Call it on all ranks."""
        if not self.zero:
            return
        changed = self._watched
        if self._has_frozen:
            flags = gather(torch.tensor(self._changed(), dtype=torch.uint8), self._grid.replicas)
            changed = [*compress(self._watched, flags.any(dim=0).tolist())]
        before = self._states()
        noted = self._noted(before)
        share_updates(changed, self._grid.replicas)
        states = self._states()
        for k, weight in enumerate(self._watched):
            weight.shared, weight.is_due = states[k], False
            if not weight.is_double:
                noted[k] = states[k]
            elif before[k][0] == noted[k][0]:  # otherwise, `master` lacks the loop's write
                # A broadcast also changes the version of the sent parameter. This replica, which owns each double
                # weight, has not received `master`.
                noted[k] = states[k][0], noted[k][1]
        self._note(noted)

    def _changed(self) -> list[bool]:
        """Whether each tracked weight may have changed since the last `share`. A weight that is trained or has a
        gradient may have changed even if no write is recorded."""
        return [
            w.parameter.requires_grad or w.parameter.grad is not None or w.shared != now
            for w, now in zip(self._watched, self._states(), strict=True)
        ]

    @property
    def hosted(self) -> list[HostedWeight]:
        """The weights whose values are on the host."""
        return [w for w in self._watched if isinstance(w, HostedWeight) and isinstance(w.master, HostParameter)]
