# SPDX-License-Identifier: Apache-2.0
"""Which engine and which kind of I/O work here: tried at start, on the directory itself.

What a kernel or filesystem claims says little: sandboxes answer io_uring with EPERM or ENOSYS
(Docker's default profile does since 25.0), and some filesystems accept O_DIRECT in open(2)
and refuse the first transfer. So a page is written, published, read back and removed, first
by plain system calls, then through the engine.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import select
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pykvcache.access import PRIVATE, Access
from pykvcache.errors import ConfigError
from pykvcache.layout import PAGE, TEMPORARY_SUFFIX
from pykvcache.reactor.calls import create_flags, read_flags
from pykvcache.reactor.engine import IoEngine
from pykvcache.reactor.rows import Rows
from pykvcache.reactor.threads import ThreadsEngine
from pykvcache.reactor.uring import UringEngine
from pykvcache.transfer.operations import Action, FileOperation

EngineName = Literal["io_uring", "threads"]

_PROBE_TIMEOUT_MS = 10_000
"""A page takes milliseconds; a ring that is not heard of for this long does not work."""

_DISABLED_SYSCTL = Path("/proc/sys/kernel/io_uring_disabled")

_abandoned: list[object] = []
"""Engines whose probe timed out: the kernel may yet write to their buffers."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine, and why.

    Attributes:
        name: an engine's name.
        why: one line for people.
        fallback: whether another one would be better, so that ``why`` is worth a warning.
    """

    name: EngineName
    why: str
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class DirectChoice:
    """Whether files are opened with O_DIRECT; ``why`` and ``fallback`` as above."""

    direct: bool
    why: str
    fallback: bool = False


def choose_direct(requested: Literal["auto", "on", "off"], directory: Path) -> DirectChoice:
    """Decide about O_DIRECT, and check that chunks can be stored in the directory at all.

    Args:
        requested: option ``direct_io``.
        directory: an existing directory on the filesystem of the KV files.

    Raises:
        ConfigError: the directory cannot be written, has no room for a page or no hard
            links (option ``root``), or O_DIRECT is demanded and refused (option ``direct_io``).
    """
    error = _try_page(directory, direct=False)
    if error is not None:
        raise _refuse_root(directory, error)
    if requested == "off":
        return DirectChoice(False, "direct_io is 'off'")
    error = _try_page(directory, direct=True)
    if error is None:
        return DirectChoice(True, "the filesystem takes O_DIRECT")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise _refuse_root(directory, error)
    refusal = f"the filesystem of {directory} refuses O_DIRECT: {_named(error.errno or 0)}"
    if requested == "on":
        raise ConfigError(
            f"option 'direct_io' is 'on', but {refusal}; 'auto' or 'off' would do, "
            "or a root on another filesystem"
        )
    return DirectChoice(
        False, f"{refusal}: using buffered I/O, which fills the page cache too", fallback=True
    )


def choose_engine(
    requested: Literal["auto", "io_uring", "threads"], directory: Path, direct: bool
) -> EngineChoice:
    """Decide between the engines.

    Args:
        requested: option ``io_engine``.
        directory: a directory that :func:`choose_direct` accepted.
        direct: what it chose.

    Raises:
        ConfigError: io_uring is demanded and does not work here.
    """
    if requested == "threads":
        return EngineChoice("threads", "io_engine is 'threads'")
    obstacle = _try_uring(directory, direct)
    if obstacle is None:
        return EngineChoice("io_uring", "io_uring works here")
    if requested == "io_uring":
        raise ConfigError(
            f"option 'io_engine' is 'io_uring', but {obstacle}; 'auto' or 'threads' would do, "
            "or allowing the system calls io_uring_setup and io_uring_enter, for containers in the "
            "seccomp profile"
        )
    return EngineChoice("threads", f"{obstacle}: using threads", fallback=True)


def make_engine(
    choice: EngineChoice,
    buffers: Sequence[memoryview],
    direct: bool,
    io_depth: int,
    rows: Rows | None = None,
    access: Access = PRIVATE,
) -> IoEngine:
    """Build the chosen engine; call it on the thread that uses it.

    Args:
        choice: from :func:`choose_engine`.
        buffers: each slot's writable memory, page-aligned, by slot.
        direct: whether files are opened with O_DIRECT.
        io_depth: reads and writes in flight.
        rows: where payloads lie that are not in slots.
        access: modes of what is made.
    """
    if choice.name == "io_uring":
        return UringEngine(buffers, direct, rows=rows, access=access)
    return ThreadsEngine(buffers, direct, workers=io_depth, rows=rows, access=access)


def _try_page(directory: Path, direct: bool) -> OSError | None:
    """Write, publish and read back a page with plain system calls; the error, or None."""
    page = mmap.mmap(-1, PAGE)
    with _probe_names(directory) as (temporary, final):
        try:
            with _opened(temporary, create_flags(direct)) as descriptor:
                _check_whole(os.pwritev(descriptor, [page], 0), errno.ENOSPC)
                os.fsync(descriptor)  # where a server or a delayed allocation says no
            os.link(temporary, final, follow_symlinks=False)
            with _opened(final, read_flags(direct)) as descriptor:
                _check_whole(os.preadv(descriptor, [page], 0), errno.EIO)
        except OSError as error:
            return error
    return None


def _check_whole(transferred: int, otherwise: int) -> None:
    if transferred != PAGE:
        raise OSError(otherwise, os.strerror(otherwise))


def _try_uring(directory: Path, direct: bool) -> str | None:
    """Do what a store and a load do through the engine; why it does not work, or None."""
    buffer = memoryview(mmap.mmap(-1, PAGE))
    try:
        engine = UringEngine([buffer], direct, entries=4)
    except OSError as error:
        return _uring_refused(error)
    with _probe_names(directory) as (temporary, final):
        try:
            obstacle = _round_trip(engine, temporary, final)
        except OSError as error:
            obstacle = _uring_refused(error)
    if engine.in_flight:
        _abandoned.append(engine)
    else:
        engine.close()
    return obstacle


def _round_trip(engine: IoEngine, temporary: str, final: str) -> str | None:
    """The operations of a store and a load, one by one; what fails first, or None."""
    descriptor = -1
    for action, path in (
        (Action.CREATE, temporary),
        (Action.WRITE, ""),
        (Action.CLOSE, ""),
        (Action.LINK, temporary),
        (Action.UNLINK, temporary),
        (Action.OPEN, final),
        (Action.READ, ""),
        (Action.CLOSE, ""),
    ):
        operation = FileOperation(0, action, path, final, descriptor, slot=0, length=PAGE)
        result = _complete(engine, operation)
        if result is None:
            return f"io_uring has not completed a page's {action.name} in {_PROBE_TIMEOUT_MS} ms"
        if result < 0 or (action in (Action.READ, Action.WRITE) and result != PAGE):
            if descriptor >= 0 and action is not Action.CLOSE:
                os.close(descriptor)
            why = _named(-result) if result < 0 else f"{result} of {PAGE} bytes"
            return f"io_uring cannot {action.name} here: {why}"
        descriptor = result if action in (Action.CREATE, Action.OPEN) else descriptor
        descriptor = -1 if action is Action.CLOSE else descriptor
    return None


def _complete(engine: IoEngine, operation: FileOperation) -> int | None:
    """The operation's result; None when none came in time."""
    engine.submit([operation])
    poll = select.poll()
    poll.register(engine.fileno(), select.POLLIN)
    while poll.poll(_PROBE_TIMEOUT_MS):
        for completion in engine.reap():
            return completion.result
    return None


