# SPDX-License-Identifier: Apache-2.0
"""Faults of the disk under a real server: some in every run, all of them in `make soak`, which
writes the table in the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.docs import ROOT, rendered
from scripts.serving import Prompts
from tests.e2e.fault_suite import CASES, RingFaultSite, Suite, rows

DOCUMENT = ROOT / "docs" / "faults.md"
SECTION = "server-faults"
IN_EVERY_RUN = (
    "EIO | load: read",
    "EIO | store: write",
    "ENOSPC | store: write",
    "half of the bytes | load: read",
    "removed with all chunks | the root",
)


@pytest.fixture(scope="module")
def suite(
    model: Path, tmp_path_factory: pytest.TempPathFactory, prompts: Prompts
) -> Iterator[Suite]:
    site = RingFaultSite(model, tmp_path_factory.mktemp("ring-faults"))
    with site.ring_fault_server() as server:
        yield Suite(site, server, prompts)


@pytest.mark.parametrize("name", IN_EVERY_RUN)
def test_a_fault_costs_a_recomputation_at_most(suite: Suite, name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    outcome = suite.play(case)
    assert set(outcome.counted) == {reason.value for reason in case.reasons}


def test_the_table_has_every_fault() -> None:
    section = DOCUMENT.read_text().partition(f"<!-- {SECTION} -->")[2]
    lines = section.partition(f"<!-- /{SECTION} -->")[0].strip().splitlines()[2:]
    names = [" | ".join(cell.strip() for cell in line.split("|")[1:3]) for line in lines]
    assert names == [case.name for case in CASES]


@pytest.mark.soak
def test_every_fault(suite: Suite) -> None:
    outcomes = [suite.play(case) for case in CASES]
    text = DOCUMENT.read_text()
    new = rendered(text, SECTION, rows(outcomes))
    DOCUMENT.write_text(new)
    assert new == text, f"{DOCUMENT.name} was not what the suite found; it is now"
