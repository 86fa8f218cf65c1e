"""Tests of covering."""

from __future__ import annotations

import itertools
from unittest import mock

from tests.covering import FILES, covering, drawn, one_in, waiting


def test_every_pair_occurs_in_few_cases() -> None:
    factors = ("abc", (1, 2, 3), (True, False), "xyz")
    with mock.patch("tests.covering.ALL", False):
        cases = covering(*factors)
    for i, j in itertools.combinations(range(4), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(factors[i], factors[j]))
    assert len(cases) <= 12 and cases == sorted(cases, key=list(itertools.product(*factors)).index)


def test_every_value_occurs_about_as_often_as_the_others() -> None:
    with mock.patch("tests.covering.ALL", False):
        cases = covering("abcdefghi", (1, 2, 3, 4), strength=1)
    assert [name for name, _ in cases] == list("abcdefghi")
    assert sorted([number for _, number in cases].count(k) for k in (1, 2, 3, 4)) == [2, 2, 2, 3]


def test_exact_keeps_the_product() -> None:
    with mock.patch("tests.covering.ALL", True):
        assert covering("ab", (1, 2), (0, 1)) == list(itertools.product("ab", (1, 2), (0, 1)))


def test_every_test_has_its_turn_with_some_seed_and_a_third_of_the_files_a_test_with_each() -> None:
    tests = {f"test_{k}": f"file_{k // 4}" for k in range(40)}
    ran: list[set[str]] = []
    for seed in range(100):
        with mock.patch("tests.covering.SEED", seed):
            ran.append({*tests} - waiting(tests, {"file_9"}, 9))
            kept = {f"file_{k}" for k in range(9) if one_in(FILES, f"file_{k}")}
        assert kept <= {tests[name] for name in ran[-1]}
    assert set().union(*ran) == {*tests} and all(len(names) < 15 for names in ran)
    assert any("file_9" not in {tests[name] for name in names} for names in ran)


def test_the_seed_draws() -> None:
    names = [str(k) for k in range(1000)]
    with mock.patch("tests.covering.SEED", 1):
        one = [name for name in names if one_in(4, name)]
    with mock.patch("tests.covering.SEED", 2):
        assert one != [name for name in names if one_in(4, name)] and 200 < len(one) < 300


def test_one_of_each_kind_is_drawn() -> None:
    """The one case of a kind of which all others have many was left out by most seeds."""
    cases = [*range(100), -1]
    with mock.patch("tests.covering.ALL", False):
        for seed in range(10):
            with mock.patch("tests.covering.SEED", seed):
                few = drawn(cases, 10, lambda case: case < 0)
                assert len(few) == 10 and -1 in few and few == sorted(few, key=cases.index)
                assert len(drawn(cases, 10, lambda case: case % 20)) == 20
        assert drawn(cases, 200) == cases
