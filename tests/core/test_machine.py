# SPDX-License-Identifier: Apache-2.0
"""What tells one machine from another, by the kernel's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pykvcache.machine import Mount, machine_of, mount_of


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU\n\nprocessor : 1\n")
    (proc / "meminfo").write_text("MemTotal:       24681000 kB\nMemFree: 1 kB\n")
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    (proc / "self/mountinfo").write_text(
        f"20 1 0:99 / /other rw - tmpfs none rw\n21 1 {number} / / rw shared:1 - xfs /dev/x rw\n"
    )
    for number, name in enumerate(("NVIDIA H100", "NVIDIA H100")):
        directory = proc / "driver/nvidia/gpus" / str(number)
        directory.mkdir(parents=True)
        (directory / "information").write_text(f"Model: \t\t {name}\nIRQ: 1\n")
    return proc


def test_the_facts_are_the_kernels(proc: Path, tmp_path: Path) -> None:
    machine = machine_of(tmp_path / "not" / "there", proc)
    assert machine.cpu.endswith(" Some CPU")
    assert machine.cpus == os.cpu_count()
    assert machine.ram_gib == 24
    assert machine.gpus == ("NVIDIA H100",)
    assert (machine.filesystem, machine.storage) == ("xfs", "/dev/x")


def test_what_the_kernel_does_not_tell_is_unknown(tmp_path: Path) -> None:
    machine = machine_of(tmp_path, tmp_path / "no-proc")
    assert machine.cpu and machine.gpus == ()
    assert (machine.filesystem, machine.storage) == ("unknown", "unknown")


def test_this_machine_stays_the_same(tmp_path: Path) -> None:
    assert machine_of(tmp_path) == machine_of(tmp_path / "below")


def test_a_mount_is_found_by_its_device(proc: Path, tmp_path: Path) -> None:
    assert mount_of(tmp_path, proc / "self/mountinfo") == Mount("xfs", "/dev/x")
    assert mount_of(tmp_path, tmp_path / "nothing") is None
