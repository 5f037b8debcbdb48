# SPDX-License-Identifier: Apache-2.0
"""The interface of the device side: copies between slots and the KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from pykvcache.transfer.operations import Completion, CopyOperation


class Copier(ABC):
    """Carries out copy operations for the reactor's thread.

    Every operation launched completes exactly once. :meth:`fence` is the one method
    that the engine's thread calls.
    """

    poll_s: ClassVar[float] = 0.0
    """Seconds between looks at operations in flight; 0 where launch completes them."""

    @abstractmethod
    def fence(self) -> object:
        """What the device has been given to do so far; copies with this fence start after it."""

    @abstractmethod
    def launch(self, operation: CopyOperation) -> None:
        """Start the copies."""

    @abstractmethod
    def reap(self) -> list[Completion]:
        """The operations that have completed since the last call; does not block."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Operations launched and not yet reaped."""

    def enter_thread(self) -> None:  # noqa: B027  (most copiers need none)
        """Called once on the reactor's thread before the first launch."""

    def close(self) -> None:  # noqa: B027
        """Release resources; nothing is in flight any more."""


class NoCopier(Copier):
    """No device: the data stays in the pool. For measuring the storage path alone."""

    def __init__(self) -> None:
        self._done: list[Completion] = []

    def fence(self) -> object:
        """Nothing to wait for."""
        return None

    def launch(self, operation: CopyOperation) -> None:
        """Complete at once."""
        self._done.append(Completion(operation.token, 0))

    def reap(self) -> list[Completion]:
        """All launched operations."""
        done, self._done = self._done, []
        return done

    @property
    def in_flight(self) -> int:
        """Operations launched and not yet reaped."""
        return len(self._done)
