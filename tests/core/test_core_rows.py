# SPDX-License-Identifier: Apache-2.0
"""Chunks whose payload goes straight into somebody else's memory, or comes straight out of it."""

from __future__ import annotations

from dataclasses import replace

from pykvcache.layout import Defect
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure
from pykvcache.transfer.operations import Action
from tests.core.driver import DEADLINE_S, Driver, chunk_of


def in_row(name: str, row: int) -> ChunkTransfer:
    return replace(chunk_of(name), block_ids=(), row=row)


def test_a_row_that_is_being_written_outlives_the_deadline() -> None:
    driver = Driver(io_depth=1)
    read, waiting = in_row("read", 0), in_row("waiting", 1)
    job = driver.load(read, waiting)
    driver.advance()
    driver.complete(driver.files(Action.OPEN))
    driver.now = DEADLINE_S
    driver.advance()
    assert not driver.results(), "the row would be given to someone else"
    driver.finish()
    assert driver.result(job).failures == {waiting.key: Failure.DEADLINE}
    driver.assert_at_rest()


def test_a_row_whose_read_failed_is_given_up() -> None:
    driver = Driver()
    chunk = in_row("a", 0)
    job = driver.load(chunk)
    driver.advance()
    driver.complete(driver.file(Action.OPEN))
    driver.now = DEADLINE_S
    driver.advance()
    driver.complete(driver.file(Action.READ), defect=Defect.KEY)
    assert driver.result(job).failures == {chunk.key: Failure.WRONG_CONTENT}
    driver.finish()
    driver.assert_at_rest()


def test_each_row_is_read_for_itself() -> None:
    driver = Driver()
    jobs = {driver.load(in_row("a", 0)), driver.load(in_row("a", 1))}
    driver.advance()
    driver.complete(driver.files(Action.OPEN))
    reads = driver.files(Action.READ)
    assert {read.chunk.row for read in reads if read.chunk} == {0, 1}
    driver.finish()
    results = driver.results()
    assert results.keys() == jobs
    assert all(result.success and result.dram == 0 for result in results.values())
    driver.assert_at_rest()


def test_a_chunk_that_is_being_handed_over_does_not_serve_another_row() -> None:
    driver = Driver()
    first = driver.load(in_row("a", 0))
    driver.advance()
    driver.complete(driver.file(Action.OPEN))
    driver.complete(driver.file(Action.READ))
    assert driver.copies(Direction.LOAD)
    second = driver.load(in_row("a", 1))
    driver.advance()
    assert driver.files(Action.OPEN), "its bytes are in another row"
    driver.finish()
    results = driver.results()
    assert results.keys() == {first, second}
    assert results[second].dram == 0
    driver.assert_at_rest()


def test_a_row_that_was_stored_is_not_kept_in_dram() -> None:
    driver = Driver()
    job = driver.store(in_row("a", 0))
    driver.finish()
    assert driver.result(job).success
    driver.assert_at_rest()
