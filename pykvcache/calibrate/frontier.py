# SPDX-License-Identifier: Apache-2.0
"""What a calibration says about loading: speed-ups, break-even, and the bandwidth it needs."""

from __future__ import annotations

from collections.abc import Sequence

from pykvcache.gate.calibration import Calibration, Tier


def bytes_per_token(calibration: Calibration) -> float:
    """Of KV for each rank, by the longest load."""
    curve = calibration.content.tiers["disk"]
    hits = [sample for sample in calibration.content.samples if sample.bytes == curve.bytes[-1]]
    return curve.bytes[-1] / max(hit.context for hit in hits)


def speedup(calibration: Calibration, tier: Tier, tokens: int, prefix: int) -> float:
    """Predicted time to compute a prompt over that with its prefix loaded (paper, figure 6)."""
    load_s = calibration.load_s(tier, round(prefix * bytes_per_token(calibration)))
    with_load_s = load_s + calibration.compute_s(prefix, tokens)
    return calibration.compute_s(0, tokens) / max(with_load_s, 1e-9)


def break_even_share(calibration: Calibration, tier: Tier, tokens: int) -> float | None:
    """The smallest share of a prompt of which the load is no loss; None if there is none."""
    steps = 1000
    for step in range(1, steps + 1):
        prefix = min(tokens * step // steps, tokens - 1)
        if prefix and speedup(calibration, tier, tokens, prefix) >= 1:
            return step / steps
    return None


def needed_bandwidth(calibration: Calibration, tokens: int) -> float:
    """Bytes per second for each rank with which loading a whole prompt takes as long as
    computing it (paper, section 5.2): its bytes over f(D) - (g(D) - t_copy(D)), where the
    difference in parentheses is what a hit computes. Infinite where no time is left."""
    prefix = tokens - 1
    left_s = calibration.compute_s(0, tokens) - calibration.compute_s(prefix, tokens)
    return prefix * bytes_per_token(calibration) / left_s if left_s > 0 else float("inf")


def lengths_between(low: int, high: int, count: int) -> Sequence[int]:
    """Numbers of tokens in geometric steps, both ends among them."""
    ratio = (high / low) ** (1 / (count - 1))
    return [round(low * ratio**number) for number in range(count)]
