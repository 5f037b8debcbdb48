# SPDX-License-Identifier: Apache-2.0
"""The script that adds io_uring to a seccomp profile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docker" / "seccomp.py"
PROFILE = {
    "defaultAction": "SCMP_ACT_ERRNO",
    "archMap": [{"architecture": "SCMP_ARCH_X86_64"}],
    "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW"}],
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_three_calls_are_added_and_nothing_else_changes(tmp_path: Path) -> None:
    source = tmp_path / "default.json"
    source.write_text(json.dumps(PROFILE))
    done = run(str(source))
    assert (done.returncode, done.stderr) == (0, "")
    made = json.loads(done.stdout)
    assert made["syscalls"].pop() == {
        "names": ["io_uring_enter", "io_uring_register", "io_uring_setup"],
        "action": "SCMP_ACT_ALLOW",
    }
    assert made == PROFILE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "it holds a list, a seccomp profile is an object"),
        ('{"defaultAction": "SCMP_ACT_ERRNO"}', "'syscalls' is None: a list"),
        (
            '{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}',
            "'defaultAction' is 'SCMP_ACT_ALLOW'",
        ),
        ("Not Found", "Expecting value"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    source = tmp_path / "default.json"
    source.write_text(text)
    done = run(str(source))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {source}: ")
    assert reason in done.stderr


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    done = run(str(tmp_path / "none.json"))
    assert done.returncode == 1
    assert "none.json" in done.stderr


def test_usage() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")
