# SPDX-License-Identifier: Apache-2.0
"""Traces: what is recorded, what a killed process leaves, and what a viewer demands."""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pykvcache.commands.trace_files import read_traces
from pykvcache.errors import ConfigError
from pykvcache.layout import BlockSpan
from pykvcache.reactor.timeline import Timeline
from pykvcache.trace import Lanes, Tracer
from pykvcache.transfer.jobs import Direction
from pykvcache.transfer.operations import (
    Action,
    Completion,
    CopyOperation,
    FileOperation,
    SlotCopy,
)
from tests.core.driver import chunk_of

MakeTracer = Callable[..., Tracer]
ROUNDING_S = 1e-6


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeTracer]:
    made = []

    def make_tracer(process: str = "worker-0", events_max: int = 100) -> Tracer:
        made.append(Tracer(tmp_path, process, events_max=events_max))
        return made[-1]

    yield make_tracer
    for tracer in made:
        tracer.close()


def events(tracer: Tracer) -> list[dict[str, Any]]:
    tracer.close()
    loaded = json.loads(tracer.path.read_text())
    assert isinstance(loaded, list)
    return loaded


def test_a_span_has_what_the_format_asks_for(make: MakeTracer) -> None:
    tracer = make()
    tracer.span("read 1", "read", 2_000, 5_500, {"bytes": 7})
    written = events(tracer)
    pid = os.getpid()
    assert {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "worker-0"}} in written
    assert {
        "ph": "M",
        "name": "thread_name",
        "pid": pid,
        "tid": 1,
        "args": {"name": "read 1"},
    } in written
    span = {"ph": "X", "name": "read", "pid": pid, "tid": 1, "ts": 2.0, "dur": 3.5}
    assert {**span, "args": {"bytes": 7}} in written


def test_a_track_is_named_once(make: MakeTracer) -> None:
    tracer = make()
    for moment in range(3):
        tracer.span("plan", "load", moment, moment)
    assert [event["name"] for event in events(tracer)].count("thread_name") == 1


def test_what_is_beyond_the_limit_is_left_out(make: MakeTracer) -> None:
    tracer = make(events_max=2)
    for moment in range(5):
        tracer.span("plan", "load", moment, moment)
    assert [event["ph"] for event in events(tracer)].count("X") == 2


def test_closing_twice_is_closing(make: MakeTracer) -> None:
    tracer = make()
    tracer.close()
    once = tracer.path.read_bytes()
    tracer.close()
    assert tracer.path.read_bytes() == once


def test_the_trace_of_a_killed_process_opens(make: MakeTracer, tmp_path: Path) -> None:
    tracer = make()
    tracer.span("plan", "load", 0, 1000)
    tracer.span("plan", "store", 2000, 3000)
    tracer.close()
    lines = tracer.path.read_bytes().splitlines(keepends=True)
    torn = tmp_path / "torn.json"
    first = next(at for at, line in enumerate(lines) if b'"load"' in line)
    torn.write_bytes(b"".join(lines[: first + 1]) + lines[first + 1][:20])
    assert [span.name for span in read_traces([torn]).spans] == ["load"]


def test_a_directory_that_cannot_be_made_is_a_bad_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"option 'trace_path' is .*file"):
        Tracer(tmp_path / "file" / "traces", "worker-0", events_max=1)


def test_lanes_are_the_lowest_free_ones() -> None:
    lanes = Lanes()
    assert [lanes.take("read") for _ in range(3)] == ["read 1", "read 2", "read 3"]
    assert lanes.take("load job") == "load job 1"
    lanes.give_back("read 3")
    lanes.give_back("read 2")
    assert lanes.take("read") == "read 2"


def test_operations_that_overlap_lie_on_tracks_of_their_own(make: MakeTracer) -> None:
    tracer = make()
    timeline = Timeline(tracer)
    chunk = chunk_of("a")
    reads = [
        FileOperation(token, Action.READ, slot=token, length=4096, chunk=chunk)
        for token in range(1, 4)
    ]
    copy = CopyOperation(9, Direction.LOAD, (SlotCopy(1, chunk, None),))
    timeline.turn([], reads[:2])
    timeline.turn([Completion(1, 4096, span=BlockSpan(0, 1))], [reads[2], copy])
    timeline.turn([Completion(2, -5), Completion(3, 4096), Completion(9, 0)], [])
    tracer.close()
    spans = read_traces([tracer.path]).spans
    assert sorted((span.track, span.name) for span in spans) == [
        ("copy 1", "copy for load"),
        ("read 1", "read"),
        ("read 1", "read"),
        ("read 2", "read"),
    ]
    assert [span.args["errno"] for span in spans if "errno" in span.args] == [5]
    assert all(span.args["key"] == chunk.key.hex()[:16] for span in spans if span.name == "read")
    by_track = defaultdict(list)
    for span in spans:
        by_track[span.track].append((span.start_s, span.start_s + span.seconds))
    for intervals in by_track.values():
        intervals.sort()
        for (_, end), (start, _) in itertools.pairwise(intervals):
            assert start > end - ROUNDING_S
