# SPDX-License-Identifier: Apache-2.0
"""The transfer core: which operation comes next, within the limits, by priority.

Pure: operations that have completed and the time go in, operations to start come out.
The rules are those of the paper's section 6.4:

* files are opened ahead (``open_lookahead``); a slot is taken only when its read can be
  submitted, and reads and writes in flight together never exceed ``io_depth``;
* every chunk that became readable since the last turn goes to the device in one launch;
* a store runs the other way: slot, device copy, file, and gives its slot back when it
  is written. Stores never hold the last ``io_depth`` slots, so a load finds one;
* ready reads come before new loads, and those before stores. When the engine is about
  to reuse blocks whose store has not been copied, what finds no slot now is dropped.

Two jobs that want the same chunk share one read. An operation in flight is never
forgotten: whatever happened to its job, its slot and its descriptor are given back when
it completes, not before.
"""

from __future__ import annotations

import errno
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from pykvcache.errors import InvariantError
from pykvcache.layout import temporary_name
from pykvcache.pool import SlotLedger
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure, Job, JobResult
from pykvcache.transfer.operations import (
    Action,
    Completion,
    CopyOperation,
    FileOperation,
    SlotCopy,
)
from pykvcache.transfer.outcomes import failure_of
from pykvcache.transfer.states import Event, State, next_read_state, next_write_state

Operation = FileOperation | CopyOperation


@dataclass(frozen=True, slots=True)
class Limits:
    """The core's limits; units and reasons are those of :class:`pykvcache.config.Config`."""

    io_depth: int
    open_lookahead: int
    load_deadline_s: float
    jobs_max: int


@dataclass(slots=True)
class _JobRecord:
    job: Job
    submitted_at: float
    deadline: float
    unsettled: int
    """Chunks whose device blocks are still needed."""
    open: int
    """Chunks that have not ended."""
    failures: dict[bytes, Failure] = field(default_factory=dict)
    copied_bytes: int = 0
    file_bytes: int = 0
    present: int = 0
    claims: list[_Claim] = field(default_factory=list)
    writes: list[_Write] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Claim:
    record: _JobRecord
    chunk: ChunkTransfer
    read: _Read


@dataclass(slots=True, eq=False)
class _Read:
    chunk: ChunkTransfer
    claims: list[_Claim] = field(default_factory=list)
    state: State = State.WAITING
    descriptor: int = -1
    slot: int = -1

    def move(self, event: Event) -> None:
        self.state = next_read_state(self.state, event)


@dataclass(slots=True, eq=False)
class _Write:
    record: _JobRecord
    chunk: ChunkTransfer
    state: State = State.WAITING
    descriptor: int = -1
    slot: int = -1
    temporary: str = ""
    directory_made: bool = False

    def move(self, event: Event) -> None:
        self.state = next_write_state(self.state, event)


