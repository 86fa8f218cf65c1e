"""Ghost: the placeholder for a parameter on a stage that does not hold it.

The module tree of a model is the same on every stage, so optimizers, hooks and user code encounter parameters that the
stage does not hold. With meta tensors instead, code would compute results without values, and fail far from the cause.
A Ghost has the parameter's shape and dtype and the stage's device, but allocates only one element. Reading or writing
its values raises an error with the parameter's name.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from pipeshard.errors import UsageError
from pipeshard.private import DisableTorchFunctionSubclass, tree_tensors

# Functions and attributes that neither read nor write values, in addition to all functions whose names start with
# `is_` and are not in READING.
HARMLESS = {"__len__", "_backward_hooks", "_base", "_grad", "_has_compatible_shallow_copy_type", "_is_view", "_version"}
HARMLESS |= {"__dir__", "_post_accumulate_grad_hooks", "data_ptr", "device", "dim", "dtype", "element_size"}
HARMLESS |= {"get_device", "grad"}
HARMLESS |= {
    "grad_dtype",
    "grad_fn",
    "has_names",
    "itemsize",
    "layout",
    "name",
    "names",
    "nbytes",
    "ndim",
    "ndimension",
}
HARMLESS |= {"nelement", "numel", "output_nr", "requires_grad"}
READING = {"is_contiguous", "is_nonzero"}  # safetensors asks whether a tensor is contiguous before it reads the memory
HOOKING = {"register_hook", "register_post_accumulate_grad_hook"}
HARMLESS |= {
    "requires_grad_",
    "result_type",
    "retain_grad",
    "retains_grad",
    "shape",
    "size",
    "storage_offset",
    "stride",
}
HARMLESS |= {"untyped_storage", *(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn"))}
HARMLESS |= {f"new_{kind}" for kind in ("empty", "empty_strided", "zeros", "ones", "full")}
# Functions that return the tensor itself if it already has the requested dtype and device.
CONVERTING = {"to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda"}
INTO_WEIGHTS = "merge_adapter", "unmerge_adapter", "merge_and_unload"  # methods of peft that change base weights
MERGING = *INTO_WEIGHTS, "add_weighted_adapter"
OPERATORS = "add", "sub", "mul", "matmul", "truediv", "floordiv", "div", "mod", "pow", "and", "or", "xor"
WRITING_METHODS = {"__setitem__", *(f"__i{operator}__" for operator in OPERATORS)}  # and all names that end in "_"
GUARDED = "_apply", "load_state_dict", "state_dict", "save_pretrained", "push_to_hub", "resize_token_embeddings"
_inside = 0
_deferred: list[UsageError] | None = None  # the errors of reads and writes inside `as_if_held`


@contextmanager
def inside_pipeshard() -> Iterator[None]:
    """Context manager for pipeshard's own use of a model: glue runs on every stage, and may read Ghosts.

    Inside, no_grad replaces inference mode: autograd cannot use tensors that were created in inference mode, and some
    tensors (buffers, weights) are kept from one step to the next.
    """
    global _inside  # not thread-local: backward passes run in other threads
    _inside += 1
    try:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                yield
        else:
            yield
    finally:
        _inside -= 1


@contextmanager
def as_if_held() -> Iterator[list[UsageError]]:
    """Context manager for a user's function that calls the pipeline. All ranks must reach this call, so reads and
    writes of Ghosts raise no errors: Ghosts look like held parameters, reads return NaN, and writes are discarded.
    Yields the list of the errors that were not raised. If this list is not empty, the function's results are not
    valid."""
    global _deferred
    before, _deferred = _deferred, []
    try:
        yield _deferred
    finally:
        _deferred = before


def looks_held() -> bool:
    """Whether the caller is the user's code inside `as_if_held`."""
    return _deferred is not None and not _inside


