# SPDX-License-Identifier: Apache-2.0
"""The transfer core: which operation comes next, within the limits, by priority.

Pure: operations that have completed and the time go in, operations to start come out.
The rules are those of the paper's section 6.4:

* files are opened ahead (``open_lookahead``); a slot is taken only when its read can be
  submitted, and reads and writes in flight together never exceed ``io_depth``;
* every chunk that became readable since the last turn goes to the device in one launch;
* a store runs the other way: slot, device copy, file, and gives its slot back when it
  is written. Stores never hold the last ``io_depth`` slots, so a load finds one;
* what has been read is compared with its checksum before anyone may have it, unless
  ``check_every`` passes it over; what is written has been completed with its own;
* a disk that does not work is left alone for a while (:mod:`pykvcache.transfer.breaker`);
* what has been read stays in DRAM while there is room (:mod:`pykvcache.transfer.dram`);
* ready reads come before new loads, those before stores, and these before reading ahead
  (:mod:`pykvcache.transfer.preloads`). When the engine is about
  to reuse blocks whose store has not been copied, what finds no slot now is dropped.

Two jobs that want the same chunk share one read. An operation in flight is never
forgotten: whatever happened to its job, its slot and its descriptor are given back when
it completes, not before.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pykvcache.errors import InvariantError
from pykvcache.pool import SlotLedger
from pykvcache.transfer.bandwidth import Bandwidth
from pykvcache.transfer.breaker import Breaker
from pykvcache.transfer.dram import Dram
from pykvcache.transfer.issue import Budget, Issued, Operation
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure, Job, JobResult
from pykvcache.transfer.operations import Action, Completion
from pykvcache.transfer.outcomes import failure_of
from pykvcache.transfer.preloads import PreloadLimits, Preloads
from pykvcache.transfer.quarantine import Quarantine
from pykvcache.transfer.reads import Reads
from pykvcache.transfer.records import Records, Write
from pykvcache.transfer.retention import make_policy
from pykvcache.transfer.writes import Writes


@dataclass(frozen=True, slots=True)
class Limits:
    """The core's limits; units and reasons are those of :class:`pykvcache.config.Config`."""

    io_depth: int
    open_lookahead: int
    load_deadline_s: float
    jobs_max: int
    preload: PreloadLimits = field(default_factory=PreloadLimits)
    dram_policy: Literal["none", "lru", "arc"] = "none"
    read_bandwidth_max: int = 0
    write_bandwidth_max: int = 0
    check_every: int = 1
    """Every so many reads the payload's checksum is compared; 0: never."""
    quarantine_files_max: int = 16
    syncs: bool = False
    """Whether a store waits until its chunk would outlive a loss of power."""
    checks_trailers: bool = True
    """Whether a trailer page is asked if it is intact; for who examines reads."""
    pause_after_faults: int = 0
    """See :class:`pykvcache.transfer.breaker.Breaker`, as for the next two."""
    pause_s: float = 1.0
    pause_max_s: float = 60.0


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
        if limits.preload.slots_max > ledger.capacity - limits.io_depth - 1:
            raise InvariantError(
                f"{limits.preload.slots_max} of {ledger.capacity} slots for reading ahead leave no "
                f"store beside io_depth {limits.io_depth}"
            )
        self._limits = limits
        self._records = Records()
        self._breaker = Breaker(limits.pause_after_faults, limits.pause_s, limits.pause_max_s)
        self._issued = Issued(self._watch)
        policy = limits.dram_policy
        self._dram = Dram(
            ledger,
            None if policy == "none" else make_policy(policy, ledger.capacity),
            staged_max=limits.preload.slots_max,
        )
        self._budget = Budget(
            ledger,
            self._dram,
            limits.io_depth,
            store_slots_max=ledger.capacity - limits.io_depth,
            read_bandwidth=Bandwidth(limits.read_bandwidth_max),
            write_bandwidth=Bandwidth(limits.write_bandwidth_max),
        )
        self._reads = Reads(
            self._records,
            self._issued,
            self._budget,
            Quarantine(self._issued, limits.quarantine_files_max),
            open_lookahead=limits.open_lookahead,
            check_every=limits.check_every,
        )
        self._writes = Writes(
            self._records,
            self._issued,
            self._budget,
            limits.open_lookahead,
            writer,
            syncs=limits.syncs,
        )
        self._preloads = Preloads(self._reads, self._budget, limits.preload)
        self._closing = False
        self._wake_at: float | None = None

    # --- what the engine asks for

    def submit(self, job: Job, now: float) -> None:
        """Accept a job; it ends with exactly one result, whatever happens.

        Raises:
            InvariantError: the job's id is in use.
        """
        self._records.now = now
        is_load = job.direction is Direction.LOAD
        refusal = self._refusal(job)
        record = self._records.add(job, now + self._limits.load_deadline_s)
        for chunk in job.chunks:
            is_found = refusal is Failure.PAUSED and is_load and self._dram.find(chunk) is not None
            if refusal is not None and not is_found:
                self._records.end_chunk(record, chunk, refusal)
            elif is_load:
                self._reads.claim(record, chunk)
            else:
                self._writes.add(Write(record, chunk))

    def _refusal(self, job: Job) -> Failure | None:
        if self._closing:
            return Failure.SHUTDOWN
        if len(self._records) >= self._limits.jobs_max:
            return Failure.OVERLOAD
        is_load = job.direction is Direction.LOAD
        if is_load and all(self._dram.find(chunk) is not None for chunk in job.chunks):
            return None
        admitted = self._breaker.admits(self._records.now, is_load=is_load)
        return None if admitted else Failure.PAUSED

    def _watch(self, action: Action, result: int) -> None:
        now = self._records.now
        if result >= 0:
            if action in (Action.READ, Action.WRITE):  # a kernel opens files that it remembers
                self._breaker.succeed(now)
        elif result != -errno.EEXIST:  # another writer was first
            self._breaker.fail(failure_of(result), now)

    def _pause(self) -> None:
        """The breaker has opened: whoever waits for the disk need not wait longer."""
        self._preloads.want(())
        for record in self._records:
            if record.is_load:
                self._reads.give_up(record, Failure.PAUSED)

    def preload(self, chunks: Sequence[ChunkTransfer], now: float) -> None:
        """Read these ahead of the loads that will want them, in this order, and no others."""
        self._records.now = now
        if not self._closing and not self._breaker.is_paused:
            self._preloads.want(chunks)

    def flush(self, job_ids: Iterable[int]) -> None:
        """The device blocks of these stores are about to be reused: at the next turn, copy
        what finds a slot and drop the rest."""
        self._writes.flush(job_ids)

    def forsake(self, job_ids: Iterable[int], now: float) -> None:
        """The device blocks of these stores are reused although they may not have been
        copied: none of their chunks that has not been published may be any more."""
        self._records.now = now
        for record in map(self._records.get, job_ids):
            if record is not None:
                self._writes.drop(record, Failure.DROPPED)

    def settled(self, job_ids: Iterable[int]) -> bool:
        """Whether none of these jobs still needs its device blocks."""
        return all(
            record is None or record.unsettled == 0 for record in map(self._records.get, job_ids)
        )

    def close(self, now: float) -> None:
        """Refuse new jobs, fail loads, drop stores whose data is still on the device; the
        other stores go on."""
        self._records.now = now
        self._closing = True
        self._preloads.want(())
        for record in self._records:
            if record.is_load:
                self._reads.give_up(record, Failure.SHUTDOWN)
        self._writes.drop_waiting(lambda write: True, Failure.SHUTDOWN)

    def abandon(self, now: float) -> None:
        """End every job now, but for loads whose blocks are being written: those end with their
        copy. Operations in flight keep their slots until they complete."""
        self.close(now)
        for record in self._records:
            self._writes.drop(record, Failure.SHUTDOWN)

    # --- what happened

    def complete(self, completions: Iterable[Completion], now: float) -> None:
        """Take in completed operations.

        Raises:
            InvariantError: a completion of no operation in flight.
        """
        self._records.now = now
        self._issued.complete(completions)

    # --- what to do

    def advance(self, now: float) -> list[Operation]:
        """The operations to start now, in order of priority; each completes exactly once."""
        self._records.now = now
        for record in self._records:
            if record.is_load and record.deadline <= now:
                self._breaker.miss_deadline(record.submitted_at, now)
                self._reads.give_up(record, Failure.DEADLINE)
        if self._breaker.take_opening():
            self._pause()
        operations: list[Operation] = []
        self._preloads.prepare(now)
        self._reads.copy_in(operations)
        self._reads.start(operations)
        self._reads.open_files(operations)
        self._writes.copy_out(operations)
        self._writes.start(operations)
        self._writes.create_files(operations)
        self._preloads.advance(now, operations, busy=self._writes.is_blocked)
        wake_at = min(
            self._budget.read_bandwidth.take_wake_at(), self._budget.write_bandwidth.take_wake_at()
        )
        self._wake_at = wake_at if wake_at < math.inf else None
        return operations + self._issued.take_owed()

    def take_results(self) -> list[JobResult]:
        """The jobs that ended since the last call."""
        return self._records.take_results()

    def next_deadline(self) -> float | None:
        """When :meth:`advance` must be called again even if nothing completes."""
        moments = (self._records.next_deadline(), self._wake_at)
        return min((moment for moment in moments if moment is not None), default=None)

    # --- what it looks like

    @property
    def jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self._records)

    @property
    def operations_in_flight(self) -> int:
        """Operations started and not completed."""
        return self._issued.in_flight

    @property
    def depth_is_full(self) -> bool:
        """Whether no read or write can start until another has completed."""
        return not self._budget.has_depth

    @property
    def idle(self) -> bool:
        """No job, and no operation in flight or owed."""
        return not (self._records or self._issued.in_flight or self._issued.owed)

    @property
    def is_paused(self) -> bool:
        """Whether the disk is left alone because it does not work."""
        return self._breaker.is_paused

    def queue_lengths(self) -> dict[str, int]:
        """Chunks in each queue, for metrics."""
        return {
            "load_waiting": self._reads.waiting,
            "load_opened": len(self._reads.demand.opened),
            "store_waiting": self._writes.waiting,
            "store_copied": self._writes.copied,
            "preload_waiting": self._preloads.todo,
            "preload_opened": len(self._reads.preload.opened),
            "io": self._budget.io,
        }

    @property
    def unread(self) -> int:
        """Chunks that the disk still has to read for loads: see :attr:`Reads.unread`."""
        return self._reads.unread

    @property
    def staged(self) -> int:
        """Chunks in DRAM that requests wait for."""
        return len(self._dram.staged)

    @property
    def bytes_read(self) -> int:
        """Bytes read from files since the start, for loads and ahead of them."""
        return self._reads.bytes_read

    @property
    def preload_failures(self) -> Mapping[Failure, int]:
        """Reads ahead that failed since the start; a load would try again."""
        return self._preloads.failures

    def take_dram_changes(self) -> list[tuple[bytes, int]]:
        """See :meth:`pykvcache.transfer.dram.Dram.take_changes`."""
        return self._dram.take_changes()
