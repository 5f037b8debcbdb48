# SPDX-License-Identifier: Apache-2.0
"""What the reactor's thread leaves for the engine's to collect."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Items in order, put by one thread and taken by another."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = threading.Event()

    def put(self, items: Iterable[T]) -> None:
        """Leave these."""
        self._items.extend(items)
        if self._items:
            self._filled.set()

    def take(self) -> list[T]:
        """All that was left since the last call."""
        taken = []
        while self._items:
            taken.append(self._items.popleft())
        return taken

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to take, or after the timeout."""
        self._filled.clear()
        if not self._items:
            self._filled.wait(timeout_s)
