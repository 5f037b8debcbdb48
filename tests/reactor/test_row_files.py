# SPDX-License-Identifier: Apache-2.0
"""Files whose payload comes out of somebody else's memory, and goes straight into it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pykvcache.checksum import checksum
from pykvcache.layout import PAGE, BlockSpan, ChunkPaths, Trailer, decode_trailer, file_bytes
from pykvcache.pool import Pool
from pykvcache.reactor.copier import NoCopier
from pykvcache.reactor.engine import IoEngine
from pykvcache.reactor.reactor import Reactor
from pykvcache.reactor.rows import Rows
from pykvcache.reactor.threads import ThreadsEngine
from pykvcache.reactor.uring import UringEngine
from pykvcache.transfer.core import Limits
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure, Job, JobResult
from tests.core.fakes import WAIT_S, wait_until

ROW_BYTES = 2 * PAGE + 1000
"""The payload's padding lies in the slot, apart from it."""

ROWS = 4


class Memory:
    """Rows, and a reactor between them and files."""

    def __init__(self, engine: str, directory: Path) -> None:
        self.bytes = bytearray(random.Random(1).randbytes(ROWS * ROW_BYTES))
        rows = Rows(memoryview(self.bytes).cast("B", (ROWS, ROW_BYTES)))

        def make_engine(buffers: Sequence[memoryview]) -> IoEngine:
            if engine == "threads":
                return ThreadsEngine(buffers, direct=False, workers=2, rows=rows)
            return UringEngine(buffers, direct=False, rows=rows)

        pool = Pool(4, 2 * PAGE)
        pool.memory[:] = b"\xee" * pool.size
        self.paths = ChunkPaths(directory)
        self.reactor = Reactor(
            Limits(io_depth=2, open_lookahead=4, load_deadline_s=1000.0, jobs_max=100),
            pool,
            make_engine,
            NoCopier(),
            fingerprint=bytes(32),
            writer="ab",
            rows=rows,
        )

    def row(self, number: int) -> bytes:
        return bytes(self.bytes[number * ROW_BYTES : (number + 1) * ROW_BYTES])

    def transfer(self, direction: Direction, row: int) -> JobResult:
        """Run a job of one chunk, always the same."""
        chunk = ChunkTransfer(
            key=b"key",
            path=self.paths.final(b"key"),
            payload_bytes=ROW_BYTES,
            file_bytes=file_bytes(ROW_BYTES),
            span=BlockSpan(0, 1),
            group=0,
            block_ids=(),
            copy_bytes=0,
            row=row,
        )
        self.reactor.submit(Job(1, direction, (chunk,)))
        results: list[JobResult] = []
        wait_until(lambda: results.extend(self.reactor.take_results()) or results, "no end")
        return results[0]


@pytest.fixture(params=["threads", "io_uring"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Memory]:
    memory = Memory(request.param, tmp_path)
    try:
        memory.reactor.start()
    except OSError as error:
        pytest.skip(f"no {request.param} here: {error}")
    yield memory
    memory.reactor.stop(WAIT_S)


def test_a_row_comes_back_in_another(memory: Memory) -> None:
    assert memory.transfer(Direction.STORE, row=0).success
    file = Path(memory.paths.final(b"key")).read_bytes()
    trailer = decode_trailer(file[-PAGE:])
    assert isinstance(trailer, Trailer)
    assert file[:ROW_BYTES] == memory.row(0)
    assert not any(file[ROW_BYTES:-PAGE]), "nothing of the slot's past"
    assert trailer.checksum == checksum(file[:-PAGE])
    assert memory.transfer(Direction.LOAD, row=2).success
    assert memory.row(2) == memory.row(0)


@pytest.mark.parametrize("place", [0, ROW_BYTES - 1, ROW_BYTES])
def test_a_damaged_file_is_a_failed_load(memory: Memory, place: int) -> None:
    assert memory.transfer(Direction.STORE, row=0).success
    path = Path(memory.paths.final(b"key"))
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 1
    path.write_bytes(damaged)
    assert memory.transfer(Direction.LOAD, row=2).failures == {b"key": Failure.CHECKSUM}
    wait_until(lambda: not path.exists(), "the bad file stays")