def _uring_refused(error: OSError) -> str:
    reasons = {
        errno.EPERM: _forbidden_by(),
        errno.ENOSYS: "the kernel, or a sandbox in its name, says that it has none",
        errno.ENOMEM: "no memory for the ring, or not enough may be locked (ulimit -l)",
        errno.ENOTSUP: "its rings need the memory ordering of x86-64",
    }
    code = error.errno or 0
    return f"io_uring is not available: {_named(code)}: {reasons.get(code, 'unexpected')}"


def _forbidden_by() -> str:
    try:
        disabled = _DISABLED_SYSCTL.read_text().strip()
    except OSError:
        disabled = "0"
    if disabled != "0":
        return f"the sysctl kernel.io_uring_disabled is {disabled}"
    return "a seccomp profile forbids it, as Docker's does since 25.0"


def _refuse_root(directory: Path, error: OSError) -> ConfigError:
    code = error.errno or 0
    if error.filename2 is not None:
        accepted = "a filesystem with hard links, which publish a chunk at once and whole"
    elif code in (errno.ENOSPC, errno.EDQUOT):
        accepted = "a directory with room for at least a page"
    else:
        accepted = "a directory that this process can write"
    return ConfigError(
        f"option 'root' is '{directory}', but no file can be stored there: {_named(code)}; "
        f"it must be {accepted}"
    )


def _named(code: int) -> str:
    return f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"


@contextlib.contextmanager
def _probe_names(directory: Path) -> Iterator[tuple[str, str]]:
    """Two names that no one else uses, removed again; the suffix is what sweepers look for."""
    stem = f"{directory}/.probe.{secrets.token_hex(8)}"
    names = (f"{stem}.1{TEMPORARY_SUFFIX}", f"{stem}.2{TEMPORARY_SUFFIX}")
    try:
        yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name)


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, PRIVATE.file_mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
