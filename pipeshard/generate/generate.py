"""Generate: transformers' own `generate` on a boosted model, whose forwards all stages run together.

Every rank of a pipeline runs the same loop, with the same tokens, logits and random numbers, and with a cache that has
the entries of the rank's own layers. Therefore, every feature of the loop (beams, processors, criteria, streamers)
works as in one process.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from pipeshard.distributed.collectives import gather_objects, share_tensor, together_in
from pipeshard.distributed.mesh import Grid
from pipeshard.distributed.progress import own_progress
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.model import LATER
from pipeshard.engine.reader import digest_tensors
from pipeshard.errors import BatchError, ConfigurationError, UsageError, of_all
from pipeshard.generate.forward import Forward
from pipeshard.graph.places import MISSING
from pipeshard.hf import COMPILED_CALL, disable_caches, enable_caches, is_cache, stops_by_clock
from pipeshard.private import tree_tensors
from pipeshard.replaced import StandIn, replaced


class Generation:
    """The `generate` of a boosted model on this rank."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.forward = Forward(pipeline)
        self.own: Any = None  # a `generate` that the user has set on the model, such as a partial
        self.find_own()

    def find_own(self) -> None:
        """Set `own` to the model's own `generate`, unless a Trainer has replaced it with this object."""
        own = vars(self.pipeline.model).get("generate")
        self.own = self.own if own is self else own

    @together_in("model.generate")
    def __call__(self, *args: Any, num_microbatches: int | None = None, **kwargs: Any) -> Any:
        """Run the model's own `generate`, and return its result. Call it on all ranks of all replicas. The ranks of one
        pipeline must pass the same prompts and arguments.

        The batch of each forward is split into `num_microbatches` microbatches, which are in flight at the same time,
        so that stages do not wait for each other. By default, a microbatch has about 256 tokens or more, so a forward
        of fewer than 512 tokens (such as one new token per sample) is not split.

        Raises ConfigurationError if parameters are sharded across replicas (fsdp=True), and for `max_time` in a
        pipeline of several ranks. Raises BatchError if the ranks of a pipeline pass different tensors. Raises
        UsageError if these ranks choose different tokens, if the model's `generate` was replaced after boost, or if
        `num_microbatches` would split samples that must stay together. With several stages, raises TraceError if a call
        of the model cannot be traced, if a layer reads the cache of a layer on another stage, or if the logits contain
        NaN.
        """
        pipeline = self.pipeline
        if pipeline.holdings.sharded is not None:
            raise ConfigurationError(
                "PipelinePlugin(fsdp=True) does not support generation: replicas gather parameters together, but each "
                "replica may generate a different number of tokens. Use fsdp=False, or save the model and load it in "
                "one process"
            )
        is_shared = pipeline.grid.size > pipeline.grid.dp_size  # several ranks generate the same samples
        if is_shared and stops_by_clock(pipeline.model, args, kwargs):
            raise ConfigurationError(
                "max_time is not supported in a pipeline: each rank reads its own clock, so ranks would stop at "
                "different tokens. Limit the number of tokens with max_new_tokens"
            )
        if vars(pipeline.model).get("generate") not in (self, self.own):
            raise UsageError(LATER)
        pipeline.refuse_blank()
        refuse_other_inputs(pipeline.grid, args, kwargs)
        pipeline.gradients.settle()
        own_progress().begin(pipeline.model, pipeline.policy.chunks)
        self._share_generators()
        pipeline.policy.replace_forward()
        self.forward.begin(num_microbatches)
        enable_caches(pipeline.cached)
        try:
            with pipeline.gradients.coupling.paused(), pipeline.precision.running(), self._together():
                kind: Any = type(pipeline.model)
                generate = self.own or functools.partial(kind.generate, pipeline.model)
                result = generate(*args, **kwargs)
            if is_shared:
                self.forward.end(result)
            return result
        finally:
            self.forward.forget()
            disable_caches(pipeline.model)

    def _share_generators(self) -> None:
        """Copy the states of the random generators from the first rank of the pipeline to its other ranks."""
        grid = self.pipeline.grid
        generators = self.pipeline.policy.replay.randomness.generators
        for group in (grid.stages, grid.slices):
            for generator in generators:
                state = generator.get_state()
                share_tensor(state, group)
                generator.set_state(state)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Context manager in which all ranks of a pipeline take part in each call of a module that contains units. With
        several stages, they also take part in each call of a unit. Since these calls exchange messages, transformers
        does not compile them, even on a GPU with a static cache, where it usually compiles decode steps."""
        pipeline = self.pipeline
        if pipeline.grid.size == pipeline.grid.dp_size:
            yield
            return
        names = {module: name for name, module in pipeline.model.named_modules()}
        around = [module for module in pipeline.containers if type(module).forward is not nn.Module.forward]
        compiling = [module for module in names if hasattr(type(module), COMPILED_CALL)]
        with ExitStack() as stack:
            for module in around:
                stack.enter_context(replaced(module, forward=_Together(self.forward, names[module], module)))
            for module in compiling:
                stack.enter_context(replaced(module, **{COMPILED_CALL: _Uncompiled(module)}))
            if pipeline.num_stages > 1:
                stack.enter_context(replaced(pipeline.policy.replay, outside=self.forward))
            yield


def refuse_other_inputs(grid: Grid, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise BatchError on every rank if the ranks of a replica have passed different tensors. Does not compare caches,
    since each stage has the states of its own layers."""
    size = grid.size // grid.dp_size
    if size == 1:
        return
    given = {f"positional argument {k}": value for k, value in enumerate(args)} | dict(kwargs)
    inputs = {name: _content(value) for name, value in given.items() if not is_cache(value) and tree_tensors(value)}
    of_ranks = gather_objects(inputs, grid.world)
    for rank, passed in enumerate(of_ranks):
        first = rank - rank % size
        expected = of_ranks[first]
        if passed == expected:
            continue
        name = next(name for name in expected | passed if expected.get(name) != passed.get(name))
        raise of_all(
            BatchError(
                f"the ranks of one pipeline must generate from the same inputs, but {name} is "
                f"{expected.get(name, 'missing')} on {grid.named(first)}, and {passed.get(name, 'missing')} on "
                f"{grid.named(rank)}. Pass the same prompts on every rank, as one batch: these ranks run each forward "
                "together. Only replicas (dp_size) may use different prompts, such as prompts[plugin.grid.replica]"
            )
        )


def _content(value: Any) -> str:
    """The shapes of the tensors in an argument, and a digest of their values."""
    tensors = tree_tensors(value)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    return f"of shape {shapes} (digest {digest_tensors(tensors, Tensor.is_floating_point)})"


class _Together(StandIn):
    """Replaces a module's forward with a call on all ranks of a pipeline. Inside such a call, runs the module's own
    forward."""

    def __init__(self, make: Forward, name: str, module: nn.Module) -> None:
        functools.update_wrapper(self, module.forward)
        self.make, self.name, self.own = make, name, module.forward
        self.instead_of = vars(module).get("forward", MISSING)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.make.is_running:
            return self.own(*args, **kwargs)
        return self.make(self.name, self.own, args, kwargs)


class _Uncompiled:
    """Replaces the method of a transformers model that returns a compiled `__call__`. Returns the uncompiled one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, compile_config: Any = None) -> Callable[..., Any]:
        call: Callable[..., Any] = self.module.__call__
        return call
