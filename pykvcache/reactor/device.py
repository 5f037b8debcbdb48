# SPDX-License-Identifier: Apache-2.0
"""Copies between the pool and the KV cache tensors, on the CPU and on CUDA.

CUDA: a batch of pointers goes to the driver in one call, on a stream of its own for each
direction; completion is an event, polled. A load waits for the events that were recorded
when its job came (earlier kernels may still use the blocks it overwrites), a store for
those recorded after the step that computed its blocks. No device-wide synchronisation.

CPU: the pages of all layers of a chunk move in one NumPy call, because each call gives
the interpreter lock back and may wait a switch interval to get it again. Pages are
viewed as opaque items (``V<bytes>``), so NumPy moves each with one memcpy.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pykvcache.geometry import ChunkGeometry, PageReference
from pykvcache.pool import Pool
from pykvcache.reactor.copier import Copier
from pykvcache.transfer.jobs import Direction
from pykvcache.transfer.operations import Completion, CopyOperation, SlotCopy

#: (source pointers, destination pointers, sizes), int64 CPU tensors: vLLM's swap_blocks_batch.
CopyBatch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def make_copier(
    tensors: Sequence[torch.Tensor],
    geometry: ChunkGeometry,
    pool: Pool,
    copy_batch: CopyBatch | None,
) -> Copier:
    """The copier for where the KV cache lies.

    Args:
        tensors: int8, one row for each block: ``(blocks, page bytes)``, rows may be strided.
        geometry: the groups' page references into ``tensors``.
        pool: slots of at least ``geometry.slot_bytes``.
        copy_batch: required on CUDA.
    """
    if tensors[0].device.type == "cpu":
        return CpuCopier(tensors, geometry, pool)
    if copy_batch is None:
        raise ValueError("copy_batch is required for a KV cache on a GPU")
    return CudaCopier(tensors, geometry, pool, copy_batch)


@dataclass(frozen=True, slots=True)
class _Part:
    """References that can be copied in one call: equal pages at equal distances."""

    device: npt.NDArray[np.void]
    """(references, blocks)"""
    slots: npt.NDArray[np.void]
    """(slots, references, blocks of a chunk)"""


class CpuCopier(Copier):
    """Copies on the reactor's thread; an operation is complete when launch returns."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], geometry: ChunkGeometry, pool: Pool
    ) -> None:
        self._parts = [
            list(_parts(tensors, geometry, group, pool)) for group in range(len(geometry.groups))
        ]
        self._blocks_per_chunk = geometry.blocks_per_chunk
        self._done: list[Completion] = []

    def fence(self) -> object:
        """Nothing: what the engine computed is complete when it hands over a job."""
        return None

    def launch(self, operation: CopyOperation) -> None:
        """Copy now."""
        move = self._load if operation.direction is Direction.LOAD else self._store
        for copy in operation.copies:
            move(copy)
        self._done.append(Completion(operation.token, 0))

    def _load(self, copy: SlotCopy) -> None:
        span, blocks = copy.chunk.span, np.asarray(copy.chunk.block_ids)
        for part in self._parts[copy.chunk.group]:
            part.device[:, blocks] = part.slots[copy.slot, :, span.first : span.end]

    def _store(self, copy: SlotCopy) -> None:
        span, blocks = copy.chunk.span, np.asarray(copy.chunk.block_ids)
        for part in self._parts[copy.chunk.group]:
            slot = part.slots[copy.slot]
            if span.count == self._blocks_per_chunk:
                np.take(part.device, blocks, axis=1, out=slot, mode="clip")
            else:
                slot[:] = np.zeros((), slot.dtype)  # never another chunk's bytes
                slot[:, span.first : span.end] = part.device[:, blocks]

    def reap(self) -> list[Completion]:
        """All launched operations."""
        done, self._done = self._done, []
        return done

    @property
    def in_flight(self) -> int:
        """Operations launched and not yet reaped."""
        return len(self._done)


def _parts(
    tensors: Sequence[torch.Tensor], geometry: ChunkGeometry, group: int, pool: Pool
) -> Iterator[_Part]:
    pages = geometry.groups[group]
    offsets = geometry.offsets(group)
    memory = np.frombuffer(pool.memory, np.uint8)
    for start, end in _uniform_runs(tensors, pages):
        references = end - start
        page_bytes = pages[start].page_bytes
        tensor = tensors[pages[start].tensor]
        gap = _gap(tensors, pages, start) if references > 1 else 0
        item = np.dtype(f"V{page_bytes}")
        yield _Part(
            device=np.ndarray(
                (references, tensor.shape[0]),
                item,
                buffer=_storage(tensor),
                offset=tensor.storage_offset(),
                strides=(gap, tensor.stride(0)),
            ),
            slots=np.ndarray(
                (pool.slots, references, geometry.blocks_per_chunk),
                item,
                buffer=memory,
                offset=offsets[start],
                strides=(pool.slot_bytes, page_bytes * geometry.blocks_per_chunk, page_bytes),
            ),
        )


def _uniform_runs(
    tensors: Sequence[torch.Tensor], pages: Sequence[PageReference]
) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(pages):
        end = start + 1
        while end < len(pages) and _extends(tensors, pages, start, end):
            end += 1
        yield start, end
        start = end


def _extends(
    tensors: Sequence[torch.Tensor], pages: Sequence[PageReference], start: int, index: int
) -> bool:
    first, this = tensors[pages[start].tensor], tensors[pages[index].tensor]
    return (
        pages[index].page_bytes == pages[start].page_bytes
        and this.stride(0) == first.stride(0)
        and this.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and _gap(tensors, pages, index - 1) == _gap(tensors, pages, start)
        and _gap(tensors, pages, start) > 0
    )


