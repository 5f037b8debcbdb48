# SPDX-License-Identifier: Apache-2.0
"""Sizes, limits, and what must go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache.capacity.budget import Budget, Space, Usage, estimate
from pykvcache.sizes import Size, format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("123", Size(123)),
        ("1KiB", Size(1024)),
        ("1kb", Size(1000)),
        ("2 G", Size(2_000_000_000)),
        ("1.5GiB", Size(3 << 29)),
        ("500gib", Size(500 << 30)),
        ("1Ti", Size(1 << 40)),
        (str(1 << 60), Size(1 << 60)),
        ("80%", Size(share=0.8)),
        (" 12.5 % ", Size(share=0.125)),
    ],
)
def test_sizes(text: str, expected: Size) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1", "1XB", "5iB", "101%", "1GiB%", "0x10", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a number of bytes"):
        parse_size(text)


def test_sizes_for_people() -> None:
    shown = [format_bytes(count) for count in (0, 1023, 1024, 5 << 30, 3 << 50)]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "5.0 GiB", "3072.0 TiB"]


def budget(capacity: Size | None = None) -> Budget:
    return Budget(capacity, Size(share=0.1), high=0.95, low=0.9)


def test_without_a_capacity_the_rest_of_the_disk_is_the_limit() -> None:
    assert budget().limit(300, Space(1000, 500)) == 700
    assert budget().limit(0, Space(1000, 50)) == 0


def test_a_capacity_is_a_limit_beside_the_free_space() -> None:
    assert budget(Size(400)).limit(300, Space(1000, 500)) == 400
    assert budget(Size(share=0.5)).limit(300, Space(1000, 500)) == 500
    assert budget(Size(400)).limit(300, Space(1000, 150)) == 350


def test_eviction_starts_at_the_high_mark_and_goes_to_the_low_one() -> None:
    space = Space(10_000, 9_000)
    limits = budget(Size(1000))
    assert limits.excess(950, space) == 0
    assert limits.excess(951, space) == 51


@given(st.integers(0, 2000), st.integers(0, 1000), st.integers(1, 1500), st.floats(0, 1))
def test_after_eviction_nothing_is_due(used: int, free: int, capacity: int, share: float) -> None:
    space = Space(3000, free)
    limits = Budget(Size(capacity), Size(share=share), high=0.95, low=0.9)
    excess = limits.excess(used, space)
    assert 0 <= excess <= used
    after = Space(3000, free + excess)
    assert (
        limits.limit(used - excess, after) == limits.limit(used, space)
        or excess == 0
        or (limits.limit(used, space) == 0)
    )
    if limits.limit(used, space):
        assert limits.excess(used - excess, after) == 0


def test_what_was_written_since_the_count_is_seen_in_the_free_space() -> None:
    usage = Usage(files=1, size=100, pinned=0, free=500, at_s=0.0, seconds=0.0)
    assert estimate(usage, Space(1000, 480)) == 120
    assert estimate(usage, Space(1000, 600)) == 100
