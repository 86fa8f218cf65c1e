"""Tests of the parity of some architectures, and of the report of a sweep. `make parity` sweeps all of them."""

import itertools
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.errors import TraceError
from tests.covering import ALL, SEED, sample
from tests.families import FAMILIES
from tests.parity.build import batch, build
from tests.parity.chains.chain import Chain
from tests.parity.check import CLOSE, MIXES, Verdict, check, mixes
from tests.parity.entries import Entry, all_entries, find
from tests.parity.report import EXACT, ORDER, Row, Totals, draw, markdown, passed, results, verdicts
from tests.parity.sweep import Rows, failure, row_of
from tests.pool import Pool, WorkerError

pytestmark = pytest.mark.local

KINDS = {
    "decoders": "causal-lm: gpt2 llama gemma2 bloom falcon gptj",
    "mixtures of experts": "causal-lm: mixtral olmoe gpt_oss deepseek_v3",
    "recurrent and hybrid": "causal-lm: jamba mamba lfm2 falcon_h1",
    "shared keys and values": "causal-lm: gemma4_text gemma3n_text",
    "encoders": "masked-lm: bert deberta-v2 albert modernbert xlm luke",
    "classifiers": "sequence-classification: qwen3 xlnet opt",
    "encoder-decoders": "seq2seq-lm: t5 bart m2m_100 switch_transformers",
    "vision": "image-classification: vit swin resnet segformer convnext",
    "text and images": "image-text-to-text: llava qwen2_vl idefics3 gemma3 mllama",
    "audio": "speech-seq2seq: whisper speech_to_text moonshine dia",
    "proteins": "image-text-to-text: evolla",
}
FIXED = [f"{task}/{name}" for task, names in (kind.split(": ") for kind in KINDS.values()) for name in names.split()]
ENTRIES = {str(entry): entry for entry in all_entries()}
DRAWN = sample([entry for name, entry in ENTRIES.items() if name not in FIXED], 8 if ALL else 2, SEED)
TABLE = Path(__file__).parents[1] / "docs" / "parity.md"


# These are compared in test_families.py, with every layout of a batch.
ELSEWHERE = set() if ALL else {f"{task}/{name}" for name in FAMILIES for task in ("causal-lm", "seq2seq-lm")}


@pytest.mark.turns
@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "p"), [(name, 2 + k % 2) for k, name in enumerate(FIXED) if name in ENTRIES.keys() - ELSEWHERE]
)
def test_architecture(pool: Pool, name: str, p: int) -> None:
    row = row_of(pool, ENTRIES[name], p)
    assert row.kind in EXACT, f"{row.kind}: {row.reason}"


@pytest.mark.turns
@pytest.mark.parametrize(
    ("entry", "p"), [pytest.param(entry, 2 + k % 2, id=f"{entry}-seed {SEED}") for k, entry in enumerate(DRAWN)]
)
def test_drawn_architecture(pool: Pool, entry: Entry, p: int) -> None:
    known = verdicts(TABLE.read_text()) if TABLE.exists() else {}
    allowed = {*EXACT} | ({known.get(str(entry))} & {"refused", "untrainable"})
    row = row_of(pool, entry, p)
    assert row.kind in allowed, f"{row.kind}: {row.reason}"


IN_16_BITS = {
    "bf16": "causal-lm/deepseek_v3 causal-lm/mamba image-classification/resnet seq2seq-lm/m2m_100",
    "fp16": "causal-lm/mixtral causal-lm/xglm seq2seq-lm/t5 image-classification/swin",
    "autocast": "masked-lm/bert causal-lm/mixtral image-classification/regnet seq2seq-lm/t5 masked-lm/xlm",
}
LOW = [(name, precision) for precision, names in IN_16_BITS.items() for name in names.split() if name in ENTRIES]


@pytest.mark.turns
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name,precision", LOW)
def test_architecture_in_16_bits(pool: Pool, name: str, precision: str) -> None:
    row = row_of(pool, ENTRIES[name], 2, precision=precision)
    assert row.kind in EXACT and row.error < CLOSE, f"{row.kind} {row.error}: {row.reason}"


def of_a_larger_norm() -> Any:
    norm = PipelineOptimizer.get_grad_norm
    return mock.patch.object(PipelineOptimizer, "get_grad_norm", lambda *options: 1.01 * norm(*options))


