"""Tests of the runner of `make parity-packages`: its verdicts and its report. They do not need the packages."""

import re
from pathlib import Path

import pytest
import torch

from tests.packages.catalog import COMPLETE, FILES, find, gaps_of
from tests.packages.check import CLOSE, Trained, judged, shrinks
from tests.packages.model import by_samples
from tests.packages.report import chart, markdown
from tests.packages.sweep import TOO_FEW, Timed, applies, row_of
from tests.pool import Pool

pytestmark = pytest.mark.local


def trained(**changed: torch.Tensor) -> Trained:
    """Two steps of a model with two parameters and a buffer."""
    gradients = {"a": torch.ones(3), "b": torch.full((2,), 2.0)}
    state = {"a": torch.ones(3), "b": torch.ones(2), "count": torch.tensor(2)}
    own = {name: value for name, value in changed.items() if name in gradients}
    losses = [changed.get("loss", torch.tensor(1.5)), torch.tensor(1.0)]
    return Trained(losses, gradients | own, state)


def test_same_is_bitwise() -> None:
    assert judged(trained(), trained(), CLOSE, {}).kind == "bitwise"


def test_rounding_is_close() -> None:
    verdict = judged(trained(a=torch.tensor([1.0, 1.0, 1.0 + 1e-6])), trained(), CLOSE, {})
    assert verdict.kind == "close" and 0 < verdict.error < CLOSE


def test_rounding_that_training_multiplies_shrinks_with_the_precision() -> None:
    """A cut of timm's sknet adds up three gradients in another order, and two steps make 0.17 of it, in fp64 2e-10."""
    assert shrinks(0.17, 1.8e-10)
    assert not shrinks(0.17, 1e-6) and not shrinks(1e-5, 1e-10) and not shrinks(float("nan"), 1e-12)


@pytest.mark.parametrize(
    "changed,reason",
    [
        ({"a": torch.tensor([1.0, 1.0, 1.0001])}, "gradient of a"),
        ({"a": torch.ones(4)}, "gradient of a, of shape (4,)"),
        ({"a": torch.tensor([1.0, 1.0, float("nan")])}, "gradient of a"),
        ({"a": torch.zeros(3)}, "gradient of a"),
        ({"loss": torch.tensor(1.50001)}, "loss"),
    ],
)
def test_mistakes_are_wrong(changed: dict[str, torch.Tensor], reason: str) -> None:
    verdict = judged(trained(**changed), trained(), CLOSE, {})
    assert verdict.kind == "wrong" and reason in verdict.reason


def test_state_that_differs_is_wrong() -> None:
    found = trained()
    found.state["count"] = torch.tensor(3)
    assert "after 2 steps count" in judged(found, trained(), CLOSE, {}).reason
    del found.state["count"]
    lost = judged(found, trained(), CLOSE, {})
    assert "no count after training" in lost.reason and lost.error == float("inf")  # which no rounding excuses


def test_gradient_that_the_unsplit_model_lacks() -> None:
    """A stage has zeros for a parameter without a gradient; anything else there is wrong."""
    for value, kind in ((torch.zeros(2), "bitwise"), (torch.full((2,), 1e-9), "wrong")):
        found = trained()
        found.gradients["c"] = value
        assert judged(found, trained(), CLOSE, {}).kind == kind


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize(
    "name,kind,reason",
    [
        ("exact", "bitwise", ""),
        ("other weights", "wrong", "gradient of"),
        ("dying", "crash", "died first: exit code -6"),
        ("stubborn", "crash", "KeyError: 'no optimizer twice'"),
        ("frozen", "untrainable", "empty parameter list"),
    ],
)
def test_row(pool: Pool, name: str, kind: str, reason: str) -> None:
    (model,) = find(f"sample/{name}")
    row = row_of(pool, model, 2)
    assert row.kind == kind and reason in row.reason, row
    assert (row.boost > 0) == (row.first > 0) == (kind in ("bitwise", "wrong"))


@pytest.mark.turns
def test_what_is_refused_in_two_microbatches_runs_in_one(pool: Pool) -> None:
    (model,) = find("sample/contrastive")
    row = row_of(pool, model, 2)
    assert (row.kind in ("bitwise", "close"), row.parts) == (True, 1), row
    assert "two microbatches are refused: " in row.reason and "use one microbatch" in row.reason


