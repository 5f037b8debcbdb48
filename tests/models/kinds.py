# SPDX-License-Identifier: Apache-2.0
"""The kinds of KV cache that are tried, and what of a prompt each finds on disk."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.models.engine import Answer, Engine, Group
from tests.models.tiny import VOCABULARY

BLOCK = 128  # tokens; vLLM's default on CPU
CHUNK = 256  # tokens; ours
MODEL_TOKENS_MAX = 2048

LOGPROB_TOLERANCE = 1e-4
"""Nats. A tail that is recomputed in a batch of another shape adds float32 numbers in another
order; seen to move a logprob of these models by up to 5e-6."""

SLOTS_FEW = {"io_depth": 2, "copy_headroom": 1, "open_lookahead": 2}
GIB = 1 << 30


def whole_chunks(tokens: int) -> int:
    """Where all tokens are kept, every whole chunk of the prompt is found."""
    return tokens // CHUNK * CHUNK


def last_chunk_border(tokens: int) -> int:
    """A window before the last chunk border is found; the last token is computed for its logits,
    so that the border at the very end of a prompt is out of reach."""
    return (tokens - 1) // CHUNK * CHUNK


def last_block_border(tokens: int) -> int:
    """A recurrent state is kept at a prompt's last block border, and a chunk is one block."""
    return (tokens - 1) // BLOCK * BLOCK


@dataclass(frozen=True)
class Kind:
    """A model and how vLLM serves it."""

    model: str
    groups: tuple[Group, ...]
    disk_tokens: Callable[[int], int]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def engine(
        self,
        checkpoint: Path,
        root: Path,
        log: Path,
        *,
        options: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> Engine:
        """An engine; `options` are the backend's, `arguments` vLLM's."""
        # What is found is loaded, however fast such a small model computes.
        extra = {"root": str(root), "gate": "off", **(options or {})}
        return Engine(
            log,
            **{
                "model": str(checkpoint),
                "dtype": "float32",
                "max_model_len": MODEL_TOKENS_MAX,
                "kv_offloading_size": 0.1,
                "kv_transfer_config": {"kv_connector_extra_config": extra},
                **self.arguments,
                **arguments,
            },
        )


FULL = Kind("llama", (Group("FullAttentionSpec", BLOCK, 2),), whole_chunks)
WINDOW = Kind("mistral", (Group("SlidingWindowSpec", BLOCK, 2),), last_chunk_border)
WINDOW_AND_FULL = Kind(
    "gemma3",
    (
        Group("SlidingWindowSpec", BLOCK, 2),
        Group("SlidingWindowSpec", BLOCK, 1),
        Group("FullAttentionSpec", BLOCK, 2),
    ),
    last_chunk_border,
)
WINDOW_AND_FULL_IN_ONE = Kind(
    "gemma3",
    (Group("FullAttentionSpec", BLOCK, 5),),
    whole_chunks,
    {"disable_hybrid_kv_cache_manager": True},
)
BLOCKS_OF_TWO_SIZES = Kind(
    "gemma4",
    (Group("SlidingWindowSpec", 4 * BLOCK, 2), Group("FullAttentionSpec", BLOCK, 2)),
    lambda tokens: (tokens - 1) // (4 * BLOCK) * (4 * BLOCK),  # a chunk is a block, of any size
)
CONVOLUTION = Kind(
    "lfm2",
    (
        Group("MambaSpec", BLOCK, 1),
        Group("MambaSpec", BLOCK, 1),
        Group("FullAttentionSpec", BLOCK, 1),
    ),
    last_block_border,
)
PARTIAL_BLOCKS = Kind(
    "lfm2",
    CONVOLUTION.groups,
    lambda tokens: (tokens - 1) // 32 * 32,
    {"prefix_match_unit": 32},  # tokens; vLLM then keeps a prompt's last, partial block too
)
WINDOW_KEPT_ALL_ALONG = Kind(
    "gemma3",
    WINDOW_AND_FULL.groups,
    # A window that ends inside the last chunk is found with the chunk that reaches beyond it.
    lambda tokens: tokens - 1 if tokens % CHUNK == 0 else whole_chunks(tokens),
    {"prefix_cache_retention_interval": None},
)
LINEAR_ATTENTION = Kind(
    "qwen3_next",
    (Group("MambaSpec", BLOCK, 1), Group("FullAttentionSpec", BLOCK, 1)),
    last_block_border,
    {"dtype": "bfloat16"},  # vLLM's CPU kernel takes nothing else
)

KINDS = {
    "full attention": FULL,
    "sliding window": WINDOW,
    "sliding window and full attention": WINDOW_AND_FULL,
    "linear attention and full attention": LINEAR_ATTENTION,
}
MORE_KINDS = {
    "sliding window and full attention in one group": WINDOW_AND_FULL_IN_ONE,
    "groups with blocks of two sizes": BLOCKS_OF_TWO_SIZES,
    "short convolution and full attention": CONVOLUTION,
    "partial blocks": PARTIAL_BLOCKS,
    "windows kept all along": WINDOW_KEPT_ALL_ALONG,
}


def prompt(tokens: int, seed: int) -> list[int]:
    """Random tokens, the same for the same arguments; a longer one starts with a shorter one."""
    numbers = random.Random(seed)
    return [numbers.randrange(VOCABULARY) for _ in range(tokens)]


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """The same tokens, with the same logprobs as far as float32 goes."""
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert furthest(answers, expected) <= LOGPROB_TOLERANCE


def furthest(answers: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """The largest difference of two logprobs at the same place."""
    return max(
        abs(a - b)
        for answer, other in zip(answers, expected, strict=True)
        for a, b in zip(answer.logprobs, other.logprobs, strict=True)
    )


def kv_files(root: Path, group: int | None = None) -> list[Path]:
    """Chunk files under a root, of one group or all; a key ends with the group's index."""
    ending = "" if group is None else f"{group:08x}"
    return sorted(root.glob(f"*/rank-*/*/*{ending}.kv"))


def small_pool_gib(root: Path) -> float:
    """A size of the pool that holds the fewest slots SLOTS_FEW allows."""
    slots = SLOTS_FEW["io_depth"] + SLOTS_FEW["copy_headroom"]
    largest = max(path.stat().st_size for path in kv_files(root))
    return (slots + 0.5) * largest / GIB
