# SPDX-License-Identifier: Apache-2.0
"""A machine whose prices are known."""

from __future__ import annotations

from dataclasses import dataclass

from pykvcache.gate.terms import Offer, Reach, Traffic

TOKEN_BYTES = 114_688
"""Of Llama 3.2 3B in 16 bits (paper, section 5.2)."""

CHUNK = 256


@dataclass(frozen=True)
class Machine:
    """An :class:`~pykvcache.gate.terms.Estimate` that is right."""

    token_s: float = 1 / 30_000
    context_s: float = 2.5e-9
    step_s: float = 0.004
    disk: float = 13.5e9
    dram: float = 54e9
    fixed_s: float = 0.003

    def compute_s(self, start: int, end: int, traffic: Traffic) -> float:
        tokens = max(0, end - start)
        if not tokens:
            return 0.0
        contexts = tokens * start + tokens * (tokens - 1) / 2
        return self.step_s + tokens * self.token_s + contexts * self.context_s

    def load_s(self, dram_bytes: int, disk_bytes: int, traffic: Traffic) -> float:
        ahead = traffic.disk_bytes if disk_bytes else 0
        return self.fixed_s + (ahead + disk_bytes) / self.disk + dram_bytes / self.dram


def offer_of(prompt: int, cached: int, hit: int, staged: int = 0) -> Offer:
    """A hit of ``hit`` tokens by chunks, the first ``staged`` of which are in the pool."""
    reaches = []
    dram = disk = 0
    for end in range((cached // CHUNK + 1) * CHUNK, hit + 1, CHUNK):
        size = min(CHUNK, end - cached) * TOKEN_BYTES
        if end <= staged:
            dram += size
        else:
            disk += size
        reaches.append(Reach(end, dram, disk))
    return Offer(prompt, cached, tuple(reaches))
