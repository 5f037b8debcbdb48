# SPDX-License-Identifier: Apache-2.0
"""The contenders of :mod:`benchmarks.pressure`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from benchmarks.native_tier import NativeTier, tier_spec
from benchmarks.pressure import Contender, Request, Shape, make_requests, pause
from pykvcache.config import Config
from pykvcache.layout import ChunkPaths, file_bytes
from pykvcache.limits import limits_of
from pykvcache.measure import Storage, open_storage, plain_chunk
from pykvcache.scheduler.preload import Candidate, order_preloads
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Job
from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager
from vllm.v1.kv_offload.pykvcache.preload import CHUNKS_MAX
from vllm.v1.kv_offload.pykvcache.tier import PyKVCacheTier
from vllm.v1.kv_offload.pykvcache.tier_settings import FACTS_KEY

_FINGERPRINT = bytes(32)
_POLL_S = 0.001
_WRITTEN_AT_ONCE = 8
"""Chunks; a fraction of the CPU tier."""
_FACTS = {
    "engine": "benchmark",
    "device": "cpu",
    "model": "model",
    "revision": "",
    "weights": "",
    "hash_algorithm": "",
    "hash_seed": "",
}


def ready_prefix(
    manager: OffloadingManager, keys: Sequence[bytes], context: ReqContext
) -> int | None:
    """How many chunks from the front can be loaded, asked as vLLM's connector asks: up to the
    first miss; None while any of them is undecided."""
    hits, undecided = 0, False
    for key in keys:
        result = manager.lookup(OffloadKey(key), context)
        if result is LookupResult.MISS:
            break
        undecided |= result is not LookupResult.HIT
        hits += 1
    return None if undecided else hits


class Ours:
    """The manager, the reactor and its pool."""

    def __init__(self, shape: Shape, directory: Path, storage: Storage, config: Config) -> None:
        self._shape = shape
        self._storage = storage
        self._lookahead = config.preload_lookahead
        self._paths = ChunkPaths(directory)
        self._manager = PyKVCacheManager(config, [directory])
        self._contexts: dict[str, ReqContext] = {}
        self._wanted: tuple[bytes, ...] = ()
        self._jobs: dict[int, tuple[list[OffloadKey], ReqContext]] = {}
        self._job_id = 0
        self._read_before = storage.reactor.gauges.bytes_read

    def arrive(self, request: Request) -> None:
        context = ReqContext(request.req_id)
        self._contexts[request.req_id] = context
        self._manager.on_new_request(context)

    def show(self, waiting: Sequence[Request]) -> None:
        candidates = [
            Candidate(request.req_id, tuple(request.prefix))
            for request in waiting[: self._lookahead]
        ]
        wanted = order_preloads(candidates, CHUNKS_MAX)
        if wanted != self._wanted:
            self._wanted = wanted
            self._storage.reactor.preload([self._chunk(key) for key in wanted])

    def look_up(self, request: Request) -> int | None:
        return ready_prefix(self._manager, request.prefix, self._contexts[request.req_id])

    def run(self, request: Request, chunks: int) -> int:
        context = self._contexts[request.req_id]
        keys = [OffloadKey(key) for key in request.prefix[:chunks]]
        self._manager.prepare_load(keys, context)
        job_id = self._submit(Direction.LOAD, keys, context)
        while job_id in self._jobs:
            self._storage.reactor.await_result(_POLL_S)
            failed = self._collect().get(job_id, 0)
        self._manager.complete_load(keys, context)
        new = [OffloadKey(key) for key in request.new_keys(self._shape.new)]
        planned = self._manager.prepare_store(new, context)
        if planned is not None and planned.keys_to_store:
            self._submit(Direction.STORE, planned.keys_to_store, context)
        return chunks - failed

    def end_step(self, ran: Request | None) -> None:
        self._collect()
        if ran is not None:
            self._manager.on_request_finished(self._contexts.pop(ran.req_id))

    @property
    def bytes_read(self) -> int:
        """Payload and trailer pages, since the files were there."""
        return self._storage.reactor.gauges.bytes_read - self._read_before

    def _submit(self, direction: Direction, keys: list[OffloadKey], context: ReqContext) -> int:
        self._job_id += 1
        self._jobs[self._job_id] = (keys, context)
        chunks = tuple(self._chunk(key) for key in keys)
        self._storage.reactor.submit(Job(self._job_id, direction, chunks))
        return self._job_id

    def _collect(self) -> dict[int, int]:
        """Chunks that failed, by job that ended."""
        failures = {}
        for result in self._storage.reactor.take_results():
            keys, context = self._jobs.pop(result.job_id)
            failures[result.job_id] = len(result.failures)
            if result.direction is Direction.STORE:
                self._manager.complete_store(keys, context, success=result.success)
        return failures

    def _chunk(self, key: bytes) -> ChunkTransfer:
        return plain_chunk(key, self._paths.final(key), self._shape.chunk_bytes)


@contextmanager
def ours(shape: Shape, directory: Path) -> Iterator[Contender]:
    """Our backend with a pool of the shape's size; the prefixes are on disk."""
    config = Config(root=directory)
    slot_bytes = file_bytes(shape.chunk_bytes)
    with open_storage(directory, slot_bytes, _FINGERPRINT, config) as storage:
        paths = ChunkPaths(directory)
        for request in make_requests(shape):
            chunks = [
                plain_chunk(key, paths.final(key), shape.chunk_bytes) for key in request.prefix
            ]
            storage.transfer(Direction.STORE, chunks)
    limits = limits_of(config, shape.pool)
    with open_storage(
        directory, slot_bytes, _FINGERPRINT, config, slots=shape.pool, limits=limits
    ) as storage:
        yield Ours(shape, directory, storage, config)


