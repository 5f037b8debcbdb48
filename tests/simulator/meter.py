# SPDX-License-Identifier: Apache-2.0
"""How full a token bucket is, told from what was started alone.

After any window the bytes started in it are below ``rate * window + burst``, the last transfer
aside: it may start as soon as the bucket is not empty, and puts it into debt.
"""

from __future__ import annotations

import math

from pykvcache.transfer.bandwidth import BURST_S
from tests.simulator.watched import require

ROUNDING = 1e-6
"""Of the burst: the core adds floating-point numbers in another order."""


class Meter:
    """Watches one direction; without a rate it never objects."""

    def __init__(self, bytes_per_s: int) -> None:
        self._rate = bytes_per_s
        self.burst = bytes_per_s * BURST_S
        self._started = 0.0
        self._low = math.inf
        """Least of (bytes started before a start) - rate * (its time)."""

    def level(self, now: float) -> float:
        """Bytes that the budget has left, negative in debt: the burst, less the largest excess
        over the rate in a window that ends now."""
        if not self._rate:
            return math.inf
        return self.burst + min(0.0, self._low - (self._started - self._rate * now))

    def has_some(self, now: float) -> bool:
        """Whether a transfer may surely start."""
        return self.level(now) > self.burst * ROUNDING

    def start(self, size: int, now: float, *, patient: bool) -> None:
        """A transfer was started; reading ahead must leave half of the burst.

        Raises:
            Violation: it had to wait.
        """
        floor = self.burst / 2 if patient else 0.0
        level = self.level(now)
        require(
            level > floor - self.burst * ROUNDING,
            f"started with {level:.0f} bytes of the budget left, needed more than {floor:.0f}",
        )
        self._low = min(self._low, self._started - self._rate * now)
        self._started += size
