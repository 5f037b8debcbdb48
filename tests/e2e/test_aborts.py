# SPDX-License-Identifier: Apache-2.0
"""Clients that hang up at any moment leave nothing behind, and the others get the right answers.

The GPU's memory holds less than half of the prompts and the disk is slow, so requests wait, read
ahead and load all the time. What must be gone afterwards is asked of /metrics and /proc.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.serving import STORES_PENDING, Metrics, Prompts, Server, ServerOptions, kv_files
from tests.e2e.clients import Crowd, Outcome
from tests.e2e.sites import FAILURES, KV_CACHE_GIB, MODEL_TOKENS_MAX, Site

CHUNKS = 3
PROMPT_TOKENS = CHUNKS * 256 + 16
PROMPTS = 8
ANSWER_TOKENS = 6
GPU_BLOCKS = 28
"""3,584 tokens of the prompts' 6,272, and room for the longest request."""
OPTIONS = {"read_bandwidth_max": 250_000_000}
"""A prefix of 35 MB takes longer than its tail, so that aborts find loads and reads ahead."""
POOL_GIB = 0.25
REQUESTS_PER_CLIENT = 4
SOAK_S = 120.0

HITS = "vllm:kv_offload_load_hits_total"
GONE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_offload_pool_slots_in_use",
    "vllm:kv_offload_pool_slots_staged",
    "vllm:kv_offload_queue_chunks",
    STORES_PENDING,
)
"""Gauges that are 0 when nothing is left."""
IDLE_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Place:
    """The server that is asked, and what is right."""

    site: Site
    server: Server
    crowd: Crowd
    expected: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def place(site: Site, prompts: Prompts) -> Iterator[Place]:
    asked = [prompts.of(PROMPT_TOKENS, 40 + seed) for seed in range(PROMPTS)]
    with plain_server(site) as server:
        expected = [server.complete(prompt, ANSWER_TOKENS).token_ids for prompt in asked]
    with site.server(
        "aborts",
        pool_gib=POOL_GIB,
        options=OPTIONS,
        args=["--max-num-seqs=4", f"--num-gpu-blocks-override={GPU_BLOCKS}"],
    ) as server:
        for number, prompt in enumerate(asked, 1):
            server.complete(prompt, 1)
            server.wait_idle(site.root, files=number * CHUNKS)
        yield Place(site, server, Crowd(server.port, asked, ANSWER_TOKENS), expected)


def plain_server(site: Site) -> Server:
    """The same model without this backend."""
    return Server(
        ServerOptions(
            site.model,
            site.directory / "logs" / "plain.log",
            ["--dtype=float32", f"--max-model-len={MODEL_TOKENS_MAX}"],
            {"VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)},
        )
    )


def test_aborts_leave_nothing_behind(place: Place) -> None:
    place.crowd.ask(1, lambda asked: asked < 1)  # what a server opens once is open from here on
    assert_nothing_left(place)
    before = open_files(place.server)
    outcome = place.crowd.ask(2, lambda asked: asked < REQUESTS_PER_CLIENT)
    assert_right(place, outcome)
    assert_nothing_left(place)
    assert open_files(place.server) == before


@pytest.mark.soak
def test_aborts_for_minutes_leave_nothing_behind(place: Place) -> None:
    place.crowd.ask(3, lambda asked: asked < 1)
    assert_nothing_left(place)
    before = open_files(place.server)
    end = time.monotonic() + SOAK_S
    outcome = place.crowd.ask(4, lambda asked: time.monotonic() < end)
    assert_right(place, outcome)
    assert_nothing_left(place)
    assert open_files(place.server) == before


def assert_right(place: Place, outcome: Outcome) -> None:
    """Aborts, loads from disk and chunks read ahead all happened, and each answer is right."""
    assert outcome.errors == []
    wrong = [number for number, tokens in outcome.answers if tokens != place.expected[number]]
    assert wrong == [], f"{len(wrong)} of {len(outcome.answers)} answers"
    assert outcome.answers and outcome.hung_up
    metrics = place.server.metrics()
    assert min(metrics.by(HITS, "tier").values()) > 0
    failures = {reason for reason, count in metrics.by(FAILURES, "reason").items() if count}
    assert failures <= {"dropped"}, "blocks of stores may be needed first; nothing else fails"


def assert_nothing_left(place: Place) -> None:
    """Gauges follow the engine's steps: one more request shows what is left after the last."""
    place.server.complete(place.crowd.prompts[0], 2)
    left: dict[str, float] = {}
    deadline = time.monotonic() + IDLE_DEADLINE_S
    while time.monotonic() < deadline:
        place.server.require_alive()
        left = leftovers(place.server.metrics())
        if not left:
            break
    assert left == {}
    files = [path for path in place.site.root.rglob("*") if path.is_file()]
    chunks = set(kv_files(place.site.root))
    assert {path.name for path in files if path not in chunks} <= {"identity.json", ".capacity"}


def leftovers(metrics: Metrics) -> dict[str, float]:
    return {name: total for name in GONE if (total := metrics.total(name))}


def open_files(server: Server) -> dict[int, int]:
    """Descriptors of each of the server's processes, sockets of ended connections aside."""
    return {process: count_descriptors(process) for process in server.process_ids}


def count_descriptors(process: int) -> int:
    """Files, rings, events and pipes; sockets belong to the HTTP server and to ZeroMQ."""
    count = 0
    folder = Path(f"/proc/{process}/fd")
    for name in os.listdir(folder):
        try:
            target = os.readlink(folder / name)
        except FileNotFoundError:  # closed meanwhile
            continue
        count += not target.startswith("socket:")
    return count
