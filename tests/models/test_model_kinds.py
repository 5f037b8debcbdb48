# SPDX-License-Identifier: Apache-2.0
"""Each kind of KV cache comes back from disk as it was in memory.

A first engine computes the prompts and answers them again from vLLM's in-memory prefix cache. A
second one, in a new process and with a pool of three slots, has only the files; then the files of
one KV cache group after the other are cut in half under it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.models.conftest import Checkpoints
from tests.models.engine import Answer, Engine
from tests.models.kinds import (
    KINDS,
    LOGPROB_TOLERANCE,
    MORE_KINDS,
    SLOTS_FEW,
    Kind,
    assert_same,
    furthest,
    kv_files,
    prompt,
    small_pool_gib,
)

SHARED = 600
PROMPTS = {
    "ends before a chunk border": prompt(767, 1),
    "ends at a chunk border": prompt(768, 2),
    "ends after a chunk border": prompt(769, 3),
    "longer than any window": prompt(1500, 4),
    "trunk": prompt(SHARED, 5) + prompt(500, 6),
    "branch": prompt(SHARED, 5) + prompt(500, 7),
}
LONGEST = PROMPTS["longer than any window"]


@dataclass
class Run:
    """Two engines' answers to the prompts, the second engine itself, and their root."""

    kind: Kind
    root: Path
    computed: list[Answer]
    from_memory: list[Answer]
    from_disk: list[Answer]
    second: Engine


@pytest.fixture(
    scope="module",
    params=[
        *[pytest.param(kind, id=name) for name, kind in KINDS.items()],
        *[pytest.param(kind, id=name, marks=pytest.mark.soak) for name, kind in MORE_KINDS.items()],
    ],
)
def run(
    request: pytest.FixtureRequest,
    checkpoints: Checkpoints,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Run]:
    kind: Kind = request.param
    base = tmp_path_factory.mktemp(kind.model)
    root, checkpoint = base / "root", checkpoints[kind.model]
    prompts = list(PROMPTS.values())
    with kind.engine(checkpoint, root, base / "first.log") as first:
        assert first.groups() == list(kind.groups)
        computed = first.ask(prompts)
        from_memory = first.ask(prompts)
        first.settle()
    with kind.engine(
        checkpoint,
        root,
        base / "second.log",
        options={**SLOTS_FEW, "failed_key_ttl_s": 0},
        kv_offloading_size=small_pool_gib(root),
    ) as second:
        yield Run(kind, root, computed, from_memory, second.ask(prompts), second)


def test_answers_from_disk_are_those_from_memory(run: Run) -> None:
    assert_same(run.from_disk, run.from_memory)
    assert_same(run.from_disk, run.computed)


def test_all_that_can_be_reused_comes_from_disk(run: Run) -> None:
    found = {
        name: answer.cached_tokens for name, answer in zip(PROMPTS, run.from_disk, strict=True)
    }
    assert found == {name: run.kind.disk_tokens(len(tokens)) for name, tokens in PROMPTS.items()}
    counters = run.second.counters()
    assert counters["pool_slots"] == 3
    assert counters["chunks{direction=load,outcome=transferred}"] >= len(PROMPTS)
    assert not any(name.startswith("chunk_failures") for name in counters)
    assert "chunks{direction=store,outcome=transferred}" not in counters, "nothing was new"


def test_answers_depend_on_the_kv_that_was_loaded(run: Run) -> None:
    """Otherwise the equality above would prove nothing: other tokens shortly before the last
    border change the answer far beyond the tolerance."""
    border = run.kind.disk_tokens(len(LONGEST))
    other = [*LONGEST[: border - 40], *prompt(40, 8), *LONGEST[border:]]
    (changed,) = run.second.ask([other])
    assert furthest([changed], [run.computed[list(PROMPTS).index("longer than any window")]]) > (
        20 * LOGPROB_TOLERANCE
    )


def test_a_group_whose_files_are_cut_in_half_is_recomputed(run: Run) -> None:
    expected = run.from_memory[list(PROMPTS).index("longer than any window")]
    for group in {0, len(run.kind.groups) - 1}:  # of a kind with several, they differ
        files = kv_files(run.root, group)
        assert files
        whole = {path: path.read_bytes() for path in files}
        failed_before = load_failures(run.second)
        for path, content in whole.items():
            path.write_bytes(content[: len(content) // 2])
        run.second.forget()

        (answer,) = run.second.ask([LONGEST])

        assert_same([answer], [expected])
        assert answer.cached_tokens < run.kind.disk_tokens(len(LONGEST))
        assert load_failures(run.second) > failed_before
        for path, content in whole.items():
            path.write_bytes(content)
    run.second.forget()
    (answer,) = run.second.ask([LONGEST])
    assert_same([answer], [expected])
    assert answer.cached_tokens == run.kind.disk_tokens(len(LONGEST))


def load_failures(engine: Engine) -> float:
    return sum(
        value
        for name, value in engine.counters().items()
        if name.startswith("chunk_failures{direction=load")
    )
