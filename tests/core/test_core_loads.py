# SPDX-License-Identifier: Apache-2.0
"""Loads in the transfer core, one behaviour at a time."""

from __future__ import annotations

import errno

import pytest

from pykvcache.errors import InvariantError
from pykvcache.layout import BlockSpan, Defect
from pykvcache.pool import SlotLedger
from pykvcache.transfer.core import Limits, TransferCore
from pykvcache.transfer.jobs import Direction, Failure, Job
from pykvcache.transfer.operations import Action, Completion
from tests.core.driver import DEADLINE_S, FILE_BYTES, Driver, chunk_of


def read_up_to_the_copy(driver: Driver) -> None:
    """Complete opens, then reads, once."""
    driver.advance()
    driver.complete(driver.files(Action.OPEN))
    driver.complete(driver.files(Action.READ))


def test_a_load_opens_reads_copies_and_closes() -> None:
    driver = Driver()
    chunk = chunk_of("a")
    job = driver.load(chunk, fence="event")
    driver.advance()
    opening = driver.file(Action.OPEN)
    assert opening.path == chunk.path
    assert driver.ledger.leased == 0, "a slot is taken only when its read can be submitted"

    driver.complete(opening, result=33)
    reading = driver.file(Action.READ)
    assert (reading.descriptor, reading.length, reading.chunk) == (33, FILE_BYTES, chunk)
    assert driver.ledger.leased == 1

    driver.now = 1.5
    driver.complete(reading)
    copying = driver.copy(Direction.LOAD)
    (copy,) = copying.copies
    assert (copy.slot, copy.chunk, copy.fence) == (reading.slot, chunk, "event")
    assert driver.file(Action.CLOSE).descriptor == 33
    assert not driver.results()

    driver.complete(copying)
    assert driver.ledger.leased == 0
    result = driver.result(job)
    assert result.success
    assert result.direction is Direction.LOAD
    assert (result.seconds, result.chunks, result.present) == (1.5, 1, 0)
    assert (result.copied_bytes, result.file_bytes) == (chunk.copy_bytes, FILE_BYTES)
    driver.finish()
    driver.assert_at_rest()


def test_a_job_without_chunks_ends_at_once() -> None:
    driver = Driver()
    load, store = driver.load(), driver.store()
    results = driver.results()
    assert results.keys() == {load, store}
    assert all(result.success and result.chunks == 0 for result in results.values())
    assert driver.advance() == []


def test_two_loads_of_one_chunk_share_its_read() -> None:
    driver = Driver()
    first, second = chunk_of("a"), chunk_of("a", first=2, count=2)
    loads = [driver.load(first, fence=1), driver.load(second, fence=2)]
    read_up_to_the_copy(driver)
    copying = driver.copy(Direction.LOAD)
    assert [(copy.chunk, copy.fence) for copy in copying.copies] == [(first, 1), (second, 2)]
    assert len({copy.slot for copy in copying.copies}) == 1
    driver.finish()
    results = driver.results()
    assert [results[job].copied_bytes for job in loads] == [first.copy_bytes, second.copy_bytes]
    assert [results[job].file_bytes for job in loads] == [FILE_BYTES, 0], "read once"
    driver.assert_at_rest()


@pytest.mark.parametrize("stage", ["opening", "reading"])
def test_a_load_joins_a_read_in_flight(stage: str) -> None:
    driver = Driver()
    driver.load(chunk_of("a"))
    driver.advance()
    if stage == "reading":
        driver.complete(driver.file(Action.OPEN))
    late = driver.load(chunk_of("a"))
    assert driver.advance() == []
    driver.finish()
    assert driver.results()[late].success


def test_a_wider_span_needs_a_read_of_its_own() -> None:
    driver = Driver()
    driver.load(chunk_of("a", first=2, count=2))
    driver.load(chunk_of("a"))
    driver.advance()
    assert len(driver.files(Action.OPEN)) == 2
    driver.finish()
    assert all(result.success for result in driver.results().values())
    driver.assert_at_rest()


def test_a_chunk_that_is_being_copied_is_not_read_again_for_a_later_load() -> None:
    driver = Driver()
    driver.load(chunk_of("a"))
    read_up_to_the_copy(driver)
    late = driver.load(chunk_of("a"))
    driver.advance()
    assert not driver.files(Action.OPEN)
    first, second = driver.copies(Direction.LOAD)
    assert first.copies[0].slot == second.copies[0].slot
    driver.complete(first)
    assert driver.ledger.leased == 1, "the other copy still reads the slot"
    driver.finish()
    assert driver.results()[late].success
    driver.assert_at_rest()


