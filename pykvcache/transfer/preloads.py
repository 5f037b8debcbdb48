# SPDX-License-Identifier: Apache-2.0
"""Reading ahead: chunks that requests want which still wait in vLLM's queue.

The list comes whole, in the order in which the requests will run, and replaces the one
before (paper, section 6.5; there one request at a time). A chunk is read into the pool and
stays there, *staged*, until a load takes it. Reading ahead is worth nothing when it is in the
way, so it comes last: it starts only while no load waits for a read, with at most
``preload_depth`` reads in flight, and leaves ``io_depth`` slots that a load finds at once.
A load takes over what is being read for it, and may take the slots of staged chunks.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from pykvcache.transfer.issue import Budget, Operation
from pykvcache.transfer.jobs import ChunkTransfer, Failure
from pykvcache.transfer.reads import Reads

OPENED_PER_READ = 2
"""Files opened or being opened for each read ahead in flight: the next one is ready."""


@dataclass(frozen=True, slots=True)
class PreloadLimits:
    """Units and reasons are those of :class:`pykvcache.config.Config`; 0 slots: never."""

    depth: int = 0
    slots_max: int = 0
    bytes_max: int = 0
    ttl_s: float = math.inf


class Preloads:
    """The chunks wanted ahead, and what has become of them."""

    def __init__(self, reads: Reads, budget: Budget, limits: PreloadLimits) -> None:
        self._reads = reads
        self._budget = budget
        self._dram = budget.dram
        self._limits = limits
        self._wanted: dict[bytes, ChunkTransfer] = {}
        self._todo: deque[ChunkTransfer] = deque()
        self._spent: set[bytes] = set()
        """Wanted chunks that are not read again: they failed, or waited too long."""
        self._next_aging = -math.inf
        self.failures: Counter[Failure] = Counter()

    @property
    def todo(self) -> int:
        """Chunks that wait to be opened."""
        return len(self._todo)

    def want(self, chunks: Sequence[ChunkTransfer]) -> None:
        """Want these, in this order, and nothing else.

        Args:
            chunks: without device blocks; an empty span stands for whatever the file holds.
        """
        if not self._limits.slots_max:
            return
        before = self._wanted
        self._wanted = {chunk.key: chunk for chunk in chunks}
        self._spent &= self._wanted.keys()
        for key in before.keys() - self._wanted.keys():
            self._reads.withdraw(key)
        self._tell_dram()
        self._plan()

    def _tell_dram(self) -> None:
        self._dram.want([key for key in self._wanted if key not in self._spent])

    def _plan(self) -> None:
        self._dram.lost_wanted = False
        self._todo = deque(
            chunk
            for key, chunk in self._wanted.items()
            if key not in self._spent and key not in self._dram and key not in self._reads
        )

    def prepare(self, now: float) -> None:
        """Give up what has failed or waited too long; before stores look for slots."""
        self._count_failures()
        self._age(now)

    def advance(self, now: float, operations: list[Operation], busy: bool) -> None:
        """Open and read ahead as the limits allow.

        Args:
            busy: whether a write waits for the disk's queue; it goes first.
        """
        if self._dram.lost_wanted:
            self._plan()
        if busy or self._reads.is_wanting:
            return
        for read in list(self._reads.preload.opened):
            if read.chunk.key in self._dram:  # stored meanwhile
                self._reads.withdraw(read.chunk.key)
        while self._may_start(now):
            self._reads.start_preload(operations)
        while self._todo and self._may_open():
            chunk = self._todo.popleft()
            if chunk.key not in self._dram and chunk.key not in self._reads:
                self._reads.open_preload(chunk, operations)

    def _may_open(self) -> bool:
        lane = self._reads.preload
        pending = lane.opening + len(lane.opened)
        return (
            pending < OPENED_PER_READ * self._limits.depth
            and len(self._dram.staged) + lane.reading + pending < self._limits.slots_max
        )

    def _may_start(self, now: float) -> bool:
        lane, budget, limits = self._reads.preload, self._budget, self._limits
        if not lane.opened or not budget.has_depth or lane.reading >= limits.depth:
            return False
        size = lane.opened[0].chunk.file_bytes
        ledger = budget.ledger
        return (
            len(self._dram.staged) + lane.reading < limits.slots_max
            and self._has_bytes_for(size)
            and self._dram.available(demand=False) > 0
            and ledger.free + ledger.retained > budget.io_depth
            and budget.read_bandwidth.allows(now, patient=True)
        )

    def _has_bytes_for(self, size: int) -> bool:
        if not self._limits.bytes_max:
            return True
        staged = sum(resident.chunk.file_bytes for resident in self._dram.staged.values())
        return staged + self._reads.preload.reading_bytes + size <= self._limits.bytes_max

    def _count_failures(self) -> None:
        failures, self._reads.preload_failures = self._reads.preload_failures, []
        for key, failure in failures:
            self.failures[failure] += 1
            if key in self._wanted:
                self._spent.add(key)

    def _age(self, now: float) -> None:
        """Chunks staged for too long are not protected any more, nor read again."""
        if now < self._next_aging:
            return
        oldest = min((resident.since for resident in self._dram.staged.values()), default=now)
        if oldest + self._limits.ttl_s <= now:
            self._spent |= {
                key
                for key, resident in self._dram.staged.items()
                if resident.since + self._limits.ttl_s <= now
            }
            self._tell_dram()
            oldest = now
        self._next_aging = oldest + self._limits.ttl_s
