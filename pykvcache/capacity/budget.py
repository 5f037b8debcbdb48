# SPDX-License-Identifier: Apache-2.0
"""How much the root may hold, how much it holds by now, and how much must go; pure.

Usage is counted in the directory. Between two counts it is estimated from the filesystem's
free space, which falls whoever writes; something else that fills the disk makes the estimate too
high and brings the next count forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykvcache.sizes import Size


@dataclass(frozen=True, slots=True)
class Space:
    """A filesystem, in bytes; ``free`` is what this user may still write."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a count found.

    Attributes:
        files, size: chunk files, also in quarantine, and their bytes and those of temporaries.
        pinned: bytes of pinned chunks among them.
        free: bytes free on the filesystem when it began, and what was evicted since.
        at_s: when it ended, seconds of the Unix epoch.
        seconds: how long it took.
    """

    files: int
    size: int
    pinned: int
    free: int
    at_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits.

    Attributes:
        capacity: of the root; None for no other limit than ``free_min``.
        free_min: of the filesystem, left free.
        high, low: shares of the limit at which eviction starts, and down to which it goes.
    """

    capacity: Size | None
    free_min: Size
    high: float
    low: float

    def limit(self, used: int, space: Space) -> int:
        """Bytes that the root may hold, given what it holds and what is free."""
        limit = used + space.free - self.free_min.of(space.total)
        if self.capacity is not None:
            limit = min(limit, self.capacity.of(space.total))
        return max(limit, 0)

    def is_high(self, used: int, space: Space) -> bool:
        """Whether eviction is due."""
        return used > self.high * self.limit(used, space)

    def excess(self, used: int, space: Space) -> int:
        """Bytes that must go: none below the high mark, else all above the low one."""
        if not self.is_high(used, space):
            return 0
        return used - int(self.low * self.limit(used, space))


def estimate(usage: Usage, space: Space) -> int:
    """Bytes in the root by now, at least those counted."""
    return usage.size + max(0, usage.free - space.free)
