# SPDX-License-Identifier: Apache-2.0
"""The benchmark of names, on a root of a few files."""

from __future__ import annotations

from pathlib import Path

from benchmarks import metadata


def test_a_small_root_is_measured(tmp_path: Path) -> None:
    found = metadata.measure(tmp_path, 300, 40)
    assert found["files"] == 300
    for name in ("look_ups", "look_ups_of_misses", "bare_stats", "publications"):
        rates = found[f"{name}_per_s"]
        assert 0 < rates["range"][0] <= rates["median"] <= rates["range"][1]
    round_ = found["eviction_round"]
    assert (round_["files"], round_["victims"]) == (300, 30)
    assert found["first_look_up_s"] > 0
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".kv", ".tmp")]
    assert len(files) == 300
