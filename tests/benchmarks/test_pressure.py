# SPDX-License-Identifier: Apache-2.0
"""The pressure benchmark: the same trace for everybody, and what ours makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.manager", reason="needs the patched vLLM")

from benchmarks.pressure import Request, Shape, make_requests, pause, play
from benchmarks.pressure_contenders import CONTENDERS

SMALL = Shape(requests=5, prefix=6, new=1, turns=2, pool=16, chunk_bytes=8192, compute_s=0.0)


class Scripted:
    """Answers look-ups from a list, and writes down what it is asked."""

    def __init__(self, answers: list[int | None]) -> None:
        self._answers = answers
        self.calls: list[str] = []
        self.bytes_read = 0

    def arrive(self, request: Request) -> None:
        self.calls.append(f"arrive {request.req_id}")

    def show(self, waiting: Sequence[Request]) -> None:
        self.calls.append("show " + " ".join(request.req_id for request in waiting))

    def look_up(self, request: Request) -> int | None:
        self.calls.append(f"look up {request.req_id}")
        return self._answers.pop(0)

    def run(self, request: Request, chunks: int) -> int:
        self.calls.append(f"run {request.req_id} with {chunks}")
        self.bytes_read += 2 * chunks
        return chunks

    def end_step(self, ran: Request | None) -> None:
        self.calls.append("end")


def test_the_queue_is_walked_until_one_runs_and_who_ran_waits_again() -> None:
    shape = Shape(requests=2, prefix=3, turns=2, chunk_bytes=1)
    contender = Scripted([None, 3, None, 2, 3, 3])
    waited: list[float] = []
    outcome = play(contender, shape, waited.append)
    assert contender.calls == [
        *["arrive 0-0", "arrive 1-0"],
        *["show 0-0 1-0", "look up 0-0", "look up 1-0", "run 1-0 with 3", "end", "arrive 1-1"],
        *["show 0-0 1-1", "look up 0-0", "look up 1-1", "run 1-1 with 2", "end"],
        *["show 0-0", "look up 0-0", "run 0-0 with 3", "end", "arrive 0-1"],
        *["show 0-1", "look up 0-1", "run 0-1 with 3", "end"],
    ]
    assert outcome.recomputed == ["1-1"]
    assert (outcome.runs, outcome.steps) == (4, 4)
    assert outcome.bytes_used == 11
    assert outcome.report()["read_amplification"] == 2.0
    once = shape.compute_s
    assert waited == [once, once + shape.recompute_s, once, once]


def test_a_step_in_which_nobody_runs_is_short() -> None:
    shape = Shape(requests=1, prefix=1, turns=1)
    waited: list[float] = []
    outcome = play(Scripted([None, 1]), shape, waited.append)
    assert waited == [shape.idle_s, shape.compute_s]
    assert outcome.steps == 2


def test_who_never_had_its_turn_counts_as_recomputed() -> None:
    shape = Shape(requests=1, prefix=1, turns=1, steps_max=3)
    outcome = play(Scripted([None] * 3), shape, lambda seconds: None)
    assert outcome.recomputed == ["0-0"]


def test_prefixes_are_distinct_and_the_same_for_everybody() -> None:
    keys = [key for request in make_requests(SMALL) for key in request.prefix]
    assert len(set(keys)) == SMALL.requests * SMALL.prefix
    assert keys == [key for request in make_requests(SMALL) for key in request.prefix]


def test_ours_recomputes_nothing_and_reads_each_chunk_at_most_once_a_turn(tmp_path: Path) -> None:
    with CONTENDERS["ours"](SMALL, tmp_path) as contender:
        outcome = play(contender, SMALL, pause)
    assert outcome.recomputed == []
    assert outcome.runs == SMALL.requests * SMALL.turns
    loads = outcome.runs * SMALL.prefix
    assert outcome.bytes_read <= loads * (SMALL.chunk_bytes + 4096)
    assert outcome.bytes_read >= SMALL.requests * SMALL.prefix * SMALL.chunk_bytes


def test_native_tiering_plays_the_trace_to_its_end(tmp_path: Path) -> None:
    with CONTENDERS["native"](SMALL, tmp_path) as contender:
        outcome = play(contender, SMALL, pause)
    assert outcome.runs == SMALL.requests * SMALL.turns
    assert outcome.bytes_read > 0


def test_the_tier_recomputes_nothing_and_reads_hardly_a_chunk_twice_a_turn(
    tmp_path: Path,
) -> None:
    """vLLM's CPU tier may give a chunk's memory to a store before its request has run."""
    with CONTENDERS["tier"](SMALL, tmp_path) as contender:
        outcome = play(contender, SMALL, pause)
    assert outcome.recomputed == []
    assert outcome.runs == SMALL.requests * SMALL.turns
    loads = outcome.runs * SMALL.prefix
    assert outcome.bytes_read <= 1.05 * loads * (SMALL.chunk_bytes + 4096)
    assert outcome.bytes_read >= SMALL.requests * SMALL.prefix * SMALL.chunk_bytes
