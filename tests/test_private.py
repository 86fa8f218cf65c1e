"""Tests of private names of torch and transformers: all are in one module, exist, and have the assumed meaning."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from pipeshard import private
from tests.house import PACKAGE

# Private attributes that the package reads or writes, by class or module.
ATTRIBUTES = {
    "torch.Tensor": ("_version", "_base", "_is_view", "_backward_hooks", "_post_accumulate_grad_hooks"),
    "torch.UntypedStorage": ("_cdata",),
    "torch.nn.Module": (
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_compiled_call_impl",
    ),
    "torch.autograd.graph.Node": ("_sequence_nr",),
    "torch.optim.Optimizer": ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    "torch.distributed.ProcessGroup": ("_device_types", "_get_backend"),
    "torch.distributed.distributed_c10d": ("_world",),
    "torch.distributed.tensor.DTensor": ("_local_tensor",),
    "torch.ops.aten": (
        "_local_scalar_dense",
        "_pack_padded_sequence",
        "_unique2",
        "_unsafe_view",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
    "torch._ops.OpOverload": ("_schema", "_overloadpacket"),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": ("_lazy_init", "_root_post_backward_final_callback"),
    "transformers.PreTrainedModel": ("_init_weights", "_from_config", "_keys_to_ignore_on_save", "_tied_weights_keys"),
    "transformers.AutoModel": ("_model_mapping",),
    "transformers.PretrainedConfig": ("_attn_implementation",),
}
# What Python, numpy and ColossalAI call so, and what the Booster puts on a model that it is to load.
OTHERS = {"_pretrained", "_orig_mod", "_exit", "_current_frames", "_inst", "_rand", "_op_impls", "_destroy"}
OTHERS |= {"_replace", "_apply"}  # of NamedTuple, and of modules as users override it
# Of instances of FSDP's classes, in engine/fsdp.py alone.
FSDP = {"_fsdp_param_group", "_pre_forward_hook_handle", "_post_forward_hook_handle", "_unsharded_param", "_orig_dtype"}
# Put on a model by `from_pretrained` and read by `save_pretrained`; the number of GPUs of DataParallel, which Trainer
# itself sets to 1 for a model on several devices (tests/test_trainer.py).
OF_TRANSFORMERS = {"_weight_conversions", "_n_gpu"}


def found(path: str) -> Any:
    """The module or class of this name."""
    parts = path.split(".")
    for k in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:k]))
        except ImportError:
            continue
        for part in parts[k:]:
            owner = getattr(owner, part)
        return owner
    raise ImportError(path)


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_attributes_are_there(owner: str) -> None:
    kind = found(owner)
    made = {"torch.nn.Module": nn.Module, "torch.Tensor": lambda: torch.zeros(1)}
    made |= {"torch.optim.Optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)}
    made |= {"torch._ops.OpOverload": lambda: torch.ops.aten.add.Tensor}
    value = made.get(owner, lambda: kind)()
    assert [name for name in ATTRIBUTES[owner] if not hasattr(value, name)] == []


def test_no_other_private_name_is_used() -> None:
    own: set[str] = set()
    used: dict[str, str] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                own.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                used[node.attr] = path.name
    known = OTHERS | FSDP | OF_TRANSFORMERS | {name for names in ATTRIBUTES.values() for name in names}
    elsewhere = {name: path for name, path in used.items() if name not in known | own and path != "private.py"}
    assert elsewhere == {}, (
        "add functions to pipeshard/private.py and attributes to ATTRIBUTES, with a test of what they mean"
    )


def test_a_version_counts_writes_in_place() -> None:
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    assert tensor._version == before + 1
    assert tensor[:1]._is_view() and not tensor._is_view()
    assert tensor[:1]._base is tensor
    emptied = tensor.detach()
    emptied.data = torch.empty(0)  # shares the count, not the memory
    tensor.add_(1)
    assert emptied._version == tensor._version == before + 2


def test_nodes_of_a_graph_have_different_numbers() -> None:
    """A trace must not keep autograd's nodes alive, since they keep activations alive."""
    weight = torch.ones(2, requires_grad=True)
    once = weight * 2
    twice = once * 2
    assert once.grad_fn is not None and twice.grad_fn is not None
    assert once.grad_fn._sequence_nr() != twice.grad_fn._sequence_nr()
    (before, _), *_ = twice.grad_fn.next_functions
    assert before is not None and before._sequence_nr() == once.grad_fn._sequence_nr()


def test_views_share_the_handle_of_their_storage() -> None:
    tensor = torch.zeros(4)
    assert tensor.untyped_storage()._cdata == tensor[2:].untyped_storage()._cdata
    assert tensor.untyped_storage()._cdata != tensor.clone().untyped_storage()._cdata


