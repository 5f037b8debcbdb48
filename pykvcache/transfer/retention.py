# SPDX-License-Identifier: Apache-2.0
"""Which chunk leaves DRAM first: least recently used, or ARC.

A policy orders the keys of resident chunks; it moves nothing. Whoever uses it says what
happened (:meth:`hit`, :meth:`miss`, :meth:`admit`) and asks for victims when it needs slots,
which may be several before the next admission, or none for long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from pykvcache.errors import InvariantError

_Keys = OrderedDict[bytes, None]
"""From the least to the most recently used."""


class RetentionPolicy(ABC):
    """The order in which resident chunks are evicted.

    Args:
        capacity: resident chunks at most; the pool's slots.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def hit(self, key: bytes) -> None:
        """A resident chunk was used.

        Raises:
            InvariantError: it is not resident.
        """

    @abstractmethod
    def miss(self, key: bytes) -> None:
        """A chunk that is not resident is wanted; before it is admitted, and before victims
        are chosen for it.

        Raises:
            InvariantError: it is resident.
        """

    @abstractmethod
    def admit(self, key: bytes, *, cold: bool = False) -> None:
        """A chunk becomes resident.

        Args:
            key: of the chunk.
            cold: nobody has asked for it yet, so it is the first to go.

        Raises:
            InvariantError: it is resident already, or as many as the capacity are.
        """

    @abstractmethod
    def evict(self, may_evict: Callable[[bytes], bool]) -> bytes | None:
        """Choose the next victim, which ceases to be resident; None when none may go."""

    @abstractmethod
    def discard(self, key: bytes) -> None:
        """A chunk ceases to be resident for another reason; nothing is remembered of it."""

    @abstractmethod
    def __contains__(self, key: bytes) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...


def _require(holds: bool, key: bytes, what: str) -> None:
    if not holds:
        raise InvariantError(f"chunk {key.hex()} {what}")


def _first(keys: _Keys, may_evict: Callable[[bytes], bool]) -> bytes | None:
    return next((key for key in keys if may_evict(key)), None)


class LruPolicy(RetentionPolicy):
    """Least recently used first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._keys: _Keys = OrderedDict()

    def hit(self, key: bytes) -> None:
        _require(key in self._keys, key, "is hit but not resident")
        self._keys.move_to_end(key)

    def miss(self, key: bytes) -> None:
        _require(key not in self._keys, key, "is missed but resident")

    def admit(self, key: bytes, *, cold: bool = False) -> None:
        _require(key not in self._keys, key, "is admitted twice")
        _require(len(self._keys) < self.capacity, key, "is admitted beyond the capacity")
        self._keys[key] = None
        if cold:
            self._keys.move_to_end(key, last=False)

    def evict(self, may_evict: Callable[[bytes], bool]) -> bytes | None:
        victim = _first(self._keys, may_evict)
        if victim is not None:
            del self._keys[victim]
        return victim

    def discard(self, key: bytes) -> None:
        self._keys.pop(key, None)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)


class ArcPolicy(RetentionPolicy):
    """ARC: recency and frequency, balanced by what turned out to have left too early.

    Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003,
    figure 4). T1 holds chunks used once lately, T2 those used more often; B1 and B2 remember
    the keys that left them, and ``target`` (the paper's p) is the size T1 should have.

    Driven by one miss, one victim when full, and one admission at a time, it decides as the
    paper does. The pool departs from that: victims are taken when slots are short, pinned
    chunks are passed over, and a chunk may be admitted that nobody has missed. The
    paper's bounds hold all the same, because ghosts are trimmed at each admission:
    |T1| + |B1| <= c, and all four lists together <= 2c.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._t1: _Keys = OrderedDict()
        self._t2: _Keys = OrderedDict()
        self._b1: _Keys = OrderedDict()
        self._b2: _Keys = OrderedDict()
        self.target = 0.0
        self._incoming_from_b2 = False

    def hit(self, key: bytes) -> None:
        _require(key in self, key, "is hit but not resident")
        self._t1.pop(key, None)
        self._t2.pop(key, None)
        self._t2[key] = None

    def miss(self, key: bytes) -> None:
        _require(key not in self, key, "is missed but resident")
        self._incoming_from_b2 = key in self._b2
        b1, b2 = len(self._b1), len(self._b2)
        if key in self._b1:
            self.target = min(float(self.capacity), self.target + max(b2 / b1, 1.0))
        elif key in self._b2:
            self.target = max(0.0, self.target - max(b1 / b2, 1.0))
        elif len(self._t1) + b1 >= self.capacity:  # case IV A; if T1 is full, its victim goes
            self._trim_b1()
        else:
            self._trim_b2()

    def _trim_b1(self) -> None:
        while self._b1 and len(self._t1) + len(self._b1) >= self.capacity:
            self._b1.popitem(last=False)

    def _trim_b2(self) -> None:
        while self._b2 and self._size() >= 2 * self.capacity:
            self._b2.popitem(last=False)

    def _size(self) -> int:
        return len(self._t1) + len(self._t2) + len(self._b1) + len(self._b2)

    def admit(self, key: bytes, *, cold: bool = False) -> None:
        _require(key not in self, key, "is admitted twice")
        _require(len(self) < self.capacity, key, "is admitted beyond the capacity")
        was_ghost = key in self._b1 or key in self._b2
        self._b1.pop(key, None)
        self._b2.pop(key, None)
        self._incoming_from_b2 = False
        if was_ghost and not cold:
            self._t2[key] = None
            return
        self._trim_b1()
        self._trim_b2()
        self._t1[key] = None
        if cold:
            self._t1.move_to_end(key, last=False)

    def evict(self, may_evict: Callable[[bytes], bool]) -> bytes | None:
        t1 = len(self._t1)
        from_t1 = t1 > 0 and (t1 > self.target or (self._incoming_from_b2 and t1 == self.target))
        lists = ((self._t1, self._b1), (self._t2, self._b2))
        for residents, ghosts in lists if from_t1 else lists[::-1]:
            victim = _first(residents, may_evict)
            if victim is not None:
                del residents[victim]
                # |T1| = c: the paper deletes the page and remembers nothing (case IV A).
                is_full = residents is self._t1 and t1 >= self.capacity
                if not is_full or self._incoming_from_b2:
                    ghosts[victim] = None
                return victim
        return None

    def discard(self, key: bytes) -> None:
        self._t1.pop(key, None)
        self._t2.pop(key, None)

    def __contains__(self, key: bytes) -> bool:
        return key in self._t1 or key in self._t2

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)


def make_policy(name: Literal["lru", "arc"], capacity: int) -> RetentionPolicy:
    """The policy of that name."""
    return ArcPolicy(capacity) if name == "arc" else LruPolicy(capacity)
