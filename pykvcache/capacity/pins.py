# SPDX-License-Identifier: Apache-2.0
"""Chunks that are never evicted: one empty file each, ``<identity>/pins/<key in hex>``.

A pin outlives its chunk: one that is stored again is pinned again. Whoever evicts checks
each file's pin and removes the file under a lock that ``pin`` takes too, so that what was there
when ``pin`` returned stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from pykvcache.access import make_like, open_like

DIRECTORY = "pins"
_LOCK_NAME = ".lock"


class Pins:
    """The pins of one identity."""

    def __init__(self, identity: Path) -> None:
        self._directory = identity / DIRECTORY

    def keys(self) -> set[str]:
        """Pinned keys in hex."""
        try:
            return {name for name in os.listdir(self._directory) if not name.startswith(".")}
        except OSError:
            return set()

    def holds(self, key: str) -> bool:
        """Whether the key (hex) is pinned."""
        return os.path.lexists(self._directory / key)

    def add(self, key: str) -> None:
        """Pin a key (hex).

        Raises:
            OSError: the directory cannot be written.
        """
        with self.locked():
            os.close(open_like(self._directory / key, os.O_WRONLY))

    def remove(self, key: str) -> bool:
        """Unpin a key (hex); False if it was not pinned.

        Raises:
            OSError: the directory cannot be written.
        """
        try:
            os.unlink(self._directory / key)
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock within the block; held for milliseconds by anyone.

        Raises:
            OSError: the directory cannot be written, or the filesystem has no locks.
        """
        make_like(self._directory)
        descriptor = open_like(self._directory / _LOCK_NAME, os.O_RDWR)
        try:
            with contextlib.suppress(OSError):  # without locks the check alone must do
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
