# SPDX-License-Identifier: Apache-2.0
"""After a restart a prompt is answered from its files exactly as from memory.

Two servers share a root. The first has never seen the prompts; it then answers each again from
vLLM's in-memory prefix cache. The second has only the files. Both have a pool of 4 slots, so every
prompt, 7 chunks, is larger than the pool. A third server shares the root too, with another model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from scripts.serving import Completion, Metrics, Prompts, kv_files
from tests.e2e.sites import (
    ANSWER_TOKENS,
    FAILURES,
    FILE_BYTES,
    FROM_DISK_ONLY,
    KV_BYTES_PER_TOKEN,
    PAGE_BYTES,
    POOL_SLOTS,
    Observed,
    Site,
    assert_same_answer,
    observe,
)

TOKENS_PER_CHUNK = 256
TOKENS_PER_BLOCK = 128  # vLLM's default on CPU
CHUNK_BYTES = TOKENS_PER_CHUNK * KV_BYTES_PER_TOKEN
FILE_SIZE_BYTES = CHUNK_BYTES + PAGE_BYTES

SMALL_POOL = {"io_depth": 2, "copy_headroom": 1, "open_lookahead": 2, **FROM_DISK_ONLY}
SMALL_POOL_GIB = 0.05
SLOTS = 4

BEFORE, AT, AFTER = "ends before a border", "ends at a border", "ends after a border"
TRUNK, BRANCH = "shares a prefix", "diverges inside a chunk"
NAMES = (BEFORE, AT, AFTER, TRUNK, BRANCH)

DISK_TOKENS = {BEFORE: 6 * 256, AT: 7 * 256, AFTER: 7 * 256, TRUNK: 7 * 256, BRANCH: 640}
"""Tokens that come from disk. The branch finds 1,152 of its first 1,200 tokens in memory, where the
trunk's answer left them: four chunks and a half."""

CHUNKS_READ = {BEFORE: 6, AT: 7, AFTER: 7, TRUNK: 7, BRANCH: 3}

FILES_STORED = {BEFORE: 6, AT: 7, AFTER: 7, TRUNK: 7, BRANCH: 3}
"""The branch adds what it does not share. The answer completes the first prompt's seventh chunk,
but vLLM offloads prompts only, unless told otherwise (`offload_prompt_only`)."""


@dataclass(frozen=True)
class Run:
    """What both servers did."""

    from_memory: dict[str, Completion]
    from_disk: dict[str, Observed]
    first: Metrics
    second: Metrics
    files_before: int
    files_after: int


@pytest.fixture(scope="module")
def run(site: Site, prompts: Prompts) -> Iterator[Run]:
    shared = prompts.of(1200, 14)
    asked = {
        BEFORE: prompts.of(7 * 256 - 1, 11),
        AT: prompts.of(7 * 256, 12),
        AFTER: prompts.of(7 * 256 + 1, 13),
        TRUNK: shared + prompts.of(600, 15),
        BRANCH: shared + prompts.of(600, 16),
    }
    with site.server("first", pool_gib=SMALL_POOL_GIB, options=SMALL_POOL) as server:
        expected_files = 0
        for name, prompt in asked.items():
            server.complete(prompt, 1)
            # The branch shares blocks with the trunk. While the trunk's store waits for slots, vLLM
            # asks to flush it for that (as if the blocks were reused), which drops what waits.
            expected_files += FILES_STORED[name]
            server.wait_idle(site.root, files=expected_files)
        from_memory = {
            name: server.complete(prompt, ANSWER_TOKENS, logprobs=True)
            for name, prompt in asked.items()
        }
        first = server.metrics()
    files_before = len(kv_files(site.root))
    with site.server("restarted", pool_gib=SMALL_POOL_GIB, options=SMALL_POOL) as server:
        from_disk = {name: observe(server, prompt) for name, prompt in asked.items()}
        server.wait_idle(site.root)
        second = server.metrics()
    yield Run(from_memory, from_disk, first, second, files_before, len(kv_files(site.root)))


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_from_disk_is_the_answer_from_memory(run: Run, name: str) -> None:
    assert_same_answer(run.from_disk[name].answer, run.from_memory[name])


