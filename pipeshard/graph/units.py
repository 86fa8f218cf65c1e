"""Units: the modules that are never cut, the CutPoints that users insert, and the interception of unit calls."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from pipeshard.errors import PartitionError, TraceError, UsageError, unknown
from pipeshard.graph.places import MISSING
from pipeshard.hf import full_name, recomputes, without_adapters
from pipeshard.private import tree_tensors
from pipeshard.replaced import StandIn, replaced

if TYPE_CHECKING:
    from pipeshard.graph.dataflow import Call


T = TypeVar("T")
_handling = 0  # the number of active `handled` contexts; a CutPoint called inside one must be a unit


class CutPoint(nn.Module):
    """Marks a place where the model may be cut (Varuna, Athlur et al. 2022, arXiv:2111.04007). Call the CutPoint on the
    value that crosses this place: `x = self.cut(x)`. A CutPoint returns the object that it receives.

    A model with CutPoints is cut only after CutPoints, so p stages need at least p - 1 CutPoints. Each CutPoint marks
    one place: in a loop, use an `nn.ModuleList` of CutPoints. `x` is a tensor (b, ...) whose dimension 0 counts the
    samples, or a tuple, list or dict that contains tensors. Other values that are used on both sides of a cut (skip
    connections, numbers, masks) need no CutPoint: the trace finds them.

    Raises UsageError for a value without a tensor. boost raises TraceError for such a value, for a tensor whose
    dimension 0 does not count the samples, for a CutPoint that is called twice in a forward, and for a CutPoint that is
    not a registered module of the model.
    """

    def forward(self, value: T) -> T:
        """Return `value` itself."""
        if _handling and "forward" not in self.__dict__:  # no Interception has replaced its forward
            raise TraceError(
                "the model calls a CutPoint that is not one of its modules (is it in a plain list or dict?), so the "
                "model cannot be cut there: make the CutPoint an attribute of a module, or put several CutPoints into "
                "an nn.ModuleList"
            )
        if not isinstance(value, Tensor) and not tree_tensors(value):
            raise UsageError(
                f"a CutPoint got {type(value).__name__} {value!r:.60}, which contains no tensor: call the CutPoint on "
                "the activations at this point, as in x = cut(x)"
            )
        return value


def check_call(name: str, args: Sequence[Any], calls: Sequence["Call"], rows: int) -> None:
    """Raise TraceError if the earlier `calls` include a call of the CutPoint `name`, or if dimension 0 of the tensor in
    `args` does not count the `rows` samples."""
    if any(call.unit == name for call in calls):
        raise TraceError(
            f"CutPoint {name} is called twice: use a separate CutPoint for each place. In a loop, use an nn.ModuleList "
            "of CutPoints"
        )
    value = args[0] if args else None
    if isinstance(value, Tensor) and value.shape[:1] != (rows,):
        raise TraceError(
            f"CutPoint {name} got a tensor of shape {tuple(value.shape)}, whose dimension 0 is not the batch dimension "
            f"(of size {rows}): call the CutPoint where dimension 0 is the batch dimension, or use `(x,) = cut((x,))`"
        )


def escaped(call: "Call") -> str:
    """The predicate of an error message. The subject of this message is code on a later stage, which reads a value that
    escapes this call untracked. At a CutPoint, only writes escape: without a cut, the CutPoint's input and output are
    one tensor. At a cut, the input and the output are two tensors."""
    if not call.is_cut:
        return f"uses a value that escapes unit {call.unit} untracked"
    return (
        f"uses the input or the output of CutPoint {call.unit} after the other was modified in place, and would not "
        "see the change at a cut: compute a new tensor (x = x + y, not x += y), or cut elsewhere"
    )


# handler(unit name, the unit's own forward, positional arguments, keyword arguments) -> the unit's result
Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def find_units(model: nn.Module, cuts: Iterable[str] = ()) -> dict[str, nn.Module]:
    """The units of `model` by name, in the order of registration. A model whose calls are already intercepted keeps its
    units.

    A unit has parameters or running statistics, and is a member of an `nn.ModuleList` or another child of a module that
    contains such lists. Three kinds of modules are split into their members: a list inside such a list, an
    `nn.ModuleDict`, and a stage of a hierarchy (swin, resnet) that is not recomputed as a whole. If a model contains
    neither such lists nor CutPoints, an `nn.Sequential` counts as a list, and each of its members is a unit, even a
    member without parameters: as glue, a pooling layer would run on every later stage. CutPoints and the modules named
    in `cuts` are units. Modules that contain such a unit are not units. A module with several names counts once, under
    its first name. If a list has the attribute `pipeshard_uncut`, each of its members is a unit, even a member without
    parameters.
    """
    forwards = [(module, module.__dict__.get("forward")) for module in model.modules()]
    if cut := {forward.name: module for module, forward in forwards if isinstance(forward, Interception)}:
        return cut
    marked: dict[str, nn.Module] = {n: m for n, m in model.named_modules() if isinstance(m, CutPoint)}
    sequences = not marked and not _has_layers(model)
    marked |= {name: model.get_submodule(name) for name in cuts}
    paths = {name.rpartition(".")[0] for name in marked}
    around = {model.get_submodule(of) for path in paths for of in itertools.accumulate(path.split("."), "{}.{}".format)}
    chosen = set(marked.values())
    units: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()

    def walk(prefix: str, module: nn.Module, in_hierarchy: bool = False) -> None:
        """Visit the children of a module that is not a unit. `in_hierarchy` means that the module is inside a stage of
        a hierarchy."""
        uncut, in_sequence = getattr(module, "pipeshard_uncut", False), sequences and _is_sequence(module)
        is_list = (
            isinstance(module, nn.ModuleList) or in_sequence or (isinstance(module, nn.Sequential) and in_hierarchy)
        )
        stages = isinstance(module, nn.ModuleList) and not uncut and _is_hierarchy(module)
        for child_name, child in module.named_children():
            name = f"{prefix}.{child_name}" if prefix else child_name
            if stages:
                walk(name, child, in_hierarchy=True)
            elif (
                child in around
                or _is_dict(child)
                or (not uncut and (_is_layers(child) if is_list or in_hierarchy else _has_layers(child, sequences)))
            ):
                walk(name, child, in_hierarchy)
            elif child not in seen and (uncut or in_sequence or child in chosen or _has_parameters(child)):
                seen.add(child)
                units[name] = child

    walk("", model)
    return units


def paths_of(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The full names of the modules `names`. For a PeftModel, `names` may be names in the base model.

    Raises PartitionError for the model itself, and for a name that is not a module of the model. In the second case,
    the error lists similar names.
    """
    known = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    full = [full_name(model, name) for name in names]
    for name in full:
        if name in ("", without_adapters(model)[0].rstrip(".")):
            raise PartitionError(
                f"partition names the whole {type(model).__name__}, which must be split: name modules inside the model"
            )
        if name not in known:
            raise PartitionError(unknown("partition", name, type(model).__name__, known, "modules"))
    return full


