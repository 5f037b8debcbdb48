# SPDX-License-Identifier: Apache-2.0
"""The staging memory of one worker: one allocation, cut into slots of one chunk each.

Kernel facts behind the choices here: contiguous physical memory is the largest lever
on direct I/O throughput (a bio takes few segments when they are large), and only a
private anonymous mapping gets transparent huge pages from ``madvise`` with the usual
settings; on a shared mapping the advice is silently ignored (madvise(2)).
The kernel zeroes a page when it is first touched, which on a virtual machine takes longer than
the read into it. Touching the pool is therefore not left to the transfers (:meth:`Pool.populate`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading

from pykvcache.errors import ConfigError, InvariantError
from pykvcache.layout import PAGE

HUGE_PAGE = 2 << 20
"""Bytes; the transparent huge page of x86-64, and of aarch64 with 4 KiB pages."""

_MADV_POPULATE_WRITE = 23


class SlotLedger:
    """Who has which slot: free + leased + retained = capacity, checked around every change.

    Pure bookkeeping; the memory is :class:`Pool`. A *leased* slot is in use; a *retained*
    one holds a chunk that nobody is using.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._leased: set[int] = set()
        self._retained: set[int] = set()

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def leased(self) -> int:
        """Slots in use."""
        return len(self._leased)

    @property
    def retained(self) -> int:
        """Slots whose chunk stays until the slot is needed."""
        return len(self._retained)

    def lease(self) -> int:
        """Take the slot released last.

        Raises:
            InvariantError: none is free; ask :attr:`free` first.
        """
        if not self._free:
            raise InvariantError("no slot is free")
        slot = self._free.pop()
        self._leased.add(slot)
        self._check()
        return slot

    def release(self, slot: int) -> None:
        """Give a leased slot back.

        Raises:
            InvariantError: it is not leased.
        """
        self._take(slot, self._leased, "released but not leased")
        self._free.append(slot)
        self._check()

    def retain(self, slot: int) -> None:
        """A leased slot is no longer in use, and keeps its chunk.

        Raises:
            InvariantError: it is not leased.
        """
        self._take(slot, self._leased, "retained but not leased")
        self._retained.add(slot)
        self._check()

    def reuse(self, slot: int) -> None:
        """A retained slot is in use again: for its chunk, or to be released.

        Raises:
            InvariantError: it is not retained.
        """
        self._take(slot, self._retained, "used again but not retained")
        self._leased.add(slot)
        self._check()

    @staticmethod
    def _take(slot: int, slots: set[int], mistake: str) -> None:
        if slot not in slots:
            raise InvariantError(f"slot {slot} is {mistake}")
        slots.remove(slot)

    def _check(self) -> None:
        if len(self._free) + len(self._leased) + len(self._retained) != self.capacity:
            raise InvariantError(
                f"{len(self._free)} free + {len(self._leased)} leased + {len(self._retained)} "
                f"retained slots != capacity {self.capacity}"
            )


class Pool:
    """Slots of ``slot_bytes`` bytes each, page-aligned, in one huge-page-backed mapping."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        if slot_bytes % PAGE:
            raise InvariantError(f"slot of {slot_bytes} bytes is not a multiple of {PAGE}")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.size = slots * slot_bytes
        mapped = -(-self.size // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
        self._mapping = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A kernel without transparent huge pages: slower, not wrong.
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(self._mapping)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._offset = -start % HUGE_PAGE
        self.address = start + self._offset
        self.memory = view[self._offset : self._offset + self.size]

    def populate(self, first: int, end: int) -> None:
        """Touch the slots from ``first`` to before ``end``, so that no transfer waits for the
        kernel to zero their pages (MADV_POPULATE_WRITE, Linux 5.14; without it they do wait).

        Slots in use keep what they hold. The interpreter lock is not held meanwhile, as
        ``mmap.madvise`` would.
        """
        start = self.address + first * self.slot_bytes
        length = (min(end, self.slots) - first) * self.slot_bytes
        if length > 0:
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE
            )

    def populate_in_background(self, first: int) -> threading.Thread:
        """Touch all slots from ``first`` on, in the order in which the ledger leases them.

        A DRAM tier goes through the whole pool before it uses a slot again, so that every
        one of its first transfers would pay otherwise.
        """
        thread = threading.Thread(
            target=self._populate_each, args=(first,), name="pykvcache-populate", daemon=True
        )
        thread.start()
        return thread

    def _populate_each(self, first: int) -> None:
        for slot in range(first, self.slots):
            self.populate(slot, slot + 1)

    def view(self, slot: int) -> memoryview:
        """The slot's memory, writable, ``slot_bytes`` long."""
        return self.memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def views(self) -> list[memoryview]:
        """All slots' memory, by slot."""
        return [self.view(slot) for slot in range(self.slots)]


def slots_of(pool_bytes: int, slot_bytes: int, slots_min: int, ranks: int) -> int:
    """How many slots a rank's share of the pool holds.

    Args:
        pool_bytes: the whole pool, all ranks together (``--kv-offloading-size``).
        slot_bytes: bytes of a slot.
        slots_min: fewer would not keep the disk busy (``io_depth + copy_headroom``).
        ranks: workers that share the size.

    Raises:
        ConfigError: fewer than ``slots_min``; the message says the size that would do.
    """
    slots = pool_bytes // ranks // slot_bytes
    if slots < slots_min:
        enough = -(-slots_min * slot_bytes * ranks // (1 << 20)) / 1024
        raise ConfigError(
            f"option --kv-offloading-size is {pool_bytes / (1 << 30):.3g} GiB: the pool would hold "
            f"{slots} slots of {slot_bytes / (1 << 20):.1f} MiB for each of {ranks} ranks, but "
            f"io_depth + copy_headroom needs {slots_min}; at least {_round_up(enough)} GiB would "
            "do, or a smaller io_depth, copy_headroom or tokens_per_chunk"
        )
    return slots


def _round_up(gib: float) -> str:
    return f"{-(-gib * 1000 // 1) / 1000:.3f}"
