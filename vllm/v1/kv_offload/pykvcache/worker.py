# SPDX-License-Identifier: Apache-2.0
"""One rank's transfers: vLLM's jobs in, the reactor's results out."""

from __future__ import annotations

import gc
import os
import secrets
import sys
from collections import Counter
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    OffloadKey,
    TransferResult,
)

from pykvcache.capacity.no_space import NoSpaceReporter
from pykvcache.claims import Claim
from pykvcache.geometry import ChunkGeometry, PageReference
from pykvcache.identity import RankIdentity
from pykvcache.layout import ChunkPaths
from pykvcache.limits import limits_of
from pykvcache.pool import Pool, slots_of
from pykvcache.reactor.device import CopyBatch, make_copier
from pykvcache.reactor.probe import choose_direct, choose_engine, make_engine
from pykvcache.reactor.reactor import Gauges, Reactor
from pykvcache.reactor.timeline import Timeline
from pykvcache.transfer.jobs import Direction, Failure, Job, JobResult
from vllm.v1.kv_offload.pykvcache.failures import ChunkTransferResult
from vllm.v1.kv_offload.pykvcache.metrics import WorkerMetrics
from vllm.v1.kv_offload.pykvcache.plan import ChunkSpec, PlanError, Planner
from vllm.v1.kv_offload.pykvcache.reports import LoadReport, WorkerReport
from vllm.v1.kv_offload.pykvcache.tracing import WorkerTrace, make_tracer

if TYPE_CHECKING:
    from vllm.v1.kv_offload.pykvcache.preload import PreloadPlan
    from vllm.v1.kv_offload.pykvcache.spec import PyKVCacheSpec

logger = init_logger(__name__)


