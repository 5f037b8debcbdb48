# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` while chunks are stored and loaded: nothing partial may ever be read."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pykvcache.capacity.budget import Budget
from pykvcache.capacity.evictor import TEMPORARY_AGE_S, Evictor
from pykvcache.identity import FILE_NAME
from pykvcache.layout import (
    PAGE,
    SUFFIX,
    TEMPORARY_SUFFIX,
    Trailer,
    decode_trailer,
    model_directory,
    rank_directory,
)
from pykvcache.sizes import Size
from pykvcache.transfer.jobs import Direction, Job
from tests.reactor.killed_writer import PAYLOAD_BYTES, chunk_of, content_of, start

REPOSITORY = Path(__file__).resolve().parent.parent.parent
KILLS = 10
KILLS_SOAK = 200
LINES_MAX = 60
"""Jobs that have ended when the writer is killed, at most; others are in flight."""
FAILING_DEADLINE_S = 60.0


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    identity = model_directory(tmp_path / "kv", "model", bytes(32))
    directory = rank_directory(identity, 0)
    directory.mkdir(parents=True)
    (identity / FILE_NAME).write_text("{}")
    return directory


def kill_a_writer(rank: Path, seed: int) -> None:
    """Start one, and kill it after some of its jobs."""
    command = [sys.executable, "-m", "tests.reactor.killed_writer", str(rank), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as writer:
        assert writer.stdout is not None
        for _ in range(random.Random(seed).randrange(1, LINES_MAX)):
            line = writer.stdout.readline()
            assert line, "the writer ended by itself"
            assert not line.startswith("wrong"), line
        writer.kill()
        rest = writer.stdout.read()
    assert "wrong" not in rest
    assert writer.returncode == -9


def check_files(rank: Path) -> int:
    """Every published file is whole and its key's; how many there are."""
    files = list(rank.rglob(f"*{SUFFIX}"))
    for file in files:
        data = file.read_bytes()
        trailer = decode_trailer(data[-PAGE:])
        assert isinstance(trailer, Trailer), file
        assert file.name == trailer.key.hex() + SUFFIX
        assert data[:PAYLOAD_BYTES] == content_of(trailer.key), file
    return len(files)


def load_all(rank: Path) -> int:
    """Chunks that a new process finds and loads."""
    reactor = start(rank, "f" * 8)
    try:
        numbers = [n for n in range(1000) if os.path.exists(chunk_of(rank, n).path)]
        chunks = tuple(chunk_of(rank, number) for number in numbers)
        reactor.submit(Job(1, Direction.LOAD, chunks))
        deadline = time.monotonic() + FAILING_DEADLINE_S
        while not (results := reactor.take_results()):
            assert time.monotonic() < deadline
            reactor.await_result(1.0)
        assert not results[0].failures
        return results[0].chunks
    finally:
        reactor.stop(10.0)


def sweep(rank: Path) -> int:
    """Leftovers that a server removes when they are old enough."""
    evictor = Evictor(
        rank.parent.parent,
        Budget(None, Size(), high=0.95, low=0.9),
        None,
        files_per_s=0.0,
        pause=lambda _seconds: False,
        clock=lambda: time.time() + TEMPORARY_AGE_S + 1,
    )
    done = evictor.run()
    assert done is not None and not done.skipped
    return done.temporaries


def kill_writers(rank: Path, kills: int) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    before = 0
    for seed in range(kills):
        kill_a_writer(rank, seed)
        there = check_files(rank)
        assert there >= before, "what was published stays"
        before = there
    leftovers = [path for path in rank.rglob(f"*{TEMPORARY_SUFFIX}") if "probe" not in path.name]
    assert before == load_all(rank) > 0, "the cache is warm"
    assert sweep(rank) >= len(leftovers)
    assert not list(rank.rglob(f"*{TEMPORARY_SUFFIX}"))
    assert check_files(rank) == before
    left = set(os.listdir("/dev/shm")) - shared_memory
    assert not [name for name in left if "pykvcache" in name]  # others' come and go


def test_killed_writers_leave_nothing_partial(rank: Path) -> None:
    kill_writers(rank, KILLS)


@pytest.mark.soak
def test_many_killed_writers_leave_nothing_partial(rank: Path) -> None:
    kill_writers(rank, KILLS_SOAK)
