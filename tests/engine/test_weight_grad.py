"""Tests of deferred weight gradients: they equal autograd's bit for bit, and each is added exactly once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.utils import prune
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from pipeshard.engine import weight_grad as module
from pipeshard.engine.weight_grad import Deferral, Lookup, Product, Term


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8, padding_idx=0)
        self.first = nn.Linear(8, 12)
        self.conv = Conv1D(6, 12)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 17, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.conv(torch.tanh(self.first(self.embed(ids))))
        return self.last(self.norm(hidden)).square().mean()


def layers() -> Layers:
    torch.manual_seed(0)
    model = Layers()
    nn.init.normal_(model.conv.bias)
    return model


def ids(seed: int) -> Tensor:
    return torch.randint(0, 17, (3, 5), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, gradient in expected.items():
        other = found[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or other is None or torch.equal(gradient, other), name


def test_two_microbatches_bitwise() -> None:
    model, plain = layers(), layers()
    deferral = Deferral([model])
    assert set(deferral.layers) == {model.embed, model.first, model.conv, model.last}
    with deferral.installed():
        losses = [model(ids(seed)) for seed in range(2)]
        pending = []
        for loss in losses:
            pending.append(deferral.begin())
            loss.backward()
        deferred = {"embed.weight", "first.weight", "conv.weight", "last.weight"}
        assert {name for name, grad in gradients(model).items() if grad is None} == deferred
        for of_one in pending:
            deferral.finish(of_one)
    for seed in range(2):
        plain(ids(seed)).backward()
    assert_same(gradients(model), gradients(plain))
    assert "forward" not in model.first.__dict__


def test_gradients_have_the_layout_of_their_weights() -> None:
    """A user made a weight of another's transpose; the fused optimizers of a CPU read weight and gradient as flat
    memory, so each element was updated with the gradient of another."""
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(torch.randn(4, 3).t())
    plain, deferral, x = copy.deepcopy(model), Deferral([model]), torch.randn(5, 4)
    with deferral.installed():
        pending = deferral.begin()
        model(x).sum().backward()
        deferral.finish(pending)
    plain(x).sum().backward()
    assert model.weight.grad is not None and plain.weight.grad is not None
    assert model.weight.grad.stride() == plain.weight.grad.stride() == (1, 3)
    assert_same(gradients(model), gradients(plain))


def test_a_unit_with_few_trained_elements_defers_nothing() -> None:
    """Between B and W, the inputs and output gradients of all adapters took more memory than anything else, for almost
    no work in W."""
    frozen, adapter = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False))
    unit = nn.ModuleList([frozen.requires_grad_(False), adapter])
    deferral, x = Deferral([unit]), torch.randn(3, 64)
    for is_trained in (False, True):  # as a curriculum unfreezes the base weights between two steps
        frozen.weight.requires_grad_(is_trained)
        with deferral.installed():
            pending = deferral.begin()
            (frozen(x) + adapter(x)).sum().backward()
        assert len(pending) == (3 if is_trained else 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_defer_too(reentrant: bool) -> None:
    model, plain = layers(), layers()
    deferral = Deferral([model])
    with deferral.installed():
        hidden = model.embed(ids(0))
        pending = deferral.begin()
        checkpoint(lambda x: model.conv(model.first(x)).square().mean(), hidden, use_reentrant=reentrant).backward()
        assert model.first.weight.grad is None
        deferral.finish(pending)
    plain.conv(plain.first(plain.embed(ids(0)))).square().mean().backward()
    assert_same(gradients(model), gradients(plain))


def _frozen(model: Layers) -> Any:
    model.first.weight.requires_grad_(False)


def _listened(model: Layers) -> Any:
    model.first.weight.register_hook(lambda gradient: 2 * gradient)


def _accumulated(model: Layers) -> Any:
    def double(parameter: Tensor) -> None:
        parameter.grad = 2 * parameter.grad

    model.first.weight.register_post_accumulate_grad_hook(double)


def _renormed(model: Layers) -> Any:
    model.embed.max_norm = 0.5


def _parametrized(model: Layers) -> Any:
    nn.utils.parametrizations.weight_norm(model.first)


def _own_forward(model: Layers) -> Any:
    plain = model.first.forward
    model.first.forward = lambda x: 3 * plain(x)


@pytest.mark.parametrize("special", [_frozen, _listened, _accumulated, _renormed, _parametrized, _own_forward])
def test_what_cannot_be_put_off_is_done_at_once(special: Any) -> None:
    model, plain = layers(), layers()
    special(model)
    special(plain)
    deferral = Deferral([model])
    with deferral.installed():
        loss, pending = model(ids(0)), deferral.begin()
        loss.backward()
        deferral.finish(pending)
    plain(ids(0)).backward()
    assert_same(gradients(model), gradients(plain))


def test_under_autocast_and_without_gradients_layers_are_plain() -> None:
    model, plain = layers(), layers()
    deferral = Deferral([model])
    with deferral.installed(), torch.autocast("cpu", torch.bfloat16):
        loss, pending = model(ids(0)), deferral.begin()
        loss.backward()
        assert not pending
    with torch.autocast("cpu", torch.bfloat16):
        plain(ids(0)).backward()
    assert_same(gradients(model), gradients(plain))
    with deferral.installed(), torch.no_grad():
        assert torch.equal(model(ids(1)), copy.deepcopy(plain)(ids(1)))


def _straight_through(weight: Tensor) -> Tensor:
    return weight * (1 + weight.detach())


class Quantizes(TorchFunctionMode):
    """Changes the weight of every linear layer and embedding."""

    place: ClassVar[dict[Any, int]] = {F.linear: 1, F.embedding: 1, torch.embedding: 0, torch.addmm: 2}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.place:
            k = self.place[func]
            args = *args[:k], _straight_through(args[k]), *args[k + 1 :]
        return func(*args, **(kwargs or {}))


def _packed(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point() else tensor.to(torch.bfloat16)


def _packing() -> Any:
    """Keeps activations in half precision, but parameters as they are."""
    return saved_tensors_hooks(_packed, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)


@contextmanager
def _replacing(owner: Any, name: str) -> Iterator[None]:
    plain = getattr(owner, name)
    k = Quantizes.place[plain]

    @functools.wraps(plain)
    def quantized(*args: Any, **kwargs: Any) -> Any:
        return plain(*args[:k], _straight_through(args[k]), *args[k + 1 :], **kwargs)

    with mock.patch.object(owner, name, quantized):
        yield


@pytest.mark.turns
@pytest.mark.parametrize(
    "quantizing",
    [
        Quantizes,
        _packing,
        lambda: _replacing(F, "linear"),
        lambda: _replacing(F, "embedding"),
        lambda: _replacing(torch, "embedding"),
        lambda: _replacing(torch, "addmm"),
    ],
    ids=["mode", "saved", "linear", "embedding", "embedding of torch", "addmm"],
)
def test_functions_of_the_users_own_are_differentiated(quantizing: Any) -> None:
    """A user replaced F.linear by one that quantizes weights. Where dW waited for W, the gradients were those of
    torch's own function: silently wrong on several stages, without the proof. Hooks on saved tensors got others."""
    model, plain = layers(), layers()
    deferral = Deferral([model])
    with deferral.installed(), quantizing():
        loss, pending = model(ids(0)), deferral.begin()
        loss.backward()
        deferral.finish(pending)
    with quantizing():
        plain(ids(0)).backward()
    assert_same(gradients(model), gradients(plain))


