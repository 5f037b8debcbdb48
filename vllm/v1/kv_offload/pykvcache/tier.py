# SPDX-License-Identifier: Apache-2.0
"""A secondary tier of vLLM's own tiering: files below its CPU tier.

Runs in the scheduler's process; one reactor does what other tiers have pools of threads for.
Payloads move straight between files and the CPU tier's memory: what vLLM hands a tier is that
memory, pinned until the tier says that it is done, so a copy through a pool would only cost.
The pool holds nothing but trailer pages. With O_DIRECT that needs rows of whole pages, which is
how vLLM lays its region out; other memory gets buffered I/O.

In vLLM's tiering a look-up that finds a chunk takes memory for it at once; when that happens,
and for whom, is decided by :mod:`pykvcache.scheduler.promotions`.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult as TierJobResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pykvcache.access import access_of
from pykvcache.capacity.admission import Admission
from pykvcache.capacity.keeper import Keeper
from pykvcache.claims import Claim
from pykvcache.identity import RankIdentity
from pykvcache.layout import BlockSpan, ChunkPaths, file_bytes, padded
from pykvcache.limits import tier_limits_of
from pykvcache.pool import Pool
from pykvcache.reactor.copier import NoCopier
from pykvcache.reactor.probe import choose_engine, make_engine
from pykvcache.reactor.reactor import Reactor
from pykvcache.reactor.rows import Rows
from pykvcache.reactor.timeline import Timeline
from pykvcache.scheduler.catalog import Catalog
from pykvcache.scheduler.existence import Existence
from pykvcache.scheduler.promotions import Promotions, Verdict, rows_for_promotions
from pykvcache.startup import check_root
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure, Job, JobResult
from vllm.v1.kv_offload.pykvcache.backend import logged_refusal
from vllm.v1.kv_offload.pykvcache.manager import touch
from vllm.v1.kv_offload.pykvcache.metrics import TierMetrics, tier_metric_definitions
from vllm.v1.kv_offload.pykvcache.models import check_groups
from vllm.v1.kv_offload.pykvcache.tier_settings import (
    choose_tier_direct,
    parse_tier_config,
    promotion_limits,
    tier_identity,
)
from vllm.v1.kv_offload.pykvcache.tracing import WorkerTrace, make_tracer

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = init_logger(__name__)

RANK = 0
"""Of the directory that the files are in: a row holds the bytes of all ranks."""

DRAIN_LOG_S = 5.0
"""Seconds between warnings while a reset waits for transfers, as vLLM's own tiers do."""

_VERDICTS = {
    Verdict.NOW: LookupResult.HIT,
    Verdict.LATER: LookupResult.RETRY,
    Verdict.NEVER: LookupResult.MISS,
}


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A job of vLLM's that has not been reported back."""

    job: Job
    keys: tuple[OffloadKey, ...]
    """All of them; those that had been stored before are not in the job."""
    failures: dict[bytes, Failure]
    """Of chunks that are not in the job either."""


