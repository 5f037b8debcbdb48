# SPDX-License-Identifier: Apache-2.0
"""What a worker tells the scheduler of its loads; the reactor behind it is made up."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.worker", reason="needs the patched vLLM")

import numpy as np
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, make_offload_key

from pykvcache.config import Config
from pykvcache.geometry import ChunkGeometry, PageReference
from pykvcache.reactor.reactor import Gauges
from pykvcache.transfer.jobs import Direction, Failure, JobResult
from vllm.v1.kv_offload.pykvcache.metrics import WorkerMetrics
from vllm.v1.kv_offload.pykvcache.plan import ChunkSpec, Planner
from vllm.v1.kv_offload.pykvcache.reports import LoadReport
from vllm.v1.kv_offload.pykvcache.tracing import WorkerTrace
from vllm.v1.kv_offload.pykvcache.worker import PyKVCacheWorker

BLOCKS = 2
CHUNK_BYTES = BLOCKS * 4096
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(4)]


class Reactor:
    """Takes jobs and answers what it is told to."""

    def __init__(self) -> None:
        self.gauges = Gauges()
        self.results: list[JobResult] = []
        self.dram: list[tuple[bytes, int]] = []

    def fence(self) -> object:
        return None

    def submit(self, job: Any) -> None:
        pass

    def take_results(self) -> list[JobResult]:
        taken, self.results = self.results, []
        return taken

    def take_dram_changes(self) -> list[tuple[bytes, int]]:
        taken, self.dram = self.dram, []
        return taken


@pytest.fixture
def worker() -> PyKVCacheWorker:
    made: Any = PyKVCacheWorker.__new__(PyKVCacheWorker)
    geometry = ChunkGeometry(((PageReference(0, 4096),),), BLOCKS)
    made._options = Config()
    made._reactor = Reactor()
    made._planner = Planner(geometry, [0], lambda key: key.hex())
    made._trace = WorkerTrace(None)
    made._metrics = WorkerMetrics(0)
    made._frozen = True
    made._jobs, made._refused = {}, []
    made._begin_reports(CHUNK_BYTES)
    return made


def load(worker: PyKVCacheWorker, job_id: int, keys: list[OffloadKey]) -> None:
    blocks = np.arange(1, 1 + BLOCKS * len(keys), dtype=np.int64)
    device = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
    worker.submit_load(job_id, ChunkSpec(tuple(keys)), device)


def end(worker: PyKVCacheWorker, job_id: int, keys: int, **more: Any) -> None:
    reactor: Any = worker._reactor
    result = JobResult(job_id, Direction.LOAD, 0.5, 0, 0, keys, **more)
    reactor.results.append(result)
    worker.get_finished()


def test_a_load_is_told_by_tier_once(worker: PyKVCacheWorker) -> None:
    load(worker, 7, KEYS)
    end(worker, 7, 4, dram=1)
    assert worker.take_report().loads == {7: LoadReport(CHUNK_BYTES, 3 * CHUNK_BYTES, 0, 0.5)}
    assert worker.take_report().loads == {}


@pytest.mark.parametrize(
    ("failure", "is_told"), [(Failure.DEADLINE, True), (Failure.IO_ERROR, False)]
)
def test_of_failures_only_a_deadline_tells_how_long_a_load_takes(
    worker: PyKVCacheWorker, failure: Failure, is_told: bool
) -> None:
    load(worker, 7, KEYS[:2])
    end(worker, 7, 2, failures={bytes(KEYS[1]): failure})
    assert (7 in worker.take_report().loads) is is_told


def test_a_load_behind_others_says_what_was_to_be_read_before_it(worker: PyKVCacheWorker) -> None:
    reactor: Any = worker._reactor
    load(worker, 1, KEYS[:2])
    load(worker, 2, KEYS[2:3])  # the reactor has looked at neither
    assert worker.take_report().unread_bytes == 3 * CHUNK_BYTES
    reactor.gauges = Gauges(unread=1)
    load(worker, 3, KEYS[3:])
    assert worker.take_report().unread_bytes == 2 * CHUNK_BYTES
    for job_id, keys in ((1, 2), (2, 1), (3, 1)):
        end(worker, job_id, keys)
    told = {job_id: report.ahead_bytes for job_id, report in worker.take_report().loads.items()}
    assert told == {1: 0, 2: 2 * CHUNK_BYTES, 3: CHUNK_BYTES}


def test_a_report_names_its_step_and_what_came_into_dram(worker: PyKVCacheWorker) -> None:
    reactor: Any = worker._reactor
    worker.step = 12
    reactor.dram = [(KEYS[0], 1), (KEYS[1], 1), (KEYS[1], -1)]
    report = worker.take_report()
    assert (report.step, report.dram) == (12, {KEYS[0]: 1})