@pytest.mark.parametrize("name", NAMES)
def test_the_comparison_is_with_memory(run: Run, name: str) -> None:
    answer = run.from_memory[name]
    whole_blocks = (answer.prompt_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    assert answer.cached_tokens == whole_blocks


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_came_from_disk(run: Run, name: str) -> None:
    observed = run.from_disk[name]
    assert observed.external_tokens == DISK_TOKENS[name]
    assert observed.loaded_bytes == DISK_TOKENS[name] * KV_BYTES_PER_TOKEN
    assert observed.failures == {}


@pytest.mark.parametrize("name", NAMES)
def test_no_chunk_is_read_twice(run: Run, name: str) -> None:
    assert run.from_disk[name].file_bytes_read == CHUNKS_READ[name] * FILE_SIZE_BYTES


def test_the_prompts_were_larger_than_the_pool(run: Run) -> None:
    assert run.first.total(POOL_SLOTS) == run.second.total(POOL_SLOTS) == SLOTS
    assert max(CHUNKS_READ.values()) > SLOTS


def test_the_first_server_loaded_nothing_and_stored_every_chunk_once(run: Run) -> None:
    assert run.first.total(FILE_BYTES, direction="load") == 0
    stored = sum(FILES_STORED.values())
    assert run.first.total(FILE_BYTES, direction="store") == stored * FILE_SIZE_BYTES
    assert {reason for reason, n in run.first.by(FAILURES, "reason").items() if n} == set()
    assert run.files_before == stored


def test_the_restarted_server_stored_nothing_it_had_loaded(run: Run) -> None:
    assert run.second.total(FILE_BYTES, direction="store") == 0
    assert run.files_after == run.files_before


@pytest.fixture(scope="module")
def other_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with one tensor changed: the same sizes, other keys and values."""
    directory = tmp_path_factory.mktemp("other") / model.name
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.input_layernorm.weight"] *= 1.5
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_another_model_in_the_same_root_is_kept_apart(
    run: Run, site: Site, other_model: Path, prompts: Prompts
) -> None:
    prompt = prompts.of(7 * 256, 12)[: 2 * TOKENS_PER_CHUNK + 16]
    mine = {file: file.stat().st_mtime_ns for file in kv_files(site.root)}
    other = Site(other_model, site.directory)
    with other.server("other", pool_gib=SMALL_POOL_GIB, options=SMALL_POOL) as server:
        observed = observe(server, prompt)
        server.wait_idle(site.root, files=len(mine) + 2)
    assert (observed.external_tokens, observed.loaded_bytes) == (0, 0)
    theirs = set(kv_files(site.root)) - set(mine)
    assert {file.relative_to(site.root).parts[0] for file in theirs}.isdisjoint(
        file.relative_to(site.root).parts[0] for file in mine
    )
    assert {file: file.stat().st_mtime_ns for file in mine} == mine


def test_commands_find_the_chunks_of_a_prompt(
    run: Run, site: Site, prompts: Prompts, tmp_path: Path
) -> None:
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps(prompts.of(7 * 256 + 1, 13)))
    found = command(site, "lookup", "--tokens", asked)
    (holder,) = [each for each in found if each["cached_tokens"]]
    assert holder["cached_tokens"] == DISK_TOKENS[AFTER]
    options = ("--tokens", asked, "--identity", holder["identity"])
    pinned = command(site, "pin", *options)
    assert [pinned["keys"]] == holder["chunks"]
    names = {path.stem for path in kv_files(site.root)}
    assert set(pinned["keys"]) <= names
    assert command(site, "unpin", *options)["keys"] == pinned["keys"]


def command(site: Site, name: str, *options: object) -> Any:
    arguments = [sys.executable, "-m", "pykvcache", name, "--root", site.root, "--json", *options]
    done = subprocess.run(
        [str(argument) for argument in arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_temporary_file_is_left(run: Run, site: Site) -> None:
    names = {path.name for path in site.root.rglob("*") if path.is_file()}
    others = {name for name in names if not name.endswith(".kv")}
    assert others - {".lock"} == {"identity.json", ".capacity"}
