# SPDX-License-Identifier: Apache-2.0
"""A slow drive: reads of chosen processes held to a rate by the kernel.

The block I/O controller of cgroup v1 (kernel documentation, admin-guide/cgroup-v1/blkio-controller)
and of v2 (admin-guide/cgroup-v2, ``io.max``) throttle direct I/O as well, whoever issues it for the
process. Both need root and the drive that holds the directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
BLOCK_DEVICES = Path("/sys/dev/block")


class ThrottleError(RuntimeError):
    """The kernel cannot throttle here; the message says why."""


class ReadThrottle:
    """A control group of its own whose members' reads from one drive are limited."""

    def __init__(self, directory: Path, *, name: str, cgroups: Path = CGROUPS) -> None:
        """Args:
        directory: on the drive to throttle.
        name: of the control group.
        cgroups: where the hierarchy is mounted.

        Raises:
            ThrottleError: no root, no controller, or no drive below the directory.
        """
        self._device = drive_of(directory)
        version_1 = (cgroups / "blkio" / "cgroup.procs").exists()
        if not version_1 and not (cgroups / "cgroup.controllers").exists():
            raise ThrottleError(f"no block I/O controller is mounted under {cgroups}")
        self._outside = cgroups / "blkio" if version_1 else cgroups
        self._group = self._outside / name
        self._limit = "blkio.throttle.read_bps_device" if version_1 else "io.max"
        self._line = "{device} {rate}" if version_1 else "{device} rbps={rate}"
        self._no_limit = "0" if version_1 else "max"
        try:
            if not version_1:
                (cgroups / "cgroup.subtree_control").write_text("+io")
            self._group.mkdir(exist_ok=True)
            self.limit(0)
        except OSError as error:
            self.close()
            raise ThrottleError(f"the kernel's throttle cannot be set: {error}") from error

    def limit(self, bytes_per_s: int) -> None:
        """Hold reads to this rate from now on; 0: no limit."""
        rate = str(bytes_per_s) if bytes_per_s else self._no_limit
        (self._group / self._limit).write_text(self._line.format(device=self._device, rate=rate))

    def add(self, process_ids: Iterable[int]) -> None:
        """Move processes into the group; their children are born there."""
        for process_id in process_ids:
            with contextlib.suppress(ProcessLookupError):
                (self._group / "cgroup.procs").write_text(str(process_id))

    def close(self) -> None:
        """Move out who is left and remove the group. Idempotent."""
        if not self._group.is_dir():
            return
        with contextlib.suppress(OSError):
            for process_id in (self._group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self._outside / "cgroup.procs").write_text(process_id)
        with contextlib.suppress(OSError):
            self._group.rmdir()


def drive_of(directory: Path, block_devices: Path = BLOCK_DEVICES) -> str:
    """``MAJOR:MINOR`` of the whole drive that holds a directory; throttles take no partition.

    Raises:
        ThrottleError: the filesystem lies on no block device of its own (tmpfs, btrfs, a network).
    """
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    entry = block_devices / number
    if not entry.exists():
        raise ThrottleError(f"{directory} is not on a block device")
    if (entry / "partition").exists():
        return (entry.resolve().parent / "dev").read_text().strip()
    return number