class Ghost(nn.Parameter):
    """A released parameter: it keeps its names, shape and dtype, but is frozen and has no values.

    Reading or writing the values of a Ghost, or copying or pickling it, raises UsageError with its `label`. Under
    `inside_pipeshard`, glue may use a Ghost if no result depends on it: reads return NaN, and writes are discarded.
    Under `as_if_held`, reads and writes do the same, and the errors are collected instead of raised.

    Attributes:
        pipeshard_trainable: whether the stages that hold the parameter train it.
        label: the parameter's name, and the stages that hold the parameter.
        released: a weak reference to the parameter itself, which code may still reach (in a list, or in a closure).
    """

    pipeshard_trainable: bool
    label: str
    released: TensorWeakRef

    @classmethod
    def of(cls, parameter: nn.Parameter, device: torch.device, label: str) -> "Ghost":
        ghost = cls(_blank(parameter.shape, parameter.dtype, device), requires_grad=False)
        ghost.pipeshard_trainable, ghost.label = parameter.requires_grad, label
        ghost.released = TensorWeakRef(parameter)
        return ghost

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sets = func.__name__ == "__set__"
        name = getattr(func.__self__, "__name__", "") if sets or func.__name__ == "__get__" else func.__name__
        asks = name == "type" and len(args) + len(kwargs) == 1
        with DisableTorchFunctionSubclass():
            if name in HOOKING and args[0].pipeshard_trainable and not args[0].requires_grad:
                return RemovableHandle(OrderedDict())  # only the stages that hold the parameter call the hook
            if name == "requires_grad" and not sets and looks_held():
                return args[0].pipeshard_trainable
            if name in HARMLESS | HOOKING or asks or (name.startswith("is_") and name not in READING):
                return func(*args, **kwargs)
            if name in CONVERTING and isinstance(args[0], Ghost):
                number = args[0].as_strided((), ())
                if func(number, *args[1:], **kwargs) is number:
                    return args[0]
            if sets and name == "data" and (args[1] is args[0] or _inside):
                return None
            if not _inside:
                error = unheld(_ghosts((args, kwargs))[0], name, LOOP)
                if _deferred is None:
                    raise error
                _deferred.append(error)
            if name in ("data", "detach"):  # writes to the result count as writes to the Ghost
                return args[0]
            if name in WRITING_METHODS or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs:
                return _written(func, name, args, kwargs)
            return func(*args, **kwargs)

    def lower(self, dtype: torch.dtype | None) -> None:
        """Change the dtype in place."""
        with DisableTorchFunctionSubclass():
            self.data = _blank(self.shape, dtype, self.device)

    def __deepcopy__(self, memo: Any) -> "Ghost":
        if not _inside:
            raise unheld(self, "copy.deepcopy")
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unheld(self, "pickle")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Ghost of shape {tuple(self.shape)} and {self.dtype}: {self.label}"


