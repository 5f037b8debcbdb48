# SPDX-License-Identifier: Apache-2.0
"""The backend's metrics, through vLLM's own mechanism, at ``/metrics``.

Upstream's connector reports bytes, seconds and sizes of loads and stores; these add what
only this backend knows. Prometheus appends ``_total`` to counters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from pykvcache.capacity.keeper import Figures
from pykvcache.reactor.reactor import Gauges
from pykvcache.transfer.jobs import Direction, Failure, JobResult

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )

    from vllm.v1.kv_offload.pykvcache.gate import GateFigures

CHUNKS = "vllm:kv_offload_chunks"
FAILURES = "vllm:kv_offload_chunk_failures"
DROPPED = "vllm:kv_offload_stores_dropped"
FILE_BYTES = "vllm:kv_offload_file_bytes"
SECONDS = "vllm:kv_offload_job_seconds"
STORES_PENDING = "vllm:kv_offload_stores_pending"
SLOTS = "vllm:kv_offload_pool_slots"
SLOTS_IN_USE = "vllm:kv_offload_pool_slots_in_use"
SLOTS_RETAINED = "vllm:kv_offload_pool_slots_retained"
SLOTS_STAGED = "vllm:kv_offload_pool_slots_staged"
QUEUE = "vllm:kv_offload_queue_chunks"
HITS = "vllm:kv_offload_load_hits"
PAUSED = "vllm:kv_offload_paused"
REFUSED = "vllm:kv_offload_stores_refused"
UNANSWERED = "vllm:kv_offload_lookups_unanswered"
DECLINED_LOADS = "vllm:kv_offload_declined_loads"
DECLINED_TOKENS = "vllm:kv_offload_declined_tokens"
DECLINED_STORES = "vllm:kv_offload_stores_declined"
COMPUTE_SPEED = "vllm:kv_offload_gate_compute_tokens_per_second"
LOAD_SPEED = "vllm:kv_offload_gate_load_bytes_per_second"
ROOT_BYTES = "vllm:kv_offload_root_bytes"
ROOT_FILES = "vllm:kv_offload_root_files"
ROOT_PINNED = "vllm:kv_offload_root_pinned_bytes"
ROOT_LIMIT = "vllm:kv_offload_root_limit_bytes"
EVICTED_FILES = "vllm:kv_offload_evicted_files"
EVICTED_BYTES = "vllm:kv_offload_evicted_bytes"
EVICTION_SKIPPED = "vllm:kv_offload_eviction_skipped"


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Names, help texts and labels."""
    return {
        CHUNKS: OffloadingCounterMetadata(
            documentation="KV chunks transferred, by direction. 'present' counts chunks of "
            "stores that another writer had published already.",
            labelnames=("direction", "outcome"),
        ),
        FAILURES: OffloadingCounterMetadata(
            documentation="KV chunks not transferred, by direction and reason: recomputed "
            "if a load, a later miss if a store; tried again by the load if a 'preload'.",
            labelnames=("direction", "reason"),
        ),
        DROPPED: OffloadingCounterMetadata(
            documentation="KV chunks not stored because their GPU blocks were needed first.",
        ),
        FILE_BYTES: OffloadingCounterMetadata(
            documentation="Bytes read from ('load', ahead of loads too) and written to "
            "('store') KV files.",
            labelnames=("direction",),
        ),
        SECONDS: OffloadingCounterMetadata(
            documentation="Seconds from submission to end, summed over jobs.",
            labelnames=("direction",),
        ),
        STORES_PENDING: OffloadingGaugeMetadata(
            documentation="KV chunks whose store has been planned and has not ended.",
        ),
        SLOTS: OffloadingGaugeMetadata(
            documentation="Slots of the staging pool.", labelnames=("rank",)
        ),
        SLOTS_IN_USE: OffloadingGaugeMetadata(
            documentation="Slots of the staging pool in use.", labelnames=("rank",)
        ),
        SLOTS_RETAINED: OffloadingGaugeMetadata(
            documentation="Slots of the pool whose chunk nobody uses now: the DRAM tier.",
            labelnames=("rank",),
        ),
        SLOTS_STAGED: OffloadingGaugeMetadata(
            documentation="Those of them whose chunk a waiting request wants.",
            labelnames=("rank",),
        ),
        HITS: OffloadingCounterMetadata(
            documentation="KV chunks loaded, by the tier they came from: 'dram' (retained or "
            "read ahead) or 'disk'.",
            labelnames=("tier",),
        ),
        QUEUE: OffloadingGaugeMetadata(
            documentation="KV chunks in each of the reactor's queues.",
            labelnames=("rank", "queue"),
        ),
        PAUSED: OffloadingGaugeMetadata(
            documentation="1 while the disk is left alone because it does not work, else 0.",
            labelnames=("rank",),
        ),
        REFUSED: OffloadingCounterMetadata(
            documentation="KV chunks not stored because the root was full.",
        ),
        DECLINED_LOADS: OffloadingCounterMetadata(
            documentation="Hits not loaded, or not to their end, because computing is faster, by "
            "reason: 'slower', 'busy' (only because of what the disk reads for others now), "
            "'partial'. With gate 'always' they are counted and loaded.",
            labelnames=("reason",),
        ),
        DECLINED_TOKENS: OffloadingCounterMetadata(
            documentation="Tokens of these hits that were not loaded.",
            labelnames=("reason",),
        ),
        DECLINED_STORES: OffloadingCounterMetadata(
            documentation="KV chunks not stored because no load of them could be faster than "
            "computing.",
        ),
        COMPUTE_SPEED: OffloadingGaugeMetadata(
            documentation="What the gate has learned: prompt tokens computed a second, of a "
            "prompt of 2,048.",
        ),
        LOAD_SPEED: OffloadingGaugeMetadata(
            documentation="What the gate has learned: bytes of KV that long loads bring to a "
            "rank's GPU in a second, by tier.",
            labelnames=("tier",),
        ),
        UNANSWERED: OffloadingCounterMetadata(
            documentation="Look-ups of KV chunks that counted as misses because the filesystem had "
            "not answered within lookup_timeout_s, this one or one before.",
        ),
        ROOT_BYTES: OffloadingGaugeMetadata(
            documentation="Bytes in the root, of all servers, models and ranks, when it was last "
            "counted or evicted from.",
        ),
        ROOT_FILES: OffloadingGaugeMetadata(
            documentation="KV files in the root, likewise.",
        ),
        ROOT_PINNED: OffloadingGaugeMetadata(
            documentation="Bytes of pinned KV files among them.",
        ),
        ROOT_LIMIT: OffloadingGaugeMetadata(
            documentation="Bytes that the root may hold, by this server's capacity and "
            "free_space_min; follows the filesystem's free space.",
        ),
        EVICTED_FILES: OffloadingCounterMetadata(
            documentation="KV files evicted by this server.",
        ),
        EVICTED_BYTES: OffloadingCounterMetadata(
            documentation="Their bytes.",
        ),
        EVICTION_SKIPPED: OffloadingCounterMetadata(
            documentation="Files and directories that could not be evicted or read, by the "
            "error's name; 'not_a_file' has a KV file's name and is none. Counted in every round.",
            labelnames=("reason",),
        ),
    }


