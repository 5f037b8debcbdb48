# SPDX-License-Identifier: Apache-2.0
"""The simulated engine and its policies, on a small trace made here."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.gate_simulation.report import Case, Result, run, summarise

REQUESTS = 250
BLOCK_TOKENS = 512


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of some thousand tokens, more than a GPU holds, asked about again and again."""
    source = random.Random(1)
    lengths = [source.randrange(2, 12) for _ in range(50)]
    rows = []
    for number in range(REQUESTS):
        document = source.randrange(len(lengths))
        blocks = [100 * document + block for block in range(lengths[document])]
        tokens = lengths[document] * BLOCK_TOKENS + source.randrange(16, 200)
        rows.append(
            {
                "timestamp": 1000 * number,
                "input_length": tokens,
                "output_length": source.randrange(1, 40),
                "hash_ids": [*blocks, 10_000 + number],
            }
        )
    path = tmp_path_factory.mktemp("traces") / "small_trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def simulate(trace: Path, policy: str, profile: str, scenario: str = "steady") -> Result:
    return run(Case(scenario, profile, trace, policy, seed=1, requests_max=REQUESTS))


PROFILES = ["rtx4000ada-cm7r", "two-cores-25MB"]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_run_can_be_repeated(trace: Path, profile: str) -> None:
    assert simulate(trace, "online", profile) == simulate(trace, "online", profile)


@pytest.mark.parametrize("profile", PROFILES)
def test_never_loads_nothing_and_always_all(trace: Path, profile: str) -> None:
    assert simulate(trace, "never", profile).loaded_share == 0.0
    always = simulate(trace, "always", profile)
    assert set(always.loaded_of_hit) <= {1.0, None}
    assert always.loaded_share > 0.1


def regrets(trace: Path, profile: str, scenario: str) -> dict[str, float]:
    policies = ("never", "always", "online", "oracle")
    rows = summarise([simulate(trace, policy, profile, scenario) for policy in policies])
    return {row.policy: row.regret for row in rows}


@pytest.mark.parametrize("profile", PROFILES)
def test_what_is_learned_is_nearly_as_good_as_what_is_known(trace: Path, profile: str) -> None:
    regret = regrets(trace, profile, "steady")
    assert regret["online"] <= 0.08  # the first requests of so few have to teach it
    assert regret["online"] <= min(regret["never"], regret["always"])


def test_a_disk_that_turns_slow_costs_less_than_to_go_on_loading(trace: Path) -> None:
    regret = regrets(trace, "two-cores-25MB", "slow-disk")
    assert regret["online"] < min(regret["never"], regret["always"] / 2)
