# SPDX-License-Identifier: Apache-2.0
"""Asks the filesystem whether files exist, and never waits long for its answer.

stat(2) on a filesystem that hangs (a network filesystem whose server is gone, a drive that no
longer answers) does not return, and cannot be interrupted: it would take the engine's scheduler
with it. So it is called on a thread of its own, for whose answer the scheduler waits a while. If
none comes, the file counts as missing, and so do all others, at once, until the thread is back.

A thread's answer costs about ten times the system call. Most need none: openat2(2) with
RESOLVE_CACHED (Linux 5.12) finds what the kernel knows by itself, names that exist and names that
do not, and says EAGAIN instead of asking the filesystem. On network filesystems it heeds how
long such knowledge is valid.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable

from pykvcache.openat2 import RESOLVE_CACHED, OpenHow, openat2

_HOW = OpenHow(os.O_PATH | os.O_CLOEXEC, 0, RESOLVE_CACHED)

_ABSENT = -errno.ENOENT
_UNKNOWN = -errno.EAGAIN


def known_existence(path: str) -> bool | None:
    """Whether the file exists, as far as the kernel knows without asking the filesystem; None
    where it does not, or where there is no such system call."""
    found = openat2(os.fsencode(path), _HOW)
    if found >= 0:
        os.close(found)
        return True
    return False if found == _ABSENT else None


class _Question:
    """One look at the filesystem."""

    __slots__ = ("answer", "answered", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.answer = False
        self.answered = threading.Lock()
        self.answered.acquire()


class Existence:
    """Used by one thread, the scheduler's."""

    def __init__(
        self,
        root: str,
        timeout_s: float,
        log: logging.Logger,
        *,
        exists: Callable[[str], bool] = os.path.exists,
        known: Callable[[str], bool | None] = known_existence,
    ) -> None:
        """Args:
        root: named in the log.
        timeout_s: for which an answer is waited for.
        log: told when the filesystem stops answering, and when it goes on.
        exists: asks the filesystem.
        known: answers at once, or None.
        """
        self._root = root
        self._timeout_s = timeout_s
        self._log = log
        self._exists = exists
        self._known = known
        self._thread: threading.Thread | None = None
        self._questions: list[_Question | None] = []
        self._bell = threading.Semaphore(0)
        self._pending: _Question | None = None
        self.unanswered = 0
        """Times that a file counted as missing for want of an answer."""

    def __call__(self, path: str) -> bool:
        """Whether the file exists; False when there is no answer in time."""
        if self._pending is not None and not self._is_back():
            self.unanswered += 1
            return False
        known = self._known(path)
        return self._ask(path) if known is None else known

    def close(self) -> None:
        """End the thread, which has nothing to do or never ends anyway."""
        if self._thread is not None:
            self._questions.append(None)
            self._bell.release()
            self._thread = None

    def _is_back(self) -> bool:
        assert self._pending is not None
        if not self._pending.answered.acquire(blocking=False):
            return False
        self._pending = None
        self._log.info("KV offloading: the filesystem of '%s' answers again", self._root)
        return True

    def _ask(self, path: str) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="pykvcache-existence", daemon=True
            )
            self._thread.start()
        question = _Question(path)
        self._questions.append(question)
        self._bell.release()
        if question.answered.acquire(timeout=self._timeout_s):
            return question.answer
        self._pending = question
        self.unanswered += 1
        self._log.warning(
            "KV offloading: the filesystem of '%s' has not answered for %.2g s; until it does, "
            "nothing is found there, and requests are computed",
            self._root,
            self._timeout_s,
        )
        return False

    def _run(self) -> None:
        while True:
            self._bell.acquire()
            question = self._questions.pop()
            if question is None:
                return
            question.answer = self._exists(question.path)
            question.answered.release()
