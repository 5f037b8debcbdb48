# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler and connector with the real manager. Chunks are empty files; only the
model and the transfers are made up."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.preload", reason="needs the patched vLLM")

from vllm.config import (
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    TransferResult,
    make_offload_key,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pykvcache.config import Config
from pykvcache.layout import ChunkPaths
from tests.overlay.small_vllm import (
    TOKENS_PER_BLOCK,
    TOKENS_PER_CHUNK,
    device_caches,
    full_attention,
    kv_cache_config,
    offloading_config,
)
from vllm import SamplingParams
from vllm.v1.kv_offload.pykvcache.gate import SchedulerGate
from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager
from vllm.v1.kv_offload.pykvcache.plan import ChunkSpec
from vllm.v1.kv_offload.pykvcache.preload import PreloadPlan
from vllm.v1.kv_offload.pykvcache.reports import LoadReport, WorkerReport
from vllm.v1.kv_offload.pykvcache.worker import PyKVCacheWorker

STEPS_MAX = 60
LOOKAHEAD = 3


class RecordingWorker(PyKVCacheWorker):
    """Ends each transfer in the step after it, and writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[OffloadKey, ...]]] = []
        self.dram_changes: dict[OffloadKey, int] = {}
        self.load_reports: dict[int, LoadReport] = {}
        self.unread_bytes = 0
        self.waits = 0
        self.step = 0
        self._ended: list[int] = []

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        assert isinstance(src_spec, ChunkSpec)
        self.calls.append(("load", src_spec.keys))
        self._ended.append(job_id)
        return True

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._ended.append(job_id)
        return True

    def preload(self, plan: PreloadPlan) -> None:
        self.calls.append(("preload", plan.keys))

    def take_report(self) -> WorkerReport:
        dram, self.dram_changes = self.dram_changes, {}
        loads, self.load_reports = self.load_reports, {}
        return WorkerReport(self.step, dram, loads, self.unread_bytes)

    def await_transfer(self) -> None:
        self.waits += 1

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return [TransferResult(job_id, success=True) for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        pass

    def take_stats(self) -> None:
        return None

    def shutdown(self) -> None:
        pass


@dataclass
class Engine:
    """One request runs at a time; the others wait."""

    model_dir: Path
    root: Path
    monkeypatch: pytest.MonkeyPatch
    policy: str = "fcfs"
    specs: tuple[KVCacheSpec, ...] = field(default_factory=lambda: (full_attention(),))
    inside_multi_connector: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    gate: SchedulerGate | None = None

    def __post_init__(self) -> None:
        self.now = 0.0
        self.options = {"root": self.root, "preload_lookahead": LOOKAHEAD, **self.options}
        self.manager = PyKVCacheManager(Config(**self.options), [self.root], gate=self.gate)
        self.monkeypatch.setattr(self.manager.preloads, "_clock", lambda: self.now)
        self.paths = ChunkPaths(self.root)
        self.worker = RecordingWorker()
        self.steps = 0
        self._register_spec()
        self.config = self._vllm_config()
        cache = kv_cache_config(self.specs)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, self.config)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=cache,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        self.worker_connector = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, cache
        )
        self.worker_connector.register_kv_caches(device_caches(cache))
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(TOKENS_PER_BLOCK, sha256)

    def _register_spec(self) -> None:
        manager, worker = self.manager, self.worker

        class FakeSpec(OffloadingSpec):
            def get_manager(self) -> OffloadingManager:
                return manager

            def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
                return worker

        self.monkeypatch.setitem(OffloadingSpecFactory._registry, "FakeSpec", lambda: FakeSpec)

    def _vllm_config(self) -> VllmConfig:
        config = offloading_config(
            self.model_dir,
            "FakeSpec",
            inside_multi_connector=self.inside_multi_connector,
            max_num_seqs=1,
            policy=self.policy,
        )
        config.scheduler_config.async_scheduling = False
        return config

    def request(
        self,
        name: str,
        chunks: int,
        *,
        seed: int | None = None,
        priority: int = 0,
        max_tokens: int = 1,
        params: dict[str, Any] | None = None,
        arrival_time: float = 0.0,
    ) -> Request:
        """A prompt of so many chunks and some tokens more, different for each seed."""
        first = 1000 * (ord(name) if seed is None else seed)
        request = Request(
            request_id=name,
            prompt_token_ids=list(range(first, first + chunks * TOKENS_PER_CHUNK + 5)),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
            priority=priority,
            arrival_time=arrival_time,
        )
        request.kv_transfer_params = params
        return request

    def keys(self, request: Request, group: int = 0) -> list[OffloadKey]:
        per_chunk = TOKENS_PER_CHUNK // TOKENS_PER_BLOCK
        return [
            make_offload_key(block_hash, group)
            for block_hash in request.block_hashes[per_chunk - 1 :: per_chunk]
        ]

    def publish(self, *keys: OffloadKey) -> None:
        for key in keys:
            path = Path(self.paths.final(key))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def add(self, name: str, chunks: int, *, on_disk: bool = True, **more: Any) -> Request:
        request = self.request(name, chunks, **more)
        if on_disk:
            for group in range(len(self.specs)):
                self.publish(*self.keys(request, group))
        self.scheduler.add_request(request)
        return request

    def occupy(self) -> Request:
        """A request that runs until it is aborted."""
        request = self.add("A", 1, on_disk=False, max_tokens=1000)
        self.step()
        assert request.status is RequestStatus.RUNNING
        return request

    def abort(self, *names: str) -> None:
        for name in names:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> OffloadingConnectorMetadata:
        self.steps += 1
        assert self.steps < STEPS_MAX, "the engine goes round and round"
        output = self.scheduler.schedule()
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        self._update(output, self._work(metadata))
        if isinstance(metadata, MultiKVConnectorMetadata):
            (metadata,) = metadata.metadata
        assert isinstance(metadata, OffloadingConnectorMetadata)
        return metadata

    def _work(self, metadata: Any) -> KVConnectorOutput:
        connector = self.worker_connector
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(None)  # type: ignore[arg-type]
        connector.wait_for_save()
        results = connector.get_transfer_results(set())
        worker_metadata = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            kv_connector_worker_meta=worker_metadata,
        )

    def _update(self, output: SchedulerOutput, connector_output: KVConnectorOutput) -> None:
        names = list(output.num_scheduled_tokens)
        tokens = [[] if self.scheduler.requests[name].is_prefill_chunk else [1] for name in names]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=tokens,
                kv_connector_output=connector_output,
            ),
        )

    @property
    def plan(self) -> list[OffloadKey]:
        """What the worker was told last."""
        plans = [keys for what, keys in self.worker.calls if what == "preload"]
        return list(plans[-1]) if plans else []
