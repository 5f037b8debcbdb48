# SPDX-License-Identifier: Apache-2.0
"""One small file in the root: the lock of whoever evicts, and in it what the last count found.

The lock is flock(2)'s. The kernel drops it with its holder's last descriptor, however that ended,
so nothing has to judge whether a holder is still alive; on NFS the server does so when the
client's lease ends. The file stays: removing it would let two processes lock two files of one
name. The record is written in place, in one write within one page, which needs no free space
and which a reader that comes at the same time sees whole or not as a record at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from pykvcache.access import open_like
from pykvcache.capacity.budget import Usage

FILE_NAME = ".capacity"
NO_SPACE_NAME = ".no-space"
_RECORD_BYTES = 512
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Record:
    """The root's lock file."""

    def __init__(self, root: Path) -> None:
        self._path = root / FILE_NAME
        self._root = root

    @contextlib.contextmanager
    def try_lock(self) -> Iterator[bool]:
        """Hold the lock within the block if nobody else does; says whether it is held.

        Where the filesystem knows no locks it counts as held: two that evict at once remove
        the same files first, and each counts only what it removed itself.

        Raises:
            OSError: the file cannot be made or opened.
        """
        descriptor = open_like(self._path, os.O_RDWR)
        try:
            yield _lock(descriptor)
        finally:
            os.close(descriptor)

    def read(self) -> Usage | None:
        """What the last count found; None if there was none, or it cannot be read just now."""
        try:
            with open(self._path, "rb") as file:
                values = json.loads(file.read(_RECORD_BYTES))
            usage = Usage(**{name: values[name] for name in Usage.__dataclass_fields__})
        except (OSError, ValueError, KeyError, TypeError):
            return None
        numbers = dataclasses.astuple(usage)
        return usage if all(isinstance(number, int | float) for number in numbers) else None

    def write(self, usage: Usage) -> None:
        """Replace the record; without effect where that fails, as it will be counted again."""
        text = json.dumps(dataclasses.asdict(usage)).encode().ljust(_RECORD_BYTES)
        with contextlib.suppress(OSError):
            descriptor = open_like(self._path, os.O_WRONLY)
            try:
                os.pwrite(descriptor, text, 0)
            finally:
                os.close(descriptor)

    def report_no_space(self) -> None:
        """Leave word for whoever evicts that a write found no room: quotas of users don't show
        in the filesystem's free space."""
        with contextlib.suppress(OSError):
            path = self._root / NO_SPACE_NAME
            os.close(open_like(path, os.O_WRONLY))
            os.utime(path)

    def no_space_at_ns(self) -> int:
        """When a write last found no room, nanoseconds of the Unix epoch; 0 for never."""
        try:
            return os.stat(self._root / NO_SPACE_NAME).st_mtime_ns
        except OSError:
            return 0


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno in _UNSUPPORTED
    return True
