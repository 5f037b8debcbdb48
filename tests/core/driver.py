# SPDX-License-Identifier: Apache-2.0
"""Plays one scenario of the transfer core by hand, operation by operation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pykvcache.layout import PAGE, BlockSpan, ChunkPaths, Defect, file_bytes
from pykvcache.pool import SlotLedger
from pykvcache.transfer.core import Limits, Operation, TransferCore
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Job, JobResult
from pykvcache.transfer.operations import (
    Action,
    ChecksumOperation,
    Completion,
    CopyOperation,
    FileOperation,
)
from pykvcache.transfer.preloads import PreloadLimits

BLOCKS_PER_CHUNK = 4
PAYLOAD_BYTES = 2 * PAGE
FILE_BYTES = file_bytes(PAYLOAD_BYTES)
DEADLINE_S = 10.0

WHOLE = BlockSpan(0, BLOCKS_PER_CHUNK)

PATHS = ChunkPaths(Path("root"))

_block_ids = itertools.count(1000)


def chunk_of(name: str, first: int = 0, count: int = BLOCKS_PER_CHUNK) -> ChunkTransfer:
    """A chunk with device blocks of its own; the same name is the same key and file."""
    key = name.encode()
    return ChunkTransfer(
        key=key,
        path=PATHS.final(key),
        payload_bytes=PAYLOAD_BYTES,
        file_bytes=FILE_BYTES,
        span=BlockSpan(first, count),
        group=0,
        block_ids=tuple(itertools.islice(_block_ids, count)),
        copy_bytes=count * PAYLOAD_BYTES // BLOCKS_PER_CHUNK,
    )


def preload_of(name: str) -> ChunkTransfer:
    """The same chunk as it is read ahead: whatever its file holds, without device blocks."""
    return replace(chunk_of(name), span=BlockSpan(0, 0), block_ids=(), copy_bytes=0)


class Driver:
    """A core, a clock that the test sets, and the operations that were issued.

    Operations stay in ``issued`` until the test completes them; checksums do only if it says so.
    """

    def __init__(
        self,
        *,
        slots: int = 8,
        io_depth: int = 2,
        open_lookahead: int = 4,
        jobs_max: int = 100,
        preload: PreloadLimits | None = None,
        dram_policy: Literal["none", "lru", "arc"] = "none",
        read_bandwidth_max: int = 0,
        write_bandwidth_max: int = 0,
        check_every: int = 1,
        quarantine_files_max: int = 16,
        syncs: bool = False,
        pause_after_faults: int = 0,
        holds_checksums: bool = False,
    ) -> None:
        self.ledger = SlotLedger(slots)
        limits = Limits(
            io_depth,
            open_lookahead,
            DEADLINE_S,
            jobs_max,
            preload=preload or PreloadLimits(),
            dram_policy=dram_policy,
            read_bandwidth_max=read_bandwidth_max,
            write_bandwidth_max=write_bandwidth_max,
            check_every=check_every,
            quarantine_files_max=quarantine_files_max,
            syncs=syncs,
            pause_after_faults=pause_after_faults,
        )
        self._holds_checksums = holds_checksums
        self.core = TransferCore(limits, self.ledger, "w")
        self.now = 0.0
        self.issued: list[Operation] = []
        self._job_ids = itertools.count(1)
        self._descriptors = itertools.count(3)

    def load(self, *chunks: ChunkTransfer, fence: object = None) -> int:
        """Submit a load; returns its id."""
        return self._submit(Direction.LOAD, chunks, fence)

    def store(self, *chunks: ChunkTransfer, fence: object = None) -> int:
        """Submit a store; returns its id."""
        return self._submit(Direction.STORE, chunks, fence)

    def preload(self, *names: str) -> None:
        """Want these chunks ahead, and no others."""
        self.core.preload([preload_of(name) for name in names], self.now)

    def _submit(
        self, direction: Direction, chunks: tuple[ChunkTransfer, ...], fence: object
    ) -> int:
        job_id = next(self._job_ids)
        self.core.submit(Job(job_id, direction, chunks, fence), self.now)
        return job_id

    def advance(self) -> list[Operation]:
        """One turn; returns what it issued."""
        operations = self.core.advance(self.now)
        while not self._holds_checksums:
            checksums = [item for item in operations if isinstance(item, ChecksumOperation)]
            if not checksums:
                break
            self.core.complete([Completion(item.token, 0) for item in checksums], self.now)
            operations = [item for item in operations if item not in checksums]
            operations += self.core.advance(self.now)
        self.issued += operations
        return operations

    def files(self, action: Action) -> list[FileOperation]:
        """Issued file operations of that kind that have not completed."""
        return [
            item
            for item in self.issued
            if isinstance(item, FileOperation) and item.action is action
        ]

    def file(self, action: Action) -> FileOperation:
        """The only one of that kind."""
        (operation,) = self.files(action)
        return operation

    def copies(self, direction: Direction) -> list[CopyOperation]:
        """Issued copies in that direction that have not completed."""
        return [
            item
            for item in self.issued
            if isinstance(item, CopyOperation) and item.direction is direction
        ]

    def copy(self, direction: Direction) -> CopyOperation:
        """The only one in that direction."""
        (operation,) = self.copies(direction)
        return operation

    def checksum(self, direction: Direction) -> ChecksumOperation:
        """The only one in that direction."""
        (operation,) = [item for item in self.issued if isinstance(item, ChecksumOperation)]
        assert operation.direction is direction
        return operation

    def complete(
        self,
        operations: Operation | Iterable[Operation],
        result: int | None = None,
        defect: Defect | None = None,
        span: BlockSpan | None = WHOLE,
    ) -> None:
        """Complete operations, well unless a result is given, and advance."""
        if isinstance(operations, FileOperation | CopyOperation | ChecksumOperation):
            operations = [operations]
        operations = list(operations)
        self.issued = [item for item in self.issued if item not in operations]
        self.core.complete(
            [
                Completion(
                    item.token,
                    self._good(item) if result is None else result,
                    defect,
                    span if isinstance(item, FileOperation) else None,
                )
                for item in operations
            ],
            self.now,
        )
        self.advance()

    def _good(self, operation: Operation) -> int:
        if isinstance(operation, FileOperation):
            if operation.action in (Action.OPEN, Action.CREATE, Action.OPEN_DIRECTORY):
                return next(self._descriptors)
            return operation.length
        return 0

    def finish(self) -> None:
        """Complete everything well until nothing is left."""
        self.advance()
        while self.issued:
            self.complete(self.issued)

    def results(self) -> dict[int, JobResult]:
        """Results since the last call, by job."""
        results = self.core.take_results()
        by_job = {result.job_id: result for result in results}
        assert len(by_job) == len(results), "a job ended twice"
        return by_job

    def result(self, job_id: int) -> JobResult:
        """The one result there is, which is that job's."""
        results = self.results()
        assert results.keys() == {job_id}
        return results[job_id]

    def assert_at_rest(self) -> None:
        """Everything was given back."""
        assert self.core.idle
        assert self.core.jobs == 0
        assert self.ledger.free == self.ledger.capacity
        assert not self.issued