def of_another_chain() -> Any:
    return mock.patch.object(Chain, "mismatch", lambda chain, flow: "another value is read")


def mistaken(entry: Entry, mistake: Callable[[], Any]) -> Verdict:
    with mistake():
        return check(entry)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("mistake", "reason"), [(of_a_larger_norm, r"norm [\d.]+, unsplit"), (of_another_chain, "another value is read")]
)
def test_what_rounding_cannot_explain_is_wrong(pool: Pool, mistake: Callable[[], Any], reason: str) -> None:
    """Where only the norm or the chain was wrong, the error was 0, which the unsplit model's rounding excused."""
    (found,) = pool.run(mistaken, 1, ENTRIES["causal-lm/gpt2"], mistake)
    assert found.kind == "wrong" and re.search(reason, found.reason)


ROWS = [
    Row("causal-lm/llama", 2, "bitwise"),
    Row("causal-lm/llama", 3, "close", 3e-8),
    Row("causal-lm/deepseek_v3", 2, "close", 1e-12, "in fp64; 4e-05 in fp32"),
    Row("causal-lm/deepseek_v3", 3, "close", 2e-8),
    Row("masked-lm/bert", 2, "bitwise"),
    Row(
        "masked-lm/bert", 3, "refused", 0.0, "TraceError: __init__ | <glue>, /usr/lib/site-packages/a/b.py:7\nall ranks"
    ),
    Row("masked-lm/deberta-v2", 2, "wrong", float("inf"), "loss 1, unsplit 2"),
    Row("masked-lm/deberta-v2", 3, "untrainable"),
    Row("image-classification/timm_wrapper", 2, "untrainable", 0.0, "no loss"),
    Row("image-classification/timm_wrapper", 3, "untrainable", 0.0, "no loss"),
]
VERSIONS = {"torch": "2.13.0"}


def test_result_is_the_worst_row() -> None:
    found = {result.model_type: result for result in results(ROWS)}
    assert (found["llama"].kind, found["llama"].error, found["llama"].note) == ("close", 3e-8, "")
    assert (found["bert"].kind, found["bert"].note) == ("refused", "p = 3: TraceError: __init__ | <glue>, a/b.py:7")
    assert (found["deberta-v2"].kind, found["timm_wrapper"].note) == ("wrong", "no loss")
    (result,) = results([Row("causal-lm/llama", 2, "untrainable", 0.0, "ImportError: \n  needs timm\nand more")])
    assert result.note == "ImportError: needs timm"
    assert found["deepseek_v3"].note == "p = 2: in fp64; 4e-05 in fp32"


def test_order_of_the_verdicts() -> None:
    for worse, better in itertools.combinations(ORDER, 2):
        (result,) = results([Row("causal-lm/llama", 2, better), Row("causal-lm/llama", 3, worse)])
        assert result.kind == worse
    assert ORDER == ("wrong", "hang", "crash", "refused", "untrainable", "close", "bitwise")


def test_totals() -> None:
    totals = Totals.of(results(ROWS))
    assert (totals.entries, totals.train, totals.exact, totals.failed) == (5, 4, 2, 1)
    assert totals.share == 0.5
    assert str(totals) == (
        "5 entries: 2 close, 1 untrainable, 1 refused, 1 wrong; exact: 50.0 % of the 4 that train unsplit"
    )


@pytest.mark.parametrize(
    ("name", "mixed"), [("nllb-moe", True), ("t5", False), ("mixtral", False), ("recurrent_gemma", False)]
)
def test_samples_that_depend_on_each_other_are_seen(name: str, mixed: bool) -> None:
    """Experts of NLLB-MoE have a capacity for the tokens of a whole batch, of which a microbatch never saw the end: the
    reference, which is summed microbatch by microbatch, did not see it either, and the class needed no proof.
    RecurrentGemma keeps states with a graph of their own, which could not be copied."""
    entry = find(name)[0]
    model = build(entry)
    data = batch(entry, model)
    model(**data)
    assert mixes(model, data, 2) == mixed


def test_classes_whose_samples_depend_on_each_other_are_not_listed() -> None:
    rows = [Row("seq2seq-lm/nllb-moe", 2, "close", reason=MIXES), Row("seq2seq-lm/t5", 2, "bitwise")]
    listed = passed(results(rows), "5")
    assert "T5For" in listed and "NllbMoe" not in listed


