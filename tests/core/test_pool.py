# SPDX-License-Identifier: Apache-2.0
"""Slots, their memory, and how many a pool holds."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pykvcache.errors import ConfigError, InvariantError
from pykvcache.layout import PAGE
from pykvcache.pool import HUGE_PAGE, Pool, SlotLedger, slots_of

GIB = 1 << 30
THP_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class LedgerMachine(RuleBasedStateMachine):
    """Leases and releases in any order, compared with a set."""

    @initialize(capacity=st.integers(0, 6))
    def start(self, capacity: int) -> None:
        self.ledger = SlotLedger(capacity)
        self.leased: set[int] = set()

    @precondition(lambda self: self.ledger.free)
    @rule()
    def lease(self) -> None:
        slot = self.ledger.lease()
        assert slot not in self.leased
        assert 0 <= slot < self.ledger.capacity
        self.leased.add(slot)

    @precondition(lambda self: not self.ledger.free)
    @rule()
    def lease_none(self) -> None:
        with pytest.raises(InvariantError, match="no slot is free"):
            self.ledger.lease()

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.leased)))
        self.ledger.release(slot)
        self.leased.remove(slot)

    @rule(slot=st.integers(-1, 7))
    def release_wrongly(self, slot: int) -> None:
        if slot not in self.leased:
            with pytest.raises(InvariantError, match=f"slot {slot} is released but not leased"):
                self.ledger.release(slot)

    @invariant()
    def conserved(self) -> None:
        assert self.ledger.leased == len(self.leased)
        assert self.ledger.free == self.ledger.capacity - len(self.leased)


TestLedger = LedgerMachine.TestCase


def test_the_slot_released_last_is_leased_first() -> None:
    ledger = SlotLedger(4)
    slots = [ledger.lease() for _ in range(3)]
    assert slots == [0, 1, 2]
    ledger.release(1)
    assert ledger.lease() == 1, "its pages have been touched already"


def test_a_broken_ledger_says_so() -> None:
    ledger = SlotLedger(2)
    ledger._free.append(0)
    with pytest.raises(
        InvariantError, match=r"2 free \+ 1 leased \+ 0 retained slots != capacity 2"
    ):
        ledger.lease()


@pytest.mark.parametrize("slot_bytes", [PAGE, 3 * PAGE, HUGE_PAGE + PAGE])
def test_slots_are_aligned_distinct_and_writable(slot_bytes: int) -> None:
    pool = Pool(slots=5, slot_bytes=slot_bytes)
    views = pool.views()
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views]
    assert addresses == [pool.address + slot * slot_bytes for slot in range(5)]
    assert pool.address % HUGE_PAGE == 0
    assert all(address % PAGE == 0 for address in addresses)
    assert all(len(view) == slot_bytes for view in views)
    for slot, view in enumerate(views):
        view[:] = bytes([slot + 1]) * slot_bytes
    assert all(set(pool.view(slot)) == {slot + 1} for slot in range(5))
    assert len(pool.memory) == pool.size == 5 * slot_bytes


def test_a_slot_that_is_not_whole_pages_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="slot of 4097 bytes is not a multiple of 4096"):
        Pool(slots=1, slot_bytes=PAGE + 1)


def test_the_pool_is_not_touched_before_it_is_used() -> None:
    before = resident_bytes()
    pool = Pool(slots=16, slot_bytes=4 * HUGE_PAGE)
    assert resident_bytes() - before < pool.size // 4


def test_populating_touches_the_slots_that_are_leased_first() -> None:
    pool = Pool(slots=16, slot_bytes=4 * HUGE_PAGE)
    before = resident_bytes()
    pool.populate(0, 8)
    grown = resident_bytes() - before
    if grown == 0:
        pytest.skip("this kernel is older than MADV_POPULATE_WRITE")
    assert 8 * pool.slot_bytes * 0.9 < grown < 10 * pool.slot_bytes
    pool.populate(8, 100)
    assert resident_bytes() - before < pool.size + 4 * HUGE_PAGE
    assert SlotLedger(16).lease() == 0


def test_populating_in_the_background_touches_the_rest_and_changes_nothing() -> None:
    pool = Pool(slots=16, slot_bytes=HUGE_PAGE + PAGE)
    pool.populate(0, 1)
    before = resident_bytes()
    pool.view(9)[:4] = b"kept"
    pool.populate_in_background(1).join()
    grown = resident_bytes() - before
    if grown <= HUGE_PAGE:
        pytest.skip("this kernel is older than MADV_POPULATE_WRITE")
    assert grown > 14 * pool.slot_bytes
    assert bytes(pool.view(9)[:4]) == b"kept"


@pytest.mark.skipif(
    not THP_SETTING.exists() or "[never]" in THP_SETTING.read_text(),
    reason="transparent huge pages are off on this machine",
)
def test_the_pool_is_backed_by_huge_pages() -> None:
    pool = Pool(slots=16, slot_bytes=HUGE_PAGE)
    pool.memory[:] = bytes(pool.size)
    mapping = mapping_of(pool.address)
    assert mapping["VmFlags"].split().count("hg") == 1, "madvise was not taken"
    huge = int(mapping["AnonHugePages"].split()[0]) << 10
    free_huge_pages_are_scarce = huge < pool.size // 2
    if free_huge_pages_are_scarce:
        pytest.skip(f"advised, but memory is too fragmented: {huge} of {pool.size} bytes")
    assert huge <= pool.size + HUGE_PAGE


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * PAGE


def mapping_of(address: int) -> dict[str, str]:
    """The fields of /proc/self/smaps for the mapping that holds the address."""
    fields: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        header = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if header:
            if inside:
                break
            inside = int(header[1], 16) <= address < int(header[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    assert fields, f"no mapping holds {address:#x}"
    return fields


# --- how many slots


def test_slots_are_a_ranks_share() -> None:
    assert slots_of(GIB, slot_bytes=32 << 20, slots_min=12, ranks=1) == 32
    assert slots_of(GIB, slot_bytes=32 << 20, slots_min=12, ranks=2) == 16
    assert slots_of(GIB - 1, slot_bytes=32 << 20, slots_min=12, ranks=1) == 31


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        slots_of(GIB // 4, slot_bytes=28 << 20, slots_min=12, ranks=2)
    message = str(refused.value)
    assert "--kv-offloading-size is 0.25 GiB" in message
    assert "4 slots of 28.0 MiB for each of 2 ranks" in message
    assert "io_depth + copy_headroom needs 12" in message
    assert "at least 0.657 GiB would do" in message


@given(
    slot_bytes=st.integers(2, 1 << 16).map(lambda pages: pages * PAGE),
    slots_min=st.integers(1, 512),
    ranks=st.integers(1, 64),
    share=st.floats(0, 1, exclude_max=True),
)
def test_the_size_that_the_message_names_would_do(
    slot_bytes: int, slots_min: int, ranks: int, share: float
) -> None:
    needed = slot_bytes * slots_min * ranks
    with pytest.raises(ConfigError) as refused:
        slots_of(min(int(needed * share), needed - 1), slot_bytes, slots_min, ranks)
    named = re.search(r"at least ([0-9.]+) GiB would do", str(refused.value))
    assert named
    enough = int(float(named[1]) * GIB)  # as vLLM reads --kv-offloading-size
    assert slots_of(enough, slot_bytes, slots_min, ranks) >= slots_min
    assert enough - needed < 3 << 20, "no more than rounding"