class WorkerMetrics:
    """Collects one rank's figures between two steps."""

    def __init__(self, rank: int | str) -> None:
        self._rank = str(rank)
        self._stats = OffloadingConnectorStats()
        self._gauges: Gauges | None = None

    def record(self, results: Iterable[JobResult]) -> None:
        """Count what jobs did."""
        for result in results:
            direction = str(result.direction)
            stats = self._stats
            transferred = result.chunks - len(result.failures) - result.present
            stats.increase_counter(CHUNKS, transferred, (direction, "transferred"))
            if result.present:
                stats.increase_counter(CHUNKS, result.present, (direction, "present"))
            if result.direction is Direction.STORE:
                stats.increase_counter(FILE_BYTES, result.file_bytes, (direction,))
            else:
                from_dram = min(result.dram, transferred)
                stats.increase_counter(HITS, from_dram, ("dram",))
                stats.increase_counter(HITS, transferred - from_dram, ("disk",))
            stats.increase_counter(SECONDS, result.seconds, (direction,))
            for failure in result.failures.values():
                stats.increase_counter(FAILURES, 1, (direction, str(failure)))
                if failure is Failure.DROPPED:
                    stats.increase_counter(DROPPED, 1)

    def take(self, gauges: Gauges) -> OffloadingConnectorStats | None:
        """What has changed since the last call; None when nothing has."""
        if gauges != self._gauges:
            before, self._gauges = self._gauges or Gauges(), gauges
            self._count(before, gauges)
            self._set_pool(gauges)
            self._stats.set_gauge(PAUSED, int(gauges.is_paused), (self._rank,))
            for queue, chunks in gauges.queues.items():
                self._stats.set_gauge(QUEUE, chunks, (self._rank, queue))
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def _set_pool(self, gauges: Gauges) -> None:
        self._stats.set_gauge(SLOTS, gauges.slots, (self._rank,))
        self._stats.set_gauge(SLOTS_IN_USE, gauges.slots_in_use, (self._rank,))
        self._stats.set_gauge(SLOTS_RETAINED, gauges.slots_retained, (self._rank,))
        self._stats.set_gauge(SLOTS_STAGED, gauges.slots_staged, (self._rank,))

    def _count(self, before: Gauges, now: Gauges) -> None:
        """What belongs to no job: all bytes read, and reads ahead that failed."""
        if now.bytes_read > before.bytes_read:
            read = now.bytes_read - before.bytes_read
            self._stats.increase_counter(FILE_BYTES, read, (str(Direction.LOAD),))
        for failure, count in now.preload_failures.items():
            if count > before.preload_failures.get(failure, 0):
                more = count - before.preload_failures.get(failure, 0)
                self._stats.increase_counter(FAILURES, more, ("preload", str(failure)))


