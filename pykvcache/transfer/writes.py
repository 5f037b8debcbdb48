# SPDX-License-Identifier: Apache-2.0
"""Writes: from the device's blocks to a published file."""

from __future__ import annotations

import errno
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from pykvcache.layout import temporary_name
from pykvcache.transfer.issue import Budget, Issued, Operation
from pykvcache.transfer.jobs import Direction, Failure
from pykvcache.transfer.operations import Action, Completion, FileOperation, SlotCopy
from pykvcache.transfer.outcomes import failure_of
from pykvcache.transfer.records import JobRecord, Records, Write
from pykvcache.transfer.states import Event


class Writes:
    """All writes of one worker, in their queues."""

    def __init__(
        self,
        records: Records,
        issued: Issued,
        budget: Budget,
        open_lookahead: int,
        writer: str,
        *,
        syncs: bool,
    ) -> None:
        """Args:
        open_lookahead: files created ahead of their write.
        writer: hex digits that no other writer of the root uses, for temporary names.
        syncs: whether files and directories are to outlive a loss of power.
        """
        self._records = records
        self._issued = issued
        self._budget = budget
        self._open_lookahead = open_lookahead
        self._writer = writer
        self._syncs = syncs
        self._names = itertools.count(1)
        self._wanted: set[Write] = set()
        self._waiting: deque[Write] = deque()
        self._copied: deque[Write] = deque()
        self._created: deque[Write] = deque()
        self._creating = 0
        self._slots = 0
        self._flushing: set[int] = set()

    @property
    def waiting(self) -> int:
        """Chunks that have not been copied from the device."""
        return len(self._waiting)

    @property
    def copied(self) -> int:
        """Chunks in slots whose write has not started."""
        return len(self._copied) + len(self._created)

    @property
    def is_blocked(self) -> bool:
        """Whether a write waits that only needs the disk's queue."""
        return bool(self._created) and not self._budget.has_depth

    def add(self, write: Write) -> None:
        """Take a chunk on."""
        write.record.writes.append(write)
        self._wanted.add(write)
        self._waiting.append(write)

    def flush(self, job_ids: Iterable[int]) -> None:
        """At the next turn, copy what finds a slot of these jobs and drop the rest."""
        self._flushing.update(job_ids)

    def copy_out(self, operations: list[Operation]) -> None:
        """Copy chunks into slots; what is being flushed comes first and does not wait."""
        if self._flushing:
            self._waiting = deque(
                sorted(self._waiting, key=lambda write: not self._is_flushed(write))
            )
        while self._waiting and self._has_slot():
            write = self._waiting.popleft()
            write.move(Event.ISSUE)
            write.slot = self._budget.dram.lease(demand=False)
            self._slots += 1
            operations.append(
                self._issued.copy(
                    Direction.STORE,
                    [SlotCopy(write.slot, write.chunk, write.record.job.fence)],
                    partial(self._on_copied, write),
                )
            )
        if self._flushing:
            self.drop_waiting(self._is_flushed, Failure.DROPPED)
            self._flushing.clear()

    def _has_slot(self) -> bool:
        budget = self._budget
        return self._slots < budget.store_slots_max and budget.dram.available(demand=False) > 0

    def _is_flushed(self, write: Write) -> bool:
        return write.record.job.job_id in self._flushing

    def drop_waiting(self, chosen: Callable[[Write], bool], failure: Failure) -> None:
        """Fail the chosen ones of those that have not been copied from the device."""
        kept: deque[Write] = deque()
        for write in self._waiting:
            if chosen(write):
                write.move(Event.ABANDON)
                write.record.unsettled -= 1
                self._records.end_chunk(write.record, write.chunk, failure)
                self._end_write(write)
            else:
                kept.append(write)
        self._waiting = kept

    def _on_copied(self, write: Write, done: Completion) -> None:
        write.record.unsettled -= 1
        if done.result < 0:
            self._fail_write(write, Failure.DEVICE_COPY)
            return
        write.move(Event.SUCCEED)
        if write not in self._wanted:
            write.move(Event.ABANDON)
            self._end_write(write)
            return
        write.move(Event.ISSUE)
        react = partial(self._on_sealed, write)
        self._issued.follow(self._issued.checksum(Direction.STORE, write.slot, write.chunk, react))

    def _on_sealed(self, write: Write, done: Completion) -> None:
        write.move(Event.SUCCEED)
        if write not in self._wanted:
            write.move(Event.ABANDON)
            self._end_write(write)
            return
        self._copied.append(write)

    def create_files(self, operations: list[Operation]) -> None:
        """Create files ahead of their writes."""
        while self._copied and self._creating + len(self._created) < self._open_lookahead:
            write = self._copied.popleft()
            write.temporary = temporary_name(write.chunk.path, self._writer, next(self._names))
            write.move(Event.ISSUE)
            self._creating += 1
            operations.append(self._create(write))

    def _create(self, write: Write) -> FileOperation:
        return self._issued.file(
            Action.CREATE, partial(self._on_created, write), path=write.temporary
        )

    def _on_created(self, write: Write, done: Completion) -> None:
        if done.result == -errno.ENOENT and not write.directory_made:
            write.directory_made = True
            write.move(Event.NO_DIRECTORY)
            directory = write.chunk.path.rpartition("/")[0]
            self._issued.follow(
                self._issued.file(Action.MKDIR, partial(self._on_directory, write), path=directory)
            )
            return
        self._creating -= 1
        if done.result < 0:
            self._fail_write(write, failure_of(done.result))
            return
        write.descriptor = done.result
        write.move(Event.SUCCEED)
        if write not in self._wanted:
            write.move(Event.ABANDON)
            self._end_write(write)
            return
        self._created.append(write)

    def _on_directory(self, write: Write, done: Completion) -> None:
        if done.result < 0 and done.result != -errno.EEXIST:
            self._creating -= 1
            self._fail_write(write, failure_of(done.result))
            return
        write.move(Event.SUCCEED)
        self._issued.follow(self._create(write))

    def start(self, operations: list[Operation]) -> None:
        """Start writes, after all reads that could start; those that wait for a slot or for
        their bandwidth hold up no store."""
        while (
            self._created
            and self._budget.has_depth
            and self._budget.write_bandwidth.allows(self._records.now)
        ):
            write = self._created.popleft()
            write.move(Event.ISSUE)
            self._budget.io += 1
            self._budget.write_bandwidth.spend(write.chunk.file_bytes)
            operations.append(
                self._issued.file(
                    Action.WRITE,
                    partial(self._on_written, write),
                    descriptor=write.descriptor,
                    slot=write.slot,
                    length=write.chunk.file_bytes,
                    chunk=write.chunk,
                )
            )

    def _on_written(self, write: Write, done: Completion) -> None:
        self._budget.io -= 1
        if done.result != write.chunk.file_bytes:
            # A filesystem that fills up may take a part before it says ENOSPC.
            failure = failure_of(done.result) if done.result < 0 else Failure.SHORT_TRANSFER
            self._fail_write(write, failure)
            return
        write.record.file_bytes += write.chunk.file_bytes
        self._keep_slot(write)
        write.move(Event.SUCCEED)
        if self._syncs:
            self._sync(write, self._on_synced)
        else:
            self._close(write)

    def _sync(self, write: Write, react: Callable[[Write, Completion], None]) -> None:
        self._issued.follow(
            self._issued.file(Action.SYNC, partial(react, write), descriptor=write.descriptor)
        )

    def _on_synced(self, write: Write, done: Completion) -> None:
        if done.result < 0:
            self._fail_write(write, failure_of(done.result))
        else:
            self._close(write)

    def _close(self, write: Write) -> None:
        write.move(Event.SUCCEED)
        # Closed before it gets its name: a network filesystem writes back at close and
        # reports there what it could not keep (close(2), "close-to-open" in nfs(5)).
        descriptor, write.descriptor = write.descriptor, -1
        self._issued.follow(
            self._issued.file(Action.CLOSE, partial(self._on_closed, write), descriptor=descriptor)
        )

    def _on_closed(self, write: Write, done: Completion) -> None:
        if done.result < 0:
            self._fail_write(write, failure_of(done.result))
            return
        if write not in self._wanted:
            write.move(Event.ABANDON)
            self._end_write(write)
            return
        write.move(Event.SUCCEED)
        self._issued.follow(
            self._issued.file(
                Action.LINK,
                partial(self._on_linked, write),
                path=write.temporary,
                target=write.chunk.path,
            )
        )

    def _on_linked(self, write: Write, done: Completion) -> None:
        if done.result < 0 and done.result != -errno.EEXIST:
            self._fail_write(write, failure_of(done.result))
            return
        write.move(Event.SUCCEED)
        is_present = done.result == -errno.EEXIST
        if write in self._wanted and self._syncs and not is_present:
            directory = write.chunk.path.rpartition("/")[0]
            write.to_sync = [directory]
            if write.directory_made:
                write.to_sync.append(directory.rpartition("/")[0])
            self._sync_directory(write)
        else:
            self._publish(write, is_present=is_present)

    def _sync_directory(self, write: Write) -> None:
        path = write.to_sync.pop()
        react = partial(self._on_directory_opened, write)
        self._issued.follow(self._issued.file(Action.OPEN_DIRECTORY, react, path=path))

    def _on_directory_opened(self, write: Write, done: Completion) -> None:
        if done.result < 0:
            self._fail_write(write, failure_of(done.result))
        else:
            write.descriptor = done.result
            self._sync(write, self._on_directory_synced)

    def _on_directory_synced(self, write: Write, done: Completion) -> None:
        if done.result < 0:
            self._fail_write(write, failure_of(done.result))
            return
        if write.to_sync:
            self._issued.clean_up(Action.CLOSE, descriptor=write.descriptor)
            write.descriptor = -1
            self._sync_directory(write)
        else:
            self._publish(write, is_present=False)

    def _publish(self, write: Write, *, is_present: bool) -> None:
        write.move(Event.SUCCEED)
        if write in self._wanted:
            if is_present:
                write.record.present += 1
            write.record.copied_bytes += write.chunk.copy_bytes
            self._records.end_chunk(write.record, write.chunk)
        self._end_write(write)

    def drop(self, record: JobRecord, failure: Failure) -> None:
        """Fail whatever of the job has not been published; none of it will be."""
        for write in [write for write in record.writes if write in self._wanted]:
            self._drop(write, failure)

    def _drop(self, write: Write, failure: Failure) -> None:
        """End the chunk; its write ends at once, or when its operation in flight completes."""
        self._wanted.discard(write)
        self._records.end_chunk(write.record, write.chunk, failure)
        for queue in (self._waiting, self._copied, self._created):
            if write in queue:
                queue.remove(write)
                write.move(Event.ABANDON)
                self._end_write(write)
                return

    def _fail_write(self, write: Write, failure: Failure) -> None:
        if write.kept:
            self._budget.dram.discard(write.chunk.key)
        write.move(Event.FAIL)
        if write in self._wanted:
            self._records.end_chunk(write.record, write.chunk, failure)
        self._end_write(write)

    def _end_write(self, write: Write) -> None:
        self._wanted.discard(write)
        if write.descriptor >= 0:
            self._issued.clean_up(Action.CLOSE, descriptor=write.descriptor)
            write.descriptor = -1
        if write.temporary:
            self._issued.clean_up(Action.UNLINK, path=write.temporary)
            write.temporary = ""
        self._release_slot(write)

    def _keep_slot(self, write: Write) -> None:
        """The chunk has been written: its slot may serve loads until another needs it."""
        slot, write.slot = write.slot, -1
        self._slots -= 1
        chunk = write.chunk
        self._budget.dram.add(chunk, chunk.span, slot, self._records.now, pinned=False)
        write.kept = True

    def _release_slot(self, write: Write) -> None:
        if write.slot >= 0:
            self._budget.ledger.release(write.slot)
            self._slots -= 1
            write.slot = -1
