# SPDX-License-Identifier: Apache-2.0
"""The hashes of a prompt's blocks without a server, by vLLM's own functions."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens


def prompt_hashes(
    algorithm: str, seed: str, block_tokens: int, tokens: Sequence[int]
) -> list[bytes]:
    """The hash of the prompt up to the end of each whole block.

    Args:
        algorithm: ``prefix_caching_hash_algo``.
        seed: what the first block's parent is made from.
        block_tokens: tokens for each hash.
        tokens: of the prompt; nothing else enters the hashes.

    Raises:
        ValueError: vLLM does not know the algorithm.
    """
    function = get_hash_fn_by_name(algorithm)
    parent = BlockHash(function(seed))
    hashes = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tokens[start : start + block_tokens]
        parent = hash_block_tokens(function, parent, block)
        hashes.append(bytes(parent))
    return hashes
