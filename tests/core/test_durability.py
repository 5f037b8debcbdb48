# SPDX-License-Identifier: Apache-2.0
"""Stores that outlive a loss of power wait for the storage before and after they are published."""

from __future__ import annotations

import errno

import pytest

from pykvcache.transfer.jobs import Direction, Failure
from pykvcache.transfer.operations import Action
from tests.core.driver import Driver, chunk_of

PATH = chunk_of("a").path
LEAF = PATH.rpartition("/")[0]


def write(driver: Driver) -> int:
    """Store a chunk up to its write."""
    job = driver.store(chunk_of("a"))
    driver.advance()
    driver.complete(driver.copy(Direction.STORE))
    driver.complete(driver.file(Action.CREATE))
    driver.complete(driver.file(Action.WRITE))
    return job


def test_nothing_waits_for_the_storage_unless_asked_for() -> None:
    driver = Driver()
    write(driver)
    assert not driver.files(Action.SYNC)
    driver.complete(driver.file(Action.CLOSE))
    driver.complete(driver.file(Action.LINK))
    assert len(driver.results()) == 1


def test_the_file_is_synced_before_it_is_published_and_the_directory_before_it_counts() -> None:
    driver = Driver(syncs=True)
    job = write(driver)
    assert not driver.files(Action.CLOSE)
    driver.complete(driver.file(Action.SYNC))
    assert not driver.files(Action.LINK)
    driver.complete(driver.file(Action.CLOSE))
    driver.complete(driver.file(Action.LINK))
    assert not driver.results()
    assert driver.file(Action.OPEN_DIRECTORY).path == LEAF
    driver.complete(driver.file(Action.OPEN_DIRECTORY), 99)
    assert driver.file(Action.SYNC).descriptor == 99
    driver.complete(driver.file(Action.SYNC))
    assert driver.result(job).success
    assert driver.file(Action.CLOSE).descriptor == 99
    driver.finish()
    driver.assert_at_rest()


def test_a_directory_that_was_made_is_itself_an_entry() -> None:
    driver = Driver(syncs=True)
    job = driver.store(chunk_of("a"))
    driver.advance()
    driver.complete(driver.copy(Direction.STORE))
    driver.complete(driver.file(Action.CREATE), -errno.ENOENT)
    synced = []
    while driver.issued:
        synced += [operation.path for operation in driver.files(Action.OPEN_DIRECTORY)]
        driver.complete(driver.issued)
    assert synced == ["root", LEAF]
    assert driver.result(job).success
    driver.assert_at_rest()


def test_another_writers_file_is_that_ones_concern() -> None:
    driver = Driver(syncs=True)
    job = write(driver)
    driver.complete(driver.file(Action.SYNC))
    driver.complete(driver.file(Action.CLOSE))
    driver.complete(driver.file(Action.LINK), -errno.EEXIST)
    assert driver.result(job).present == 1
    driver.finish()
    driver.assert_at_rest()


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_storage_that_keeps_nothing_fails_the_store(step: int) -> None:
    driver = Driver(syncs=True)
    job = write(driver)
    if step == 1:
        driver.complete(driver.file(Action.SYNC), -errno.EIO)
    else:
        driver.complete(driver.file(Action.SYNC))
        driver.complete(driver.file(Action.CLOSE))
        driver.complete(driver.file(Action.LINK))
        if step == 3:
            driver.complete(driver.file(Action.OPEN_DIRECTORY))
        action = Action.OPEN_DIRECTORY if step == 2 else Action.SYNC
        driver.complete(driver.file(action), -errno.EIO)
    assert driver.result(job).failures == {b"a": Failure.IO_ERROR}
    driver.finish()
    driver.assert_at_rest()
