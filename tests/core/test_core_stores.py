# SPDX-License-Identifier: Apache-2.0
"""Stores in the transfer core, priorities, flushes and the end, one behaviour at a time."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from pykvcache.layout import TEMPORARY_SUFFIX
from pykvcache.transfer.jobs import Direction, Failure
from pykvcache.transfer.operations import Action, FileOperation
from tests.core.driver import FILE_BYTES, Driver, chunk_of


def copy_out(driver: Driver) -> None:
    """Complete the device copies of stores."""
    driver.advance()
    driver.complete(driver.copies(Direction.STORE))


def create(driver: Driver) -> None:
    copy_out(driver)
    driver.complete(driver.files(Action.CREATE))


def write(driver: Driver) -> None:
    create(driver)
    driver.complete(driver.files(Action.WRITE))


def close(driver: Driver) -> None:
    write(driver)
    driver.complete(driver.files(Action.CLOSE))


STAGES: dict[str, Callable[[Driver], object]] = {
    "copying out": lambda driver: driver.advance(),
    "creating": copy_out,
    "writing": create,
    "closing": write,
}
"""What brings a store's operation of that kind in flight."""


def test_a_store_copies_creates_writes_closes_links_and_unlinks() -> None:
    driver = Driver()
    chunk = chunk_of("a")
    job = driver.store(chunk, fence="event")
    driver.advance()
    (copy,) = driver.copy(Direction.STORE).copies
    assert (copy.chunk, copy.fence) == (chunk, "event")

    driver.complete(driver.copy(Direction.STORE))
    creating = driver.file(Action.CREATE)
    assert creating.path.endswith(TEMPORARY_SUFFIX)
    assert creating.path.rpartition("/")[0] == chunk.path.rpartition("/")[0]

    driver.complete(creating, result=44)
    writing = driver.file(Action.WRITE)
    assert (writing.descriptor, writing.slot, writing.length) == (44, copy.slot, FILE_BYTES)
    assert writing.chunk is chunk

    driver.complete(writing)
    assert driver.ledger.leased == 0, "a slot is given back when it is written"
    assert driver.file(Action.CLOSE).descriptor == 44
    assert not driver.files(Action.LINK), "a network filesystem reports errors at close"

    driver.complete(driver.file(Action.CLOSE))
    linking = driver.file(Action.LINK)
    assert (linking.path, linking.target) == (creating.path, chunk.path)
    assert not driver.results()

    driver.now = 2.0
    driver.complete(linking)
    assert driver.file(Action.UNLINK).path == creating.path
    result = driver.result(job)
    assert result.success
    assert (result.seconds, result.chunks, result.present) == (2.0, 1, 0)
    assert (result.copied_bytes, result.file_bytes) == (chunk.copy_bytes, FILE_BYTES)
    driver.finish()
    driver.assert_at_rest()


def test_another_writers_file_counts_as_present() -> None:
    driver = Driver()
    job = driver.store(chunk_of("a"))
    close(driver)
    driver.complete(driver.file(Action.LINK), -errno.EEXIST)
    result = driver.result(job)
    assert result.success
    assert result.present == 1
    driver.finish()
    driver.assert_at_rest()


def test_a_missing_directory_is_made_once() -> None:
    driver = Driver()
    chunk = chunk_of("a")
    job = driver.store(chunk)
    copy_out(driver)
    creating = driver.file(Action.CREATE)
    driver.complete(creating, -errno.ENOENT)
    making = driver.file(Action.MKDIR)
    assert making.path == chunk.path.rpartition("/")[0]
    driver.complete(making)
    again = driver.file(Action.CREATE)
    assert again.path == creating.path
    driver.complete(again, -errno.ENOENT)
    assert not driver.files(Action.MKDIR)
    assert driver.result(job).failures == {chunk.key: Failure.NOT_FOUND}
    driver.finish()
    driver.assert_at_rest()


def test_a_directory_that_somebody_else_made_is_as_good() -> None:
    driver = Driver()
    job = driver.store(chunk_of("a"))
    copy_out(driver)
    driver.complete(driver.file(Action.CREATE), -errno.ENOENT)
    driver.complete(driver.file(Action.MKDIR), -errno.EEXIST)
    driver.finish()
    assert driver.result(job).success


def test_a_directory_that_cannot_be_made_fails_the_store() -> None:
    driver = Driver()
    chunk = chunk_of("a")
    job = driver.store(chunk)
    copy_out(driver)
    driver.complete(driver.file(Action.CREATE), -errno.ENOENT)
    driver.complete(driver.file(Action.MKDIR), -errno.EACCES)
    assert driver.result(job).failures == {chunk.key: Failure.PERMISSION}
    assert not driver.files(Action.CREATE)
    driver.finish()
    driver.assert_at_rest()


