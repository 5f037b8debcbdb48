# SPDX-License-Identifier: Apache-2.0
"""The decision itself: how much of a hit to load."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from pykvcache.gate.terms import Decision, Estimate, Offer, Reach, Reason, Traffic

MARGIN = 0.02
"""Share of the time to recompute that a load must save, as it also costs the disk and the pool
something. No more, since what is loaded leaves the GPU to others: see docs/gate.md."""

PROBE_SHARE = 0.01
"""Of the time that requests take to compute what was declined, what trying the disk may cost all
of them together: it is tried the more often, the more there is to gain."""

PROBE_MOST = 0.5
"""And what it may cost the one that tries, as a share of its own."""

STORE_MARGIN = -0.5
"""For stores, which are for ever after: nothing is stored only where the best load would take
half as long again as recomputing."""


def decide(estimate: Estimate, offer: Offer, traffic: Traffic, margin: float = MARGIN) -> Decision:
    """Choose the end of the load with the least predicted time to the first token.

    With D tokens in the prompt, L in the GPU, and P of which the rest can be loaded, it is loaded
    up to the best P' in ``offer.reaches`` if g(P' - L) + c(P', D) < c(L, D), by the margin, where
    g is the time of the load and c of the computation (paper, section 4.1, with c for its f to
    count what a context costs). What the engine computes before this request hides the load, and
    delays it either way (section 8.3).

    Args:
        estimate: of g and c on this machine as it is now.
        offer: at least one reach.
        traffic: of others.
        margin: share of c(L, D) that a load must save.
    """
    recompute_s = traffic.wait_s + estimate.compute_s(
        offer.cached_tokens, offer.prompt_tokens, traffic
    )
    most_s = recompute_s - margin * (recompute_s - traffic.wait_s)
    best: Reach | None = None
    best_s = recompute_s
    whole_s = recompute_s
    for reach in offer.reaches:
        whole_s = _with_load_s(estimate, offer, reach, traffic)
        # Of equal ones the longest: it leaves the GPU to others.
        if whole_s < most_s and (best is None or whole_s <= best_s):
            best, best_s = reach, whole_s
    if best is None:
        why = _why_nothing(estimate, offer, traffic, margin)
        return Decision(offer.cached_tokens, why, recompute_s, recompute_s, whole_s)
    reason = None if best is offer.reaches[-1] else Reason.PARTIAL
    return Decision(best.tokens, reason, best_s, recompute_s, whole_s)


def _with_load_s(estimate: Estimate, offer: Offer, reach: Reach, traffic: Traffic) -> float:
    load_s = estimate.load_s(reach.dram_bytes, reach.disk_bytes, traffic) + traffic.notice_s
    if traffic.wait_s:
        # Reading is hidden; the copy from the pool to the GPU begins when the request runs.
        staged = reach.dram_bytes + reach.disk_bytes
        copy_s = estimate.load_s(staged, 0, traffic)
        load_s = max(load_s, traffic.wait_s + min(copy_s, load_s))
    return load_s + estimate.compute_s(reach.tokens, offer.prompt_tokens, traffic)


def _why_nothing(estimate: Estimate, offer: Offer, traffic: Traffic, margin: float) -> Reason:
    if traffic.disk_bytes:
        alone = decide(estimate, offer, replace(traffic, disk_bytes=0), margin)
        if alone.tokens > offer.cached_tokens:
            return Reason.BUSY
    return Reason.SLOWER


def could_pass(estimate: Estimate, tokens_max: int, bytes_per_token: float, *, dram: bool) -> bool:
    """Whether any prompt of at most ``tokens_max`` tokens could be worth a load.

    The longest prefix is the best case, since every token costs more to compute than the one
    before and the same to load; what of it the GPU may hold already is tried in eighths.

    Args:
        estimate: of this machine.
        tokens_max: the model's limit.
        bytes_per_token: of KV.
        dram: whether the pool keeps chunks after their transfer.
    """
    for eighth in range(8):
        cached = tokens_max * eighth // 8
        size = int((tokens_max - cached) * bytes_per_token)
        reach = Reach(tokens_max, size if dram else 0, 0 if dram else size)
        offer = Offer(tokens_max, cached, (reach,))
        if decide(estimate, offer, Traffic(), STORE_MARGIN).tokens > cached:
            return True
    return False


class Probed(Estimate, Protocol):
    """An estimate that goes stale without loads."""

    def wants_probe(self, now: float) -> bool:
        """Whether the disk may be another by now."""
        ...

    def begin_probe(self, now: float) -> None:
        """A load is tried; another is not wanted before long."""
        ...


class Gate:
    """Decides, and tries now and then what it would decline: a disk that nobody reads from any
    more could have recovered."""

    def __init__(self, estimate: Probed, margin: float = MARGIN) -> None:
        """Args:
        estimate: of this machine.
        margin: see :func:`decide`.
        """
        self.estimate = estimate
        self._margin = margin
        self._credit_s = 0.0
        """What probes may cost by now."""

    def decide(self, offer: Offer, traffic: Traffic, now: float) -> Decision:
        """As :func:`decide`; a probe loads with the reason it was declined for.

        Args:
            offer: at least one reach; the shorter the first, the cheaper a probe can be.
            traffic: of others.
            now: seconds, never less than before.
        """
        decision = decide(self.estimate, offer, traffic, self._margin)
        if decision.tokens > offer.cached_tokens or not offer.reaches[0].disk_bytes:
            return decision
        own_s = decision.recompute_s - traffic.wait_s
        self._credit_s += PROBE_SHARE * own_s
        if not self.estimate.wants_probe(now):
            return decision
        # The longest, which says most about the disk.
        for reach in reversed(offer.reaches):
            cost_s = self.estimate.load_s(reach.dram_bytes, reach.disk_bytes, traffic)
            if cost_s <= min(self._credit_s, PROBE_MOST * own_s):
                self._credit_s -= cost_s
                self.estimate.begin_probe(now)
                return replace(decision, tokens=reach.tokens)
        return decision
