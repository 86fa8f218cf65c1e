"""Tests of covering."""

from __future__ import annotations

import itertools
from unittest import mock

from tests.covering import covering


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
