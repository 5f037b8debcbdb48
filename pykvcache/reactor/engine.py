# SPDX-License-Identifier: Apache-2.0
"""The interface of an I/O engine. Both engines pass one contract test suite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from pykvcache.transfer.operations import Completion, FileOperation


class IoEngine(ABC):
    """Carries out file operations asynchronously, for one thread: the reactor's.

    Made, used and closed on that thread. Every operation submitted completes exactly
    once, in any order, also when it fails; an operation that the engine cannot even
    start completes with the errno.
    """

    name: ClassVar[str]

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that polls readable while completions wait to be reaped."""

    def transfers_fileno(self) -> int:
        """The same, but steps (what is not a READ or WRITE) need not make it readable.

        Who can start no transfer anyway need not be woken for an opened or closed file.
        """
        return self.fileno()

    @abstractmethod
    def submit(self, operations: Sequence[FileOperation]) -> None:
        """Start the operations; does not block on the device."""

    @abstractmethod
    def reap(self) -> list[Completion]:
        """The operations that have completed since the last call; does not block."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Operations submitted and not yet reaped."""

    @abstractmethod
    def close(self) -> None:
        """Release the engine's resources.

        Raises:
            InvariantError: operations are in flight; their buffers would be written later.
        """
