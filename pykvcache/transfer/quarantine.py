# SPDX-License-Identifier: Apache-2.0
"""Where files go that are not what their name says: kept for people, never more than a few.

They cannot stay: the first writer of a name wins, so they would be misses for ever. The names in
quarantine are numbers that go round, so that it is bounded across restarts and servers too.
"""

from __future__ import annotations

import errno
from functools import partial

from pykvcache.layout import Defect, quarantine_name
from pykvcache.transfer.issue import Issued
from pykvcache.transfer.operations import Action, Completion

_KEPT = frozenset((Defect.NO_TRAILER, Defect.KEY, Defect.IDENTITY, Defect.LENGTH, Defect.CHECKSUM))
"""Something went wrong with these; a file of another format or other blocks is as it should be."""


class Quarantine:
    """Gets bad files out of the way."""

    def __init__(self, issued: Issued, files_max: int) -> None:
        """Args:
        files_max: kept at most; 0 deletes them.
        """
        self._issued = issued
        self._files_max = files_max
        self._moved = 0

    def remove(self, path: str, defect: Defect | None) -> None:
        """Move the file, or delete it if there is nothing to be learnt from it."""
        if defect not in _KEPT or not self._files_max:
            self._issued.clean_up(Action.UNLINK, path=path)
            return
        number = self._moved % self._files_max
        self._moved += 1
        self._move(path, quarantine_name(path, number), is_directory_made=False)

    def _move(self, path: str, target: str, *, is_directory_made: bool) -> None:
        react = partial(self._on_moved, path, target, is_directory_made)
        self._issued.follow(self._issued.file(Action.RENAME, react, path=path, target=target))

    def _on_moved(self, path: str, target: str, is_directory_made: bool, done: Completion) -> None:
        if done.result == -errno.ENOENT and not is_directory_made:
            react = partial(self._on_directory, path, target)
            directory = target.rpartition("/")[0]
            self._issued.follow(self._issued.file(Action.MKDIR, react, path=directory))
        elif done.result < 0:
            self._issued.clean_up(Action.UNLINK, path=path)

    def _on_directory(self, path: str, target: str, done: Completion) -> None:
        if done.result < 0 and done.result != -errno.EEXIST:
            self._issued.clean_up(Action.UNLINK, path=path)
        else:
            self._move(path, target, is_directory_made=True)