def test_a_mode_of_a_first_pass_alone() -> None:
    """A checkpoint recomputes outside of the modes of its first pass, and deferred only there: "Recomputed values for
    the following tensors have different metadata", of a model that trains in one process."""
    model, plain = layers(), layers()
    deferral = Deferral([model])
    with deferral.installed():
        with BaseTorchFunctionMode():
            loss, pending = checkpoint(model, ids(0), use_reentrant=False), deferral.begin()
        loss.backward()
        deferral.finish(pending)
    plain(ids(0)).backward()
    assert_same(gradients(model), gradients(plain))


@pytest.mark.turns
@pytest.mark.parametrize("mode", [torch.device("cpu"), torch.autograd.graph.save_on_cpu()], ids=["device", "saved"])
def test_in_harmless_modes_layers_are_deferred(mode: Any) -> None:
    """A default device, or saving on the CPU, changes no gradient: W would have nothing to do."""
    deferral = Deferral([model := layers()])
    with deferral.installed(), mode:
        loss, pending = model(ids(0)), deferral.begin()
        loss.backward()
    assert len(pending) == 4


@pytest.mark.turns
def test_layers_of_what_the_user_has_compiled_are_plain() -> None:
    model, plain = layers(), layers()
    model.compile(backend="eager", fullgraph=True)
    deferral = Deferral([model])
    with deferral.installed():
        loss, pending = model(ids(0)), deferral.begin()
        loss.backward()
        assert not pending
    plain(ids(0)).backward()
    assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize("kind", ["buffer", "pruned", "attribute"])
