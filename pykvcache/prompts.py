# SPDX-License-Identifier: Apache-2.0
"""From a prompt's tokens to the keys of its chunks, as a server with that identity computes them.

The hashes are vLLM's own functions. Prompts of text alone: what images, adapters or a
``cache_salt`` add to a block's hash is not known here.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pykvcache.errors import ConfigError
from pykvcache.examine import IDENTITY_BYTES_MAX
from pykvcache.identity import FILE_NAME
from pykvcache.layout import ChunkPaths

PROMPT_HASHES = "vllm.v1.kv_offload.pykvcache.prompt_hashes"
"""Found by name: this package is whole without vLLM, and nothing else in it needs it."""


class KeyFacts(msgspec.Struct):
    """The fields of an identity that decide the keys."""

    model: str
    hash_algorithm: str
    hash_seed: str
    tokens_per_hash: int
    blocks_per_chunk: int
    tokens_per_block: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The chunks of a prompt in one KV cache group, from its start on.

    Attributes:
        tokens_per_chunk: of each.
        keys: in hex.
    """

    tokens_per_chunk: int
    keys: tuple[str, ...]


def key_facts(identity: Path) -> KeyFacts:
    """Those of an identity's directory.

    Raises:
        ConfigError: they cannot be read.
    """
    try:
        with (identity / FILE_NAME).open("rb") as file:
            return msgspec.json.decode(file.read(IDENTITY_BYTES_MAX), type=KeyFacts)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"'{identity / FILE_NAME}' cannot be read: {error}") from None


def groups_of_tokens(facts: KeyFacts, tokens: Sequence[int]) -> list[Group]:
    """The chunks of a prompt in the files of an identity.

    Raises:
        ConfigError: they cannot be computed here.
    """
    hashes = _hashes(facts, tokens)
    groups = []
    for number, tokens_per_block in enumerate(facts.tokens_per_block):
        tokens_per_chunk = tokens_per_block * facts.blocks_per_chunk
        step = tokens_per_chunk // facts.tokens_per_hash
        keys = [digest + number.to_bytes(4, "big") for digest in hashes[step - 1 :: step]]
        groups.append(Group(tokens_per_chunk, tuple(key.hex() for key in keys)))
    return groups


def cached_tokens(identity: Path, groups: Sequence[Group]) -> int:
    """Tokens from the start of the prompt whose chunks are there, in all groups and ranks."""
    ranks = [ChunkPaths(rank) for rank in sorted(identity.glob("rank-*"))]
    if not ranks:
        return 0

    def is_there(key: str) -> bool:
        return all(os.path.exists(paths.final(bytes.fromhex(key))) for paths in ranks)

    return leading_tokens(groups, is_there)


def leading_tokens(groups: Sequence[Group], is_there: Callable[[str], bool]) -> int:
    """Tokens from the start of the prompt whose chunks are there, in all groups.

    Args:
        groups: the prompt's chunks.
        is_there: asked for keys in hex, of each group up to the first that is not.
    """
    return min(
        (
            group.tokens_per_chunk * sum(1 for _ in itertools.takewhile(is_there, group.keys))
            for group in groups
        ),
        default=0,
    )


def _hashes(facts: KeyFacts, tokens: Sequence[int]) -> list[bytes]:
    """The hash of the prompt up to the end of each whole block of ``tokens_per_hash``."""
    if facts.hash_seed.startswith("random "):
        raise ConfigError(
            "that server's block hashes start from a number which it has chosen at random: its "
            "files are found by no other process (set PYTHONHASHSEED, or use sha256)"
        )
    try:
        overlay = importlib.import_module(PROMPT_HASHES)
    except ImportError as error:
        raise ConfigError(
            f"finding a prompt's chunks needs this distribution of vLLM: {error}"
        ) from None
    hashes: list[bytes] = overlay.prompt_hashes(
        facts.hash_algorithm, facts.hash_seed, facts.tokens_per_hash, tokens
    )
    return hashes
