# SPDX-License-Identifier: Apache-2.0
"""How the pages of a chunk lie in its slot and file.

A KV cache group is a list of page references, one for each layer (or group of layers
that share memory): which tensor, how many bytes of a block's row. A chunk's payload is
``[reference][block][page bytes]``: all blocks of a reference lie together, so that a
chunk of consecutive device blocks is one long copy for each reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pykvcache.layout import file_bytes


@dataclass(frozen=True, slots=True)
class PageReference:
    """``page_bytes`` bytes at the start of each row of the tensor with that index."""

    tensor: int
    page_bytes: int


@dataclass(frozen=True)
class ChunkGeometry:
    """Sizes and offsets, in bytes, for every KV cache group."""

    groups: tuple[tuple[PageReference, ...], ...]
    blocks_per_chunk: int

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each group, all references together."""
        return tuple(sum(page.page_bytes for page in group) for group in self.groups)

    @cached_property
    def payload_bytes(self) -> tuple[int, ...]:
        """Bytes of a whole chunk of each group."""
        return tuple(block * self.blocks_per_chunk for block in self.block_bytes)

    @cached_property
    def file_bytes(self) -> tuple[int, ...]:
        """Bytes of a chunk's file of each group, padded and with its trailer."""
        return tuple(map(file_bytes, self.payload_bytes))

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot: it must hold a chunk of any group."""
        return max(self.file_bytes)

    def offsets(self, group: int) -> tuple[int, ...]:
        """Where each reference's pages start in the payload of that group."""
        offsets, offset = [], 0
        for page in self.groups[group]:
            offsets.append(offset)
            offset += page.page_bytes * self.blocks_per_chunk
        return tuple(offsets)
