# SPDX-License-Identifier: Apache-2.0
"""When the disk is left alone, and when it is tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache.transfer.breaker import FAULTS, LOAD_PAUSES, Breaker, Position
from pykvcache.transfer.jobs import Failure

FAULT = Failure.IO_ERROR
OTHERS = sorted(set(Failure) - FAULTS)


def opened(pause_max_s: float = 8.0) -> Breaker:
    breaker = Breaker(3, 1.0, pause_max_s)
    for _ in range(3):
        assert not breaker.is_paused
        breaker.fail(FAULT, 0.0)
    assert breaker.take_opening()
    return breaker


def admits_store(breaker: Breaker, now: float) -> bool:
    return breaker.admits(now, is_load=False)


def test_faults_in_a_row_open_it_once() -> None:
    breaker = opened()
    assert breaker.is_paused
    assert not admits_store(breaker, 0.99)
    breaker.fail(FAULT, 0.5)
    assert not breaker.take_opening()


def test_a_success_in_between_starts_the_row_anew() -> None:
    breaker = Breaker(2, 1.0, 8.0)
    breaker.fail(FAULT, 0.0)
    breaker.succeed(0.0)
    breaker.fail(FAULT, 0.0)
    assert admits_store(breaker, 0.0)


@pytest.mark.parametrize("failure", OTHERS)
def test_what_is_no_fault_of_the_disk_never_opens_it(failure: Failure) -> None:
    breaker = Breaker(1, 1.0, 8.0)
    breaker.fail(failure, 0.0)
    assert not breaker.is_paused


def test_a_deadline_opens_it_if_nothing_has_succeeded_meanwhile() -> None:
    breaker = Breaker(3, 1.0, 8.0)
    breaker.succeed(5.0)
    breaker.miss_deadline(4.0, 30.0)
    assert not breaker.is_paused, "the disk is slow"
    breaker.miss_deadline(6.0, 36.0)
    assert breaker.take_opening(), "the disk hangs"


def test_after_the_pause_one_job_is_the_trial() -> None:
    breaker = opened()
    assert admits_store(breaker, 1.0)
    assert not admits_store(breaker, 1.0)
    assert breaker.is_paused


def test_loads_are_trials_only_if_no_store_comes() -> None:
    breaker = opened()
    assert not breaker.admits(LOAD_PAUSES - 0.01, is_load=True)
    assert breaker.admits(LOAD_PAUSES, is_load=True)


@pytest.mark.parametrize("answer", sorted(set(OTHERS) - {Failure.NOT_FOUND}))
def test_a_trial_that_the_disk_answers_closes_it(answer: Failure) -> None:
    breaker = opened()
    admits_store(breaker, 1.0)
    breaker.fail(answer, 1.1)
    assert not breaker.is_paused
    breaker.fail(FAULT, 1.2)
    assert not breaker.is_paused, "the row begins anew"


def test_that_a_file_is_missing_may_be_the_kernels_answer() -> None:
    breaker = opened()
    assert admits_store(breaker, 1.0)
    breaker.fail(Failure.NOT_FOUND, 1.1)
    assert breaker.is_paused
    assert not admits_store(breaker, 1.9)
    assert admits_store(breaker, 2.0), "another trial follows after the pause"
    breaker.succeed(2.1)
    assert not breaker.is_paused


def test_each_trial_that_fails_doubles_the_pause() -> None:
    breaker, now = opened(pause_max_s=3.0), 0.0
    for pause in (1.0, 2.0, 3.0, 3.0):
        assert not admits_store(breaker, now + pause - 0.01)
        now += pause
        assert admits_store(breaker, now)
        breaker.fail(FAULT, now)
    admits_store(breaker, now + 3.0)
    breaker.succeed(now + 3.0)
    assert not breaker.take_opening()
    for _ in range(3):
        breaker.fail(FAULT, now + 3.0)
    assert admits_store(breaker, now + 4.0), "the first pause is short again"


def test_a_trial_that_hangs_is_followed_by_others_ever_later() -> None:
    breaker = opened()
    tried = [second for second in range(64) if admits_store(breaker, second)]
    assert tried == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56]


def test_a_late_success_closes_it() -> None:
    breaker = opened()
    breaker.succeed(0.5)
    assert admits_store(breaker, 0.5)


def test_without_a_number_it_stays_closed() -> None:
    breaker = Breaker(0, 1.0, 8.0)
    breaker.miss_deadline(1.0, 2.0)
    for _ in range(100):
        breaker.fail(FAULT, 2.0)
    assert not breaker.is_paused


@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "load", "success", *Failure]), st.floats(0, 5)),
        max_size=60,
    )
)
def test_while_it_is_open_there_is_at_most_one_job_in_each_pause(
    events: list[tuple[str, float]],
) -> None:
    breaker, now, trials = Breaker(3, 1.0, 8.0), 0.0, list[float]()
    for event, seconds in events:
        now += seconds
        if event in ("store", "load"):
            admitted = breaker.admits(now, is_load=event == "load")
            if admitted and breaker.position is Position.HALF_OPEN:
                assert not trials or now - trials[-1] >= 1.0
                trials.append(now)
        elif event == "success":
            breaker.succeed(now)
        else:
            breaker.fail(Failure(event), now)
        if breaker.position is Position.CLOSED:
            trials.clear()
