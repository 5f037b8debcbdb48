# SPDX-License-Identifier: Apache-2.0
"""No fault of the disk is left without an outcome, and each goes when it is gone."""

from __future__ import annotations

import pytest

from pykvcache.transfer.jobs import Direction, Failure
from pykvcache.transfer.operations import Action
from tests.core.fault_table import Played, played

PLAYED = list(played())


@pytest.mark.parametrize("outcome", PLAYED, ids=lambda o: f"{o.fault}-{o.action.name}")
def test_a_fault_is_counted_and_goes(outcome: Played) -> None:
    assert outcome.failure in set(Failure) - {Failure.DROPPED, Failure.PAUSED}
    assert outcome.recovers


def test_what_a_disk_that_works_says_never_pauses_it() -> None:
    answers = {Failure.NOT_FOUND, Failure.NO_SPACE, Failure.WRONG_CONTENT, Failure.TRAILER}
    assert not [each for each in PLAYED if each.failure in answers and each.is_paused]


def test_broken_disks_are_left_alone() -> None:
    broken = [each for each in PLAYED if each.fault in ("EIO", "ENODEV", "never returns")]
    # Before a link comes a write that has succeeded.
    assert [each.action for each in broken if not each.is_paused] == [Action.LINK] * 2


def test_only_files_that_are_not_their_chunk_are_taken_away() -> None:
    for each in PLAYED:
        if each.direction is Direction.LOAD:
            is_wrong = each.fault.startswith("wrong") or each.fault == "short"
            assert (each.file != "stays") == is_wrong, each
