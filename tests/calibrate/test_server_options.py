# SPDX-License-Identifier: Apache-2.0
"""The user's options for `vllm serve`, and ours over them."""

from __future__ import annotations

import json

import pytest

from pykvcache.calibrate.server_options import parse_options
from pykvcache.errors import ConfigError

CONFIG = {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"root": "a"}}


@pytest.mark.parametrize(
    "given",
    [
        ["--kv-transfer-config", json.dumps(CONFIG)],
        [f"--kv-transfer-config={json.dumps(CONFIG)}"],
        [f"--kv_transfer_config={json.dumps(CONFIG)}", "--kv-offloading-backend", "pykvcache"],
    ],
)
def test_options_of_the_backend_are_laid_over_the_users(given: list[str]) -> None:
    options = parse_options(["--dtype", "float32", "--", *given, "-tp", "2"])
    assert options.rest == ("--dtype", "float32", "-tp", "2")
    assert options.backend == {"root": "a"}
    *rest, backend, transfer = options.arguments(root="b", dram_policy="none")
    assert tuple(rest) == options.rest
    assert backend == "--kv-offloading-backend=pykvcache"
    name, _, text = transfer.partition("=")
    assert name == "--kv-transfer-config"
    expected = {"root": "b", "dram_policy": "none"}
    assert json.loads(text) == {**CONFIG, "kv_connector_extra_config": expected}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--kv-offloading-backend=native"], "is 'native': must be pykvcache"),
        (["--kv-transfer-config"], "is '': must be a JSON object"),
        (["--kv-transfer-config", "[1]"], r"is '\[1\]': must be a JSON object"),
        (['--kv-transfer-config={"kv_connector_extra_config": 1}'], "must be a JSON object"),
        (["--kv-transfer-config.kv_role", "x"], "give --kv-transfer-config as one JSON object"),
    ],
)
def test_what_cannot_be_combined_is_refused(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_options(given)
