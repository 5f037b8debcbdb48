# SPDX-License-Identifier: Apache-2.0
"""Leaves a disk alone that does not work: a circuit breaker.

*Closed*, everything goes through. When so many operations in a row end with a fault of the disk,
or a load meets its deadline and no transfer has succeeded since it came, the breaker *opens*: loads
and stores fail at once, so that requests are computed without waiting. After a pause it is *half
open*: one job goes through, a store where there is one, for which nobody waits. How it ends closes
the breaker or opens it again, then for twice as long.

The pattern is Nygard's ("Release It!", 2007, chapter 5).
"""

from __future__ import annotations

import enum
import math

from pykvcache.transfer.jobs import Failure

FAULTS = frozenset((Failure.IO_ERROR, Failure.PERMISSION, Failure.NO_DESCRIPTORS))
"""A disk that works does not answer so, however full or empty it is."""

PAUSE_FACTOR = 2.0

LOAD_PAUSES = 4.0
"""So many pauses after a fault a load is the trial, if no store has been: a disk that does not
answer costs its request a deadline."""


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
        self._succeeded_at = -math.inf
        self._tried_at = 0.0
        self._is_new = False
        self.position = Position.CLOSED

    @property
    def is_paused(self) -> bool:
        """Whether the disk is not known to work."""
        return self.position is not Position.CLOSED

    def admits(self, now: float, *, is_load: bool) -> bool:
        """Whether a job may use the disk; the first one after a pause is the trial.

        A trial of which nothing is heard is followed by another after the pause, which then
        doubles.
        """
        if self.position is Position.CLOSED:
            return True
        pause_s = self._next_pause_s * (LOAD_PAUSES if is_load else 1.0)
        if now < self._tried_at + pause_s:
            return False
        if self.position is Position.HALF_OPEN:
            self._lengthen()
        self.position = Position.HALF_OPEN
        self._tried_at = now
        return True

    def take_opening(self) -> bool:
        """Whether it has opened from closed since the last call, and is open still."""
        is_new, self._is_new = self._is_new, False
        return is_new

    def succeed(self, now: float) -> None:
        """A read or a write has succeeded."""
        self._succeeded_at = now
        self._close()

    def fail(self, failure: Failure, now: float) -> None:
        """An operation has failed. What only a disk that works says (no space) ends a row of faults
        when it answers a trial; that there is no such file, a kernel knows without the disk."""
        if failure is Failure.NOT_FOUND:
            return
        if failure not in FAULTS:
            if self.position is Position.HALF_OPEN:
                self._close()
            return
        self._faults += 1
        if self.position is Position.HALF_OPEN:
            self._lengthen()
            self.position = Position.OPEN
            self._tried_at = now
        elif self._faults >= self._faults_max:
            self._open(now)

    def miss_deadline(self, submitted_at: float, now: float) -> None:
        """A load has met its deadline."""
        if self._succeeded_at < submitted_at:
            self._open(now)

    def _open(self, now: float) -> None:
        if self.position is Position.CLOSED and self._faults_max:
            self.position = Position.OPEN
            self._tried_at = now
            self._is_new = True

    def _lengthen(self) -> None:
        self._next_pause_s = min(self._next_pause_s * PAUSE_FACTOR, self._pause_max_s)

    def _close(self) -> None:
        self._faults = 0
        self._next_pause_s = self._pause_s
        self._is_new = False
        self.position = Position.CLOSED
