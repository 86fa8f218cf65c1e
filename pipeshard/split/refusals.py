"""Refusals: what a model does that stages could not reproduce exactly, refused before it runs.

The model's glue runs on every stage, but each stage has only some of the activations, parameters and generators. Glue
that branches on an activation, changes a parameter, or listens to a gradient would do something else on each of them.
All of this is visible in the Dataflow, at boost and for every new kind of batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from pipeshard.errors import ConfigurationError, TraceError, UsageError
from pipeshard.graph.dataflow import Dataflow, Wanted
from pipeshard.split.partition import Partition, boundaries


def refuse_unsplittable(model: nn.Module, flow: Dataflow, stages: Sequence[int], placement: Sequence[int]) -> None:
    """Refuse a model that stages could not run exactly. `stages[k]` is the part of the model that runs call k, and
    `placement` the process of each part."""
    if len(placement) > 1:
        _refuse_decisions(model, flow)
        _refuse_state(model, flow, stages, is_chunked=len(placement) > len(set(placement)))


def _refuse_decisions(model: nn.Module, flow: Dataflow) -> None:
    """Refuse glue that branches on an activation: only the stage that has it could take the right way."""
    if flow.decisions:
        raise TraceError(
            f"{type(model).__name__} decides in Python on a value of a unit, which only its stage has: "
            f"{'; '.join(flow.decisions)}. Compute it with tensor operations (torch.where), or inside a unit; so "
            "with gradients that forward asks for (autograd.grad)"
        )


def _refuse_state(model: nn.Module, flow: Dataflow, stages: Sequence[int], is_chunked: bool) -> None:
    """Refuse state that a forward leaves to the next and no stage could know: parameters that glue changes, generators
    and counters that several stages advance."""
    for place in flow.carried:
        names = [flow.calls[call].unit if call >= 0 else "the model's forward" for call in sorted(place.writers)]
        writers = {stages[call] if call >= 0 else -1 for call in place.writers}
        sources = [*sorted(place.uses.parameters), *(flow.calls[call].unit for call in sorted(place.makers))]
        is_repeated = is_chunked or (place.kind == "parameter" and model.training)
        if place.kind in ("parameter", "settled") and -1 in writers and (sources or is_repeated):
            raise TraceError(
                f"the forward of {type(model).__name__} changes the parameter {place.name} outside of its unit"
                f"{f', by {sources[0]}' if sources else ''}, and no stage can do that for all: do it after "
                "optimizer.step(), or inside the unit, or use one stage (pp_size=1)"
            )
        if place.kind in ("generator", "number") and len(writers) > 1:
            raise TraceError(
                f"{names[0]} and {names[-1]} {'draw from' if place.kind == 'generator' else 'change'} "
                f"{place.name}, but are on several stages, each of which has one of its own: give each layer its "
                "own, or move this out of all layers into the model's forward, or use one stage (pp_size=1)"
            )


def refuse_hooks(flow: Dataflow, stages: Sequence[int], num_stages: int) -> None:
    """Refuse a gradient hook of glue that would not get the whole gradient exactly once: every stage that reads the
    tensor runs that glue, and so may the stage that computed it."""
    ends = {stage: k for k, stage in enumerate(stages)}
    for number, hook in enumerate(flow.hooks):
        readers = {stage for call, stage in zip(flow.calls, stages) if number in call.reads.hooks}
        readers |= {num_stages - 1} if flow.loss is not None and number in flow.loss.hooks else set()
        first = stages[hook.home.call] if hook.home is not None else min(readers, default=0)
        passing = {s for s in range(first, max(readers, default=0)) if ends.get(s, -1) >= hook.calls}
        if len(readers | (passing if hook.home is not None else set())) > 1:
            raise TraceError(
                f"the model puts a gradient hook on a tensor that is used on several stages ({hook.line}), each of "
                "which has a part of its gradient. Put the hook on a tensor inside a layer, or cut elsewhere "
                "(partition=[...])"
            )


def refuse_backward_hooks(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    around: Sequence[nn.Module],
    flow: Dataflow,
    partition: Partition,
    outputs: Wanted,
) -> None:
    """Refuse a module's backward hook where no stage has all gradients that it gets: on a module `around` units, or on
    a unit with a result that gets a gradient and crosses a cut. UsageError says which."""
    hooked = {m for m in (*around, *units.values()) if m._backward_hooks or m._backward_pre_hooks}
    if not hooked or partition.num_stages == 1:
        return
    crossing = boundaries(flow, partition.of_calls(flow), partition.num_stages, outputs)
    sending = {flow.calls[value.call].unit for boundary in crossing for value in boundary.gradients}
    hooked -= {unit for name, unit in units.items() if name not in sending}
    for name, module in model.named_modules():
        if module in hooked:
            where = "is cut into stages itself" if module in around else "gives a result to another stage"
            raise UsageError(
                f"{name or 'the model'} ({type(module).__name__}) has a backward hook (register_full_backward_hook, "
                f"register_full_backward_pre_hook), but {where}, so no stage has all the gradients that it is about: "
                "put the hook on a module inside of a unit, or cut elsewhere (the partition argument of PipelinePlugin)"
            )


def refuse_compile_options(options: Mapping[str, Any], pp_size: int, by_whole_batch: bool) -> None:
    """Refuse what torch.compile is asked for, and cannot do for units of a pipeline; `by_whole_batch`: it compiles, and
    batch norm is to wait for the whole batch."""
    if by_whole_batch:
        raise ConfigurationError(
            "deferred_batch_norm=True does not go with compile: what a compiled unit normalizes is not seen"
        )
    if "units" in options:
        raise ConfigurationError(
            f'compile={options!r}: consecutive units are no longer compiled as one function. Drop "units", '
            "and make layers that should be fused one module of the model"
        )
    modes = ("reduce-overhead", "max-autotune")
    graphs = options.get("mode") in modes or "triton.cudagraphs" in options.get("options", {})
    if graphs and pp_size > 1:
        raise ConfigurationError(
            f"compile={options!r}: CUDA graphs write the results of each microbatch where those of the one before are, "
            "which is still to go backward. Drop them, or use mode='max-autotune-no-cudagraphs'"
        )