def with_released(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each named parameter and, for a Ghost, also the parameter that the Ghost replaces, if code can still reach
    it."""
    for name, parameter in parameters:
        yield name, parameter
        if isinstance(parameter, Ghost) and (released := parameter.released()) is not None:
            yield name, released


@contextmanager
def without_values(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Context manager in which the trainable ones of these parameters contain NaNs, like a Ghost that glue reads. Code
    that reaches a replaced parameter (in a list, or in a closure) would otherwise compute with the values at boost."""
    kept = [(p, p.data) for p in parameters if type(p) is nn.Parameter and p.requires_grad and not p.is_meta]
    for parameter, _ in kept:
        parameter.data = _blank(parameter.shape, parameter.dtype, parameter.device)
    try:
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


LOOP = (
    "In a training loop, skip the parameters for which pipeshard.split.materialize.is_released(parameter) is True, or "
    "use the parameters in optimizer.param_groups. If the loop pairs parameters of two models (an average of the "
    "weights), both parameters of a pair must be on one stage: pass partition='uniform' or a list. If the loop pairs "
    "two parts of one model, make each part a separate model, and boost both. "
)


def unheld(ghost: Ghost, what: str, before: str = "") -> UsageError:
    """The error for the operation `what`, which needs values that this rank does not hold. The advice begins with the
    text `before`, unless `what` has its own advice."""
    advice = before + (
        "Save the model with booster.save_model(model, folder, shard=True) or trainer.save_model(folder), or adapters "
        "with booster.save_lora_as_pretrained(model, folder). Load a saved model with booster.load_model(model, "
        "folder). Get the full model with pipeshard.to_sequential(model). Call these functions on every rank"
    )
    if what == "resize_token_embeddings":
        advice = "Resize the embeddings before booster.boost, or before the Trainer is constructed"
    elif what in (*CONVERTING, "_apply", "share_memory_"):
        advice = "Move or convert a model before booster.boost, or pass precision=... to PipelinePlugin"
    elif what in MERGING:
        advice = (
            "Merge adapters before booster.boost. After boost, either call pipeshard.to_sequential(model, rank=0) on "
            "every rank and merge adapters in the model that rank 0 gets, or save merged weights with "
            "booster.checkpoint_io.save_model(model, folder, shard=True, merge=True)"
        )
    return UsageError(f"{what}: {ghost.label}. {advice}")


class Guarded:
    """A wrapper for a method of a module that contains Ghosts. If the call needs the values of a Ghost, the wrapper
    raises UsageError before the method changes anything."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if isinstance(parameter, Ghost) and not _inside and self._needs(name, parameter, *args, **kwargs):
                raise unheld(parameter, self.name)
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)

    def _needs(
        self, name: str, ghost: Ghost, argument: Any = None, *_: Any, state_dict: Any = None, **options: Any
    ) -> bool:
        """Whether a call with these arguments reads or changes the Ghost's values."""
        if self.name == "_apply":
            return argument(ghost) is not ghost
        if self.name == "load_state_dict":
            return name in (argument if state_dict is None else state_dict)
        if self.name == "state_dict":
            return not options.get("keep_vars") and not looks_held()
        if self.name == "resize_token_embeddings":
            rows = self.module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
            size = options.get("new_num_tokens", argument)
            return size not in (None, rows) or bool(options.get("pad_to_multiple_of"))
        return state_dict is None  # otherwise the caller's own state_dict is saved


class Refused(Guarded):
    """Replaces a method that a boosted model does not support: each call raises UsageError with the reason `why`."""

    def __init__(self, module: nn.Module, name: str, why: str) -> None:
        super().__init__(module, name)
        self.why = why

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(f"{self.name}: {self.why}")


def guard(model: nn.Module) -> None:
    """In every module that contains Ghosts, guard the methods that would otherwise fail after a partial change, or
    raise an error whose advice is meant for a training loop."""
    for module in model.modules():
        if any(isinstance(parameter, Ghost) for parameter in module.parameters()):
            for name in (*GUARDED, *MERGING):
                if hasattr(type(module), name) and name not in module.__dict__:  # unless set on the instance
                    module.__dict__[name] = Guarded(module, name)


def _blank(shape: torch.Size, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """A tensor that contains NaNs (zeros, if the dtype has no NaN), and allocates only one element."""
    has_nan = dtype is None or dtype.is_floating_point or dtype.is_complex
    return torch.full((), float("nan") if has_nan else 0, dtype=dtype, device=device).expand(shape)


def _ghosts(values: Any) -> list[Ghost]:
    return [tensor for tensor in tree_tensors(values) if isinstance(tensor, Ghost)]


def _written(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """Run an in-place function on the targets that are not Ghosts. Raises UsageError if the function would write a
    Ghost's values to a parameter."""
    targets = kwargs.get("out", next(iter((*args, *kwargs.values()))))
    if isinstance(targets, Ghost):
        return targets
    targets = list(targets) if isinstance(targets, list | tuple) else [targets]
    held = [k for k, target in enumerate(targets) if not isinstance(target, Ghost)]
    if not held:
        return None
    if len(held) < len(targets):  # a _foreach function, whose lists have the same length
        args = tuple([arg[k] for k in held] if isinstance(arg, list | tuple) else arg for arg in args)
    lost = _ghosts((args, kwargs))
    if lost and any(isinstance(targets[k], nn.Parameter) for k in held):
        raise unheld(lost[0], f"{name} from another stage's parameter to one of this rank", LOOP)
    return func(*args, **kwargs)
