# SPDX-License-Identifier: Apache-2.0
"""What tells one machine from another, as far as speed depends on it."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

RAM_STEP_GIB = 4
"""RAM is told in steps of so much: what the kernel keeps for itself differs from start to start."""


class Machine(BaseModel):
    """Of a server: processor, GPUs, and what the root's files lie on.

    ``cpus`` counts the whole machine's, since vLLM binds its threads to some of them; ``gpus``
    are names, each once; ``storage`` is the mount's device or export.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu: str
    cpus: int
    ram_gib: int
    gpus: tuple[str, ...]
    filesystem: str
    storage: str


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of proc_pid_mountinfo(5): the filesystem's type, and what is mounted."""

    filesystem: str
    source: str


def machine_of(root: Path, proc: Path = Path("/proc")) -> Machine:
    """The facts, for files below ``root``, which need not exist yet.

    Args:
        root: of the KV files.
        proc: where the kernel's files are.
    """
    existing = next(path for path in (root, *root.absolute().parents) if path.is_dir())
    mount = mount_of(existing, proc / "self/mountinfo")
    kib = re.search(r"^MemTotal:\s*(\d+)", _text(proc / "meminfo"), re.MULTILINE)
    gib = int(kib[1]) / (1 << 20) if kib else 0.0
    return Machine(
        cpu=_cpu(_text(proc / "cpuinfo")),
        cpus=os.cpu_count() or 1,
        ram_gib=max(1, round(gib / RAM_STEP_GIB)) * RAM_STEP_GIB,
        gpus=_gpus(proc / "driver/nvidia/gpus"),
        filesystem=mount.filesystem if mount else "unknown",
        storage=mount.source if mount else "unknown",
    )


def mount_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """The mount with the path's device, the last one if there are several; None if unknown."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = None
    for line in _text(mounts).splitlines():
        place, separator, what = line.partition(" - ")
        if separator and place.split()[2] == wanted:
            filesystem, source = what.split()[:2]
            found = Mount(filesystem, source)
    return found


def _cpu(cpuinfo: str) -> str:
    """The model's name; without one, as on aarch64, implementer and part."""
    for pattern in (r"^model name\s*:\s*(.+)$", r"^CPU part\s*:\s*(.+)$"):
        found = re.search(pattern, cpuinfo, re.MULTILINE)
        if found:
            return f"{platform.machine()} {found[1].strip()}"
    return platform.machine()


def _gpus(directory: Path) -> tuple[str, ...]:
    """From the driver's own files: asking CUDA would make a context on the device."""
    texts = [_text(path) for path in directory.glob("*/information")]
    found = [re.search(r"^Model:\s*(.+)$", text, re.MULTILINE) for text in texts]
    return tuple(sorted({match[1].strip() for match in found if match}))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