def containers(model: nn.Module, units: Mapping[str, nn.Module]) -> list[nn.Module]:
    """The modules outside the units. The forwards of these modules are glue."""
    inside = {child for unit in units.values() for child in unit.modules()}
    return [module for module in model.modules() if module not in inside]


def modules_apart(model: nn.Module, units: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for each callable module that is outside the units and contains no unit, such as a module
    without parameters. These modules could be units."""
    inside = {child for unit in units.values() for child in unit.modules()}
    for name, module in model.named_modules():
        if name and inside.isdisjoint(module.modules()) and _is_callable(module):
            yield name, module


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _has_layers(module: nn.Module, sequences: bool = False) -> bool:
    lists = (m for m in module.modules() if isinstance(m, nn.ModuleList) or (sequences and _is_sequence(m)))
    return any(map(_is_layers, lists))


def _is_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _is_dict(module: nn.Module) -> bool:
    """Whether the module is an `nn.ModuleDict` that defines no forward."""
    return isinstance(module, nn.ModuleDict) and type(module).forward is nn.Module.forward


def _is_layers(module: nn.Module) -> bool:
    if getattr(module, "pipeshard_uncut", False):
        return True
    return isinstance(module, nn.ModuleList | nn.Sequential) and any(map(_has_parameters, module.children()))


def _is_hierarchy(layers: nn.ModuleList) -> bool:
    """Whether these layers are stages of a hierarchy: each contains layers, none is recomputed as a whole, and they
    differ in the shapes of their parameters."""
    shapes: dict[str, torch.Size] = {}
    differ = False
    for stage in layers.children():  # a ModuleList may also contain None
        if recomputes(stage) or not any(map(_is_layers, stage.children())) or isinstance(stage, nn.ModuleList):
            return False
        own = {name: parameter.shape for name, parameter in stage.named_parameters()}
        differ = differ or any(shapes.get(name, shape) != shape for name, shape in own.items())
        shapes.update(own)
    return differ


def _has_parameters(module: nn.Module) -> bool:
    """Whether the module has parameters or running statistics, so one stage must hold the module."""
    if next(module.parameters(), None) is not None:
        return True
    return any(getattr(inner, "track_running_stats", False) for inner in module.modules())


class Interception(StandIn):
    """Replaces the `forward` of one unit. A call of the unit runs `handler` if a handler is set. Otherwise, the call
    runs the unit's own forward: `compiled` if it is set, otherwise `original`.

    The instance attribute is replaced, so the unit keeps its class, its hooks and its activation checkpointing. In
    transformers 5, checkpointing is inside `forward`. In earlier versions, checkpointing wraps the call of the unit,
    and a `Recomputation` moves the checkpointing into the forward.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        functools.update_wrapper(self, module.forward)  # first: it also copies the attributes of this forward
        self.name, self.module = name, module
        self.original: Callable[..., Any] = module.forward
        self.instead_of = vars(module).get("forward", MISSING)
        self.compiled: Callable[..., Any] | None = None
        self.handler: Handler | None = None
        self.checkpoint: Callable[..., Any] | None = None
        self._fitting: dict[tuple[int, tuple[str, ...]], bool] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.compiled or self.original
        if self.checkpoint is not None:
            forward, self.checkpoint = _recomputed(self.module, forward, self.checkpoint), None
        if self.handler is None or not self._fits(args, kwargs):
            return forward(*args, **kwargs)
        return self.handler(self.name, forward, args, kwargs)

    def _fits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the arguments match the signature of the forward. If they do not match, the handler is not called:
        the forward itself raises TypeError, which a model may catch to call the unit differently."""
        form = len(args), tuple(kwargs)
        if form not in self._fitting:
            self._fitting[form] = _binds(self.original, args, kwargs)
        return self._fitting[form]


def _binds(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        # A decorator may rename arguments for the function that it wraps.
        signature = inspect.signature(forward, follow_wrapped=False)
    except (TypeError, ValueError):  # not a Python function
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _recomputed(module: nn.Module, forward: Callable[..., Any], checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not recomputes(module):  # see `unrecomputed`
            return forward(*args, **kwargs)
        return checkpoint(functools.partial(forward, **kwargs), *args)

    return recomputed


@contextmanager
def unrecomputed(module: nn.Module, chosen: Callable[[nn.Module], bool] = recomputes) -> Iterator[None]:
    """Context manager that turns off the recomputation of activations in those modules inside `module` for which
    `chosen` is true. Only flags of modules change, so a boosted model has the same state in each such context."""
    with ExitStack() as stack:
        for each in filter(chosen, module.modules()):
            stack.enter_context(replaced(each, gradient_checkpointing=False))
        yield


class Recomputation:
    """Replaces the checkpointing function of a unit that checkpoints its whole call, not only its forward.

    A replayed call must not be recomputed, since the unit may be on another stage. So the checkpointing function is
    passed to the Interception, which checkpoints only the unit's own forward.
    """

    def __init__(self, module: nn.Module, checkpoint: Callable[..., Any]) -> None:
        self.module, self.checkpoint = module, checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        interception = self.module.__dict__.get("forward")
        if not isinstance(interception, Interception):
            return self.checkpoint(function, *args)
        interception.checkpoint = self.checkpoint
        return function(*args)


def intercept(units: Mapping[str, nn.Module]) -> list[Interception]:
    """Install an Interception as the `forward` of each unit that has none, and return the Interceptions of all
    units."""
    interceptions = []
    for name, module in units.items():
        if not isinstance(module.forward, Interception):
            module.forward = Interception(name, module)
        checkpoint = module.__dict__.get("_gradient_checkpointing_func", None)
        around = type(module).__call__ is not nn.Module.__call__
        if checkpoint is not None and around and not isinstance(checkpoint, Recomputation):
            module.__dict__["_gradient_checkpointing_func"] = Recomputation(module, checkpoint)
        interceptions.append(module.forward)
    return interceptions


@contextmanager
def handled(units: Mapping[str, nn.Module], handler: Handler) -> Iterator[None]:
    """Context manager in which `handler` answers the units' calls. Restores the units' forwards and handlers on exit.

    Compiled units run in eager mode, so that a trace does not compile units for its own shapes.
    """
    global _handling
    before = [module.__dict__.get("forward") for module in units.values()]
    interceptions = intercept(units)
    handlers = [interception.handler for interception in interceptions]
    for interception in interceptions:
        interception.handler = handler
    compiled = any(interception.compiled for interception in interceptions)
    _handling += 1
    try:
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        _handling -= 1
        for interception, previous in zip(interceptions, handlers, strict=True):
            interception.handler = previous
        for module, forward in zip(units.values(), before, strict=True):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


class Sliced:
    """The forward of a module whose parameters are sharded across tensor-parallel ranks. Calls `sliced`. In a trace
    (inside `unsliced`), calls the original forward `plain` instead."""

    tracing = False

    def __init__(self, plain: Any, sliced: Any) -> None:
        self.plain, self.sliced = plain, sliced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.plain if Sliced.tracing else self.sliced)(*args, **kwargs)


def unsliced() -> AbstractContextManager[None]:
    """Context manager in which Sliced modules run their original forward, on full parameters that the caller sets."""
    return replaced(Sliced, tracing=True)
