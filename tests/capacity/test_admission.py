# SPDX-License-Identifier: Apache-2.0
"""Servers that store between looks at the root that they share."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pykvcache.capacity.admission import ROOM_SHARE, Admission, Room

CHUNK = 10


def test_nothing_is_allowed_without_room() -> None:
    assert Admission(CHUNK).allowed(Room(1, 0), storing=0) == 0


def test_a_share_of_the_room_is_allowed() -> None:
    assert Admission(CHUNK).allowed(Room(1, 400), storing=0) == 400 // (ROOM_SHARE * CHUNK)


def test_one_chunk_is_allowed_while_there_is_any_room() -> None:
    admission = Admission(CHUNK)
    assert admission.allowed(Room(1, 1), storing=0) == 1
    assert admission.allowed(Room(1, 1), storing=1) == 0


def test_what_ended_counts_until_the_look_after_the_next() -> None:
    """Nobody knows whether the next one has seen it."""
    admission = Admission(CHUNK)
    admission.allowed(Room(1, 400), storing=0)
    admission.end(10)
    assert admission.allowed(Room(1, 400), storing=0) == 0
    assert admission.allowed(Room(2, 400), storing=0) == 0
    assert admission.allowed(Room(3, 400), storing=0) == 10


class _Server:
    def __init__(self) -> None:
        self.admission = Admission(CHUNK)
        self.begun_before = 0
        self.begun = 0

    @property
    def storing(self) -> int:
        return self.begun_before + self.begun

    def end(self, count: int) -> int:
        before = min(count, self.begun_before)
        after = min(count - before, self.begun)
        self.begun_before -= before
        self.begun -= after
        self.admission.end(before + after)
        return (before + after) * CHUNK


@settings(max_examples=1000)
@given(
    st.integers(1, 2000),
    st.lists(
        st.tuples(
            st.sampled_from(("look", "store", "write")),
            st.integers(0, ROOM_SHARE - 1),
            st.integers(1, 50),
        ),
        max_size=200,
    ),
)
def test_so_many_servers_stay_within_the_limit_but_for_one_chunk_each(
    limit: int, events: list[tuple[str, int, int]]
) -> None:
    """Whose stores end before the look after the next."""
    servers = [_Server() for _ in range(ROOM_SHARE)]
    used, room = 0, Room(0, limit)
    for event, number, count in events:
        server = servers[number]
        if event == "look":
            for each in servers:
                used += each.end(each.begun_before)
                each.begun_before, each.begun = each.begun, 0
            room = Room(room.look + 1, max(limit - used, 0))
            for each in servers:
                each.admission.allowed(room, each.storing)
        elif event == "store":
            server.begun += min(count, server.admission.allowed(room, server.storing))
        else:
            used += server.end(count)
        assert used <= limit + ROOM_SHARE * CHUNK
