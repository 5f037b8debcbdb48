# SPDX-License-Identifier: Apache-2.0
"""From vLLM's waiting queue to the worker's list of chunks, through vLLM's own scheduler and
connector. Chunks are empty files; only the model and the transfers are made up."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.preload", reason="needs the patched vLLM")

from vllm.config import (
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
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
    ReqContext,
    TransferResult,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.metrics.cache_hit_source import CacheHitSource
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
    opt_folder,
    sliding_window,
)
from vllm import SamplingParams
from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager
from vllm.v1.kv_offload.pykvcache.plan import ChunkSpec
from vllm.v1.kv_offload.pykvcache.preload import PreloadPlan, first_requests
from vllm.v1.kv_offload.pykvcache.worker import PyKVCacheWorker

STEPS_MAX = 60
LOOKAHEAD = 3


class RecordingWorker(PyKVCacheWorker):
    """Ends each transfer in the step after it, and writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[OffloadKey, ...]]] = []
        self.dram_changes: dict[OffloadKey, int] = {}
        self.waits = 0
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

    def take_dram_changes(self) -> dict[OffloadKey, int]:
        taken, self.dram_changes = self.dram_changes, {}
        return taken

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

    def __post_init__(self) -> None:
        self.now = 0.0
        self.options = {"root": self.root, "preload_lookahead": LOOKAHEAD, **self.options}
        self.manager = PyKVCacheManager(Config(**self.options), [self.root])
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


MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return opt_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_engine(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    return lambda **more: Engine(model_dir, tmp_path / "root", monkeypatch, **more)


@pytest.fixture(params=[False, True], ids=["plain", "inside-multi-connector"])
def engine(request: pytest.FixtureRequest, make_engine: MakeEngine) -> Engine:
    return make_engine(inside_multi_connector=request.param)


# --- from the queue to the worker


def test_chunks_of_waiting_requests_reach_the_worker_in_the_queues_order(engine: Engine) -> None:
    engine.occupy()
    first, second = engine.add("B", 3), engine.add("C", 2)
    engine.step()
    assert engine.plan == [*engine.keys(first), *engine.keys(second)]


def test_unchanged_plan_is_not_sent_again(engine: Engine) -> None:
    engine.occupy()
    engine.add("B", 3)
    assert engine.step().preload is not None
    for _ in range(3):
        assert engine.step().preload is None
        engine.now += 5.0
    assert [what for what, _ in engine.worker.calls] == ["preload"]


def test_nothing_is_sent_while_nothing_waits(engine: Engine) -> None:
    engine.occupy()
    assert engine.step().preload is None
    assert engine.worker.calls == []


def test_requests_with_priority_come_first(make_engine: MakeEngine) -> None:
    engine = make_engine(policy="priority")
    engine.occupy()
    last = engine.add("B", 2, priority=2, arrival_time=1.0)
    first = engine.add("C", 1, priority=1, arrival_time=2.0)
    between = engine.add("D", 1, priority=2, arrival_time=0.5)
    engine.step()
    assert engine.plan == [key for each in (first, between, last) for key in engine.keys(each)]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_no_more_requests_are_looked_at_than_the_lookahead(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    engine = make_engine(policy=policy)
    engine.occupy()
    requests = [engine.add(name, 1, arrival_time=at) for at, name in enumerate("BCDEFGHIJ")]
    connector, seen = engine.scheduler.connector, []
    assert connector is not None
    note = connector.on_preload_candidates
    monkeypatch.setattr(
        connector, "on_preload_candidates", lambda given: (seen.append(list(given)), note(given))
    )
    engine.step()
    assert seen == [requests[:LOOKAHEAD]]
    assert engine.plan == [key for each in requests[:LOOKAHEAD] for key in engine.keys(each)]


def test_no_candidate_is_asked_for_without_a_lookahead(make_engine: MakeEngine) -> None:
    engine = make_engine(options={"preload_lookahead": 0})
    engine.occupy()
    engine.add("B", 3)
    assert engine.step().preload is None
    assert engine.worker.calls == []


def test_only_the_leading_chunks_on_disk_are_planned(engine: Engine) -> None:
    engine.occupy()
    request = engine.add("B", 4, on_disk=False)
    keys = engine.keys(request)
    engine.publish(keys[0], keys[1], keys[3])
    engine.step()
    assert engine.plan == keys[:2]


def test_chunk_published_meanwhile_is_found_after_the_refresh_time(engine: Engine) -> None:
    engine.occupy()
    keys = engine.keys(engine.add("B", 2, on_disk=False))
    engine.publish(keys[0])
    engine.step()
    engine.publish(keys[1])
    engine.step()
    assert engine.plan == keys[:1]
    engine.now += 1.5
    engine.step()
    assert engine.plan == keys


def test_what_the_gpu_cache_holds_is_left_out(engine: Engine) -> None:
    engine.add("B", 2, seed=7, on_disk=False)
    engine.step()
    engine.step()
    engine.occupy()
    waiting = engine.add("C", 5, seed=7)
    engine.step()
    assert engine.plan == engine.keys(waiting)[2:]


def test_request_that_must_not_read_a_cache_is_left_out(engine: Engine) -> None:
    engine.occupy()
    request = engine.request("B", 3)
    engine.publish(*engine.keys(request))
    request.skip_reading_prefix_cache = True
    engine.scheduler.add_request(request)
    engine.step()
    assert engine.plan == []


@pytest.mark.parametrize(("most", "chunks"), [(TOKENS_PER_CHUNK, 1), (70, 2), (0, 0)])
def test_limit_of_tokens_to_load_is_kept(make_engine: MakeEngine, most: int, chunks: int) -> None:
    engine = make_engine()
    engine.occupy()
    request = engine.add("B", 4, params={"max_load_tokens": most})
    engine.step()
    assert engine.plan == engine.keys(request)[:chunks]


def test_window_is_planned_only_before_the_end_of_the_hit(make_engine: MakeEngine) -> None:
    engine = make_engine(specs=(full_attention(), sliding_window()))
    engine.occupy()
    request = engine.add("B", 6)
    engine.step()
    planned = {
        group: [k for k in engine.plan if get_offload_group_idx(k) == group] for group in (0, 1)
    }
    assert planned[0] == engine.keys(request)
    assert planned[1] == engine.keys(request, group=1)[-2:]


def test_planned_chunks_are_those_that_the_load_reads(make_engine: MakeEngine) -> None:
    engine = make_engine(specs=(full_attention(), sliding_window()))
    engine.occupy()
    engine.add("B", 6)
    engine.step()
    planned = engine.plan
    engine.abort("A")
    engine.step()
    (loaded,) = [keys for what, keys in engine.worker.calls if what == "load"]
    assert sorted(loaded) == sorted(planned)


# --- withdrawal


def test_aborted_candidate_is_withdrawn(engine: Engine) -> None:
    engine.occupy()
    engine.add("B", 3)
    other = engine.add("C", 2)
    engine.step()
    engine.abort("B")
    engine.step()
    assert engine.plan == engine.keys(other)


def test_overtaken_candidate_is_withdrawn(make_engine: MakeEngine) -> None:
    engine = make_engine(policy="priority", options={"preload_lookahead": 1})
    engine.occupy()
    engine.add("B", 2, priority=2)
    engine.step()
    urgent = engine.add("C", 1, priority=1)
    engine.step()
    assert engine.plan == engine.keys(urgent)


def test_load_reaches_the_worker_before_its_chunks_leave_the_plan(engine: Engine) -> None:
    engine.occupy()
    first, second = engine.add("B", 3), engine.add("C", 2)
    engine.step()
    engine.abort("A")
    metadata = engine.step()
    assert metadata.load_jobs and metadata.preload is not None
    assert engine.worker.calls[1:] == [
        ("load", tuple(engine.keys(first))),
        ("load", tuple(engine.keys(second))),
        ("preload", ()),
    ]


def test_idle_engine_has_withdrawn_everything_and_sleeps(engine: Engine) -> None:
    """Nothing keeps it going round for a preload, and no preload is left behind."""
    engine.occupy()
    engine.add("B", 3)
    engine.step()
    assert engine.plan
    engine.abort("A", "B")
    assert engine.scheduler.has_requests()
    while engine.scheduler.has_requests():
        engine.step()
    assert engine.plan == []
    assert [what for what, _ in engine.worker.calls] == ["preload", "preload"]


def test_engine_steps_until_every_candidate_has_run(engine: Engine) -> None:
    engine.occupy()
    engine.add("B", 3)
    engine.add("C", 2)
    engine.step()
    engine.abort("A")
    while engine.scheduler.has_requests():
        engine.step()
    assert not engine.scheduler.requests
    assert engine.plan == []
    assert [what for what, _ in engine.worker.calls].count("load") == 2


# --- what workers hold in DRAM


def test_report_travels_without_a_finished_job(engine: Engine) -> None:
    engine.occupy()
    key = engine.keys(engine.request("B", 1))[0]
    context = ReqContext("B")
    assert engine.manager.get_load_source(key, context) is CacheHitSource.DISK
    engine.worker.dram_changes = {key: 1}
    engine.step()
    assert engine.manager.in_dram(key)
    assert engine.manager.get_load_source(key, context) is CacheHitSource.HOST
    engine.worker.dram_changes = {key: -1}
    engine.step()
    assert not engine.manager.in_dram(key)


def test_report_travels_with_a_finished_job(engine: Engine) -> None:
    request = engine.add("B", 2)
    key = engine.keys(request)[0]
    engine.worker.dram_changes = {key: 1}
    while engine.scheduler.has_requests():
        engine.step()
    assert not engine.scheduler.requests
    assert engine.manager.in_dram(key)


def test_chunk_is_in_dram_when_every_rank_holds_it(tmp_path: Path) -> None:
    manager = PyKVCacheManager(Config(root=tmp_path), [tmp_path / "0", tmp_path / "1"])
    key = make_offload_key(b"k" * 32, 0)
    manager.note_dram({key: 1})
    assert not manager.in_dram(key)
    manager.note_dram({key: 1})
    assert manager.in_dram(key)
    manager.note_dram({key: -1})
    assert not manager.in_dram(key)


def test_reports_of_all_ranks_are_added_up() -> None:
    both, gone, moved = (make_offload_key(bytes([at]) * 32, 0) for at in range(3))
    reports = [
        OffloadingWorkerMetadata(dram={both: 1, moved: 1}),
        OffloadingWorkerMetadata(dram={both: 1, gone: -1, moved: -1}),
    ]
    outputs: list[ModelRunnerOutput | None] = [
        ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=r))
        for r in reports
    ]
    merged = KVOutputAggregator(2).aggregate(outputs)
    assert merged is not None and merged.kv_connector_output is not None
    metadata = merged.kv_connector_output.kv_connector_worker_meta
    assert isinstance(metadata, OffloadingWorkerMetadata)
    assert metadata.dram == {both: 2, gone: -1}


