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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey

from pykvcache.scheduler.preload import Candidate, order_preloads
from vllm.v1.kv_offload.pykvcache.tier_settings import TIER_TYPE

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.request import Request

    from vllm.v1.kv_offload.pykvcache.load_keys import Hit
    from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager
    from vllm.v1.kv_offload.pykvcache.tier import PyKVCacheTier

logger = init_logger(__name__)

REFRESH_S = 1.0
"""Seconds for which the chunks found for a waiting request are believed: what is in the GPU's
prefix cache and on disk changes slowly, and looking costs a look-up for each chunk."""

REFRESHES_PER_STEP = 1
"""Requests looked at again in one step: a chunk costs a call to the filesystem, which takes
milliseconds on a shared one, and the scheduler waits for it."""

CHUNKS_MAX = 4096
"""Chunks in a plan when ``preload_slots_max`` does not say: above any pool's slots, which the
scheduler does not know; the workers take what fits, from the front."""


@dataclass(frozen=True)
class PreloadPlan:
    """All chunks wanted ahead, in order; an empty plan withdraws what was wanted."""

    keys: tuple[OffloadKey, ...]


@dataclass(slots=True)
class _LookedUp:
    """What a candidate would load, as of ``since`` (seconds)."""

    keys: tuple[OffloadKey, ...]
    since: float
    done_s: float = 0.0
    """Seconds from then until its prompt is computed, as far as the gate knows."""
    overlapping: bool = False
    """Some of the chunks are being loaded for another request."""


class Worth(Protocol):
    """What of a hit is worth reading ahead."""

    def __call__(
        self,
        scheduler: OffloadingConnectorScheduler,
        request: Request,
        hit: Hit | None,
        after_s: float,
    ) -> tuple[tuple[OffloadKey, ...], float]:
        """The chunks, and the seconds until the request's prompt is computed.

        Args:
            scheduler: the connector's side in vLLM's scheduler.
            request: waits.
            hit: what it could load.
            after_s: seconds until the request before it is done.
        """
        ...


def all_of_it(
    scheduler: OffloadingConnectorScheduler, request: Request, hit: Hit | None, after_s: float
) -> tuple[tuple[OffloadKey, ...], float]:
    """Without a gate everything is."""
    return (hit.keys if hit is not None else ()), 0.0


