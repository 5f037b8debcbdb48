# SPDX-License-Identifier: Apache-2.0
"""The kernel's throttle as files, in a directory that stands for its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import throttle
from benchmarks.throttle import ReadThrottle, ThrottleError, drive_of


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(throttle, "drive_of", lambda directory: "8:0")
    return "8:0"


@pytest.fixture
def version_1(tmp_path: Path) -> Path:
    (tmp_path / "blkio").mkdir()
    (tmp_path / "blkio" / "cgroup.procs").touch()
    return tmp_path


@pytest.fixture
def version_2(tmp_path: Path) -> Path:
    (tmp_path / "cgroup.controllers").write_text("io memory")
    return tmp_path


def test_version_1_takes_bytes_per_second_and_0_for_no_limit(version_1: Path, drive: str) -> None:
    slow = ReadThrottle(version_1, name="slow", cgroups=version_1)
    rule = version_1 / "blkio" / "slow" / "blkio.throttle.read_bps_device"
    assert rule.read_text() == f"{drive} 0"
    slow.limit(200_000_000)
    assert rule.read_text() == f"{drive} 200000000"


def test_version_2_takes_rbps_and_max_for_no_limit(version_2: Path, drive: str) -> None:
    slow = ReadThrottle(version_2, name="slow", cgroups=version_2)
    rule = version_2 / "slow" / "io.max"
    assert rule.read_text() == f"{drive} rbps=max"
    slow.limit(100)
    assert rule.read_text() == f"{drive} rbps=100"
    assert (version_2 / "cgroup.subtree_control").read_text() == "+io"


def test_processes_move_in(version_1: Path, drive: str) -> None:
    slow = ReadThrottle(version_1, name="slow", cgroups=version_1)
    slow.add([17])
    assert (version_1 / "blkio" / "slow" / "cgroup.procs").read_text() == "17"


def test_no_controller_is_said(tmp_path: Path, drive: str) -> None:
    with pytest.raises(ThrottleError, match="no block I/O controller"):
        ReadThrottle(tmp_path, name="slow", cgroups=tmp_path)


def test_a_refusal_of_the_kernel_is_said_and_leaves_nothing(version_2: Path, drive: str) -> None:
    (version_2 / "slow" / "io.max").mkdir(parents=True)  # cannot be written
    with pytest.raises(ThrottleError, match="cannot be set"):
        ReadThrottle(version_2, name="slow", cgroups=version_2)


def test_a_partition_is_throttled_by_its_drive(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    whole = tmp_path / "devices" / "sda"
    (whole / "sda1").mkdir(parents=True)
    (whole / "dev").write_text("8:0\n")
    (whole / "sda1" / "partition").write_text("1\n")
    blocks = tmp_path / "block"
    blocks.mkdir()
    (blocks / number).symlink_to(whole / "sda1")
    assert drive_of(tmp_path, blocks) == "8:0"
    (whole / "sda1" / "partition").unlink()
    assert drive_of(tmp_path, blocks) == number


def test_a_filesystem_without_a_drive_is_said(tmp_path: Path) -> None:
    with pytest.raises(ThrottleError, match="not on a block device"):
        drive_of(tmp_path, tmp_path / "none")