# --- other connectors


class OtherManager(OffloadingManager):
    """A backend that knows nothing of preloading."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> Any:
        raise NotImplementedError

    prepare_load = prepare_store = complete_store = on_new_request = lookup  # type: ignore


def bare(kind: type[KVConnectorBase_V1], **attributes: Any) -> Any:
    connector = kind.__new__(kind)
    for name, value in attributes.items():
        setattr(connector, name, value)
    return connector


def test_other_backends_ask_for_no_candidates_and_report_nothing() -> None:
    scheduler = type("Scheduler", (), {"manager": OtherManager()})()
    assert bare(OffloadingConnector, connector_scheduler=scheduler).preload_lookahead == 0
    worker = type("Worker", (), {"worker": object(), "build_connector_worker_meta": lambda s: None})
    connector = bare(OffloadingConnector, connector_worker=worker())
    assert connector.build_connector_worker_meta() is None


def test_worker_side_asks_for_no_candidates() -> None:
    assert bare(OffloadingConnector, connector_scheduler=None).preload_lookahead == 0


class Asking(OffloadingConnector):
    lookahead = 0

    @property
    def preload_lookahead(self) -> int:
        return self.lookahead

    def on_preload_candidates(self, requests: list[Request]) -> None:
        self.given = requests


def test_multi_connector_shows_each_child_what_it_asks_for() -> None:
    children = [bare(Asking, lookahead=count, given=None) for count in (2, 0, 4)]
    multi = bare(MultiConnector, _connectors=children)
    assert multi.preload_lookahead == 4
    multi.on_preload_candidates(["a", "b", "c", "d"])
    assert [child.given for child in children] == [["a", "b"], None, ["a", "b", "c", "d"]]
    assert bare(MultiConnector, _connectors=[]).preload_lookahead == 0


# --- the head of a queue


class Counted:
    """Stands for a request; counts how often two are compared."""

    comparisons = 0

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __lt__(self, other: Counted) -> bool:
        Counted.comparisons += 1
        return self.rank < other.rank


@pytest.mark.parametrize("waiting", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("kind", [FCFSRequestQueue, PriorityRequestQueue])
def test_head_of_the_queue_is_what_would_be_popped(kind: Any, waiting: int, count: int) -> None:
    queue = kind()
    for rank in random.Random(waiting).sample(range(waiting), waiting):
        queue.add_request(Counted(rank))
    first = first_requests(queue, count)
    assert len(queue) == waiting
    assert first == [queue.pop_request() for _ in range(min(count, waiting))]


def test_work_does_not_grow_with_the_queue() -> None:
    queue: Any = PriorityRequestQueue()
    for rank in range(20_000):
        queue.add_request(Counted(rank))
    Counted.comparisons = 0
    assert [each.rank for each in first_requests(queue, 16)] == list(range(16))  # type: ignore
    assert Counted.comparisons < 16 * 2 * 2 * 6  # two pushes and a pop of a small heap each


def test_first_come_queue_is_not_walked_beyond_the_lookahead() -> None:
    class Watched(FCFSRequestQueue):
        taken = 0

        def __iter__(self) -> Iterator[Any]:
            for request in super().__iter__():
                Watched.taken += 1
                yield request

    queue: Any = Watched(range(1000))
    assert first_requests(queue, 4) == [0, 1, 2, 3]
    assert Watched.taken == 4


# --- plans and loads agree


@pytest.mark.parametrize("seed", range(25))
def test_plan_is_what_the_load_reads_whatever_is_missing(
    make_engine: MakeEngine, seed: int
) -> None:
    chosen = random.Random(seed)
    specs = chosen.choice(
        [(full_attention(),), (sliding_window(),), (full_attention(), sliding_window())]
    )
    engine = make_engine(specs=specs)
    if chosen.random() < 0.5:  # its first chunks are in the GPU's prefix cache
        engine.add("B", chosen.randint(1, 3), seed=7, on_disk=False)
        for _ in range(3):
            engine.step()
    engine.occupy()
    params = {"max_load_tokens": chosen.randint(0, 300)} if chosen.random() < 0.3 else None
    request = engine.request("C", 7, seed=7, params=params)
    for group in range(len(specs)):
        engine.publish(*(key for key in engine.keys(request, group) if chosen.random() < 0.85))
    engine.scheduler.add_request(request)
    engine.step()
    planned = engine.plan
    engine.abort("A")
    engine.step()
    loaded = [key for what, keys in engine.worker.calls if what == "load" for key in keys]
    assert sorted(planned) == sorted(loaded)


def test_chunks_being_loaded_for_another_request_are_not_wanted(make_engine: MakeEngine) -> None:
    """Who waits for them too finds them in the GPU's prefix cache."""
    engine = make_engine()
    engine.occupy()
    engine.add("B", 3, seed=7)
    longer = engine.add("C", 5, seed=7)
    engine.step()
    assert engine.plan == engine.keys(longer)
    engine.abort("A")
    metadata = engine.step()
    assert len(metadata.load_jobs) == 1
    assert engine.plan == engine.keys(longer)[3:]
    engine.step()
    assert engine.plan == engine.keys(longer)[3:]


