# SPDX-License-Identifier: Apache-2.0
"""From samples to the curves of a calibration."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from scipy.optimize import isotonic_regression, nnls

from pykvcache.errors import ConfigError
from pykvcache.gate.calibration import TIERS, ComputeCurve, ComputeTimes, Sample, Tier, TierCurve

SMOOTHING = 0.01
"""Weight of "as steep as the piece before" against one measurement. It decides what the
measurements leave open, such as how the shortest prompt's time divides into step and tokens."""

TAIL_TOKENS_MAX = 64
"""A computation of fewer tokens is a tail: all of its time is the step's."""

Span = tuple[int, int]
"""a, b: the tokens a to b are computed."""


@dataclass(frozen=True, slots=True)
class Curves:
    """What the samples say.

    Attributes:
        f: median seconds of a whole prompt by its tokens.
        compute: fitted to ``f`` and to every other median c(a, b).
        tiers: by name.
        error: relative errors against the measured c(a, b): of the fit, and of the paper's
            f(b - a), median and largest.
    """

    f: Mapping[int, float]
    compute: ComputeCurve
    tiers: Mapping[Tier, TierCurve]
    error: Mapping[str, float]


def fit(samples: Iterable[Sample]) -> Curves:
    """Fit the curves.

    Raises:
        ConfigError: too little was measured: of ``compute`` at least one whole prompt, and of
            the disk one load.
    """
    samples = list(samples)
    spans = compute_medians(samples)
    f = {end: seconds for (start, end), seconds in spans.items() if not start}
    if not f:
        raise ConfigError("there is no sample of kind 'compute' with context 0: one is needed")
    compute = fit_compute(spans)
    tiers: dict[Tier, TierCurve] = {}
    for tier in TIERS:
        points = _loads(samples, tier, spans, compute)
        if points:
            tiers[tier] = _tier_curve(points)
    if "disk" not in tiers:
        raise ConfigError("there is no sample of kind 'disk': one is needed")
    return Curves(f, compute, tiers, errors(spans, compute))


def compute_medians(samples: Iterable[Sample]) -> dict[Span, float]:
    """Seconds of each computation measured, ascending."""
    found: defaultdict[Span, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.kind == "compute":
            found[sample.context, sample.tokens].append(sample.seconds)
    return {span: median(found[span]) for span in sorted(found)}


def fit_compute(spans: Mapping[Span, float]) -> ComputeCurve:
    """The step and the curve F with the least relative errors of ``step + F(b) - F(a)`` (least
    squares with no negative part, NNLS, Lawson and Hanson 1974), F straight between the ends of
    the whole prompts."""
    knots = [0, *sorted(end for start, end in spans if not start)]
    pieces = list(itertools.pairwise(knots))
    rows, targets = [], []
    for (start, end), seconds in spans.items():
        rows.append([value / seconds for value in (1.0, *_shares(start, end, pieces))])
        targets.append(1.0)
    scale = max(spans.values())
    for number in range(1, len(pieces)):
        row = [0.0] * (len(pieces) + 1)
        for piece, sign in ((number - 1, -1.0), (number, 1.0)):
            low, high = pieces[piece]
            row[piece + 1] = sign * SMOOTHING * knots[-1] / (high - low) / scale
        rows.append(row)
        targets.append(0.0)
    found, _ = nnls(rows, targets)
    total, seconds_at = 0.0, []
    for value in found[1:]:
        total += float(value)
        seconds_at.append(total)
    return ComputeCurve(step_s=float(found[0]), tokens=tuple(knots[1:]), seconds=tuple(seconds_at))


def _shares(start: int, end: int, pieces: Sequence[Span]) -> list[float]:
    """How much of each piece lies between two tokens; what lies beyond the last is of its kind."""
    shares = [max(0, min(end, high) - max(start, low)) / (high - low) for low, high in pieces]
    low, high = pieces[-1]
    shares[-1] += max(0, end - max(start, high)) / (high - low)
    return shares


def _loads(
    samples: Sequence[Sample], tier: str, spans: Mapping[Span, float], compute: ComputeCurve
) -> list[tuple[int, int, float]]:
    """Tokens, bytes and seconds of each size: the hit's time less that of what it computes."""
    times = ComputeTimes(compute)
    hits: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)
    for sample in samples:
        if sample.kind == tier:
            hits[sample.bytes, sample.context, sample.tokens].append(sample.seconds)
    points: dict[int, tuple[int, int, float]] = {}
    for (size, context, tokens), seconds in sorted(hits.items()):
        tail_s = spans.get((context, tokens))
        if tail_s is None:
            tail_s = times(context, tokens)
        points[size] = (tokens, size, max(0.0, median(seconds) - tail_s))
    return list(points.values())


def _tier_curve(points: Sequence[tuple[int, int, float]]) -> TierCurve:
    """Of loads in order of their bytes, made not to fall (least squares)."""
    rising = isotonic_regression([seconds for _, _, seconds in points]).x
    return TierCurve(
        tokens=tuple(tokens for tokens, _, _ in points),
        bytes=tuple(size for _, size, _ in points),
        seconds=tuple(float(seconds) for seconds in rising),
    )


def errors(spans: Mapping[Span, float], compute: ComputeCurve) -> dict[str, float]:
    """Relative errors of what predicts c(a, b), against those measured: of ``compute``, and of
    f(b - a), with which the paper takes a context for free (section 4.1)."""
    times = ComputeTimes(compute)
    found: dict[str, list[float]] = {"fitted": [], "paper": []}
    for (start, end), seconds in spans.items():
        if start and end - start > TAIL_TOKENS_MAX:
            found["fitted"].append(abs(times(start, end) / seconds - 1))
            found["paper"].append(abs(times(0, end - start) / seconds - 1))
    result = {}
    for name, values in found.items():
        if values:
            result[f"{name}_median"] = median(values)
            result[f"{name}_max"] = max(values)
    return result
