# SPDX-License-Identifier: Apache-2.0
"""Where KV lies in the simulation: the GPU's memory, the pool, and a disk that reads in turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence


class GpuMemory:
    """Chunks of running requests, and the last used ones of others: vLLM's prefix cache."""

    def __init__(self, chunks_max: int) -> None:
        """Args:
        chunks_max: that fit in.
        """
        self._free = chunks_max
        """Neither held, nor reserved, nor kept for others."""
        self._held: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    def match(self, chunks: Sequence[int]) -> int:
        """How many of the chunks, from the first on, are there."""
        for count, key in enumerate(chunks):
            if key not in self._held and key not in self._kept:
                return count
        return len(chunks)

    def admit(self, shared: Sequence[int], own: int) -> bool:
        """Hold chunks that are there, and reserve room for others; False if it has none."""
        kept = sum(key in self._kept for key in shared)
        if self._free + len(self._kept) - kept < own:
            return False
        for key in shared:
            self._kept.pop(key, None)
            self._held[key] = self._held.get(key, 0) + 1
        while self._free < own:
            self._kept.popitem(last=False)
            self._free += 1
        self._free -= own
        return True

    def publish(self, key: int) -> bool:
        """Let others find a chunk that has filled reserved room; False if it is there twice,
        and the room remains reserved."""
        if key in self._held or key in self._kept:
            return False
        self._held[key] = 1
        return True

    def release(self, held: Sequence[int], reserved: int) -> None:
        """A request has ended. The end of its prompt is forgotten first, as in vLLM."""
        self._free += reserved
        for key in reversed(held):
            count = self._held[key] - 1
            if count:
                self._held[key] = count
            else:
                del self._held[key]
                self._kept[key] = None


class Pool:
    """The DRAM tier: the last used chunks."""

    def __init__(self, chunks_max: int) -> None:
        """Args:
        chunks_max: that fit in.
        """
        self._chunks: OrderedDict[int, None] = OrderedDict()
        self._max = chunks_max

    def __contains__(self, key: int) -> bool:
        return key in self._chunks

    def use(self, key: int) -> None:
        """A chunk was stored, read or copied to the GPU."""
        self._chunks[key] = None
        self._chunks.move_to_end(key)
        if len(self._chunks) > self._max:
            self._chunks.popitem(last=False)


class Disk:
    """Files read one after the other: demand loads in their order, and reads ahead, chunk by
    chunk, while nothing else is to be read."""

    def __init__(
        self, read_s: Callable[[int, float], float], on_read: Callable[[int], None]
    ) -> None:
        """Args:
        read_s: seconds that so many chunks take, begun at a time.
        on_read: takes each chunk that was read ahead.
        """
        self._read_s = read_s
        self._on_read = on_read
        self.free_at = 0.0
        self.reading: dict[int, float] = {}
        """When each chunk that is read will be there."""
        self._ahead: deque[tuple[int, float]] = deque()
        self._ahead_keys: set[int] = set()
        self._current: tuple[int, float] | None = None
        """Read ahead, and its end."""

    @property
    def waiting_ahead(self) -> int:
        """Chunks to be read ahead."""
        return len(self._ahead_keys)

    def advance(self, now: float) -> None:
        """Go on to a time."""
        while True:
            if self._current is not None and self._current[1] <= now:
                self._on_read(self._current[0])
                self._current = None
            if self.free_at > now:
                break
            while self._ahead and self._ahead[0][0] not in self._ahead_keys:
                self._ahead.popleft()
            if not self._ahead:
                break
            key, since = self._ahead.popleft()
            self._ahead_keys.discard(key)
            begin = max(self.free_at, since)
            self.free_at = begin + self._read_s(1, begin)
            self._current = key, self.free_at
            self.reading[key] = self.free_at
        if len(self.reading) > 4096:
            self.reading = {key: end for key, end in self.reading.items() if end > now}

    def is_reading(self, key: int, now: float) -> bool:
        """Whether a chunk is read now or in its turn, other than ahead."""
        return self.reading.get(key, -1.0) > now

    def read(self, keys: Sequence[int], now: float) -> float:
        """Read for a load.

        Args:
            keys: those that are read for another already come with them.
            now: seconds.

        Returns:
            When all of it is there.
        """
        own = [key for key in keys if not self.is_reading(key, now)]
        end = max((self.reading[key] for key in keys if self.is_reading(key, now)), default=now)
        if own:
            begin = max(now, self.free_at)
            self.free_at = begin + self._read_s(len(own), begin)
            end = max(end, self.free_at)
            for key in own:
                self.reading[key] = self.free_at
                self._ahead_keys.discard(key)
        return end

    def read_ahead(self, key: int, now: float) -> None:
        """Read a chunk when nothing else is to be read."""
        if key not in self._ahead_keys and not self.is_reading(key, now):
            self._ahead_keys.add(key)
            self._ahead.append((key, now))
