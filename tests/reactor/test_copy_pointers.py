# SPDX-License-Identifier: Apache-2.0
"""The addresses handed to a batched copy, carried out here by memmove: no GPU is needed."""

from __future__ import annotations

import ctypes

import torch

from pykvcache.geometry import ChunkGeometry, PageReference
from pykvcache.layout import BlockSpan
from pykvcache.pool import Pool
from pykvcache.reactor.device import CopyPointers, CpuCopier
from pykvcache.transfer.jobs import ChunkTransfer, Direction
from pykvcache.transfer.operations import CopyOperation, SlotCopy

BLOCKS = 4
GEOMETRY = ChunkGeometry(
    (
        (PageReference(0, 48), PageReference(1, 48), PageReference(2, 32)),
        (PageReference(2, 32), PageReference(0, 16)),
    ),
    BLOCKS,
)


def make_tensors() -> list[torch.Tensor]:
    """Rows of 48, 48 and (strided: 64 apart) 32 bytes, all different."""
    generator = torch.Generator().manual_seed(7)
    wide = torch.randint(-128, 128, (20, 64), dtype=torch.int8, generator=generator)
    rows = [
        torch.randint(-128, 128, (20, 48), dtype=torch.int8, generator=generator) for _ in range(2)
    ]
    return [*rows, wide[:, :32]]


def make_copy(group: int, slot: int, span: BlockSpan, block_ids: tuple[int, ...]) -> SlotCopy:
    chunk = ChunkTransfer(
        key=b"key",
        path="",
        payload_bytes=GEOMETRY.payload_bytes[group],
        file_bytes=GEOMETRY.file_bytes[group],
        span=span,
        group=group,
        block_ids=block_ids,
        copy_bytes=span.count * GEOMETRY.block_bytes[group],
    )
    return SlotCopy(slot, chunk, None)


COPIES = (
    make_copy(0, 2, BlockSpan(0, 4), (19, 3, 4, 5)),
    make_copy(1, 0, BlockSpan(1, 2), (7, 0)),
)


def test_pointers_move_the_same_bytes_as_the_cpu_copier() -> None:
    source, by_pointers, by_copier = make_tensors(), make_tensors(), make_tensors()
    for tensor in (*by_pointers, *by_copier):
        tensor.zero_()
    pool = Pool(3, GEOMETRY.slot_bytes)
    CpuCopier(source, GEOMETRY, pool).launch(CopyOperation(1, Direction.STORE, COPIES))
    CpuCopier(by_copier, GEOMETRY, pool).launch(CopyOperation(2, Direction.LOAD, COPIES))
    device, host, sizes = CopyPointers(by_pointers, GEOMETRY, pool).of(COPIES)
    for target, origin, size in zip(device.tolist(), host.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, origin, size)
    for moved, expected in zip(by_pointers, by_copier, strict=True):
        assert torch.equal(moved, expected)
    assert torch.equal(by_pointers[0][19], source[0][19])


def test_one_entry_for_each_page() -> None:
    pool = Pool(3, GEOMETRY.slot_bytes)
    device, host, sizes = CopyPointers(make_tensors(), GEOMETRY, pool).of(COPIES)
    assert len(device) == len(host) == len(sizes) == 3 * 4 + 2 * 2
    assert device.dtype == host.dtype == sizes.dtype == torch.int64
    assert int(sizes.sum()) == sum(copy.chunk.copy_bytes for copy in COPIES)
