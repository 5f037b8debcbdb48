# SPDX-License-Identifier: Apache-2.0
"""How many chunks may be stored before the keeper has looked at the root again; pure.

The keeper looks once a second, and a drive takes in gigabytes in that time. So a server plans, from
one look to the next, no more than a share of the room that was left: the others that use the
root, of which it knows nothing, do the same. A store that is still going on when the look after
the next has come may exceed the limit by its own bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOM_SHARE = 4
"""Between two looks a server takes at most this fraction of the room: four servers that write as
fast as they can stay within the limit together, and with more each look leaves three quarters."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a look has found.

    Attributes:
        look: its number.
        size: bytes until the limit; 0 when nothing may be stored.
    """

    look: int
    size: int


class Admission:
    """Used by the scheduler's thread alone."""

    def __init__(self, chunk_bytes: int) -> None:
        """Args:
        chunk_bytes: of one chunk's files, all ranks together.
        """
        self._chunk_bytes = chunk_bytes
        self._look = -1
        self._ended = 0
        self._ended_before = 0
        """In the time before the latest look, as nobody knows whether it has seen their files."""

    def allowed(self, room: Room, storing: int) -> int:
        """Chunks whose store may begin now.

        One at a time is allowed while there is any room: a root that holds a few chunks only
        would else never reach the watermark at which eviction makes more.

        Args:
            room: the latest.
            storing: chunks that are being stored.
        """
        if room.look != self._look:
            self._look = room.look
            self._ended_before, self._ended = self._ended, 0
        if room.size <= 0:
            return 0
        most = max(room.size // (ROOM_SHARE * self._chunk_bytes), 1)
        return max(most - storing - self._ended - self._ended_before, 0)

    def end(self, chunks: int) -> None:
        """The store of so many chunks has ended."""
        self._ended += chunks