def test_reads_that_end_in_one_turn_are_copied_in_one_launch() -> None:
    driver = Driver(io_depth=3)
    chunks = [chunk_of(name) for name in "abc"]
    driver.load(chunks[0], chunks[1])
    driver.load(chunks[2])
    read_up_to_the_copy(driver)
    assert {copy.chunk for copy in driver.copy(Direction.LOAD).copies} == set(chunks)


def test_a_load_larger_than_the_pool_proceeds_slot_by_slot() -> None:
    driver = Driver(slots=3, io_depth=2)
    job = driver.load(*(chunk_of(f"{number}") for number in range(20)))
    driver.finish()
    result = driver.result(job)
    assert result.success
    assert result.chunks == 20
    driver.assert_at_rest()


def test_reads_in_flight_and_files_open_ahead_are_bounded() -> None:
    driver = Driver(io_depth=2, open_lookahead=3)
    driver.load(*(chunk_of(f"{number}") for number in range(9)))
    driver.advance()
    assert len(driver.files(Action.OPEN)) == 3
    driver.complete(driver.files(Action.OPEN))
    assert len(driver.files(Action.READ)) == 2
    assert len(driver.files(Action.OPEN)) == 2, "with the opened one that waits: three ahead"


def test_failures_are_named_by_chunk_and_the_rest_is_loaded() -> None:
    driver = Driver(io_depth=4)
    good, missing, broken = chunk_of("good"), chunk_of("missing"), chunk_of("broken")
    job = driver.load(good, missing, broken)
    driver.advance()
    opening = {operation.path: operation for operation in driver.files(Action.OPEN)}
    driver.complete(opening[missing.path], result=-errno.ENOENT)
    driver.complete([opening[good.path], opening[broken.path]])
    reading = {read.chunk: read for read in driver.files(Action.READ)}
    driver.complete(reading[broken], result=-errno.EIO)
    driver.finish()
    result = driver.result(job)
    assert result.failures == {missing.key: Failure.NOT_FOUND, broken.key: Failure.IO_ERROR}
    assert not result.success
    assert result.copied_bytes == good.copy_bytes
    driver.assert_at_rest()


@pytest.mark.parametrize(
    ("result", "defect", "failure"),
    [
        (FILE_BYTES, Defect.FORMAT, Failure.WRONG_CONTENT),
        (FILE_BYTES, Defect.BLOCKS, Failure.WRONG_CONTENT),
        (FILE_BYTES - 1, None, Failure.SHORT_TRANSFER),
        (0, None, Failure.SHORT_TRANSFER),
    ],
)
def test_a_file_that_is_not_its_chunk_is_deleted(
    result: int, defect: Defect | None, failure: Failure
) -> None:
    driver = Driver()
    chunk = chunk_of("a")
    job = driver.load(chunk)
    driver.advance()
    driver.complete(driver.file(Action.OPEN))
    driver.complete(driver.file(Action.READ), result, defect)
    assert driver.file(Action.UNLINK).path == chunk.path
    assert driver.result(job).failures == {chunk.key: failure}
    driver.finish()
    driver.assert_at_rest()


def test_a_file_that_cannot_be_read_is_kept() -> None:
    driver = Driver()
    driver.load(chunk_of("a"))
    driver.advance()
    driver.complete(driver.file(Action.OPEN))
    driver.complete(driver.file(Action.READ), -errno.EIO)
    assert not driver.files(Action.UNLINK)


def test_a_failed_copy_fails_all_its_chunks() -> None:
    driver = Driver()
    chunks = [chunk_of("a"), chunk_of("b")]
    job = driver.load(*chunks)
    read_up_to_the_copy(driver)
    driver.complete(driver.copy(Direction.LOAD), -errno.EIO)
    failures = driver.result(job).failures
    assert failures == {chunk.key: Failure.DEVICE_COPY for chunk in chunks}
    driver.finish()
    driver.assert_at_rest()


def test_a_load_ends_at_its_deadline_and_its_slot_only_with_the_read() -> None:
    driver = Driver()
    chunk = chunk_of("a")
    job = driver.load(chunk)
    driver.advance()
    driver.complete(driver.file(Action.OPEN))
    assert driver.core.next_deadline() == DEADLINE_S
    driver.now = DEADLINE_S - 0.01
    driver.advance()
    assert not driver.results()
    driver.now = DEADLINE_S
    driver.advance()
    assert driver.result(job).failures == {chunk.key: Failure.DEADLINE}
    assert driver.core.next_deadline() is None
    assert driver.ledger.leased == 1
    assert not driver.core.idle

    driver.complete(driver.file(Action.READ))
    assert driver.ledger.leased == 0
    assert not driver.copies(Direction.LOAD)
    driver.finish()
    driver.assert_at_rest()


