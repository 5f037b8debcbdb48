# SPDX-License-Identifier: Apache-2.0
"""A process that stores and loads chunks until it is killed; see `test_kill.py`.

    python -m tests.reactor.killed_writer ROOT SEED

Each chunk's content follows from its key. A line tells each job that has ended: `store` or `load`,
chunks, failures; `wrong` and a key for content that is not the key's.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from pykvcache.config import Config
from pykvcache.layout import PAGE, ChunkPaths
from pykvcache.measure import plain_chunk
from pykvcache.pool import Pool
from pykvcache.reactor.copier import NoCopier
from pykvcache.reactor.probe import choose_direct, choose_engine, make_engine
from pykvcache.reactor.reactor import Reactor
from pykvcache.transfer.core import Limits
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Job
from pykvcache.transfer.operations import CopyOperation

KEYS = 400
PAYLOAD_BYTES = 63 * PAGE
FINGERPRINT = bytes(range(32))
CHUNKS_PER_JOB = 6
JOBS_AHEAD = 4
DEPTH = 4


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big") + bytes(4)


def content_of(key: bytes) -> bytes:
    return key * (PAYLOAD_BYTES // len(key)) + bytes(PAYLOAD_BYTES % len(key))


def chunk_of(directory: Path, number: int) -> ChunkTransfer:
    key = key_of(number)
    return plain_chunk(key, ChunkPaths(directory).final(key), PAYLOAD_BYTES)


class KeyCopier(NoCopier):
    """Makes up what the device holds, and compares what comes for it."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool

    def launch(self, operation: CopyOperation) -> None:
        for copy in operation.copies:
            payload = self._pool.view(copy.slot)[:PAYLOAD_BYTES]
            if operation.direction is Direction.STORE:
                payload[:] = content_of(copy.chunk.key)
            elif payload != content_of(copy.chunk.key):
                print("wrong", copy.chunk.key.hex(), flush=True)
        super().launch(operation)


def start(directory: Path, writer: str) -> Reactor:
    config = Config(root=directory, io_depth=DEPTH)
    direct = choose_direct("auto", directory)
    engine = choose_engine("auto", directory, direct.direct)
    pool = Pool(3 * DEPTH, chunk_of(directory, 0).file_bytes)
    reactor = Reactor(
        Limits(DEPTH, config.open_lookahead, config.load_deadline_s, config.mailbox_jobs),
        pool,
        lambda buffers: make_engine(engine, buffers, direct.direct, DEPTH),
        KeyCopier(pool),
        fingerprint=FINGERPRINT,
        writer=writer,
    )
    reactor.start()
    return reactor


def tell(reactor: Reactor, timeout_s: float = 10.0) -> int:
    """Print the jobs that have ended; how many."""
    reactor.await_result(timeout_s)
    results = reactor.take_results()
    for result in results:
        print(result.direction, result.chunks, len(result.failures), flush=True)
    return len(results)


def main(directory: Path, seed: int) -> None:
    chooser = random.Random(seed)
    reactor = start(directory, f"{seed:x}")
    open_jobs = 0
    for number in range(1 << 30):
        direction = chooser.choice((Direction.STORE, Direction.LOAD))
        keys = chooser.sample(range(KEYS), CHUNKS_PER_JOB)
        chunks = tuple(chunk_of(directory, key) for key in keys)
        reactor.submit(Job(number, direction, chunks))
        open_jobs += 1
        while open_jobs >= JOBS_AHEAD:
            open_jobs -= tell(reactor)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