class CountingTier(FileSystemTierManager):
    """vLLM's tier, which also sums up what it has read."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.bytes_read = 0

    def submit_load(self, job_metadata: object) -> None:
        """Every chunk of the job is read."""
        self.bytes_read += len(list(job_metadata.keys)) * self._block_size
        super().submit_load(job_metadata)


class Tiering:
    """vLLM's manager of tiers over a CPU tier of the pool's size, with one tier below it."""

    def __init__(
        self,
        shape: Shape,
        manager: TieringOffloadingManager,
        bytes_read: Callable[[], int],
        note_queue: Callable[[Sequence[str]], object] = lambda req_ids: None,
    ) -> None:
        self._shape = shape
        self._manager = manager
        self._bytes_read = bytes_read
        self._note_queue = note_queue
        self._contexts: dict[str, ReqContext] = {}

    def arrive(self, request: Request) -> None:
        context = ReqContext(request.req_id)
        self._contexts[request.req_id] = context
        self._manager.on_new_request(context)

    def show(self, waiting: Sequence[Request]) -> None:
        """vLLM's own tiers learn of waiting requests by their look-ups alone."""
        self._note_queue([request.req_id for request in waiting])

    def look_up(self, request: Request) -> int | None:
        return ready_prefix(self._manager, request.prefix, self._contexts[request.req_id])

    def run(self, request: Request, chunks: int) -> int:
        context = self._contexts[request.req_id]
        keys = [OffloadKey(key) for key in request.prefix[:chunks]]
        if keys:
            self._manager.prepare_load(keys, context)
            self._manager.complete_load(keys, context)
        new = [OffloadKey(key) for key in request.new_keys(self._shape.new)]
        planned = self._manager.prepare_store(new, context)
        if planned is not None and planned.keys_to_store:
            self._manager.complete_store(planned.keys_to_store, context)
        return chunks

    def end_step(self, ran: Request | None) -> None:
        self._manager.on_schedule_end(ScheduleEndContext([ran.req_id] if ran else [], []))
        if ran is not None:
            self._manager.on_request_finished(self._contexts.pop(ran.req_id))

    @property
    def bytes_read(self) -> int:
        return self._bytes_read()


@contextmanager
def native(shape: Shape, directory: Path) -> Iterator[Contender]:
    """vLLM's tiering, whose CPU tier is as large as our pool; the prefixes are on disk."""
    writer = NativeTier(directory, shape.prefix, shape.chunk_bytes)
    for number in range(shape.requests):
        writer.write(number)
    writer.close()
    with primary_tier(shape) as primary:
        fs_tier = CountingTier(
            tier_spec(shape.chunk_bytes),
            primary.get_kv_memoryview(),
            "fs",
            root_dir=str(directory),
        )
        manager = TieringOffloadingManager(primary, [fs_tier])
        with finished(manager):
            yield Tiering(shape, manager, lambda: fs_tier.bytes_read)


@contextmanager
def tier(shape: Shape, directory: Path) -> Iterator[Contender]:
    """vLLM's tiering with this backend's tier instead of ``fs``; the prefixes are on disk."""
    spec = tier_spec(shape.chunk_bytes)
    spec.config.extra_config[FACTS_KEY] = _FACTS
    with primary_tier(shape) as primary:
        own_tier = PyKVCacheTier(
            spec, primary.get_kv_memoryview(), "pykvcache", root=str(directory)
        )
        manager = TieringOffloadingManager(primary, [own_tier])
        with finished(manager):
            for request in make_requests(shape):
                _store_prefix(manager, request)
            manager.reset_cache()
            if hasattr(manager, "on_reset_flushed"):  # since 0.33.0
                manager.on_reset_flushed()
            yield Tiering(
                shape,
                manager,
                lambda: own_tier.bytes_read,
                lambda req_ids: own_tier.note_queue(req_ids[: own_tier.lookahead]),
            )


def _store_prefix(manager: TieringOffloadingManager, request: Request) -> None:
    """Have the files of a prefix written, as much at once as the tier takes."""
    context = ReqContext(f"{request.number}-writes")
    manager.on_new_request(context)
    keys = [OffloadKey(key) for key in request.prefix]
    for at in range(0, len(keys), _WRITTEN_AT_ONCE):
        planned = manager.prepare_store(keys[at : at + _WRITTEN_AT_ONCE], context)
        if planned is None:
            raise OSError("the CPU tier has no room for chunks to write")
        manager.complete_store(planned.keys_to_store, context)
        _finish(manager)
    manager.on_request_finished(context)


@contextmanager
def primary_tier(shape: Shape) -> Iterator[CPUPrimaryTierOffloadingManager]:
    """A CPU tier of the pool's size."""
    region = SharedOffloadRegion(
        engine_id=f"pykvcache-benchmark-{os.getpid()}-{secrets.token_hex(4)}",
        num_chunks=shape.pool,
        rank=None,
        kv_bytes_per_chunk=shape.chunk_bytes,
        cpu_page_size=shape.chunk_bytes,
    )
    try:
        yield CPUPrimaryTierOffloadingManager(num_chunks=shape.pool, mmap_region=region)
    finally:
        Path(region.mmap_path).unlink(missing_ok=True)


@contextmanager
def finished(manager: TieringOffloadingManager) -> Iterator[None]:
    """Shut the manager down at the end; its memory must not go under its transfers."""
    try:
        yield
    finally:
        _finish(manager)
        manager.shutdown()


def _finish(manager: TieringOffloadingManager) -> None:
    while manager.has_pending_work():
        manager.on_schedule_end(ScheduleEndContext([], []))
        pause(_POLL_S)


CONTENDERS: dict[str, Callable[[Shape, Path], AbstractContextManager[Contender]]] = {
    "ours": ours,
    "native": native,
    "tier": tier,
}
