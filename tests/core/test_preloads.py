# SPDX-License-Identifier: Apache-2.0
"""Reading ahead in the transfer core, one behaviour at a time."""

from __future__ import annotations

import errno

import pytest

from pykvcache.errors import InvariantError
from pykvcache.layout import BlockSpan, Defect
from pykvcache.transfer.jobs import Direction, Failure
from pykvcache.transfer.operations import Action
from pykvcache.transfer.preloads import PreloadLimits
from tests.core.driver import FILE_BYTES, Driver, chunk_of, preload_of

LIMITS = PreloadLimits(depth=2, slots_max=5)
"""Of a pool of 8 slots with io_depth 2."""


def stage(driver: Driver, *names: str) -> None:
    """Read chunks ahead until nothing more happens."""
    driver.preload(*names)
    driver.finish()


def test_chunks_are_read_ahead_in_order_and_kept() -> None:
    driver = Driver(preload=LIMITS)
    driver.preload("a", "b", "c")
    driver.advance()
    assert [item.path for item in driver.files(Action.OPEN)] == [
        preload_of(name).path for name in "abc"
    ]
    driver.finish()
    assert driver.core.staged == 3
    assert (driver.ledger.retained, driver.ledger.leased) == (3, 0)
    assert driver.core.bytes_read == 3 * FILE_BYTES
    assert driver.core.take_dram_changes() == [(name.encode(), 1) for name in "abc"]


def test_a_load_of_a_staged_chunk_only_copies() -> None:
    driver = Driver(preload=LIMITS)
    stage(driver, "a")
    job = driver.load(chunk_of("a"))
    driver.advance()
    assert not driver.files(Action.OPEN)
    driver.complete(driver.copy(Direction.LOAD))
    result = driver.result(job)
    assert (result.success, result.dram, result.file_bytes) == (True, 1, 0)
    assert driver.core.bytes_read == FILE_BYTES


def test_a_staged_chunk_stays_while_another_request_wants_it() -> None:
    driver = Driver(preload=LIMITS)
    stage(driver, "a")
    driver.load(chunk_of("a"))
    driver.finish()
    assert driver.core.staged == 1, "the list still names it"
    driver.preload()
    assert driver.core.staged == 0
    driver.assert_at_rest()


@pytest.mark.parametrize("when", ["opening", "reading"])
def test_a_load_takes_over_the_read_in_flight(when: str) -> None:
    driver = Driver(preload=LIMITS)
    driver.preload("a")
    driver.advance()
    if when == "reading":
        driver.complete(driver.file(Action.OPEN))
    job = driver.load(chunk_of("a"))
    driver.preload()
    driver.finish()
    result = driver.result(job)
    assert result.success
    assert result.file_bytes == driver.core.bytes_read == FILE_BYTES
    driver.assert_at_rest()


def test_nothing_is_read_ahead_while_a_load_waits() -> None:
    driver = Driver(preload=LIMITS, open_lookahead=1)
    driver.load(chunk_of("x"), chunk_of("y"))
    driver.preload("a")
    driver.advance()
    driver.complete(driver.files(Action.OPEN))  # x; y waits for its open
    assert [item.path for item in driver.files(Action.OPEN)] == [chunk_of("y").path]
    driver.complete(driver.files(Action.OPEN))
    assert [item.path for item in driver.files(Action.OPEN)] == [chunk_of("a").path]


def test_an_opened_read_ahead_waits_for_loads_that_come_after_it() -> None:
    driver = Driver(preload=LIMITS, io_depth=1)
    driver.preload("a")
    driver.advance()
    preloading = driver.file(Action.OPEN)
    driver.load(chunk_of("x"))
    driver.complete(preloading)
    assert not driver.files(Action.READ), "the load's file is being opened"
    driver.complete(driver.file(Action.OPEN))
    reading = driver.file(Action.READ)
    assert reading.chunk is not None
    assert reading.chunk.key == b"x"


def test_reads_ahead_have_a_depth_of_their_own() -> None:
    driver = Driver(slots=20, io_depth=4, preload=PreloadLimits(depth=2, slots_max=10))
    driver.preload(*"abcdef")
    driver.advance()
    driver.complete(driver.files(Action.OPEN))
    assert len(driver.files(Action.READ)) == 2


def test_the_slots_of_loads_are_left_alone() -> None:
    driver = Driver(slots=4, io_depth=2, preload=PreloadLimits(depth=2, slots_max=1))
    stage(driver, *"abc")
    assert driver.core.staged == 1
    with pytest.raises(InvariantError, match="leave no store"):
        Driver(slots=4, io_depth=2, preload=PreloadLimits(depth=2, slots_max=2))