def _gap(tensors: Sequence[torch.Tensor], pages: Sequence[PageReference], index: int) -> int:
    this, following = tensors[pages[index].tensor], tensors[pages[index + 1].tensor]
    return int(following.storage_offset() - this.storage_offset())


def _storage(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    storage = tensor.untyped_storage()
    array: npt.NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return array


@dataclass(frozen=True, slots=True)
class _Launched:
    token: int
    event: torch.cuda.Event
    keep: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """The descriptors, which the driver may read until the event."""


class CudaCopier(Copier):
    """Copies by the GPU's copy engines, between the pinned pool and the KV cache."""

    poll_s = 0.0002  # an event has no descriptor; a fifth of the shortest engine step

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        geometry: ChunkGeometry,
        pool: Pool,
        copy_batch: CopyBatch,
    ) -> None:
        self._device = tensors[0].device
        self._pool = pool
        self._copy_batch = copy_batch
        self._pointers = CopyPointers(tensors, geometry, pool)
        self._launched: list[_Launched] = []
        self._failed: list[Completion] = []
        with torch.cuda.device(self._device):
            self._streams = {direction: torch.cuda.Stream() for direction in Direction}
            self.pinned = _pin(pool)

    def enter_thread(self) -> None:
        """Make the KV cache's GPU the reactor thread's current one."""
        torch.cuda.set_device(self._device)

    def fence(self) -> object:
        """An event on the engine's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def launch(self, operation: CopyOperation) -> None:
        """Queue one batch on the direction's stream."""
        try:
            self._launched.append(self._launch(operation))
        except RuntimeError:
            self._failed.append(Completion(operation.token, -errno.EIO))

    def _launch(self, operation: CopyOperation) -> _Launched:
        if operation.direction is Direction.STORE:
            _clear_partial_slots(self._pool, operation.copies)
        stream = self._streams[operation.direction]
        device, host, sizes = self._pointers.of(operation.copies)
        source, target = (host, device) if operation.direction is Direction.LOAD else (device, host)
        with torch.cuda.stream(stream):
            for fence in {id(copy.fence): copy.fence for copy in operation.copies}.values():
                if isinstance(fence, torch.cuda.Event):
                    stream.wait_event(fence)
            self._copy_batch(source, target, sizes)
            event = torch.cuda.Event()
            event.record(stream)
        return _Launched(operation.token, event, (source, target, sizes))

    def reap(self) -> list[Completion]:
        """Operations whose event has come."""
        done, self._failed = self._failed, []
        still = []
        for launched in self._launched:
            if launched.event.query():
                done.append(Completion(launched.token, 0))
            else:
                still.append(launched)
        self._launched = still
        return done

    @property
    def in_flight(self) -> int:
        """Operations launched and not yet reaped."""
        return len(self._launched) + len(self._failed)

    def close(self) -> None:
        """Unpin the pool."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pool.address)
            self.pinned = False


@dataclass(frozen=True, slots=True)
class _GroupPages:
    """For each reference of a group: where row 0 lies, bytes between rows, offset in the
    payload, bytes of a page."""

    base: npt.NDArray[np.int64]
    stride: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    page: npt.NDArray[np.int64]


class CopyPointers:
    """Turns copies into the addresses that a batched copy takes, one for each page."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], geometry: ChunkGeometry, pool: Pool
    ) -> None:
        self._tensors = list(tensors)  # the addresses are theirs
        self._pool = pool
        self._groups = [
            _GroupPages(
                base=np.array([tensors[page.tensor].data_ptr() for page in pages], np.int64),
                stride=np.array([tensors[page.tensor].stride(0) for page in pages], np.int64),
                offset=np.array(geometry.offsets(group), np.int64),
                page=np.array([page.page_bytes for page in pages], np.int64),
            )
            for group, pages in enumerate(geometry.groups)
        ]

    def of(self, copies: Sequence[SlotCopy]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Addresses in the KV cache, addresses in the pool, sizes: int64 on the CPU, one
        entry for each page of each block."""
        device, host, sizes = [], [], []
        for copy in copies:
            group = self._groups[copy.chunk.group]
            blocks = np.asarray(copy.chunk.block_ids, np.int64)
            within = np.arange(copy.chunk.span.first, copy.chunk.span.end, dtype=np.int64)
            slot = self._pool.address + copy.slot * self._pool.slot_bytes
            device.append((group.base[:, None] + group.stride[:, None] * blocks).ravel())
            host.append((slot + group.offset[:, None] + group.page[:, None] * within).ravel())
            sizes.append(np.repeat(group.page, len(blocks)))
        return (
            torch.from_numpy(np.concatenate(device)),
            torch.from_numpy(np.concatenate(host)),
            torch.from_numpy(np.concatenate(sizes)),
        )


def _clear_partial_slots(pool: Pool, copies: Sequence[SlotCopy]) -> None:
    """A chunk stored in part must not carry another chunk's bytes for the rest."""
    for copy in copies:
        chunk = copy.chunk
        if chunk.copy_bytes < chunk.payload_bytes:
            pool.view(copy.slot)[: chunk.payload_bytes] = bytes(chunk.payload_bytes)


def _pin(pool: Pool) -> bool:
    """Page-lock the pool for DMA (cudaHostRegister); unpinned copies work, but slowly."""
    result = torch.cuda.cudart().cudaHostRegister(pool.address, pool.size, 0)
    return int(result) == 0
