"""Local pool: runs a test's function on ranks that are threads of one worker and run in turns.

This is faster than processes, because ranks do not poll while they wait for each other, and one rank traces for all of
them in boost. A rank's random state and patches are active only while the rank runs.

The process pool repeats jobs that need processes: FSDP, tensor parallelism, a P2P other than the default, and ranks
that wait for a failed rank until the watchdog ends them.
"""

import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipeshard import PipelinePlugin
from pipeshard.batch.batch import Batch
from pipeshard.distributed import watching
from pipeshard.distributed.local import Aborted, LocalGrid, LocalWorld, WorldGroup
from pipeshard.distributed.mesh import ProcessGroupMesh
from pipeshard.distributed.p2p import P2P
from pipeshard.distributed.progress import Progress, own_progress
from pipeshard.errors import DeadlockError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.rng import Draws
from pipeshard.graph.trace import trace
from tests.pool import Pool
from tests.worker import Outcome, class_name

CPU = torch.device("cpu")
_rank: ContextVar[SimpleNamespace | None] = ContextVar("rank", default=None)  # torch's record of this rank's groups


class LocalPool(Pool):
    """A pool whose ranks are threads of one worker of another pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def _run(
        self, fn: Callable[..., Any], world_size: int, args: Sequence[Any], kwargs: dict[str, Any], timeout: float
    ) -> list[Outcome]:
        call = pickle.dumps((fn, args, kwargs))
        (outcome,) = self._pool._run(outcomes, 1, (call, world_size), {}, timeout)
        ended = outcome.value if outcome.kind == "returned" else [outcome] * world_size
        if any(one.kind == "stuck" or class_name(NeedsProcesses) in one.classes for one in ended):
            return self._pool._run(fn, world_size, args, kwargs, timeout)
        return ended


class NeedsProcesses(BaseException):
    """Raised on a rank that requires processes, so that the process pool repeats the job."""


def outcomes(call: bytes, world_size: int) -> list[Outcome]:
    """Run the pickled (fn, args, kwargs) on each rank. Returns the ranks' outcomes."""
    ended: dict[int, Outcome] = {}
    own = [OfRank() for _ in range(world_size)]
    world = LocalWorld(world_size, keeping=iter(own).__next__)

    def of_rank(rank: int) -> None:
        group = WorldGroup(world, range(world_size), rank)
        _rank.set(record_of(world, group, own[rank]))
        try:
            fn, args, kwargs = pickle.loads(call)  # each rank has its own arguments, as processes have
            ended[rank] = Outcome("returned", fn(*args, **kwargs))
        except Aborted:
            raise
        except BaseException as error:
            classes = tuple(class_name(cls) for cls in type(error).__mro__)
            ended[rank] = Outcome("raised", None, str(error), traceback.format_exc(), classes, time.monotonic())

    with in_place_of_processes():
        try:
            world.run(of_rank)
        except DeadlockError as error:
            stuck = Outcome("stuck", message=str(error))
            return [ended.get(rank, stuck) for rank in range(world_size)]
    return [ended[rank] for rank in range(world_size)]


def record_of(world: LocalWorld, group: WorldGroup, own: "OfRank") -> SimpleNamespace:
    """A stand-in for torch's record of process groups (`distributed_c10d._world`), for a rank of this world."""
    return SimpleNamespace(
        default_pg=group,
        pg_map=OfAnyGroup(lambda group: ("local", None)),
        pg_names=OfAnyGroup(lambda group: "local"),
        pg_group_ranks=OfAnyGroup(lambda group: {rank: place for place, rank in enumerate(group.ranks)}),
        pg_backend_config=OfAnyGroup(lambda group: "cpu:local"),
        pg_coalesce_state={},
        world=world,
        own=own,
    )


class OfAnyGroup(dict[WorldGroup, Any]):
    """A dict that computes its value for a group of a local world when the value is read."""

    def __init__(self, made: Callable[[WorldGroup], Any]) -> None:
        self._made = made

    def __contains__(self, group: object) -> bool:
        return isinstance(group, WorldGroup)

    def __missing__(self, group: WorldGroup) -> Any:
        return self._made(group)

    def get(self, group: WorldGroup, default: Any = None) -> Any:
        return self[group]


@contextmanager
def in_place_of_processes() -> Iterator[None]:
    """Context manager in which torch and the plugin use the local world on the ranks' threads."""
    watching._names.clear()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())  # otherwise, ranks restore each other's filters
        stack.enter_context(mock.patch.object(dist.distributed_c10d, "_world", Groups(dist.distributed_c10d._world)))
        stack.enter_context(mock.patch("pipeshard.plugin.shared_grid", OwnGrid))
        cached: Any = vars(PipelinePlugin)["stage_manager"]  # in Python 3.11, ranks wait while they hold its lock
        stack.enter_context(mock.patch.object(cached, "lock", nullcontext(), create=True))
        stack.enter_context(mock.patch.object(ProcessGroupMesh, "along", needs_processes))
        stack.enter_context(mock.patch.object(DeviceMesh, "__init__", needs_processes))
        stack.enter_context(mock.patch.object(dist.distributed_c10d, "_new_group_with_tag", needs_processes))
        stack.enter_context(mock.patch("pipeshard.plugin.constructing", nullcontext))  # counts a process's calls
        stack.enter_context(mock.patch("pipeshard.plugin.watch_world", lambda *_: None))
        stack.enter_context(mock.patch("pipeshard.engine.division.trace", Traces()))
        stack.enter_context(mock.patch.object(pytest.MonkeyPatch, "setattr", needs_processes))
        stack.enter_context(patches_of_ranks())
        yield


