# SPDX-License-Identifier: Apache-2.0
"""A quota that is used up while the filesystem has room: a Btrfs subvolume with a limit."""

from __future__ import annotations

import itertools
import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pykvcache.capacity.evictor import space_of
from pykvcache.capacity.keeper import Keeper
from pykvcache.capacity.no_space import NoSpaceReporter
from pykvcache.config import Config
from pykvcache.geometry import ChunkGeometry, PageReference
from pykvcache.layout import BlockSpan
from pykvcache.pool import Pool
from pykvcache.reactor.device import make_copier
from pykvcache.reactor.reactor import Reactor
from pykvcache.transfer.core import Limits
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure, Job, JobResult
from tests.capacity.roots import Root, key_of
from tests.core.fakes import WAIT_S, wait_until
from tests.core.test_round_trip import ENGINES

MIB = 1 << 20
QUOTA_BYTES = 16 * MIB
DISK_BYTES = 160 * MIB
GEOMETRY = ChunkGeometry(groups=((PageReference(0, MIB),),), blocks_per_chunk=1)


def run(*command: object) -> bool:
    done = subprocess.run(list(map(str, command)), capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def quota(tmp_path: Path) -> Iterator[Path]:
    """A directory that may hold 16 MiB of 160."""
    if shutil.which("mkfs.btrfs") is None or shutil.which("btrfs") is None:
        pytest.skip("the tools of Btrfs are not installed")
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    if not run("mkfs.btrfs", "-q", image) or not run("mount", "-o", "loop", image, place):
        pytest.skip("this user or kernel cannot mount a Btrfs")
    try:
        assert run("btrfs", "quota", "enable", place)
        assert run("btrfs", "subvolume", "create", place / "kv")
        assert run("btrfs", "qgroup", "limit", str(QUOTA_BYTES), place / "kv")
        yield place / "kv"
    finally:
        assert run("umount", place)


class Stores:
    """A reactor that stores chunks of 1 MiB, one after the other."""

    def __init__(self, root: Root, make_engine: object) -> None:
        self.root = root
        tensor = torch.ones((1, MIB), dtype=torch.int8)
        pool = Pool(6, GEOMETRY.slot_bytes)
        limits = Limits(io_depth=2, open_lookahead=4, load_deadline_s=1000.0, jobs_max=100)
        self.reactor = Reactor(
            limits,
            pool,
            make_engine,  # type: ignore[arg-type]
            make_copier([tensor], GEOMETRY, pool, None),
            fingerprint=bytes(32),
            writer="1",
        )
        self._ids = itertools.count(1)

    def store(self, number: int) -> JobResult:
        """Store the chunk of that number, to its end."""
        chunk = ChunkTransfer(
            key=key_of(number),
            path=str(self.root.file(number)),
            payload_bytes=GEOMETRY.payload_bytes[0],
            file_bytes=GEOMETRY.file_bytes[0],
            span=BlockSpan(0, 1),
            group=0,
            block_ids=(0,),
            copy_bytes=GEOMETRY.block_bytes[0],
        )
        fence = self.reactor.fence()
        self.reactor.submit(Job(next(self._ids), Direction.STORE, (chunk,), fence))
        results: list[JobResult] = []

        def has_ended() -> bool:
            results.extend(self.reactor.take_results())
            return bool(results)

        wait_until(has_ended, "the store does not end")
        return results[0]

    def fill(self) -> tuple[int, JobResult]:
        """Store until one fails; its number, and how it failed."""
        for number in range(2 * QUOTA_BYTES // MIB):
            result = self.store(number)
            if result.failures:
                return number, result
        raise AssertionError("the quota was never used up")


@pytest.fixture(params=ENGINES, ids=lambda engine: engine.__name__)
def stores(quota: Path, request: pytest.FixtureRequest) -> Iterator[Stores]:
    root = Root(quota / "root")
    root.directories[0].mkdir()
    stores = Stores(root, request.param)
    try:
        stores.reactor.start()
    except OSError as error:
        pytest.skip(f"no {request.param.__name__} engine here: {error}")
    yield stores
    stores.reactor.stop(WAIT_S)


def test_a_quota_is_no_room_and_eviction_makes_some(stores: Stores) -> None:
    root = stores.root
    keeper = Keeper(Config(root=root.path, free_space_min="0"), [], logging.getLogger("tests"))
    keeper.turn()  # counts an empty root
    failed, result = stores.fill()
    assert set(result.failures.values()) == {Failure.NO_SPACE}
    assert space_of(root.path).free > QUOTA_BYTES, "the filesystem itself has room"
    assert root.numbers() == list(range(failed))
    assert {path.stat().st_size for path in root.path.rglob("*.kv")} == {GEOMETRY.file_bytes[0]}
    assert not list(root.path.rglob("*.tmp"))

    reporter = NoSpaceReporter(root.path)
    reporter.report()
    reporter.join()
    keeper.turn()

    left = root.numbers()
    assert 0 < len(left) < failed
    assert not keeper.is_full
    assert stores.store(failed).success
