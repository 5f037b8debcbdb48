# SPDX-License-Identifier: Apache-2.0
"""Measures one unit after the other on a server that nobody else uses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pykvcache.calibrate.plan import TAIL_TOKENS, Unit
from pykvcache.gate.calibration import Sample, Tier
from pykvcache.serving.answers import Completion, Metrics, ServingError
from pykvcache.serving.server import LOAD_BYTES, kv_files

HITS = "vllm:kv_offload_load_hits_total"

TOKEN_IDS = range(17, 250)
"""Of prompts: in every vocabulary, and not one of its first, which are often special. What a
prompt says does not change how long it takes."""


class Engine(Protocol):
    """What is asked of a :class:`~pykvcache.serving.server.Server`."""

    def complete(self, prompt: Sequence[int], max_tokens: int = 16) -> Completion:
        """Stream a completion."""
        ...

    def metrics(self) -> Metrics:
        """Read the metrics."""
        ...

    def reset_prefix_cache(self) -> None:
        """Empty the GPU's prefix cache."""
        ...

    def wait_idle(self, root: Path) -> None:
        """Wait until every store has ended."""
        ...


def prompt_of(seed: str, tokens: int) -> list[int]:
    """Token ids; of one seed a shorter prompt begins a longer one."""
    return random.Random(seed).choices(TOKEN_IDS, k=tokens)


class Bench:
    """One server, and what is measured on it."""

    def __init__(
        self, server: Engine, root: Path, ranks: int, repeats: int, note: Callable[[str], None]
    ) -> None:
        """Args:
        server: started.
        root: its own, for nothing else.
        ranks: that each hold a part of the KV.
        repeats: of hits in DRAM.
        note: told what could not be measured.
        """
        self._server = server
        self._root = root
        self._ranks = ranks
        self._repeats = repeats
        self._note = note

    def warm_up(self, tokens: int) -> None:
        """Every path once: a process's first requests take several times as long."""
        prompt = prompt_of("warm-up", tokens)
        for _ in range(2):
            self._first_token(prompt)
            self._server.wait_idle(self._root)
            self._server.reset_prefix_cache()
            self._first_token(prompt)

    def measure(self, unit: Unit) -> list[Sample]:
        """Its samples.

        Raises:
            ServingError: the server failed, or did not what is to be measured.
        """
        if unit.kind == "context":
            return [self._context(unit)]
        prompt = prompt_of(f"whole {unit.tokens} {unit.repeat}", unit.tokens)
        return self._dram(unit, prompt) if unit.kind == "dram" else self._whole(unit, prompt)

    def _whole(self, unit: Unit, prompt: Sequence[int]) -> list[Sample]:
        before = set(kv_files(self._root))
        computed = self._first_token(prompt, cached=0)
        self._server.wait_idle(self._root)
        samples = [Sample(kind="compute", context=0, tokens=unit.tokens, seconds=computed.ttft_s)]
        samples += self._hit(prompt, "disk")
        if unit.repeat:  # the first stay for the server that has them in DRAM
            for file in set(kv_files(self._root)) - before:
                file.unlink(missing_ok=True)
        return samples

    def _dram(self, unit: Unit, prompt: Sequence[int]) -> list[Sample]:
        self._first_token(prompt)
        self._server.wait_idle(self._root)
        samples: list[Sample] = []
        for _ in range(self._repeats):
            found = self._hit(prompt, "dram")
            if not found:
                self._note(
                    f"the pool does not retain a prompt of {unit.tokens} tokens: not measured in "
                    "DRAM; give more with --kv-offloading-size"
                )
                break
            samples += found
        return samples

    def _hit(self, prompt: Sequence[int], tier: Tier) -> list[Sample]:
        """The prompt from the GPU's prefix cache, then from the tier; nothing if it came from
        the other one."""
        tokens = len(prompt)
        cached = tokens - TAIL_TOKENS
        self._first_token(prompt)
        memory = self._first_token(prompt, cached=cached)
        self._server.reset_prefix_cache()
        before = self._server.metrics()
        hit = self._first_token(prompt, cached=cached)
        after = self._server.metrics()
        other = "dram" if tier == "disk" else "disk"
        if after.total(HITS, tier=other) > before.total(HITS, tier=other):
            return []
        size = round((after.total(LOAD_BYTES) - before.total(LOAD_BYTES)) / self._ranks)
        if not size:
            raise ServingError(f"a prompt of {tokens} tokens that is stored was not loaded")
        return [
            Sample(kind="compute", context=cached, tokens=tokens, seconds=memory.ttft_s),
            Sample(kind=tier, context=cached, tokens=tokens, bytes=size, seconds=hit.ttft_s),
        ]

    def _context(self, unit: Unit) -> Sample:
        prefix = prompt_of(f"context {unit.context} {unit.repeat}", unit.context)
        tail = prompt_of(f"tail of {unit.name}", unit.tokens - unit.context)
        # What vLLM keeps ends with a whole block and before the last token.
        self._first_token([*prefix, *tail[:TAIL_TOKENS][::-1]])
        self._server.wait_idle(self._root)  # stores take processor time from what follows
        answer = self._first_token([*prefix, *tail], cached=unit.context)
        return Sample(
            kind="compute", context=unit.context, tokens=unit.tokens, seconds=answer.ttft_s
        )

    def _first_token(self, prompt: Sequence[int], cached: int | None = None) -> Completion:
        answer = self._server.complete(prompt, 1)
        if cached is not None and answer.cached_tokens != cached:
            raise ServingError(
                f"of a prompt of {len(prompt)} tokens {answer.cached_tokens} were cached where "
                f"{cached} should be: does another client use the server, is the root full, or "
                "prefix caching off?"
            )
        return answer
