# SPDX-License-Identifier: Apache-2.0
"""Reads: from a file's name to the device's blocks, one for all loads that want the chunk."""

from __future__ import annotations

import math
from collections import deque
from functools import partial

from pykvcache.transfer.issue import Budget, Issued, Operation
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure
from pykvcache.transfer.operations import Action, Completion, SlotCopy
from pykvcache.transfer.outcomes import failure_of
from pykvcache.transfer.records import Claim, JobRecord, Read, Records
from pykvcache.transfer.states import Event, State


class Reads:
    """All reads of one worker, in their queues."""

    def __init__(
        self, records: Records, issued: Issued, budget: Budget, open_lookahead: int
    ) -> None:
        self._records = records
        self._issued = issued
        self._budget = budget
        self._open_lookahead = open_lookahead
        self._by_key: dict[bytes, Read] = {}
        self._waiting: deque[Read] = deque()
        self._opened: deque[Read] = deque()
        self._ready: list[Read] = []
        self._opening = 0

    @property
    def waiting(self) -> int:
        """Chunks whose file has not been opened."""
        return len(self._waiting)

    @property
    def opened(self) -> int:
        """Chunks whose file waits for its read to start."""
        return len(self._opened)

    def claim(self, record: JobRecord, chunk: ChunkTransfer) -> None:
        """Want a chunk; a read of it that has not reached the device is shared."""
        read = self._by_key.get(chunk.key)
        if read is None or not _same_file(read, chunk):
            read = Read(chunk)
            self._by_key[chunk.key] = read
            self._waiting.append(read)
        claim = Claim(record, chunk, read)
        read.claims.append(claim)
        record.claims.append(claim)

    def give_up(self, record: JobRecord, failure: Failure) -> None:
        """Fail a load's chunks, but for those being copied, whose blocks are being written."""
        record.deadline = math.inf
        claims = [claim for claim in record.claims if claim in claim.read.claims]
        for claim in claims:
            read = claim.read
            if read.state is State.COPYING_IN:
                continue
            read.claims.remove(claim)
            self._records.end_chunk(record, claim.chunk, failure)
            if not read.claims:
                self._abandon_read(read)

    def _abandon_read(self, read: Read) -> None:
        if read.state is State.WAITING:
            self._waiting.remove(read)
        elif read.state is State.OPENED:
            self._opened.remove(read)
        elif read.state is State.READ:
            self._ready.remove(read)
        else:
            self._forget(read)  # its operation in flight ends it
            return
        read.move(Event.ABANDON)
        self._end_read(read)

    def _forget(self, read: Read) -> None:
        if self._by_key.get(read.chunk.key) is read:
            del self._by_key[read.chunk.key]

    def _end_read(self, read: Read) -> None:
        self._forget(read)
        if read.descriptor >= 0:
            self._issued.clean_up(Action.CLOSE, descriptor=read.descriptor)
            read.descriptor = -1
        if read.slot >= 0:
            self._budget.ledger.release(read.slot)
            read.slot = -1

    def _fail_read(self, read: Read, failure: Failure) -> None:
        read.move(Event.FAIL)
        claims, read.claims = read.claims, []
        for claim in claims:
            self._records.end_chunk(claim.record, claim.chunk, failure)
        self._end_read(read)

    def open_files(self, operations: list[Operation]) -> None:
        """Open files ahead of their reads."""
        while self._waiting and self._opening + len(self._opened) < self._open_lookahead:
            read = self._waiting.popleft()
            read.move(Event.ISSUE)
            self._opening += 1
            operations.append(
                self._issued.file(Action.OPEN, partial(self._on_opened, read), path=read.chunk.path)
            )

    def _on_opened(self, read: Read, done: Completion) -> None:
        self._opening -= 1
        if done.result < 0:
            self._fail_read(read, failure_of(done.result))
            return
        read.descriptor = done.result
        read.move(Event.SUCCEED)
        if read.claims:
            self._opened.append(read)
        else:
            read.move(Event.ABANDON)
            self._end_read(read)

    def start(self, operations: list[Operation]) -> None:
        """Start reads of opened files, each with a slot."""
        while self._opened and self._budget.has_depth and self._budget.ledger.free:
            read = self._opened.popleft()
            read.move(Event.ISSUE)
            read.slot = self._budget.ledger.lease()
            self._budget.io += 1
            operations.append(
                self._issued.file(
                    Action.READ,
                    partial(self._on_read, read),
                    descriptor=read.descriptor,
                    slot=read.slot,
                    length=read.chunk.file_bytes,
                    chunk=read.chunk,
                )
            )

    def _on_read(self, read: Read, done: Completion) -> None:
        self._budget.io -= 1
        failure = _read_failure(read, done)
        if failure in (Failure.WRONG_CONTENT, Failure.SHORT_TRANSFER):
            # First writer wins, so a file that is not its chunk would stay a miss for ever.
            self._issued.clean_up(Action.UNLINK, path=read.chunk.path)
        if failure is not None:
            self._fail_read(read, failure)
            return
        read.move(Event.SUCCEED)
        if not read.claims:
            read.move(Event.ABANDON)
            self._end_read(read)
            return
        self._issued.clean_up(Action.CLOSE, descriptor=read.descriptor)
        read.descriptor = -1
        read.claims[0].record.file_bytes += read.chunk.file_bytes
        self._ready.append(read)

    def copy_in(self, operations: list[Operation]) -> None:
        """Copy everything that has been read since the last turn, in one launch."""
        if not self._ready:
            return
        reads, self._ready = self._ready, []
        copies = []
        for read in reads:
            read.move(Event.ISSUE)
            self._forget(read)
            copies += [
                SlotCopy(read.slot, claim.chunk, claim.record.job.fence) for claim in read.claims
            ]
        operations.append(
            self._issued.copy(Direction.LOAD, copies, partial(self._on_copied, reads))
        )

    def _on_copied(self, reads: list[Read], done: Completion) -> None:
        for read in reads:
            if done.result < 0:
                self._fail_read(read, Failure.DEVICE_COPY)
                continue
            read.move(Event.SUCCEED)
            claims, read.claims = read.claims, []
            for claim in claims:
                claim.record.copied_bytes += claim.chunk.copy_bytes
                self._records.end_chunk(claim.record, claim.chunk)
            self._end_read(read)


def _same_file(read: Read, chunk: ChunkTransfer) -> bool:
    return read.chunk.path == chunk.path and read.chunk.span.covers(chunk.span)


def _read_failure(read: Read, done: Completion) -> Failure | None:
    if done.result < 0:
        return failure_of(done.result)
    if done.result != read.chunk.file_bytes:
        return Failure.SHORT_TRANSFER
    return None if done.defect is None else Failure.WRONG_CONTENT
