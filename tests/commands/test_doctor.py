# SPDX-License-Identifier: Apache-2.0
"""``pykvcache doctor``: what it says of machines, and of this one."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pykvcache.config import GIB, Config
from pykvcache.doctor import machine, software
from pykvcache.doctor.findings import Finding, Verdict
from pykvcache.doctor.place import check_place, filesystem_finding
from tests.installed import vllm_version

NO_LIMIT = resource.RLIM_INFINITY
PATCHED = "pykvcache" in vllm_version()


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pykvcache", "doctor", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def by_check(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in json.loads(done.stdout)}


@pytest.mark.parametrize(
    ("finding", "verdict", "words"),
    [
        (machine.platform_finding("linux", "aarch64", (3, 13)), "ok", "aarch64, Python 3.13"),
        (machine.platform_finding("linux", "riscv64", (3, 13)), "fail", "x86-64 or aarch64"),
        (machine.platform_finding("darwin", "aarch64", (3, 13)), "fail", "Linux"),
        (machine.platform_finding("linux", "x86_64", (3, 14)), "warn", "3.11 to 3.13"),
        (machine.kernel_finding("6.18.44-generic"), "ok", "6.18.44"),
        (machine.kernel_finding("5.10.0"), "warn", "5.14"),
        (machine.kernel_finding("of its own"), "ok", "of its own"),
        (machine.memlock_finding(NO_LIMIT, True), "ok", "unlimited"),
        (machine.memlock_finding(8 << 20, False), "ok", "8.0 MiB"),
        (machine.memlock_finding(8 << 20, True), "warn", "ulimit -l"),
        (machine.memlock_finding(3 * GIB, True), "ok", "3.0 GiB"),
        (machine.descriptors_finding(256), "warn", "ulimit -n"),
        (machine.descriptors_finding(4096), "ok", "4096"),
        (machine.huge_pages_finding("always [madvise] never\n"), "ok", "'madvise'"),
        (machine.huge_pages_finding("always madvise [never]\n"), "warn", "'never'"),
        (machine.huge_pages_finding(None), "warn", "'none'"),
        (machine.memory_finding("3000000 kB"), "warn", "--kv-offloading-size"),
        (machine.memory_finding("30000000 kB"), "ok", "28.6 GiB"),
        (machine.seccomp_finding("2"), "ok", "filtered"),
        (filesystem_finding("overlay"), "warn", "mount a volume"),
        (filesystem_finding("tmpfs"), "warn", "memory"),
        (filesystem_finding("xfs"), "ok", "xfs"),
    ],
)
def test_what_is_said(finding: Finding, verdict: str, words: str) -> None:
    assert finding.verdict == verdict
    assert words in f"{finding.found} {finding.advice}"
    assert bool(finding.advice) == (finding.verdict is not Verdict.OK)


def test_gpus_are_counted(tmp_path: Path) -> None:
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\n"
    (tmp_path / "version").write_text(text)
    assert machine.gpu_finding(tmp_path, 2).found == "1 NVIDIA GPUs, driver 570.86.15"
    assert "CPU build" in machine.gpu_finding(tmp_path / "none", 2).found


@pytest.mark.parametrize(
    ("version", "missing", "words"),
    [
        ("0.33.0", "", "has no pykvcache backend"),
        ("0.33.0+pykvcache.1", software.OVERLAY, "is missing"),
        ("0.33.0+pykvcache.1", software.HOOK, "is not patched"),
        ("0.32.0+cpu.pykvcache.2", "", "with its patches"),
    ],
)
def test_a_vllm_is_ours_and_whole(version: str, missing: str, words: str, tmp_path: Path) -> None:
    for name in {software.OVERLAY, software.HOOK} - {missing}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('register_spec("PyKVCacheSpec")')
    assert words in software.vllm_finding(version, tmp_path).found


def test_a_root_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    done = run("--root", tmp_path, "--json")
    found = by_check(done)
    assert found["storing"]["verdict"] == "ok"
    assert found["locks"]["verdict"] == "ok"
    assert list(tmp_path.iterdir()) == []
    assert done.returncode == (0 if PATCHED else 1)
    assert (found["vllm"]["verdict"] == "ok") == PATCHED


def test_a_root_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "kv"
    done = run("--root", root, "--json")
    assert "not there yet" in by_check(done)["root"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_a_failure_with_advice(tmp_path: Path) -> None:
    done = run("--root", tmp_path, PYKVCACHE_FREE_SPACE_MIN="100%", COLUMNS="200")
    assert done.returncode == 1
    assert "lower free_space_min (100%)" in done.stdout
    assert "1 failed" in done.stdout or not PATCHED


def test_a_directory_that_takes_no_files_is_a_failure(tmp_path: Path) -> None:
    """One that was removed behind the back of the process stands for any that refuses."""
    findings = {each.check: each for each in check_place(Config(root=Path("/proc/self/task")))}
    assert findings["storing"].verdict is Verdict.FAIL
    assert "cannot be written" in findings["storing"].found
    assert "this user can write" in findings["storing"].advice


def test_bad_options_are_named(tmp_path: Path) -> None:
    done = run("--root", tmp_path, PYKVCACHE_CAPACITY="lots")
    assert done.returncode == 1
    assert "PYKVCACHE_CAPACITY" in done.stderr and "Traceback" not in done.stderr
