# SPDX-License-Identifier: Apache-2.0
"""What crosses from the scheduler to a worker, and how it is matched with device blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadKey,
    get_offload_group_idx,
)

from pykvcache.geometry import ChunkGeometry
from pykvcache.layout import BlockSpan
from pykvcache.transfer.jobs import ChunkTransfer, Direction

NULL_BLOCK = 0
"""vLLM's placeholder for a block that a request doesn't have; nobody's content."""


@dataclass(frozen=True)
class ChunkSpec(LoadStoreSpec):
    """The keys of a load or store, group by group, in the order of the blocks."""

    keys: tuple[OffloadKey, ...]


class PlanError(ValueError):
    """The blocks of a job cannot be matched with its keys beyond doubt."""


@dataclass(frozen=True)
class Planner:
    """Splits jobs into chunks.

    Attributes:
        geometry: sizes of chunks.
        group_ids: vLLM's group index (the one in the keys) of each of the geometry's groups.
        path_of: the final name of a key's file.
    """

    geometry: ChunkGeometry
    group_ids: Sequence[int]
    path_of: Callable[[bytes], str]

    def split(
        self, direction: Direction, spec: ChunkSpec, device: GPULoadStoreSpec
    ) -> tuple[ChunkTransfer, ...]:
        """The chunks of a job.

        vLLM lists the blocks of each group without gaps, from the block index it names. The
        first chunk may lack blocks at its start (they are computed, or left a sliding
        window), the last chunk of a load blocks at its end. A store whose blocks don't fill
        its chunks otherwise has gaps that the list doesn't show: blocks of a window that were
        given to someone else. With a gap anywhere but there, either the number of chunks or
        the end of the last one comes out wrong.

        Raises:
            PlanError: keys and blocks don't match.
        """
        chunks: list[ChunkTransfer] = []
        start = 0
        for group, count in enumerate(device.group_sizes):
            keys = [key for key in spec.keys if get_offload_group_idx(key) == self.group_ids[group]]
            blocks = device.block_ids[start : start + count].tolist()
            start += count
            spans = list(self._spans(device.block_indices[group], count))
            whole = self.geometry.blocks_per_chunk
            if (
                len(spans) != len(keys)
                or NULL_BLOCK in blocks
                or (direction is Direction.STORE and spans and spans[-1].end != whole)
            ):
                raise PlanError(
                    f"{len(keys)} chunks of {whole} blocks and {count} blocks from block "
                    f"{device.block_indices[group]} in group {self.group_ids[group]}"
                )
            used = 0
            for key, span in zip(keys, spans, strict=True):
                chunks.append(self._chunk(group, key, span, blocks[used : used + span.count]))
                used += span.count
        return tuple(chunks)

    def whole(self, key: OffloadKey) -> ChunkTransfer:
        """A chunk to read ahead: whatever its file holds, without device blocks.

        Raises:
            PlanError: no group has that index.
        """
        index = get_offload_group_idx(key)
        if index not in self.group_ids:
            raise PlanError(f"no KV cache group {index}, only {list(self.group_ids)}")
        return self._chunk(self.group_ids.index(index), key, BlockSpan(0, 0), [])

    def _spans(self, first_block: int, count: int) -> Iterator[BlockSpan]:
        whole = self.geometry.blocks_per_chunk
        first = first_block % whole
        while count > 0:
            span = BlockSpan(first, min(whole - first, count))
            yield span
            count -= span.count
            first = 0

    def _chunk(
        self, group: int, key: OffloadKey, span: BlockSpan, blocks: list[int]
    ) -> ChunkTransfer:
        return ChunkTransfer(
            key=key,
            path=self.path_of(key),
            payload_bytes=self.geometry.payload_bytes[group],
            file_bytes=self.geometry.file_bytes[group],
            span=span,
            group=group,
            block_ids=tuple(blocks),
            copy_bytes=span.count * self.geometry.block_bytes[group],
        )
