# SPDX-License-Identifier: Apache-2.0
"""The scheduler's catalog over a set of names that stands for the filesystem."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykvcache.layout import ChunkPaths
from pykvcache.scheduler import catalog
from pykvcache.scheduler.catalog import Catalog

RANKS = [ChunkPaths(Path("/kv/rank-0")), ChunkPaths(Path("/kv/rank-1"))]
KEY, OTHER = b"\x01" * 36, b"\x02" * 36


class Names:
    """Which names exist, what was asked, and a clock."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.asked: list[str] = []
        self.now = 0.0

    def publish(self, key: bytes, *ranks: int) -> None:
        self.names |= {RANKS[rank].final(key) for rank in ranks}

    def exists(self, name: str) -> bool:
        self.asked.append(name)
        return name in self.names


@pytest.fixture
def names() -> Names:
    return Names()


@pytest.fixture
def chunks(names: Names) -> Catalog:
    return Catalog(
        RANKS,
        lookup_ttl_s=1.0,
        failed_key_ttl_s=60.0,
        clock=lambda: names.now,
        exists=names.exists,
    )


def test_a_chunk_is_held_when_every_rank_has_its_file(names: Names, chunks: Catalog) -> None:
    names.publish(KEY, 0)
    assert not chunks.holds(KEY)
    names.publish(KEY, 1)
    assert chunks.holds(KEY)


def test_a_chunk_found_is_not_asked_for_again_at_once(names: Names, chunks: Catalog) -> None:
    names.publish(KEY, 0, 1)
    assert chunks.holds(KEY)
    names.asked.clear()
    names.now = 0.5
    assert chunks.holds(KEY)
    assert names.asked == []
    names.names.clear()
    names.now = 1.0
    assert not chunks.holds(KEY)


def test_a_miss_is_always_asked_again(names: Names, chunks: Catalog) -> None:
    assert not chunks.holds(KEY)
    names.publish(KEY, 0, 1)
    assert chunks.holds(KEY)


def test_what_is_being_stored_is_neither_offered_nor_stored_twice(
    names: Names, chunks: Catalog
) -> None:
    assert chunks.begin_store([KEY, OTHER]) == [KEY, OTHER]
    assert not chunks.holds(KEY)
    assert chunks.begin_store([KEY, OTHER]) == []
    assert chunks.storing == 2


def test_what_exists_is_not_stored(names: Names, chunks: Catalog) -> None:
    names.publish(KEY, 0, 1)
    names.publish(OTHER, 1)
    assert chunks.begin_store([KEY, OTHER]) == [OTHER]


def test_a_stored_chunk_is_held_and_a_failed_store_can_be_tried_again(
    names: Names, chunks: Catalog
) -> None:
    chunks.begin_store([KEY, OTHER])
    chunks.end_store([KEY], stored=True)
    chunks.end_store([OTHER], stored=False)
    assert chunks.holds(KEY)
    assert chunks.begin_store([KEY, OTHER]) == [OTHER]


def test_a_chunk_that_failed_to_load_is_a_miss_for_a_while(names: Names, chunks: Catalog) -> None:
    names.publish(KEY, 0, 1)
    assert chunks.holds(KEY)
    chunks.mark_failed([KEY])
    names.now = 59.9
    assert not chunks.holds(KEY)
    names.now = 60.0
    assert chunks.holds(KEY)


def test_a_failed_chunk_that_is_stored_anew_is_held(names: Names, chunks: Catalog) -> None:
    names.publish(KEY, 0, 1)
    chunks.mark_failed([KEY])
    assert chunks.begin_store([KEY]) == [KEY]
    chunks.end_store([KEY], stored=True)
    assert chunks.holds(KEY)


def test_forgetting_leaves_only_the_files(names: Names, chunks: Catalog) -> None:
    names.publish(KEY, 0, 1)
    chunks.mark_failed([KEY])
    chunks.begin_store([OTHER])
    chunks.forget()
    assert chunks.holds(KEY)
    assert chunks.storing == 0
    assert chunks.begin_store([OTHER]) == [OTHER]


def test_memory_is_bounded(names: Names, chunks: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "REMEMBERED_MAX", 2)
    keys = [bytes([number]) * 36 for number in range(3)]
    for key in keys:
        names.publish(key, 0, 1)
        assert chunks.holds(key)
    names.asked.clear()
    assert [chunks.holds(key) for key in keys[1:]] == [True, True]
    assert names.asked == []
    assert chunks.holds(keys[0])
    assert names.asked != []
