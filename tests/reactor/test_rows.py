# SPDX-License-Identifier: Apache-2.0
"""Rows of somebody else's memory, and transfers that were cut anywhere in them."""

from __future__ import annotations

import mmap

import pytest

from pykvcache.errors import InvariantError
from pykvcache.layout import PAGE
from pykvcache.reactor.calls import without_front
from pykvcache.reactor.rows import Rows


def test_rows_share_the_memory_and_lie_one_after_the_other() -> None:
    memory = bytearray(12)
    rows = Rows(memoryview(memory).cast("B", (3, 4)))
    rows.view(1)[:] = b"abcd"
    assert bytes(memory) == bytes(4) + b"abcd" + bytes(4)
    assert (len(rows), rows.row_bytes) == (3, 4)


@pytest.mark.parametrize("row", [-1, 3])
def test_there_is_no_row_outside(row: int) -> None:
    rows = Rows(memoryview(bytearray(12)).cast("B", (3, 4)))
    with pytest.raises(ValueError, match="row"):
        rows.view(row)


@pytest.mark.parametrize(
    "memory",
    [
        memoryview(bytes(12)).cast("B", (3, 4)),
        memoryview(bytearray(12)),
        memoryview(bytearray(12)).cast("B", (3, 4))[::2],
    ],
    ids=["read-only", "one-dimensional", "with gaps"],
)
def test_other_memory_is_refused(memory: memoryview) -> None:
    with pytest.raises(InvariantError, match="rows"):
        Rows(memory)


def test_only_whole_pages_are_aligned() -> None:
    mapping = memoryview(mmap.mmap(-1, 4 * PAGE))
    assert Rows(mapping.cast("B", (2, 2 * PAGE))).is_aligned
    assert not Rows(mapping.cast("B", (4 * PAGE // 512, 512))).is_aligned
    assert not Rows(mapping[512 : 512 + PAGE].cast("B", (1, PAGE))).is_aligned


def test_released_rows_let_the_memory_be_unmapped() -> None:
    mapping = mmap.mmap(-1, PAGE)
    rows = Rows(memoryview(mapping).cast("B", (1, PAGE)))
    rows.release()
    mapping.close()


@pytest.mark.parametrize("done", range(8))
def test_what_is_left_of_a_transfer(done: int) -> None:
    parts = [memoryview(b"abcd"), memoryview(b"efg")]
    assert b"".join(without_front(parts, done)) == b"abcdefg"[done:]
    assert all(len(part) for part in without_front(parts, done))
