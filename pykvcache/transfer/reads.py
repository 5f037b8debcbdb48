# SPDX-License-Identifier: Apache-2.0
"""Reads: from a file's name to the device's blocks, one for all loads that want the chunk."""

from __future__ import annotations

import math
from collections import deque
from functools import partial

from pykvcache.layout import Defect
from pykvcache.transfer.issue import Budget, Issued, Operation
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure
from pykvcache.transfer.operations import Action, Completion, SlotCopy
from pykvcache.transfer.outcomes import failure_of, failure_of_defect
from pykvcache.transfer.quarantine import Quarantine
from pykvcache.transfer.records import Claim, JobRecord, Lane, Read, Records
from pykvcache.transfer.states import Event, State

_SPOILT = frozenset(
    (Failure.WRONG_CONTENT, Failure.TRAILER, Failure.CHECKSUM, Failure.SHORT_TRANSFER)
)
"""Failures of a file that is there and is not its chunk."""


class Reads:
    """All reads of one worker, in their queues."""

    def __init__(
        self,
        records: Records,
        issued: Issued,
        budget: Budget,
        quarantine: Quarantine,
        *,
        open_lookahead: int,
        check_every: int,
    ) -> None:
        """Args:
        quarantine: where bad files go.
        open_lookahead: files opened ahead of their read.
        check_every: reads of which one is compared with its checksum; 0: none.
        """
        self._records = records
        self._issued = issued
        self._budget = budget
        self._quarantine = quarantine
        self._dram = budget.dram
        self._open_lookahead = open_lookahead
        self._check_every = check_every
        self._files_read = 0
        """Whole files, to choose those that are checked."""
        self._by_key: dict[bytes, Read] = {}
        self._waiting: deque[Read] = deque()
        self._ready: list[Read] = []
        self.demand = Lane()
        """Reads that loads wait for."""
        self.preload = Lane()
        """Reads that only :class:`~pykvcache.transfer.preloads.Preloads` has asked for."""
        self.preload_failures: list[tuple[bytes, Failure]] = []
        """Reads ahead that failed; taken by who asked for them."""
        self.bytes_read = 0
        """Bytes that reads of files have returned."""

    @property
    def waiting(self) -> int:
        """Chunks whose file has not been opened."""
        return len(self._waiting)

    @property
    def unread(self) -> int:
        """Chunks that loads wait for and whose bytes are not there; of reads in flight half,
        since they are under way together."""
        begun = (self.demand.reading + 1) // 2
        return len(self._waiting) + self.demand.opening + len(self.demand.opened) + begun

    @property
    def is_wanting(self) -> bool:
        """Whether a load waits for a read that has not started."""
        return bool(self._waiting or self.demand.opening or self.demand.opened)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def claim(self, record: JobRecord, chunk: ChunkTransfer) -> None:
        """Want a chunk: it is in DRAM, or is being read, or is read now."""
        resident = self._dram.find(chunk)
        if resident is not None:
            self._dram.pin(resident)
            record.dram += 1
            read = Read(chunk, self.demand, slot=resident.slot, resident=resident)
            read.move(Event.HIT)
            self._ready.append(read)
        else:
            read = self._read_of(chunk)
        claim = Claim(record, chunk, read)
        read.claims.append(claim)
        record.claims.append(claim)

    def _read_of(self, chunk: ChunkTransfer) -> Read:
        read = self._by_key.get(chunk.key)
        if read is not None and _same_file(read, chunk):
            if read.lane is self.preload:
                self._dram.miss(chunk.key)
                self._hurry(read)
            return read
        self._dram.miss(chunk.key)
        read = Read(chunk, self.demand)
        self._by_key[chunk.key] = read
        self._waiting.append(read)
        return read

    def _hurry(self, read: Read) -> None:
        """A load wants what was being read ahead."""
        if read.state is State.OPENING:
            self.preload.opening -= 1
            self.demand.opening += 1
        elif read.state is State.OPENED:
            self.preload.opened.remove(read)
            self.demand.opened.append(read)
        else:
            self._count_reading(read, -1)
            self.demand.reading += 1
            self.demand.reading_bytes += read.chunk.file_bytes
        read.lane = self.demand

    def give_up(self, record: JobRecord, failure: Failure) -> None:
        """Fail a load's chunks, but for those whose device blocks or rows are being written:
        who gets these next must not find them overwritten."""
        record.deadline = math.inf
        claims = [claim for claim in record.claims if claim in claim.read.claims]
        for claim in claims:
            read = claim.read
            in_place = _is_coming(read) and read.chunk.row >= 0
            if in_place or read.state is State.COPYING_IN:
                continue
            read.claims.remove(claim)
            self._records.end_chunk(record, claim.chunk, failure)
            if not read.claims:
                self._abandon_read(read)

    def _abandon_read(self, read: Read) -> None:
        if read.state is State.WAITING:
            self._waiting.remove(read)
        elif read.state is State.OPENED:
            read.lane.opened.remove(read)
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
        if read.resident is not None:
            self._dram.unpin(read.resident)
            read.resident = None
        elif read.slot >= 0:
            self._budget.ledger.release(read.slot)
        read.slot = -1

    def _fail_read(self, read: Read, failure: Failure) -> None:
        read.move(Event.FAIL)
        claims, read.claims = read.claims, []
        for claim in claims:
            self._records.end_chunk(claim.record, claim.chunk, failure)
        if read.lane is self.preload:
            self.preload_failures.append((read.chunk.key, failure))
        self._end_read(read)

    # --- opening

    def open_files(self, operations: list[Operation]) -> None:
        """Open files ahead of their reads."""
        lane = self.demand
        while self._waiting and lane.opening + len(lane.opened) < self._open_lookahead:
            self._open(self._waiting.popleft(), operations)

    def open_preload(self, chunk: ChunkTransfer, operations: list[Operation]) -> None:
        """Open a file that no load has asked for yet."""
        read = Read(chunk, self.preload)
        self._by_key[chunk.key] = read
        self._open(read, operations)

    def _open(self, read: Read, operations: list[Operation]) -> None:
        read.move(Event.ISSUE)
        read.lane.opening += 1
        operations.append(
            self._issued.file(Action.OPEN, partial(self._on_opened, read), path=read.chunk.path)
        )

    def _on_opened(self, read: Read, done: Completion) -> None:
        read.lane.opening -= 1
        if done.result < 0:
            self._fail_read(read, failure_of(done.result))
            return
        read.descriptor = done.result
        read.move(Event.SUCCEED)
        if self._is_needed(read):
            read.lane.opened.append(read)
        else:
            read.move(Event.ABANDON)
            self._end_read(read)

    def _is_needed(self, read: Read) -> bool:
        is_listed = self._by_key.get(read.chunk.key) is read
        return bool(read.claims) or (read.lane is self.preload and is_listed)

    def withdraw(self, key: bytes) -> None:
        """Nobody wants the chunk that is being read ahead; what has begun to come in goes on, for
        who may want it again."""
        read = self._by_key.get(key)
        if read is not None and read.lane is self.preload and not _is_coming(read):
            self._abandon_read(read)

    # --- reading

    def start(self, operations: list[Operation]) -> None:
        """Start reads of opened files, each with a slot."""
        budget, opened = self._budget, self.demand.opened
        while (
            opened
            and budget.has_depth
            and self._dram.available(demand=True)
            and budget.read_bandwidth.allows(self._records.now)
        ):
            self._start(opened.popleft(), operations)

    def start_preload(self, operations: list[Operation]) -> None:
        """Start the read ahead whose file was opened first."""
        self._start(self.preload.opened.popleft(), operations)

    def _start(self, read: Read, operations: list[Operation]) -> None:
        read.move(Event.ISSUE)
        read.slot = self._dram.lease(demand=read.lane is self.demand)
        self._budget.io += 1
        self._budget.read_bandwidth.spend(read.chunk.file_bytes)
        self._count_reading(read, 1)
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

    def _count_reading(self, read: Read, change: int) -> None:
        read.lane.reading += change
        read.lane.reading_bytes += change * read.chunk.file_bytes

    def _on_read(self, read: Read, done: Completion) -> None:
        self._budget.io -= 1
        self.bytes_read += max(0, done.result)
        failure = _read_failure(read, done)
        if failure is not None:
            self._fail_content(read, failure, done.defect)
            return
        read.move(Event.SUCCEED)
        read.span = done.span
        self._issued.clean_up(Action.CLOSE, descriptor=read.descriptor)
        read.descriptor = -1
        self._files_read += 1
        if self._check_every and self._files_read % self._check_every == 0:
            react = partial(self._on_checked, read)
            self._issued.follow(self._issued.checksum(Direction.LOAD, read.slot, read.chunk, react))
        else:
            self._take_in(read)

    def _on_checked(self, read: Read, done: Completion) -> None:
        if done.defect is not None:
            self._fail_content(read, failure_of_defect(done.defect), done.defect)
        else:
            self._take_in(read)

    def _fail_content(self, read: Read, failure: Failure, defect: Defect | None) -> None:
        self._count_reading(read, -1)
        if failure in _SPOILT:
            self._quarantine.remove(read.chunk.path, defect)
        self._fail_read(read, failure)

    def _take_in(self, read: Read) -> None:
        """The slot holds the chunk, as far as anyone wants to know."""
        self._count_reading(read, -1)
        read.move(Event.SUCCEED)
        self._fail_claims_beyond(read)
        slot, read.slot = read.slot, -1
        read.resident = self._dram.add(
            read.chunk,
            read.span or read.chunk.span,
            slot,
            self._records.now,
            pinned=bool(read.claims),
            cold=not read.claims,
        )
        if not read.claims:
            read.resident = None
            read.move(Event.KEEP)
            self._end_read(read)
            return
        read.slot = slot
        read.claims[0].record.file_bytes += read.chunk.file_bytes
        self._ready.append(read)

    def _fail_claims_beyond(self, read: Read) -> None:
        """Fail loads of blocks that the file turns out not to hold: nobody knew when it was
        read ahead."""
        span = read.span
        if span is None:
            return
        beyond = [claim for claim in read.claims if not span.covers(claim.chunk.span)]
        for claim in beyond:
            read.claims.remove(claim)
            self._records.end_chunk(claim.record, claim.chunk, Failure.WRONG_CONTENT)
        if beyond:
            self._quarantine.remove(read.chunk.path, Defect.BLOCKS)

    # --- copying

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
    is_same = read.chunk.path == chunk.path and read.chunk.row == chunk.row
    return is_same and (read.chunk.span.count == 0 or read.chunk.span.covers(chunk.span))


def _read_failure(read: Read, done: Completion) -> Failure | None:
    if done.result < 0:
        return failure_of(done.result)
    if done.result != read.chunk.file_bytes:
        return Failure.SHORT_TRANSFER
    return None if done.defect is None else failure_of_defect(done.defect)


def _is_coming(read: Read) -> bool:
    """Whether bytes of the file are on their way into the slot, or being checked there."""
    return read.state in (State.READING, State.CHECKING)
