# SPDX-License-Identifier: Apache-2.0
"""The kernel, its limits for this process, its memory, and the GPU's driver."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from pykvcache.config import GIB
from pykvcache.doctor.findings import Finding, fail, ok, warn
from pykvcache.sizes import format_bytes

POOL_BYTES = 2 * GIB
"""The pool where ``--kv-offloading-size`` is not given."""

MACHINES = ("x86_64", "aarch64")
PYTHONS = ((3, 11), (3, 13))
POPULATE_KERNEL = (5, 14)
"""Has MADV_POPULATE_WRITE (madvise(2))."""
UNCOUNTED_RINGS_KERNEL = (5, 12)
"""Does not count io_uring's rings against RLIMIT_MEMLOCK any more (io_uring_setup(2))."""


def check_machine(proc: Path = Path("/proc"), system: Path = Path("/sys")) -> Iterator[Finding]:
    """Every finding about the machine.

    Args:
        proc, system: where the kernel's files are.
    """
    yield platform_finding(sys.platform, platform.machine(), sys.version_info[:2])
    release = platform.release()
    yield kernel_finding(release)
    yield seccomp_finding(_line(proc / "self/status", "Seccomp"))
    is_locking = (proc / "driver/nvidia").exists() or _is_before(release, UNCOUNTED_RINGS_KERNEL)
    yield memlock_finding(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], is_locking)
    yield descriptors_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield huge_pages_finding(_read(system / "kernel/mm/transparent_hugepage/enabled"))
    yield memory_finding(_line(proc / "meminfo", "MemAvailable"))
    yield gpu_finding(proc / "driver/nvidia", len(os.sched_getaffinity(0)))


def platform_finding(system: str, machine: str, python: tuple[int, ...]) -> Finding:
    """What wheels are made for."""
    found = f"{system} {machine}, Python {python[0]}.{python[1]}"
    if system != "linux" or machine not in MACHINES:
        return fail("platform", found, "use Linux on x86-64 or aarch64")
    if not PYTHONS[0] <= python <= PYTHONS[1]:
        return warn("platform", found, "use Python 3.11 to 3.13, which are tested")
    return ok("platform", found)


def kernel_finding(release: str) -> Finding:
    """Its release, as uname(2) tells it."""
    if not _is_before(release, POPULATE_KERNEL):
        return ok("kernel", release)
    return warn(
        "kernel",
        f"{release} has no MADV_POPULATE_WRITE",
        "use Linux 5.14 or later: the pool's memory is populated slowly before",
    )


def seccomp_finding(mode: str | None) -> Finding:
    """Whether system calls are filtered; whether those of io_uring are, its own check tells."""
    filtered = mode == "2"
    return ok("seccomp", "system calls are filtered" if filtered else "no filter")


def memlock_finding(limit: int, is_locking: bool) -> Finding:
    """RLIMIT_MEMLOCK, in bytes or RLIM_INFINITY.

    Args:
        limit: the soft one.
        is_locking: whether a GPU's driver or io_uring's rings may count against it.
    """
    if limit == resource.RLIM_INFINITY:
        return ok("memlock", "unlimited")
    found = f"at most {format_bytes(limit)} may be locked"
    if not is_locking or limit >= POOL_BYTES:
        return ok("memlock", found)
    return warn(
        "memlock",
        found,
        "raise it with `ulimit -l unlimited`, in Docker `--ulimit memlock=-1`",
    )


def descriptors_finding(limit: int) -> Finding:
    """RLIMIT_NOFILE."""
    found = f"at most {limit} open files"
    if limit >= 1024:
        return ok("open files", found)
    return warn("open files", found, "raise it to 1024 or more: `ulimit -n 65536`")


def huge_pages_finding(enabled: str | None) -> Finding:
    """Transparent huge pages, as ``/sys/kernel/mm/transparent_hugepage/enabled`` tells them."""
    chosen = re.search(r"\[(\w+)\]", enabled or "")
    mode = chosen[1] if chosen else "none"
    if mode in ("always", "madvise"):
        return ok("huge pages", f"transparent huge pages are '{mode}'")
    return warn(
        "huge pages",
        f"transparent huge pages are '{mode}'",
        "write 'madvise' into /sys/kernel/mm/transparent_hugepage/enabled: direct I/O into small "
        "pages is slower",
    )


def memory_finding(available: str | None) -> Finding:
    """MemAvailable of proc_meminfo(5), in kB."""
    kib = re.match(r"\d+", available or "")
    if kib is None:
        return ok("memory", "unknown")
    size = int(kib[0]) * 1024
    found = f"{format_bytes(size)} available, the pool takes {format_bytes(POOL_BYTES)} by default"
    if size > 2 * POOL_BYTES:
        return ok("memory", found)
    return warn("memory", found, "choose a smaller pool with --kv-offloading-size, in GiB")


def gpu_finding(driver: Path, cpus: int) -> Finding:
    """The NVIDIA driver's directory in /proc, and how many CPUs this process may use."""
    version = _read(driver / "version")
    if version is None:
        return ok("gpu", f"no NVIDIA driver, {cpus} CPUs: vLLM's CPU build serves here")
    number = re.search(r"Kernel Module.*?(\d+\.\d+\S*)", version)
    devices = len(list((driver / "gpus").glob("*")))
    return ok("gpu", f"{devices} NVIDIA GPUs, driver {number[1] if number else 'unknown'}")


def _is_before(release: str, kernel: tuple[int, int]) -> bool:
    """Whether a release, if it is one, is older."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < kernel


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _line(path: Path, name: str) -> str | None:
    """The value of a line ``name: value``."""
    found = re.search(rf"^{name}:\s*(.*)$", _read(path) or "", re.MULTILINE)
    return found[1].strip() if found else None
