# SPDX-License-Identifier: Apache-2.0
"""Preloading: what waiting requests will load travels to the workers ahead of the loads.

Called from the hooks of the patch ``preload``. The scheduler shows the head of its waiting
queue once a step; :class:`PreloadPlanner` turns it into the complete list of chunks wanted
ahead, which replaces the list before whenever it has changed. A request that has been
scheduled, aborted or finished is not in the queue any more, and its chunks leave the list.

Nothing here keeps an idle engine awake: candidates are unfinished requests, which do.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey

from pykvcache.scheduler.preload import Candidate, order_preloads

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
        OffloadingWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
        RequestOffloadState,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.request import Request

    from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager

logger = init_logger(__name__)

REFRESH_S = 1.0
"""Seconds for which the chunks found for a waiting request are believed: what is in the GPU's
prefix cache and on disk changes slowly, and looking costs a look-up for each chunk."""

CHUNKS_MAX = 4096
"""Chunks in a plan when ``preload_slots_max`` does not say: above any pool's slots, which the
scheduler does not know; the workers take what fits, from the front."""


@dataclass(frozen=True)
class PreloadPlan:
    """All chunks wanted ahead, in order; an empty plan withdraws what was wanted."""

    keys: tuple[OffloadKey, ...]


class PreloadPlanner:
    """Keeps the plan of one scheduler."""

    def __init__(
        self,
        holds: Callable[[bytes], bool],
        *,
        lookahead: int,
        chunks_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        holds: whether every rank has a chunk's file.
        lookahead: requests looked at.
        chunks_max: chunks in a plan.
        clock: seconds.
        """
        self.lookahead = lookahead
        self._holds = holds
        self._chunks_max = chunks_max
        self._clock = clock
        self._candidates: dict[str, tuple[float, Candidate]] = {}
        self._keys: tuple[bytes, ...] = ()
        self._is_new = False

    def note(
        self,
        scheduler: OffloadingConnectorScheduler,
        kv_cache_manager: KVCacheManager | None,
        requests: Sequence[Request],
    ) -> None:
        """Take the head of the queue; looks only at requests that are new in it, or were
        looked at :data:`REFRESH_S` ago."""
        if not requests and not self._candidates:
            return
        now = self._clock()
        seen: dict[str, tuple[float, Candidate]] = {}
        for request in requests:
            known = self._candidates.get(request.request_id)
            if known is None or now - known[0] >= REFRESH_S:
                keys = tuple(self._wanted_by(scheduler, kv_cache_manager, request))
                known = (now, Candidate(request.request_id, keys))
            seen[request.request_id] = known
        self._candidates = seen
        keys = order_preloads([candidate for _, candidate in seen.values()], self._chunks_max)
        if keys != self._keys:
            self._keys = keys
            self._is_new = True

    def take(self) -> PreloadPlan | None:
        """The plan, when it has changed since the last call."""
        if not self._is_new:
            return None
        self._is_new = False
        return PreloadPlan(tuple(OffloadKey(key) for key in self._keys))

    def _wanted_by(
        self,
        scheduler: OffloadingConnectorScheduler,
        kv_cache_manager: KVCacheManager | None,
        request: Request,
    ) -> Iterable[bytes]:
        status = scheduler._req_status.get(request.request_id)
        if status is None or status.transfer_jobs or request.skip_reading_prefix_cache:
            return ()
        status.update_offload_keys()
        local_tokens = 0
        if kv_cache_manager is not None and kv_cache_manager.enable_caching:
            local_tokens = kv_cache_manager.coordinator.find_longest_cache_hit(
                request.block_hashes, request.num_tokens - 1
            )[1]
        return self._beyond(status, local_tokens)

    def _beyond(self, status: RequestOffloadState, local_tokens: int) -> Iterable[bytes]:
        """The chunks that a load after that many local tokens would read, if all groups can."""
        hit_tokens = status.req.num_tokens
        if status.max_load_tokens is not None:
            hit_tokens = min(hit_tokens, local_tokens + status.max_load_tokens)
        groups = list(zip(status.config.kv_group_configs, status.group_states, strict=True))
        for config, state in groups:
            if config.sliding_window_size_in_chunks is not None:
                continue
            first = local_tokens // config.tokens_per_chunk
            run = first
            for key in islice(state.offload_keys, first, hit_tokens // config.tokens_per_chunk):
                if not self._holds(key):
                    break
                run += 1
            hit_tokens = min(hit_tokens, run * config.tokens_per_chunk)
        wanted: list[bytes] = []
        for config, state in groups:
            first = local_tokens // config.tokens_per_chunk
            keys = state.offload_keys[first : hit_tokens // config.tokens_per_chunk]
            window = config.load_window_size_in_chunks(hit_tokens)
            if window is not None:
                keys = [key for key in keys[-window:] if self._holds(key)]
            wanted += keys
        return wanted


def first_requests(queue: RequestQueue, count: int) -> list[Request]:
    """The first requests of a waiting queue in the order they will run.

    A priority queue is walked from the top of its heap: iterating it would copy all of it,
    in every step. O(count log count) for both kinds.
    """
    heap: list[Request] | None = getattr(queue, "_heap", None)
    if heap is None:
        return list(islice(queue, count))
    first: list[Request] = []
    border = [(heap[0], 0)] if heap else []
    while border and len(first) < count:
        request, index = heapq.heappop(border)
        first.append(request)
        for child in (2 * index + 1, 2 * index + 2):
            if child < len(heap):
                heapq.heappush(border, (heap[child], child))
    return first


# --- called from the hooks


def lookahead_of(scheduler: OffloadingConnectorScheduler | None) -> int:
    """Waiting requests to look at; 0 for another backend."""
    manager = _manager_of(scheduler)
    return 0 if manager is None else manager.preloads.lookahead


def note_candidates(
    scheduler: OffloadingConnectorScheduler | None,
    kv_cache_manager: KVCacheManager | None,
    requests: Sequence[Request],
) -> None:
    """The head of the waiting queue, once a step."""
    manager = _manager_of(scheduler)
    if scheduler is not None and manager is not None:
        manager.preloads.note(scheduler, kv_cache_manager, requests)


def attach_plan(
    scheduler: OffloadingConnectorScheduler | None, metadata: OffloadingConnectorMetadata
) -> OffloadingConnectorMetadata:
    """Let the plan travel with the step's metadata."""
    manager = _manager_of(scheduler)
    if manager is not None:
        metadata.preload = manager.preloads.take()
    return metadata


def hand_over(
    connector_worker: OffloadingConnectorWorker, metadata: OffloadingConnectorMetadata
) -> None:
    """Give the plan to the worker; after the step's loads, which claim what is staged."""
    if metadata.preload is not None:
        connector_worker.worker.preload(metadata.preload)


def add_report(
    connector_worker: OffloadingConnectorWorker | None, metadata: OffloadingWorkerMetadata | None
) -> OffloadingWorkerMetadata | None:
    """Add which chunks came into this rank's pool or left it."""
    take: Callable[[], dict[OffloadKey, int]] | None = getattr(
        getattr(connector_worker, "worker", None), "take_dram_changes", None
    )
    changes = take() if take is not None else None
    if not changes:
        return metadata
    if metadata is None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )

        metadata = OffloadingWorkerMetadata()
    metadata.dram = changes
    return metadata


def merge_dram(one: dict[OffloadKey, int], other: dict[OffloadKey, int]) -> dict[OffloadKey, int]:
    """Reports of two ranks; what is left out has not changed."""
    sums = {key: one.get(key, 0) + other.get(key, 0) for key in one.keys() | other.keys()}
    return {key: change for key, change in sums.items() if change}


def note_report(scheduler: OffloadingConnectorScheduler | None, metadata: Any) -> None:
    """Tell the manager what the ranks reported."""
    manager = _manager_of(scheduler)
    changes = getattr(metadata, "dram", None)
    if manager is not None and changes:
        manager.note_dram(changes)


def _manager_of(scheduler: OffloadingConnectorScheduler | None) -> PyKVCacheManager | None:
    from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager

    manager = scheduler.manager if scheduler is not None else None
    return manager if isinstance(manager, PyKVCacheManager) else None
