# SPDX-License-Identifier: Apache-2.0
"""The retention policies against plain models of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache.errors import InvariantError
from pykvcache.transfer.retention import ArcPolicy, LruPolicy, RetentionPolicy, make_policy

KEYS = [bytes([number]) for number in range(24)]
requests = st.lists(st.sampled_from(KEYS), max_size=120)
capacities = st.integers(1, 6)


def anything(key: bytes) -> bool:
    return True


def request(policy: RetentionPolicy, key: bytes) -> None:
    """One request of a cache that holds `capacity` pages and is filled by misses."""
    if key in policy:
        policy.hit(key)
        return
    policy.miss(key)
    if len(policy) == policy.capacity:
        assert policy.evict(anything) is not None
    policy.admit(key)


class PaperArc:
    """ARC(c) as figure 4 of the paper writes it; lists from LRU to MRU."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []

    def request(self, x: bytes) -> None:
        if x in self.t1 or x in self.t2:
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
        elif x in self.b1:
            delta = 1 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + delta, self.c)
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            delta = 1 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - delta, 0)
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:
            self.case_iv(x)
            self.t1.append(x)

    def case_iv(self, x: bytes) -> None:
        l1 = len(self.t1) + len(self.b1)
        total = l1 + len(self.t2) + len(self.b2)
        if l1 == self.c:
            if len(self.t1) < self.c:
                self.b1.pop(0)
                self.replace(x)
            else:
                self.t1.pop(0)
        elif total >= self.c:
            if total == 2 * self.c:
                self.b2.pop(0)
            self.replace(x)

    def replace(self, x: bytes) -> None:
        if len(self.t1) + len(self.t2) < self.c:  # the paper's caches are full by then
            return
        t1 = len(self.t1)
        if t1 >= 1 and ((x in self.b2 and t1 == self.p) or t1 > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


@given(requests, capacities)
def test_arc_decides_as_the_paper_does(keys: list[bytes], capacity: int) -> None:
    arc, paper = ArcPolicy(capacity), PaperArc(capacity)
    for key in keys:
        request(arc, key)
        paper.request(key)
        assert list(arc._t1) == paper.t1
        assert list(arc._t2) == paper.t2
        assert list(arc._b1) == paper.b1
        assert list(arc._b2) == paper.b2
        assert arc.target == paper.p


@given(requests, capacities)
def test_lru_keeps_the_last_used(keys: list[bytes], capacity: int) -> None:
    lru = LruPolicy(capacity)
    for end, key in enumerate(keys, 1):
        request(lru, key)
        last_used = list(dict.fromkeys(reversed(keys[:end])))[:capacity]
        assert {key for key in KEYS if key in lru} == set(last_used)


steps = st.lists(
    st.tuples(
        st.sampled_from(["use", "cold", "evict", "evict pinned", "discard"]), st.sampled_from(KEYS)
    ),
    max_size=150,
)


@pytest.mark.parametrize("make", [LruPolicy, ArcPolicy])
@given(steps, capacities)
def test_bounds_hold_whatever_the_pool_does(
    make: Callable[[int], RetentionPolicy], steps: list[tuple[str, bytes]], capacity: int
) -> None:
    policy = make(capacity)
    resident: set[bytes] = set()
    for step, key in steps:
        if step == "use" and key in resident:
            policy.hit(key)
        elif step in ("use", "cold") and key not in resident:
            if step == "use":
                policy.miss(key)
            if len(resident) < capacity:
                policy.admit(key, cold=step == "cold")
                resident.add(key)
        elif step == "evict":
            victim = policy.evict(anything)
            assert (victim is None) == (not resident)
            resident.discard(victim or b"")
        elif step == "evict pinned":
            victim = policy.evict(lambda candidate, pinned=key: candidate != pinned)
            assert victim != key
            assert (victim is None) == (resident <= {key})
            resident.discard(victim or b"")
        elif step == "discard":
            policy.discard(key)
            resident.discard(key)
        assert {key for key in KEYS if key in policy} == resident
        assert len(policy) == len(resident)
        if isinstance(policy, ArcPolicy):
            l1, l2 = len(policy._t1) + len(policy._b1), len(policy._t2) + len(policy._b2)
            assert l1 <= capacity
            assert l1 + l2 <= 2 * capacity
            assert 0 <= policy.target <= capacity


def test_arc_keeps_what_is_used_often_through_a_scan() -> None:
    hot, scan = KEYS[:4], KEYS[4:]
    kept = {}
    for name in ("lru", "arc"):
        policy = make_policy(name, 8)  # type: ignore[arg-type]
        for key in hot * 3 + scan:
            request(policy, key)
        kept[name] = [key for key in hot if key in policy]
    assert kept == {"lru": [], "arc": hot}


@pytest.mark.parametrize("make", [LruPolicy, ArcPolicy])
def test_what_was_never_asked_for_goes_first(make: Callable[[int], RetentionPolicy]) -> None:
    policy = make(3)
    request(policy, b"a")
    policy.admit(b"b", cold=True)
    assert policy.evict(anything) == b"b"


@pytest.mark.parametrize("make", [LruPolicy, ArcPolicy])
def test_misuse_is_refused(make: Callable[[int], RetentionPolicy]) -> None:
    policy = make(1)
    with pytest.raises(InvariantError, match="61 is hit but not resident"):
        policy.hit(b"a")
    policy.admit(b"a")
    with pytest.raises(InvariantError, match="61 is admitted twice"):
        policy.admit(b"a")
    with pytest.raises(InvariantError, match="61 is missed but resident"):
        policy.miss(b"a")
    with pytest.raises(InvariantError, match="62 is admitted beyond the capacity"):
        policy.admit(b"b")
    policy.discard(b"unknown")
