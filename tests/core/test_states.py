# SPDX-License-Identifier: Apache-2.0
"""The table of a chunk's life."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest

from pykvcache.errors import InvariantError
from pykvcache.transfer.records import Lane, Read, Write
from pykvcache.transfer.states import (
    READ_TRANSITIONS,
    WRITE_TRANSITIONS,
    Event,
    State,
    next_read_state,
    next_write_state,
)
from tests.core.driver import Driver, chunk_of

Table = Mapping[tuple[State, Event], State]
Step = Callable[[State, Event], State]
TABLES = [(READ_TRANSITIONS, next_read_state), (WRITE_TRANSITIONS, next_write_state)]
PAIRS = list(itertools.product(State, Event))


@pytest.mark.parametrize(("table", "step"), TABLES, ids=["read", "write"])
def test_a_step_is_in_the_table_or_raises(table: Table, step: Step) -> None:
    for state, event in PAIRS:
        if (state, event) in table:
            assert step(state, event) is table[state, event]
        else:
            with pytest.raises(InvariantError, match=f"that is {state} cannot {event}"):
                step(state, event)


@pytest.mark.parametrize(("table", "step"), TABLES, ids=["read", "write"])
def test_an_illegal_event_changes_nothing(table: Table, step: Step) -> None:
    chunk = chunk_of("a")
    for state, event in PAIRS:
        if (state, event) in table:
            continue
        moved: Read | Write
        if table is READ_TRANSITIONS:
            moved = Read(chunk, Lane(), state=state)
        else:
            moved = Write(record=None, chunk=chunk, state=state)  # type: ignore[arg-type]
        with pytest.raises(InvariantError):
            moved.move(event)
        assert moved.state is state


@pytest.mark.parametrize(("table", "step"), TABLES, ids=["read", "write"])
def test_every_state_is_reached_and_left_and_the_end_is_final(table: Table, step: Step) -> None:
    sources = {state for state, _ in table}
    assert State.ENDED not in sources
    assert sources | {State.ENDED} == set(table.values()) | {State.WAITING}
    assert Event.ABANDON in {event for state, event in table if state is State.WAITING}


def test_reads_and_writes_together_use_every_state_and_event() -> None:
    keys = READ_TRANSITIONS.keys() | WRITE_TRANSITIONS.keys()
    assert {state for state, _ in keys} | {State.ENDED} == set(State)
    assert {event for _, event in keys} == set(Event)


def test_the_core_moves_by_the_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[State] = set()

    def stepped(state: State, event: Event) -> State:
        seen.add(state)
        return next_write_state(state, event)

    monkeypatch.setattr("pykvcache.transfer.records.next_write_state", stepped)
    driver = Driver()
    driver.store(chunk_of("a"))
    driver.finish()
    assert seen == {
        State.WAITING,
        State.COPYING_OUT,
        State.COPIED,
        State.SEALING,
        State.SEALED,
        State.CREATING,
        State.CREATED,
        State.WRITING,
        State.SYNCING,
        State.CLOSING,
        State.LINKING,
        State.PUBLISHING,
    }
