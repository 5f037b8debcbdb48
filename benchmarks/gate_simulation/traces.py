# SPDX-License-Identifier: Apache-2.0
"""Requests of a trace of real traffic, their arrivals fitted to a machine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gate_simulation.machines import CHUNK_TOKENS, Machine, Profile

HASH_TOKENS = 512
"""Of a block that a hash stands for in the traces."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace.

    Attributes:
        at: seconds.
        prompt_tokens: at least one.
        output_tokens: at least one.
        chunks: a key for each whole chunk of the prompt; equal ones have equal prefixes.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    chunks: tuple[int, ...]


def read_trace(path: Path) -> list[Arrival]:
    """A trace of Mooncake (Qin et al. 2025): a JSON object in a line, with ``timestamp`` in
    milliseconds, ``input_length``, ``output_length`` and the ``hash_ids`` of 512-token blocks.

    Requests of one time stamp, which one trace gives to three seconds only, are spread evenly
    to the next.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    arrivals: list[Arrival] = []
    groups = [list(group) for _, group in itertools.groupby(rows, lambda row: row["timestamp"])]
    for group, following in itertools.zip_longest(groups, groups[1:]):
        first = group[0]["timestamp"]
        gap = following[0]["timestamp"] - first if following else 0
        for number, row in enumerate(group):
            at = (first + gap * number / len(group)) / 1000
            arrivals.append(
                arrival_of(at, row["input_length"], row["output_length"], row["hash_ids"])
            )
    return arrivals


def arrival_of(at: float, tokens: int, output: int, hashes: Sequence[int]) -> Arrival:
    """A request whose 512-token blocks have these hashes."""
    per_hash = HASH_TOKENS // CHUNK_TOKENS
    count = min(tokens // CHUNK_TOKENS, len(hashes) * per_hash)
    chunks = tuple(
        hashes[index // per_hash] * per_hash + index % per_hash for index in range(count)
    )
    return Arrival(at, max(tokens, 1), max(output, 1), chunks)


def fit(arrivals: Iterable[Arrival], profile: Profile, utilisation: float) -> list[Arrival]:
    """What the machine can serve, at a rate that keeps it busy.

    Prompts that are too long for the model or the GPU are left out. Time is stretched so that
    the work that nobody can save takes ``utilisation`` of it: see :func:`new_work_s`.

    Args:
        arrivals: of a trace.
        profile: of the machine.
        utilisation: share of the time.
    """
    fitting = [
        each
        for each in arrivals
        if each.prompt_tokens <= profile.prompt_tokens_max
        and each.prompt_tokens + each.output_tokens <= profile.gpu_tokens
    ]
    start = fitting[0].at
    span = max(fitting[-1].at - start, 1e-9)
    stretch = new_work_s(fitting, profile.machine, profile.batched_tokens) / utilisation / span
    return [
        Arrival((each.at - start) * stretch, each.prompt_tokens, each.output_tokens, each.chunks)
        for each in fitting
    ]


def new_work_s(arrivals: Iterable[Arrival], machine: Machine, batched_tokens: int) -> float:
    """Seconds to compute what no earlier request had in its prompt, and what the answers'
    tokens add to steps that are made anyway."""
    seen: set[int] = set()
    total = 0.0
    for each in arrivals:
        known = 0
        for key in each.chunks:
            if key not in seen:
                break
            known += CHUNK_TOKENS
        known = min(known, each.prompt_tokens - 1)
        steps = -(-(each.prompt_tokens - known) // batched_tokens)
        total += steps * machine.step_s + machine.tokens_s(known, each.prompt_tokens)
        context = each.prompt_tokens + each.output_tokens // 2
        total += each.output_tokens * machine.decodes_s(1, context)
        seen.update(each.chunks)
    return total