class TransferCore:
    """All transfers of one worker. Not thread-safe: the reactor's thread owns it."""

    def __init__(self, limits: Limits, ledger: SlotLedger, writer: str) -> None:
        """Args:
        limits: see :class:`Limits`.
        ledger: the pool's slots; more than ``io_depth`` of them.
        writer: hex digits that no other writer of the root uses, for temporary names.

        Raises:
            InvariantError: the pool could not hold the foreground's slots and one store.
        """
        if ledger.capacity <= limits.io_depth:
            raise InvariantError(
                f"{ledger.capacity} slots leave no store beside io_depth {limits.io_depth}"
            )
        self._limits = limits
        self._ledger = ledger
        self._writer = writer
        self._store_slots_max = ledger.capacity - limits.io_depth
        self._tokens = itertools.count(1)
        self._names = itertools.count(1)
        self._records: dict[int, _JobRecord] = {}
        self._results: list[JobResult] = []
        self._in_flight: dict[int, Callable[[Completion], None]] = {}
        self._background: list[FileOperation] = []
        self._closing = False
        self._now = 0.0

        self._reads: dict[bytes, _Read] = {}
        self._reads_waiting: deque[_Read] = deque()
        self._reads_opened: deque[_Read] = deque()
        self._reads_ready: list[_Read] = []
        self._opening = 0

        self._writes_waiting: deque[_Write] = deque()
        self._writes_copied: deque[_Write] = deque()
        self._writes_created: deque[_Write] = deque()
        self._writes: set[_Write] = set()
        self._creating = 0
        self._store_slots = 0
        self._io = 0
        self._flushing: set[int] = set()

    # --- what the engine asks for

    def submit(self, job: Job, now: float) -> None:
        """Accept a job; it ends with exactly one result, whatever happens.

        Raises:
            InvariantError: the job's id is in use.
        """
        if job.job_id in self._records:
            raise InvariantError(f"job {job.job_id} is submitted twice")
        record = _JobRecord(
            job, now, now + self._limits.load_deadline_s, len(job.chunks), len(job.chunks)
        )
        refusal = self._refusal()
        self._records[job.job_id] = record
        if not job.chunks:
            self._finish(record, now)
        for chunk in job.chunks:
            if refusal is not None:
                self._end_chunk(record, chunk, refusal, now)
            elif job.direction is Direction.LOAD:
                self._claim(record, chunk)
            else:
                write = _Write(record, chunk)
                record.writes.append(write)
                self._writes.add(write)
                self._writes_waiting.append(write)

    def _refusal(self) -> Failure | None:
        if self._closing:
            return Failure.SHUTDOWN
        return Failure.OVERLOAD if len(self._records) >= self._limits.jobs_max else None

    def _claim(self, record: _JobRecord, chunk: ChunkTransfer) -> None:
        read = self._reads.get(chunk.key)
        if read is None or not _same_file(read, chunk):
            read = _Read(chunk)
            self._reads[chunk.key] = read
            self._reads_waiting.append(read)
        claim = _Claim(record, chunk, read)
        read.claims.append(claim)
        record.claims.append(claim)

    def flush(self, job_ids: Iterable[int]) -> None:
        """The device blocks of these stores are about to be reused: at the next turn, copy
        what finds a slot and drop the rest."""
        self._flushing.update(job_ids)

    def forsake(self, job_ids: Iterable[int], now: float) -> None:
        """The device blocks of these stores are reused although they may not have been
        copied: none of their chunks that has not been published may be any more."""
        for record in [self._records[job] for job in job_ids if job in self._records]:
            self._drop_writes(record, Failure.DROPPED, now)

    def settled(self, job_ids: Iterable[int]) -> bool:
        """Whether none of these jobs still needs its device blocks."""
        return all(
            record is None or record.unsettled == 0 for record in map(self._records.get, job_ids)
        )

    def close(self, now: float) -> None:
        """Refuse new jobs, fail loads, drop stores whose data is still on the device; the
        other stores go on."""
        self._closing = True
        for record in list(self._records.values()):
            if record.job.direction is Direction.LOAD:
                self._give_up(record, Failure.SHUTDOWN, now)
        self._drop_waiting_writes(lambda write: True, Failure.SHUTDOWN, now)

    def abandon(self, now: float) -> None:
        """End every job now, but for loads whose blocks are being written: those end with their
        copy. Operations in flight keep their slots until they complete."""
        self.close(now)
        for record in list(self._records.values()):
            self._drop_writes(record, Failure.SHUTDOWN, now)

    # --- what happened

    def complete(self, completions: Iterable[Completion], now: float) -> None:
        """Take in completed operations.

        Raises:
            InvariantError: a completion of no operation in flight.
        """
        self._now = now
        for completion in completions:
            try:
                react = self._in_flight.pop(completion.token)
            except KeyError:
                raise InvariantError(f"operation {completion.token} is not in flight") from None
            react(completion)

    # --- what to do

    def advance(self, now: float) -> list[Operation]:
        """The operations to start now, in order of priority; each completes exactly once."""
        self._now = now
        self._expire(now)
        operations: list[Operation] = []
        self._copy_in(operations)
        self._start_reads(operations)
        self._open_files(operations)
        self._copy_out(operations)
        self._start_writes(operations)
        self._create_files(operations)
        operations += self._background
        self._background = []
        return operations

    def take_results(self) -> list[JobResult]:
        """The jobs that ended since the last call."""
        results, self._results = self._results, []
        return results

    def next_deadline(self) -> float | None:
        """When :meth:`advance` must be called again even if nothing completes."""
        return min(
            (
                record.deadline
                for record in self._records.values()
                if record.job.direction is Direction.LOAD and record.deadline < math.inf
            ),
            default=None,
        )

    # --- what it looks like

    @property
    def jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self._records)

    @property
    def operations_in_flight(self) -> int:
        """Operations started and not completed."""
        return len(self._in_flight)

    @property
    def idle(self) -> bool:
        """No job, and no operation in flight or owed."""
        return not (self._records or self._in_flight or self._background)

    def queue_lengths(self) -> dict[str, int]:
        """Chunks in each queue, for metrics."""
        return {
            "load_waiting": len(self._reads_waiting),
            "load_opened": len(self._reads_opened),
            "store_waiting": len(self._writes_waiting),
            "store_copied": len(self._writes_copied) + len(self._writes_created),
            "io": self._io,
        }

    # --- loads

    def _expire(self, now: float) -> None:
        for record in list(self._records.values()):
            if record.job.direction is Direction.LOAD and record.deadline <= now:
                self._give_up(record, Failure.DEADLINE, now)

    def _give_up(self, record: _JobRecord, failure: Failure, now: float) -> None:
        """Fail a load's chunks, but for those being copied, whose blocks are being written."""
        record.deadline = math.inf
        claims = [claim for claim in record.claims if claim in claim.read.claims]
        for claim in claims:
            read = claim.read
            if read.state is State.COPYING_IN:
                continue
            read.claims.remove(claim)
            self._end_chunk(record, claim.chunk, failure, now)
            if not read.claims:
                self._abandon_read(read)

    def _abandon_read(self, read: _Read) -> None:
        if read.state is State.WAITING:
            self._reads_waiting.remove(read)
        elif read.state is State.OPENED:
            self._reads_opened.remove(read)
        elif read.state is State.READ:
            self._reads_ready.remove(read)
        else:
            self._forget(read)  # its operation in flight ends it
            return
        read.move(Event.ABANDON)
        self._end_read(read)

    def _forget(self, read: _Read) -> None:
        if self._reads.get(read.chunk.key) is read:
            del self._reads[read.chunk.key]

    def _end_read(self, read: _Read) -> None:
        self._forget(read)
        if read.descriptor >= 0:
            self._in_background(Action.CLOSE, descriptor=read.descriptor)
            read.descriptor = -1
        if read.slot >= 0:
            self._ledger.release(read.slot)
            read.slot = -1

    def _fail_read(self, read: _Read, failure: Failure) -> None:
        read.move(Event.FAIL)
        claims, read.claims = read.claims, []
        for claim in claims:
            self._end_chunk(claim.record, claim.chunk, failure, self._now)
        self._end_read(read)

    def _open_files(self, operations: list[Operation]) -> None:
        while (
            self._reads_waiting
            and self._opening + len(self._reads_opened) < self._limits.open_lookahead
        ):
            read = self._reads_waiting.popleft()
            read.move(Event.ISSUE)
            self._opening += 1
            operations.append(
                self._file(Action.OPEN, partial(self._opened, read), path=read.chunk.path)
            )

    def _opened(self, read: _Read, done: Completion) -> None:
        self._opening -= 1
        if done.result < 0:
            self._fail_read(read, failure_of(done.result))
            return
        read.descriptor = done.result
        read.move(Event.SUCCEED)
        if read.claims:
            self._reads_opened.append(read)
        else:
            read.move(Event.ABANDON)
            self._end_read(read)

    def _start_reads(self, operations: list[Operation]) -> None:
        while self._reads_opened and self._io < self._limits.io_depth and self._ledger.free:
            read = self._reads_opened.popleft()
            read.move(Event.ISSUE)
            read.slot = self._ledger.lease()
            self._io += 1
            operations.append(
                self._file(
                    Action.READ,
                    partial(self._read_done, read),
                    descriptor=read.descriptor,
                    slot=read.slot,
                    length=read.chunk.file_bytes,
                    chunk=read.chunk,
                )
            )

    def _read_done(self, read: _Read, done: Completion) -> None:
        self._io -= 1
        failure = _read_failure(read, done)
        if failure in (Failure.WRONG_CONTENT, Failure.SHORT_TRANSFER):
            # First writer wins, so a file that is not its chunk would stay a miss for ever.
            self._in_background(Action.UNLINK, path=read.chunk.path)
        if failure is not None:
            self._fail_read(read, failure)
            return
        read.move(Event.SUCCEED)
        if not read.claims:
            read.move(Event.ABANDON)
            self._end_read(read)
            return
        self._in_background(Action.CLOSE, descriptor=read.descriptor)
        read.descriptor = -1
        read.claims[0].record.file_bytes += read.chunk.file_bytes
        self._reads_ready.append(read)

    def _copy_in(self, operations: list[Operation]) -> None:
        if not self._reads_ready:
            return
        reads, self._reads_ready = self._reads_ready, []
        copies = []
        for read in reads:
            read.move(Event.ISSUE)
            self._forget(read)
            copies += [
                SlotCopy(read.slot, claim.chunk, claim.record.job.fence) for claim in read.claims
            ]
        operations.append(self._copy(Direction.LOAD, copies, partial(self._copied_in, reads)))

    def _copied_in(self, reads: list[_Read], done: Completion) -> None:
        for read in reads:
            if done.result < 0:
                self._fail_read(read, Failure.DEVICE_COPY)
                continue
            read.move(Event.SUCCEED)
            claims, read.claims = read.claims, []
            for claim in claims:
                claim.record.copied_bytes += claim.chunk.copy_bytes
                self._end_chunk(claim.record, claim.chunk, None, self._now)
            self._end_read(read)

    # --- stores

    def _copy_out(self, operations: list[Operation]) -> None:
        if self._flushing:
            self._writes_waiting = deque(
                sorted(self._writes_waiting, key=lambda write: not self._is_flushed(write))
            )
        while (
            self._writes_waiting and self._store_slots < self._store_slots_max and self._ledger.free
        ):
            write = self._writes_waiting.popleft()
            write.move(Event.ISSUE)
            write.slot = self._ledger.lease()
            self._store_slots += 1
            operations.append(
                self._copy(
                    Direction.STORE,
                    [SlotCopy(write.slot, write.chunk, write.record.job.fence)],
                    partial(self._copied_out, write),
                )
            )
        if self._flushing:
            self._drop_waiting_writes(self._is_flushed, Failure.DROPPED, self._now)
            self._flushing.clear()

    def _is_flushed(self, write: _Write) -> bool:
        return write.record.job.job_id in self._flushing

    def _drop_waiting_writes(
        self, chosen: Callable[[_Write], bool], failure: Failure, now: float
    ) -> None:
        kept: deque[_Write] = deque()
        for write in self._writes_waiting:
            if chosen(write):
                write.move(Event.ABANDON)
                write.record.unsettled -= 1
                self._end_chunk(write.record, write.chunk, failure, now)
                self._end_write(write)
            else:
                kept.append(write)
        self._writes_waiting = kept

    def _copied_out(self, write: _Write, done: Completion) -> None:
        write.record.unsettled -= 1
        if done.result < 0:
            self._fail_write(write, Failure.DEVICE_COPY)
            return
        write.move(Event.SUCCEED)
        if write not in self._writes:
            write.move(Event.ABANDON)
            self._end_write(write)
            return
        self._writes_copied.append(write)

    def _create_files(self, operations: list[Operation]) -> None:
        while (
            self._writes_copied
            and self._creating + len(self._writes_created) < self._limits.open_lookahead
        ):
            write = self._writes_copied.popleft()
            write.temporary = temporary_name(write.chunk.path, self._writer, next(self._names))
            write.move(Event.ISSUE)
            self._creating += 1
            operations.append(self._create(write))

    def _create(self, write: _Write) -> FileOperation:
        return self._file(Action.CREATE, partial(self._created, write), path=write.temporary)

    def _created(self, write: _Write, done: Completion) -> None:
        if done.result == -errno.ENOENT and not write.directory_made:
            write.directory_made = True
            write.move(Event.NO_DIRECTORY)
            directory = write.chunk.path.rpartition("/")[0]
            self._background.append(
                self._file(Action.MKDIR, partial(self._made_directory, write), path=directory)
            )
            return
        self._creating -= 1
        if done.result < 0:
            self._fail_write(write, failure_of(done.result))
            return
        write.descriptor = done.result
        write.move(Event.SUCCEED)
        if write not in self._writes:
            write.move(Event.ABANDON)
            self._end_write(write)
            return
        self._writes_created.append(write)

    def _made_directory(self, write: _Write, done: Completion) -> None:
        if done.result < 0 and done.result != -errno.EEXIST:
            self._creating -= 1
            self._fail_write(write, failure_of(done.result))
            return
        write.move(Event.SUCCEED)
        self._background.append(self._create(write))

    def _start_writes(self, operations: list[Operation]) -> None:
        while (
            self._writes_created
            and self._io < self._limits.io_depth
            and not (self._reads_opened and self._ledger.free)
        ):
            write = self._writes_created.popleft()
            write.move(Event.ISSUE)
            self._io += 1
            operations.append(
                self._file(
                    Action.WRITE,
                    partial(self._written, write),
                    descriptor=write.descriptor,
                    slot=write.slot,
                    length=write.chunk.file_bytes,
                    chunk=write.chunk,
                )
            )

    def _written(self, write: _Write, done: Completion) -> None:
        self._io -= 1
        if done.result != write.chunk.file_bytes:
            # A filesystem that fills up may take a part before it says ENOSPC.
            failure = failure_of(done.result) if done.result < 0 else Failure.SHORT_TRANSFER
            self._fail_write(write, failure)
            return
        write.record.file_bytes += write.chunk.file_bytes
        self._release_store_slot(write)
        write.move(Event.SUCCEED)
        # Closed before it gets its name: a network filesystem writes back at close and
        # reports there what it could not keep (close(2), "close-to-open" in nfs(5)).
        descriptor, write.descriptor = write.descriptor, -1
        self._background.append(
            self._file(Action.CLOSE, partial(self._closed, write), descriptor=descriptor)
        )

    def _closed(self, write: _Write, done: Completion) -> None:
        if done.result < 0:
            self._fail_write(write, failure_of(done.result))
            return
        if write not in self._writes:
            write.move(Event.ABANDON)
            self._end_write(write)
            return
        write.move(Event.SUCCEED)
        self._background.append(
            self._file(
                Action.LINK,
                partial(self._linked, write),
                path=write.temporary,
                target=write.chunk.path,
            )
        )

    def _linked(self, write: _Write, done: Completion) -> None:
        if done.result < 0 and done.result != -errno.EEXIST:
            self._fail_write(write, failure_of(done.result))
            return
        write.move(Event.SUCCEED)
        if write in self._writes:
            if done.result == -errno.EEXIST:
                write.record.present += 1
            write.record.copied_bytes += write.chunk.copy_bytes
            self._end_chunk(write.record, write.chunk, None, self._now)
        self._end_write(write)

    def _drop_writes(self, record: _JobRecord, failure: Failure, now: float) -> None:
        for write in [write for write in record.writes if write in self._writes]:
            self._drop_write(write, failure, now)

    def _drop_write(self, write: _Write, failure: Failure, now: float) -> None:
        """End the chunk; its write ends at once, or when its operation in flight completes."""
        self._writes.discard(write)
        self._end_chunk(write.record, write.chunk, failure, now)
        for queue in (self._writes_waiting, self._writes_copied, self._writes_created):
            if write in queue:
                queue.remove(write)
                write.move(Event.ABANDON)
                self._end_write(write)
                return

    def _fail_write(self, write: _Write, failure: Failure) -> None:
        write.move(Event.FAIL)
        if write in self._writes:
            self._end_chunk(write.record, write.chunk, failure, self._now)
        self._end_write(write)

    def _end_write(self, write: _Write) -> None:
        self._writes.discard(write)
        if write.descriptor >= 0:
            self._in_background(Action.CLOSE, descriptor=write.descriptor)
            write.descriptor = -1
        if write.temporary:
            self._in_background(Action.UNLINK, path=write.temporary)
            write.temporary = ""
        self._release_store_slot(write)

    def _release_store_slot(self, write: _Write) -> None:
        if write.slot >= 0:
            self._ledger.release(write.slot)
            self._store_slots -= 1
            write.slot = -1

    # --- the ends of jobs

    def _end_chunk(
        self, record: _JobRecord, chunk: ChunkTransfer, failure: Failure | None, now: float
    ) -> None:
        record.open -= 1
        if failure is not None:
            record.failures[chunk.key] = failure
        if record.open == 0:
            self._finish(record, now)

    def _finish(self, record: _JobRecord, now: float) -> None:
        record.unsettled = 0
        del self._records[record.job.job_id]
        self._results.append(
            JobResult(
                job_id=record.job.job_id,
                direction=record.job.direction,
                seconds=now - record.submitted_at,
                copied_bytes=record.copied_bytes,
                file_bytes=record.file_bytes,
                chunks=len(record.job.chunks),
                present=record.present,
                failures=record.failures,
            )
        )

    # --- operations

    def _file(
        self,
        action: Action,
        react: Callable[[Completion], None],
        *,
        path: str = "",
        target: str = "",
        descriptor: int = -1,
        slot: int = -1,
        length: int = 0,
        chunk: ChunkTransfer | None = None,
    ) -> FileOperation:
        token = next(self._tokens)
        self._in_flight[token] = react
        return FileOperation(token, action, path, target, descriptor, slot, length, chunk)

    def _in_background(self, action: Action, *, path: str = "", descriptor: int = -1) -> None:
        """Start a clean-up whose outcome changes nothing."""
        self._background.append(
            self._file(action, lambda done: None, path=path, descriptor=descriptor)
        )

    def _copy(
        self, direction: Direction, copies: list[SlotCopy], react: Callable[[Completion], None]
    ) -> CopyOperation:
        token = next(self._tokens)
        self._in_flight[token] = react
        return CopyOperation(token, direction, tuple(copies))


def _same_file(read: _Read, chunk: ChunkTransfer) -> bool:
    return read.chunk.path == chunk.path and read.chunk.span.covers(chunk.span)


def _read_failure(read: _Read, done: Completion) -> Failure | None:
    if done.result < 0:
        return failure_of(done.result)
    if done.result != read.chunk.file_bytes:
        return Failure.SHORT_TRANSFER
    return None if done.defect is None else Failure.WRONG_CONTENT