def needs_processes(*args: Any, **kwargs: Any) -> None:
    raise NeedsProcesses


@contextmanager
def patches_of_ranks() -> Iterator[None]:
    """Context manager in which each rank records its mock patches while they are active."""
    kinds = [mock._patch, mock._patch_dict]  # type: ignore[attr-defined]
    plain = [(kind, kind.__enter__, kind.__exit__) for kind in kinds]
    for kind, enter, leave in plain:
        kind.__enter__, kind.__exit__ = noting(enter, True), noting(leave, False)
    try:
        yield
    finally:
        for kind, enter, leave in plain:
            kind.__enter__, kind.__exit__ = enter, leave


def noting(method: Callable[..., Any], begins: bool) -> Callable[..., Any]:
    """Wrap `__enter__` or `__exit__` of mock patches, to update the running rank's record of patches."""

    def noted(patch: Any, *error: Any) -> Any:
        result, rank = method(patch, *error), _rank.get()
        if rank is not None and begins:
            rank.own.patches.append(patch)
        elif rank is not None:
            rank.own.patches.remove(patch)
        return result

    return noted


class OfRank:
    """A rank's own random state and mock patches, as in a process. They are active inside this context manager."""

    def __init__(self) -> None:
        self.patches: list[Any] = []
        self._draws, self._values = Draws.from_here(CPU), list[Any]()

    def __enter__(self) -> None:
        self._draws.__enter__()
        for patch, value in zip(self.patches, self._values, strict=True):
            put(patch, value)

    def __exit__(self, *error: object) -> None:
        values = [taken_out(patch) for patch in reversed(self.patches)]
        self._values = values[::-1]
        self._draws.__exit__(*error)


def taken_out(patch: Any) -> Any:
    """Undo a patch temporarily. Returns the value that it had set."""
    if isinstance(patch, mock._patch_dict):  # type: ignore[attr-defined]
        value = dict(patch.in_dict)
        put(patch, patch._original)
        return value
    value = vars(patch.target)[patch.attribute]
    if patch.is_local:
        setattr(patch.target, patch.attribute, patch.temp_original)
    else:
        delattr(patch.target, patch.attribute)
    return value


def put(patch: Any, value: Any) -> None:
    if isinstance(patch, mock._patch_dict):  # type: ignore[attr-defined]
        patch.in_dict.clear()
        patch.in_dict.update(value)
    else:
        setattr(patch.target, patch.attribute, value)


class Groups:
    """torch's record of process groups: the rank's record on a rank's thread, otherwise the record of the process."""

    def __init__(self, outside: Any) -> None:
        vars(self)["outside"] = outside

    def __getattr__(self, name: str) -> Any:
        return getattr(_rank.get() or self.outside, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_rank.get() or self.outside, name, value)


class OwnGrid(LocalGrid):
    """The plugin's grid on the thread of a rank."""

    def __init__(self, pp_size: int, dp_size: int | None = None, tp_size: int = 1) -> None:
        rank = _rank.get()
        if rank is None or tp_size > 1:
            raise NeedsProcesses
        super().__init__(rank.world, dist.get_rank(), pp_size, dp_size or rank.world.size // pp_size, CPU)

    def p2p(self, kind: object, placement: Sequence[int]) -> P2P | None:
        if kind != "broadcast":
            raise NeedsProcesses
        return super().p2p(kind, placement)


class Traces:
    """A stand-in for `trace` in boost: the first rank traces, and the other ranks of its world get the same Dataflow,
    since their models are the same. A test and the verification inside it have separate worlds."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[LocalWorld, dict[int, tuple[Any, Dataflow]]] = WeakKeyDictionary()
        self._calls: WeakKeyDictionary[Progress, int] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, batch: Batch, *args: Any, **kwargs: Any) -> Dataflow:
        progress: Any = own_progress()  # of this thread's rank
        made = self._made.setdefault(progress._world, {})
        self._calls[progress] = number = self._calls.get(progress, 0) + 1
        shown = shape_of(model, batch)
        if number not in made or made[number][0] != shown:
            made[number] = shown, trace(model, batch, *args, **kwargs)
        return made[number][1]


def shape_of(model: nn.Module, batch: Batch) -> Any:
    """Properties that a model and a batch share with those of all other ranks, unless a test makes ranks differ."""
    tensors = [(name, t.shape, t.dtype, t.requires_grad, t.device) for name, t in model.named_parameters()]
    leaves = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in batch.leaves]
    return type(model), model.training, tensors, batch.paths, leaves
