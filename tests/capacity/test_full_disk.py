# SPDX-License-Identifier: Apache-2.0
"""A small filesystem that is really full."""

from __future__ import annotations

import errno
import logging
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykvcache.capacity.keeper import Keeper
from pykvcache.capacity.record import Record
from pykvcache.config import Config
from pykvcache.layout import ChunkPaths
from tests.capacity.roots import Root

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 16 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user cannot mount a filesystem")
    yield place
    subprocess.run(["umount", place], check=True)


def keeper_of(root: Root, **options: object) -> Keeper:
    config = Config(root=root.path, **options)  # type: ignore[arg-type]
    paths = [ChunkPaths(directory) for directory in root.directories]
    return Keeper(config, paths, logging.getLogger("tests"))


def fill_up(root: Root) -> int:
    """Chunks of 1 MiB until there is no room; how many."""
    for number in range(100):
        try:
            root.add(number, MIB, time.time() - 1000 + number)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            root.file(number).unlink()
            return number
    raise AssertionError("the disk never filled up")


def test_a_disk_filled_by_chunks_is_emptied_to_the_watermark(disk: Path) -> None:
    root = Root(disk / "kv")
    count = fill_up(root)
    keeper = keeper_of(root)
    keeper.turn()
    assert not keeper.is_full
    left = root.numbers()
    assert left == list(range(count - len(left), count))
    # 90 % of what the default leaves to the root, in whole chunks.
    assert len(left) == int(0.9 * 0.9 * 16)


def test_the_lock_and_the_record_work_where_nothing_can_be_written(disk: Path) -> None:
    root = Root(disk / "kv")
    with Record(root.path).try_lock():
        pass  # as a server leaves it
    count = fill_up(root)
    (disk / "rest").touch()
    with open(disk / "rest", "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    keeper = keeper_of(root, capacity=str(4 * MIB), free_space_min="0")
    keeper.turn()
    assert len(root.numbers()) < count
    assert root.size() <= 4 * MIB
    assert not keeper.is_full


def test_a_disk_filled_by_something_else_stops_stores(disk: Path) -> None:
    root = Root(disk / "kv")
    root.add(0, MIB, time.time())
    (disk / "other").write_bytes(bytes(14 * MIB + MIB // 2))
    keeper = keeper_of(root)
    keeper.turn()
    assert keeper.is_full
    (disk / "other").unlink()
    keeper.turn()
    assert not keeper.is_full
