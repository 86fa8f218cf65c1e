"""Tests of chains: the inputs of layers, as in the tables of tests/parity/chains and as traced."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pipeshard import Policy, trace
from pipeshard.graph.dataflow import Dataflow
from tests import zoo
from tests.parity.chains import EXPECTED, FAMILIES, chain_of
from tests.parity.chains.chain import Chain, layers

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


class Ladder(nn.Module):
    """Each layer reads the embeddings too, if `rungs`; the last reads all results before it, if `dense`."""

    def __init__(self, rungs: bool = False, dense: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="llama")
        self.rungs, self.dense = rungs, dense
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = embedded = self.embed(input_ids)
        results = []
        for layer in self.layers:
            read = x + embedded if self.rungs else x
            x = layer(sum(results, read) if self.dense and layer is self.layers[3] else read)
            results.append(x)
        return self.head(sum((head(x) for head in self.heads), x))


def traced(model: nn.Module) -> Dataflow:
    return trace(model, {"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, exact=True)


def test_heads_side_by_side_are_no_chain() -> None:
    flow = traced(Ladder())
    names = [(flow.calls[k].unit, flow.calls[n].unit) for k, n in layers(flow)]
    assert names == [(f"layers.{k}", f"layers.{k + 1}") for k in range(3)]
    assert not Chain(("hidden states",)).mismatch(flow)


@pytest.mark.parametrize(
    ("rungs", "dense", "beside", "found"),
    [
        (True, False, (), r"layers\.1 reads layers\.0\[0\] where it comes after layers\.0, and also embed\[0\]"),
        (True, False, ("embeddings",), ""),
        (False, True, (), r"layers\.3 reads layers\.2\[0\] .* and also layers\.0\[0\], layers\.1\[0\]"),
        (True, True, ("embeddings",), r"layers\.3 reads layers\.2\[0\]"),
        (True, True, ("embeddings", ...), ""),
    ],
)
def test_what_is_read_beside_the_layer_before(rungs: bool, dense: bool, beside: Any, found: str) -> None:
    mismatch = Chain(("hidden states",), beside).mismatch(traced(Ladder(rungs, dense)))
    assert re.search(found, mismatch) if found else not mismatch


def test_what_is_handed_on() -> None:
    flow = trace(zoo.build("t5"), zoo.batch("t5"), exact=True)
    assert not Chain(("hidden states", "bias", "bias"), ("encoder output",)).mismatch(flow)
    assert "encoder.block.1 reads encoder.block.0[0], encoder.block.0[1] where" in (
        Chain(("hidden states",), ("encoder output",)).mismatch(flow)
    )
    assert "and also encoder.final_layer_norm[0]" in Chain(("hidden states", "bias", "bias")).mismatch(flow)


def test_a_layer_that_does_not_read_the_one_before_is_a_mismatch() -> None:
    class Skipping(Ladder):
        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            first, second = self.layers[0](x), self.layers[1](x)
            return self.head(self.layers[2](second) + first)

    mismatch = Chain(("hidden states",), ("embeddings",)).mismatch(traced(Skipping()))
    assert "layers.1 reads nothing where it comes after layers.0, and also embed[0]" in mismatch


class Cache:
    """Of one forward: what each layer keeps."""

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}


class Chunked(Ladder):
    """Runs its layers on one half of the sequence after the other; each adds what it made of the first one."""

    class Layer(nn.Linear):
        place: int

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            y = super().forward(x) + cache.of.get(self.place, 0)
            cache.of[self.place] = y / 2
            return y

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(4, 4) for _ in range(2))
        for place, layer in enumerate(self.layers):
            layer.place = place

    def forward(self, input_ids: Tensor) -> Tensor:
        cache = Cache()
        for x in self.embed(input_ids).chunk(2, 1):
            for layer in self.layers:
                x = layer(x, cache)
        return self.head(x)


def test_what_a_layer_keeps_for_itself_is_free() -> None:
    """VibeVoice's convolutions pad a chunk with the end of the one before: it was refused once that was seen."""
    flow = traced(Chunked())
    assert any(value.call == 1 for value in flow.calls[3].reads.values)
    assert not Chain(("hidden states",)).mismatch(flow)


# The tables


def test_families_share_no_architecture() -> None:
    names = Counter(name for family in FAMILIES for row in family.EXPECTED.values() for name in row.split())
    assert names.keys() == EXPECTED.keys() and set(names.values()) == {1}


def test_every_row_is_explained() -> None:
    assert all(chain.handed_on[0] == "hidden states" for chain in EXPECTED.values())
    for family in FAMILIES:
        lines = Path(str(family.__file__)).read_text().splitlines()
        explained = [above.strip()[:2] for above, line in itertools.pairwise(lines) if line.startswith("    Chain(")]
        assert explained == ["# "] * len(family.EXPECTED)


def test_model_types_exist() -> None:
    missing = EXPECTED.keys() - CONFIG_MAPPING.keys()
    assert missing <= set(ONLY_IN_5.split() if transformers.__version__ < "5" else ())
    assert EXPECTED.keys() >= set(ONLY_IN_5.split())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.parametrize("labels", [True, False])
def test_the_zoo_is_as_expected(name: str, labels: bool) -> None:
    model, data = zoo.build(name), zoo.batch(name)
    chain = chain_of(model)
    if not labels:
        ids = data.pop("labels")
        data |= {"decoder_input_ids": ids.clamp(min=0)} if model.config.is_encoder_decoder else {}
    for training in (True, False):
        flow = trace(model.train(training), data, exact=True)
        assert len(list(layers(flow))) >= 2
        assert chain is not None and not chain.mismatch(flow)
        assert sum(Policy(model, flow, 0, 3).stages) > 0


def test_router_logits_are_no_surprise() -> None:
    model = zoo.build("mixtral")
    model.config.output_router_logits = True
    flow = trace(model, zoo.batch("mixtral"), exact=True)
    assert flow.loss is not None and any(flow.is_aside(value) for value in flow.loss.values)
    chain = chain_of(model)
    assert chain is not None and not chain.mismatch(flow)
