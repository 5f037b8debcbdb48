# SPDX-License-Identifier: Apache-2.0
"""The chunks of a prompt, found without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.prompt_hashes", reason="needs the patched vLLM")

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens

from pykvcache.commands.prompts import groups_of
from pykvcache.errors import ConfigError
from pykvcache.identity import FILE_NAME
from pykvcache.layout import ChunkPaths, rank_directory
from pykvcache.prompts import cached_tokens

FACTS = {
    "model": "a model",
    "hash_algorithm": "sha256",
    "hash_seed": "7",
    "tokens_per_hash": 4,
    "blocks_per_chunk": 2,
    "tokens_per_block": [4, 8],
    "namespace": "and whatever else an identity holds",
}
TOKENS = list(range(100, 137))
"""Nine blocks of four tokens, and one token."""


def identity(directory: Path, **facts: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / FILE_NAME).write_text(json.dumps({**FACTS, **facts}))
    return directory


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    return path


def chain(seed: str) -> list[bytes]:
    """By vLLM's own chaining."""
    parent = BlockHash(sha256(seed))
    hashes = []
    for start in range(0, 36, 4):
        parent = hash_block_tokens(sha256, parent, TOKENS[start : start + 4])
        hashes.append(bytes(parent))
    return hashes


@pytest.mark.parametrize("seed", ["7", "another"])
def test_keys_are_those_that_a_server_computes(tmp_path: Path, tokens: Path, seed: str) -> None:
    first, second = groups_of(identity(tmp_path / "one", hash_seed=seed), "", tokens, "")
    hashes = chain(seed)
    assert first.tokens_per_chunk == 8
    assert first.keys == tuple((hashes[at] + bytes(4)).hex() for at in (1, 3, 5, 7))
    assert second.tokens_per_chunk == 16
    assert second.keys == tuple((hashes[at] + bytes([0, 0, 0, 1])).hex() for at in (3, 7))


def test_a_prompt_is_cached_as_far_as_every_rank_and_group_has_it(
    tmp_path: Path, tokens: Path
) -> None:
    place = identity(tmp_path / "one")
    groups = groups_of(place, "", tokens, "")
    assert cached_tokens(place, groups) == 0
    ranks = [rank_directory(place, rank) for rank in (0, 1)]
    for rank in ranks:
        for group in groups:
            for key in group.keys:
                path = Path(ChunkPaths(rank).final(bytes.fromhex(key)))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
    assert cached_tokens(place, groups) == 32
    Path(ChunkPaths(ranks[1]).final(bytes.fromhex(groups[0].keys[1]))).unlink()
    assert cached_tokens(place, groups) == 8


def test_a_short_prompt_has_no_chunks(tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    path.write_text("[1, 2, 3]")
    groups = groups_of(identity(tmp_path / "one"), "", path, "")
    assert [group.keys for group in groups] == [(), ()]
    assert cached_tokens(tmp_path / "one", groups) == 0


def test_what_cannot_be_used_is_named(tmp_path: Path, tokens: Path) -> None:
    place = identity(tmp_path / "one")
    for prompt, file in (("", None), ("text", tokens)):
        with pytest.raises(ConfigError, match="either with --prompt or with --tokens"):
            groups_of(place, prompt, file, "")
    tokens.write_text('{"not": "tokens"}')
    with pytest.raises(ConfigError, match="must be a file with a JSON array"):
        groups_of(place, "", tokens, "")
    with pytest.raises(ConfigError, match="--tokenizer is '/nowhere'"):
        groups_of(place, "text", None, "/nowhere")
    (place / FILE_NAME).write_text("[]")
    with pytest.raises(ConfigError, match="cannot be read"):
        groups_of(place, "text", None, "")


def test_a_seed_at_random_is_said(tmp_path: Path, tokens: Path) -> None:
    place = identity(tmp_path / "one", hash_seed="random 12ab")
    with pytest.raises(ConfigError, match="chosen at random"):
        groups_of(place, "", tokens, "")
