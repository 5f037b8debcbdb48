# SPDX-License-Identifier: Apache-2.0
"""The transfer core with a disk that does not work."""

from __future__ import annotations

import errno

from pykvcache.transfer.breaker import LOAD_PAUSES
from pykvcache.transfer.jobs import Direction, Failure
from pykvcache.transfer.operations import Action
from pykvcache.transfer.preloads import PreloadLimits
from tests.core.driver import DEADLINE_S, Driver, chunk_of


def paused(driver: Driver) -> Driver:
    """After two reads that failed."""
    job = driver.load(chunk_of("x"), chunk_of("y"))
    driver.advance()
    driver.complete(driver.files(Action.OPEN))
    driver.complete(driver.files(Action.READ), -errno.EIO)
    assert set(driver.result(job).failures.values()) == {Failure.IO_ERROR}
    assert driver.core.is_paused
    driver.finish()
    return driver


def stored(driver: Driver, name: str) -> None:
    job = driver.store(chunk_of(name))
    driver.advance()
    driver.finish()
    assert driver.result(job).success


def test_loads_and_stores_fail_at_once() -> None:
    driver = paused(Driver(pause_after_faults=2))
    load, store = driver.load(chunk_of("a")), driver.store(chunk_of("b"))
    assert driver.advance() == []
    results = driver.results()
    for job in (load, store):
        assert set(results[job].failures.values()) == {Failure.PAUSED}
    driver.assert_at_rest()


def test_without_the_option_every_load_is_tried() -> None:
    driver = Driver()
    for _ in range(20):
        job = driver.load(chunk_of("a"))
        driver.advance()
        driver.complete(driver.file(Action.OPEN), -errno.EIO)
        assert set(driver.result(job).failures.values()) == {Failure.IO_ERROR}


def test_what_is_in_memory_is_loaded_all_the_same() -> None:
    driver = Driver(pause_after_faults=2, dram_policy="lru")
    stored(driver, "kept")
    paused(driver)
    kept, other = chunk_of("kept"), chunk_of("other")
    job = driver.load(kept, other)
    driver.advance()
    driver.complete(driver.copy(Direction.LOAD))
    result = driver.result(job)
    assert result.failures == {other.key: Failure.PAUSED}
    assert result.dram == 1
    assert driver.core.is_paused, "no news of the disk"


def test_a_store_is_the_trial_and_closes_the_breaker() -> None:
    driver = paused(Driver(pause_after_faults=2))
    driver.now += 1.0
    stored(driver, "a")
    assert not driver.core.is_paused
    job = driver.load(chunk_of("a"))
    driver.advance()
    driver.finish()
    assert driver.result(job).success


def test_a_load_is_the_trial_where_no_store_comes() -> None:
    driver = paused(Driver(pause_after_faults=2))
    driver.now += LOAD_PAUSES - 0.1
    assert set(driver.result(driver.load(chunk_of("a"))).failures.values()) == {Failure.PAUSED}
    driver.now += 0.1
    job = driver.load(chunk_of("a"))
    driver.advance()
    driver.finish()
    assert driver.result(job).success and not driver.core.is_paused


def test_a_file_that_exists_already_is_no_fault() -> None:
    driver = Driver(pause_after_faults=1)
    job = driver.store(chunk_of("a"))
    driver.advance()
    while not driver.files(Action.LINK):
        driver.complete(list(driver.issued))
    driver.complete(driver.file(Action.LINK), -errno.EEXIST)
    assert driver.result(job).present == 1
    assert not driver.core.is_paused


def test_a_disk_that_hangs_keeps_one_deadline_waiting_and_no_other() -> None:
    driver = Driver(pause_after_faults=8)
    first = driver.load(chunk_of("a"))
    driver.advance()
    driver.complete(driver.files(Action.OPEN))
    driver.now = DEADLINE_S - 1.0
    second = driver.load(chunk_of("b"))
    driver.advance()
    driver.now = DEADLINE_S
    driver.advance()
    results = driver.results()
    assert set(results[first].failures.values()) == {Failure.DEADLINE}
    assert set(results[second].failures.values()) == {Failure.PAUSED}, "it need not wait as well"
    assert driver.core.is_paused
    driver.complete(driver.file(Action.READ))
    assert not driver.core.is_paused, "the disk has answered after all"


def test_a_slow_disk_is_not_left_alone() -> None:
    driver = Driver(pause_after_faults=8, io_depth=1)
    late = driver.load(chunk_of("a"), chunk_of("b"))
    driver.advance()
    driver.complete(driver.files(Action.OPEN))
    driver.now = DEADLINE_S - 1.0
    driver.complete(driver.file(Action.READ))
    driver.now = DEADLINE_S
    driver.advance()
    driver.finish()
    assert Failure.DEADLINE in driver.result(late).failures.values()
    assert not driver.core.is_paused


def test_nothing_is_read_ahead_meanwhile() -> None:
    limits = PreloadLimits(depth=2, slots_max=4)
    driver = paused(Driver(pause_after_faults=2, dram_policy="lru", preload=limits))
    driver.preload("p", "q")
    assert driver.advance() == []
