# SPDX-License-Identifier: Apache-2.0
"""What the gate's benchmark makes of its rounds."""

from __future__ import annotations

import pytest

from benchmarks.gate import ARMS, Case, Results, Round, near_cases, orders


@pytest.mark.parametrize(
    ("loaded", "gate_s", "right"),
    [(1.0, 1.0, True), (0.0, 2.0, False), (0.5, 0.9, True), (0.5, 1.1, False)],
    ids=["loaded", "computed", "a part, faster", "a part, slower"],
)
def test_the_faster_one_is_right(loaded: float, gate_s: float, right: bool) -> None:
    assert Round(gate_s, load_s=1.0, compute_s=2.0, loaded=loaded).is_right is right
    if loaded in (0.0, 1.0):
        assert Round(gate_s, load_s=2.0, compute_s=1.0, loaded=loaded).is_right is not right


def test_what_takes_the_same_time_tells_nothing() -> None:
    tie = Round(1.0, load_s=1.0, compute_s=1.04, loaded=0.0)
    told = Round(1.0, load_s=1.0, compute_s=1.06, loaded=1.0)
    assert tie.is_tie and not told.is_tie
    report = Results({Case(10.0, 2): [tie, told]}).report()
    assert (report["choice_accuracy"], report["ties"], report["measurements"]) == (1.0, 1, 2)
    assert report["choice_accuracy_near"] is None


def test_the_worst_case_counts_by_its_median() -> None:
    usual = [Round(1.0, 5.0, 1.0, 0.0)] * 3
    bad = [Round(seconds, 5.0, 1.0, 0.0) for seconds in (1.0, 1.2, 9.0)]
    report = Results({Case(5.0, 2): usual, Case(5.0, 4): bad}).report()
    assert report["worst_regression_vs_recompute"] == 1.2
    assert report["worst_regression_case"] == Case(5.0, 4).name


def test_gains_are_geometric_means() -> None:
    rounds = [Round(1.0, 2.0, 1.0, 0.0), Round(1.0, 1.0, 8.0, 1.0)]
    report = Results({Case(5.0, 2): rounds}).report()
    assert report["gain_vs_always_load"] == pytest.approx(2**0.5)
    assert report["gain_vs_never_load"] == pytest.approx(8**0.5)


def results_of(ratios: dict[float, float]) -> Results:
    return Results({Case(rate, 4): [Round(1.0, ratio, 1.0, 0.0)] for rate, ratio in ratios.items()})


def test_the_break_even_lies_between_the_rates_on_its_two_sides() -> None:
    results = results_of({5.0: 8.0, 10.0: 4.0, 40.0: 0.25, 0.0: 0.01})
    assert results.break_even(4) == pytest.approx(20.0)
    near = near_cases(results, [4])
    assert [case.rate for case in near] == pytest.approx([20.0 / 1.2, 20.0 * 1.2])
    assert all(case.is_near for case in near)


def test_a_break_even_beyond_the_fastest_rate_is_guessed() -> None:
    assert results_of({20.0: 3.0, 40.0: 1.5, 0.0: 0.1}).break_even(4) == pytest.approx(60.0)


def test_without_two_sides_there_is_no_break_even() -> None:
    results = results_of({5.0: 0.5, 10.0: 0.25, 0.0: 0.01})
    assert results.break_even(4) is None
    assert near_cases(results, [4]) == []


def test_every_arm_comes_first_as_often_as_the_others() -> None:
    order = orders()
    first = [next(order)[0] for _ in range(6)]
    assert {first.count(arm) for arm in ARMS} == {2}
