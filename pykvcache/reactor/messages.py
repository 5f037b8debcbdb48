# SPDX-License-Identifier: Apache-2.0
"""What the engine's thread sends to the reactor's, and how a job ends that nobody carries out."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure, Job, JobResult


@dataclass(slots=True)
class Flush:
    """Say when the device blocks of these jobs are no longer needed."""

    job_ids: frozenset[int]
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Forsake:
    """The device blocks of these jobs are reused, whatever became of them."""

    job_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Preload:
    """Read these ahead, and no others."""

    chunks: tuple[ChunkTransfer, ...]


Message = Job | Flush | Forsake | Preload


def is_load_in_place(job: Job) -> bool:
    """Whether reads write rows of the job."""
    return job.direction is Direction.LOAD and any(chunk.row >= 0 for chunk in job.chunks)


def failed_result(job: Job, failure: Failure) -> JobResult:
    """All chunks failed alike."""
    return JobResult(
        job_id=job.job_id,
        direction=job.direction,
        seconds=0.0,
        copied_bytes=0,
        file_bytes=0,
        chunks=len(job.chunks),
        failures={chunk.key: failure for chunk in job.chunks},
    )
