# SPDX-License-Identifier: Apache-2.0
"""The operations that have been issued, and what each completion sets off."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pykvcache.errors import InvariantError
from pykvcache.pool import SlotLedger
from pykvcache.transfer.bandwidth import Bandwidth
from pykvcache.transfer.dram import Dram
from pykvcache.transfer.jobs import ChunkTransfer, Direction
from pykvcache.transfer.operations import (
    Action,
    ChecksumOperation,
    Completion,
    CopyOperation,
    FileOperation,
    SlotCopy,
)

Operation = FileOperation | CopyOperation | ChecksumOperation
React = Callable[[Completion], None]
Watch = Callable[[Action, int], None]


@dataclass(slots=True)
class Budget:
    """What reads and writes share: the pool's slots, the depth of the disk's queue, and the
    bytes per second."""

    ledger: SlotLedger
    dram: Dram
    io_depth: int
    store_slots_max: int
    """Slots that writes may hold together."""
    read_bandwidth: Bandwidth
    write_bandwidth: Bandwidth
    io: int = 0
    """Reads and writes in flight."""

    @property
    def has_depth(self) -> bool:
        """Whether another read or write may start."""
        return self.io < self.io_depth


class Issued:
    """Hands out tokens; no operation is forgotten before its completion."""

    def __init__(self, watch: Watch = lambda action, result: None) -> None:
        """Args:
        watch: told how each file operation has ended, before what follows from it.
        """
        self._watch = watch
        self._tokens = itertools.count(1)
        self._in_flight: dict[int, tuple[Action | None, React]] = {}
        self._owed: list[Operation] = []

    @property
    def in_flight(self) -> int:
        """Operations issued and not completed."""
        return len(self._in_flight)

    @property
    def owed(self) -> int:
        """Operations to go out with the next turn."""
        return len(self._owed)

    def complete(self, completions: Iterable[Completion]) -> None:
        """Let each completion set off what follows.

        Raises:
            InvariantError: a completion of no operation in flight.
        """
        for completion in completions:
            try:
                action, react = self._in_flight.pop(completion.token)
            except KeyError:
                raise InvariantError(f"operation {completion.token} is not in flight") from None
            if action is not None:
                self._watch(action, completion.result)
            react(completion)

    def file(
        self,
        action: Action,
        react: React,
        *,
        path: str = "",
        target: str = "",
        descriptor: int = -1,
        slot: int = -1,
        length: int = 0,
        chunk: ChunkTransfer | None = None,
    ) -> FileOperation:
        """A file operation to return from this turn."""
        token = next(self._tokens)
        self._in_flight[token] = (action, react)
        return FileOperation(token, action, path, target, descriptor, slot, length, chunk)

    def copy(self, direction: Direction, copies: list[SlotCopy], react: React) -> CopyOperation:
        """A launch of device copies to return from this turn."""
        token = next(self._tokens)
        self._in_flight[token] = (None, react)
        return CopyOperation(token, direction, tuple(copies))

    def checksum(
        self, direction: Direction, slot: int, chunk: ChunkTransfer, react: React
    ) -> ChecksumOperation:
        """A checksum to compute of what has just come into the slot."""
        token = next(self._tokens)
        self._in_flight[token] = (None, react)
        return ChecksumOperation(token, direction, slot, chunk)

    def follow(self, operation: Operation) -> None:
        """Send a step that only the completion of another made possible with the next turn."""
        self._owed.append(operation)

    def clean_up(self, action: Action, *, path: str = "", descriptor: int = -1) -> None:
        """Close or unlink; the outcome changes nothing."""
        self.follow(self.file(action, lambda done: None, path=path, descriptor=descriptor))

    def take_owed(self) -> list[Operation]:
        """What is to go out now."""
        owed, self._owed = self._owed, []
        return owed