def test_share_is_never_rounded_up() -> None:
    rows = [Row(f"causal-lm/m{k}", 2, "bitwise" if k else "wrong") for k in range(3000)]
    assert "exact: 99.9 % of" in str(Totals.of(results(rows)))


def test_report_is_the_same_for_the_same_rows(tmp_path: Path) -> None:
    shuffled = random.Random(0).sample(ROWS, len(ROWS))
    slower = [replace(row, seconds=9.0) for row in shuffled]
    assert markdown(slower, VERSIONS, tmp_path / "a.md") == markdown(ROWS, VERSIONS, tmp_path / "a.md")
    for name, rows in (("a.svg", ROWS), ("b.svg", slower)):
        draw(rows, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_report_reads_back() -> None:
    text = markdown(ROWS, VERSIONS, Path("docs/parity-old.md"))
    assert verdicts(text) == {f"{result.task}/{result.model_type}": result.kind for result in results(ROWS)}
    assert "](parity-old.svg)" in text
    assert r"| bert | refused |  | p = 3: TraceError: \_\_init\_\_ \| \<glue>, a/b.py:7 |" in text


def test_report_has_a_column_for_each_precision() -> None:
    others = {
        "bf16": [Row("causal-lm/llama", 2, "close", 2e-3), Row("masked-lm/deberta-v2", 2, "refused", 0.0, "no")],
        "autocast": [Row("causal-lm/deepseek_v3", 2, "refused", 0.0, "TraceError: a unit")],
    }
    text = markdown(ROWS, VERSIONS, Path("docs/parity.md"), others)
    assert "| architecture | verdict | largest error | note | bf16 | autocast |" in text
    assert "| llama | close | 3e-08 |  | close 2e-03 |  |" in text
    assert "| bf16 | 2 | 0 | 1 | 0 | 1 | 0 | 0 | 0 | 50.0 % |" in text
    assert "| causal-lm/deepseek_v3 | autocast | refused | TraceError: a unit |" in text  # exact in fp32
    assert "| masked-lm/deberta-v2 | bf16 |" not in text  # wrong in fp32 too
    assert verdicts(text) == verdicts(markdown(ROWS, VERSIONS, Path("docs/parity.md")))


def test_rows_resume(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "rows.jsonl"
    for row in ROWS[:3]:
        Rows(file, resume=file.exists()).add(row)
    again = Rows(file, resume=True)
    assert again.rows == ROWS[:3]
    llama, deepseek = ENTRIES["causal-lm/llama"], ENTRIES["causal-lm/deepseek_v3"]
    assert again.missing([deepseek, llama], [2, 3]) == {2: [], 3: [deepseek]}
    assert Rows(file, resume=False).rows == Rows(file, resume=True).rows == []


def test_rows_of_other_versions_are_not_resumed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"torch": "1.0"}\n')
    with pytest.raises(ValueError, match="without --resume"):
        Rows(file, resume=True)


def test_sample_is_that_of_its_seed() -> None:
    entries = list(ENTRIES.values())
    assert sample(entries, 20, 1) == sample(entries, 20, 1) != sample(entries, 20, 2)
    assert sample(entries, 10**6, 1) == entries


def end(how: str) -> None:
    if dist.get_rank() == 1 and how == "refuse":
        raise TraceError("the mask is read\nsee below")
    if dist.get_rank() == 1 and how == "raise":
        try:
            raise TraceError("the mask is read")
        except TraceError:
            raise ValueError("no value") from None
    if dist.get_rank() == 1 and how == "die":
        os._exit(7)
    if how == "hang" and dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize(
    "how,kind,reason",
    [
        ("refuse", "refused", "TraceError: the mask is read"),
        ("raise", "crash", "ValueError: no value"),
        ("die", "crash", "Rank 1 died first: exit code 7"),
        ("hang", "hang", "Timeout: after 2 s not every rank had returned."),
    ],
)
def test_how_a_failure_is_called(pool: Pool, how: str, kind: str, reason: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(end, 2, how, timeout=2.0 if how == "hang" else 60.0)
    found, _, text = failure(str(caught.value))
    assert (found, text.partition("\n")[0]) == (kind, reason)
    assert "rank 1" in text
