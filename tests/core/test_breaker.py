# SPDX-License-Identifier: Apache-2.0
"""When the disk is left alone, and when it is tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache.transfer.breaker import ANSWERS, FAULTS, Breaker, Position
from pykvcache.transfer.jobs import Failure

FAULT = Failure.IO_ERROR


def opened(now: float = 0.0, pause_max_s: float = 8.0) -> Breaker:
    breaker = Breaker(3, 1.0, pause_max_s)
    assert [breaker.note(FAULT, now) for _ in range(3)] == [False, False, True]
    return breaker


def test_faults_in_a_row_open_it() -> None:
    breaker = opened()
    assert breaker.is_paused and breaker.openings == 1
    assert not breaker.admits(0.99)


def test_a_success_in_between_starts_the_row_anew() -> None:
    breaker = Breaker(2, 1.0, 8.0)
    for failure in (FAULT, None, FAULT):
        assert not breaker.note(failure, 0.0)
    assert breaker.admits(0.0)


@pytest.mark.parametrize("failure", sorted(set(Failure) - FAULTS))
def test_what_is_no_fault_of_the_disk_never_opens_it(failure: Failure) -> None:
    breaker = Breaker(1, 1.0, 8.0)
    assert not breaker.note(failure, 0.0)
    assert not breaker.is_paused


def test_after_the_pause_one_job_is_the_trial() -> None:
    breaker = opened()
    assert breaker.admits(1.0)
    assert not breaker.admits(1.0)
    assert breaker.is_paused


@pytest.mark.parametrize("answer", [None, *sorted(ANSWERS)])
def test_a_trial_that_the_disk_answers_closes_it(answer: Failure | None) -> None:
    breaker = opened()
    breaker.admits(1.0)
    assert not breaker.note(answer, 1.1)
    assert not breaker.is_paused and breaker.admits(1.1)
    assert not breaker.note(FAULT, 1.2), "the row begins anew"


def test_each_trial_that_fails_doubles_the_pause() -> None:
    breaker, now = opened(pause_max_s=3.0), 0.0
    for pause in (1.0, 2.0, 3.0, 3.0):
        assert not breaker.admits(now + pause - 0.01)
        now += pause
        assert breaker.admits(now)
        assert breaker.note(FAULT, now)
    breaker.admits(now + 3.0)
    breaker.note(None, now + 3.0)
    assert breaker.openings == 1
    for _ in range(3):
        breaker.note(FAULT, now + 3.0)
    assert breaker.admits(now + 4.0), "the first pause is short again"


def test_a_trial_that_says_nothing_is_followed_by_another() -> None:
    breaker = opened()
    assert breaker.admits(1.0)
    breaker.note(Failure.DROPPED, 1.5)
    assert not breaker.admits(1.9)
    assert breaker.admits(2.0)


def test_what_was_in_flight_when_it_opened_changes_no_pause() -> None:
    breaker = opened()
    assert not breaker.note(FAULT, 0.9)
    assert breaker.admits(1.0)


def test_a_late_success_closes_it() -> None:
    breaker = opened()
    breaker.note(None, 0.5)
    assert breaker.admits(0.5)


def test_without_a_number_it_stays_closed() -> None:
    breaker = Breaker(0, 1.0, 8.0)
    assert not any(breaker.note(FAULT, 0.0) for _ in range(100))
    assert breaker.admits(0.0)


@given(
    st.lists(
        st.tuples(st.sampled_from([None, *Failure]), st.floats(0, 5), st.booleans()), max_size=60
    )
)
def test_while_it_is_open_there_is_at_most_one_job_in_each_pause(
    events: list[tuple[Failure | None, float, bool]],
) -> None:
    breaker, now, trials = Breaker(3, 1.0, 8.0), 0.0, list[float]()
    for failure, seconds, asks in events:
        now += seconds
        if asks and breaker.admits(now):
            if breaker.position is Position.HALF_OPEN:
                assert not trials or now - trials[-1] >= 1.0
                trials.append(now)
        elif not asks:
            breaker.note(failure, now)
            if breaker.position is Position.CLOSED:
                trials.clear()
