# SPDX-License-Identifier: Apache-2.0
"""What the gate is asked, what it answers, and what it learns from."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reach:
    """One end that a load may have.

    Attributes:
        tokens: of the prompt that are there after the load, those in the GPU before included.
        dram_bytes: of KV that the load takes from the pool: retained, or read ahead.
        disk_bytes: of KV that it reads from files.
    """

    tokens: int
    dram_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A hit: what a request could load.

    Attributes:
        prompt_tokens: D, of the whole prompt.
        cached_tokens: L, in the GPU already.
        reaches: every end to choose from, ascending; the last one is P, all of the hit.
    """

    prompt_tokens: int
    cached_tokens: int
    reaches: Sequence[Reach]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What stands before a new load or computation now.

    Attributes:
        disk_bytes: that are to be read for others before this load's own.
        decodes: requests of which each step decodes one token beside this one's prompt.
        wait_s: seconds until the request's own computation could begin, whichever is chosen:
            what is computed before it. A load that begins now is hidden behind them.
        notice_s: seconds until the engine sees that a load has ended: about half of a step.
    """

    disk_bytes: int = 0
    decodes: int = 0
    wait_s: float = 0.0
    notice_s: float = 0.0


class Reason(enum.StrEnum):
    """Why less is loaded than could be."""

    SLOWER = "slower"
    """Recomputing is faster, whatever the traffic."""
    BUSY = "busy"
    """Loading would be faster if no other reads stood before it."""
    PARTIAL = "partial"
    """A part is loaded; the rest is recomputed faster."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to load.

    Attributes:
        tokens: up to which to load; ``cached_tokens`` of the offer for nothing.
        reason: why not all of it; None when it is all.
        chosen_s: seconds predicted for what is done, to the end of the prompt's computation.
        recompute_s: for computing everything.
        load_s: for loading all of the hit and computing the rest.
    """

    tokens: int
    reason: Reason | None
    chosen_s: float
    recompute_s: float
    load_s: float


class Estimate(Protocol):
    """What work takes on this machine, as far as is known."""

    def compute_s(self, start: int, end: int, traffic: Traffic) -> float:
        """Seconds that the tokens ``start`` to ``end`` of a prompt take to compute, the
        steps' other work included, ``Traffic.wait_s`` not."""
        ...

    def load_s(self, dram_bytes: int, disk_bytes: int, traffic: Traffic) -> float:
        """Seconds until that much KV is in the GPU, behind ``Traffic.disk_bytes``."""
        ...


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step of the engine that has ended.

    Attributes:
        tokens: prompt tokens that it computed, of all requests.
        token_contexts: sum over them of the tokens before each (attention's work).
        decodes: requests of which it decoded one token.
        seconds: from the end of the step before (or its own start, if later) to its end.
    """

    tokens: int
    token_contexts: int
    decodes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadSample:
    """A load that has ended, without failures.

    Attributes:
        dram_bytes: that came from the pool.
        disk_bytes: that were read from files.
        ahead_bytes: ``Traffic.disk_bytes`` when it was submitted.
        seconds: from submission to its end.
    """

    dram_bytes: int
    disk_bytes: int
    ahead_bytes: int
    seconds: float