def test_what_is_refused_trains_by_the_remedy(pool: Pool) -> None:
    (model,) = find("sample/deciding")
    row = row_of(pool, model, 2)
    assert (row.kind, row.p, row.remedied) == ("refused", 2, True)
    assert re.match("(bitwise|close) with pp_size=1; TraceError: Deciding branches", row.reason), row


@pytest.mark.parametrize(
    "name,reason", [("deciding on", "with nothing refused: TraceError"), ("deciding otherwise", "no refusal says")]
)
def test_remedies_that_do_not_help_or_are_not_named_are_wrong(pool: Pool, name: str, reason: str) -> None:
    (model,) = find(f"sample/{name}")
    row = row_of(pool, model, 2)
    assert row.kind == "wrong" and row.reason.startswith(reason), row


def test_parts_of_a_batch() -> None:
    batch = {"a": {"x": torch.arange(4)}, "targets": ["p", "q", "r", "s"], "shared": torch.arange(3), "count": 2}
    first, second = by_samples(batch, 2)
    assert first["a"]["x"].tolist() == [0, 1] and second["targets"] == ["r", "s"]
    assert len(second["shared"]) == 3 and second["count"] == 2
    images = by_samples(([torch.ones(3, 5)] * 4, [{"boxes": torch.ones(1, 4)}] * 4), 2)[0]
    assert [len(part) for part in images] == [2, 2]
    with pytest.raises(ValueError, match="3 samples in 2 parts"):
        by_samples({"x": torch.ones(3)}, 2)


ROWS = [
    Timed("timm/resnet", 2, "bitwise", unsplit=0.1, boost=2.0, first=0.5),
    Timed("timm/resnet", 3, "refused", 0.0, f"PartitionError: 2 {TOO_FEW} 3 stages"),
    Timed("timm/vgg", 2, "close", 2e-8, "two microbatches are refused: x", boost=3.0, first=1.0, parts=1),
    Timed("diffusers/VQModel", 2, "refused", 0.0, "TraceError: a reason"),
    Timed("diffusers/VQModel", 3, "wrong", float("inf"), "loss"),
    Timed("timm/lamb", 2, "refused", 0.0, "bitwise with x; a reason", remedied=True),
]


def test_report(tmp_path: Path) -> None:
    rows = [row for row in ROWS if applies(row)]
    assert len(rows) == 5  # a model of two parts says nothing of three stages
    text = markdown(rows, {"torch": "2.13.0"}, Path("docs/packages.md"))
    assert "| resnet | bitwise | 0 | 0.10 | 2.00 | 0.50 |  |" in text
    assert "| VQModel | wrong | inf |  |  |  | p = 3: loss |" in text
    assert "**2** exact (**50.0 %** of the trainable entries),\n  1 of these bit for bit" in text
    assert "1 of the exact entries run as one microbatch, because" in text
    assert text == markdown(rows[::-1], {"torch": "2.13.0"}, Path("docs/packages.md"))
    chart(rows, tmp_path / "packages.md")
    assert (tmp_path / "packages.svg").read_text().count("timm")


def test_catalog_has_a_file_for_each_package() -> None:
    folder = Path(__file__).parent / "packages"
    assert all((folder / f"{file}.py").exists() for file in FILES.values())


def test_every_model_has_an_entry_or_a_reason() -> None:
    """Models of a new release would be left out of docs/packages.md, and its share be that of the old ones."""
    every, entries, apart = {"A", "B", "C"}, ["A", "A of text", "step: other"], {"B": "is a base"}
    assert list(gaps_of(every - {"C"}, entries, apart)) == []
    assert list(gaps_of(every, entries, apart)) == ["C has no entry, and APART no reason why"]
    assert list(gaps_of(every, [*entries, "B of text", "C"], apart)) == [
        "B has an entry, and APART says why it has none"
    ]
    assert list(gaps_of({"A"}, entries, apart)) == ["APART names B, which the package does not have"]
    assert set(COMPLETE) <= FILES.keys()
