# SPDX-License-Identifier: Apache-2.0
"""The storage path alone: the reactor, its pool and an engine, without a device.

For benchmarks and for judging a drive: what the files of a cache take to read here.
"""

from __future__ import annotations

import hashlib
import os
import select
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pykvcache.config import Config
from pykvcache.errors import ConfigError
from pykvcache.identity import FILE_NAME
from pykvcache.layout import PAGE, BlockSpan, Trailer, decode_trailer, file_bytes
from pykvcache.limits import limits_of
from pykvcache.pool import Pool
from pykvcache.reactor.copier import NoCopier
from pykvcache.reactor.probe import choose_direct, choose_engine, make_engine
from pykvcache.reactor.reactor import Reactor
from pykvcache.transfer.core import Limits
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Job, JobResult

_POLL_S = 0.01
"""Seconds; the result carries its own time, and looking more often costs CPU."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A running reactor without a device."""

    reactor: Reactor
    engine: str
    direct: bool

    def transfer(self, direction: Direction, chunks: Sequence[ChunkTransfer]) -> float:
        """Read or write the chunks as one job.

        Returns:
            Seconds from the submission to the end.

        Raises:
            OSError: a chunk failed.
        """
        self.reactor.submit(Job(0, direction, tuple(chunks)))
        result = self._wait()
        if not result.success:
            failures = {str(failure) for failure in result.failures.values()}
            raise OSError(f"{len(result.failures)} chunks failed: {', '.join(sorted(failures))}")
        return result.seconds

    def _wait(self) -> JobResult:
        while not (results := self.reactor.take_results()):
            select.select([], [], [], _POLL_S)
        return results[0]


@contextmanager
def open_storage(
    directory: Path,
    slot_bytes: int,
    fingerprint: bytes,
    config: Config,
    *,
    slots: int = 0,
    limits: Limits | None = None,
) -> Iterator[Storage]:
    """Start a reactor on the directory's filesystem.

    Args:
        directory: where the files lie; writable.
        slot_bytes: bytes of the largest file.
        fingerprint: written into and expected in the trailers.
        config: engine, depth, direct I/O and verification.
        slots: of the pool; by default twice what the configuration needs at least.
        limits: what the core obeys; by default it neither reads ahead nor keeps what it read,
            so that every transfer reaches the disk.
    """
    direct = choose_direct(config.direct_io, directory)
    engine = choose_engine(config.io_engine, directory, direct.direct)
    pool = Pool(slots or 2 * config.slots_min, slot_bytes)
    pool.populate(0, pool.slots)
    plain = replace(limits_of(config, config.slots_min), load_deadline_s=3600.0, dram_policy="none")
    reactor = Reactor(
        limits or plain,
        pool,
        lambda buffers: make_engine(engine, buffers, direct.direct, config.io_depth),
        NoCopier(),
        fingerprint=fingerprint,
        writer=f"{os.getpid():x}",
    )
    reactor.start()
    try:
        yield Storage(reactor, engine.name, direct.direct)
    finally:
        reactor.stop(config.shutdown_timeout_s)


def chunk_of(path: Path) -> ChunkTransfer:
    """The chunk that a file holds, by its trailer.

    Raises:
        ConfigError: the file is not a chunk.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - PAGE))
        page = file.read(PAGE)
    trailer = decode_trailer(page)
    if not isinstance(trailer, Trailer):
        raise ConfigError(f"'{path}' is not a KV chunk: it must end in a trailer page")
    return plain_chunk(trailer.key, os.path.realpath(path), trailer.payload_bytes, trailer.span)


def plain_chunk(
    key: bytes, path: str, payload_bytes: int, span: BlockSpan | None = None
) -> ChunkTransfer:
    """A chunk without device blocks, of one block unless ``span`` says otherwise."""
    return ChunkTransfer(
        key=key,
        path=path,
        payload_bytes=payload_bytes,
        file_bytes=file_bytes(payload_bytes),
        span=span or BlockSpan(0, 1),
        group=0,
        block_ids=(),
        copy_bytes=0,
    )


def read_seconds(paths: Iterable[Path], config: Config | None = None, rounds: int = 5) -> float:
    """How long the reactor alone takes to read the files of one rank's directory.

    Returns:
        The median of the rounds, in seconds.

    Raises:
        ConfigError: no files, or files that are not chunks.
        OSError: a file cannot be read.
    """
    chunks = [chunk_of(path) for path in paths]
    if not chunks:
        raise ConfigError("there are no KV files to read")
    directory = Path(chunks[0].path).parents[1]
    fingerprint = hashlib.sha256((directory / FILE_NAME).read_bytes()).digest()
    slot_bytes = max(chunk.file_bytes for chunk in chunks)
    with open_storage(directory, slot_bytes, fingerprint, config or Config()) as storage:
        seconds = sorted(storage.transfer(Direction.LOAD, chunks) for _ in range(rounds))
    return seconds[len(seconds) // 2]
