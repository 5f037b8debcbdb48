# SPDX-License-Identifier: Apache-2.0
"""From vLLM's waiting queue to the worker's list of chunks, through vLLM's own scheduler and
connector. Chunks are empty files; only the model and the transfers are made up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.preload", reason="needs the patched vLLM")

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
from vllm.v1.kv_offload.base import (
    OffloadingManager,
    OffloadKey,
    ReqContext,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from pykvcache.config import Config
from tests.overlay.small_engine import LOOKAHEAD, Engine
from tests.overlay.small_vllm import (
    TOKENS_PER_CHUNK,
    full_attention,
    opt_folder,
    sliding_window,
)
from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager
from vllm.v1.kv_offload.pykvcache.preload import first_requests
from vllm.v1.kv_offload.pykvcache.reports import LoadReport, WorkerReport
from vllm.v1.kv_offload.pykvcache.steps import Step

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
    fast, slow = LoadReport(0, 10, 0, 1.0), LoadReport(0, 10, 0, 2.0)
    reports = [
        OffloadingWorkerMetadata(
            report=WorkerReport(7, {both: 1, moved: 1}, {1: fast, 2: fast}, 5)
        ),
        OffloadingWorkerMetadata(report=WorkerReport(7, {both: 1, gone: -1, moved: -1}, {1: slow})),
    ]
    outputs: list[ModelRunnerOutput | None] = [
        ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=r))
        for r in reports
    ]
    merged = KVOutputAggregator(2).aggregate(outputs)
    assert merged is not None and merged.kv_connector_output is not None
    metadata = merged.kv_connector_output.kv_connector_worker_meta
    assert isinstance(metadata, OffloadingWorkerMetadata)
    assert metadata.report == WorkerReport(7, {both: 2, gone: -1}, {1: slow, 2: fast}, 5)


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
    assert engine.step().step == Step(1, is_empty=True)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.worker.waits == 1


def test_a_step_that_computes_waits_for_no_transfer(engine: Engine) -> None:
    engine.occupy()
    engine.add("B", 3)
    assert engine.step().step == Step(2, is_empty=False)
    assert engine.worker.waits == 0