def test_modules_keep_their_tensors_in_dicts() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("kept", torch.zeros(1), persistent=False)
    assert [*module._parameters] == ["weight", "bias"] and "running_mean" in module._buffers
    assert module._non_persistent_buffers_set == {"kept"} and module._compiled_call_impl is None
    assert isinstance(module, private.BatchNorm)
    handle = module.register_forward_hook(lambda *args, **kwargs: None, with_kwargs=True)
    assert [*module._forward_hooks] == [*module._forward_hooks_with_kwargs] == [handle.id]


def test_extra_states_have_a_key_of_their_own() -> None:
    class Kept(nn.Module):
        def get_extra_state(self) -> Any:
            return torch.ones(1)

    assert [*nn.Sequential(Kept()).state_dict()] == [f"0.{private.EXTRA_STATE}"]


def test_a_dispatch_mode_sees_every_operator_with_its_schema() -> None:
    seen: list[Any] = []

    class Mode(private.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.zeros(2).add_(1)
        with private.disable_current_modes():
            torch.ones(2)
    assert [func._overloadpacket for func in seen] == [torch.ops.aten.zeros, torch.ops.aten.add_]
    assert seen[1]._schema.arguments[0].alias_info.is_write


def test_functions_are_seen_unless_that_is_disabled() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    tensor = torch.zeros(2).as_subclass(Loud)
    for quiet in (private.DisableTorchFunction, private.DisableTorchFunctionSubclass):
        with quiet():
            assert tensor.shape == (2,)
    with pytest.raises(AssertionError):
        tensor.add(1)


def test_a_module_runs_with_other_tensors() -> None:
    module = nn.Linear(2, 1, bias=False)
    with private.reparametrized(module, {"weight": torch.ones(1, 2)}):
        assert module(torch.ones(2)).item() == 2


def test_engine_and_hooks_tell_what_they_do() -> None:
    assert not private.profiler_is_enabled() and not private.functorch_is_active()
    inner, x = [], torch.ones(3)

    def square(y: torch.Tensor) -> torch.Tensor:
        with pytest.raises(NotImplementedError, match="storage"):
            y.untyped_storage()
        inner.append(private.functorch_unwrapped(y).untyped_storage().data_ptr())
        return y.square().sum()

    torch.func.grad(square)(x)
    assert inner == [x.untyped_storage().data_ptr()]
    with torch.autograd.profiler.profile():
        assert private.profiler_is_enabled()
    assert private.saved_tensors_hooks(False) is None and private.graph_task() == -1
    tensor, tasks = torch.ones(1, requires_grad=True), list[int]()
    tensor.register_hook(lambda _: tasks.append(private.graph_task()))
    tensor.sum().backward()
    assert tasks[0] >= 0
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert private.saved_tensors_hooks(False) is not None


def test_a_hook_knows_its_node_and_whether_checkpoints_may_run() -> None:
    leaf, found = torch.ones(1, requires_grad=True), list[tuple[bool, bool]]()
    tensor = leaf.square()
    node = tensor.grad_fn
    tensor.register_hook(lambda _: found.append((private.current_node() is node, private.allows_checkpoints())))
    tensor.sum().backward(retain_graph=True)
    tensor.sum().backward(inputs=[leaf], retain_graph=True)
    torch.autograd.grad(tensor.sum(), tensor, retain_graph=True)
    torch.autograd.grad(tensor.sum(), leaf)
    assert found == [(True, True), (True, False), (True, True), (True, False)]


def test_trees_come_back() -> None:
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, spec = private.tree_flatten(tree)
    assert leaves == private.tree_leaves(tree) and private.tree_unflatten(leaves, spec) == tree
    assert private.tree_map_only(int, lambda x: -x, tree) == {"a": [-1, (-2, None)], "b": -3}
    paths = private.tree_map_with_path(lambda path, _: private.keystr(path), tree)
    assert paths == {"a": ["['a'][0]", ("['a'][1][0]", "['a'][1][1]")], "b": "['b']"}


def test_flash_on_the_cpu_gives_the_logsumexp_that_its_backward_takes() -> None:
    query, key, value, gradient = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(4))
    output, total = private.flash_on_cpu(query, key, value, 0.0, True, scale=0.5)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5)
    scores = (query @ key.mT * 0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    assert torch.allclose(output, expected) and torch.allclose(total, scores.logsumexp(-1), atol=1e-6)
    made = private.flash_on_cpu_backward(gradient, query, key, value, output, total, 0.0, True, scale=0.5)
    wanted = torch.autograd.grad(expected, (query, key, value), gradient)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(made, wanted, strict=True))


def test_all_at_once_is_each_by_itself() -> None:
    tensors = [torch.arange(3.0), torch.ones(2)]
    assert [float(norm) for norm in private.foreach_norm(tensors)] == [float(tensor.norm()) for tensor in tensors]
    private.foreach_mul_(tensors, 2.0)
    assert tensors[1].tolist() == [2, 2]


