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

from collections.abc import Iterable
from dataclasses import dataclass

from pykvcache.errors import InvariantError
from pykvcache.pool import SlotLedger
from pykvcache.transfer.issue import Budget, Issued, Operation
from pykvcache.transfer.jobs import Direction, Failure, Job, JobResult
from pykvcache.transfer.operations import Completion
from pykvcache.transfer.reads import Reads
from pykvcache.transfer.records import Records, Write
from pykvcache.transfer.writes import Writes


@dataclass(frozen=True, slots=True)
class Limits:
    """The core's limits; units and reasons are those of :class:`pykvcache.config.Config`."""

    io_depth: int
    open_lookahead: int
    load_deadline_s: float
    jobs_max: int


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
        self._records = Records()
        self._issued = Issued()
        self._budget = Budget(
            ledger, limits.io_depth, store_slots_max=ledger.capacity - limits.io_depth
        )
        self._reads = Reads(self._records, self._issued, self._budget, limits.open_lookahead)
        self._writes = Writes(
            self._records,
            self._issued,
            self._budget,
            limits.open_lookahead,
            writer,
        )
        self._closing = False

    # --- what the engine asks for

    def submit(self, job: Job, now: float) -> None:
        """Accept a job; it ends with exactly one result, whatever happens.

        Raises:
            InvariantError: the job's id is in use.
        """
        self._records.now = now
        refusal = self._refusal()
        record = self._records.add(job, now + self._limits.load_deadline_s)
        for chunk in job.chunks:
            if refusal is not None:
                self._records.end_chunk(record, chunk, refusal)
            elif job.direction is Direction.LOAD:
                self._reads.claim(record, chunk)
            else:
                self._writes.add(Write(record, chunk))

    def _refusal(self) -> Failure | None:
        if self._closing:
            return Failure.SHUTDOWN
        return Failure.OVERLOAD if len(self._records) >= self._limits.jobs_max else None

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
                self._reads.give_up(record, Failure.DEADLINE)
        operations: list[Operation] = []
        self._reads.copy_in(operations)
        self._reads.start(operations)
        self._reads.open_files(operations)
        self._writes.copy_out(operations)
        self._writes.start(operations, self._reads.opened)
        self._writes.create_files(operations)
        return operations + self._issued.take_owed()

    def take_results(self) -> list[JobResult]:
        """The jobs that ended since the last call."""
        return self._records.take_results()

    def next_deadline(self) -> float | None:
        """When :meth:`advance` must be called again even if nothing completes."""
        return self._records.next_deadline()

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

    def queue_lengths(self) -> dict[str, int]:
        """Chunks in each queue, for metrics."""
        return {
            "load_waiting": self._reads.waiting,
            "load_opened": self._reads.opened,
            "store_waiting": self._writes.waiting,
            "store_copied": self._writes.copied,
            "io": self._budget.io,
        }
