# SPDX-License-Identifier: Apache-2.0
"""Servers and prompts of the demo, the benchmarks and the end-to-end tests.

The servers are those of `pykvcache.serving`, without a model hub and without compiling.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pykvcache.serving import server
from pykvcache.serving.answers import Completion, Metrics, ServingError
from pykvcache.serving.server import (
    EXTERNAL_HITS,
    LOAD_BYTES,
    SERVED_NAME,
    STORES_PENDING,
    Server,
    ending_on_signals,
    group_members,
    kv_files,
    log_tail,
)

__all__ = [
    "EXTERNAL_HITS",
    "LOAD_BYTES",
    "SERVED_NAME",
    "STORES_PENDING",
    "Completion",
    "Metrics",
    "Prompts",
    "Server",
    "ServerOptions",
    "ServingError",
    "ending_on_signals",
    "group_members",
    "kv_files",
    "length_above_chunks",
    "log_tail",
]


@dataclass(frozen=True)
class ServerOptions(server.ServerOptions):
    """How to serve the repository's own model."""

    FLAGS: ClassVar = ("--enforce-eager",)
    ENVIRONMENT: ClassVar = {"HF_HUB_OFFLINE": "1"}


# -- Prompts ---------------------------------------------------------------------------------------

_VOCABULARY = """
amber anchor answer autumn bakery balance barley basin beacon bridge bronze canal candle carbon
castle cedar cellar chapel cherry circle cloud coast copper coral cotton crystal current desert
dragon eagle echo ember engine fabric falcon feather fern field flame forest fossil fountain
garden glacier granite harbor harvest hazel hill hollow honey horizon island ivory jacket
journey kernel kettle ladder lagoon lantern leather ledger lemon library lily linen marble
market meadow mirror molten morning mountain needle north oak ocean orchard paper path pearl
pebble pepper pilot pine planet plaster pocket pollen powder prairie quarry quartz rain raven
reef ribbon ridge river rocket saddle salt sand scholar season shadow shell shore signal silver
sketch smoke spiral spring station stone storm summit sunset table thread timber tower trail
tunnel valley velvet village violet voyage walnut water wheat willow window winter wire yarn
zenith
"""
_WORDS = tuple(_VOCABULARY.split())


class Prompts:
    """Deterministic token-exact prompts made of plain English-like sentences.

    Sent as token ids, so a prompt has exactly the length asked for and no tokenizer stands between.
    """

    def __init__(self, model_dir: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def of(self, n_tokens: int, seed: int) -> list[int]:
        """`n_tokens` token ids. Prompts of different seeds differ from their first words on, and a
        shorter prompt of the same seed is a prefix of a longer one."""
        source = random.Random(seed)
        text = f"Record {seed} of the archive."
        ids: list[int] = []
        while len(ids) < n_tokens:
            words = [source.choice(_WORDS) for _ in range(source.randint(6, 14))]
            # Sentences are tokenized one by one: what was made stays what it is as more follow.
            ids += self._tokenizer.encode(text, add_special_tokens=False).ids
            text = " The " + " ".join(words) + "."
        return ids[:n_tokens]


def length_above_chunks(n_tokens: int, tokens_per_chunk: int = 256, tail: int = 16) -> int:
    """The length nearest to `n_tokens` that is `tail` tokens above a whole number of chunks.

    At such a length every system has the same short tail to recompute, and what vLLM's in-memory
    prefix cache holds (whole blocks, less the last token) ends exactly where the chunks end.
    """
    chunks = max(1, round((n_tokens - tail) / tokens_per_chunk))
    return chunks * tokens_per_chunk + tail
