# SPDX-License-Identifier: Apache-2.0
"""The DRAM tier: whole chunks that stay in their slots after a transfer.

A chunk is *resident* from the moment its bytes are in a slot. It is *pinned* while a copy
reads it; then its slot is leased. Unpinned, its slot is retained: still full, but given to
whoever needs a slot more. What is retained is always also on disk, or on its way there.

Chunks that waiting requests want (*wanted*, in the order of their use) are kept from
everyone but demand loads, which may take them too, the last wanted first.
Without a policy only wanted chunks stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pykvcache.layout import BlockSpan
from pykvcache.pool import SlotLedger
from pykvcache.transfer.jobs import ChunkTransfer
from pykvcache.transfer.retention import RetentionPolicy


@dataclass(slots=True, eq=False)
class Resident:
    """A chunk in a slot.

    Attributes:
        chunk: names its key and file.
        span: the blocks that the slot holds data of.
        slot: where it is.
        since: when its bytes were there.
        pins: copies that read it.
        listed: whether look-ups find it; false once another one has taken its key.
    """

    chunk: ChunkTransfer
    span: BlockSpan
    slot: int
    since: float
    pins: int = 0
    listed: bool = True


class Dram:
    """All chunks in slots, and who may take a slot from whom."""

    def __init__(self, ledger: SlotLedger, policy: RetentionPolicy | None, staged_max: int) -> None:
        """Args:
        ledger: the pool's slots.
        policy: which chunks stay that nobody waits for; None keeps none.
        staged_max: wanted chunks that are kept from stores and from reading ahead.
        """
        self._ledger = ledger
        self._staged_max = staged_max
        self._policy = policy
        self._residents: dict[bytes, Resident] = {}
        self._wanted: dict[bytes, int] = {}
        self._staged: dict[bytes, Resident] = {}
        self._changes: list[tuple[bytes, int]] = []
        self.lost_wanted = False
        """Whether a wanted chunk has lost its slot; reset by who looks."""

    # --- what it looks like

    def __contains__(self, key: bytes) -> bool:
        return key in self._residents

    @property
    def staged(self) -> dict[bytes, Resident]:
        """Wanted chunks in retained slots, by key."""
        return self._staged

    def available(self, *, demand: bool) -> int:
        """Slots that can be leased, by a demand load or by anyone else."""
        ledger = self._ledger
        return ledger.free + ledger.retained - (0 if demand else len(self._staged))

    def find(self, chunk: ChunkTransfer) -> Resident | None:
        """The resident chunk that holds all blocks of this one, where this one wants them."""
        resident = self._residents.get(chunk.key)
        if resident is None or (resident.chunk.path, resident.chunk.row) != (chunk.path, chunk.row):
            return None
        return resident if resident.span.covers(chunk.span) else None

    def take_changes(self) -> list[tuple[bytes, int]]:
        """Keys that became resident (+1) or ceased to be (-1) since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    # --- slots

    def lease(self, *, demand: bool) -> int:
        """Take a free slot, else one of a retained chunk.

        Raises:
            InvariantError: there is none; ask :meth:`available` first.
        """
        if not self._ledger.free:
            self._evict(demand)
        return self._ledger.lease()

    def _evict(self, demand: bool) -> None:
        victim = self._policy.evict(self._is_evictable) if self._policy is not None else None
        if victim is None and demand and self._staged:
            victim = max(self._staged, key=self._wanted.__getitem__)
            if self._policy is not None:
                self._policy.discard(victim)
            self.lost_wanted = True
        if victim is not None:
            self._free(self._residents[victim])

    def _is_evictable(self, key: bytes) -> bool:
        return self._residents[key].pins == 0 and key not in self._staged

    # --- chunks

    def add(
        self,
        chunk: ChunkTransfer,
        span: BlockSpan,
        slot: int,
        now: float,
        *,
        pinned: bool,
        cold: bool = False,
    ) -> Resident:
        """The leased slot holds the chunk from now on.

        Args:
            chunk: names its key and file.
            span: the blocks that the slot holds data of.
            slot: where it is.
            now: seconds.
            pinned: whether a copy is about to read it.
            cold: whether no request has used it yet.
        """
        resident = Resident(chunk, span, slot, now, pins=int(pinned))
        there = self._residents.get(chunk.key)
        if there is not None and there.pins:
            resident.listed = False
        else:
            if there is not None:
                self._remove(there)
            self._residents[chunk.key] = resident
            self._changes.append((chunk.key, 1))
            if self._policy is not None:
                self._policy.admit(chunk.key, cold=cold)
        if not pinned:
            self._settle(resident)
        return resident

    def miss(self, key: bytes) -> None:
        """A load wants a chunk that is not resident, or not with all the blocks it needs."""
        if self._policy is not None and key not in self._residents:
            self._policy.miss(key)

    def pin(self, resident: Resident) -> None:
        """A load wants the chunk; its slot is leased until :meth:`unpin`."""
        if self._policy is not None:
            self._policy.hit(resident.chunk.key)
        if resident.pins == 0:
            self._ledger.reuse(resident.slot)
            self._staged.pop(resident.chunk.key, None)
        resident.pins += 1

    def unpin(self, resident: Resident) -> None:
        """The copy has ended."""
        resident.pins -= 1
        if resident.pins == 0:
            self._settle(resident)

    def discard(self, key: bytes) -> None:
        """The chunk is not on disk after all; a copy of it that is under way goes on."""
        resident = self._residents.get(key)
        if resident is not None and resident.pins == 0:
            self._remove(resident)

    def want(self, keys: Sequence[bytes]) -> None:
        """These chunks will be wanted, in this order, and no others."""
        self._wanted = {key: rank for rank, key in enumerate(keys)}
        unwanted = [self._staged[key] for key in self._staged.keys() - self._wanted.keys()]
        for resident in unwanted:
            del self._staged[resident.chunk.key]
            if self._policy is None:
                self._free(resident)
        for key in self._wanted:
            there = self._residents.get(key)
            if there is not None and there.pins == 0 and self._may_stage(key):
                self._staged[key] = there

    def _may_stage(self, key: bytes) -> bool:
        return key in self._wanted and len(self._staged) < self._staged_max

    def _settle(self, resident: Resident) -> None:
        key = resident.chunk.key
        stage = self._may_stage(key)
        if resident.listed and (stage or self._policy is not None):
            self._ledger.retain(resident.slot)
            if stage:
                self._staged[key] = resident
            return
        if resident.listed:
            self._unlist(resident)
        self._ledger.release(resident.slot)

    def _remove(self, resident: Resident) -> None:
        if self._policy is not None:
            self._policy.discard(resident.chunk.key)
        self._free(resident)

    def _free(self, resident: Resident) -> None:
        """Give up an unpinned chunk that the policy no longer counts as resident."""
        self._staged.pop(resident.chunk.key, None)
        self._unlist(resident)
        self._ledger.reuse(resident.slot)
        self._ledger.release(resident.slot)

    def _unlist(self, resident: Resident) -> None:
        resident.listed = False
        del self._residents[resident.chunk.key]
        self._changes.append((resident.chunk.key, -1))
