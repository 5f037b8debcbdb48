# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs vLLM's own tests of its secondary tiers on this backend's tier.

    python scripts/conformance.py --tier

The tests make tiers by the names of vLLM's `fs` and `example` tiers and look into them here and
there. Both names are given to the classes below: this backend's tier, with the other's arguments
and with those few attributes. What is only about the insides of vLLM's tiers, or asks for what
this backend does differently on purpose, is left out and listed with the reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import Medium, OffloadKey, ReqContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.example import manager as example
from vllm.v1.kv_offload.tiering.fs import manager as fs
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm.v1.kv_offload.pykvcache.tier import PyKVCacheTier
from vllm.v1.kv_offload.pykvcache.tier_settings import FACTS_KEY

INSIDES = "about the insides of vLLM's fs tier"
REFUSED = "a root that cannot be used is refused by name, with an error of this backend"
LATER = "a bad file is removed, but not before its job ends"
MORE = "chunks behind one that failed are loaded all the same"
TOPOLOGY = "files belong to one topology"
TURNS = "whose turn it is to be promoted is decided by the queue"

LEFT_OUT = {
    "test_invalid_path_raises_at_construction": REFUSED,
    "test_shutdown_discards_pending_tasks": INSIDES,
    "test_store_load_roundtrip_without_o_direct": INSIDES,
    "test_wait_idle_blocks_until_tasks_complete": INSIDES,
    "test_batch_lookup_c_extension": INSIDES,
    "test_failed_load_corrects_verdict_and_removes_corrupt_file": LATER,
    "test_batched_load_first_block_fails_marks_whole_batch": MORE,
    "test_mixed_job_results_emit_event_only_for_successful_job": INSIDES,
    "test_partially_failed_store_emits_no_event": INSIDES,
    "test_fs_tier_cross_tp_round_trip": TOPOLOGY,
    "test_lookup_batches_submit_load_per_request": TURNS,
}
"""Test to the reason."""

FACTS = {
    "engine": "vllm",
    "device": "cpu",
    "model": "test-model",
    "revision": "",
    "weights": "",
    "hash_algorithm": "",
    "hash_seed": "",
}


def example_spec() -> Any:
    """Stands in for the mock that tests of the example tier give it."""
    config = OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="test-engine",
        model=OffloadingModelConfig("test-model", "float32"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
    return SimpleNamespace(
        config=config, kv_events_config=SimpleNamespace(enable_kv_cache_events=False)
    )


class InsteadOfFs(PyKVCacheTier):
    """With the arguments of vLLM's `fs` tier; look-ups are decided at once."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        n_read_threads: int = 0,
        n_write_threads: int = 0,
        **options: Any,
    ) -> None:
        offloading_spec.config.extra_config[FACTS_KEY] = FACTS
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, root=root_dir, lookup_ttl_s=0, **options
        )
        self.file_mapper = SimpleNamespace(get_file_name=self._paths.final)
        self._lookup_manager = SimpleNamespace(
            _pending_results=SimpleNamespace(empty=lambda: False), _lookup_batch=[]
        )
        self._store_job_keys: dict[int, Any] = {}

    @property
    def events(self) -> list[Any] | None:
        """None when they are off."""
        return self._events


class Chunks:
    """`chunks[key] = True` has a file written for the key."""

    def __init__(self, tier: InsteadOfExample) -> None:
        self._tier = tier

    def __setitem__(self, key: OffloadKey, present: bool) -> None:
        job = TransferJob(-1, [key], np.array([0]), False, ReqContext("writes"))
        self._tier.submit_store(job)
        completed = self._tier.completed_jobs
        completed[:] = [result for result in completed if result.job_id != job.job_id]


class InsteadOfExample(PyKVCacheTier):
    """With the arguments of vLLM's `example` tier; transfers end before they are asked about."""

    medium = Medium.CPU
    cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **unused: Any
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pykvcache-example-")
        spec = example_spec()
        spec.config.extra_config[FACTS_KEY] = FACTS
        root = str(Path(self._folder.name) / "root")
        super().__init__(spec, primary_kv_view, tier_type, root=root, lookup_ttl_s=0)
        del self.cache_hit_source  # the tests set the class's
        self.chunks = Chunks(self)

    @property
    def completed_jobs(self) -> list[Any]:
        return self._finished

    def submit_store(self, job_metadata: TransferJob) -> None:
        super().submit_store(job_metadata)
        self._settle()

    def submit_load(self, job_metadata: TransferJob) -> None:
        super().submit_load(job_metadata)
        self._settle()

    def _settle(self) -> None:
        while self._jobs:
            self._reactor.await_result(60.0)
            self._collect()

    def get_num_chunks(self) -> int:
        return sum(1 for _ in self.directory.rglob("*.kv"))


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest before it imports any test."""
    fs.FileSystemTierManager = InsteadOfFs
    example.ExampleSecondaryTierManager = InsteadOfExample


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not about this backend's tier."""
    left_out = [item for item in items if name_of(item) in LEFT_OUT]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if name_of(item) not in LEFT_OUT]


def name_of(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", item.name))


def pytest_report_collectionfinish(items: Iterable[pytest.Item]) -> list[str]:
    """Say what is left out, and why."""
    return [f"left out: {name}: {reason}" for name, reason in LEFT_OUT.items()]
