# SPDX-License-Identifier: Apache-2.0
"""fio as the yardstick: the same files, depth, alignment and kind of memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


class FioMissingError(RuntimeError):
    """fio is not installed."""


def require_fio() -> str:
    """The program's path.

    Raises:
        FioMissingError: it is not installed.
    """
    path = shutil.which("fio")
    if path is None:
        raise FioMissingError("fio is not installed: install the package 'fio' of your system")
    return path


def fio_gb_per_s(
    directory: Path,
    paths: Sequence[Path],
    *,
    write: bool,
    file_bytes: int,
    depth: int,
    seconds: float,
    direct: bool,
) -> float:
    """Throughput of whole-file transfers through io_uring.

    A read repeats for ``seconds``, after as long a time that does not count: fio touches its
    memory first while it reads. A write creates the files once, as a store does. The memory
    is asked to be huge pages through glibc, since fio itself leaves that to the system.

    Args:
        directory: made, and left with what was written.
        paths: the files to read; for a write only their directory and number matter.

    Returns:
        GB/s (10^9 bytes), of fio's own run time.
    """
    directory.mkdir()
    names = [str(number) for number in range(len(paths))]
    if not write:  # hard links: fio takes few characters of file names
        for name, path in zip(names, paths, strict=True):
            os.link(path, directory / name)
    return _run(directory, names, write, file_bytes, depth, seconds, direct)


def _run(
    directory: Path,
    names: Sequence[str],
    write: bool,
    file_bytes: int,
    depth: int,
    seconds: float,
    direct: bool,
) -> float:
    command = [
        require_fio(),
        "--name=yardstick",
        f"--filename={':'.join(names)}",
        f"--rw={'write' if write else 'read'}",
        f"--bs={file_bytes}",
        f"--size={file_bytes * len(names)}",
        f"--filesize={file_bytes}",
        "--ioengine=io_uring",
        f"--iodepth={depth}",
        f"--direct={int(direct)}",
        "--scramble_buffers=0",
        "--fallocate=none",
        "--file_service_type=sequential",
        f"--nrfiles={len(names)}",
        f"--openfiles={len(names)}",
        "--invalidate=0",
        "--output-format=json",
    ]
    milliseconds = int(seconds * 1000)
    command += (
        ["--create_on_open=1"]
        if write
        else ["--time_based", f"--runtime={milliseconds}ms", f"--ramp_time={milliseconds}ms"]
    )
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, cwd=directory
    )
    if done.returncode:
        raise RuntimeError(f"fio failed: {done.stderr or done.stdout}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write" if write else "read"]
    if job["total_ios"] == 0 or job["runtime"] == 0:
        raise RuntimeError(f"fio transferred nothing: {done.stdout}")
    return float(job["bw_bytes"] / 1e9)
