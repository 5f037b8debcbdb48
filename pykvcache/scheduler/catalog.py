# SPDX-License-Identifier: Apache-2.0
"""What the scheduler knows of chunks. The files are the truth; this only remembers.

Looking up changes nothing but the memory of what was found. A chunk is held when every
rank has published its file, so one that is still being stored is never offered. A
chunk that failed to load is a miss for a while, whatever the filesystem says: the
request that is recomputed would otherwise be sent to the same bad file again.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from pykvcache.config import Config
from pykvcache.layout import ChunkPaths

REMEMBERED_MAX = 1 << 17
"""Keys remembered as found: of the order of a server's whole KV working set (131,072 chunks
of 256 tokens), and about 20 MiB of memory."""


class Catalog:
    """Chunks by key; used by the scheduler's thread alone."""

    def __init__(
        self,
        ranks: Sequence[ChunkPaths],
        *,
        lookup_ttl_s: float,
        failed_key_ttl_s: float,
        clock: Callable[[], float],
        exists: Callable[[str], bool] = os.path.exists,
    ) -> None:
        """Args:
        ranks: where each rank's files lie.
        lookup_ttl_s, failed_key_ttl_s: see :class:`pykvcache.config.Config`.
        clock: seconds.
        exists: asks the filesystem.
        """
        self._ranks = ranks
        self._lookup_ttl_s = lookup_ttl_s
        self._failed_key_ttl_s = failed_key_ttl_s
        self._clock = clock
        self._exists = exists
        self._found: OrderedDict[bytes, float] = OrderedDict()
        self._failed: OrderedDict[bytes, float] = OrderedDict()
        self._storing: set[bytes] = set()

    @classmethod
    def of(
        cls, config: Config, ranks: Sequence[ChunkPaths], exists: Callable[[str], bool]
    ) -> Catalog:
        """With the times of the options."""
        return cls(
            ranks,
            lookup_ttl_s=config.lookup_ttl_s,
            failed_key_ttl_s=config.failed_key_ttl_s,
            clock=time.monotonic,
            exists=exists,
        )

    @property
    def storing(self) -> int:
        """Chunks being stored."""
        return len(self._storing)

    def holds(self, key: bytes) -> bool:
        """Whether the chunk can be loaded, as far as names tell."""
        now = self._clock()
        if self._remembered(self._failed, key, now, self._failed_key_ttl_s):
            return False
        if self._remembered(self._found, key, now, self._lookup_ttl_s):
            return True
        if not all(self._exists(paths.final(key)) for paths in self._ranks):
            return False
        self._remember(self._found, key, now)
        return True

    def begin_store(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of the keys that need storing: neither held nor being stored. They count as
        being stored from now on."""
        needed = [key for key in keys if key not in self._storing and not self.holds(key)]
        self._storing.update(needed)
        return needed

    def end_store(self, keys: Iterable[bytes], *, stored: bool) -> None:
        """Their store has ended; ``stored`` when every rank has its file."""
        now = self._clock()
        for key in keys:
            self._storing.discard(key)
            if stored:
                self._failed.pop(key, None)
                self._remember(self._found, key, now)

    def mark_failed(self, keys: Iterable[bytes]) -> None:
        """They could not be loaded."""
        now = self._clock()
        for key in keys:
            self._found.pop(key, None)
            self._remember(self._failed, key, now)

    def forget(self) -> None:
        """Forget everything; whoever resets hears no more of the stores in flight, and a chunk
        stored twice is only written twice."""
        self._found.clear()
        self._failed.clear()
        self._storing.clear()

    @staticmethod
    def _remembered(
        memory: OrderedDict[bytes, float], key: bytes, now: float, ttl_s: float
    ) -> bool:
        since = memory.get(key)
        if since is None:
            return False
        if now - since < ttl_s:
            return True
        del memory[key]
        return False

    @staticmethod
    def _remember(memory: OrderedDict[bytes, float], key: bytes, now: float) -> None:
        memory[key] = now
        memory.move_to_end(key)
        if len(memory) > REMEMBERED_MAX:
            memory.popitem(last=False)
