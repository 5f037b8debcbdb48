# SPDX-License-Identifier: Apache-2.0
"""Leaves a disk alone that does not work: a circuit breaker.

*Closed*, everything goes through. When so many chunks in a row end with a fault of the disk,
it *opens*: loads and stores fail at once, so that requests are computed without waiting. After a
pause it is *half open*: one job goes through, and how it ends closes or opens it again,
then for twice as long.

The pattern is Nygard's ("Release It!", 2007, chapter 5).
"""

from __future__ import annotations

import enum

from pykvcache.transfer.jobs import Failure

FAULTS = frozenset((Failure.IO_ERROR, Failure.PERMISSION, Failure.NO_DESCRIPTORS, Failure.DEADLINE))
"""A disk that works does not answer so, however full or empty it is."""

ANSWERS = frozenset(
    (Failure.NOT_FOUND, Failure.NO_SPACE, Failure.SHORT_TRANSFER, Failure.WRONG_CONTENT)
)
"""What a disk that works may say."""

PAUSE_FACTOR = 2.0


class Position(enum.Enum):
    """Of the breaker."""

    CLOSED = enum.auto()
    OPEN = enum.auto()
    HALF_OPEN = enum.auto()


class Breaker:
    """Of one worker; times in seconds of any clock."""

    def __init__(self, faults_max: int, pause_s: float, pause_max_s: float) -> None:
        """Args:
        faults_max: faults in a row that open it; 0: it stays closed.
        pause_s, pause_max_s: the first pause, and the longest.
        """
        self._faults_max = faults_max
        self._pause_s = pause_s
        self._pause_max_s = pause_max_s
        self._next_pause_s = pause_s
        self._faults = 0
        self._until = 0.0
        self.position = Position.CLOSED
        self.openings = 0
        """Since the start, from closed."""

    @property
    def is_paused(self) -> bool:
        """Whether the disk is not known to work."""
        return self.position is not Position.CLOSED

    def admits(self, now: float) -> bool:
        """Whether a job may use the disk; the first one after a pause is the trial.

        A trial that says nothing of the disk, as it was dropped or found all in memory, is
        followed by another after the same pause.
        """
        if self.position is Position.CLOSED:
            return True
        if now < self._until:
            return False
        self.position = Position.HALF_OPEN
        self._until = now + self._next_pause_s
        return True

    def note(self, failure: Failure | None, now: float) -> bool:
        """A chunk that used the disk has ended.

        Args:
            failure: None if it was transferred.
            now: when.

        Returns:
            Whether the breaker has opened just now.
        """
        if failure in FAULTS:
            return self._note_fault(now)
        if failure is None:
            self._close()
        elif failure in ANSWERS and self.position is Position.HALF_OPEN:
            self._close()
        return False

    def _note_fault(self, now: float) -> bool:
        self._faults += 1
        if self.position is Position.HALF_OPEN:
            self._next_pause_s = min(self._next_pause_s * PAUSE_FACTOR, self._pause_max_s)
        elif self.position is Position.OPEN or not 0 < self._faults_max <= self._faults:
            return False
        else:
            self.openings += 1
        self.position = Position.OPEN
        self._until = now + self._next_pause_s
        return True

    def _close(self) -> None:
        self._faults = 0
        self._next_pause_s = self._pause_s
        self.position = Position.CLOSED
