# SPDX-License-Identifier: Apache-2.0
"""The disk that the benchmark kills, and what it makes of its rounds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.dead_disk import DiskError, report_of, shut_down, small_ext4


def test_everything_on_it_fails_once_it_is_dead(tmp_path: Path) -> None:
    try:
        with small_ext4(tmp_path) as disk:
            file = disk / "file"
            file.write_bytes(bytes(4096))
            with file.open("rb", buffering=0) as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                shut_down(disk)
                with pytest.raises(OSError, match="Input/output error"):
                    opened.read(10)
            with pytest.raises(OSError, match="Input/output error"):
                (disk / "another").write_bytes(b"x")
    except DiskError as error:
        pytest.skip(f"no filesystem can be made here: {error}")
    assert not list(tmp_path.glob("*.img"))


def test_ratios_are_of_one_round_each() -> None:
    rounds = [
        {"offloading": (1.0, 4.0), "plain": (1.0, 2.0), "plain again": (1.0, 2.0)},
        {"offloading": (3.0, 3.0), "plain": (1.0, 3.0), "plain again": (1.5, 3.0)},
        {"offloading": (6.0, 6.0), "plain": (3.0, 6.0), "plain again": (2.0, 3.0)},
    ]
    report = report_of(rounds)
    assert (report["ttft_ratio"], report["ttft_range"]) == (2.0, [1.0, 3.0])
    assert report["ttft_quartiles"] == [1.5, 2.5]
    assert report["total_ratio"] == 1.0
    assert (report["control_ttft_ratio"], report["control_total_ratio"]) == (1.0, 1.0)
