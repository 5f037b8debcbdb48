# SPDX-License-Identifier: Apache-2.0
"""A budget of bytes per second, as a token bucket that may go into debt.

A transfer may start while the bucket is not empty and pays its whole size then: however large
a chunk is, the average keeps to the rate. What may wait (reading ahead) starts only while the
bucket is at least half full, so whoever must not wait finds the rest.
"""

from __future__ import annotations

import math

BURST_S = 0.1
"""Seconds of the rate that an unused budget saves up: a few chunks at the rates of a shared
filesystem, too little to be noticed there."""


class Bandwidth:
    """Bytes per second of one direction; without a limit it never refuses."""

    def __init__(self, bytes_per_s: int) -> None:
        """Args:
        bytes_per_s: the limit, 0 for none.
        """
        self._rate = bytes_per_s
        self._burst = bytes_per_s * BURST_S
        self._level = self._burst
        self._at = -math.inf
        self._wake_at = math.inf

    def allows(self, now: float, *, patient: bool = False) -> bool:
        """Whether a transfer may start now.

        Args:
            now: seconds, never less than before.
            patient: whether it leaves half of the burst to others.
        """
        if not self._rate:
            return True
        if self._at > -math.inf:
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        floor = self._burst / 2 if patient else 0.0
        if self._level > floor:
            return True
        # A nanosecond late rather than early: the sum above is rounded.
        missing_s = (floor - self._level) / self._rate
        self._wake_at = min(self._wake_at, now + missing_s * (1 + 1e-9) + 1e-9)
        return False

    def spend(self, size: int) -> None:
        """A transfer of that many bytes has been started."""
        if self._rate:
            self._level -= size

    def take_wake_at(self) -> float:
        """When the earliest of those refused since the last call may start; infinite if none."""
        wake_at, self._wake_at = self._wake_at, math.inf
        return wake_at
