# SPDX-License-Identifier: Apache-2.0
"""The options of a secondary tier, and what its files depend on.

A tier is made in the scheduler's process, from a configuration without the model's. What is
missing is added to the connector's extra config by the hook of the patch ``tier-facts``,
where vLLM's whole configuration is at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.config import OffloadingConfig

from pykvcache.config import Config, parse_config
from pykvcache.errors import ConfigError
from pykvcache.identity import TierIdentity
from pykvcache.layout import PAGE
from pykvcache.reactor.probe import DirectChoice, choose_direct
from pykvcache.reactor.rows import Rows
from pykvcache.scheduler.promotions import PromotionLimits
from vllm.v1.kv_offload.pykvcache.backend import layout_facts, logged_refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TIER_TYPE = "pykvcache"
"""``type`` in ``secondary_tiers``."""

FACTS_KEY = "pykvcache_tier_facts"
"""Where the facts travel in ``kv_connector_extra_config``."""

FACTORY_KEYS = frozenset({"type", "module_path", "backpressure"})
"""Keys that vLLM's factory of tiers takes out before it makes one."""

TIER_KEYS = frozenset({"locality", "enable_kv_events"})
"""Keys that mean the same for every tier of vLLM."""

OTHERS_KEYS = {
    "tokens_per_chunk": "set vLLM's 'block_size' or 'blocks_per_chunk' beside 'secondary_tiers'",
    "dram_policy": "set vLLM's 'eviction_policy' beside 'secondary_tiers'; memory is its CPU tier",
    "preload_depth": "set 'preload_slots_max' or 'preload_bytes_max'; what is given memory is read",
    "flush_timeout_s": "a tier does not see the blocks of the GPU",
    "idle_wait_s": "a tier does not see vLLM's steps",
}
"""Options of the backend that decide nothing here: where what they mean is decided."""


def parse_tier_config(options: Mapping[str, Any]) -> Config:
    """The options of one entry of ``secondary_tiers``, without vLLM's own keys.

    Raises:
        ConfigError: an unknown option, one that decides nothing in a tier, or a bad value; the
            message names it and what would do.
    """
    for key in options:
        if key in OTHERS_KEYS:
            raise ConfigError(
                f"option '{key}' does not apply to a secondary tier: {OTHERS_KEYS[key]}"
            )
    return parse_config(options)


def add_facts(vllm_config: VllmConfig, extra_config: dict[str, Any]) -> None:
    """Check the options of our tiers, and leave in the extra config what their files depend on.

    Raises:
        ConfigError: bad options, or a model that cannot be served from files.
    """
    tiers = list(_own_tiers(extra_config))
    if not tiers or FACTS_KEY in extra_config:
        return
    from vllm.v1.kv_offload.pykvcache.facts import model_facts
    from vllm.v1.kv_offload.pykvcache.models import check_model

    with logged_refusal():
        for tier in tiers:
            own = FACTORY_KEYS | TIER_KEYS
            config = parse_tier_config({key: tier[key] for key in tier.keys() - own})
            check_model(vllm_config, config)
    extra_config[FACTS_KEY] = model_facts(vllm_config)


def _own_tiers(extra_config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    tiers = extra_config.get("secondary_tiers")
    for tier in tiers if isinstance(tiers, list) else ():
        if isinstance(tier, Mapping) and tier.get("type") == TIER_TYPE:
            yield tier


def tier_identity(config: OffloadingConfig, options: Config, row_bytes: int) -> TierIdentity:
    """Everything that the bytes of a row depend on.

    Raises:
        ConfigError: the facts are missing.
    """
    facts = config.extra_config.get(FACTS_KEY)
    if facts is None:
        raise ConfigError(
            f"secondary tier '{TIER_TYPE}' is made without knowing what the KV cache depends on: "
            "use vLLM's OffloadingConnector, as this distribution ships it"
        )
    copies = 1 if config.replicated_layout else config.parallel.world_size
    return TierIdentity(
        **facts,
        **layout_facts(config, options),
        row_bytes=row_bytes,
        row_layout="canonical" if config.canonical_layout else f"{copies} x rank",
    )


def choose_tier_direct(options: Config, directory: Path, rows: Rows) -> DirectChoice:
    """As :func:`pykvcache.reactor.probe.choose_direct`, for payloads that lie in these rows.

    Raises:
        ConfigError: direct I/O is demanded and they do not lie in whole pages.
    """
    if rows.is_aligned or options.direct_io == "off":
        return choose_direct(options.direct_io, directory)
    choose_direct("off", directory)
    why = f"vLLM's CPU tier does not lie in whole pages of {PAGE} bytes"
    if options.direct_io == "on":
        raise ConfigError(f"option 'direct_io' is 'on', but {why}; 'auto' or 'off' would do")
    return DirectChoice(False, f"{why}: using buffered I/O", fallback=True)


def promotion_limits(options: Config, rows_max: int, row_bytes: int) -> PromotionLimits:
    """What the options of reading ahead mean for rows of so many bytes, of which promotions may
    take at most so many."""
    ahead = options.preload_slots_max or rows_max
    if options.preload_bytes_max:
        ahead = min(ahead, options.preload_bytes_max // row_bytes)
    return PromotionLimits(
        rows_max=rows_max,
        ahead_max=min(ahead, rows_max),
        requests_max=max(1, options.preload_lookahead),
        ttl_s=options.preload_ttl_s,
    )
