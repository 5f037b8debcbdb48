# SPDX-License-Identifier: Apache-2.0
"""The options of a secondary tier, what its files depend on, and how it gets to know."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.tier_settings", reason="needs the patched vLLM")

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from pykvcache.config import Config
from pykvcache.errors import ConfigError
from tests.overlay.small_tiering import FACTS, ROW_BYTES, make_tier, offloading_config, tier_spec
from tests.overlay.small_vllm import (
    full_attention,
    kv_cache_config,
    opt_folder,
)
from tests.overlay.small_vllm import offloading_config as vllm_config_of
from vllm.v1.kv_offload.pykvcache.tier import PyKVCacheTier
from vllm.v1.kv_offload.pykvcache.tier_settings import (
    FACTS_KEY,
    OTHERS_KEYS,
    parse_tier_config,
    tier_identity,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return opt_folder(tmp_path_factory.mktemp("model"))


def config_with(model_dir: Path, *tiers: dict[str, Any]) -> VllmConfig:
    config = vllm_config_of(model_dir, "TieringOffloadingSpec")
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"] = list(tiers)
    return config


def extra_of(config: VllmConfig) -> dict[str, Any]:
    """What the spec and its tiers are made from."""
    return dict(build_offloading_config(config, kv_cache_config((full_attention(),))).extra_config)


# --- registration


def test_the_tier_is_registered_and_not_imported_before_it_is_used() -> None:
    program = (
        "import sys; import vllm.v1.kv_offload.factory;"
        "from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory as factory;"
        "assert 'vllm.v1.kv_offload.pykvcache.tier' not in sys.modules;"
        "print(factory.get_tier_class({'type': 'pykvcache'}).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == PyKVCacheTier.__name__


def test_the_factory_hands_over_the_options(tmp_path: Path) -> None:
    memory = memoryview(bytearray(4 * ROW_BYTES)).cast("B", (4, ROW_BYTES))
    tier = make_tier(memory, tmp_path, locality="REMOTE", preload_lookahead=3)
    assert SecondaryTierFactory.get_tier_class({"type": "pykvcache"}) is PyKVCacheTier
    assert (tier.tier_type, tier.lookahead) == ("pykvcache", 3)
    tier.shutdown()


# --- options


def test_options_are_those_of_the_backend() -> None:
    options = parse_tier_config({"root": "/kv", "io_depth": 4})
    assert (options.root, options.io_depth) == (Path("/kv"), 4)


@pytest.mark.parametrize("name", sorted(OTHERS_KEYS))
def test_options_that_decide_nothing_here_are_refused_and_say_what_does(name: str) -> None:
    assert name in Config.model_fields
    value = Config.model_fields[name].default
    with pytest.raises(ConfigError, match=f"'{name}' does not apply to a secondary tier: "):
        parse_tier_config({name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roots": "/kv"}, "'roots'"),
        ({"io_depth": 0}, "'io_depth' is 0"),
        ({"direct_io": "sometimes"}, "'direct_io'"),
    ],
)
def test_bad_options_are_refused_before_the_spec_is_made(
    model_dir: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        extra_of(config_with(model_dir, {"type": "pykvcache", **options}))


@pytest.mark.parametrize("key", ["locality", "enable_kv_events", "backpressure", "module_path"])
def test_vllms_own_keys_are_no_options(model_dir: Path, key: str) -> None:
    assert FACTS_KEY in extra_of(config_with(model_dir, {"type": "pykvcache", key: None}))


# --- facts


def test_facts_are_added_for_a_tier_of_this_backend_alone(model_dir: Path) -> None:
    fs = {"type": "fs", "root_dir": "/kv"}
    assert FACTS_KEY not in extra_of(vllm_config_of(model_dir, "TieringOffloadingSpec"))
    assert FACTS_KEY not in extra_of(config_with(model_dir, fs))
    facts = extra_of(config_with(model_dir, fs, {"type": "pykvcache"}))[FACTS_KEY]
    assert facts["model"] == str(model_dir)
    assert facts.keys() == FACTS.keys()


def test_a_configuration_is_seen_more_than_once(model_dir: Path) -> None:
    config = config_with(model_dir, {"type": "pykvcache"})
    assert extra_of(config)[FACTS_KEY] == extra_of(config)[FACTS_KEY]


def test_models_that_cannot_be_served_from_files_are_refused(model_dir: Path) -> None:
    config = config_with(model_dir, {"type": "pykvcache"})
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(ConfigError, match="needs prefix caching"):
        extra_of(config)


def test_without_facts_there_is_no_tier(tmp_path: Path) -> None:
    memory = memoryview(bytearray(4 * ROW_BYTES)).cast("B", (4, ROW_BYTES))
    with pytest.raises(ConfigError, match="without knowing what the KV cache depends on"):
        make_tier(memory, tmp_path, tier_spec(offloading_config(extra_config={})))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": OffloadingModelConfig("small", "float16")},
        {"cache": OffloadingCacheConfig(16, 2)},
        {"cache": OffloadingCacheConfig(32, 1)},
        {"groups": (OffloadingGroupConfig(32, ("layer",), 0),)},
        {"extra_config": {FACTS_KEY: {**FACTS, "weights": "1" * 64}}},
        {"extra_config": {FACTS_KEY: {**FACTS, "hash_seed": "1"}}},
        {"parallel": replace(offloading_config().parallel, tp_size=2, world_size=2)},
        {"canonical_layout": True},
    ],
)
def test_whatever_the_bytes_depend_on_is_in_the_identity(changes: dict[str, Any]) -> None:
    usual = tier_identity(offloading_config(), Config(), ROW_BYTES)
    assert usual == tier_identity(offloading_config(), Config(io_depth=4), ROW_BYTES)
    other = tier_identity(offloading_config(**changes), Config(), ROW_BYTES)
    assert other.fingerprint != usual.fingerprint


def test_namespace_and_size_of_a_row_are_in_the_identity() -> None:
    usual = tier_identity(offloading_config(), Config(), ROW_BYTES)
    others = [
        tier_identity(offloading_config(), Config(namespace="other"), ROW_BYTES),
        tier_identity(offloading_config(), Config(), 2 * ROW_BYTES),
    ]
    assert len({usual.fingerprint, *(other.fingerprint for other in others)}) == 3
