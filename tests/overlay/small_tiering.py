# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiering, small: its manager and CPU tier over a tier of this backend."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from pykvcache.layout import PAGE
from vllm.v1.kv_offload.pykvcache.tier import PyKVCacheTier
from vllm.v1.kv_offload.pykvcache.tier_settings import FACTS_KEY, TIER_TYPE

ROWS = 8
ROW_BYTES = 2 * PAGE
RESULT_TIMEOUT_S = 60.0
STEPS_MAX = 50

FACTS = {
    "engine": "vllm 0",
    "device": "cpu",
    "model": "small",
    "revision": "",
    "weights": "0" * 64,
    "hash_algorithm": "sha256",
    "hash_seed": "0",
}


def offloading_config(**changes: Any) -> OffloadingConfig:
    """What vLLM tells a tier; its own fields, replaced by `changes`."""
    fields = {
        "groups": (OffloadingGroupConfig(16, ("layer",), 0),),
        "worker_kv_bytes_per_block": ROW_BYTES,
        "enable_kv_cache_events": False,
        "extra_config": {FACTS_KEY: FACTS},
        "engine_id": "small",
        "model": OffloadingModelConfig("small", "float32"),
        "cache": OffloadingCacheConfig(16, 1),
        "parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        **changes,
    }
    return OffloadingConfig(**fields)


def tier_spec(config: OffloadingConfig | None = None, *, events: bool = False) -> Any:
    """What a tier asks of the spec that makes it."""
    return SimpleNamespace(
        config=config or offloading_config(),
        kv_events_config=OffloadingKVEventsConfig(
            enable_kv_cache_events=events, self_describing_kv_events=False
        ),
    )


def make_tier(memory: memoryview, root: Path, spec: Any = None, **options: Any) -> PyKVCacheTier:
    """A tier as vLLM's factory makes it."""
    tier = SecondaryTierFactory.create_secondary_tier(
        {"type": TIER_TYPE, "root": str(root), **options}, memory, spec or tier_spec()
    )
    assert isinstance(tier, PyKVCacheTier)
    return tier


def key_of(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(8, "big"), 0)


def job_of(
    job_id: int, keys: Sequence[OffloadKey], rows: Sequence[int], *, promotion: bool = False
) -> TransferJob:
    return TransferJob(
        job_id, list(keys), np.array(rows, dtype=np.int64), promotion, ReqContext("request")
    )


class Tiering:
    """A server's tiering; a request's KV is as many rows as it has keys."""

    def __init__(self, manager: TieringOffloadingManager, tier: PyKVCacheTier) -> None:
        self.manager = manager
        self.tier = tier
        self.memory = manager.primary_tier.get_kv_memoryview()
        self._contexts: dict[str, ReqContext] = {}

    def arrive(self, *names: str) -> None:
        for name in names:
            self._contexts[name] = ReqContext(name)
            self.manager.on_new_request(self._contexts[name])

    def finish(self, name: str) -> None:
        self.manager.on_request_finished(self._contexts.pop(name))

    def look_up(self, name: str, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """All keys, as vLLM's connector asks on after a RETRY."""
        return [self.manager.lookup(key, self._contexts[name]) for key in keys]

    def store(self, name: str, rows: dict[OffloadKey, bytes]) -> None:
        """What the GPU does not need any more goes to the CPU tier, and from there to files."""
        output = self.manager.prepare_store(list(rows), self._contexts[name])
        assert output is not None
        placed = zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True)
        for key, row in placed:
            self.row(int(row))[:] = rows[key]
        self.manager.complete_store(output.keys_to_store, self._contexts[name])

    def load(self, name: str, keys: Sequence[OffloadKey]) -> list[bytes]:
        """What the GPU would get."""
        spec = self.manager.prepare_load(list(keys), self._contexts[name])
        loaded = [bytes(self.row(int(row))) for row in spec.chunk_ids]
        self.manager.complete_load(list(keys), self._contexts[name])
        return loaded

    def row(self, number: int) -> memoryview:
        return self.memory.cast("B")[number * ROW_BYTES : (number + 1) * ROW_BYTES]

    def step(self, *started: str) -> None:
        """A step of the scheduler ends; all transfers end before the next one begins."""
        self.manager.on_schedule_end(ScheduleEndContext(list(started), ()))
        self.settle()

    def reset(self) -> None:
        """Reset, with no worker that still writes into the CPU tier."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # since 0.33.0
            self.manager.on_reset_flushed()

    def settle(self) -> None:
        """Return when no transfer is in flight."""
        while self.tier._jobs:
            self.tier._reactor.await_result(RESULT_TIMEOUT_S)
            self.tier._collect()

    def fetch(self, name: str, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Look up, step by step, until nothing is undecided."""
        for _ in range(STEPS_MAX):
            results = self.look_up(name, keys)
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(results):
                return results
            self.step()
        raise AssertionError(f"undecided after {STEPS_MAX} steps: {results}")


@contextmanager
def tiering(root: Path, *, rows: int = ROWS, spec: Any = None, **options: Any) -> Iterator[Tiering]:
    """A server from its start to its end."""
    region = SharedOffloadRegion(
        engine_id=f"pykvcache-test-{os.getpid()}-{secrets.token_hex(4)}",
        num_chunks=rows,
        rank=None,
        kv_bytes_per_chunk=ROW_BYTES,
        cpu_page_size=ROW_BYTES,
    )
    path = Path(region.mmap_path)
    try:
        primary = CPUPrimaryTierOffloadingManager(num_chunks=rows, mmap_region=region)
        tier = make_tier(primary.get_kv_memoryview(), root, spec, **options)
        manager = TieringOffloadingManager(primary, [tier])
        small = Tiering(manager, tier)
        try:
            yield small
        finally:
            small.memory.release()
            manager.shutdown()
    finally:
        path.unlink(missing_ok=True)
