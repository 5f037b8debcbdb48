# SPDX-License-Identifier: Apache-2.0
"""The system call behind each action: flags, modes and checks that both engines share."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from pykvcache import openat2
from pykvcache.layout import PAGE
from pykvcache.openat2 import RESOLVE_NO_SYMLINKS, OpenHow
from pykvcache.reactor.rows import Rows
from pykvcache.transfer.operations import FileOperation

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def read_flags(direct: bool) -> int:
    """Flags of OPEN; a symbolic link in place of a chunk is refused (ELOOP)."""
    return _READ_FLAGS | (os.O_DIRECT if direct else 0)


def directory_flags() -> int:
    """Flags of OPEN_DIRECTORY."""
    return _READ_FLAGS | os.O_DIRECTORY


def create_flags(direct: bool) -> int:
    """Flags of CREATE; a name that exists is refused (EEXIST)."""
    return _CREATE_FLAGS | (os.O_DIRECT if direct else 0)


def open_how(flags: int, mode: int = 0) -> OpenHow:
    """How files of a cache are opened: nowhere on the way is a symbolic link followed, so
    paths must be given without any (realpath(3))."""
    return OpenHow(flags, mode, RESOLVE_NO_SYMLINKS)


def open_file(path: bytes, how: OpenHow) -> int:
    """Open a file. Where a kernel or sandbox has no openat2(2), only a link in place
    of the file itself is refused.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = openat2.openat2(path, how)
    if descriptor >= 0:
        return descriptor
    if -descriptor in (errno.ENOSYS, errno.EPERM):
        return os.open(path, how.flags, how.mode)
    raise OSError(-descriptor, os.strerror(-descriptor), path)


def encode_path(path: str) -> bytes:
    """The path as the kernel takes it.

    Raises:
        ValueError: it has a NUL, at which the kernel would cut it off, or cannot be encoded.
    """
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise ValueError(f"path {path!r} has a NUL character")
    return encoded


def parts_of(
    operation: FileOperation, buffers: Sequence[memoryview], rows: Rows | None
) -> list[memoryview]:
    """The memory that a transfer reads or writes, in the order of the file: the front of its
    slot, or its row and what follows the payload in its slot.

    Raises:
        ValueError: there is no such memory; that of another slot or row would be used.
    """
    slot, rest = operation.slot, operation.length
    if not 0 <= slot < len(buffers):
        raise ValueError(f"slot {slot} of {len(buffers)}")
    parts = []
    if operation.chunk is not None and operation.chunk.row >= 0:
        if rows is None or operation.chunk.payload_bytes != rows.row_bytes:
            raise ValueError(f"no row of {operation.chunk.payload_bytes} bytes")
        parts.append(rows.view(operation.chunk.row))
        rest -= rows.row_bytes
    if not 0 < rest <= len(buffers[slot]):
        raise ValueError(f"transfer of {rest} bytes in a slot of {len(buffers[slot])}")
    return [*parts, buffers[slot][:rest]]


def without_front(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of a transfer of which so many bytes have been moved."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:])
        done = max(0, done - len(part))
    return left


def is_cut_short(transferred: int, wanted: int) -> bool:
    """Whether the rest is worth asking for: the kernel cut the transfer, the file did not end.

    Kernels cut long transfers at page boundaries (MAX_RW_COUNT, or a network filesystem's
    largest request). A count within a page is the end of the file, and a direct transfer
    could not go on from there.
    """
    return 0 < transferred < wanted and transferred % PAGE == 0
