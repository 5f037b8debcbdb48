# SPDX-License-Identifier: Apache-2.0
"""From options to what the transfer core obeys, given the size of the pool."""

from __future__ import annotations

from dataclasses import replace

from pykvcache.config import Config
from pykvcache.transfer.core import Limits
from pykvcache.transfer.preloads import PreloadLimits


def limits_of(config: Config, slots: int) -> Limits:
    """The limits of a worker.

    Args:
        config: the options.
        slots: of its pool, at least ``config.slots_min``. What is beyond those may hold chunks
            read ahead, and makes ``dram_policy`` 'auto' mean 'lru'.
    """
    spare = slots - config.slots_min
    policy = config.dram_policy
    if policy == "auto":
        policy = "lru" if spare else "none"
    preload = PreloadLimits(
        depth=min(config.preload_depth, config.io_depth),
        slots_max=min(config.preload_slots_max or spare, spare),
        bytes_max=config.preload_bytes_max,
        ttl_s=config.preload_ttl_s,
    )
    return replace(
        _disk_limits(config),
        preload=preload if config.preload_lookahead else PreloadLimits(),
        dram_policy=policy,
    )


def tier_limits_of(config: Config) -> tuple[Limits, int]:
    """The limits of a reactor whose payloads lie in memory of someone else, and its slots.

    That memory has budgets of its own, so that the reactor neither reads ahead nor keeps
    anything. A slot is only what follows the payload in a file: enough for every file that is
    opened ahead or in flight, in both directions.
    """
    return _disk_limits(config), config.slots_min + 2 * config.open_lookahead


def _disk_limits(config: Config) -> Limits:
    every = {"full": 1, "sampled": config.verify_every, "header": 0, "off": 0}
    return Limits(
        io_depth=config.io_depth,
        open_lookahead=config.open_lookahead,
        load_deadline_s=config.load_deadline_s,
        jobs_max=config.mailbox_jobs,
        read_bandwidth_max=config.read_bandwidth_max,
        write_bandwidth_max=config.write_bandwidth_max,
        check_every=every[config.verify],
        syncs=config.durability == "fsync",
        quarantine_files_max=config.quarantine_files_max,
        checks_trailers=config.verify != "off",
        pause_after_faults=config.pause_after_faults,
        pause_s=config.pause_s,
        pause_max_s=max(config.pause_s, config.pause_max_s),
    )
