# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side and a worker write into their traces."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.tracing", reason="needs the patched vLLM")

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from pykvcache.commands.trace_files import Span, read_traces
from pykvcache.config import Config
from pykvcache.transfer.jobs import Direction, Job, JobResult
from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager
from vllm.v1.kv_offload.pykvcache.tracing import SchedulerTrace, WorkerTrace, make_tracer


def spans(directory: Path) -> list[Span]:
    return read_traces([directory]).spans


def test_no_path_no_trace(tmp_path: Path) -> None:
    assert make_tracer(Config(root=tmp_path), "scheduler") is None


def test_look_ups_of_a_request_are_one_span(tmp_path: Path) -> None:
    options = Config(root=tmp_path / "root", trace_path=str(tmp_path / "traces"))
    manager = PyKVCacheManager(options, [tmp_path / "root"], make_tracer(options, "scheduler"))
    for req_id, count in (("a", 3), ("b", 2)):
        for number in range(count):
            manager.lookup(OffloadKey(bytes([number])), ReqContext(req_id))
    manager.prepare_load([OffloadKey(b"x")], ReqContext("b"))
    manager.shutdown()
    written = [(span.name, span.args) for span in spans(tmp_path / "traces")]
    assert written == [
        ("look-up", {"request": "a", "asked": 3}),
        ("look-up", {"request": "b", "asked": 2}),
        ("load", {"request": "b", "chunks": 1}),
    ]


def test_steps_end_in_their_order(tmp_path: Path) -> None:
    options = Config(root=tmp_path, trace_path=str(tmp_path / "traces"))
    trace = SchedulerTrace(make_tracer(options, "scheduler"))
    trace.end_step(1)  # of a step before the trace
    trace.begin_step(1, 512, 2)
    trace.begin_step(2, 0, 0)
    trace.end_step(1)
    trace.end_step(2)
    trace.close()
    written = [(span.track, span.name, span.args) for span in spans(tmp_path / "traces")]
    assert written == [
        ("step 1", "forward pass", {"tokens": 512, "requests": 2}),
        ("step 2", "empty step", {"tokens": 0, "requests": 0}),
    ]


def test_a_step_without_an_output_of_its_own_ends_with_the_next_one(tmp_path: Path) -> None:
    options = Config(root=tmp_path, trace_path=str(tmp_path / "traces"))
    trace = SchedulerTrace(make_tracer(options, "scheduler"))
    trace.begin_step(1, 0, 0)
    trace.begin_step(2, 8, 1)
    trace.end_step(2)
    trace.close()
    written = [(span.name, span.args["tokens"]) for span in spans(tmp_path / "traces")]
    assert written == [("empty step", 0), ("forward pass", 8)]


def test_jobs_last_from_submission_to_result(tmp_path: Path) -> None:
    options = Config(root=tmp_path, trace_path=str(tmp_path / "traces"))
    trace = WorkerTrace(make_tracer(options, "worker-0"))
    trace.submit(Job(1, Direction.LOAD, ()))
    trace.submit(Job(2, Direction.LOAD, ()))
    trace.preload(5)
    for job_id in (2, 1):
        trace.end(JobResult(job_id, Direction.LOAD, 0.0, 10, 10, 2, dram=1))
    trace.close()
    written = {(span.track, span.name) for span in spans(tmp_path / "traces")}
    assert written == {("load job 1", "load"), ("load job 2", "load"), ("read ahead", "list")}


def test_without_a_path_nothing_is_recorded() -> None:
    scheduler, worker = SchedulerTrace(None), WorkerTrace(None)
    scheduler.begin_step(1, 1, 1)
    scheduler.look_up("a")
    scheduler.plan("load", "a", [b"x"])
    scheduler.end_step(1)
    worker.submit(Job(1, Direction.LOAD, ()))
    worker.preload(1)
    worker.end(JobResult(1, Direction.LOAD, 0.0, 0, 0, 0))
    scheduler.close()
    worker.close()
