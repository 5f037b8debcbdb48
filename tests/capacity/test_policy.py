# SPDX-License-Identifier: Apache-2.0
"""What goes first, against plain references."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pykvcache.capacity.policy import (
    DEPTH_MAX,
    Policy,
    Victim,
    Victims,
    depth_of,
    rank,
    time_of_use,
)

SECOND_NS = 1_000_000_000
MINUTE_NS = 60 * SECOND_NS
NOW_NS = 1_700_000_000 * SECOND_NS
TIMES = st.integers(0, NOW_NS)


def victim(rank_: int, name: str) -> Victim:
    return Victim(rank_, "/kv", name, 1, rank_)


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 20), st.data())
def test_the_first_so_many_are_those_of_a_sorted_list(
    ranks: list[int], count: int, data: st.DataObject
) -> None:
    offered = [victim(rank_, f"{number}.kv") for number, rank_ in enumerate(ranks)]
    after = data.draw(st.sampled_from(offered)) if offered and data.draw(st.booleans()) else None
    victims = Victims(count, after)
    for each in offered:
        victims.offer(each)
    expected = [each for each in sorted(offered) if after is None or each > after]
    assert victims.in_order() == expected[:count]
    assert victims.is_complete == (len(expected) <= count)


def test_no_more_than_twice_as_many_are_held() -> None:
    victims = Victims(10)
    for number in range(10_000, 0, -1):
        victims.offer(victim(number, "x.kv"))
        assert len(victims._held) < 20


@given(st.floats(1e9, 4e9), st.integers(0, DEPTH_MAX), st.sampled_from([1.0, 60.0, 3600.0]))
def test_a_time_of_use_says_when_and_how_deep(now_s: float, depth: int, interval_s: float) -> None:
    time_ns = time_of_use(now_s, depth, interval_s)
    assert depth_of(time_ns) == depth
    assert now_s - interval_s - 1 < time_ns / SECOND_NS <= now_s + 1


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 500)), min_size=1, max_size=30))
def test_no_chunk_is_newer_than_one_before_it(uses: list[tuple[int, float]]) -> None:
    """Requests end at any times with prefixes that share a beginning; each touches a chunk at
    most once an interval, as the keeper does."""
    parents = {0: None, 1: 0, 2: 1, 3: 0}  # 3 branches off after 0
    times: dict[int, int] = {}
    for chunk, now_s in sorted(uses, key=lambda use: use[1]):
        path = [chunk]
        while (parent := parents[path[0]]) is not None:
            path.insert(0, parent)
        for position, member in enumerate(path):
            times[member] = time_of_use(now_s, 256 * (position + 1), 60.0)
    for policy in Policy:
        for chunk, time_ns in times.items():
            parent = parents[chunk]
            if parent is not None:
                now_ns = 10_000 * SECOND_NS
                assert rank(policy, time_ns, now_ns) < rank(policy, times[parent], now_ns)


def test_a_depth_beyond_what_can_be_told_is_the_deepest() -> None:
    assert time_of_use(60.0, 10_000_000, 60.0) == time_of_use(60.0, DEPTH_MAX, 60.0)


@given(TIMES, TIMES)
def test_lru_is_the_order_of_times(one: int, other: int) -> None:
    ranks = [rank(Policy.LRU, time_ns, NOW_NS) for time_ns in (one, other)]
    assert (ranks[0] < ranks[1]) == (one < other)


@given(TIMES, TIMES)
def test_a_prefix_policy_puts_age_before_depth_and_depth_before_time(one: int, other: int) -> None:
    def reference(time_ns: int) -> tuple[int, int, int]:
        minutes, age_class = (NOW_NS - time_ns) // MINUTE_NS, 0
        while minutes >= 2**age_class:
            age_class += 1
        return -age_class, -depth_of(time_ns), time_ns

    assert (rank(Policy.PREFIX, one, NOW_NS) < rank(Policy.PREFIX, other, NOW_NS)) == (
        reference(one) < reference(other)
    )


def test_a_prefix_policy_keeps_beginnings_where_lru_keeps_the_newer() -> None:
    older_beginning = time_of_use(NOW_NS / SECOND_NS - 700, 256, 60.0)
    newer_end = time_of_use(NOW_NS / SECOND_NS - 600, 8192, 60.0)
    assert rank(Policy.LRU, older_beginning, NOW_NS) < rank(Policy.LRU, newer_end, NOW_NS)
    assert rank(Policy.PREFIX, newer_end, NOW_NS) < rank(Policy.PREFIX, older_beginning, NOW_NS)


def test_a_time_in_the_future_is_the_newest() -> None:
    for policy in Policy:
        assert rank(policy, 2 * NOW_NS, NOW_NS) > rank(policy, NOW_NS - 1, NOW_NS)


def test_a_time_of_whole_seconds_says_nothing_about_depth() -> None:
    assert depth_of(NOW_NS) == 0
    assert depth_of(NOW_NS + 1) == 0
