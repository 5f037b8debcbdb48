# SPDX-License-Identifier: Apache-2.0
"""What is measured: which prompts, in which order, on how many servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pykvcache.errors import ConfigError

TAIL_TOKENS = 16
"""Of each prompt beyond its last chunk: a hit has something to compute, and as little as a GPU
block allows."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How thorough a calibration is.

    Attributes:
        tokens_max: of the longest prompt; 0 for the model's limit.
        per_octave: sizes from one to its double.
        repeats: of each size, and of each hit.
        context_repeats: of each computation behind a context.
    """

    tokens_max: int
    per_octave: int
    repeats: int
    context_repeats: int


QUICK = Effort(tokens_max=2048 + TAIL_TOKENS, per_octave=1, repeats=3, context_repeats=3)
"""Under 10 minutes where a core computes 100 tokens a second."""

FULL = Effort(tokens_max=0, per_octave=2, repeats=3, context_repeats=3)


@dataclass(frozen=True, slots=True)
class Unit:
    """What is measured at once and kept or repeated as a whole.

    ``whole``: a prompt of ``tokens`` computed, and a hit on each tier that this server has;
    ``context``: the tokens from ``context`` on, with those before in the GPU.
    """

    kind: Literal["whole", "context", "dram"]
    tokens: int
    context: int
    repeat: int

    @property
    def name(self) -> str:
        """In the journal."""
        return f"{self.kind} {self.context} {self.tokens} {self.repeat}"


def sizes(tokens_max: int, tokens_per_chunk: int, per_octave: int) -> list[int]:
    """Lengths of prompts, ascending: whole chunks in geometric steps, and the tail.

    Args:
        tokens_max: of the longest prompt.
        tokens_per_chunk: of one file.
        per_octave: how many from one to its double.

    Raises:
        ConfigError: not even one chunk and the tail fit.
    """
    chunks_max = (tokens_max - TAIL_TOKENS) // tokens_per_chunk
    if chunks_max < 1:
        raise ConfigError(
            f"--max-tokens is {tokens_max}: must be at least {tokens_per_chunk + TAIL_TOKENS}, one "
            "chunk and a tail, and within the model's limit"
        )
    counts = {chunks_max}
    step = 0
    while (count := round(2 ** (step / per_octave))) < chunks_max:
        counts.add(count)
        step += 1
    return [count * tokens_per_chunk + TAIL_TOKENS for count in sorted(counts)]


def first_units(lengths: list[int], effort: Effort) -> list[Unit]:
    """For the server that keeps nothing in DRAM: computations, and hits on the disk."""
    whole = [
        Unit("whole", tokens, 0, repeat) for repeat in range(effort.repeats) for tokens in lengths
    ]
    # Every contexts' own length is one of the sweep's, so that the fit has a point there.
    contexts = [tokens - TAIL_TOKENS for tokens in lengths[:: effort.per_octave]]
    behind = [
        Unit("context", tokens, context, repeat)
        for repeat in range(effort.context_repeats)
        for context in contexts
        for tokens in lengths
        if tokens - TAIL_TOKENS > context
    ]
    return whole + behind


def dram_units(lengths: list[int]) -> list[Unit]:
    """For the server that does: hits on what its pool retains."""
    return [Unit("dram", tokens, 0, 0) for tokens in lengths]
