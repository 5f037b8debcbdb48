# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks: each has files of its own, and a chunk is a hit with both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pykvcache.layout import PAGE
from tests.models.conftest import Checkpoints
from tests.models.engine import Answer, Engine
from tests.models.kinds import CHUNK, FULL, GIB, SLOTS_FEW, assert_same, kv_files, prompt

PROMPTS = [prompt(700, 1), prompt(769, 2)]
DISK_TOKENS = [512, 768]
CHUNKS = 2 + 3
RANKS = 2


KV_BYTES_PER_TOKEN = 2 * 1 * 2 * 32 * 4
"""Of one rank: 2 layers, 1 of the model's 2 heads, key and value of 32 numbers, float32."""
SLOT_BYTES = CHUNK * KV_BYTES_PER_TOKEN + PAGE
SLOTS = SLOTS_FEW["io_depth"] + SLOTS_FEW["copy_headroom"]


@dataclass
class Run:
    root: Path
    engine: Engine
    from_memory: list[Answer]

    def names(self, rank: int) -> set[str]:
        return {file.name for file in self.files(rank)}

    def files(self, rank: int) -> list[Path]:
        return [file for file in kv_files(self.root) if f"rank-{rank:04d}" in file.parts]


@pytest.fixture(scope="module")
def run(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    base = tmp_path_factory.mktemp("ranks")
    with FULL.engine(
        checkpoints[FULL.model],
        base / "root",
        base / "log",
        tensor_parallel_size=RANKS,
        options={**SLOTS_FEW, "failed_key_ttl_s": 0, "lookup_ttl_s": 0},
        kv_offloading_size=RANKS * SLOTS * SLOT_BYTES / GIB,
    ) as engine:
        engine.ask(PROMPTS)
        yield Run(base / "root", engine, engine.ask(PROMPTS))


def test_both_ranks_load_their_halves(run: Run) -> None:
    run.engine.forget()

    answers = run.engine.ask(PROMPTS)

    assert_same(answers, run.from_memory)
    assert [answer.cached_tokens for answer in answers] == DISK_TOKENS
    counters = run.engine.counters()
    assert counters["chunks{direction=load,outcome=transferred}"] == RANKS * CHUNKS
    assert counters["pool_slots"] == RANKS * SLOTS
    assert run.names(0) == run.names(1)
    assert len(run.names(0)) == CHUNKS
    assert {file.stat().st_size for file in run.files(0) + run.files(1)} == {SLOT_BYTES}


def test_one_rank_fails_to_load_and_both_recompute(run: Run) -> None:
    whole = {file: file.read_bytes() for file in run.files(1)}
    for file, content in whole.items():
        file.write_bytes(content[: len(content) // 2])
    run.engine.forget()

    answers = run.engine.ask(PROMPTS)

    assert_same(answers, run.from_memory)
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    assert any(name.startswith("chunk_failures{direction=load") for name in run.engine.counters())
    for file, content in whole.items():
        file.write_bytes(content)


def test_a_chunk_that_one_rank_lacks_is_a_miss_and_is_stored_again(run: Run) -> None:
    for file in run.files(1):
        file.unlink()
    run.engine.forget()
    before = run.engine.counters()

    answers = run.engine.ask(PROMPTS)

    assert_same(answers, run.from_memory)
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    after = run.engine.counters()
    done = {name: after[name] - before.get(name, 0) for name in after if name.startswith("chunks")}
    assert done == {
        "chunks{direction=load,outcome=transferred}": 0,
        "chunks{direction=store,outcome=present}": CHUNKS,
        "chunks{direction=store,outcome=transferred}": CHUNKS,
    }
    assert run.names(1) == run.names(0)
