# SPDX-License-Identifier: Apache-2.0
"""How the simulator says that a property does not hold, and the ledger it watches."""

from __future__ import annotations

from collections.abc import Callable

from pykvcache.pool import SlotLedger


class Violation(AssertionError):
    """The core did what it must never do."""


def require(holds: object, message: str) -> None:
    """Raise :class:`Violation` unless the property holds."""
    if not holds:
        raise Violation(message)


class WatchedLedger(SlotLedger):
    """Knows which slots are leased and tells the world when one is given back."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.leases: set[int] = set()
        self.on_release: Callable[[int], None] = lambda slot: None
        self.on_retain: Callable[[int], None] = lambda slot: None

    def lease(self) -> int:
        slot = super().lease()
        require(slot not in self.leases, f"slot {slot} is leased twice")
        self.leases.add(slot)
        return slot

    def release(self, slot: int) -> None:
        self.on_release(slot)
        self.leases.discard(slot)
        super().release(slot)

    def retain(self, slot: int) -> None:
        self.on_retain(slot)
        self.leases.discard(slot)
        super().retain(slot)

    def reuse(self, slot: int) -> None:
        require(slot not in self.leases, f"slot {slot} is leased and retained")
        self.leases.add(slot)
        super().reuse(slot)
