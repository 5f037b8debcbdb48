# SPDX-License-Identifier: Apache-2.0
"""Which chunks go first; pure.

All that is known of a file is its modification time, so that is what carries recency:
whenever a request ends, the files of its whole prefix get one time of use (access times
are mostly switched off). The time is rounded down to ``touch_interval_s``, so that a chunk is
written once an interval however many prefixes share it, and its microseconds count down with
the chunk's position in the prefix. Hence a chunk is never newer than the chunks before it, and
evicting by time takes a prefix from its end: no chunk outlives one it needs.

A file that no request has ended with yet has the time at which it was written.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

DEPTH_MAX = 999_998
"""Tokens before a chunk that its time can tell apart: the microseconds of a second, without 0,
which is what filesystems that keep whole seconds make of any time."""

SECOND_NS = 1_000_000_000
MICROSECOND_NS = 1_000


class Policy(enum.StrEnum):
    """How chunks are ranked."""

    LRU = "lru"
    PREFIX = "prefix"


def time_of_use(now_s: float, depth: int, interval_s: float) -> int:
    """The modification time of a chunk used now.

    Args:
        now_s: seconds of the Unix epoch.
        depth: tokens from the start of the prefix to the chunk's end.
        interval_s: times of use are told apart by this much; at least a second.

    Returns:
        Nanoseconds of the Unix epoch.
    """
    second = int(now_s // interval_s * interval_s)
    return second * SECOND_NS + (DEPTH_MAX + 1 - min(depth, DEPTH_MAX)) * MICROSECOND_NS


def depth_of(time_ns: int) -> int:
    """The depth in a time of use; 0, where a chunk is kept longest, for any other time."""
    microseconds, rest = divmod(time_ns % SECOND_NS, MICROSECOND_NS)
    return DEPTH_MAX + 1 - microseconds if microseconds and not rest else 0


def rank(policy: Policy, time_ns: int, now_ns: int) -> int:
    """What the policy sorts by; the lowest goes first.

    'lru' is the time itself. 'prefix' puts ages that differ by less than a factor of two
    into one class, counted from a minute, and takes the deepest chunk of the oldest class first:
    the beginnings of prefixes, which more requests share, outlive the ends of all prefixes
    of about their age.
    """
    if policy is Policy.LRU:
        return time_ns
    age_class = (max(now_ns - time_ns, 0) // (60 * SECOND_NS)).bit_length()
    return ((64 - age_class) << 96) + ((DEPTH_MAX - depth_of(time_ns)) << 72) + max(time_ns, 0)


@dataclass(frozen=True, slots=True, order=True)
class Victim:
    """A file that may go; sorted by rank, and where that is equal by name."""

    rank: int
    directory: str
    name: str
    size: int
    time_ns: int

    @property
    def path(self) -> str:
        """Of the file."""
        return f"{self.directory}/{self.name}"


class Victims:
    """The first so many in order, of any number offered one by one; in bounded memory."""

    def __init__(self, count: int, after: Victim | None = None) -> None:
        """Args:
        count: how many are kept; twice as many are held meanwhile, some 300 bytes each.
        after: leaves out this one and all before it.
        """
        self._count = count
        self._after = after
        self._held: list[Victim] = []
        self._bound: Victim | None = None
        self.is_complete = True
        """Whether all that were offered (and come after) are kept."""

    def offer(self, victim: Victim) -> None:
        """Keep it if it is among the first."""
        if self._after is not None and victim <= self._after:
            return
        if self._bound is not None and victim > self._bound:
            self.is_complete = False
            return
        self._held.append(victim)
        if len(self._held) >= 2 * self._count:
            self._trim()

    def _trim(self) -> None:
        self._held.sort()
        if len(self._held) > self._count:
            del self._held[self._count :]
            self._bound = self._held[-1]
            self.is_complete = False

    def in_order(self) -> list[Victim]:
        """Those kept, the first to go first."""
        self._trim()
        return self._held