def test_a_bias_that_is_not_a_parameter_is_added(kind: str) -> None:
    """Only in passes whose weight gradients wait for W, the layer computed x Wᵀ without its bias."""
    layer = nn.Linear(4, 3)
    if kind == "pruned":
        prune.l1_unstructured(layer, "bias", amount=1)
    else:
        bias = layer.bias.detach().clone()
        del layer.bias
        layer.register_buffer("bias", bias) if kind == "buffer" else setattr(layer, "bias", bias)
    x = torch.randn(2, 4)
    expected = layer(x)
    with Deferral([layer]).installed():
        assert torch.equal(layer(x), expected)


def test_layers_may_be_called_by_keyword() -> None:
    model, plain = layers(), layers()
    deferral = Deferral([model])
    with deferral.installed():
        hidden = model.conv(x=model.first(input=model.embed(input=ids(0))))
        pending = deferral.begin()
        model.last(input=hidden).sum().backward()
        assert len(pending) == 4
        deferral.finish(pending)
    plain.last(plain.conv(plain.first(plain.embed(ids(0))))).sum().backward()
    assert_same(gradients(model), gradients(plain))


def test_what_layers_return_may_be_written_to() -> None:
    def through(model: Layers) -> Tensor:
        hidden = model.embed(ids(0))
        hidden *= 3
        hidden = model.first(hidden).relu_()
        return model.last(model.conv(hidden).mul_(2)).add_(1).square().mean()

    model, plain = layers(), layers()
    deferral = Deferral([model])
    with deferral.installed():
        loss, pending = through(model), deferral.begin()
        loss.backward()
        assert len(pending) == 4
        deferral.finish(pending)
    through(plain).backward()
    assert_same(gradients(model), gradients(plain))


def test_layers_that_come_twice_and_inputs_with_gaps_bitwise() -> None:
    def through(model: Layers, seed: int) -> Tensor:
        hidden = model.embed(ids(seed))
        swapped = torch.tanh(model.first(hidden.transpose(0, 1)).transpose(0, 1).contiguous())
        once, again = model.conv(swapped), model.conv(swapped.square())
        return model.last(once + again).square().mean() + model.embed(ids(seed + 5)).square().mean()

    model, plain = layers(), layers()
    deferral = Deferral([model])
    with deferral.installed():
        for seed in range(3):
            loss, pending = through(model, seed), deferral.begin()
            loss.backward()
            deferral.finish(pending)
            assert not pending
    for seed in range(3):
        through(plain, seed).backward()
    assert_same(gradients(model), gradients(plain))


def test_a_gradient_may_be_differentiated_again() -> None:
    def penalty(model: Layers) -> Tensor:
        hidden = model.embed(ids(0)).detach().requires_grad_()
        made = model.last(model.conv(torch.tanh(model.first(hidden)))).square().sum()
        (gradient,) = torch.autograd.grad(made, hidden, create_graph=True)
        return made + gradient.square().sum()

    model, plain = layers(), layers()
    deferral = Deferral([model])
    with deferral.installed():
        loss, pending = penalty(model), deferral.begin()
        loss.backward()
        deferral.finish(pending)
    penalty(plain).backward()
    for name, expected in gradients(plain).items():
        assert expected is None or torch.allclose(gradients(model)[name], expected, rtol=1e-5, atol=1e-6), name


def test_layers_under_a_transform_are_plain() -> None:
    def loss(model: Layers, x: Tensor) -> Tensor:
        return model.last(model.conv(model.first(x))).square().sum()

    model, x = layers(), torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    deferral = Deferral([model])
    with deferral.installed():
        found = torch.func.vmap(torch.func.grad(lambda row: loss(model, row)))(x)
    leaf = x.clone().requires_grad_()
    loss(model, leaf).backward()
    assert torch.allclose(found, leaf.grad, rtol=1e-5, atol=1e-6)


def test_layers_have_forward_derivatives() -> None:
    """A unit whose forward used torch.autograd.forward_ad was refused on several stages, with an error of torch about a
    custom autograd.Function."""
    layer = nn.Linear(4, 3)
    x, tangent = torch.randn(2, 4), torch.randn(2, 4)
    with Deferral([layer]).installed(), forward_ad.dual_level():
        found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
        of_bias = functional_call(layer, {"bias": forward_ad.make_dual(layer.bias, torch.ones(3))}, x)
        assert torch.equal(forward_ad.unpack_dual(of_bias).tangent, torch.ones(2, 3))
    assert torch.allclose(found, tangent @ layer.weight.t())