# --- cost and failures


def test_few_requests_are_looked_up_again_in_one_step(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.occupy()
    for name in "BCD":
        engine.add(name, 4)
    calls: list[bytes] = []
    planner = engine.manager.preloads
    holds = planner._holds
    monkeypatch.setattr(planner, "_holds", lambda key: (calls.append(key), holds(key))[1])
    engine.step()
    assert len(calls) == 3 * 4
    calls.clear()
    engine.step()
    assert calls == []
    engine.now += 2.0
    for _ in range(3):
        engine.step()
        assert len(calls) == 4
        calls.clear()
    engine.step()
    assert calls == []


def test_failure_while_planning_never_reaches_the_scheduler(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.occupy()
    other = engine.request("C", 2)
    engine.publish(*engine.keys(other))

    def fail(key: bytes) -> bool:
        if key in broken:
            raise OSError("stale file handle")
        return holds(key)

    planner = engine.manager.preloads
    holds = planner._holds
    monkeypatch.setattr(planner, "_holds", fail)
    broken = engine.keys(engine.add("B", 3))
    engine.scheduler.add_request(other)
    engine.step()
    assert engine.plan == engine.keys(other)


def test_session_whose_tokens_may_change_is_left_out(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.occupy()
    request = engine.request("B", 3)
    engine.publish(*engine.keys(request))
    request.resumable = True
    engine.scheduler.add_request(request)
    engine.step()
    assert engine.plan == []


def test_reset_looks_everything_up_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.occupy()
    keys = engine.keys(engine.add("B", 2))
    engine.step()
    Path(engine.paths.final(keys[1])).unlink()
    engine.manager.reset_cache()
    engine.step()
    assert engine.plan == keys[:1]


def test_what_was_planned_before_a_reset_is_withdrawn_when_nothing_waits(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    engine.occupy()
    engine.add("B", 2)
    engine.step()
    assert engine.plan
    engine.manager.reset_cache()
    engine.abort("B")
    engine.step()
    assert engine.plan == []


# --- steps without tokens


def test_a_step_without_tokens_lets_a_transfer_end(engine: Engine) -> None:
    request = engine.add("B", 3)
    assert engine.step().empty_step
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.worker.waits == 1


def test_a_step_that_computes_waits_for_no_transfer(engine: Engine) -> None:
    engine.occupy()
    engine.add("B", 3)
    assert not engine.step().empty_step
    assert engine.worker.waits == 0
