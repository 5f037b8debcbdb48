# SPDX-License-Identifier: Apache-2.0
"""Runs of the simulation, and what is reported of them."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gate_simulation.engine import Engine, Outcome
from benchmarks.gate_simulation.machines import PROFILES, SCENARIOS
from benchmarks.gate_simulation.policies import ORACLE, POLICIES
from benchmarks.gate_simulation.traces import fit, read_trace

UTILISATION = 0.4
"""Of the time, for the work that nobody can save: the engine is then busy for 75 to 95 % of it,
and one that loads what it should has no queue that grows."""

BINS = 60
"""Of the time of a run, in which the share loaded is reported."""


@dataclass(frozen=True)
class Case:
    """What is simulated.

    Attributes:
        scenario: one of :data:`SCENARIOS`.
        profile: one of :data:`PROFILES`.
        trace: its file.
        policy: one of :data:`POLICIES`.
        seed: of the scatter.
        requests_max: of the trace, from its first on.
        utilisation: see :func:`~benchmarks.gate_simulation.traces.fit`.
    """

    scenario: str
    profile: str
    trace: Path
    policy: str
    seed: int
    requests_max: int
    utilisation: float = UTILISATION


@dataclass(frozen=True)
class Result:
    """One run. Seconds, and shares of all prompts' tokens."""

    scenario: str
    profile: str
    trace: str
    policy: str
    seed: int
    requests: int
    ttft_mean_s: float
    ttft_p99_s: float
    loaded_share: float
    computed_share: float
    busy_share: float
    loaded_of_hit: tuple[float | None, ...]
    """By :data:`BINS` of the time from the first arrival to the last: the share of the tokens
    that could be loaded and were; None where no request had a hit."""


def run(case: Case) -> Result:
    """Simulate a case."""
    profile = PROFILES[case.profile]
    arrivals = fit(_read(case.trace)[: case.requests_max], profile, case.utilisation)
    span_s = arrivals[-1].at
    conditions = SCENARIOS[case.scenario](span_s, case.seed)
    engine = Engine(profile, conditions, POLICIES[case.policy], seed=case.seed)
    outcome = engine.run(arrivals)
    ttfts = sorted(outcome.ttfts_s)
    return Result(
        scenario=case.scenario,
        profile=case.profile,
        trace=name_of(case.trace),
        policy=case.policy,
        seed=case.seed,
        requests=len(arrivals),
        ttft_mean_s=statistics.fmean(ttfts),
        ttft_p99_s=ttfts[math.ceil(0.99 * len(ttfts)) - 1],
        loaded_share=outcome.loaded_tokens / outcome.prompt_tokens,
        computed_share=outcome.computed_tokens / outcome.prompt_tokens,
        busy_share=outcome.busy_s / outcome.end_s,
        loaded_of_hit=_by_time(outcome, span_s),
    )


_read = functools.lru_cache(maxsize=2)(read_trace)


def name_of(trace: Path) -> str:
    """``conversation`` of ``mooncake_conversation_trace.jsonl``."""
    return trace.stem.removeprefix("mooncake_").removesuffix("_trace")


def _by_time(outcome: Outcome, span_s: float) -> tuple[float | None, ...]:
    offered, loaded = [0] * BINS, [0] * BINS
    for verdict in outcome.verdicts:
        place = min(int(verdict.at / span_s * BINS), BINS - 1)
        offered[place] += verdict.offered_tokens
        loaded[place] += verdict.loaded_tokens
    return tuple(
        round(done / could, 4) if could else None
        for done, could in zip(loaded, offered, strict=True)
    )


@dataclass(frozen=True)
class Row:
    """All seeds of a scenario, profile, trace and policy.

    ``regret`` is how much longer the mean time to first token is than with the oracle.
    """

    scenario: str
    profile: str
    trace: str
    policy: str
    requests: int
    ttft_mean_s: float
    ttft_p99_s: float
    regret: float
    loaded_share: float


def summarise(results: Iterable[Result]) -> list[Row]:
    """A row for each policy, in the order of the runs."""
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for result in results:
        key = (result.scenario, result.profile, result.trace, result.policy)
        groups.setdefault(key, []).append(result)
    means = {key: _mean(group) for key, group in groups.items()}
    return [
        Row(
            *key,
            requests=group[0].requests,
            ttft_mean_s=means[key],
            ttft_p99_s=statistics.fmean(each.ttft_p99_s for each in group),
            regret=means[key] / means[(*key[:3], ORACLE)] - 1,
            loaded_share=statistics.fmean(each.loaded_share for each in group),
        )
        for key, group in groups.items()
    ]


def _mean(group: Sequence[Result]) -> float:
    return statistics.fmean(each.ttft_mean_s for each in group)


def worst_regret(rows: Iterable[Row], policy: str, scenario: str) -> float:
    """The largest regret of a policy over profiles and traces."""
    return max(row.regret for row in rows if (row.policy, row.scenario) == (policy, scenario))


def as_json(results: Sequence[Result], utilisation: float) -> dict[str, object]:
    """The report."""
    rows = summarise(results)
    scenarios = dict.fromkeys(row.scenario for row in rows)
    return {
        "utilisation": utilisation,
        "seeds": len({result.seed for result in results}),
        "online_regret_max": {name: worst_regret(rows, "online", name) for name in scenarios},
        "rows": [asdict(row) for row in rows],
        "loaded_of_hit": [
            {
                name: getattr(result, name)
                for name in ("scenario", "profile", "trace", "policy", "seed", "loaded_of_hit")
            }
            for result in results
            if result.scenario == "slow-disk"
        ],
    }
