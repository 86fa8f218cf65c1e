"""PipelineModel: the boosted model that the user works with, which holds this rank's stages or the full model."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from pipeshard.batch.read import read_batch
from pipeshard.distributed.collectives import together_in
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.mixed_precision import filled_like
from pipeshard.errors import UsageError
from pipeshard.ghost import INTO_WEIGHTS, Refused, guard
from pipeshard.graph.nodes import nodes_from
from pipeshard.hf import CONTINUOUS
from pipeshard.private import allows_checkpoints, current_node, tree_tensors, will_execute
from pipeshard.replaced import replaced
from pipeshard.split.packed import UNWRITTEN, Packed


class Whole:
    """Runs `model(...)` of a one-stage pipeline outside execute_pipeline, and accumulates the gradients of a loss.

    Attributes:
        adding: while `backward` is running, the Wholes whose models accumulate gradients, in the same order on all
            replicas. `backward` was called on the first Whole in the list, whose loss scale applies to all of them.
    """

    adding: ClassVar[list["Whole"]] = []

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    @classmethod
    def of(cls, pipeline: Pipeline) -> "Whole | None":
        """The Whole of this pipeline, or None if this process holds only a part of the model (pp_size, tp_size,
        ep_size, or fsdp=True)."""
        grid = pipeline.grid
        return cls(pipeline) if grid.pp_size == grid.tp_size == 1 and not pipeline.config.fsdp else None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, and return the output. `loss.backward()` on the output's loss raises UsageError if the
        gradients would be wrong."""
        pipeline, precision = self.pipeline, self.pipeline.precision
        pipeline.refuse_blank()
        copies, trains = pipeline.gradients.copies, torch.is_grad_enabled()
        if trains:
            pipeline.holdings.refuse_cast()
        if copies.zero:  # other replicas may not call the model now, so a write cannot be sent to them
            copies.refuse_unshared()
        else:
            copies.follow(adopts=trains)
        if trains:
            pipeline.gradients.add_to()
        with precision.running():
            if not precision.lowers:
                output = pipeline.model(*args, **kwargs)
            elif args and kwargs:
                raise UsageError(
                    "model(...) got both positional and keyword arguments, but with precision='bf16' or 'fp16' it "
                    "accepts only one kind: pass all arguments by keyword"
                )
            else:
                batch = replace(read_batch(pipeline.model, kwargs or args), taken=None)
                output = precision.of_batch(batch).call(pipeline.model)
        for tensor in tree_tensors(output):
            if tensor.requires_grad and not tensor.is_leaf:  # a leaf, such as a parameter, would keep the hook
                tensor.register_hook(self._reached)
        return output

    @together_in("booster.backward")
    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss in this model, and in other boosted models on whose outputs the loss
        depends (such as the critic of a GAN). The gradients are those of the unweighted mean of the replicas'
        losses."""
        pipeline = self.pipeline
        if pipeline.gradients.copies.zero:
            pipeline.gradients.copies.refuse_differing()
        with replaced(Whole, adding=[]):
            self._begin()
            loss.backward(filled_like(loss, pipeline.scale / pipeline.grid.dp_size))
            added = Whole.adding
        for whole in added:
            whole.pipeline.sync.finish(whole.pipeline.synchronizes)
            whole.pipeline.gradients.added()

    def _begin(self) -> None:
        """Prepare this model to accumulate gradients in the current call of `backward`."""
        Whole.adding.append(self)
        scaling = Whole.adding[0].pipeline.scaling
        is_alike = (scaling is None) == (self.pipeline.scaling is None)
        if not is_alike and any(parameter.requires_grad for parameter in self.pipeline.model.parameters()):
            raise UsageError(
                "the loss depends on two boosted models, but only one of them has a loss scale (precision='fp16'): "
                "boost both with the same precision, or call requires_grad_(False) on the model that this loss "
                "should not train"
            )
        self.pipeline.gradients.add_to(scaling)
        if problems := self.pipeline.sync.problems():
            raise UsageError(problems[0])
        self.pipeline.sync.begin()

    def _reached(self, _: Tensor) -> None:
        """Hook on the model's outputs, which autograd calls before this model's backward."""
        pipeline = self.pipeline
        is_alone = pipeline.grid.dp_size == 1 and pipeline.scaling is None
        if not (Whole.adding or is_alone) and accumulates(pipeline.model.parameters()):
            raise UsageError(
                "loss.backward() would neither scale the loss (precision='fp16') nor sum gradients over replicas: "
                "call booster.backward(loss, optimizer)"
            )
        if Whole.adding and self not in Whole.adding:
            self._begin()


def accumulates(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the running backward pass adds to the `.grad` of one of these parameters (`torch.autograd.grad` does
    not). Call this function in a tensor hook."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        with suppress(RuntimeError):  # autograd.grad with respect to this parameter
            if will_execute(get_gradient_edge(parameter).node):
                return True
    if not (trained and allows_checkpoints()):
        return False
    # A custom autograd.Function may run its own backward pass, as a reentrant checkpoint does.
    functions = (node for node in nodes_from([current_node()]) if isinstance(node, BackwardCFunction))
    following = (node for each in functions for node, _ in each.next_functions if node is not None)
    return any(map(will_execute, following))


# Attributes that identify a wrapper: the wrapper reads them before it wraps a model.
ASKED_BY = {
    "_ddp_params_and_buffers_to_ignore": "DistributedDataParallel",
    "_is_accelerate_prepared": "accelerate (accelerator.prepare, or transformers' Trainer)",
}

# Methods that need all layers on this rank
NEED_ALL = {
    CONTINUOUS: (  # a thread of transformers would call this rank's part, and would only log the errors
        "continuous batching needs all layers of the model on one rank, but this rank holds only a part. Instead of "
        "generate_batch, or of generate with cache_implementation='paged', call model.generate(...) of the boosted "
        "model (in a Trainer: trainer.generate(...)) on every rank, with the prompts as one padded batch"
    ),
    "update_and_allocate": (
        "AdaLoRA chooses the rank of each adapter from the gradients of all layers, but this process has only a "
        "part of these gradients. Use LoraConfig (rank_pattern sets the rank of individual layers), or pp_size=1 "
        "without tp_size, ep_size or fsdp"
    ),
}

LATER = (
    "model.generate must not be replaced after booster.boost, since the stages call the `generate` that the model had "
    "at boost. Set it before booster.boost, or pass its arguments in each call of model.generate(...)"
)

# Attributes of PipelineModel itself. All other attributes are the model's.
OWN = frozenset({"module", "pipeline", "whole", "generation", "checkpoint_io"})
OWN_METHODS = ("forward", "compile", "extra_repr", "zero_grad")
# Methods of nn.Module that are delegated to the model, so that names, children, hooks and keys are the model's.
PUBLIC = [name for name, value in vars(nn.Module).items() if callable(value) and not name.startswith("_")]
ANSWERED = ("_apply", *(name for name in PUBLIC if name not in OWN_METHODS))


def _answered(name: str) -> Callable[..., Any]:
    """Return a method that calls the model's method `name` and returns its result, or the boosted model if the result
    is the model."""

    def call(self: "PipelineModel", *args: Any, **kwargs: Any) -> Any:
        module = self.module
        answer = getattr(module, name)(*args, **kwargs)
        return self if answer is module else answer

    call.__name__, call.__doc__ = name, getattr(nn.Module, name).__doc__
    return call


def _itself(module: nn.Module) -> nn.Module:
    return module


class PipelineModel(nn.Module):
    """A boosted model. `unwrap()` returns the original model, reduced to this rank's stages.

    Attributes and methods are delegated to the model. Setting an attribute on this object sets it on the model, so that
    the model's forward can read it.
    """

    def __init__(self, module: nn.Module, pipeline: Pipeline) -> None:
        nn.Module.__init__(self)  # not super(): ColossalAI's ModelWrapper may follow in the MRO
        self.module = module
        self.pipeline, self.whole = pipeline, Whole.of(pipeline)
        self.generation: Any = None  # runs `generate` on all stages
        self.checkpoint_io: Any = None  # the plugin's, which tracks asynchronous saves
        guard(module)
        layers = list(module.modules())
        refused = NEED_ALL if self.whole is None else {}
        # On several ranks, adapters cannot be merged, and the usual remedy, to_sequential, refuses quantized models.
        merged = layers if self.whole is None else [getattr(layer, "base_layer", None) for layer in layers]
        if any(isinstance(layer, Packed) for layer in merged):
            refused = refused | dict.fromkeys(INTO_WEIGHTS, UNWRITTEN)
        for each, (name, why) in product(layers, refused.items()):
            if hasattr(type(each), name):
                vars(each)[name] = Refused(each, name, why)

    @property
    def training(self) -> bool:
        """The model's training mode. train() and eval() change this mode, but boost does not."""
        module = self._modules.get("module")
        return module is None or module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if (module := self.__dict__.get("_modules", {}).get("module")) is not None:
            module.training = mode

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy or pickle the original model instead of this object, since process groups can be neither copied nor
        pickled."""
        return _itself, (self.module,)

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """The model that was passed to boost, even if it is a PeftModel. ColossalAI would return a wrapper of the base
        model, with the base model's parameter names."""
        module: nn.Module = self.module
        return module

    @property
    def generate(self) -> Any:
        """transformers' `generate`, run on all stages. Raises AttributeError if the model has no `generate`."""
        getattr(self.module, "generate")  # noqa: B009 - AttributeError
        return self.generation

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if module is None or name in OWN:
            super().__setattr__(name, value)
        elif name == "generate" and callable(value):
            raise UsageError(LATER)
        else:
            setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, such as its config or `gradient_checkpointing_enable`. Raises UsageError
        for an attribute that only a wrapper reads (`ASKED_BY`)."""
        if name in ASKED_BY:
            raise UsageError(
                f"{ASKED_BY[name]} cannot wrap a boosted model, since the booster already manages the model's "
                "replicas, optimizer and steps. Train the model with booster.execute_pipeline(...), or get the full "
                "model for other uses with pipeshard.to_sequential(model)"
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(super().__getattr__("module"), name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, including gradients accumulated under `no_sync` (with fsdp, such gradients are not in
        `.grad` yet)."""
        self.pipeline.sync.reset(self.pipeline.held_parameters().keys())
        self.pipeline.gradients.updates.cleared(None)
        self.module.zero_grad(set_to_none)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, if this process holds the full model (pp_size=1). Pass the output's loss to
        `booster.backward`.

        Raises UsageError if this process holds only a part of the model (a stage, or shards), or if `precision` has
        cast the parameters to 16 bits and the call has both positional and keyword arguments.
        """
        if self.whole is not None:
            return self.whole.call(args, kwargs)
        raise UsageError(
            f"this process holds only a part of the model (rank {self.pipeline.rank} of {self.pipeline.num_stages} in "
            "its pipeline; with tp_size, ep_size or fsdp, only shards), but model(...) needs the full model: use "
            "execute_pipeline(..., return_outputs=True), under torch.no_grad() for evaluation"
        )


for _name in ANSWERED:
    setattr(PipelineModel, _name, _answered(_name))