class PyKVCacheWorker(OffloadingWorker):
    """Runs in the worker process; the engine's thread calls it and never waits for the disk."""

    def __init__(self, spec: PyKVCacheSpec, caches: CanonicalKVCaches) -> None:
        """Raises:
        ConfigError: the pool is too small, or the root or the engine cannot be used.
        """
        options, parallel = spec.options, spec.config.parallel
        self._options = options
        geometry = geometry_of(caches, spec.blocks_per_chunk)
        self.server_directory = spec.directory
        rank_identity = RankIdentity(
            server=spec.identity.fingerprint.hex(),
            rank=parallel.rank,
            layers=tuple(group.layer_names for group in spec.config.groups),
            page_bytes=tuple(tuple(page.page_bytes for page in group) for group in geometry.groups),
        )
        self._claim = Claim(spec.root, spec.access, spec.identity, rank_identity, logger)
        directory = self._claim.directory
        slots = slots_of(
            spec.pool_bytes, geometry.slot_bytes, options.slots_min, parallel.world_size
        )
        direct = choose_direct(options.direct_io, directory)
        engine = choose_engine(options.io_engine, directory, direct.direct)
        for choice, asked in ((direct, options.direct_io), (engine, options.io_engine)):
            if choice.fallback and asked == "auto":
                logger.warning("KV offloading: %s", choice.why)
        pool = Pool(slots, geometry.slot_bytes)
        pool.populate(0, 2 * options.slots_min)
        tensors = [tensor.tensor for tensor in caches.tensors]
        copier = make_copier(tensors, geometry, pool, _copy_batch())
        limits = limits_of(options, slots)
        self._planner = Planner(
            geometry,
            [group.group_id for group in spec.config.groups],
            ChunkPaths(directory).final,
        )
        tracer = make_tracer(options, f"worker-{parallel.rank}")
        self._trace = WorkerTrace(tracer)
        self._reactor = Reactor(
            limits,
            pool,
            lambda buffers: make_engine(
                engine, buffers, direct.direct, options.io_depth, access=spec.access
            ),
            copier,
            fingerprint=rank_identity.fingerprint,
            writer=f"{os.getpid():x}-{secrets.token_hex(6)}",
            timeline=Timeline(tracer) if tracer is not None else None,
        )
        self._frozen = False
        # Other stages and data parallel engines wait for this one's steps, empty ones too.
        waits = parallel.pp_size == 1 and parallel.data_parallel_size == 1
        self._idle_wait_s = options.idle_wait_s if waits else 0.0
        self._jobs: dict[int, Job] = {}
        self._begin_reports(max(geometry.payload_bytes))
        self._refused: list[ChunkTransferResult] = []
        self._metrics = WorkerMetrics(parallel.rank)
        self._is_paused = False
        self._no_space = NoSpaceReporter(options.root)
        self._reactor.start()
        pool.populate_in_background(2 * options.slots_min)
        if options.switch_interval_s:
            sys.setswitchinterval(min(sys.getswitchinterval(), options.switch_interval_s))
        logger.info(
            "KV offloading to %s: rank %d of %d, chunks of %d blocks (%.1f MiB), pool of %d slots "
            "(%.2f GiB%s), %s (%s), direct I/O %s (%s), depth %d, %d slots for preloading, "
            "DRAM policy %s",
            directory,
            parallel.rank,
            parallel.world_size,
            spec.blocks_per_chunk,
            geometry.slot_bytes / (1 << 20),
            slots,
            pool.size / (1 << 30),
            ", pinned" if getattr(copier, "pinned", False) else "",
            engine.name,
            engine.why,
            "on" if direct.direct else "off",
            direct.why,
            options.io_depth,
            limits.preload.slots_max,
            limits.dram_policy,
        )

    def _begin_reports(self, chunk_bytes: int) -> None:
        self.step = 0
        """Number of the engine's step, as the scheduler counts."""
        self.in_dram: set[bytes] = set()
        """Chunks in the pool, as last told to the scheduler."""
        self._ended_loads: dict[int, LoadReport] = {}
        self._ahead_bytes: dict[int, int] = {}
        self._gauges_seen: Gauges | None = None
        self._handed_over = 0
        self._chunk_bytes = chunk_bytes

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Hand a store to the reactor; how it ends is in :meth:`get_finished`."""
        assert isinstance(dst_spec, ChunkSpec)
        self._submit(job_id, Direction.STORE, dst_spec, src_spec)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Hand a load to the reactor; how it ends is in :meth:`get_finished`.

        ``expedited`` (vLLM 0.33) cannot be set: ``sync_load_budget_bytes`` is refused.
        """
        assert isinstance(src_spec, ChunkSpec)
        self._submit(job_id, Direction.LOAD, src_spec, dst_spec)
        return True

    def preload(self, plan: PreloadPlan) -> None:
        """Hand what waiting requests will want to the reactor, in place of the plan before."""
        self._trace.preload(len(plan.keys))
        try:
            self._reactor.preload([self._planner.whole(key) for key in plan.keys])
        except PlanError as error:  # only the loads' own reads are left then
            logger.warning_once("KV offloading preloads nothing: %s", error)

    def take_report(self) -> WorkerReport:
        """What the scheduler is to know of this rank, since the last call."""
        dram: Counter[OffloadKey] = Counter()
        for key, change in self._reactor.take_dram_changes():
            dram[OffloadKey(key)] += change
            (self.in_dram.add if change > 0 else self.in_dram.discard)(key)
        loads, self._ended_loads = self._ended_loads, {}
        return WorkerReport(
            step=self.step,
            dram={key: change for key, change in dram.items() if change},
            loads=loads,
            unread_bytes=self._unread_bytes(),
        )

    def _unread_bytes(self) -> int:
        """Of KV that loads still read from files; of those handed over since the reactor last
        looked, all of it."""
        gauges = self._reactor.gauges
        if gauges is not self._gauges_seen:
            self._gauges_seen, self._handed_over = gauges, 0
        return gauges.unread * self._chunk_bytes + self._handed_over

    def _submit(
        self, job_id: int, direction: Direction, spec: ChunkSpec, device: GPULoadStoreSpec
    ) -> None:
        try:
            chunks = self._planner.split(direction, spec, device)
        except PlanError as error:
            logger.warning_once("KV offloading left out a %s: %s", direction, error)
            self._refuse(job_id, direction, spec, device)
            return
        if not self._frozen:
            # What start-up left behind is long-lived: a full collection of it, which the
            # reactor's allocations would bring about, stalls every thread for 0.1 s.
            gc.freeze()
            self._frozen = True
        job = Job(job_id, direction, chunks, self._reactor.fence())
        self._jobs[job_id] = job
        if direction is Direction.LOAD:
            self._ahead_bytes[job_id] = self._unread_bytes()
            self._handed_over += sum(chunk.payload_bytes for chunk in chunks)
        self._trace.submit(job)
        self._reactor.submit(job)

    def _refuse(
        self, job_id: int, direction: Direction, spec: ChunkSpec, device: GPULoadStoreSpec
    ) -> None:
        failures = {bytes(key): Failure.DROPPED for key in spec.keys}
        self._metrics.record(
            [JobResult(job_id, direction, 0.0, 0, 0, len(spec.keys), failures=failures)]
        )
        self._refused.append(
            ChunkTransferResult(
                job_id=job_id,
                success=False,
                failed_keys=frozenset(spec.keys),
                invalid_block_ids=frozenset(
                    device.block_ids.tolist() if direction is Direction.LOAD else ()
                ),
            )
        )

    def await_transfer(self) -> None:
        """Return when a job has ended, at the latest after ``idle_wait_s``; at once if there
        is none."""
        if self._jobs and not self._refused:
            self._reactor.await_result(self._idle_wait_s)

    def get_finished(self) -> list[TransferResult]:
        """The jobs that have ended since the last call."""
        finished: list[TransferResult] = [*self._refused]
        self._refused.clear()
        results = self._reactor.take_results()
        self._metrics.record(results)
        finished += [self._finish(result) for result in results]
        return finished

    def _finish(self, result: JobResult) -> ChunkTransferResult:
        job = self._jobs.pop(result.job_id)
        self._trace.end(result)
        failed = [chunk for chunk in job.chunks if chunk.key in result.failures]
        ahead_bytes = self._ahead_bytes.pop(result.job_id, 0)
        if failed:
            self._log_failures(job, result)
        # One that ran into its deadline took so long, if not longer.
        if job.direction is Direction.LOAD and set(result.failures.values()) <= {Failure.DEADLINE}:
            self._ended_loads[result.job_id] = load_report(job, result, ahead_bytes)
        if Failure.NO_SPACE in result.failures.values():
            self._no_space.report()
        if job.direction is Direction.STORE and Failure.NOT_FOUND in result.failures.values():
            self._claim.renew()
        return ChunkTransferResult(
            job_id=result.job_id,
            success=not failed,
            transfer_size=result.copied_bytes,
            transfer_time=result.seconds,
            failed_keys=frozenset(OffloadKey(chunk.key) for chunk in failed),
            invalid_block_ids=frozenset(
                block
                for chunk in failed
                if job.direction is Direction.LOAD
                for block in chunk.block_ids
            ),
        )

    @staticmethod
    def _log_failures(job: Job, result: JobResult) -> None:
        reasons = sorted({str(failure) for failure in result.failures.values()})
        is_expected = set(result.failures.values()) <= {Failure.DROPPED, Failure.PAUSED}
        log = logger.debug if is_expected else logger.warning
        log(
            "KV offloading: %d of %d chunks of a %s failed (%s)%s",
            len(result.failures),
            result.chunks,
            job.direction,
            ", ".join(reasons),
            "; they are recomputed" if job.direction is Direction.LOAD else "",
        )

    def wait(self, job_ids: set[int]) -> None:
        """Return when the GPU blocks of these jobs may be reused. What cannot be copied at
        once is dropped; loads are waited for, up to their deadline."""
        loads = any(
            self._jobs[job_id].direction is Direction.LOAD
            for job_id in job_ids
            if job_id in self._jobs
        )
        timeout_s = self._options.flush_timeout_s
        if loads:
            timeout_s += self._options.load_deadline_s
        if not self._reactor.flush(job_ids & self._jobs.keys(), timeout_s):
            logger.warning(
                "KV offloading: device copies did not end within %.1f s; their chunks are dropped",
                timeout_s,
            )

    def take_stats(self) -> OffloadingConnectorStats | None:
        """This rank's metrics since the last call."""
        gauges = self._reactor.gauges
        if gauges.is_paused != self._is_paused:
            self._is_paused = gauges.is_paused
            if self._is_paused:
                logger.warning(
                    "KV offloading leaves the disk of '%s' alone: it fails or hangs. Requests are "
                    "computed, and it is tried again, at the latest every %.0f s",
                    self._options.root,
                    self._options.pause_max_s,
                )
            else:
                logger.info("KV offloading uses the disk again")
        return self._metrics.take(gauges)

    def shutdown(self) -> None:
        """Finish the stores whose data is in the pool, within ``shutdown_timeout_s``."""
        self._reactor.stop(self._options.shutdown_timeout_s)
        self._trace.close()


def load_report(job: Job, result: JobResult, ahead_bytes: int) -> LoadReport:
    """Of a load that brought everything, or took too long; whole chunks count, as they are read
    whole."""
    size = sum(chunk.payload_bytes for chunk in job.chunks)
    dram_bytes = size * result.dram // max(1, result.chunks)
    return LoadReport(dram_bytes, size - dram_bytes, ahead_bytes, result.seconds)


def geometry_of(caches: CanonicalKVCaches, blocks_per_chunk: int) -> ChunkGeometry:
    """Sizes of this rank's chunks."""
    return ChunkGeometry(
        tuple(
            tuple(PageReference(ref.tensor_idx, ref.page_size_bytes) for ref in group)
            for group in caches.group_data_refs
        ),
        blocks_per_chunk,
    )


def _copy_batch() -> CopyBatch | None:
    if current_platform.is_cpu():
        return None
    from vllm import _custom_ops as ops

    return ops.swap_blocks_batch
