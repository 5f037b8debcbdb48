# SPDX-License-Identifier: Apache-2.0
"""What this machine takes for its work, learned while it serves.

It starts from a prior that loads long prefixes, or from a calibration, and follows what steps
and loads take: prices per unit that change slowly, times a level that follows a machine which
becomes slower or faster as a whole (a GPU or a disk that others use too).
"""

from __future__ import annotations

import math
from typing import Protocol

from pykvcache.gate.fit import TRUST, Level, Prices
from pykvcache.gate.terms import LoadSample, StepSample, Traffic

DISK_PRIOR = 14e9
"""Bytes per second expected of a disk nothing was loaded from yet: the fastest NVMe drives (paper,
figure 7). Too high is put right by the first loads; too low would let none happen."""

DRAM_PRIOR = 50e9
"""Likewise for the copy from the pool to the GPU."""

LOAD_PRIOR_S = 0.005
"""Seconds a load takes beside its bytes: two steps of the engine, opening files."""

LOAD_PRIOR_WEIGHT = 0.3
"""Samples that this counts as: long loads say little about it, and short ones, which look whether
a disk has recovered, are judged by it."""

BYTES_SHARE_MIN = 0.1
"""Time of a load's bytes, as a share of the rest, from which on it says how fast they are read."""

STEP_PRIOR_S = 0.002
"""Seconds a step takes beside its tokens."""

TOKENS_PRIOR = 1024
"""Tokens from which on a prefix is loaded while nothing is known: four chunks."""

STEP_TOKENS_PRIOR = 2048
"""Prompt tokens in a step until more are seen; vLLM's ``max_num_batched_tokens``."""

STEPS_REMEMBERED = 128.0
LOADS_REMEMBERED = 32.0

PREFILL_MIN = 32
"""Prompt tokens from which on a step teaches what a prompt costs; below it decodes."""

PROBE_MIN_S = 10.0
"""Seconds without a read after which a declined load is tried with its first chunk."""

PROBE_MAX_S = 60.0
"""The longest such time; it doubles as long as probes find what was expected."""

SURPRISE = 1.5
"""Factor by which a load must differ from what was expected to be looked at again soon."""


class Measured(Protocol):
    """A calibration of this machine."""

    def compute_s(self, start: int, end: int) -> float:
        """Seconds to compute the tokens ``start`` to ``end`` in an idle engine."""
        ...

    def load_s(self, tier: str, size: int) -> float:
        """Seconds to load so many bytes from ``dram`` or ``disk`` in an idle engine."""
        ...


