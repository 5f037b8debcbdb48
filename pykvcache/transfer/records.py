# SPDX-License-Identifier: Apache-2.0
"""What the core knows of each job and of each chunk on its way."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pykvcache.errors import InvariantError
from pykvcache.layout import BlockSpan
from pykvcache.transfer.dram import Resident
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure, Job, JobResult
from pykvcache.transfer.states import Event, State, next_read_state, next_write_state


@dataclass(slots=True)
class JobRecord:
    """A job that has not ended."""

    job: Job
    submitted_at: float
    deadline: float
    """When a load is given up; infinite once it has been."""
    unsettled: int
    """Chunks whose device blocks are still needed."""
    open: int
    """Chunks that have not ended."""
    failures: dict[bytes, Failure] = field(default_factory=dict)
    copied_bytes: int = 0
    file_bytes: int = 0
    present: int = 0
    dram: int = 0
    claims: list[Claim] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)

    @property
    def is_load(self) -> bool:
        """Whether it is a load."""
        return self.job.direction is Direction.LOAD


@dataclass(slots=True, eq=False)
class Claim:
    """A load's interest in a read."""

    record: JobRecord
    chunk: ChunkTransfer
    read: Read


@dataclass(slots=True, eq=False)
class Lane:
    """Reads that have left their queue: those that loads wait for, or those ahead of loads."""

    opening: int = 0
    opened: deque[Read] = field(default_factory=deque)
    reading: int = 0
    reading_bytes: int = 0


@dataclass(slots=True, eq=False)
class Read:
    """A file on its way to the device, for everyone who claims it; ahead of loads, on its way
    to the pool."""

    chunk: ChunkTransfer
    lane: Lane
    claims: list[Claim] = field(default_factory=list)
    state: State = State.WAITING
    descriptor: int = -1
    slot: int = -1
    span: BlockSpan | None = None
    """The blocks that the file holds, unless they are just those of the chunk."""
    resident: Resident | None = None
    """The chunk in its slot, once it is there; pinned."""

    def move(self, event: Event) -> None:
        """Follow the table of transitions."""
        self.state = next_read_state(self.state, event)


@dataclass(slots=True, eq=False)
class Write:
    """A chunk on its way to its file."""

    record: JobRecord
    chunk: ChunkTransfer
    state: State = State.WAITING
    descriptor: int = -1
    slot: int = -1
    temporary: str = ""
    directory_made: bool = False
    to_sync: list[str] = field(default_factory=list)
    """Directories whose new entry is not on the storage yet, the nearest first."""
    kept: bool = False
    """Whether its slot has been handed to the DRAM tier."""

    def move(self, event: Event) -> None:
        """Follow the table of transitions."""
        self.state = next_write_state(self.state, event)


class Records:
    """The open jobs, and the results of those that ended."""

    def __init__(self) -> None:
        self.now = 0.0
        """The time of the turn, in seconds of the reactor's clock."""
        self._open: dict[int, JobRecord] = {}
        self._results: list[JobResult] = []

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(list(self._open.values()))

    def get(self, job_id: int) -> JobRecord | None:
        """The record of an open job; None for one that has ended."""
        return self._open.get(job_id)

    def add(self, job: Job, deadline: float) -> JobRecord:
        """Open a job. One without chunks ends at once.

        Raises:
            InvariantError: the job's id is in use.
        """
        if job.job_id in self._open:
            raise InvariantError(f"job {job.job_id} is submitted twice")
        record = JobRecord(job, self.now, deadline, len(job.chunks), len(job.chunks))
        self._open[job.job_id] = record
        if not job.chunks:
            self._finish(record)
        return record

    def end_chunk(
        self, record: JobRecord, chunk: ChunkTransfer, failure: Failure | None = None
    ) -> None:
        """One of the job's chunks has been transferred, or has failed; the last ends the job."""
        record.open -= 1
        if failure is not None:
            record.failures[chunk.key] = failure
        if record.open == 0:
            self._finish(record)

    def _finish(self, record: JobRecord) -> None:
        record.unsettled = 0
        del self._open[record.job.job_id]
        self._results.append(
            JobResult(
                job_id=record.job.job_id,
                direction=record.job.direction,
                seconds=self.now - record.submitted_at,
                copied_bytes=record.copied_bytes,
                file_bytes=record.file_bytes,
                chunks=len(record.job.chunks),
                present=record.present,
                dram=record.dram,
                failures=record.failures,
            )
        )

    def take_results(self) -> list[JobResult]:
        """The jobs that ended since the last call."""
        results, self._results = self._results, []
        return results

    def next_deadline(self) -> float | None:
        """The earliest deadline of a load that has not been given up."""
        deadlines = (record.deadline for record in self._open.values() if record.is_load)
        return min((moment for moment in deadlines if moment < math.inf), default=None)
