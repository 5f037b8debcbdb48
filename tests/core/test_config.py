# SPDX-License-Identifier: Apache-2.0
"""Options: defaults, where they come from, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pykvcache.config import (
    Config,
    default_root,
    environment_options,
    parse_config,
)
from pykvcache.errors import ConfigError
from pykvcache.option_errors import CONNECTOR_KEYS, REPLACED_KEYS

NOTHING: dict[str, str] = {}


def refusal(options: dict[str, Any], environment: dict[str, str] = NOTHING) -> str:
    """The message with which the options are refused."""
    with pytest.raises(ConfigError) as refused:
        parse_config(options, environment)
    return str(refused.value)


def test_defaults() -> None:
    config = parse_config({}, {"XDG_CACHE_HOME": "/cache"})
    assert config.root == Path("/cache/pykvcache")
    assert config.namespace == ""
    assert (config.tokens_per_chunk, config.io_depth, config.open_lookahead) == (256, 8, 16)
    assert (config.direct_io, config.io_engine) == ("auto", "auto")
    assert config.load_deadline_s == 30.0
    assert config.slots_min == config.io_depth + config.copy_headroom == 12


def test_the_default_root_follows_the_base_directory_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_root({}) == Path("/home/someone/.cache/pykvcache")
    assert default_root({"XDG_CACHE_HOME": ""}) == Path("/home/someone/.cache/pykvcache")
    assert default_root({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/pykvcache")
    assert parse_config({}, {}).root == Path("/home/someone/.cache/pykvcache")


def test_an_option_wins_over_the_environment_and_that_over_the_default() -> None:
    environment = {"PYKVCACHE_IO_DEPTH": "4", "PYKVCACHE_ROOT": "/from/environment"}
    config = parse_config({"io_depth": 2}, environment)
    assert config.io_depth == 2
    assert config.root == Path("/from/environment")
    assert parse_config({}, environment).io_depth == 4
    assert parse_config({}, {"PYKVCACHE_IO_DEPTH": ""}).io_depth == 8


def test_only_the_documented_options_come_from_the_environment() -> None:
    every = {f"PYKVCACHE_{name.upper()}": "1" for name in Config.model_fields}
    assert environment_options(every) == {
        "root": "1",
        "namespace": "1",
        "tokens_per_chunk": "1",
        "io_depth": "1",
        "direct_io": "1",
        "io_engine": "1",
        "preload_lookahead": "1",
        "gate": "1",
        "gate_path": "1",
        "dram_policy": "1",
        "read_bandwidth_max": "1",
        "write_bandwidth_max": "1",
        "verify": "1",
        "durability": "1",
        "group_access": "1",
        "unsafe_root": "1",
        "load_deadline_s": "1",
        "capacity": "1",
        "free_space_min": "1",
        "eviction_policy": "1",
        "trace_path": "1",
    }


def test_every_option_can_be_given_as_its_default() -> None:
    config = parse_config({}, {})
    assert parse_config(config.model_dump(), {}) == config


def test_every_option_is_described() -> None:
    assert all(field.description for field in Config.model_fields.values())


def test_the_configuration_is_frozen() -> None:
    config = parse_config({}, {})
    with pytest.raises(ValidationError):
        config.io_depth = 3


@pytest.mark.parametrize("key", sorted(CONNECTOR_KEYS))
def test_keys_of_the_connector_pass(key: str) -> None:
    assert parse_config({key: object()}, {}) == parse_config({}, {})


@pytest.mark.parametrize(("key", "instead"), sorted(REPLACED_KEYS.items()))
def test_keys_that_contradict_an_option_say_what_to_use(key: str, instead: str) -> None:
    message = refusal({key: 1})
    assert message == f"option '{key}' does not apply to the pykvcache backend: {instead}"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("io_dept", "io_depth"),
        ("depth", "io_depth"),
        ("tokens_per_block", "tokens_per_chunk"),
        ("direct-io", "direct_io"),
        ("load_deadline", "load_deadline_s"),
        ("engine", "io_engine"),
    ],
)
def test_an_unknown_option_names_the_nearest(key: str, nearest: str) -> None:
    message = refusal({key: 1})
    assert message.startswith(f"unknown option '{key}': did you mean '{nearest}'? ")


def test_an_unknown_option_like_none_lists_what_there_is() -> None:
    message = refusal({"zzz": 1})
    assert message.startswith("unknown option 'zzz': known options are ")
    assert all(name in message for name in Config.model_fields)


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        ("root", 7, "must be the path of a directory"),
        ("root", "", "must be the path of a directory"),
        ("root", None, "must be the path of a directory"),
        ("namespace", "a/b", "string should match pattern '^[A-Za-z0-9._-]*$'"),
        ("namespace", "x" * 129, "at most 128 characters"),
        ("namespace", "a\n", "string should match pattern"),
        ("namespace", 5, "input should be a valid string"),
        ("tokens_per_chunk", 0, "greater than or equal to 1"),
        ("tokens_per_chunk", "many", "input should be a valid integer"),
        ("tokens_per_chunk", 1.5, "input should be a valid integer"),
        ("io_depth", 0, "greater than or equal to 1"),
        ("io_depth", 257, "less than or equal to 256"),
        ("io_depth", [8], "input should be a valid integer"),
        ("io_depth", True, "must be a number"),
        ("load_deadline_s", True, "must be a number"),
        ("open_lookahead", 1025, "less than or equal to 1024"),
        ("copy_headroom", 0, "greater than or equal to 1"),
        ("direct_io", "yes", "input should be 'auto', 'on' or 'off'"),
        ("direct_io", True, "input should be 'auto', 'on' or 'off'"),
        ("io_engine", "uring", "input should be 'auto', 'io_uring' or 'threads'"),
        ("verify", "on", "input should be 'full', 'sampled', 'header' or 'off'"),
        ("verify", False, "input should be 'full', 'sampled', 'header' or 'off'"),
        ("verify_every", 0, "greater than or equal to 1"),
        ("durability", "sync", "input should be 'none' or 'fsync'"),
        ("quarantine_files_max", -1, "greater than or equal to 0"),
        ("load_deadline_s", 0, "greater than 0"),
        ("load_deadline_s", "soon", "input should be a valid number"),
        ("load_deadline_s", float("nan"), "input should be "),
        ("load_deadline_s", float("inf"), "less than or equal to 3600"),
        ("shutdown_timeout_s", -1, "greater than or equal to 0"),
        ("flush_timeout_s", 61, "less than or equal to 60"),
        ("mailbox_jobs", 0, "greater than or equal to 1"),
        ("failed_key_ttl_s", -0.5, "greater than or equal to 0"),
        ("lookup_ttl_s", "x", "input should be a valid number"),
        ("switch_interval_s", 2, "less than or equal to 1"),
    ],
)
def test_a_wrong_value_is_refused_by_name_value_and_what_is_accepted(
    option: str, value: object, accepted: str
) -> None:
    message = refusal({option: value})
    assert message.startswith(f"option '{option}' is {value!r}: ")
    assert accepted in message


def test_a_wrong_value_of_the_environment_names_the_variable() -> None:
    message = refusal({}, {"PYKVCACHE_IO_DEPTH": "eight"})
    assert message.startswith("option 'io_depth' (from PYKVCACHE_IO_DEPTH) is 'eight': ")


def test_the_users_own_option_is_blamed_even_if_the_environment_sets_it_too() -> None:
    message = refusal({"io_depth": -1}, {"PYKVCACHE_IO_DEPTH": "4"})
    assert message.startswith("option 'io_depth' is -1: ")


def test_all_wrong_values_are_named_at_once() -> None:
    message = refusal({"io_depth": 0, "direct_io": "maybe"})
    assert "option 'io_depth' is 0: " in message
    assert "; option 'direct_io' is 'maybe': " in message


def test_the_root_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.chdir(tmp_path)
    assert parse_config({"root": "~/kv"}, {}).root == Path("/home/someone/kv")
    assert parse_config({"root": "kv/../x"}, {}).root == tmp_path / "x"
    assert parse_config({"root": Path("/a")}, {}).root == Path("/a")


def test_sizes_are_bytes_units_or_shares() -> None:
    for value in ("500GiB", "80%", 1 << 40, "1000"):
        assert parse_config({"capacity": value}, NOTHING).capacity == str(value)
    assert parse_config({}, {"PYKVCACHE_CAPACITY": "2TB"}).capacity == "2TB"
    assert parse_config({"free_space_min": 0}, NOTHING).free_space_min == "0"


@pytest.mark.parametrize("value", ["much", "120%", -1, 0, "0%", True, 1.5, None, "5 iB"])
def test_a_bad_capacity_is_refused(value: object) -> None:
    message = refusal({"capacity": value})
    assert f"option 'capacity' is {value!r}: must be " in message
    assert "'500GiB'" in message


def test_an_empty_free_space_is_refused() -> None:
    assert "option 'free_space_min' is ''" in refusal({"free_space_min": ""})


def test_the_low_watermark_is_below_the_high_one() -> None:
    message = refusal({"capacity_low_watermark": 0.95})
    assert message == (
        "option 'capacity_low_watermark' is 0.95: must be below 'capacity_high_watermark', which "
        "is 0.95"
    )
    assert parse_config({"capacity_high_watermark": 1.0}, NOTHING).capacity_high_watermark == 1.0
