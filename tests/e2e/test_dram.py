# SPDX-License-Identifier: Apache-2.0
"""Chunks come from DRAM where they can: read ahead while a request waits, or still there.

The first server computes the prompts and stores them. The second runs one request at a time:
while it generates for one, the others wait in its queue, and their files are read ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from pykvcache.commands.trace_files import read_traces
from scripts.serving import Completion, Metrics, Prompts, Server
from tests.e2e.sites import (
    ANSWER_TOKENS,
    FILE_BYTES,
    KV_BYTES_PER_TOKEN,
    PAGE_BYTES,
    Site,
    assert_same_answer,
)

CHUNKS = 2
PROMPT_TOKENS = CHUNKS * 256 + 16
PROMPTS = 3
FILE_SIZE_BYTES = 256 * KV_BYTES_PER_TOKEN + PAGE_BYTES
POOL_GIB = 0.5
"""43 slots of 11.8 MB: what staging needs, and all the prompts."""

LONG_PROMPT_TOKENS = 240
LONG_ANSWER_TOKENS = 150
"""Seconds of generation; reading the files takes a tenth of one."""

HITS = "vllm:kv_offload_load_hits_total"
STAGED = "vllm:kv_offload_pool_slots_staged"
IN_USE = "vllm:kv_offload_pool_slots_in_use"
RUNNING = "vllm:num_requests_running"


@dataclass(frozen=True)
class Run:
    """What the servers did."""

    from_memory: list[Completion]
    read_ahead: list[Completion]
    after_preload: Metrics
    again: list[Completion]
    at_the_end: Metrics
    looked_up: list[dict[str, int]]
    """How much of each prompt is in files and in the pool, by the API."""


@pytest.fixture(scope="module")
def run(site: Site, prompts: Prompts) -> Iterator[Run]:
    asked = [prompts.of(PROMPT_TOKENS, seed) for seed in range(PROMPTS)]
    with site.server("first", pool_gib=POOL_GIB) as server:
        for prompt in asked:
            server.complete(prompt, ANSWER_TOKENS, logprobs=True)
        from_memory = [server.complete(prompt, ANSWER_TOKENS, logprobs=True) for prompt in asked]
        server.wait_idle(site.root, files=PROMPTS * CHUNKS)
    with site.server(
        "restarted",
        pool_gib=POOL_GIB,
        args=["--max-num-seqs=1"],
        env={
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_PLUGINS": "pykvcache",
            "PYKVCACHE_TRACE_PATH": str(traces_of(site)),
        },
    ) as server:
        read_ahead = ask_while_one_runs(server, prompts.of(LONG_PROMPT_TOKENS, 99), asked)
        after_preload = server.metrics()
        server.reset_prefix_cache()
        again = [server.complete(prompt, ANSWER_TOKENS, logprobs=True) for prompt in asked]
        server.complete(prompts.of(LONG_PROMPT_TOKENS, 98), ANSWER_TOKENS)  # collects what is left
        at_the_end = server.metrics()
        looked_up = [look_up(server, prompt) for prompt in asked]
    yield Run(from_memory, read_ahead, after_preload, again, at_the_end, looked_up)


def look_up(server: Server, prompt: list[int]) -> dict[str, int]:
    url = f"http://127.0.0.1:{server.port}/v1/pykvcache/lookup"
    reply = httpx.post(url, json={"prompt": prompt}, timeout=120.0, trust_env=False)
    cached: dict[str, int] = reply.raise_for_status().json()["cached_tokens"]
    return cached


def traces_of(site: Site) -> Path:
    return site.directory / "traces"


def ask_while_one_runs(
    server: Server, long_prompt: list[int], asked: list[list[int]]
) -> list[Completion]:
    with ThreadPoolExecutor(PROMPTS + 1) as pool:
        busy = pool.submit(server.complete, long_prompt, LONG_ANSWER_TOKENS)
        while not server.metrics().total(RUNNING):
            assert not busy.done(), "the request that keeps the others waiting is over"
        answers = [
            pool.submit(server.complete, prompt, ANSWER_TOKENS, logprobs=True) for prompt in asked
        ]
        busy.result()
        return [answer.result() for answer in answers]


def test_answers_are_those_without_the_cache(run: Run) -> None:
    for answers in (run.read_ahead, run.again):
        for answer, expected in zip(answers, run.from_memory, strict=True):
            assert_same_answer(answer, expected)


def test_waiting_requests_find_their_chunks_in_dram(run: Run) -> None:
    hits = run.after_preload.by(HITS, "tier")
    assert hits == {"dram": PROMPTS * CHUNKS, "disk": 0}


def test_every_file_is_read_once(run: Run) -> None:
    expected = PROMPTS * CHUNKS * FILE_SIZE_BYTES
    assert run.after_preload.total(FILE_BYTES, direction="load") == expected
    assert run.at_the_end.total(FILE_BYTES, direction="load") == expected, "DRAM holds them all"


def test_the_api_tells_what_the_pool_holds(run: Run) -> None:
    assert run.looked_up == [{"disk": CHUNKS * 256, "dram": CHUNKS * 256}] * PROMPTS


def test_nothing_is_left_in_use(run: Run) -> None:
    assert run.at_the_end.total(STAGED) == 0
    assert run.at_the_end.total(IN_USE) == 0
    assert run.at_the_end.by(HITS, "tier") == {"dram": 2 * PROMPTS * CHUNKS, "disk": 0}


def test_the_traces_show_reads_behind_forward_passes(run: Run, site: Site) -> None:
    trace = read_traces([traces_of(site)])
    assert set(trace.processes.values()) == {"scheduler", "worker-0"}
    names = {span.name for span in trace.spans}
    assert names >= {"forward pass", "look-up", "load", "list", "open", "read", "copy for load"}
    reads = [span for span in trace.spans if span.name == "read"]
    assert len(reads) == PROMPTS * CHUNKS
    steps = [span for span in trace.spans if span.name == "forward pass"]
    for read in reads:  # they were read while the long answer was generated
        assert any(
            step.start_s < read.start_s + read.seconds
            and read.start_s < step.start_s + step.seconds
            for step in steps
        )
