# SPDX-License-Identifier: Apache-2.0
"""The system call behind each action: flags, modes and checks that both engines share."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pykvcache.layout import PAGE

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
"""Chunks hold what users wrote to the model: for the server's user alone (open(2), mkdir(2))."""

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def read_flags(direct: bool) -> int:
    """Flags of OPEN; a symbolic link in place of a chunk is refused (ELOOP)."""
    return _READ_FLAGS | (os.O_DIRECT if direct else 0)


def create_flags(direct: bool) -> int:
    """Flags of CREATE; a name that exists is refused (EEXIST)."""
    return _CREATE_FLAGS | (os.O_DIRECT if direct else 0)


def encode_path(path: str) -> bytes:
    """The path as the kernel takes it.

    Raises:
        ValueError: it has a NUL, at which the kernel would cut it off, or cannot be encoded.
    """
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise ValueError(f"path {path!r} has a NUL character")
    return encoded


def check_transfer(buffers: Sequence[memoryview], slot: int, length: int) -> None:
    """Check that a transfer lies inside its slot.

    Raises:
        ValueError: it does not; memory of another slot would be read or written.
    """
    if not 0 <= slot < len(buffers):
        raise ValueError(f"slot {slot} of {len(buffers)}")
    if not 0 < length <= len(buffers[slot]):
        raise ValueError(f"transfer of {length} bytes in a slot of {len(buffers[slot])}")


def is_cut_short(transferred: int, wanted: int) -> bool:
    """Whether the rest is worth asking for: the kernel cut the transfer, the file did not end.

    Kernels cut long transfers at page boundaries (MAX_RW_COUNT, or a network filesystem's
    largest request). A count within a page is the end of the file, and a direct transfer
    could not go on from there.
    """
    return 0 < transferred < wanted and transferred % PAGE == 0