@pytest.mark.parametrize("stage", ["waiting", "opening", "opened", "reading"])
def test_at_the_deadline_every_stage_is_given_up(stage: str) -> None:
    driver = Driver(slots=3, io_depth=1, open_lookahead=1)
    blocker = driver.load(chunk_of("blocker"))
    driver.advance()
    if stage != "waiting":
        driver.complete(driver.file(Action.OPEN))
    if stage == "reading":
        driver.complete(driver.file(Action.READ))
    job = driver.load(chunk_of("a"))
    driver.advance()
    if stage in ("opened", "reading"):
        driver.complete(driver.file(Action.OPEN))
    driver.now = DEADLINE_S
    driver.advance()
    assert set(driver.results()[job].failures.values()) == {Failure.DEADLINE}
    driver.finish()
    assert set(driver.results()) <= {blocker}
    driver.assert_at_rest()


def test_a_load_whose_blocks_are_being_written_outlives_its_deadline() -> None:
    driver = Driver(io_depth=1)
    copied, waiting = chunk_of("copied"), chunk_of("waiting")
    job = driver.load(copied, waiting)
    driver.advance()
    driver.complete(driver.files(Action.OPEN))
    driver.complete(driver.file(Action.READ))
    driver.now = DEADLINE_S
    driver.advance()
    assert not driver.results(), "the engine would reuse blocks that are still written"
    driver.complete(driver.copy(Direction.LOAD))
    result = driver.result(job)
    assert result.failures == {waiting.key: Failure.DEADLINE}
    assert result.copied_bytes == copied.copy_bytes
    driver.finish()
    driver.assert_at_rest()


def test_the_deadline_of_one_load_leaves_a_shared_read_to_the_other() -> None:
    driver = Driver()
    early = driver.load(chunk_of("a"))
    driver.now = 1.0
    late = driver.load(chunk_of("a"))
    driver.advance()
    driver.now = DEADLINE_S
    driver.complete(driver.file(Action.OPEN))
    assert not driver.result(early).success
    driver.finish()
    assert driver.result(late).success
    driver.assert_at_rest()


def test_a_load_after_an_abandoned_read_gets_a_read_of_its_own() -> None:
    driver = Driver()
    driver.load(chunk_of("a"))
    driver.advance()
    driver.complete(driver.file(Action.OPEN))
    stuck = driver.file(Action.READ)
    driver.now = DEADLINE_S
    driver.advance()
    driver.results()
    job = driver.load(chunk_of("a"))
    driver.advance()
    driver.complete(driver.file(Action.OPEN))
    (fresh,) = [read for read in driver.files(Action.READ) if read is not stuck]
    assert fresh.slot != stuck.slot
    driver.finish()
    assert driver.result(job).success
    driver.assert_at_rest()


def test_more_jobs_than_allowed_are_refused() -> None:
    driver = Driver(jobs_max=1)
    chunk = chunk_of("b")
    accepted, refused = driver.load(chunk_of("a")), driver.load(chunk)
    assert driver.result(refused).failures == {chunk.key: Failure.OVERLOAD}
    driver.finish()
    assert driver.result(accepted).success


def test_misuse_raises_and_changes_nothing() -> None:
    driver = Driver()
    job = driver.load(chunk_of("a"))
    driver.advance()
    with pytest.raises(InvariantError, match=f"job {job} is submitted twice"):
        driver.core.submit(Job(job, Direction.LOAD, (chunk_of("b"),)), driver.now)
    with pytest.raises(InvariantError, match="operation 99 is not in flight"):
        driver.core.complete([Completion(99, 0)], driver.now)
    with pytest.raises(InvariantError, match="2 slots leave no store beside io_depth 2"):
        TransferCore(Limits(2, 4, DEADLINE_S, 10), SlotLedger(2), "w")
    driver.finish()
    assert driver.result(job).success
    driver.assert_at_rest()


def test_a_span_covers_what_lies_within_it() -> None:
    span = BlockSpan(1, 3)
    assert span.end == 4
    assert all(span.covers(BlockSpan(first, count)) for first, count in [(1, 3), (2, 2), (3, 1)])
    assert not any(
        span.covers(BlockSpan(first, count)) for first, count in [(0, 4), (0, 2), (3, 2)]
    )