@pytest.mark.parametrize(
    ("action", "bring_about", "result", "failure"),
    [
        (Action.CREATE, copy_out, -errno.ENOSPC, Failure.NO_SPACE),
        (Action.CREATE, copy_out, -errno.EMFILE, Failure.NO_DESCRIPTORS),
        (Action.WRITE, create, -errno.EDQUOT, Failure.NO_SPACE),
        (Action.WRITE, create, FILE_BYTES - 4096, Failure.SHORT_TRANSFER),
        (Action.CLOSE, write, -errno.EIO, Failure.IO_ERROR),
        (Action.LINK, close, -errno.EPERM, Failure.PERMISSION),
    ],
)
def test_a_failed_step_ends_the_store_and_leaves_nothing(
    action: Action, bring_about: Callable[[Driver], None], result: int, failure: Failure
) -> None:
    driver = Driver()
    chunk = chunk_of("a")
    job = driver.store(chunk)
    bring_about(driver)
    driver.complete(driver.file(action), result)
    assert driver.result(job).failures == {chunk.key: failure}
    assert driver.file(Action.UNLINK).path.endswith(TEMPORARY_SUFFIX)
    assert len(driver.files(Action.CLOSE)) == (action is Action.WRITE)
    assert not driver.files(Action.LINK) or action is Action.LINK
    assert driver.ledger.leased == 0
    driver.finish()
    driver.assert_at_rest()


def test_a_failed_copy_out_fails_its_chunk_and_creates_nothing() -> None:
    driver = Driver()
    chunk = chunk_of("a")
    job = driver.store(chunk)
    driver.advance()
    driver.complete(driver.copy(Direction.STORE), -errno.EIO)
    assert driver.result(job).failures == {chunk.key: Failure.DEVICE_COPY}
    driver.assert_at_rest()


def test_stores_leave_the_last_slots_to_loads() -> None:
    driver = Driver(slots=5, io_depth=2)
    driver.store(*(chunk_of(f"{number}") for number in range(9)))
    driver.advance()
    assert len(driver.copies(Direction.STORE)) == 3
    driver.load(chunk_of("a"), chunk_of("b"))
    driver.advance()
    driver.complete(driver.files(Action.OPEN))
    assert len(driver.files(Action.READ)) == 2


def test_each_store_slot_has_a_copy_of_its_own() -> None:
    driver = Driver()
    driver.store(chunk_of("a"), chunk_of("b"))
    driver.advance()
    assert [len(copy.copies) for copy in driver.copies(Direction.STORE)] == [1, 1]


def test_a_ready_read_goes_before_a_ready_write() -> None:
    driver = Driver(io_depth=1, slots=4)
    driver.store(chunk_of("first"), chunk_of("second"))
    create(driver)
    running = driver.file(Action.WRITE)
    driver.load(chunk_of("a"))
    driver.advance()
    driver.complete(driver.file(Action.OPEN))
    assert not driver.files(Action.READ), "the depth is used up"
    driver.complete(running)
    assert driver.file(Action.READ)
    assert not driver.files(Action.WRITE)


def test_opens_of_loads_go_before_copies_of_stores() -> None:
    driver = Driver()
    driver.store(chunk_of("a"))
    driver.load(chunk_of("b"))
    first, second = driver.advance()
    assert isinstance(first, FileOperation)
    assert first.action is Action.OPEN
    assert second is driver.copy(Direction.STORE)


def test_files_created_ahead_are_bounded() -> None:
    driver = Driver(slots=10, io_depth=1, open_lookahead=2)
    driver.store(*(chunk_of(f"{number}") for number in range(9)))
    copy_out(driver)
    assert len(driver.files(Action.CREATE)) == 2
    driver.complete(driver.files(Action.CREATE))
    assert len(driver.files(Action.WRITE)) == 1
    assert len(driver.files(Action.CREATE)) == 1


def test_temporary_names_are_never_reused() -> None:
    driver = Driver()
    driver.store(chunk_of("a"))
    driver.store(chunk_of("a"))
    copy_out(driver)
    assert len({operation.path for operation in driver.files(Action.CREATE)}) == 2


# --- flush, forsake


def test_a_flush_copies_what_finds_a_slot_and_drops_the_rest() -> None:
    driver = Driver(slots=4, io_depth=2)
    driver.store(*(chunk_of(f"other{number}") for number in range(3)))
    driver.advance()
    chunks = [chunk_of(f"{number}") for number in range(3)]
    job = driver.store(*chunks)
    driver.advance()
    assert not driver.core.settled([job])

    driver.core.flush([job])
    driver.complete(driver.copies(Direction.STORE)[0], -errno.EIO)
    copied = {copy.chunk for item in driver.copies(Direction.STORE) for copy in item.copies}
    assert chunks[0] in copied, "flushed before the one that waited longer"
    assert not driver.core.settled([job]), "its copy is in flight"
    (flushed,) = [item for item in driver.copies(Direction.STORE) if item.copies[0].chunk in chunks]
    driver.complete(flushed)
    assert driver.core.settled([job]), "the disk is not waited for"

    driver.finish()
    result = driver.results()[job]
    assert result.failures == {chunk.key: Failure.DROPPED for chunk in chunks[1:]}
    assert result.copied_bytes == chunks[0].copy_bytes
    driver.assert_at_rest()