class PyKVCacheTier(SecondaryTierManager):
    """``{"type": "pykvcache", "root": ...}`` in vLLM's ``secondary_tiers``."""

    medium: ClassVar[Medium] = Medium.STORAGE
    # Said by each tier instead of the class: vLLM's test of its registry knows the sources of
    # its own classes, and expects none of others.
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str | None = None,
        enable_kv_events: bool = False,
        **options: Any,
    ) -> None:
        """Args:
        offloading_spec: vLLM's, with the facts of the patch ``tier-facts``.
        primary_kv_view: the CPU tier's memory, ``(chunks, bytes of a chunk)``.
        tier_type: as in the configuration.
        backpressure_detector: vLLM's, by which it withholds stores.
        locality: vLLM's name for where the files are.
        enable_kv_events: whether stored chunks are published as KV events.
        options: those of :class:`pykvcache.config.Config`.

        Raises:
            ConfigError: a bad option, or a root or engine that cannot be used.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.cache_hit_source = CacheHitSource.DISK  # type: ignore[misc]
        self.locality = Locality(locality) if locality is not None else None
        events = offloading_spec.kv_events_config.enable_kv_cache_events
        if enable_kv_events and not events:
            logger.warning(
                "KV offloading: tier '%s' publishes no events; vLLM's are off", tier_type
            )
        self._events: list[OffloadingEvent] | None = [] if enable_kv_events and events else None
        with logged_refusal():
            self._options = parse_tier_config(options)
            self._start(offloading_spec, primary_kv_view)
        self._jobs: dict[int, _Submitted] = {}
        self._finished: list[TierJobResult] = []
        self._store_rows = 0

    def _start(self, spec: OffloadingSpec, primary_kv_view: memoryview) -> None:
        options, config = self._options, spec.config
        if config.groups:
            check_groups(
                [group.tokens_per_block for group in config.groups],
                recurrent=False,
                prompts_only=bool(config.extra_config.get("offload_prompt_only", True)),
                config=options,
            )
        check_root(options)
        self._rows = Rows(primary_kv_view)
        try:
            self._start_reactor(config)
        except BaseException:
            self._rows.release()  # vLLM unmaps them
            raise

    def _start_reactor(self, config: OffloadingConfig) -> None:
        options, rows = self._options, self._rows
        identity = tier_identity(config, options, rows.row_bytes)
        # Nothing follows a symbolic link once the root itself has been found.
        root, access = Path(os.path.realpath(options.root)), access_of(options)
        rank_identity = RankIdentity(
            server=identity.fingerprint.hex(),
            rank=RANK,
            layers=tuple(group.layer_names for group in config.groups),
            page_bytes=((rows.row_bytes,),) * len(config.groups),
        )
        self._claim = Claim(root, access, identity, rank_identity, logger)
        directory = self._claim.directory
        direct = choose_tier_direct(options, directory, rows)
        engine = choose_engine(options.io_engine, directory, direct.direct)
        for choice, asked in ((direct, options.direct_io), (engine, options.io_engine)):
            if choice.fallback and asked == "auto":
                logger.warning("KV offloading: %s", choice.why)
        self.directory = directory
        self._rows_max = rows_for_promotions(len(rows), options.slots_min)
        self._paths = ChunkPaths(directory)
        self._span = BlockSpan(0, config.cache.blocks_per_chunk)
        self._existence = Existence(str(root), options.lookup_timeout_s, logger)
        self._catalog = Catalog.of(options, [self._paths], self._existence)
        self.promotions = Promotions(
            promotion_limits(options, self._rows_max, rows.row_bytes), time.monotonic
        )
        self._metrics = TierMetrics()
        tracer = make_tracer(options, "tier")
        self._trace = WorkerTrace(tracer)
        limits, slots = tier_limits_of(options)
        self._reactor = Reactor(
            limits,
            Pool(slots, padded(file_bytes(rows.row_bytes) - rows.row_bytes)),
            lambda buffers: make_engine(
                engine, buffers, direct.direct, options.io_depth, rows, access
            ),
            NoCopier(),
            fingerprint=rank_identity.fingerprint,
            writer=f"{os.getpid():x}-{secrets.token_hex(6)}",
            rows=rows,
            timeline=Timeline(tracer) if tracer is not None else None,
        )
        self._keeper = Keeper(options, [self._paths], logger)
        self._admission = Admission(file_bytes(rows.row_bytes))
        self._reactor.start()
        self._keeper.start()
        if options.switch_interval_s:
            sys.setswitchinterval(min(sys.getswitchinterval(), options.switch_interval_s))
        logger.info(
            "KV offloading tier in %s: %d chunks of %.1f MiB in vLLM's CPU tier, of which "
            "promotions take at most %d, %s (%s), direct I/O %s (%s), depth %d",
            directory,
            len(rows),
            rows.row_bytes / (1 << 20),
            self._rows_max,
            engine.name,
            engine.why,
            "on" if direct.direct else "off",
            direct.why,
            options.io_depth,
        )

    # --- look-ups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """MISS without a file; else HIT when it is the request's turn, RETRY before."""
        if not self._catalog.holds(key):
            return LookupResult.MISS
        return _VERDICTS[self.promotions.ask(req_context.req_id, key)]

    def note_queue(self, req_ids: Sequence[str]) -> None:
        """The first requests of vLLM's waiting queue, in order, once a step."""
        self.promotions.note_queue(req_ids)

    @property
    def lookahead(self) -> int:
        """Requests of the queue that the tier wants to know of; at least the next one."""
        return max(1, self._options.preload_lookahead)

    @property
    def bytes_read(self) -> int:
        """From files, since the start."""
        return self._reactor.gauges.bytes_read

    # --- jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Write the chunks that are not in files yet. Those for which too much of the CPU tier
        waits to be written already are left out and counted: memory that cannot be given to
        anyone would turn promotions, and vLLM's own stores, away."""
        keys = tuple(job_metadata.keys)
        storing = self._catalog.storing
        needed = self._catalog.begin_store(keys)
        allowed = self._admission.allowed(self._keeper.room, storing)
        self._metrics.refuse(len(needed[allowed:]))
        room = min(max(0, self._rows_max - self._store_rows), allowed)
        self._store_rows += len(keys)
        dropped = dict.fromkeys(needed[room:], Failure.DROPPED)
        self._submit(Direction.STORE, job_metadata, needed[:room], dropped)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read the chunks into the CPU tier's memory."""
        self._submit(Direction.LOAD, job_metadata, job_metadata.keys, {})

    def _submit(
        self,
        direction: Direction,
        job_metadata: TransferJob,
        wanted: Iterable[bytes],
        failures: dict[bytes, Failure],
    ) -> None:
        keys = tuple(job_metadata.keys)
        rows = dict(zip(keys, map(int, job_metadata.chunk_ids), strict=True))
        chunks = []
        for key in map(OffloadKey, wanted):
            if 0 <= rows[key] < len(self._rows):
                chunks.append(self._chunk(key, rows[key]))
            else:
                failures[key] = Failure.IO_ERROR
        job = Job(job_metadata.job_id, direction, tuple(chunks))
        self._jobs[job.job_id] = _Submitted(job, keys, failures)
        self.promotions.rows_busy += len(keys)
        self._trace.submit(job)
        self._reactor.submit(job)

    def _chunk(self, key: OffloadKey, row: int) -> ChunkTransfer:
        row_bytes = self._rows.row_bytes
        return ChunkTransfer(
            key=key,
            path=self._paths.final(key),
            payload_bytes=row_bytes,
            file_bytes=file_bytes(row_bytes),
            span=self._span,
            group=0,
            block_ids=(),
            copy_bytes=row_bytes,
            row=row,
        )

    def get_finished_jobs(self) -> Iterable[TierJobResult]:
        """The jobs that have ended since the last call."""
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def _collect(self) -> None:
        for partly in self._reactor.take_results():
            submitted = self._jobs.pop(partly.job_id)
            result = _whole(submitted, partly)
            self.promotions.rows_busy -= len(submitted.keys)
            self._trace.end(partly)
            self._metrics.record([result])
            done = tuple(key for key in submitted.keys if key not in result.failures)
            if result.direction is Direction.STORE:
                self._end_store(submitted, done, result.failures)
            else:
                self._catalog.mark_failed(result.failures)
            if result.failures:
                _log_failures(submitted, result.failures)
            self._finished.append(
                TierJobResult(
                    job_id=result.job_id,
                    success=result.success,
                    successful_keys=None if result.success else done or None,
                    transfer_time=result.seconds,
                    transfer_bytes=result.copied_bytes,
                )
            )

    def _end_store(
        self,
        submitted: _Submitted,
        done: tuple[OffloadKey, ...],
        failures: Mapping[bytes, Failure],
    ) -> None:
        self._store_rows -= len(submitted.keys)
        written = [chunk.key for chunk in submitted.job.chunks if chunk.key not in failures]
        self._catalog.end_store(written, stored=True)
        self._catalog.end_store(failures, stored=False)
        if Failure.NOT_FOUND in failures.values():
            self._claim.renew()
        self._admission.end(len(submitted.job.chunks))
        if self._events is not None and done:
            self._events.append(OffloadingEvent(list(done), self.medium, False, self.locality))

    def drain_jobs(self) -> None:
        """Return when no transfer uses the CPU tier's memory; vLLM empties it then."""
        log_at = time.monotonic() + DRAIN_LOG_S
        self._collect()
        while self._jobs:
            self._reactor.await_result(DRAIN_LOG_S)
            self._collect()
            if self._jobs and time.monotonic() >= log_at:
                log_at += DRAIN_LOG_S
                logger.warning("KV offloading: a reset waits for %d transfers", len(self._jobs))
        self.promotions.forget()

    # --- requests and steps

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Only new chunks are stored."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """What it holds is free for others; its chunks were used."""
        self.promotions.release(req_context.req_id)
        touch(self._keeper, req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Who runs holds no memory any more; plan for whom there is room now."""
        self.promotions.end_step(context.new_req_ids)

    # --- what it tells

    def take_events(self) -> Iterator[OffloadingEvent]:
        """KV events since the last call."""
        if self._events:
            yield from self._events
            self._events.clear()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Those of the backend that mean something here."""
        return tier_metric_definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Metrics since the last call."""
        storing, unanswered = self._catalog.storing, self._existence.unanswered
        gauges, figures = self._reactor.gauges, self._keeper.figures
        return self._metrics.take_all(gauges, storing, figures, unanswered)

    def shutdown(self) -> None:
        """Finish stores within ``shutdown_timeout_s`` and let go of the CPU tier's memory,
        unless a transfer that never returns may still use it. Idempotent."""
        deadline = time.monotonic() + self._options.shutdown_timeout_s
        self._keeper.stop()
        self._existence.close()
        self._collect()
        while self._store_rows and (left_s := deadline - time.monotonic()) > 0:
            self._reactor.await_result(left_s)
            self._collect()
        self._reactor.stop(max(0.0, deadline - time.monotonic()))
        self._collect()
        self._trace.close()
        if self._reactor.is_quiet:
            self._rows.release()


def _whole(submitted: _Submitted, result: JobResult) -> JobResult:
    """The result with the chunks that were not handed to the reactor."""
    left_out = len(submitted.keys) - len(submitted.job.chunks)
    return replace(
        result,
        chunks=len(submitted.keys),
        present=result.present + left_out - len(submitted.failures),
        failures={**result.failures, **submitted.failures},
    )


def _log_failures(submitted: _Submitted, failed: Mapping[bytes, Failure]) -> None:
    reasons = sorted({str(failure) for failure in failed.values()})
    log = logger.debug if reasons == [str(Failure.DROPPED)] else logger.warning
    log(
        "KV offloading: %d of %d chunks of a %s failed (%s)%s",
        len(failed),
        len(submitted.keys),
        submitted.job.direction,
        ", ".join(reasons),
        "; they are recomputed" if submitted.job.direction is Direction.LOAD else "",
    )
