# SPDX-License-Identifier: Apache-2.0
"""As a secondary tier of vLLM's tiering: files below its CPU tier, found again after a restart.

The first server computes prompts and stores them. The second has an empty CPU tier of two prompts'
size, and only the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.serving import Completion, Metrics, Prompts, kv_files
from tests.e2e.sites import (
    ANSWER_TOKENS,
    FAILURES,
    FILE_BYTES,
    KV_BYTES_PER_TOKEN,
    PAGE_BYTES,
    Observed,
    TieringSite,
    assert_same_answer,
    observe,
)

CHUNKS = 4
PROMPT_TOKENS = CHUNKS * TieringSite.TOKENS_PER_CHUNK + 16
PROMPTS = 4
CHUNK_BYTES = TieringSite.TOKENS_PER_CHUNK * KV_BYTES_PER_TOKEN
FILE_SIZE_BYTES = CHUNK_BYTES + PAGE_BYTES
CPU_TIER_BYTES = 2 * CHUNKS * CHUNK_BYTES

PROMOTION_FAILURES = "vllm:kv_offload_tiering_promotion_allocation_failures_total"


@dataclass(frozen=True)
class Run:
    """What both servers did."""

    cold: list[Completion]
    alone: Observed
    together: list[Completion]
    files: int
    second: Metrics


@pytest.fixture(scope="module")
def tiering_site(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TieringSite:
    return TieringSite(model, tmp_path_factory.mktemp("tiering"))


@pytest.fixture(scope="module")
def run(tiering_site: TieringSite, prompts: Prompts) -> Iterator[Run]:
    site = tiering_site
    asked = [prompts.of(PROMPT_TOKENS, 30 + number) for number in range(PROMPTS)]
    cold = []
    with site.tiering_server("first", cpu_tier_bytes=CPU_TIER_BYTES) as server:
        for number, prompt in enumerate(asked):
            cold.append(server.complete(prompt, ANSWER_TOKENS, logprobs=True))
            server.wait_idle(site.root, files=(number + 1) * CHUNKS)
    with site.tiering_server("restarted", cpu_tier_bytes=CPU_TIER_BYTES) as server:
        alone = observe(server, asked[0])
        with ThreadPoolExecutor(PROMPTS) as threads:
            futures = [
                threads.submit(server.complete, prompt, ANSWER_TOKENS, logprobs=True)
                for prompt in asked[1:]
            ]
            together = [future.result() for future in futures]
        server.wait_idle(site.root)
        second = server.metrics()
    yield Run(cold, alone, together, len(kv_files(site.root)), second)


def test_the_answer_from_files_is_the_one_computed_cold(run: Run) -> None:
    assert_same_answer(run.alone.answer, run.cold[0])
    for answer, expected in zip(run.together, run.cold[1:], strict=True):
        assert_same_answer(answer, expected)


def test_whole_chunks_come_from_files(run: Run) -> None:
    assert run.alone.external_tokens == CHUNKS * TieringSite.TOKENS_PER_CHUNK
    assert run.alone.file_bytes_read == CHUNKS * FILE_SIZE_BYTES
    for answer in run.together:
        assert answer.cached_tokens == CHUNKS * TieringSite.TOKENS_PER_CHUNK


def test_requests_that_wait_together_read_each_file_once(run: Run) -> None:
    read = run.second.total(FILE_BYTES, direction="load")
    assert read == PROMPTS * CHUNKS * FILE_SIZE_BYTES
    assert run.second.total(FAILURES) == 0
    assert run.second.total(PROMOTION_FAILURES) == 0


def test_nothing_is_stored_twice(run: Run) -> None:
    assert run.files == PROMPTS * CHUNKS
    assert run.second.total(FILE_BYTES, direction="store") == 0