def test_a_weight_that_was_written_to_since_is_refused() -> None:
    model = layers()
    deferral = Deferral([model])
    with deferral.installed():
        loss = model(ids(0))
        deferral.begin()
        with torch.no_grad():
            model.first.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_weight_of_a_class_of_its_own_is_not_put_off() -> None:
    class Doubled(torch.Tensor):
        pass

    model = layers()
    model.first.weight = nn.Parameter(model.first.weight.detach().as_subclass(Doubled))
    deferral = Deferral([model])
    with deferral.installed():
        loss, pending = model(ids(0)), deferral.begin()
        loss.backward()
        assert all(parameter is not model.first.weight for parameter, _ in pending)
    assert model.first.weight.grad is not None


def test_while_passes_are_whole_large_embeddings_alone_are_put_off() -> None:
    model, plain = layers(), layers()
    deferral = Deferral([model])
    with mock.patch.object(module, "LARGE", model.embed.weight.numel()), deferral.installed():
        for whole, layers_put_off in ((True, 1), (False, 4)):
            deferral.whole = whole
            loss, pending = model(ids(0)), deferral.begin()
            loss.backward()
            assert len(pending) == layers_put_off
            deferral.finish(pending)
        plain(ids(0)).backward()
        plain(ids(0)).backward()
    assert torch.allclose(model.embed.weight.grad, plain.embed.weight.grad, rtol=1e-6)
    model.embed.weight.grad = plain.embed.weight.grad
    assert_same(gradients(model), gradients(plain))


def added_up(model: Layers, seeds: range) -> None:
    """One backward pass for each seed, with every weight taken for a large one."""
    deferral = Deferral([model])
    with mock.patch.object(module, "LARGE", 0), deferral.installed():
        for seed in seeds:
            loss, pending = model(ids(seed)), deferral.begin()
            loss.backward()
            deferral.finish(pending)


def test_large_gradients_are_added_up_in_place() -> None:
    model, plain = layers(), layers()
    added_up(model, range(1))
    places = {name: grad.data_ptr() for name, grad in gradients(model).items() if grad is not None}
    with mock.patch.object(Product, "value"), mock.patch.object(Lookup, "value"):  # neither is called any more
        added_up(model, range(1, 4))
    for seed in range(4):
        plain(ids(seed)).backward()
    for name, expected in gradients(plain).items():
        assert expected is not None
        torch.testing.assert_close(gradients(model)[name], expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
        assert model.get_parameter(name).grad.data_ptr() == places[name]  # type: ignore[union-attr]
    assert not model.embed.weight.grad[0].any()  # type: ignore[index]  # the padding's


@pytest.mark.parametrize(
    ("term", "total"),
    [
        (Product(torch.ones(2, 3), torch.ones(3, 4)), torch.zeros(2, 4, dtype=torch.bfloat16)),
        (Product(torch.ones(2, 3), torch.ones(3, 4)), torch.zeros(2, 4).to_sparse()),
        (Lookup(torch.ones(3, 4), torch.tensor([0, 1, 0]), 2, None), torch.zeros(2, 4).to_sparse()),
    ],
)
def test_what_cannot_be_added_up_in_place(term: Term, total: Tensor) -> None:
    assert not term.fits(total)


def test_a_lookup_is_added_up_in_the_dtype_of_the_sum() -> None:
    gradient, read = torch.randn(2, 3, 4), torch.tensor([[0, 1, 0], [2, 2, 1]])
    total = torch.ones(3, 4, dtype=torch.float64)
    lookup = Lookup(gradient, read, 3, 1)
    assert lookup.fits(total)
    lookup.add_to(total)
    torch.testing.assert_close(total, 1 + lookup.value().double(), rtol=1e-6, atol=1e-6)
    assert bool((total[1] == 1).all())


def test_embeddings_alone_are_deferred_where_only_lookups_are() -> None:
    model, plain = layers(), layers()
    deferral = Deferral([model])
    with mock.patch.object(module, "LARGE", model.embed.weight.numel()), deferral.installed(lookups=True):
        loss, pending = model(ids(0)), deferral.begin()
        loss.backward()
        assert {name for name, grad in gradients(model).items() if grad is None} == {"embed.weight"}
        deferral.finish(pending)
    plain(ids(0)).backward()
    assert_same(gradients(model), gradients(plain))
    with deferral.installed(lookups=True):
        assert "forward" not in model.embed.__dict__  # small


def test_a_backward_pass_of_the_models_own_puts_nothing_off() -> None:
    model, plain = layers(), layers()
    deferral = Deferral([model])
    expected = torch.autograd.grad(plain(ids(0)), list(plain.parameters()))
    with deferral.installed():
        found = torch.autograd.grad(model(ids(0)), list(model.parameters()))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        loss, pending = model(ids(1)), deferral.begin()
        loss.backward()
        deferral.end()
        assert len(pending) == 4
        model(ids(2)).backward()
        assert len(pending) == 4 and model.first.weight.grad is not None
