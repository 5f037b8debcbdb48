# SPDX-License-Identifier: Apache-2.0
"""Which chunks are read ahead first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pykvcache.scheduler.preload import Candidate, order_preloads

KEYS = [b"%02d" % number for number in range(24)]


def candidates(*requests: str) -> list[Candidate]:
    """One letter per chunk."""
    return [
        Candidate(str(at), tuple(letter.encode() for letter in keys))
        for at, keys in enumerate(requests)
    ]


def ordered(slots: int, *requests: str) -> str:
    return b"".join(order_preloads(candidates(*requests), slots)).decode()


queues = st.lists(
    st.lists(st.sampled_from(KEYS), unique=True, max_size=8).map(tuple), max_size=8
).map(lambda lists: [Candidate(str(at), keys) for at, keys in enumerate(lists)])


def test_order_of_the_queue_while_everything_fits() -> None:
    assert ordered(9, "abcd", "efg", "hi") == "abcdefghi"


def test_chunk_wanted_by_several_is_read_once() -> None:
    assert ordered(9, "abc", "abd", "abe") == "abcde"


def test_shared_chunks_count_once_towards_what_fits() -> None:
    assert ordered(5, "abc", "abcd", "ae") == "abcde"


def test_head_then_shortest_when_not_everything_fits() -> None:
    assert ordered(9, "abcd", "efgh", "ij", "k") == "abcdkijef"


def test_requests_of_equal_length_keep_their_order() -> None:
    assert ordered(5, "a", "bc", "de", "fg") == "abcde"


def test_head_keeps_its_place_however_long_it_is() -> None:
    assert ordered(3, "abcdef", "g") == "abc"


def test_nothing_is_planned_without_slots_or_candidates() -> None:
    assert ordered(0, "abc", "d") == ""
    assert order_preloads([], 8) == ()


@given(queues, st.integers(0, 30))
def test_each_wanted_chunk_at_most_once_and_never_more_than_slots(
    queue: list[Candidate], slots: int
) -> None:
    plan = order_preloads(queue, slots)
    wanted = {key for candidate in queue for key in candidate.keys}
    assert len(set(plan)) == len(plan) == min(slots, len(wanted))
    assert set(plan) <= wanted


@given(queues)
def test_with_room_for_all_the_queue_decides(queue: list[Candidate]) -> None:
    everything = [key for candidate in queue for key in candidate.keys]
    assert order_preloads(queue, len(everything)) == tuple(dict.fromkeys(everything))


@given(queues, st.integers(0, 30))
def test_chunks_of_a_request_keep_their_order(queue: list[Candidate], slots: int) -> None:
    """A chunk is only behind a later one of its request if someone else wants that one too."""
    plan = order_preloads(queue, slots)
    for candidate in queue:
        others = {key for other in queue if other is not candidate for key in other.keys}
        own = [key for key in candidate.keys if key not in others]
        assert [key for key in plan if key in own] == own[: sum(key in plan for key in own)]


@given(queues, st.integers(0, 30))
def test_no_request_behind_the_head_is_cut_short_for_a_longer_one(
    queue: list[Candidate], slots: int
) -> None:
    plan = set(order_preloads(queue, slots))
    if len({key for candidate in queue for key in candidate.keys}) <= slots:
        return
    for request in queue[1:]:
        if not plan.issuperset(request.keys):
            served = [queue[0], *(c for c in queue[1:] if len(c.keys) <= len(request.keys))]
            assert plan <= {key for candidate in served for key in candidate.keys}