def test_a_flush_concerns_the_jobs_it_names_alone() -> None:
    driver = Driver(slots=3, io_depth=2)
    driver.store(chunk_of("running"))
    driver.advance()
    flushed, kept = driver.store(chunk_of("a")), driver.store(chunk_of("b"))
    driver.core.flush([flushed])
    driver.advance()
    assert not driver.result(flushed).success
    assert driver.core.settled([flushed])
    driver.finish()
    assert driver.results()[kept].success


def test_a_load_is_settled_when_it_has_ended() -> None:
    driver = Driver()
    job = driver.load(chunk_of("a"))
    driver.core.flush([job])
    driver.advance()
    assert not driver.core.settled([job])
    driver.finish()
    assert driver.result(job).success
    assert driver.core.settled([job])


def test_jobs_that_are_not_known_are_settled() -> None:
    driver = Driver()
    driver.core.flush([7])
    driver.core.forsake([7], driver.now)
    driver.advance()
    assert driver.core.settled([7])
    driver.assert_at_rest()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("end", ["forsake", "abandon"])
def test_what_is_forsaken_is_never_linked(stage: str, end: str) -> None:
    driver = Driver()
    chunk = chunk_of("a")
    job = driver.store(chunk)
    STAGES[stage](driver)
    if end == "forsake":
        driver.core.forsake([job], driver.now)
        expected = Failure.DROPPED
    else:
        driver.core.abandon(driver.now)
        expected = Failure.SHUTDOWN
    assert driver.result(job).failures == {chunk.key: expected}
    linked = []
    while driver.issued:
        linked += driver.files(Action.LINK)
        driver.complete(driver.issued)
    assert not linked
    assert not driver.results()
    driver.assert_at_rest()


def test_forsaking_waits_for_nothing_and_gives_slots_back_with_their_operation() -> None:
    driver = Driver(slots=4, io_depth=2)
    job = driver.store(chunk_of("copying"), chunk_of("copying too"), chunk_of("waiting"))
    driver.advance()
    driver.core.forsake([job], driver.now)
    assert set(driver.result(job).failures.values()) == {Failure.DROPPED}
    assert driver.ledger.leased == 2
    driver.complete(driver.copies(Direction.STORE))
    assert driver.ledger.leased == 0
    driver.assert_at_rest()


# --- the end


def test_closing_fails_loads_and_finishes_stores_whose_data_it_has() -> None:
    driver = Driver(slots=3, io_depth=2)
    loading, kept, lost, late = (chunk_of(name) for name in ("loading", "kept", "lost", "late"))
    load, store = driver.load(loading), driver.store(kept, lost)
    driver.advance()
    driver.core.close(driver.now)
    assert driver.result(load).failures == {loading.key: Failure.SHUTDOWN}
    refused = driver.store(late)
    assert driver.result(refused).failures == {late.key: Failure.SHUTDOWN}
    driver.finish()
    result = driver.result(store)
    assert result.failures == {lost.key: Failure.SHUTDOWN}
    assert result.copied_bytes == kept.copy_bytes
    driver.assert_at_rest()


def test_abandoning_ends_stores_but_not_their_operations() -> None:
    driver = Driver()
    job = driver.store(chunk_of("a"))
    create(driver)
    driver.core.abandon(driver.now)
    assert set(driver.result(job).failures.values()) == {Failure.SHUTDOWN}
    assert driver.ledger.leased == 1
    assert not driver.core.idle
    driver.finish()
    driver.assert_at_rest()


def test_abandoning_leaves_a_load_to_the_copy_that_writes_its_blocks() -> None:
    driver = Driver()
    job = driver.load(chunk_of("a"))
    driver.advance()
    driver.complete(driver.file(Action.OPEN))
    driver.complete(driver.file(Action.READ))
    driver.core.abandon(driver.now)
    assert not driver.results()
    driver.finish()
    assert driver.result(job).success
    driver.assert_at_rest()


def test_queue_lengths_name_every_place_where_chunks_wait() -> None:
    driver = Driver(slots=4, io_depth=1, open_lookahead=2)
    driver.load(*(chunk_of(f"load{number}") for number in range(5)))
    driver.store(*(chunk_of(f"store{number}") for number in range(5)))
    create(driver)
    driver.complete(driver.files(Action.OPEN))
    assert driver.core.queue_lengths() == {
        "load_waiting": 3,
        "load_opened": 2,
        "store_waiting": 2,
        "store_copied": 1,
        "preload_waiting": 0,
        "preload_opened": 0,
        "io": 1,
    }
    assert driver.core.jobs == 2
    assert driver.core.operations_in_flight == len(driver.issued)
