# SPDX-License-Identifier: Apache-2.0
"""Which chunks of waiting requests may be read into memory that they share, and when.

For a cache where a look-up is what starts a read, and the memory for it is taken at once. Left
alone, every request that waits fills that memory, and what was read for one is given up unread
for the next. So a look-up is answered "later" until it is the chunk's turn:

* the first request of the queue runs next: it is given what it needs, whoever else had it;
* the others are given room for all they asked for or for nothing, in the order of the queue while
  all fit, else those with the fewest chunks first, as in :mod:`pykvcache.scheduler.preload`;
* what has been given is theirs until they run or end, or for ``preload_ttl_s``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

SHARE_KEPT = 4
"""A small memory keeps no more than one row in so many from promotions."""


class Verdict(enum.Enum):
    """The answer for a chunk that lies in a file."""

    NOW = enum.auto()
    LATER = enum.auto()
    """Ask in a later step; something that is in the way will have ended."""
    NEVER = enum.auto()
    """The request needs more than fits at once; what goes beyond is recomputed."""


@dataclass(frozen=True, slots=True)
class PromotionLimits:
    """Units and reasons are those of :class:`pykvcache.config.Config`.

    ``rows_max`` is what one request may hold, ``ahead_max`` what all may hold together while
    none of them is next.
    """

    rows_max: int
    ahead_max: int
    requests_max: int
    ttl_s: float


@dataclass(slots=True)
class _Grant:
    since: float
    keys: set[bytes] = field(default_factory=set)


class Promotions:
    """Who holds how much; used by the scheduler's thread alone."""

    def __init__(self, limits: PromotionLimits, clock: Callable[[], float]) -> None:
        """Args:
        limits: see :class:`PromotionLimits`.
        clock: seconds.
        """
        self._limits = limits
        self._clock = clock
        self._grants: dict[str, _Grant] = {}
        self._asked: dict[str, dict[bytes, None]] = {}
        self._planned: dict[str, set[bytes]] = {}
        self._queue: list[str] = []
        self._spent: set[str] = set()
        """Requests that held chunks for too long; they get them again when they are next."""
        self._granted_now = 0
        self.rows_busy = 0
        """Rows that transfers of this tier use, which nobody can take; kept by who starts them."""

    @property
    def rows_held(self) -> int:
        """Rows that requests hold."""
        return sum(len(grant.keys) for grant in self._grants.values())

    def note_queue(self, req_ids: Sequence[str]) -> None:
        """The head of the queue, once a step; without it, who asks first comes first."""
        self._queue = list(req_ids)

    def _is_next(self, req_id: str) -> bool:
        if self._queue:
            return self._queue[0] == req_id
        first = next(iter(self._grants), None) or next(iter(self._asked), req_id)
        return first == req_id

    def ask(self, req_id: str, key: bytes) -> Verdict:
        """A waiting request needs the chunk, which is in a file and not in memory."""
        is_next = self._is_next(req_id)
        self._asked.setdefault(req_id, {})[key] = None
        grant = self._grants.get(req_id)
        held = grant is not None and key in grant.keys  # promoted before, and evicted since
        if not held and not is_next and key not in self._planned.get(req_id, ()):
            return Verdict.LATER
        if not held and grant is not None and len(grant.keys) >= self._limits.rows_max:
            return Verdict.NEVER
        if self.rows_busy + self._granted_now >= self._limits.rows_max:
            return Verdict.LATER
        if grant is None:
            grant = self._grants[req_id] = _Grant(self._clock())
        grant.keys.add(key)
        self._granted_now += 1
        self._make_room(req_id)
        return Verdict.NOW

    def _make_room(self, req_id: str) -> None:
        """Take from the last ones what the next one needs."""
        if self.rows_held <= self._limits.rows_max:
            return
        place = {name: at for at, name in enumerate(self._queue)}
        order = sorted(self._grants, key=lambda name: place.get(name, len(place)))
        for other in reversed(order):
            if self.rows_held <= self._limits.rows_max:
                return
            if other != req_id:
                del self._grants[other]
                self._planned.pop(other, None)

    def end_step(self, started: Iterable[str]) -> None:
        """The step is over; plan whom the next one gives room.

        Args:
            started: requests that run from now on.
        """
        for req_id in started:
            self.release(req_id)
        self._age()
        asked, self._asked, self._granted_now = self._asked, {}, 0
        waiting = []
        for req_id, keys in list(asked.items())[: self._limits.requests_max]:
            grant = self._grants.get(req_id)
            missing = set(keys) if grant is None else keys.keys() - grant.keys
            if missing and req_id not in self._spent:
                waiting.append((req_id, missing))
        room = self._limits.ahead_max - self.rows_held
        if sum(len(keys) for _, keys in waiting) > room:
            waiting.sort(key=lambda request: len(request[1]))
        self._planned = {}
        for req_id, missing in waiting:
            holders = self._grants.keys() | self._planned.keys()
            if len(missing) <= room and len(holders | {req_id}) <= self._limits.requests_max:
                self._planned[req_id] = missing
                room -= len(missing)

    def _age(self) -> None:
        oldest = self._clock() - self._limits.ttl_s
        for req_id in [name for name, grant in self._grants.items() if grant.since <= oldest]:
            del self._grants[req_id]
            self._spent.add(req_id)

    def release(self, req_id: str) -> None:
        """The request runs or has ended."""
        self._grants.pop(req_id, None)
        self._planned.pop(req_id, None)
        self._spent.discard(req_id)
        if req_id in self._queue:
            self._queue.remove(req_id)

    def forget(self) -> None:
        """The memory is empty: nobody holds anything."""
        self._grants, self._asked, self._planned, self._queue = {}, {}, {}, []
        self._spent, self._granted_now = set(), 0


def rows_for_promotions(rows: int, kept: int) -> int:
    """Rows that promotions may take: all but those ``kept`` for stores and for what runs."""
    return max(1, rows - min(kept, rows // SHARE_KEPT))
