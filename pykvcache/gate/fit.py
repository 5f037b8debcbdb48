# SPDX-License-Identifier: Apache-2.0
"""Learning a few prices from a stream of bills: what the online estimate is made of."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
from scipy.optimize import nnls

TRUST = 8
"""Samples after which an estimate is believed enough to call a sample an outlier."""

SOLVE_EVERY = 8
"""Samples after which the prices are worked out again, once trusted: it takes 0.1 ms, and an
engine's steps come every few milliseconds."""

CONTRADICTION = 4.0
"""Factor by which two samples in a row must contradict those before, while there are few, for these
to be forgotten: the first ones may be of a cold machine, or of one that nobody else used yet."""

AGREEING = 5
"""Ratios in a row beyond the same side of the band that tell a small change. Were all to leave the
band by chance, one run in 32 would leave it on that side."""

OUTLIER = 2.0
"""Factor beyond which a sample that contradicts the estimate counts as this factor."""


class Prices:
    """Non-negative prices per unit, fitted to the totals of samples.

    A sample is a list of amounts and their total; the fit minimises the relative errors of
    recent samples (least squares with exponential forgetting; NNLS, Lawson and Hanson 1974).
    The prior counts little: it keeps apart what the samples cannot tell apart.
    """

    def __init__(
        self,
        prior: Sequence[float],
        memory: float,
        *,
        proportional: bool = False,
        leading: int | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Args:
        prior: a price for each unit, above 0.
        memory: samples after which an old one has lost two thirds of its weight.
        proportional: the first sample says how far all prices are from the prior, instead of
            the one that makes up most of it.
        leading: the price that the first sample says most about; None for the one that makes up
            most of it by the prior.
        weights: of the prior's prices, in samples: one that is wrong by its own size is one of
            them. Little for all of them if None.
        """
        self._scale = np.array(prior, dtype=float)
        size = len(self._scale)
        self._prior = np.diag([1e-3] * size if weights is None else list(weights))
        self._gram = np.zeros((size, size))
        self._moments = np.zeros(size)
        self._keep = 1.0 - 1.0 / memory
        self._proportional = proportional
        self._leading = leading
        self._prices = self._scale.copy()
        self.samples = 0
        self._contradiction = 0
        """Which way the last sample contradicted: 1 for dearer, -1 for cheaper."""

    @property
    def prices(self) -> Sequence[float]:
        """One for each unit."""
        return [float(price) for price in self._prices]

    def total(self, amounts: Sequence[float]) -> float:
        """What the amounts cost."""
        return float(np.dot(self._prices, amounts))

    def add(self, amounts: Sequence[float], total: float) -> None:
        """Learn that the amounts cost so much. One outlier moves little."""
        if not self.samples or (self.samples < TRUST and self._is_contradicted(amounts, total)):
            self._gram[:], self._moments[:] = 0.0, 0.0
            self._rescale(amounts, total)
        expected = self.total(amounts)
        if self.samples >= TRUST:
            total = min(max(total, expected / OUTLIER), expected * OUTLIER)
        self.samples += 1
        weight = 1.0 / max(total, expected, 1e-9) ** 2
        row = np.asarray(amounts, dtype=float) * self._scale
        self._gram = self._keep * self._gram + weight * np.outer(row, row)
        self._moments = self._keep * self._moments + weight * total * row
        if self.samples <= TRUST or self.samples % SOLVE_EVERY == 0:
            self._solve()

    def _is_contradicted(self, amounts: Sequence[float], total: float) -> bool:
        """Relative errors forgive estimates that are far too low, since they are never more than
        all of the total: a few wrong samples could only be outvoted by many right ones."""
        ratio = total / max(self.total(amounts), 1e-12)
        way = (ratio > CONTRADICTION) - (ratio < 1 / CONTRADICTION)
        is_second = way != 0 and way == self._contradiction
        self._contradiction = 0 if is_second else way
        return is_second

    def _rescale(self, amounts: Sequence[float], total: float) -> None:
        """Take over the size of the first sample: only what tells prices apart is the prior's."""
        parts = self._scale * np.asarray(amounts, dtype=float)
        chosen = np.ones(len(parts), dtype=bool)
        if not self._proportional:
            leading = int(parts.argmax()) if self._leading is None else self._leading
            chosen = np.arange(len(parts)) == leading
        factor = max(total - parts[~chosen].sum(), total / 2) / max(parts[chosen].sum(), 1e-12)
        self._scale[chosen] *= max(factor, 1e-6)
        self._prices = self._scale.copy()

    def _solve(self) -> None:
        lower = np.linalg.cholesky(self._gram + self._prior)
        target = np.linalg.solve(lower, self._moments + self._prior.sum(axis=1))
        found, _ = nnls(lower.T, target)
        self._prices = found * self._scale


class Level:
    """How much dearer everything has become: the median of recent ratios of total to estimate.

    It follows a machine that changes within a few samples, ignores single ones, and stays where
    it is while the ratios scatter about it.
    """

    def __init__(self, *, window: int = 15, band: float = 0.1, step: float = 4.0) -> None:
        """Args:
        window: ratios remembered.
        band: relative change below which nothing changes.
        step: factor by which it changes at most at once.
        """
        self._ratios: deque[float] = deque(maxlen=window)
        self._band = math.log1p(band)
        self._step = math.log(step)
        self.factor = 1.0

    def add(self, ratio: float) -> bool:
        """Take in a ratio of what something cost to its price at level 1; whether it changed."""
        self._ratios.append(math.log(min(max(ratio, 1e-6), 1e6)))
        if len(self._ratios) < 3:
            return False
        level = math.log(self.factor)
        # Those before the last ones are of another machine, if these agree about a change.
        if abs(median(list(self._ratios)[-3:]) - level) > math.log(1.5):
            self._remember(3)
        elif self._is_beyond_band(level):
            self._remember(AGREEING)
        change = median(self._ratios) - level
        if abs(change) <= self._band:
            return False
        self.factor *= math.exp(min(max(change, -self._step), self._step))
        return True

    def _is_beyond_band(self, level: float) -> bool:
        """Whether as many as it takes have come in a row, all beyond the same side of the band."""
        changes = [ratio - level for ratio in list(self._ratios)[-AGREEING:]]
        is_full = len(changes) == AGREEING
        return is_full and (min(changes) > self._band or max(changes) < -self._band)

    def _remember(self, count: int) -> None:
        while len(self._ratios) > count:
            self._ratios.popleft()
