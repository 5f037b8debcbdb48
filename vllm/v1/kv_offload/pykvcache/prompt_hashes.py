# SPDX-License-Identifier: Apache-2.0
"""The hashes of a prompt's blocks without a server.

Only vLLM's hash functions are imported: what chains them, ``kv_cache_utils.hash_block_tokens``,
brings the whole engine with it. A test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.utils.hashing import get_hash_fn_by_name


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
    parent = function(seed)
    hashes = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = function((parent, tuple(tokens[start : start + block_tokens]), None))
        hashes.append(bytes(parent))
    return hashes
