"""Forward: one call of a module of the model, in which every stage runs its own units.

Sequences grow with every token, and a trace for each length would take longer than the forward. Therefore, the trace of
a twin (`entry.py`) determines the values that cross a cut, and each stage sends the sizes of these values to the next
stage in a header.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from pipeshard.batch.batch import Batch
from pipeshard.batch.tree import field_of
from pipeshard.distributed.collectives import CPU, as_bytes, broadcast_bytes, gather, share_tensor
from pipeshard.distributed.groups import ranks_of
from pipeshard.distributed.mesh import TP
from pipeshard.distributed.p2p import P2P, wait_for
from pipeshard.distributed.progress import own_progress
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.reader import digest_tensors
from pipeshard.engine.traces import FoundWays
from pipeshard.errors import BatchError, TraceError, UsageError, counted, of_all, summary
from pipeshard.generate.cache import Entries
from pipeshard.generate.described import describe, dtype_of, restore, spec_of
from pipeshard.generate.entry import arguments_by_name, call_key, counts_samples, entry_of, twin
from pipeshard.generate.rows import CacheParts, OfModule, StateParts, joined
from pipeshard.generate.samples import SampleDependence, cannot_split
from pipeshard.graph.taint import Value
from pipeshard.hf import CACHES, LOGITS, complete_cache, config_of, disable_caches, enable_caches, is_cache, is_ids
from pipeshard.private import tree_tensors
from pipeshard.replaced import replaced
from pipeshard.split.route import Route

MOST_DIMS = 8  # the maximum number of dimensions of a tensor that crosses a cut
OF_GHOSTS = "meta", "'NoneType' object has no attribute"  # parts of the errors that are raised if a layer reads a ghost
TOKENS = 256  # the minimum per microbatch: fewer tokens take as long, since reading the weights dominates


class CallRoutes(NamedTuple):
    """The route of a call through each of this rank's stages, and the differences between the call's sizes and the
    traced sizes."""

    routes: Sequence[Route]
    deltas: tuple[int, ...]


class Forward:
    """Runs calls of modules of the model together with all other ranks of the pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.group = pipeline, pipeline.group
        self.is_running = False
        self._sends: list[tuple[dist.Work, Tensor, int]] = []  # work, content, destination

    def begin(self, num_microbatches: int | None) -> None:
        """Prepare a call of `generate`. Call it on every rank of the world."""
        self.num_microbatches = num_microbatches
        group = self.pipeline.grid.sharing([TP], range(self.pipeline.num_stages))
        assert group is not None
        self._whole_group = group  # all ranks of this pipeline: its stages and their slices
        self._samples = SampleDependence(self.pipeline.model, self.pipeline.policy.units, self.group)
        self._sends.clear()
        self.forget()

    def forget(self) -> None:
        """Discard the state of a call of `generate`, such as its caches."""
        self._routes: dict[Any, CallRoutes] = {}
        self._caches: dict[int, Entries] = {}
        self._used: dict[int, Entries] = {}  # in one forward, by id, in the same order on all ranks
        self._parts: dict[int, CacheParts] = {}  # in one forward, by the ids of their parts
        self._states: dict[OfModule, Tensor] = {}  # tensors with one row per sample, in attributes that glue assigns

    def __call__(self, path: str, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the module `path`, whose own forward is `forward`, on all stages. Return the result on every rank, with
        the logits of the first slice, since the logits of other slices may be rounded differently on a GPU."""
        with replaced(self, is_running=True):
            self._refuse_other_tokens(path, args, kwargs)
            if self.pipeline.num_stages > 1:
                output = self._make(path, forward, arguments_by_name(forward, args, kwargs))
            else:  # each slice runs the whole model
                output = forward(*args, **kwargs)
            if isinstance(logits := getattr(output, LOGITS, None), Tensor):
                share_tensor(logits, self.pipeline.grid.slices)
            return output

    def _make(self, path: str, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        pipeline = self.pipeline
        entry = entry_of(pipeline.model, path, arguments)
        entry = pipeline.precision.of_batch(entry).to(pipeline.device)
        self._used, self._parts = {}, {}
        self._complete(path, entry.data)
        self._meet((), entry.data)
        batches, routes = self._planned(path, entry, forward)
        return self._share(self._run(batches, routes), entry, list(self._used.values()))

    def end(self, result: Any) -> None:
        """Raise UsageError on every rank if the ranks' results of `generate` have different tokens."""
        self._refuse_other_tokens(None, [result], {})

    def _refuse_other_tokens(self, path: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise UsageError on every rank if the ranks have chosen different tokens. Such ranks call different modules,
        or pass arguments with different integers. `path` is the called module, or None at the end of `generate`."""
        read = "the result" if path is None else f"a call of {path or type(self.pipeline.model).__name__}"
        digest = digest_of(args, kwargs)
        numbers = gather(torch.tensor([int(digest, 16), crc32(read.encode())]), self._whole_group)
        if (numbers != numbers[0]).any():
            told = _gathered([read, digest], self._whole_group)
            named = map(self.pipeline.grid.named, ranks_of(self._whole_group))
            listed = ", ".join(f"{name}: {digest} of {read}" for name, (read, digest) in zip(named, told))
            raise of_all(
                UsageError(
                    "the ranks of one pipeline have different tokens (digests of the integers that a forward reads, or "
                    f"of the result: {listed}). Every rank runs the loop "
                    "of generate, so your logits processors, stopping criteria and other code of the loop must return "
                    "the same values on every rank: use torch's generator instead of other random numbers, and call "
                    "modules of the model instead of reading their parameters, which are NaN on the ranks of other "
                    "stages, and sharded across the slices of a stage"
                )
            )

    def _planned(self, path: str, entry: Batch, forward: Callable[..., Any]) -> tuple[list[Batch], list[CallRoutes]]:
        """Return the microbatches of a call, and their CallRoutes. If the microbatches cannot be traced, do not split
        the call. If the user has set a number of microbatches, raise TraceError instead. A trace may fail because a
        value that is not an argument, such as the tensor of a hook or peft's `adapter_names`, has one entry per
        sample."""
        batches = self._microbatches(entry, forward)
        states, routes = self._state_parts(batches), list[CallRoutes]()
        try:
            for i, batch in enumerate(batches):
                with states.part(i):
                    routes.append(self._routes_of(path, batch.data, forward))
            if len(batches) > 1:
                for batch, call in zip(batches, routes, strict=True):
                    _refuse_other_rows(batch, call)
            return batches, routes
        except TraceError:  # raised on every rank
            if len(batches) == 1 or self.num_microbatches:
                raise
        self.num_microbatches, self._parts = 1, {}
        return [entry], [self._routes_of(path, entry.data, forward)]

    def _microbatches(self, entry: Batch, forward: Callable[..., Any]) -> list[Batch]:
        """Split the call into microbatches, each with its own part of every cache, or return the call itself as the
        only microbatch. A call is not split if this rank has several stages, or if rows are not samples (patches of
        images). Raises UsageError if the user has set a number of microbatches, but the samples must stay together."""
        tokens = max((leaf.numel() for path, leaf in entry.tensors.items() if is_ids(path)), default=0)
        asked = min(self.num_microbatches or tokens // TOKENS, entry.rows)
        if asked <= 1 or len(self.pipeline.stages.whole) > 1 or not counts_samples(self.pipeline.model, entry):
            return [entry]
        try:
            batches = entry.split(asked)
        except BatchError:
            return [entry]
        caches = [entries.cache for entries in self._used.values()]
        if (bond := self._samples.bond(entry, batches, caches, forward)) is not None:
            if self.num_microbatches:
                raise cannot_split(bond)
            return [entry]
        cut = [CacheParts(cache, [batch.rows for batch in batches]) for cache in caches]
        self._parts = {id(part): parts for parts in cut for part in parts.parts}
        return [
            replace(batch, leaves=tuple(_part_of(leaf, cut, i) for leaf in batch.leaves))
            for i, batch in enumerate(batches)
        ]

    def _complete(self, path: str, arguments: Mapping[str, Any]) -> None:
        """Before a call of the module `path`, create the missing entries of the caches in `arguments`. Otherwise, when
        a rank's layers run, a cache would also create the entries of earlier stages' layers, and the rank would count
        these as its own."""
        config = config_of(self.pipeline.model.get_submodule(path))
        for value in arguments.values():
            if is_cache(value):
                complete_cache(value, config)

    def _meet(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Register the caches among the arguments of a call, since glue may have created new caches."""
        for value in (*args, *kwargs.values()):
            if not is_cache(value) or id(value) in self._used or id(value) in self._parts:
                continue
            if self._parts:
                has_stages = len(self.pipeline.stages.whole) > 1  # each stage of this rank creates a cache
                of, remedy = (
                    ("stages of a rank", "use_cache=False") if has_stages else ("microbatches", "num_microbatches=1")
                )
                raise UsageError(
                    f"{type(self.pipeline.model).__name__} creates a cache in its forward, but the caches of several "
                    f"{of} cannot be merged: call model.generate(..., {remedy})"
                )
            if id(value) not in self._caches:
                self._caches[id(value)] = Entries(value)  # keeps the cache alive, so that its id is not reused
            self._used[id(value)] = self._caches[id(value)]
            self._used[id(value)].begin()

    def _routes_of(self, path: str, arguments: Mapping[str, Any], forward: Callable[..., Any]) -> CallRoutes:
        """The routes of this call. Calls with the same structure and sizes are traced once per call of `generate`."""
        model, traces = self.pipeline.model, self.pipeline.traces
        entry = entry_of(model, path, twin(model, path, arguments, forward))
        key = call_key(entry)
        if key not in self._routes:
            cached = disable_caches(model)
            found, failure = None, ""
            try:
                found = traces.find([[entry]], None)
            except TraceError as error:
                failure = str(error)
            finally:
                enable_caches(cached)
            found = self._agreed(found, failure, entry)
            flow, deltas = found.ways[0][0]
            self._routes[key] = CallRoutes(traces.routes.of(flow, True), deltas)
        return self._routes[key]

    def _agreed(self, found: FoundWays | None, failure: str, entry: Batch) -> FoundWays:
        """Return the trace on which all ranks of the pipeline agree. If the ranks' traces differ and there is only one
        replica, the ranks exchange the values on which the traces depend, as in a training step. Raises TraceError on
        every rank if the traces still differ, or if a rank found no trace."""
        grid, traces = self.pipeline.grid, self.pipeline.traces
        number = -1 if found is None else traces.number(found)
        numbers = gather(torch.tensor([number]), self.group)[:, 0].tolist()
        what = f"a call of {entry.entry or type(self.pipeline.model).__name__}"
        if failure:
            raise TraceError(f"{what} cannot run on several stages: {failure}")
        if failed := [grid.named(rank) for rank, one in zip(ranks_of(self.group), numbers, strict=True) if one == -1]:
            raise TraceError(f"{what} cannot run on several stages: see the error of {', '.join(failed)}")
        if len(set(numbers)) > 1 and grid.dp_size == 1:
            found = traces.find_alike([[entry]], None, True, grid, found)
        elif len(set(numbers)) > 1:
            raise TraceError(
                f"{what} takes a different path through the model on rank {self.pipeline.rank} than on other ranks. "
                "Pass the same prompts and arguments on all ranks of a pipeline, and use the same seed "
                "(torch.manual_seed)"
            )
        assert found is not None
        return found

    def _run(self, batches: Sequence[Batch], routes: Sequence[CallRoutes]) -> Any:
        """Run this rank's stages. Return the output for all microbatches on the rank of the last stage, and None on
        other ranks."""
        pipeline = self.pipeline
        replay, placement = pipeline.policy.replay, pipeline.policy.placement
        passed: list[dict[Value, Tensor]] = [{} for _ in batches]  # outputs of the previous stage on this rank
        own_progress().in_flight = True
        states = self._state_parts(batches)
        outputs: list[Any] = []
        changed: list[tuple[Entries, Entries]] = []
        with replay.randomness.step(pipeline.seed, pipeline.steps, forwards=pipeline.forwards + 1):
            for k, stage in enumerate(pipeline.stages.whole):
                source = placement[stage.index - 1] if stage.index else pipeline.rank
                destination = pipeline.rank if stage.is_last else placement[stage.index + 1]
                copies = self._copies(batches[0].rows) if len(pipeline.stages.whole) > 1 else []
                for i, (batch, call) in enumerate(zip(batches, routes, strict=True)):
                    own_progress().start(f"stage {stage.index} of a forward that generates, microbatch {i}")
                    route = call.routes[k]
                    received = passed[i] if source == pipeline.rank else self._receive(route, source)
                    if copies:
                        parts = [self._parts[id(copy.cache)] for _, copy in copies]
                        batch = replace(batch, leaves=tuple(_part_of(leaf, parts, 0) for leaf in batch.leaves))
                    replay.randomness.microbatch(i)
                    with states.part(i):
                        output, made = self._replayed(stage.index, route, call.deltas, received, batch)
                    passed[i] = {value: made[value].detach() for value in route.leaves.values}
                    if destination != pipeline.rank:
                        self._send(list(passed[i].values()), destination)
                    elif stage.is_last:
                        outputs.append(output)
                changed += copies
        states.join()
        pipeline.forwards += 1
        self._finish_sending()
        replay.repeats.clear()
        replay.free_blanks()
        for entries, copy in changed:
            entries.adopt(copy)
        return self._joined(outputs, [batch.rows for batch in batches])

    def _state_parts(self, batches: Sequence[Batch]) -> StateParts:
        return StateParts(self.pipeline.containers, self._states, [batch.rows for batch in batches])

    def _copies(self, rows: int) -> list[tuple[Entries, Entries]]:
        """For each cache, its Entries and the Entries of a copy for one stage of this rank. Glue runs on every stage,
        and must read the lengths that the caches had before the forward."""
        copies = []
        for entries in self._used.values():
            parts = CacheParts(entries.cache, [rows])
            self._parts[id(parts.parts[0])] = parts
            copies.append((entries, Entries(parts.parts[0])))
            copies[-1][1].begin()
        return copies

    def _replayed(
        self, stage: int, route: Route, deltas: Sequence[int], received: Mapping[Value, Tensor], batch: Batch
    ) -> tuple[Any, dict[Value, Tensor]]:
        try:
            return self.pipeline.policy.replay.run(route, deltas, received, batch, self._meet)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            if any(words in str(error) for words in OF_GHOSTS):
                raise _reads_ghost(stage, error) from error
            raise

    def _joined(self, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Join the parts of every cache. Return the joined outputs of all microbatches, in which the original caches
        replace the parts, or None if there are no outputs."""
        whole = {id(part): parts.cache for parts in self._parts.values() for part in parts.parts}
        for parts in {id(parts): parts for parts in self._parts.values() if len(parts.parts) > 1}.values():
            parts.join()
        return joined(outputs, sizes, whole) if outputs else None

    @property
    def _p2p(self) -> P2P:
        p2p = self.pipeline.interpreter.p2p
        assert p2p is not None
        return p2p

    def _send(self, tensors: Sequence[Tensor], destination: int) -> None:
        sizes = torch.zeros(len(tensors), MOST_DIMS, dtype=torch.int64)
        for row, tensor in zip(sizes, tensors, strict=True):
            row[: tensor.ndim] = torch.tensor(tensor.shape)
        for tensor in (sizes.to(self.pipeline.device), *tensors) if tensors else ():
            if tensor.numel():
                content = as_bytes(tensor.contiguous())
                self._sends.append((self._p2p.send(content, destination), content, destination))

    def _finish_sending(self) -> None:
        for work, _, destination in self._sends:
            wait_for([work], self._p2p, destination)
        self._sends.clear()

    def _receive(self, route: Route, source: int) -> dict[Value, Tensor]:
        p2p, device = self._p2p, self.pipeline.device
        values = route.enters.values
        if not values:
            return {}
        sizes = torch.empty(len(values), MOST_DIMS, dtype=torch.int64, device=device)
        wait_for([p2p.receive(as_bytes(sizes), source)], p2p, source)
        specs = [route.flow.spec(value) for value in values]
        shapes = [row[: len(spec.shape)] for row, spec in zip(sizes.tolist(), specs, strict=True)]
        tensors = [torch.empty(shape, dtype=spec.dtype, device=device) for shape, spec in zip(shapes, specs)]
        wait_for([p2p.receive(as_bytes(tensor), source) for tensor in tensors if tensor.numel()], p2p, source)
        return dict(zip(values, tensors, strict=True))

    def _share(self, output: Any, entry: Batch, caches: Sequence[Entries]) -> Any:
        """Create ghosts of the cache entries that other ranks have changed. Return the last stage's output on every
        rank."""
        pipeline = self.pipeline
        own_progress().start("the output of a forward that generates")
        known: dict[str, Any] = {f"[{k}]": leaf for k, leaf in enumerate(entry.leaves) if _has_content(leaf)}
        known |= {name: value for name, value in entry.data.items() if _has_content(value)}
        known |= {f"cache {k}": entries.cache for k, entries in enumerate(caches)}
        tensors: list[Tensor] = []
        said: dict[str, Any] = {"caches": [entries.changes() for entries in caches]}
        last = pipeline.policy.placement[-1]
        if pipeline.rank == last:
            names = {id(value): name for name, value in known.items()}

            def put(tensor: Tensor) -> Any:
                tensors.append(tensor.detach().contiguous())
                return [*spec_of(tensor), tensor.device.type]

            said["output"] = describe(output, put, names)
        of_ranks = _gathered(said, self.group)
        if len({len(told["caches"]) for told in of_ranks}) > 1:
            own_progress().in_flight = False
            raise of_all(
                UsageError(
                    f"{type(pipeline.model).__name__} creates a cache in its forward on only some of the stages: "
                    "call model.generate(..., use_cache=False)"
                )
            )
        for rank, told in enumerate(of_ranks):
            if rank != pipeline.rank:
                for entries, changes in zip(caches, told["caches"]):
                    entries.update(changes)
        if pipeline.rank != last:

            def get(spec: Any) -> Tensor:
                # The device of a tensor decides which process group broadcasts it, on every rank.
                device = CPU if spec[2] == "cpu" else pipeline.device
                tensors.append(torch.empty(spec[0], dtype=dtype_of(spec[1]), device=device))
                return tensors[-1]

            output = restore(of_ranks[last]["output"], get, known)
        for tensor in tensors:
            broadcast_bytes(tensor, pipeline.last_rank, self.group)
        own_progress().in_flight = False
        return self._checked(output)

    def _checked(self, output: Any) -> Any:
        """Return `output`. Raises TraceError on every rank if the logits contain NaN: a stage replaces missing values
        with NaN."""
        logits = getattr(output, LOGITS, None)
        if isinstance(logits, Tensor) and logits.is_floating_point() and bool(logits.isnan().any()):
            raise TraceError(
                f"the logits of {type(self.pipeline.model).__name__} contain NaN. Either the unsplit model also "
                "computes NaN (for example, because a parameter is not finite), or a layer reads cache entries of a "
                "layer on another stage. In the second case, cut the model elsewhere (the partition argument of "
                "PipelinePlugin), or generate without a cache (use_cache=False)"
            )
        return output


def digest_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A digest of the integer tensors in a call's arguments (ids, positions, masks), which must be equal on all ranks.
    For a large tensor, the digest includes only a sample of the values. The digest omits caches that are passed by
    name, since each rank has the states of its own layers and heads."""
    compared = [*args, *(value for name, value in kwargs.items() if name not in CACHES)]
    integers = (tensor for tensor in tree_tensors(compared) if not tensor.is_floating_point() and not tensor.is_meta)
    return digest_tensors(integers, lambda _: True)


def _refuse_other_rows(batch: Batch, call: CallRoutes) -> None:
    """Raise TraceError if the logits of a microbatch do not have one row per sample of the microbatch. The forward may
    have combined them with a tensor that has one row per sample of the whole batch."""
    for name, _, spec in call.routes[0].flow.outputs:
        if field_of(name) == LOGITS and spec.at(call.deltas)[:1] != (batch.rows,):
            raise TraceError(
                f"the logits of a microbatch of {counted(batch.rows, 'sample')} have the shape "
                f"{spec.at(call.deltas)} instead of one row per sample. If a hook or an adapter uses a tensor of the "
                "whole batch, call model.generate(..., num_microbatches=1)"
            )


def _reads_ghost(stage: int, error: Exception) -> TraceError:
    return TraceError(
        f"a layer of stage {stage} reads a cache entry of a layer on another stage ({summary(error)}). Cut "
        "the model elsewhere (the partition argument of PipelinePlugin), or generate without a cache (use_cache=False)"
    )


def _part_of(leaf: Any, cut: Sequence[CacheParts], i: int) -> Any:
    """Part i of `leaf` if the leaf is one of the split caches `cut`, otherwise the leaf itself."""
    return next((parts.parts[i] for parts in cut if parts.cache is leaf), leaf)


def _has_content(value: Any) -> bool:
    """Whether this input is sent by name instead of by content, since every rank has it: a tensor, a cache or a
    dict."""
    return isinstance(value, Tensor) or is_cache(value) or isinstance(value, dict)


def _gathered(said: Any, group: dist.ProcessGroup) -> list[Any]:
    """The plain data of every rank of the group, sent as JSON. This function is called for each token, and
    takes a twentieth of the time of `gather_objects`, which also sends tensors."""
    content = json.dumps(said).encode()
    lengths = gather(torch.tensor([len(content)]), group)[:, 0].tolist()
    padded = torch.frombuffer(bytearray(content.ljust(max(lengths), b" ")), dtype=torch.uint8)
    return [json.loads(row.numpy().tobytes()) for row in gather(padded, group)]