def test_bytes_have_a_budget() -> None:
    driver = Driver(preload=PreloadLimits(depth=2, slots_max=5, bytes_max=2 * FILE_BYTES))
    stage(driver, *"abc")
    assert driver.core.staged == 2


def test_a_load_takes_the_slot_of_what_is_wanted_last() -> None:
    driver = Driver(slots=4, io_depth=1, preload=PreloadLimits(depth=1, slots_max=2))
    stage(driver, "a", "b")
    jobs = [driver.load(chunk_of(name)) for name in "vwxyz"]
    driver.advance()
    for _ in jobs:
        driver.complete(driver.files(Action.OPEN))
        driver.complete(driver.files(Action.READ))
    assert driver.ledger.leased == 4, "copies hold every slot, also those of a and b"
    lost = [change for change in driver.core.take_dram_changes() if change[1] < 0]
    assert lost == [(b"b", -1), (b"a", -1)]
    driver.finish()
    assert driver.results().keys() == set(jobs)
    assert driver.core.staged == 2, "what was taken is read again when there is room"


def test_stores_do_not_take_staged_chunks() -> None:
    driver = Driver(slots=4, io_depth=1, preload=PreloadLimits(depth=1, slots_max=2))
    stage(driver, "a", "b")
    job = driver.store(*map(chunk_of, "xyz"))
    driver.advance()
    assert len(driver.copies(Direction.STORE)) == 2
    driver.finish()
    assert driver.result(job).success
    assert driver.core.staged == 2


def test_withdrawn_chunks_are_forgotten() -> None:
    driver = Driver(preload=LIMITS)
    driver.preload("a", "b")
    driver.advance()
    first, second = driver.files(Action.OPEN)
    driver.complete(first)
    driver.preload("b")
    driver.complete(second)
    driver.finish()
    assert driver.core.take_dram_changes() == [(b"a", 1), (b"a", -1), (b"b", 1)]
    assert driver.core.staged == 1


def test_a_failed_read_ahead_is_counted_and_not_repeated() -> None:
    driver = Driver(preload=LIMITS)
    driver.preload("a")
    driver.advance()
    driver.complete(driver.file(Action.OPEN), -errno.ENOENT)
    driver.finish()
    assert driver.core.preload_failures == {Failure.NOT_FOUND: 1}
    driver.preload("a", "b")
    driver.advance()
    assert [item.path for item in driver.files(Action.OPEN)] == [chunk_of("b").path]
    driver.finish()
    driver.preload()
    driver.preload("a")
    driver.advance()
    assert driver.file(Action.OPEN).path == chunk_of("a").path, "another request may try"


def test_a_bad_file_is_removed() -> None:
    driver = Driver(preload=LIMITS)
    driver.preload("a")
    driver.advance()
    driver.complete(driver.file(Action.OPEN))
    driver.complete(driver.file(Action.READ), defect=Defect.KEY)
    assert driver.file(Action.RENAME).path == chunk_of("a").path
    assert driver.core.preload_failures == {Failure.WRONG_CONTENT: 1}


def test_a_file_read_ahead_may_hold_less_than_a_load_wants() -> None:
    driver = Driver(preload=LIMITS)
    driver.preload("a")
    driver.advance()
    driver.complete(driver.file(Action.OPEN))
    job = driver.load(chunk_of("a"))
    driver.complete(driver.file(Action.READ), span=BlockSpan(2, 2))
    assert driver.result(job).failures == {b"a": Failure.WRONG_CONTENT}
    assert driver.file(Action.UNLINK).path == chunk_of("a").path


def test_staged_chunks_age_out() -> None:
    driver = Driver(preload=PreloadLimits(depth=2, slots_max=5, ttl_s=10.0))
    stage(driver, "a")
    driver.now = 9.0
    driver.advance()
    assert driver.core.staged == 1
    driver.now = 10.0
    driver.advance()
    assert driver.core.staged == 0
    driver.preload("a", "b")
    driver.finish()
    assert driver.core.bytes_read == 2 * FILE_BYTES, "a is not read a second time"


def test_closing_ends_reading_ahead() -> None:
    driver = Driver(preload=LIMITS)
    stage(driver, "a")
    driver.preload("b")
    driver.advance()
    driver.core.close(driver.now)
    driver.finish()
    driver.assert_at_rest()
    driver.preload("c")
    assert not driver.advance()
