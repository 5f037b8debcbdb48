# SPDX-License-Identifier: Apache-2.0
"""Memory of someone else, cut into rows of one chunk's payload each.

A transfer can go straight into a row or out of it; the slot then holds only what follows
the payload in the file. Both are one vectored call (readv(2)), so that a chunk stays one
transfer. O_DIRECT needs every part of it aligned, not just the whole (open(2)).
"""

from __future__ import annotations

import ctypes

from pykvcache.errors import InvariantError
from pykvcache.layout import PAGE


class Rows:
    """``(rows, row bytes)`` of writable memory, contiguous."""

    def __init__(self, memory: memoryview) -> None:
        """Raises:
        InvariantError: the memory is read-only, or no rows one after the other.
        """
        shape = memory.shape or ()
        if memory.readonly or len(shape) != 2 or not memory.c_contiguous or not memory.nbytes:
            raise InvariantError(f"memory of shape {shape} is not contiguous writable rows")
        self._flat = memory.cast("B")
        self.row_bytes = memory.nbytes // shape[0]
        self._count = shape[0]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._flat))

    def __len__(self) -> int:
        return self._count

    @property
    def is_aligned(self) -> bool:
        """Whether every row is whole pages."""
        return self.address % PAGE == 0 and self.row_bytes % PAGE == 0

    def view(self, row: int) -> memoryview:
        """The row's memory.

        Raises:
            ValueError: there is no such row.
        """
        if not 0 <= row < self._count:
            raise ValueError(f"row {row} of {self._count}")
        return self._flat[row * self.row_bytes : (row + 1) * self.row_bytes]

    def release(self) -> None:
        """Let go of the memory, so that its owner can unmap it; nothing may be in flight."""
        self._flat.release()