class OnlineEstimate:
    """An :class:`~pykvcache.gate.terms.Estimate` that learns."""

    def __init__(self, bytes_per_token: float, calibration: Measured | None = None) -> None:
        """Args:
        bytes_per_token: of KV in each rank's files.
        calibration: its curves stand for the shape of what is learned.
        """
        self._calibration = calibration
        token_load_s = bytes_per_token / DISK_PRIOR
        # Twice what loading a token takes, and for all of the first tokens together as much
        # as the fixed part of a load: worth it from TOKENS_PRIOR on.
        token_s = token_load_s + LOAD_PRIOR_S / TOKENS_PRIOR
        self._prefill = Prices(
            [STEP_PRIOR_S, token_s, token_s / 3e4], STEPS_REMEMBERED, proportional=True
        )
        self._compute_level = Level()
        self._decode = Prices([STEP_PRIOR_S, token_s], STEPS_REMEMBERED)
        self._disk = _Tier("disk", DISK_PRIOR, calibration)
        self._dram = _Tier("dram", DRAM_PRIOR, calibration)
        self._step_tokens = STEP_TOKENS_PRIOR
        self._probe_s = PROBE_MIN_S
        self._disk_seen_at = -math.inf

    # --- what work takes

    def compute_s(self, start: int, end: int, traffic: Traffic) -> float:
        """Seconds that the tokens ``start`` to ``end`` take to compute."""
        tokens = max(0, end - start)
        if not tokens:
            return 0.0
        steps = math.ceil(tokens / self._step_tokens)
        step_s, token_s, context_s = self._prefill.prices
        if self._calibration is not None:
            own_s = self._calibration.compute_s(start, end)
        else:
            own_s = steps * step_s + tokens * token_s + _contexts(start, tokens) * context_s
        decodes_s = steps * traffic.decodes * self._decode.prices[1]
        return own_s * self._compute_level.factor + decodes_s

    def load_s(self, dram_bytes: int, disk_bytes: int, traffic: Traffic) -> float:
        """Seconds until that much KV is in the GPU, behind the traffic's reads.

        What is in the pool is copied while the rest is read, so the longer of both counts.
        """
        disk_s = self._disk.load_s(traffic.disk_bytes + disk_bytes) if disk_bytes else 0.0
        return max(disk_s, self._dram.load_s(dram_bytes))

    @property
    def disk_bytes_per_s(self) -> float:
        """Of long reads, as of now."""
        return self.bytes_per_s("disk")

    def bytes_per_s(self, tier: str) -> float:
        """Of long loads from ``disk`` or ``dram``, as of now."""
        size = 1 << 30
        seconds = [
            self.load_s(count * size, 0, Traffic())
            if tier == "dram"
            else self.load_s(0, count * size, Traffic())
            for count in (1, 2)
        ]
        return size / max(seconds[1] - seconds[0], 1e-9)

    # --- what is learned

    def observe_step(self, sample: StepSample) -> None:
        """Learn from a step that computed something."""
        if sample.seconds <= 0 or not sample.tokens + sample.decodes:
            return
        if sample.tokens < PREFILL_MIN:
            if sample.decodes:
                self._decode.add([1.0, float(sample.decodes)], sample.seconds)
            return
        self._step_tokens = max(self._step_tokens, sample.tokens)
        # Beside a prompt a decode costs what it costs more than nothing.
        seconds = sample.seconds - sample.decodes * self._decode.prices[1]
        seconds = max(seconds, sample.seconds / 2)
        amounts = [1.0, float(sample.tokens), float(sample.token_contexts)]
        if self._calibration is not None:
            context = sample.token_contexts // sample.tokens
            start = max(0, context - sample.tokens // 2)
            expected = self._calibration.compute_s(start, start + sample.tokens)
            self._compute_level.add(seconds / max(expected, 1e-9))
        elif self._prefill.samples >= TRUST:
            self._compute_level.add(seconds / max(self._prefill.total(amounts), 1e-9))
        self._prefill.add(amounts, seconds / self._compute_level.factor)

    def observe_load(self, sample: LoadSample, now: float) -> None:
        """Learn from a load.

        Args:
            sample: the load.
            now: seconds, never less than before.
        """
        if sample.seconds <= 0 or not sample.dram_bytes + sample.disk_bytes:
            return
        if not sample.disk_bytes:
            self._dram.observe(sample.dram_bytes, sample.seconds)
            return
        size = sample.ahead_bytes + sample.disk_bytes
        self._note_disk(sample.seconds / max(self._disk.load_s(size), 1e-9), now)
        # Where most of the time may have gone into the copy it says nothing about the disk.
        if self._dram.load_s(sample.dram_bytes) < sample.seconds / 2:
            self._disk.observe(size, sample.seconds)

    def _note_disk(self, ratio: float, now: float) -> None:
        self._disk_seen_at = now
        if 1 / SURPRISE < ratio < SURPRISE:
            self._probe_s = min(2 * self._probe_s, PROBE_MAX_S)
        else:
            self._probe_s = PROBE_MIN_S

    def wants_probe(self, now: float) -> bool:
        """Whether nothing was read for so long that the disk may be another by now."""
        return now - self._disk_seen_at >= self._probe_s

    def begin_probe(self, now: float) -> None:
        """A load is tried; its sample says how soon the next one is due."""
        self._disk_seen_at = now

    @property
    def has_learned(self) -> bool:
        """Whether it stands on more than the prior: on a calibration, or on samples of both."""
        learned = min(self._prefill.samples, self._disk.samples) >= TRUST
        return self._calibration is not None or learned

    def summary(self) -> dict[str, float]:
        """The prices, for logs: seconds and bytes per second, levels as factors."""
        step_s, token_s, context_s = self._prefill.prices
        return {
            "step_s": step_s,
            "tokens_per_s": 1 / max(token_s, 1e-12),
            "context_s": context_s,
            "compute_level": self._compute_level.factor,
            "disk_bytes_per_s": self.disk_bytes_per_s,
            "disk_level": self._disk.level,
            "dram_level": self._dram.level,
        }


class _Tier:
    """What loads from one tier take."""

    def __init__(self, name: str, rate: float, calibration: Measured | None) -> None:
        self._name = name
        self._calibration = calibration
        self._prices = Prices(
            [LOAD_PRIOR_S, 1 / rate],
            LOADS_REMEMBERED,
            leading=1,
            weights=(LOAD_PRIOR_WEIGHT, 1e-3),
        )
        self._level = Level(band=0.15)

    @property
    def level(self) -> float:
        return self._level.factor

    @property
    def samples(self) -> int:
        return self._prices.samples

    def load_s(self, size: int) -> float:
        """Of so many bytes; nothing for none."""
        if not size:
            return 0.0
        fixed_s, bytes_s = self._parts(size)
        return fixed_s + bytes_s * self._level.factor

    def _parts(self, size: int) -> tuple[float, float]:
        """What a load takes beside its bytes, and what these take at level 1."""
        if self._calibration is None:
            fixed_s, byte_s = self._prices.prices
            return fixed_s, size * byte_s
        fixed_s = self._calibration.load_s(self._name, 1)
        return fixed_s, max(0.0, self._calibration.load_s(self._name, size) - fixed_s)

    def observe(self, size: int, seconds: float) -> None:
        fixed_s, bytes_s = self._parts(size)
        # As far as the rest leaves something of it.
        own_s = max(seconds - fixed_s, 0.1 * seconds)
        trusted = self._calibration is not None or self._prices.samples >= TRUST
        if trusted and bytes_s * self._level.factor >= BYTES_SHARE_MIN * fixed_s:
            self._level.add(own_s / max(bytes_s, 1e-9))
        self._prices.add((1.0, float(size)), seconds - own_s + own_s / self._level.factor)


def _contexts(start: int, tokens: int) -> float:
    """Sum over the tokens from ``start`` on of the tokens before each."""
    return tokens * start + tokens * (tokens - 1) / 2