class PreloadPlanner:
    """Keeps the plan of one scheduler."""

    def __init__(
        self,
        holds: Callable[[bytes], bool],
        *,
        lookahead: int,
        chunks_max: int,
        worth: Worth = all_of_it,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        holds: whether every rank has a chunk's file.
        lookahead: requests looked at.
        chunks_max: chunks in a plan.
        worth: what of a hit is read ahead.
        clock: seconds.
        """
        self.lookahead = lookahead
        self._holds = holds
        self._chunks_max = chunks_max
        self._worth = worth
        self._clock = clock
        self._candidates: dict[str, _LookedUp] = {}
        self._wanted: list[tuple[OffloadKey, ...]] = []
        self._keys: tuple[bytes, ...] = ()
        self._sent: tuple[bytes, ...] = ()

    def note(
        self,
        scheduler: OffloadingConnectorScheduler,
        kv_cache_manager: KVCacheManager | None,
        requests: Sequence[Request],
    ) -> None:
        """Take the head of the queue. Looks only at requests that are new in it, and at
        :data:`REFRESHES_PER_STEP` that were looked at :data:`REFRESH_S` ago."""
        if not requests and not self._candidates and not self._keys:
            return
        # What is on its way to the GPU will be found in its prefix cache by whoever waits too.
        being_loaded = scheduler._chunks_being_loaded or set()
        now = self._clock()
        refreshes = REFRESHES_PER_STEP
        seen: dict[str, _LookedUp] = {}
        after_s = 0.0
        for request in requests:
            known = self._candidates.get(request.request_id)
            is_old = known is not None and refreshes > 0 and now - known.since >= REFRESH_S
            is_free = known is not None and (
                known.overlapping and being_loaded.isdisjoint(known.keys)
            )
            if known is None or is_old or is_free:
                refreshes -= is_old and not is_free
                keys, done_s = self._look_up(scheduler, kv_cache_manager, request, after_s)
                known = _LookedUp(keys, now, done_s)
            after_s = max(after_s, known.done_s - (now - known.since))
            known.overlapping = not being_loaded.isdisjoint(known.keys)
            seen[request.request_id] = known
        self._candidates = seen
        self._arrange(being_loaded)

    def _look_up(
        self,
        scheduler: OffloadingConnectorScheduler,
        kv_cache_manager: KVCacheManager | None,
        request: Request,
        after_s: float,
    ) -> tuple[tuple[OffloadKey, ...], float]:
        from vllm.v1.kv_offload.pykvcache.load_keys import hit_of

        try:
            hit = hit_of(scheduler, kv_cache_manager, request, self._holds)
            return self._worth(scheduler, request, hit, after_s)
        except Exception:
            _log_failure("what a waiting request would load cannot be told")
            return (), 0.0

    def _arrange(self, being_loaded: set[OffloadKey]) -> None:
        wanted = [
            tuple(key for key in known.keys if key not in being_loaded)
            if known.overlapping
            else known.keys
            for known in self._candidates.values()
        ]
        if wanted == self._wanted:  # mostly the very same tuples: no key is compared
            return
        self._wanted = wanted
        candidates = zip(self._candidates, wanted, strict=True)
        self._keys = order_preloads(
            # A head that loads nothing is no reason to put the next one behind others.
            [Candidate(req_id, keys) for req_id, keys in candidates if keys],
            self._chunks_max,
        )

    def forget(self) -> None:
        """Look every candidate up again."""
        self._candidates = {}

    def withdraw(self) -> None:
        """Want nothing."""
        self._candidates, self._wanted, self._keys = {}, [], ()

    def take(self) -> PreloadPlan | None:
        """The plan, if it isn't the one that was taken last."""
        if self._keys == self._sent:
            return None
        self._sent = self._keys
        return PreloadPlan(tuple(OffloadKey(key) for key in self._keys))


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
    if manager is not None:
        return manager.preloads.lookahead
    return max((tier.lookahead for tier in _tiers_of(scheduler)), default=0)


def note_candidates(
    scheduler: OffloadingConnectorScheduler | None,
    kv_cache_manager: KVCacheManager | None,
    requests: Sequence[Request],
) -> None:
    """The head of the waiting queue, once a step."""
    for tier in _tiers_of(scheduler):
        tier.note_queue([each.request_id for each in requests if _can_run(each)])
    manager = _manager_of(scheduler)
    if scheduler is None or manager is None:
        return
    try:
        manager.preloads.note(scheduler, kv_cache_manager, requests)
    except Exception:  # reading ahead is only a help
        _log_failure("the plan of chunks to read ahead cannot be made")
        manager.preloads.withdraw()


def _log_failure(what: str) -> None:
    logger.warning_once("KV offloading: %s; nothing is read ahead for it", what)
    logger.debug("KV offloading: %s", what, exc_info=True)


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
    from vllm.v1.kv_offload.pykvcache.worker import PyKVCacheWorker

    if metadata.preload is not None and isinstance(connector_worker.worker, PyKVCacheWorker):
        connector_worker.worker.preload(metadata.preload)


def _can_run(request: Request) -> bool:
    """Whether it waits for its turn alone. The others look nothing up, nobody knows for how
    long, and whoever is behind them is the next one."""
    from vllm.v1.request import RequestStatus

    return request.status not in (
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
    )


def _tiers_of(scheduler: OffloadingConnectorScheduler | None) -> list[PyKVCacheTier]:
    """Those of this backend in vLLM's tiering. The module is not imported for others."""
    manager = scheduler.manager if scheduler is not None else None
    tiers = getattr(manager, "secondary_tiers", ())
    return [tier for tier in tiers if tier.tier_type == TIER_TYPE]


def _manager_of(scheduler: OffloadingConnectorScheduler | None) -> PyKVCacheManager | None:
    from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager

    manager = scheduler.manager if scheduler is not None else None
    return manager if isinstance(manager, PyKVCacheManager) else None
