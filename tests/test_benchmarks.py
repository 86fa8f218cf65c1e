"""Tests of a sample of `make bench`: contenders train equally, and a contender that does not is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.progress import Progress

from benchmarks.speed import picture
from benchmarks.speed.contender import ROOT, Contender
from benchmarks.speed.lanes import Lane, Rounds, failures, loss_errors
from benchmarks.speed.limits import limit
from benchmarks.speed.parts import Effort, replay
from benchmarks.speed.parts.work import LIMIT, TORCH, against_limit, batches, ours
from benchmarks.speed.report import write
from benchmarks.speed.section import Section, Table
from benchmarks.speed.work import Work
from tests.unsplit import largest_error

WORK = Work("gpt2", hidden=32, heads=4, layers=4, vocabulary=64, length=16, microbatches=4)


@pytest.mark.slow
def test_contenders_train_to_the_same_losses(tmp_path: Path) -> None:
    missing = Contender("nobody", "torch", environment=".venv-nobody")
    lanes = [Lane(contender, lambda k: batches(k, 2)) for contender in (ours("zbv"), TORCH, LIMIT, missing)]
    with Progress(disable=True) as progress:
        outcomes = Rounds(WORK, lanes, 2, progress).run()
    assert failures(lanes, outcomes) == [
        "nobody: did not start: the environment .venv-nobody does not exist: run make setup-peers"
    ]
    mine, theirs = (outcomes[name] for name in ("pipeshard zbv", "torch 1F1B"))
    assert len(mine.seconds) == 2 and len(mine.losses) == len(theirs.losses) == 6
    assert largest_error(loss_errors(lanes, outcomes).values()) < 1e-5
    report = outcomes["limit"].reports[0]
    assert 0 < limit("zbv", 4, report) < limit("gpipe", 4, report, plain=True)
    assert 0 < limit("gpipe", 4, report) <= limit("gpipe", 4, report, plain=True)
    ratios = against_limit(WORK, outcomes)
    assert len(ratios["pipeshard zbv"]) == 2
    section = Section("The same work", "", [Table("t", ["a"], [["b"]])], raw={str(WORK): {"ratios": ratios}})
    section.save(tmp_path / "work.json")
    write({"work": Section.load(tmp_path / "work.json")}, tmp_path)
    assert "| b |" in (tmp_path / "benchmarks.md").read_text() and (tmp_path / "benchmarks.svg").stat().st_size > 5000


def test_other_losses_are_a_failure() -> None:
    lanes = [Lane(dataclasses.replace(TORCH, name=name), lambda k: []) for name in ("a", "b", "c")]
    rounds = Rounds(WORK, lanes, 1, Progress(disable=True))
    for lane, loss in zip(lanes, (1.0, 1.0, 1.001)):
        rounds.outcomes[lane.name].losses.append(loss)
    assert failures(lanes, rounds.outcomes) == ["c: its losses are off by 1.0e-03"]


@pytest.mark.turns
def test_the_picture_of_readme_shows_the_rows_of_the_page(tmp_path: Path) -> None:
    table = picture.rows((ROOT / "docs" / "benchmarks.md").read_text())
    shown = list(picture.described(table))
    assert shown[0].startswith("pipeshard zbv: no limit (ms) 1") and len(shown) == len(picture.SHOWN)
    kept = (ROOT / "docs" / "links.svg").read_text()
    assert all(line in kept for line in shown), "python -m benchmarks.speed.picture draws it again"
    picture.draw(table | {"torch 1F1B": dict.fromkeys(picture.TITLES, "7 (6 to 8)")}, tmp_path / "links.svg")
    assert "torch 1F1B: no limit (ms) 7 (6 to 8); " in (tmp_path / "links.svg").read_text()


def test_what_a_replayed_unit_costs_is_measured() -> None:
    with Progress(disable=True) as progress:
        section = replay.run(Effort(2, True), progress)
    assert 0 < section.raw["costs"][0] < 1e-3
