# SPDX-License-Identifier: Apache-2.0
"""What stays in DRAM after a transfer, one behaviour at a time."""

from __future__ import annotations

import errno

import pytest

from pykvcache.transfer.jobs import Direction
from pykvcache.transfer.operations import Action
from pykvcache.transfer.preloads import PreloadLimits
from tests.core.driver import FILE_BYTES, Driver, chunk_of


def resident(driver: Driver, names: str) -> str:
    """Those of the chunks that a load would find in DRAM."""
    return "".join(name for name in names if name.encode() in driver.core._dram)


def store(driver: Driver, name: str) -> None:
    job = driver.store(chunk_of(name))
    driver.finish()
    assert driver.result(job).success


def load(driver: Driver, name: str) -> int:
    """Load it; how many chunks came from DRAM."""
    job = driver.load(chunk_of(name))
    driver.finish()
    result = driver.results()[job]
    assert result.success
    return result.dram


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_was_stored_last_stays(policy: str) -> None:
    driver = Driver(slots=4, io_depth=1, dram_policy=policy)  # type: ignore[arg-type]
    for name in "abcdef":
        store(driver, name)
    assert resident(driver, "abcdef") == "cdef"
    assert (driver.ledger.retained, driver.ledger.leased) == (4, 0)


def test_what_was_used_last_stays() -> None:
    driver = Driver(slots=3, io_depth=1, dram_policy="lru")
    for name in "abc":
        store(driver, name)
    assert load(driver, "a") == 1
    assert load(driver, "x") == 0
    assert resident(driver, "abcx") == "acx"


def test_a_chunk_in_dram_is_read_no_second_time() -> None:
    driver = Driver(dram_policy="lru")
    assert load(driver, "a") == 0
    assert load(driver, "a") == 1
    assert driver.core.bytes_read == FILE_BYTES


def test_without_a_policy_nothing_stays() -> None:
    driver = Driver()
    store(driver, "a")
    assert load(driver, "a") == 0
    driver.assert_at_rest()


def test_what_nobody_asked_for_goes_before_what_was_used() -> None:
    driver = Driver(
        slots=5, io_depth=1, dram_policy="lru", preload=PreloadLimits(depth=1, slots_max=2)
    )
    store(driver, "a")
    driver.preload("p", "q")
    driver.finish()
    driver.preload()
    for name in "bcd":
        store(driver, name)
    assert resident(driver, "abcdpq") == "abcdp"


def test_a_partial_chunk_serves_only_what_it_holds() -> None:
    driver = Driver(dram_policy="lru")
    driver.store(chunk_of("a", first=2, count=2))
    driver.finish()
    part, whole = driver.load(chunk_of("a", first=3, count=1)), driver.load(chunk_of("a"))
    driver.finish()
    results = driver.results()
    assert (results[part].dram, results[whole].dram) == (1, 0)


def test_a_chunk_that_cannot_be_published_does_not_stay() -> None:
    driver = Driver(dram_policy="lru")
    driver.store(chunk_of("a"))
    driver.advance()
    driver.complete(driver.copy(Direction.STORE))
    driver.complete(driver.file(Action.CREATE))
    driver.complete(driver.file(Action.WRITE))
    assert resident(driver, "a") == "a"
    driver.complete(driver.file(Action.CLOSE), -errno.ENOSPC)
    assert resident(driver, "a") == ""
    driver.finish()
    driver.results()
    driver.assert_at_rest()


def test_every_slot_is_a_loads_if_it_needs_it() -> None:
    driver = Driver(slots=4, io_depth=2, dram_policy="arc")
    for name in "abcd":
        store(driver, name)
    job = driver.load(*map(chunk_of, "wxyz"))
    driver.finish()
    assert driver.result(job).success
