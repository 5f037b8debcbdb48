# SPDX-License-Identifier: Apache-2.0
"""Bytes per second: the bucket alone, and what the core makes of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache.transfer.bandwidth import BURST_S, Bandwidth
from pykvcache.transfer.jobs import Direction
from pykvcache.transfer.operations import Action
from pykvcache.transfer.preloads import PreloadLimits
from tests.core.driver import FILE_BYTES, Driver, chunk_of

RATE = 1_000_000


@given(
    st.lists(st.integers(1, 300_000), min_size=1, max_size=60),
    st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_no_more_is_started_than_the_rate_allows(sizes: list[int], patient: list[bool]) -> None:
    bandwidth, now, started = Bandwidth(RATE), 5.0, 0
    for size, waits in zip(sizes, patient, strict=False):
        if not bandwidth.allows(now, patient=waits):
            wake_at = bandwidth.take_wake_at()
            assert now < wake_at < math.inf
            now = wake_at
            assert bandwidth.allows(now, patient=waits), "the time it names is enough"
        assert started <= RATE * (now - 5.0 + BURST_S), "the debt is at most one transfer"
        bandwidth.spend(size)
        started += size


def test_an_unused_budget_saves_up_a_burst_and_no_more() -> None:
    bandwidth = Bandwidth(RATE)
    assert bandwidth.allows(0.0)
    assert bandwidth.allows(1000.0)
    bandwidth.spend(int(RATE * BURST_S))
    assert not bandwidth.allows(1000.0)
    assert bandwidth.allows(1000.001)


def test_who_is_patient_leaves_half_of_the_burst() -> None:
    bandwidth = Bandwidth(RATE)
    assert bandwidth.allows(0.0, patient=True)
    bandwidth.spend(int(RATE * BURST_S / 2))
    assert not bandwidth.allows(0.0, patient=True)
    assert bandwidth.allows(0.0)


def test_no_limit_never_refuses() -> None:
    bandwidth = Bandwidth(0)
    bandwidth.spend(1 << 60)
    assert bandwidth.allows(0.0, patient=True)
    assert bandwidth.take_wake_at() == math.inf


@pytest.mark.parametrize("direction", list(Direction))
def test_a_transfer_waits_for_its_turn_and_the_core_says_until_when(direction: Direction) -> None:
    limit = FILE_BYTES  # a file each second
    driver = Driver(
        slots=12,
        io_depth=4,
        read_bandwidth_max=limit if direction is Direction.LOAD else 0,
        write_bandwidth_max=limit if direction is Direction.STORE else 0,
    )
    chunks = [chunk_of(name) for name in "abc"]
    job = driver.load(*chunks) if direction is Direction.LOAD else driver.store(*chunks)
    action = Action.READ if direction is Direction.LOAD else Action.WRITE
    driver.advance()
    started = []
    for _ in range(20):
        if transfers := driver.files(action):
            started.append(driver.now)
            assert len(transfers) == 1
        if driver.issued:
            driver.complete(driver.issued)
            continue
        wake_at = driver.core.next_deadline()
        if wake_at is None:
            break
        driver.now = wake_at
        driver.advance()
    assert driver.result(job).success
    assert started == pytest.approx([0.0, 1 - BURST_S, 2 - BURST_S], abs=1e-6)


def test_reading_ahead_waits_longer_than_a_load() -> None:
    driver = Driver(
        slots=12,
        io_depth=4,
        preload=PreloadLimits(depth=2, slots_max=5),
        read_bandwidth_max=FILE_BYTES,
    )
    driver.preload("a", "b")
    driver.advance()
    driver.complete(driver.files(Action.OPEN))
    assert len(driver.files(Action.READ)) == 1, "the burst"
    driver.complete(driver.files(Action.READ))
    driver.now = 1 - BURST_S + 0.01
    driver.advance()
    assert not driver.files(Action.READ), "the bucket is not half full"
    driver.load(chunk_of("x"))
    driver.advance()
    driver.complete(driver.files(Action.OPEN))
    reading = driver.file(Action.READ)
    assert reading.chunk is not None
    assert reading.chunk.key == b"x"
