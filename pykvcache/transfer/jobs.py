# SPDX-License-Identifier: Apache-2.0
"""What crosses into the transfer core and what comes out: jobs, and how each chunk ended."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from pykvcache.layout import BlockSpan


class Direction(enum.StrEnum):
    """Seen from the device, as in vLLM's metric names."""

    LOAD = "load"
    STORE = "store"


class Failure(enum.StrEnum):
    """Why a chunk was not transferred; the ``reason`` label of the failure metrics."""

    NOT_FOUND = "not_found"
    PERMISSION = "permission"
    NO_SPACE = "no_space"
    NO_DESCRIPTORS = "no_descriptors"
    IO_ERROR = "io_error"
    SHORT_TRANSFER = "short_transfer"
    WRONG_CONTENT = "wrong_content"
    TRAILER = "trailer"
    CHECKSUM = "checksum"
    DEVICE_COPY = "device_copy"
    DEADLINE = "deadline"
    DROPPED = "dropped"
    OVERLOAD = "overload"
    PAUSED = "paused"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class ChunkTransfer:
    """One chunk of a job.

    Attributes:
        key: vLLM's offload key.
        path: the final name of its file.
        payload_bytes: bytes of a whole chunk of this group, before padding.
        file_bytes: bytes of the file, a multiple of the page size.
        span: the chunk's blocks that are copied.
        group: index of the KV cache group, in the device's numbering.
        block_ids: the device blocks, one for each block of ``span``.
        copy_bytes: bytes the device copy moves.
        row: where the payload lies instead of in the slot, in memory that is not the pool's;
            -1 for the slot. There is nothing to copy then.
    """

    key: bytes
    path: str
    payload_bytes: int
    file_bytes: int
    span: BlockSpan
    group: int
    block_ids: tuple[int, ...]
    copy_bytes: int
    row: int = -1


@dataclass(frozen=True, slots=True)
class Job:
    """The load or store of one request's chunks.

    ``fence`` is the device's: a copy of this job may only start after it.
    """

    job_id: int
    direction: Direction
    chunks: tuple[ChunkTransfer, ...]
    fence: object = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended.

    Attributes:
        seconds: from submission to the end.
        copied_bytes: bytes copied to or from the device for chunks that succeeded.
        file_bytes: bytes read from or written to files by this job.
        present: chunks of a store that another writer had published already.
        dram: chunks of a load that were in the pool already.
        failures: the chunks that were not transferred, by key.
    """

    job_id: int
    direction: Direction
    seconds: float
    copied_bytes: int
    file_bytes: int
    chunks: int
    present: int = 0
    dram: int = 0
    failures: Mapping[bytes, Failure] = field(default_factory=dict)

    @property
    def success(self) -> bool:
        """Whether every chunk was transferred."""
        return not self.failures
