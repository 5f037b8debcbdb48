# SPDX-License-Identifier: Apache-2.0
"""How much is left to read of the loads that have begun: what a new one waits for."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class _Load:
    size: int
    begun_at: float


class Backlog:
    """Loads that are read one after the other, as far as is known from their ends alone.

    A load of which half is read delays others by half of it: counting it whole until it ends
    makes the gate decline, as busy, what would be faster.
    """

    def __init__(self) -> None:
        self._loads: dict[Hashable, _Load] = {}
        self._total = 0
        self._head_since = 0.0
        """When the reads of the first of them began, at the earliest."""

    def begin(self, load: Hashable, disk_bytes: int, now: float) -> None:
        """A load is submitted.

        Args:
            load: names it until its end.
            disk_bytes: that it reads.
            now: seconds.
        """
        if not disk_bytes or load in self._loads:
            return
        if not self._loads:
            self._head_since = now
        self._loads[load] = _Load(disk_bytes, now)
        self._total += disk_bytes

    def end(self, load: Hashable, ended_at: float) -> None:
        """A load has ended, whatever became of it; none that is not known.

        Args:
            load: as it was begun.
            ended_at: seconds; at the latest when this is told.
        """
        found = self._loads.pop(load, None)
        if found is None:
            return
        self._total -= found.size
        self._head_since = max(self._head_since, ended_at)
        if self._loads:
            first = next(iter(self._loads.values()))
            self._head_since = max(self._head_since, first.begun_at)

    def left(self, now: float, bytes_per_s: float) -> int:
        """Bytes still to be read.

        Args:
            now: seconds.
            bytes_per_s: of the disk. It is believed for the first load alone: a disk that hangs
                is not taken for one that has read everything.
        """
        if not self._loads:
            return 0
        first = next(iter(self._loads.values()))
        read = int(max(0.0, now - self._head_since) * bytes_per_s)
        return self._total - min(read, first.size)
