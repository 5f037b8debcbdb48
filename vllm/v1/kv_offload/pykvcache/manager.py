# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: answers look-ups, plans loads and stores, moves no data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pykvcache.capacity.admission import Admission
from pykvcache.capacity.keeper import Keeper
from pykvcache.config import Config
from pykvcache.layout import ChunkPaths
from pykvcache.scheduler.catalog import Catalog
from pykvcache.scheduler.existence import Existence
from pykvcache.trace import Tracer
from vllm.v1.kv_offload.pykvcache.gate import SchedulerGate
from vllm.v1.kv_offload.pykvcache.metrics import ManagerMetrics
from vllm.v1.kv_offload.pykvcache.plan import ChunkSpec
from vllm.v1.kv_offload.pykvcache.preload import CHUNKS_MAX, PreloadPlanner, all_of_it
from vllm.v1.kv_offload.pykvcache.reports import WorkerReport
from vllm.v1.kv_offload.pykvcache.tracing import SchedulerTrace

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm.v1.kv_offload.pykvcache.load_keys import Hit


logger = init_logger(__name__)

Answer = TypeVar("Answer")


class PyKVCacheManager(OffloadingManager):
    """Chunks are files: looking up asks the filesystem, and no state outlives the server."""

    def __init__(
        self,
        options: Config,
        rank_directories: Sequence[Path],
        tracer: Tracer | None = None,
        keeper: Keeper | None = None,
        chunk_bytes: int = 1,
        gate: SchedulerGate | None = None,
    ) -> None:
        """Args:
        options: of the server.
        rank_directories: where each rank's files lie.
        tracer: records what is decided.
        keeper: keeps the root within its limits; started.
        chunk_bytes: of one chunk's files, all ranks together.
        gate: decides what of a hit is loaded; None: all of it.
        """
        self.gate = gate
        self._keeper = keeper
        self._admission = Admission(chunk_bytes)
        self._existence = Existence(str(options.root), options.lookup_timeout_s, logger)
        self._catalog = Catalog.of(
            options,
            [ChunkPaths(directory) for directory in rank_directories],
            self._existence,
        )
        self._metrics = ManagerMetrics()
        self.trace = SchedulerTrace(tracer)
        self._ranks = len(rank_directories)
        self._dram: Counter[bytes] = Counter()
        self.preloads = PreloadPlanner(
            self._catalog.holds,
            lookahead=options.preload_lookahead,
            chunks_max=options.preload_slots_max or CHUNKS_MAX,
            worth=self._worth_reading_ahead,
        )
        self._steps = 0
        self._requests: set[str] = set()
        self._storing_no_more: set[str] = set()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT when every rank has published the chunk, else MISS; changes nothing."""
        self.trace.look_up(req_context.req_id)
        return LookupResult.HIT if self._catalog.holds(key) else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Host memory when every rank has the chunk in its pool, else disk."""
        return CacheHitSource.HOST if self.in_dram(key) else CacheHitSource.DISK

    def note_dram(self, changes: Mapping[OffloadKey, int]) -> None:
        """Chunks that came into the pools of so many ranks, or left them."""
        for key, change in changes.items():
            self._dram[key] += change
            if self._dram[key] <= 0:
                del self._dram[key]

    def in_dram(self, key: bytes) -> bool:
        """Whether every rank has said that the chunk is in its pool."""
        return self._dram.get(key, 0) >= self._ranks

    def begin_step(self, scheduler: OffloadingConnectorScheduler, output: SchedulerOutput) -> int:
        """A step has been scheduled; its number."""
        self._steps += 1
        tokens, requests = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        self.trace.begin_step(self._steps, tokens, requests)
        self.ask_gate(lambda gate: gate.begin_step(self._steps, scheduler, output), None)
        return self._steps

    def note_report(self, report: WorkerReport) -> None:
        """What the ranks say at the end of a step."""
        self.trace.end_step(report.step)
        self.note_dram(report.dram)
        self.ask_gate(lambda gate: gate.workload.end_step(report), None)

    def ask_gate(self, question: Callable[[SchedulerGate], Answer], otherwise: Answer) -> Answer:
        """Its answer, or what holds without a gate: none is wanted, or it has failed. It is a
        matter of speed only, and an engine does not die of it."""
        if self.gate is None:
            return otherwise
        try:
            return question(self.gate)
        except Exception:
            logger.exception("The KV offloading gate failed; every hit is loaded from here on")
            self.gate = None
            return otherwise

    def _worth_reading_ahead(
        self,
        scheduler: OffloadingConnectorScheduler,
        request: Request,
        hit: Hit | None,
        after_s: float,
    ) -> tuple[tuple[OffloadKey, ...], float]:
        return self.ask_gate(
            lambda gate: gate.worth_reading_ahead(scheduler, request, hit, after_s, self.in_dram),
            all_of_it(scheduler, request, hit, after_s),
        )

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """The plan of a load: its keys in order."""
        self.trace.plan("load", req_context.req_id, keys)
        self._touch(req_context)
        self.ask_gate(lambda gate: gate.plan_load(req_context.req_id, keys, self.in_dram), None)
        return ChunkSpec(tuple(keys))

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """The plan of a store: the keys that are neither held nor being stored, as far as the
        root has room."""
        if req_context.req_id in self._storing_no_more:
            keys = ()
        new = [OffloadKey(key) for key in self._catalog.begin_store(keys)]
        needed = self._admit(self._worth_storing(new, req_context.req_id))
        self.trace.plan("store", req_context.req_id, needed)
        return PrepareStoreOutput(
            keys_to_store=needed, store_spec=ChunkSpec(tuple(needed)), evicted_keys=[]
        )

    def _worth_storing(self, keys: list[OffloadKey], req_id: str) -> list[OffloadKey]:
        if self.ask_gate(lambda gate: gate.admits_store(req_id, len(keys)), True):
            return keys
        self._catalog.end_store(keys, stored=False)
        return []

    def _admit(self, needed: list[OffloadKey]) -> list[OffloadKey]:
        if self._keeper is None or not needed:
            return needed
        storing = self._catalog.storing - len(needed)
        allowed = self._admission.allowed(self._keeper.room, storing)
        refused = needed[allowed:]
        self._catalog.end_store(refused, stored=False)
        self._metrics.refused += len(refused)
        return needed[:allowed]

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """The chunks can be found from now on; without success they are misses."""
        self._catalog.end_store(keys, stored=success)
        self._admission.end(len(keys))
        if success:
            self._touch(req_context)

    def on_load_failed(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """The chunks are misses for a while."""
        self._catalog.mark_failed(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Only new chunks are stored."""
        self._requests.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Nothing more is planned for it; its chunks were used, those in the GPU too."""
        self._touch(req_context)
        self._requests.discard(req_context.req_id)
        self._storing_no_more.discard(req_context.req_id)
        self.ask_gate(lambda gate: gate.forget(req_context.req_id), None)

    def _touch(self, req_context: ReqContext) -> None:
        if self._keeper is not None:
            touch(self._keeper, req_context)

    def reset_cache(self) -> None:
        """Forget what was found. Files stay: they are as good for other servers as before.

        Requests in flight store nothing more: vLLM would offer their chunks from the first one
        on again, with the ids of blocks that a sliding window gave up long ago and that hold
        another request's KV by now.
        """
        self._storing_no_more |= self._requests
        self._catalog.forget()
        self.preloads.forget()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What changed since the last call."""
        figures = self._keeper.figures if self._keeper is not None else None
        gate = self.ask_gate(lambda gate: gate.figures(), None)
        return self._metrics.take(
            stores_pending=self._catalog.storing,
            capacity=figures,
            gate=gate,
            unanswered=self._existence.unanswered,
        )

    def shutdown(self) -> None:
        """End the keeper, and write what is left of the trace."""
        if self._keeper is not None:
            self._keeper.stop()
        self._existence.close()
        self.trace.close()


def touch(keeper: Keeper, req_context: ReqContext) -> None:
    """All chunks of the request so far were used; the connector only tells them one by one."""
    positions = getattr(req_context, "_offload_key_positions", {})
    keeper.touch([(bytes(key), end) for key, end in positions.items()])
