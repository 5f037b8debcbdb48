# SPDX-License-Identifier: Apache-2.0
"""What is read is compared before anyone may have it; what is written is sealed first."""

from __future__ import annotations

import pytest

from pykvcache.layout import Defect
from pykvcache.transfer.jobs import Direction, Failure
from pykvcache.transfer.operations import Action, ChecksumOperation
from pykvcache.transfer.preloads import PreloadLimits
from tests.core.driver import DEADLINE_S, Driver, chunk_of


def reading(driver: Driver) -> None:
    """Go on until the only file has been read."""
    driver.advance()
    driver.complete(driver.file(Action.OPEN))
    driver.complete(driver.file(Action.READ))


def test_nothing_is_copied_to_the_device_before_it_was_compared() -> None:
    driver = Driver(holds_checksums=True)
    chunk = chunk_of("a")
    job = driver.load(chunk)
    reading(driver)
    operation = driver.checksum(Direction.LOAD)
    assert operation.chunk is chunk
    assert not driver.copies(Direction.LOAD)
    driver.complete(operation)
    assert driver.copy(Direction.LOAD).copies[0].slot == operation.slot
    driver.finish()
    assert driver.result(job).success
    driver.assert_at_rest()


def test_a_checksum_that_differs_fails_the_chunk_for_all_who_want_it() -> None:
    driver = Driver(holds_checksums=True, dram_policy="lru")
    jobs = {driver.load(chunk_of("a")), driver.load(chunk_of("a"))}
    reading(driver)
    driver.complete(driver.checksum(Direction.LOAD), defect=Defect.CHECKSUM)
    results = driver.results()
    assert results.keys() == jobs
    assert all(result.failures == {b"a": Failure.CHECKSUM} for result in results.values())
    assert driver.file(Action.RENAME).path == chunk_of("a").path
    driver.finish()
    driver.assert_at_rest()


def test_one_that_comes_while_it_is_compared_shares_the_read() -> None:
    driver = Driver(holds_checksums=True)
    first = driver.load(chunk_of("a"))
    reading(driver)
    second = driver.load(chunk_of("a"))
    driver.advance()
    assert not driver.files(Action.OPEN)
    driver.complete(driver.checksum(Direction.LOAD))
    driver.finish()
    assert driver.results().keys() == {first, second}
    driver.assert_at_rest()


def test_a_load_ends_at_its_deadline_while_it_is_compared() -> None:
    driver = Driver(holds_checksums=True)
    job = driver.load(chunk_of("a"))
    reading(driver)
    driver.now = DEADLINE_S
    driver.advance()
    assert driver.result(job).failures == {b"a": Failure.DEADLINE}
    assert driver.ledger.leased == 1, "the checksum still reads the slot"
    driver.finish()
    driver.assert_at_rest()


@pytest.mark.parametrize(("check_every", "compared"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_so_many_reads_are_compared(check_every: int, compared: list[int]) -> None:
    driver = Driver(holds_checksums=True, check_every=check_every)
    seen = []
    for number in range(1, 5):
        driver.load(chunk_of(f"chunk{number}"))
        reading(driver)
        if any(isinstance(operation, ChecksumOperation) for operation in driver.issued):
            seen.append(number)
        driver.finish()
    assert seen == compared
    assert all(result.success for result in driver.results().values())


def test_what_is_read_ahead_is_compared_as_well() -> None:
    driver = Driver(
        holds_checksums=True, preload=PreloadLimits(depth=1, slots_max=4), slots=8, io_depth=2
    )
    driver.preload("a")
    reading(driver)
    assert not driver.core.staged
    driver.complete(driver.checksum(Direction.LOAD))
    assert driver.core.staged == 1


def test_no_file_is_made_before_its_chunk_is_sealed() -> None:
    driver = Driver(holds_checksums=True)
    job = driver.store(chunk_of("a"))
    driver.advance()
    driver.complete(driver.copy(Direction.STORE))
    assert driver.core.settled([job])
    assert not driver.files(Action.CREATE)
    driver.complete(driver.checksum(Direction.STORE))
    assert driver.file(Action.CREATE)
    driver.finish()
    assert driver.result(job).success
    driver.assert_at_rest()


def test_a_store_that_is_forsaken_while_it_is_sealed_makes_no_file() -> None:
    driver = Driver(holds_checksums=True)
    job = driver.store(chunk_of("a"))
    driver.advance()
    driver.complete(driver.copy(Direction.STORE))
    driver.core.forsake([job], driver.now)
    assert driver.result(job).failures == {b"a": Failure.DROPPED}
    driver.complete(driver.checksum(Direction.STORE))
    assert not driver.issued
    driver.assert_at_rest()