def test_torch_asks_nccl_in_the_same_words() -> None:
    """There may be no NCCL here: then its own stubs and callers tell."""
    stubs = (Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text()
    options = stubs.partition("class ProcessGroupNCCL(Backend)")[2]
    assert "is_high_priority_stream: bool" in options and "def abort(" in stubs.partition("class Backend")[2]
    assert "backend_options._timeout != timeout" in inspect.getsource(dist.distributed_c10d)


def test_a_compiled_function_may_put_attributes_of_its_own_on_results() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="aot_eager", dynamic=True)
    for length in (3, 4, 5):
        assert all(name.startswith(private.OF_COMPILER) for name in vars(compiled(torch.ones(length))))


def test_compiled_code_is_not_shared_with_a_module_that_has_hooks() -> None:
    layers = nn.Sequential(nn.Tanh()), nn.Sequential(nn.Tanh())
    layers[1][0].register_forward_hook(lambda module, args, output: output * 0.5)
    plain, hooked = (private.compiled(layer.forward, backend="eager")(torch.ones(2)) for layer in layers)
    assert torch.equal(hooked, plain * 0.5)


def test_torchs_functions_of_norms_call_what_is_set() -> None:
    """References that were imported earlier call it, too, and `clip_grad_norm_` calls `get_total_norm`."""
    clip, norm = nn.utils.clip_grad_norm_, nn.utils.get_total_norm
    parameter, called = nn.Parameter(torch.ones(4)), list[str]()
    parameter.grad = torch.ones(4)

    def noting(function: Any) -> Any:
        def inner(*args: Any, **kwargs: Any) -> Any:
            called.append(function.__name__)
            return function.__wrapped__(*args, **kwargs)

        return inner

    for function in (clip, norm):
        private.set_wrapped(function, noting(function))
    try:
        assert float(clip([parameter], 1.0)) == 2.0
    finally:
        for function in (clip, norm):
            private.set_wrapped(function, function.__wrapped__)
    assert called == ["clip_grad_norm_", "_get_total_norm"]
    clip([parameter], 1.0)
    assert len(called) == 2


def test_backward_hooks_of_all_modules_are_in_two_places() -> None:
    of_all = nn.modules.module
    for register in (of_all.register_module_full_backward_hook, of_all.register_module_full_backward_pre_hook):
        assert not private.has_global_backward_hooks()
        handle = register(lambda *_: None)
        assert private.has_global_backward_hooks()
        handle.remove()
    assert not private.has_global_backward_hooks()


def test_hooks_of_all_optimizers_are_in_one_place() -> None:
    before = len(private.global_step_pre_hooks)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert len(private.global_step_pre_hooks) == before + 1
    handle.remove()
    assert len(private.global_step_pre_hooks) == before


def test_a_stream_that_is_split_by_node_has_several() -> None:
    stream = datasets.Dataset.from_dict({"number": [0, 1]}).to_iterable_dataset()
    assert private.nodes_of(stream) == private.nodes_of(object()) == 1
    assert private.nodes_of(split_dataset_by_node(stream, 0, 2).map(dict)) == 2


def test_modes_that_are_entered_below_are_left_in_any_order() -> None:
    """A loop may begin a context before a mode is entered, and end it before the mode is left."""

    class Counts(private.DispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    class Reads(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += func is torch.Tensor.tolist
            return func(*args, **(kwargs or {}))

    outer, below, reads, inner, tensor = Counts(), Counts(), Reads(), Counts(), torch.zeros(2)
    with outer, torch.device("cpu"):
        private.enter_below(below, reads)
        private.enter_below(below, reads)  # no second time
        tensor.add_(1).tolist()
    inner.__enter__()
    tensor.add_(1)
    private.leave_below(below, reads)
    private.leave_below(below, reads)
    tensor.add_(1).tolist()
    inner.__exit__(None, None, None)
    assert (outer.calls, below.calls, inner.calls, reads.calls) == (1, 2, 2, 1)
    assert torch.zeros(1).add_(1).tolist() == [1.0] and below.calls == 2


def test_code_that_is_never_compiled_may_call_compiled_code() -> None:
    """So a loop may be compiled, and functions of the model stay compiled."""
    graphs = list[Any]()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    inner = torch.compile(lambda x: x.sin() + 1, backend=backend)
    states = list[bool]()

    @private.never_compiled
    def step(x: torch.Tensor) -> torch.Tensor:
        states.append(torch.compiler.is_compiling())
        return inner(x)

    loop = torch.compile(lambda x: step(x.cos()) * 2, backend=backend)
    assert torch.equal(loop(torch.ones(3)), (torch.ones(3).cos().sin() + 1) * 2)
    assert states == [False] and len(graphs) == 3  # the loop before and after the step, and the function


def test_parametrizations_are_not_cached_in_a_step() -> None:
    calls = list[int]()

    class Counted(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return weight * 2

    layer = nn.Linear(2, 2)
    nn.utils.parametrize.register_parametrization(layer, "weight", Counted())
    calls.clear()
    with nn.utils.parametrize.cached():
        with private.without_parametrization_cache():
            assert layer.weight is not layer.weight and len(calls) == 2
            with nn.utils.parametrize.cached():  # in a forward
                assert layer.weight is layer.weight
        assert layer.weight is layer.weight
