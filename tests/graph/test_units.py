"""Tests of the choice of units: layers of lists, of nested lists, and of the stages of a hierarchical model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeshard.graph.units import containers, find_units, handled
from pipeshard.hf import recomputes
from tests.parity.build import build
from tests.parity.entries import find


def units(entry: str) -> list[str]:
    return list(find_units(build(find(entry)[0])))


def test_layers_and_what_is_around_them() -> None:
    assert units("causal-lm/llama") == [
        "model.embed_tokens", *(f"model.layers.{k}" for k in range(4)), "model.norm", "lm_head"
    ]  # fmt: skip


def test_lists_in_lists_are_cut_into_their_members() -> None:
    assert {name.rpartition(".")[0] for name in units("sequence-classification/funnel") if "blocks" in name} == {
        "funnel.encoder.blocks.0", "funnel.encoder.blocks.1", "funnel.encoder.blocks.2"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "unit"),
    [
        ("image-classification/swin", "swin.encoder.layers.1.blocks.0"),
        ("image-classification/segformer", "segformer.stages.1.blocks.0"),
        ("image-classification/resnet", "resnet.encoder.stages.1.layers.0"),
        ("image-classification/convnext", "convnext.encoder.stages.1.layers.1"),
    ],
)
def test_stages_of_a_hierarchy_are_cut_into_their_layers(entry: str, unit: str) -> None:
    assert unit in units(entry)


def test_layers_that_hold_lists_but_are_alike_stay_whole() -> None:
    assert all(name.count(".") <= 2 for name in units("seq2seq-lm/t5"))


def test_a_stage_that_is_recomputed_as_a_whole_stays_whole() -> None:
    model = build(find("image-classification/swin")[0])
    model.gradient_checkpointing_enable()
    names = find_units(model)
    assert "swin.encoder.layers.0" in names
    assert all(recomputes(unit) for name, unit in names.items() if "layers" in name)
    assert not any(map(recomputes, containers(model, names)))


def test_a_module_under_two_names_is_one_unit() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Module()
    model.layers = nn.ModuleList([shared, nn.Linear(2, 2), shared])
    model.head = shared
    assert list(find_units(model)) == ["layers.0", "layers.1"]


class Layer(nn.Module):
    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*inside)


def test_a_sequential_is_a_list_where_the_model_has_no_other() -> None:
    """Six layers in an nn.Sequential were one unit, which three stages could not divide; what is inside of a layer
    stays inside of it, and a Sequential of another forward whole."""
    model = nn.Module()
    model.stem, model.trunk = nn.Linear(2, 2), Layer(Layer(nn.Linear(2, 2), nn.ReLU()), nn.ReLU(), nn.Linear(2, 2))
    model.head = type("Own", (nn.Sequential,), {"forward": lambda self, x: x})(nn.Linear(2, 2))
    assert list(find_units(model)) == ["stem", "trunk.body.0", "trunk.body.1", "trunk.body.2", "head"]
    assert "trunk.body" not in find_units(model, ["trunk.body.0.body.0"])
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    assert list(find_units(model)) == ["stem", "trunk", "head", "layers.0"]


def test_a_dict_of_modules_is_cut_into_its_members() -> None:
    """A ModuleDict was a unit, though nobody can call one: layers in it could not be cut apart, and a model of nothing
    else was told to use pp_size <= 0."""
    layer = nn.ModuleDict({"norm": nn.LayerNorm(4), "mlp": nn.Linear(4, 4)})
    model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4)})
    assert list(find_units(nn.Sequential(model))) == ["0.embed", "0.head"]
    model["layers"] = nn.ModuleList([layer])
    assert list(find_units(model)) == ["embed", "head", "layers.0.norm", "layers.0.mlp"]


def test_a_layer_s_own_forward_is_put_back() -> None:
    """Answered calls left an Interception on a layer with a forward of its own, and a model with Interceptions keeps
    its units: the next trace would have had this one."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    own = model.layers[0].forward = lambda x: x
    with handled(find_units(model), lambda name, forward, args, kwargs: name):
        assert [layer(torch.zeros(2)) for layer in model.layers] == ["layers.0", "layers.1"]
    assert model.layers[0].forward is own and "forward" not in vars(model.layers[1])
    assert list(find_units(model)) == ["layers.0", "layers.1"]
