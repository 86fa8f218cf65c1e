"""Private: private names of torch, `datasets` and ColossalAI that pipeshard needs.

A torch release may change such a name without notice. Private functions and classes are therefore imported only here,
under public names. `tests/test_private.py` lists the private attributes that the package uses, by class. This test file
also tests the behavior that pipeshard relies on, and fails if the package uses any other private name.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import overrides
from torch.autograd import forward_ad
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module as reparametrized
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_step_pre_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as of_dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    is_namedtuple_instance,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_map_with_path,
    tree_unflatten,
)

EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX  # last part of the key of `get_extra_state`'s result
OF_COMPILER = "_dynamo"  # prefix of attributes that compiled functions set on their output tensors
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
OpOverload = torch._ops.OpOverload
# torch's own F.linear, torch.addmm and torch.embedding
PLAIN_FUNCTIONS = torch._C._nn.linear, torch._C._VariableFunctions.addmm, torch._C._VariableFunctions.embedding
disabled_torch_function = torch._C._disabled_torch_function_impl
graph_task = torch._C._current_graph_task_id  # -1 outside of a backward
function_modes = overrides._get_current_function_mode_stack
functorch_is_active = torch._C._are_functorch_transforms_active
functorch_unwrapped = torch._C._functorch.get_unwrapped
never_compiled = torch._compile._disable_dynamo  # torch.compiler.disable, which imports the compiler at once
profiler_is_enabled = torch._C._autograd._profiler_enabled
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
will_execute = torch._C._will_engine_execute_node
current_node = torch._C._current_autograd_node
allows_checkpoints = torch.autograd._is_checkpoint_valid  # False in torch.autograd.grad and backward(inputs=...)
foreach_norm, foreach_mul_ = torch._foreach_norm, torch._foreach_mul_
flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that receives every operator. Code that runs in the mode is not compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True, torch would import its compiler, which takes seconds


def enter_below(*modes: TorchDispatchMode | TorchFunctionMode) -> None:
    """Enter modes below the active modes. The modes that are already active may be exited before the new modes, or
    after them. The new modes do not affect code that is compiled while they are active."""
    for mode in modes:
        _rearrange(mode, is_entered=True)


def leave_below(*modes: TorchDispatchMode | TorchFunctionMode) -> None:
    """Exit modes that `enter_below` entered. Ignores modes that are not active in this thread."""
    for mode in modes:
        _rearrange(mode, is_entered=False)


def modes_entered() -> list[TorchDispatchMode | TorchFunctionMode]:
    """The modes that are active in this thread."""
    return [*of_dispatch._get_current_dispatch_mode_stack(), *function_modes()]


@contextmanager
def without_parametrization_cache() -> Iterator[None]:
    """Context manager in which parametrizations are computed again for each access, also in
    `torch.nn.utils.parametrize.cached()`: backwards of several microbatches cannot share one graph."""
    before, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = before


def in_dual_level() -> bool:
    """Whether a `torch.autograd.forward_ad.dual_level` is active, so that tensors may have tangents."""
    return forward_ad._current_level >= 0


def _rearrange(mode: TorchDispatchMode | TorchFunctionMode, is_entered: bool) -> None:
    """If `is_entered`, put a mode at the bottom of its stack. Otherwise, remove the mode from the stack."""
    stack = _stack(mode)
    entered = [stack.pop() for _ in range(stack.size())][::-1]
    others = [each for each in entered if each is not mode]
    for each in [mode, *others] if is_entered else others:
        stack.push(each)


class _Stack(NamedTuple):
    size: Callable[[], int]
    pop: Callable[[], Any]
    push: Callable[[Any], None]


def _stack(mode: TorchDispatchMode | TorchFunctionMode) -> _Stack:
    if isinstance(mode, TorchDispatchMode):
        return _Stack(torch._C._len_torch_dispatch_stack, of_dispatch._pop_mode, of_dispatch._push_mode)
    return _Stack(torch._C._len_torch_function_stack, overrides._pop_mode, overrides._push_mode)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Like `torch.compile(function, **options)`, but with guards on hooks, which torch omits by default. With these
    guards, modules with hooks do not run code that was compiled for modules without hooks, and a module is compiled
    again if its hooks change."""
    code = torch.compile(function, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        torch._dynamo.config.skip_nnmodule_hook_guards = False  # in each call: the value is per thread and context
        return code(*args, **kwargs)

    return call


def has_global_backward_hooks() -> bool:
    """Whether a backward hook is registered for all modules (`register_module_full_backward_hook`)."""
    of_modules = torch.nn.modules.module
    return bool(of_modules._global_backward_hooks or of_modules._global_backward_pre_hooks)


def nccl_options(timeout: timedelta) -> Any:
    """Options for an NCCL process group with high-priority streams and this timeout."""
    options = getattr(dist, "ProcessGroupNCCL").Options(is_high_priority_stream=True)  # noqa: B009
    options._timeout = timeout
    return options


def extend_timeout(backend: Any, default: timedelta, timeout: timedelta) -> None:
    """Set the timeout of collectives in a process group's backend, if the timeout is still `default`."""
    if backend.options._timeout == default:
        backend._set_default_timeout(timeout)


def set_wrapped(function: Any, inner: Any) -> None:
    """Make `function`, a torch.nn.utils function, run `inner` under no_grad instead of its own inner function. The
    `__wrapped__` of `function` is still the original inner function."""
    names = function.__code__.co_freevars
    function.__closure__[names.index("func")].cell_contents = inner


def tree_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


WEAKREFS = "_flat_weight_refs"  # the attribute of recurrent layers with weak references to their parameters


@contextmanager
def without_weakrefs(model: torch.nn.Module) -> Iterator[None]:
    """Context manager in which `swap_tensors` accepts the parameters of recurrent layers. An nn.RNN, nn.LSTM or nn.GRU
    keeps weak references to its parameters, and `swap_tensors` raises an error for tensors with weak references."""
    recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    for module in recurrent:
        setattr(module, WEAKREFS, [])
    yield
    for module in recurrent:
        weights = module._flat_weights
        setattr(module, WEAKREFS, [None if weight is None else weakref.ref(weight) for weight in weights])


def nodes_of(stream: Any) -> int:
    """The number of nodes among which Hugging Face's `datasets.distributed.split_dataset_by_node` divided a stream. 1
    for a stream that it did not divide."""
    nodes: int = getattr(getattr(stream, "_distributed", None), "world_size", 1)
    return nodes


_PATCH = "colossalai._analyzer._subclasses._meta_registration"


def restore_meta_kernels() -> None:
    """Remove the meta kernels that ColossalAI registers when it is imported. These kernels were written for torch 1.12.
    They make `.item()` on meta return 0 instead of raising an error, and compute the shapes of the results of
    convolutions and norms by outdated rules."""
    library = getattr(sys.modules.get(_PATCH), "meta_lib", None)
    if library is not None and library._op_impls:
        library._destroy()
        library._op_impls.clear()
