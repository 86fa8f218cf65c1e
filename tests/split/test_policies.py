"""Policies: what is shipped, what a policy expects, and how one is found."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import pipeshard.policies
from pipeshard import Policy, register_policy, trace
from pipeshard.errors import ConfigurationError, PartitionError
from pipeshard.graph.dataflow import Chain, layers
from pipeshard.split import policy as registry
from pipeshard.split.policy import find_policy
from tests import zoo
from tests.graph.test_chain import Ladder, traced

FAMILIES = {family.__name__.rpartition(".")[2]: family for family in pipeshard.policies.FAMILIES}
# Model types that transformers 5.23 knows and 4.57 does not.
ONLY_IN_5 = """
afmoe audioflamingo3 axk1 axk2 bailing_hybrid beam canary cohere2_moe cohere_asr cohere_compass
cohere_compass_text cosmos3_edge cosmos3_omni cwm deepseek_ocr2 deepseek_v32 deepseek_v4 dots3_note
dots3_note_text emu3_text_model ernie4_5_vl_moe esmc eurobert exaone4_5 exaone_moe flint fun_asr_nano gemma4
gemma4_text gemma4_unified gemma4_unified_text glm46v glm4_moe_lite glm5_next glm_moe_dsa glm_ocr glmasr glmga
granite4_vision granite_docling granite_speech_plus granite_swa granitemoe_swa gte hrm_text hunyuan_vl hy_v3
hy_v4 hyperclovax hyperclovax_vision_v2 inkling2 inkling2_text inkling_mm_model inkling_text internlm3
iquestcoder jais2 jina_embeddings_v3 kimi_k25 kimi_linear kolibri1 laguna lfm2_moe lfm3 lfm3_vl lighton_ocr
mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral3 mistral4 mistral_large4
mllama_text_model modernvbert moss_transcribe_diarize muse_glimmer muse_spark musicflamingo musicgen_decoder
musicgen_melody_decoder nanochat nemo_speechlm nemotron_h nemotron_h_omni neomme nomic_bert olmo_hybrid
paddleocr_vl pi0 pp_chart2table pp_formulanet qianfan_ocr qwen2_5_omni_thinker qwen3_5 qwen3_5_moe
qwen3_5_moe_text qwen3_5_text qwen3_asr qwen3_omni_moe_thinker qwen4_exp qwen4_exp_text solar_open step3p7
t5gemma2 ultrabert ultravbert unlimited_ocr vibevoice vibevoice_asr video_llama_3 voxtral_realtime youtu zaya
"""


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
    policies = {name: registry._shipped(name) for name in pipeshard.policies.EXPECTED}
    return {name: policy for name, policy in policies.items() if policy is not None}


# What is shipped


def test_families_have_all_that_is_shipped_and_share_nothing() -> None:
    names = Counter(name for family in FAMILIES.values() for row in family.EXPECTED.values() for name in row.split())
    assert names.keys() == shipped().keys() and set(names.values()) == {1}
    assert find_policy(typed("llama")) is shipped()["llama"]
    assert pipeshard.policies.TP_PLANS.keys() <= names.keys()
    files = {path.stem for path in Path(str(pipeshard.policies.__file__)).parent.glob("*.py")}
    assert files == {"__init__", "tensor_parallel", *FAMILIES}


def test_shipped_policies_expect_something_and_say_so() -> None:
    for model_type, policy in shipped().items():
        assert isinstance(policy.expects, Chain) and policy.expects.handed_on[0] == "hidden states", model_type
    assert shipped()["megatron-bert"].__name__ == "MegatronBertPolicy"
    for family in FAMILIES.values():  # each row is explained
        lines = Path(str(family.__file__)).read_text().splitlines()
        explained = [above.strip()[:2] for above, line in itertools.pairwise(lines) if line.startswith("    Chain(")]
        assert explained == ["# "] * len(family.EXPECTED)


def test_shipped_model_types_exist() -> None:
    missing = shipped().keys() - CONFIG_MAPPING.keys()
    assert missing <= set(ONLY_IN_5.split() if transformers.__version__ < "5" else ())
    assert shipped().keys() >= set(ONLY_IN_5.split())


@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.parametrize("labels", [True, False])
def test_the_zoo_is_as_expected(name: str, labels: bool) -> None:
    model, data = zoo.build(name), zoo.batch(name)
    policy = find_policy(model)
    assert policy is shipped()[model.config.model_type]
    if not labels:
        ids = data.pop("labels")
        data |= {"decoder_input_ids": ids.clamp(min=0)} if model.config.is_encoder_decoder else {}
    for training in (True, False):
        flow = trace(model.train(training), data, exact=True)
        assert len(list(layers(flow))) >= 2
        assert policy.expects is not None and not policy.expects.mismatch(flow)
        assert sum(policy(model, flow, 0, 3).stages) > 0


def test_router_logits_are_no_surprise() -> None:
    model = zoo.build("mixtral")
    model.config.output_router_logits = True
    flow = trace(model, zoo.batch("mixtral"), exact=True)
    assert flow.loss is not None and any(flow.is_aside(value) for value in flow.loss.values)
    expects = find_policy(model).expects
    assert expects is not None and not expects.mismatch(flow)


# What a policy expects


def test_a_mismatch_is_named_and_the_trace_holds(caplog: pytest.LogCaptureFixture) -> None:
    model = Ladder(rungs=True)
    flow = traced(model)
    policy = find_policy(model)
    expected = (
        r"LlamaPolicy expects of Ladder that each layer reads hidden states of the one before it and nothing else, but "
        r"the trace found that layers\.1 .*embed\[0\]\. The model is split as the trace found it"
    )
    assert policy(model, flow, 0, 1).stages == (0,) * 9  # nothing crosses
    assert policy(model, flow, 1, 2).stages == Policy(model, flow, 1, 2).stages
    assert not caplog.messages
    assert policy(model, flow, 0, 2).stages == Policy(model, flow, 0, 2).stages
    assert len(caplog.messages) == 1 and re.fullmatch(expected, caplog.messages[0])


# How one is found


def test_a_user_s_registration_wins_over_what_is_shipped() -> None:
    llama = zoo.build("llama")
    assert find_policy(llama) is shipped()["llama"]
    register_policy("llama")(Own)
    assert find_policy(llama) is Own

    class ByBase(Policy):
        pass

    register_policy(type(llama).__mro__[1])(ByBase)
    assert find_policy(llama) is ByBase


def test_without_a_registration_it_is_policy_itself() -> None:
    assert find_policy(typed("no-such-model")) is Policy
    assert find_policy(nn.Linear(2, 2)) is Policy


def test_an_entry_point_is_loaded_once_and_lies_between_the_user_s_and_the_shipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = advertise(monkeypatch, llama=f"{__name__}:Own", gpt2="no.such.module:Policy")
    monkeypatch.setitem(__import__("sys").modules, __name__, SimpleNamespace(Own=Own))  # type: ignore[arg-type]
    assert find_policy(typed("llama")) is find_policy(typed("llama")) is Own
    assert asked == ["llama"]
    register_policy("llama")(Policy)
    assert find_policy(typed("llama")) is Policy


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
    assert find_policy(typed("llama")) is shipped()["llama"]


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
        with pytest.raises(PartitionError, match=r"Policy names zzz, .*: they are embed, .*layers\.0"):
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


def test_the_documented_refusal_is_what_is_said() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "policies.md").read_text().split())
    assert str(Chain(("hidden states",))) in text
    for name in FAMILIES:
        assert f"policies/{name}.py" in text
