# SPDX-License-Identifier: Apache-2.0
"""The transfer core under seeded schedules; SEED=n repeats one of them and prints its trace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pykvcache.transfer import records, states
from pykvcache.transfer.core import TransferCore
from pykvcache.transfer.jobs import Failure
from tests.simulator.mutants import MUTANTS
from tests.simulator.simulator import run_seed
from tests.simulator.watched import Violation

REPOSITORY = Path(__file__).resolve().parents[2]
SEED = os.environ.get("SEED")

SCHEDULES = 400
BATCH = 50
COVERAGE_SCHEDULES = 120
MUTANT_SCHEDULES = 1500
SOAK_SCHEDULES = 12_000


@pytest.mark.skipif(SEED is None, reason="SEED names a schedule to repeat")
def test_one_schedule_is_repeated() -> None:
    run_seed(int(SEED or 0), verbose=True)


@pytest.mark.parametrize("first", range(0, SCHEDULES, BATCH))
def test_schedules(first: int) -> None:
    for seed in range(first, first + BATCH):
        run_seed(seed)


def test_schedules_reach_every_transition_and_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, states.State, states.Event]] = set()

    def next_read_state(state: states.State, event: states.Event) -> states.State:
        seen.add(("read", state, event))
        return states.next_read_state(state, event)

    def next_write_state(state: states.State, event: states.Event) -> states.State:
        seen.add(("write", state, event))
        return states.next_write_state(state, event)

    monkeypatch.setattr(records, "next_read_state", next_read_state)
    monkeypatch.setattr(records, "next_write_state", next_write_state)
    failures: Counter[Failure] = Counter()
    for seed in range(COVERAGE_SCHEDULES):
        failures += run_seed(seed).oracle.failures
    assert seen == {("read", *step) for step in states.READ_TRANSITIONS} | {
        ("write", *step) for step in states.WRITE_TRANSITIONS
    }
    assert failures.keys() == set(Failure)


def test_a_seed_repeats_its_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(20):
        run_seed(seed, verbose=True)
        first = capsys.readouterr().out
        run_seed(seed, verbose=True)
        assert capsys.readouterr().out == first
        assert first


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_are_found(mutant: type[TransferCore]) -> None:
    with pytest.raises(Violation, match=r"SEED=\d+ python -m pytest"):
        for seed in range(MUTANT_SCHEDULES):
            run_seed(seed, mutant)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_soak() -> None:
    workers = os.cpu_count() or 1
    share = SOAK_SCHEDULES // workers
    program = str(Path(__file__).with_name("simulator.py"))
    running = [
        subprocess.Popen(
            [sys.executable, program, str(SCHEDULES + worker * share), str(share)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        for worker in range(workers)
    ]
    reports = [process.communicate()[0] for process in running]
    assert all(process.returncode == 0 for process in running), "\n".join(reports)
