# SPDX-License-Identifier: Apache-2.0
"""The machines that are simulated, and what happens to them.

Figures of the two fast ones are from the paper, of Llama 3.2 3B in 16 bits with 114,688 bytes
of KV per token (section 5.2). Its figure 7 gives the bandwidth at which a load of a whole prompt
takes as long as computing it: 23.2 GB/s at 1k tokens, 10.4 at 8k, 3.5 at 80k, which are budgets
of 5.06 ms, 90.3 ms and 2.684 s for f(D) less what a hit takes beside its transfer. A price per
token and one per token of context through these three leave -4.7 ms: a step less that rest of a
hit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

GIB = 1 << 30
CHUNK_TOKENS = 256


@dataclass(frozen=True)
class Machine:
    """What work takes: seconds, and bytes per second."""

    step_s: float
    token_s: float
    context_s: float
    """For each prompt token and token before it."""
    decode_s: float
    """For each request that decodes."""
    decode_context_s: float
    """For each token before it."""
    disk_rate: float
    dram_rate: float
    load_s: float
    """What a load takes beside its bytes, in an idle engine."""

    def tokens_s(self, start: int, end: int) -> float:
        """Seconds that the prompt tokens ``start`` to ``end`` add to a step."""
        tokens = end - start
        return tokens * self.token_s + contexts(start, end) * self.context_s

    def decodes_s(self, decodes: int, context: int) -> float:
        """Seconds that decoding adds to a step, with ``context`` tokens before all of them."""
        return decodes * self.decode_s + context * self.decode_context_s


def contexts(start: int, end: int) -> int:
    """Sum over the tokens ``start`` to ``end`` of the tokens before each."""
    return (end - start) * (start + end - 1) // 2


@dataclass(frozen=True)
class Profile:
    """A machine with a model and vLLM's settings."""

    name: str
    machine: Machine
    bytes_per_token: int
    gpu_tokens: int
    """Of KV in the GPU."""
    pool_bytes: int
    """Of the DRAM tier."""
    batched_tokens: int
    seqs_max: int
    prompt_tokens_max: int

    @property
    def chunk_bytes(self) -> int:
        """Of KV in one file."""
        return self.bytes_per_token * CHUNK_TOKENS


H100 = Machine(
    # Not in the paper: reading 6.4 GB of weights at 2.4 TB/s, and the engine's own work.
    step_s=0.004,
    # 108,000 tokens per second without context; both from figure 7, see above.
    token_s=9.24e-6,
    context_s=5.76e-10,
    # Not in the paper: KV of the context at 2.4 TB/s.
    decode_s=2e-5,
    decode_context_s=4.8e-8,
    # Section 5.2: llm-d moves 9.0 GB/s at 1k tokens and up to 12.0 GB/s at larger sizes: 12.0
    # GB/s and 3.2 ms. To these come the 4.7 ms of a hit above.
    disk_rate=12.0e9,
    load_s=0.0079,
    # Section 5.2: 54 to 56 GB/s.
    dram_rate=55e9,
)
RTX_4000_ADA = Machine(
    # As above, at 360 GB/s.
    step_s=0.020,
    # Section 5.1 and figure 4: a hit at 80k tokens is 32.8 times as fast as computing, and 1.04
    # times as fast as another whose time differs by 33 ms at most: 27 s, ten times the H100's.
    token_s=9.24e-5,
    context_s=5.76e-9,
    decode_s=2e-4,
    decode_context_s=3.2e-7,
    # The CM7-R reads as fast as the PM1743 (section 4.2).
    disk_rate=12.0e9,
    load_s=0.0079,
    # Section 5.1: 24 to 26 GB/s.
    dram_rate=25e9,
)
TWO_CORES = Machine(
    # Through f(272), f(1040) and f(2064) of docs/calibration.md.
    step_s=0.0575,
    token_s=1.072e-3,
    context_s=6.49e-7,
    # Not measured: as much as a prompt's token, and the context's KV at 10 GB/s.
    decode_s=1.07e-3,
    decode_context_s=4.6e-6,
    # There: 1394 and 7794 MB/s, and 4 ms for the shortest load.
    disk_rate=1.394e9,
    load_s=0.004,
    dram_rate=7.794e9,
)

_FAST = Profile(
    name="h100-pm1743",
    machine=H100,
    bytes_per_token=114_688,
    # 94 GiB (table 3) at vLLM's 0.9, less the weights and 6 GB for activations.
    gpu_tokens=690_000,
    pool_bytes=16 * GIB,
    # vLLM's defaults for a GPU of this size.
    batched_tokens=8192,
    seqs_max=256,
    prompt_tokens_max=131_072,
)
_SMALL = Profile(
    name="two-cores",
    machine=TWO_CORES,
    bytes_per_token=46_080,
    gpu_tokens=46_000,
    pool_bytes=1 * GIB,
    batched_tokens=2048,
    seqs_max=64,
    prompt_tokens_max=8192,
)
_ADA = replace(
    _FAST,
    name="rtx4000ada-cm7r",
    machine=RTX_4000_ADA,
    # 20 GiB (table 2), likewise with 1.5 GB for activations.
    gpu_tokens=97_000,
    batched_tokens=2048,
    prompt_tokens_max=64_000,
)
PROFILES = {
    profile.name: profile
    for profile in (
        _FAST,
        # Figure 7 draws this drive for the H100; section 5.2: fio measured 6 GB/s.
        replace(_FAST, name="h100-pm9a3", machine=replace(H100, disk_rate=6e9)),
        _ADA,
        _SMALL,
        # About where a load of 2,000 tokens takes as long as computing them.
        replace(
            _SMALL, name="two-cores-25MB", machine=replace(TWO_CORES, disk_rate=25e6, load_s=0.02)
        ),
    )
}


@dataclass(frozen=True)
class Conditions:
    """What happens to a machine while it serves."""

    name: str
    compute: Callable[[float], float] = lambda now: 1.0
    """How many times as long as usual steps take, at a time."""
    disk: Callable[[float], float] = lambda now: 1.0
    """Likewise for reads."""
    step_scatter: float = 0.05
    """Standard deviation of the logarithm of a step's time."""
    read_scatter: float = 0.15


def steady(span_s: float, seed: int) -> Conditions:
    """Nothing but scatter."""
    return Conditions("steady")


def drift(span_s: float, seed: int) -> Conditions:
    """Computing becomes 1.5 times as slow over the run."""
    return Conditions("drift", compute=lambda now: 1.0 + 0.5 * min(now / span_s, 1.0))


def slow_disk(span_s: float, seed: int) -> Conditions:
    """The disk is ten times as slow in the middle third."""
    return Conditions(
        "slow disk", disk=lambda now: 10.0 if span_s / 3 <= now < 2 * span_s / 3 else 1.0
    )


def shared_gpu(span_s: float, seed: int) -> Conditions:
    """Others use the GPU too: one to three times as slow, changing forty times at random."""
    rng = random.Random(seed)
    phases = [math.exp(rng.uniform(0.0, math.log(3.0))) for _ in range(41)]
    return Conditions("shared GPU", compute=lambda now: phases[min(int(now / span_s * 40), 40)])


SCENARIOS: dict[str, Callable[[float, int], Conditions]] = {
    "steady": steady,
    "drift": drift,
    "slow-disk": slow_disk,
    "shared-gpu": shared_gpu,
}
