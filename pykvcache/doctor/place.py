# SPDX-License-Identifier: Apache-2.0
"""The root and its filesystem: chunks are really stored in it, one page long, and removed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from pykvcache.capacity.evictor import space_of
from pykvcache.capacity.keeper import budget_of
from pykvcache.capacity.record import Record
from pykvcache.config import Config
from pykvcache.doctor.findings import Finding, fail, ok, warn
from pykvcache.errors import ConfigError
from pykvcache.machine import mount_of
from pykvcache.reactor.probe import choose_direct, choose_engine
from pykvcache.sizes import format_bytes

NOT_ON_DISK = {"tmpfs": "memory", "ramfs": "memory"}
LAYERED = ("overlay", "aufs", "fuse-overlayfs")
"""What containers write into when no volume is mounted."""


def check_place(config: Config, mounts: Path = Path("/proc/self/mountinfo")) -> Iterator[Finding]:
    """Every finding about the root. Nothing is left there.

    Args:
        config: the options.
        mounts: the kernel's list of mounts.
    """
    root = config.root
    existing = next(path for path in (root, *root.parents) if path.is_dir())
    if existing == root:
        yield ok("root", str(root))
    else:
        yield ok("root", f"{root} is not there yet; a server makes it in {existing}")
    mount = mount_of(existing, mounts)
    yield filesystem_finding(mount.filesystem if mount else None)
    yield from _try_to_store(config, existing)
    yield _lock_finding(existing)
    yield _space_finding(config, existing)


def filesystem_finding(kind: str | None) -> Finding:
    """Its type, as mounted."""
    if kind in NOT_ON_DISK:
        return warn(
            "filesystem",
            f"{kind}, which is {NOT_ON_DISK[kind]}",
            "choose a root on a drive or a shared filesystem, or leave out what a DRAM tier "
            "(--kv-offloading-size) does better",
        )
    if kind in LAYERED:
        return warn(
            "filesystem",
            f"{kind}, the writable layer of a container",
            "mount a volume at the root: what is stored goes with the container",
        )
    return ok("filesystem", kind or "unknown")


def _try_to_store(config: Config, existing: Path) -> Iterator[Finding]:
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing) as directory:
            yield from _engine_findings(config, Path(directory))
    except OSError as error:
        yield fail(
            "storing",
            f"'{existing}' cannot be written: {error.strerror}",
            "choose a root that this user can write, or can make",
        )


def _engine_findings(config: Config, directory: Path) -> Iterator[Finding]:
    try:
        direct = choose_direct(config.direct_io, directory)
    except ConfigError as error:
        yield fail("storing", str(error), "see the message")
        return
    yield ok("storing", "a page was stored, published and read back")
    if direct.fallback:
        yield warn("direct I/O", direct.why, "choose a root on a filesystem with O_DIRECT")
    else:
        yield ok("direct I/O", direct.why)
    try:
        engine = choose_engine(config.io_engine, directory, direct.direct)
    except ConfigError as error:
        yield fail("io_uring", str(error), "see the message")
        return
    if engine.fallback:
        yield warn(
            "io_uring",
            engine.why,
            "allow io_uring_setup and io_uring_enter: in Docker `--security-opt seccomp=FILE` with "
            "this project's profile, else `sysctl kernel.io_uring_disabled=0`",
        )
    else:
        yield ok("io_uring", engine.why)


def _lock_finding(existing: Path) -> Finding:
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing) as directory:
            record = Record(Path(directory))
            with record.try_lock() as held, record.try_lock() as twice:
                excluded = held and not twice
    except OSError as error:
        return warn("locks", f"cannot be tried: {error.strerror}", "see the check 'storing'")
    if excluded:
        return ok("locks", "one process at a time evicts")
    return warn(
        "locks",
        "the filesystem has no flock(2)",
        "let one server of those that share the root evict, with eviction_policy 'none' at the "
        "others",
    )


def _space_finding(config: Config, existing: Path) -> Finding:
    space = space_of(existing)
    usage = Record(config.root).read()
    used = usage.size if usage else 0
    limit = budget_of(config).limit(used, space)
    found = (
        f"{format_bytes(space.free)} of {format_bytes(space.total)} free; the root may hold "
        f"{format_bytes(limit)}" + (f", of which {format_bytes(used)} are used" if usage else "")
    )
    if limit > 0:
        return ok("space", found)
    return fail(
        "space",
        found,
        f"nothing is stored: free some space, or lower free_space_min ({config.free_space_min})",
    )
