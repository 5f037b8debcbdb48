# SPDX-License-Identifier: Apache-2.0
"""What the options mean for pools of several sizes."""

from __future__ import annotations

from typing import Any

import pytest

from pykvcache.config import Config
from pykvcache.limits import limits_of
from pykvcache.pool import SlotLedger
from pykvcache.transfer.core import TransferCore

SLOTS_MIN = Config().slots_min


def test_a_pool_for_staging_alone_keeps_nothing() -> None:
    limits = limits_of(Config(), SLOTS_MIN)
    assert limits.dram_policy == "none"
    assert limits.preload.slots_max == 0


def test_a_larger_pool_is_a_cache_and_is_read_ahead_into() -> None:
    limits = limits_of(Config(), SLOTS_MIN + 30)
    assert limits.dram_policy == "lru"
    assert limits.preload.slots_max == 30
    assert limits.preload.depth <= limits.io_depth


@pytest.mark.parametrize("asked", [1, 30, 10_000])
def test_loads_and_stores_keep_their_slots_whatever_is_asked(asked: int) -> None:
    slots = SLOTS_MIN + 30
    limits = limits_of(Config(preload_slots_max=asked), slots)
    assert limits.preload.slots_max == min(asked, 30)
    TransferCore(limits, SlotLedger(slots), "w")


def test_no_lookahead_is_no_reading_ahead() -> None:
    assert limits_of(Config(preload_lookahead=0), 100).preload.slots_max == 0


@pytest.mark.parametrize(
    ("options", "check_every", "checks_trailers"),
    [
        ({}, 1, True),
        ({"verify": "full", "verify_every": 3}, 1, True),
        ({"verify": "sampled"}, 16, True),
        ({"verify": "sampled", "verify_every": 3}, 3, True),
        ({"verify": "header"}, 0, True),
        ({"verify": "off"}, 0, False),
    ],
)
def test_what_is_compared(options: dict[str, Any], check_every: int, checks_trailers: bool) -> None:
    limits = limits_of(Config(**options), 100)
    assert (limits.check_every, limits.checks_trailers) == (check_every, checks_trailers)


def test_only_fsync_waits_for_the_storage() -> None:
    assert not limits_of(Config(), 100).syncs
    assert limits_of(Config(durability="fsync"), 100).syncs


def test_the_policy_asked_for_is_the_policy() -> None:
    assert limits_of(Config(dram_policy="none"), 100).dram_policy == "none"
    assert limits_of(Config(dram_policy="arc"), SLOTS_MIN).dram_policy == "arc"