TIER_METRICS = (
    CHUNKS,
    FAILURES,
    DROPPED,
    FILE_BYTES,
    SECONDS,
    STORES_PENDING,
    HITS,
    QUEUE,
    PAUSED,
    REFUSED,
    UNANSWERED,
    ROOT_BYTES,
    ROOT_FILES,
    ROOT_PINNED,
    ROOT_LIMIT,
    EVICTED_FILES,
    EVICTED_BYTES,
    EVICTION_SKIPPED,
)


def tier_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Those that mean something for a secondary tier, which has no pool."""
    definitions = metric_definitions()
    return {name: definitions[name] for name in TIER_METRICS}


class ManagerMetrics:
    """The scheduler side's figures."""

    def __init__(self) -> None:
        self._stores_pending: int | None = None
        self._capacity: Figures | None = None
        self._gate: GateFigures | None = None
        self._unanswered = 0
        self.refused = 0
        """Chunks not stored since the last call of :meth:`take`."""

    def take(
        self,
        *,
        stores_pending: int,
        capacity: Figures | None = None,
        gate: GateFigures | None = None,
        unanswered: int = 0,
    ) -> OffloadingConnectorStats | None:
        """What has changed since the last call; None when nothing has."""
        stats = OffloadingConnectorStats()
        if stores_pending != self._stores_pending:
            self._stores_pending = stores_pending
            stats.set_gauge(STORES_PENDING, stores_pending)
        if self.refused:
            stats.increase_counter(REFUSED, self.refused)
            self.refused = 0
        if unanswered != self._unanswered:
            stats.increase_counter(UNANSWERED, unanswered - self._unanswered)
            self._unanswered = unanswered
        if capacity is not None and capacity != self._capacity:
            before, self._capacity = self._capacity or Figures(), capacity
            _count_capacity(stats, before, capacity)
        if gate is not None and gate != self._gate:
            _count_gate(stats, self._gate, gate)
            self._gate = gate
        return None if stats.is_empty() else stats


class TierMetrics(WorkerMetrics):
    """The figures of a secondary tier, under the rank ``tier``: a worker's and a manager's."""

    def __init__(self) -> None:
        super().__init__("tier")
        self._manager = ManagerMetrics()

    def refuse(self, chunks: int) -> None:
        """So many are not stored because the root is full."""
        self._manager.refused += chunks

    def take_all(
        self, gauges: Gauges, stores_pending: int, capacity: Figures, unanswered: int
    ) -> OffloadingConnectorStats | None:
        """What has changed since the last call; None when nothing has."""
        stats = self._manager.take(
            stores_pending=stores_pending, capacity=capacity, unanswered=unanswered
        )
        if stats is not None:
            self._stats.aggregate(stats)
        return self.take(gauges)

    def _set_pool(self, gauges: Gauges) -> None:
        """The pool has trailer pages only."""


def _count_capacity(stats: OffloadingConnectorStats, before: Figures, now: Figures) -> None:
    stats.set_gauge(ROOT_LIMIT, now.limit)
    if now.usage is not None:
        stats.set_gauge(ROOT_BYTES, now.usage.size)
        stats.set_gauge(ROOT_FILES, now.usage.files)
        stats.set_gauge(ROOT_PINNED, now.usage.pinned)
    for name, more in (
        (EVICTED_FILES, now.evicted_files - before.evicted_files),
        (EVICTED_BYTES, now.evicted_size - before.evicted_size),
    ):
        if more:
            stats.increase_counter(name, more)
    for reason, more in (now.skipped - before.skipped).items():
        stats.increase_counter(EVICTION_SKIPPED, more, (reason,))


def _count_gate(
    stats: OffloadingConnectorStats, before: GateFigures | None, now: GateFigures
) -> None:
    for name, counts, counted in (
        (DECLINED_LOADS, now.declined_loads, before.declined_loads if before else {}),
        (DECLINED_TOKENS, now.declined_tokens, before.declined_tokens if before else {}),
    ):
        for reason, count in counts.items():
            if more := count - counted.get(reason, 0):
                stats.increase_counter(name, more, (reason,))
    if more := now.declined_stores - (before.declined_stores if before else 0):
        stats.increase_counter(DECLINED_STORES, more)
    if now.compute_tokens_per_s:
        stats.set_gauge(COMPUTE_SPEED, now.compute_tokens_per_s)
        for tier, speed in now.load_bytes_per_s.items():
            stats.set_gauge(LOAD_SPEED, speed, (tier,))


def worker_stats(connector_worker: OffloadingConnectorWorker | None) -> KVConnectorStats | None:
    """The figures of a worker of this backend; None for any other (patch ``worker-metrics``)."""
    from vllm.v1.kv_offload.pykvcache.worker import PyKVCacheWorker

    worker = connector_worker.worker if connector_worker is not None else None
    return worker.take_stats() if isinstance(worker, PyKVCacheWorker) else None
