# SPDX-License-Identifier: Apache-2.0
"""What the core asks the reactor to do, and how it hears that it was done."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pykvcache.layout import BlockSpan, Defect
from pykvcache.transfer.jobs import ChunkTransfer, Direction


class Action(enum.Enum):
    """File operations, named after the system calls they stand for."""

    OPEN = enum.auto()
    """Open ``path`` for reading; the result is a descriptor."""
    CREATE = enum.auto()
    """Create ``path``, which must not exist (O_EXCL), for writing; the result is a descriptor."""
    READ = enum.auto()
    """Read ``length`` bytes from the start of ``descriptor`` into the slot."""
    WRITE = enum.auto()
    """Write ``length`` bytes of the slot at the start of ``descriptor``."""
    OPEN_DIRECTORY = enum.auto()
    """Open ``path`` to sync it; the result is a descriptor."""
    SYNC = enum.auto()
    """Wait until what ``descriptor`` is of is on the storage (fsync(2))."""
    CLOSE = enum.auto()
    LINK = enum.auto()
    """Give ``path`` the second name ``target``, which must not exist."""
    RENAME = enum.auto()
    """Give ``path`` the name ``target`` instead, which is replaced."""
    UNLINK = enum.auto()
    MKDIR = enum.auto()


@dataclass(frozen=True, slots=True)
class FileOperation:
    """One file operation; fields that the action does not use keep their defaults.

    ``chunk`` is what a READ expects to find and a WRITE says it holds.
    """

    token: int
    action: Action
    path: str = ""
    target: str = ""
    descriptor: int = -1
    slot: int = -1
    length: int = 0
    chunk: ChunkTransfer | None = None


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Between a slot and the device blocks of a chunk, not before ``fence``."""

    slot: int
    chunk: ChunkTransfer
    fence: object


@dataclass(frozen=True, slots=True)
class CopyOperation:
    """One launch of device copies; completes as a whole."""

    token: int
    direction: Direction
    copies: tuple[SlotCopy, ...]


@dataclass(frozen=True, slots=True)
class ChecksumOperation:
    """Compute the checksum of the chunk in the slot: for a load to compare it with the one that
    the file names, for a store to complete the slot with its trailer."""

    token: int
    direction: Direction
    slot: int
    chunk: ChunkTransfer


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of an operation.

    ``result`` follows the kernel: negative errno, else the descriptor, the bytes
    transferred, or 0. ``defect`` is set for a whole READ whose trailer is not the
    expected one, and for a load's checksum that differs; ``span`` says which blocks the file
    of a READ holds, unless they are just those of the chunk.
    """

    token: int
    result: int
    defect: Defect | None = None
    span: BlockSpan | None = None
