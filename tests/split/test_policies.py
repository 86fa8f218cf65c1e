"""Tests of policies: the ones that pipeshard contains, and how a policy is found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import pipeshard.policies
from pipeshard import Policy, register_policy
from pipeshard.errors import ConfigurationError, PartitionError
from pipeshard.split import policy as registry
from pipeshard.split.policy import find_policy
from tests import zoo
from tests.test_chains import Ladder, traced


class Own(Policy):
    pass


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No registration of a test outlives it."""
    monkeypatch.setattr(registry, "_REGISTRY", {})
    registry._advertised.cache_clear()
    yield
    registry._advertised.cache_clear()


def typed(model_type: str) -> nn.Module:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(model_type=model_type)
    return model


def advertise(monkeypatch: pytest.MonkeyPatch, **values: str) -> list[str]:
    """Entry points by name; returns the names that are asked for, as they are."""
    points = EntryPoints(EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in values.items())
    asked: list[str] = []

    def entry_points(**by: str) -> EntryPoints:
        asked.append(by["name"])
        return points.select(**by)

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    return asked


def shipped() -> dict[str, type[Policy]]:
    policies = {name: registry._shipped(name) for name in pipeshard.policies.TP_PLANS}
    return {name: policy for name, policy in policies.items() if policy is not None}


# What is shipped


def test_shipped_policies_slice_what_transformers_does_not() -> None:
    assert shipped().keys() == pipeshard.policies.TP_PLANS.keys() <= set(CONFIG_MAPPING.keys())
    for model_type, policy in shipped().items():
        assert policy.tp_plan is pipeshard.policies.TP_PLANS[model_type]
    assert shipped()["bert"].__name__ == "BertPolicy"
    assert find_policy(typed("llama")) is Policy


# How one is found


def test_a_user_s_registration_wins_over_what_is_shipped() -> None:
    bert = zoo.build("bert")
    assert find_policy(bert) is shipped()["bert"]
    register_policy("bert")(Own)
    assert find_policy(bert) is Own

    class ByBase(Policy):
        pass

    register_policy(type(bert).__mro__[1])(ByBase)
    assert find_policy(bert) is ByBase


def test_without_a_registration_it_is_policy_itself() -> None:
    assert find_policy(typed("no-such-model")) is Policy
    assert find_policy(nn.Linear(2, 2)) is Policy


def test_an_entry_point_is_loaded_once_and_lies_between_the_user_s_and_the_shipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = advertise(monkeypatch, bert=f"{__name__}:Own", gpt2="no.such.module:Policy")
    monkeypatch.setitem(__import__("sys").modules, __name__, SimpleNamespace(Own=Own))  # type: ignore[arg-type]
    assert find_policy(typed("bert")) is find_policy(typed("bert")) is Own
    assert asked == ["bert"]
    register_policy("bert")(Policy)
    assert find_policy(typed("bert")) is Policy


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("no.such.module:Policy", "gpt2 = no.such.module:Policy.*does not load.*ModuleNotFoundError"),
        ("pipeshard:NoPolicy", "gpt2 = pipeshard:NoPolicy.*does not load.*AttributeError"),
        ("torch.nn:Linear", "gpt2 = torch.nn:Linear.*needs a subclass of Policy"),
    ],
)
def test_a_broken_entry_point_is_named(monkeypatch: pytest.MonkeyPatch, value: str, what: str) -> None:
    advertise(monkeypatch, gpt2=value)
    with pytest.raises(ConfigurationError, match=what):
        find_policy(typed("gpt2"))
    assert find_policy(typed("bert")) is shipped()["bert"]


def test_two_entry_points_for_one_model_type_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ("one:Policy", "two:Policy")
    points = EntryPoints(EntryPoint("gpt2", value, registry.ENTRY_POINTS) for value in values)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **by: points.select(**by))
    with pytest.raises(ConfigurationError, match=r"several packages.*'gpt2': one:Policy, two:Policy"):
        find_policy(typed("gpt2"))


# Names of units


def test_unknown_names_come_with_those_that_are_close() -> None:
    model = Ladder()
    policy = Policy(model, traced(model), 0, 2)
    assert policy.unit("layers.2") is model.layers[2]
    assert policy.calls_of("layers.2") == [3]
    assert policy.calls_of("layers") == [1, 2, 3, 4]
    for name in (policy.unit, policy.calls_of):
        with pytest.raises(PartitionError, match=r"Policy names layers\.7, .* of Ladder: did you mean layers\.\d or"):
            name("layers.7")
        with pytest.raises(PartitionError, match=r"Policy names zzz, .*: the known names are embed, .*layers\.0"):
            name("zzz")


def test_a_partition_by_unknown_names_is_refused_with_those_that_are_close() -> None:
    model = Ladder()
    flow = traced(model)
    with pytest.raises(PartitionError, match=r"partition names layer\.1, .* did you mean layers\.1"):
        Policy(model, flow, 0, 2, partition=["layer.1"])
    assert Policy(model, flow, 0, 2, partition=["layers.1"]).stages == (0, 0, 0, *[1] * 6)
    assert Policy(model, flow, 0, 2, partition=["layers"]).stages == (*[0] * 5, *[1] * 4)


# The documentation


def test_the_documented_policy_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    scope: dict[str, Any] = {"__name__": "documented"}
    exec(snippet, scope)
    assert capsys.readouterr().out == re.findall(r"# (\[.*\])", snippet)[0] + "\n"
    assert find_policy(scope["model"]) is scope["LadderPolicy"]
