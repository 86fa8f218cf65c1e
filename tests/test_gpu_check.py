"""Tests of a sample of `make gpu-check DEVICE=cpu`: its code runs, and a failing or hanging case is one result."""

from __future__ import annotations

import io
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console

from benchmarks.gpu import Case, cases, check, main, passes

QUIET = Console(file=io.StringIO())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("gpu-check: there is no GPU here")


@pytest.mark.slow
def test_cases_are_exact_and_one_that_fails_ends_no_other(tmp_path: Path) -> None:
    broken, good = Case(schedule="nothing"), Case("zbv", "isend")
    found = check([broken, good], "cpu", QUIET)
    assert "unknown schedule 'nothing'" in found[broken].problem and not passes(broken, found[broken])
    assert passes(good, found[good]) and 0 < found[good].error < 1e-5 and found[good].milliseconds > 0
    with mock.patch("benchmarks.gpu.check", return_value=found), mock.patch("benchmarks.gpu.LIMIT", 1):
        assert main(["--device", "cpu", "--json", str(tmp_path / "gpu.json")]) == 1
    assert [row["problem"] for row in json.loads((tmp_path / "gpu.json").read_text())][1] == ""


def test_a_case_that_hangs_is_ended() -> None:
    with mock.patch("benchmarks.gpu.LIMIT", 0.2):  # in which not even its processes start
        found = check([Case()], "cpu", QUIET)
    assert found[Case()].problem.startswith("hung for")


def test_the_cases_cover_what_they_say() -> None:
    every = cases("cuda")
    assert len({*map(str, every)}) == len(every) and [case.ranks for case in every] == sorted(c.ranks for c in every)
    assert {case.p2p for case in every if case.backend == "gloo"} == {"broadcast"}  # gloo sends no CUDA tensors
