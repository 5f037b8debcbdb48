# SPDX-License-Identifier: Apache-2.0
"""Whose the files are, and who else could have put something in their way.

Chunks hold what users wrote to the model, and whoever can write to their directories chooses
what a server answers. So they are for the server's user alone, or for a group that shares them,
and a directory that somebody else could change is refused.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from pykvcache.config import Config
from pykvcache.errors import ConfigError

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Access:
    """Modes of what is made, and what of others is accepted."""

    file_mode: int = 0o600
    directory_mode: int = 0o700
    is_shared: bool = False
    """Whether directories may be other users', of a group of ours."""
    is_anyone_trusted: bool = False
    """Whether it does not matter who else can write there."""


PRIVATE = Access()


def access_of(config: Config) -> Access:
    """What the options say.

    Raises:
        ConfigError: a group is to share, and the umask takes its permissions away.
    """
    if not config.group_access:
        return Access(is_anyone_trusted=config.unsafe_root)
    umask = _umask()
    if umask & 0o070:
        raise ConfigError(
            f"option 'group_access' is True, but the umask of this process is {umask:04o}, which "
            "takes the group's permissions away; 0007 or 0002 would do"
        )
    return Access(0o660, 0o770, is_shared=True, is_anyone_trusted=config.unsafe_root)


def _umask() -> int:
    """Read, because umask(2) tells it only by changing it, for all threads."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0


def make_directories(directory: Path, root: Path, access: Access) -> None:
    """Make a directory under the root with all that are missing on the way, and look at each.

    Args:
        directory: the root, or a directory in it.
        root: what lies above it is not looked at, so it may be a symbolic link.
        access: whose they are, or may be.

    Raises:
        ConfigError: one of them is a symbolic link, or others could change it.
        OSError: one cannot be made.
    """
    inside = directory.relative_to(root).parts
    for depth in range(len(inside) + 1):
        level = root.joinpath(*inside[:depth])
        level.mkdir(mode=access.directory_mode, parents=depth == 0, exist_ok=True)
        refusal = _refusal(level, is_root=depth == 0, access=access)
        if refusal:
            raise ConfigError(f"option 'root' is '{root}', but '{level}' {refusal}")


def access_like(directory: Path) -> Access:
    """The modes of what others have to open too, from the directory it is made in: whoever may
    write there could replace it anyway. So commands need not know the servers' options.

    Raises:
        OSError: the directory is not there.
    """
    shared = os.stat(directory).st_mode & stat.S_IWGRP
    return Access(0o660, 0o770, is_shared=True) if shared else PRIVATE


def open_like(path: Path, flags: int) -> int:
    """Open a file, made if it is missing, with the mode of :func:`access_like`.

    Args:
        path: of the file; a symbolic link is not followed.
        flags: of open(2).

    Returns:
        The descriptor.

    Raises:
        OSError: it cannot be made or opened.
    """
    mode = access_like(path.parent).file_mode
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    found = os.fstat(descriptor)
    # The umask of a command is rarely one that leaves a group its permissions.
    if found.st_uid == os.geteuid() and mode & ~found.st_mode:
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) | mode)
    return descriptor


def make_like(directory: Path) -> None:
    """Make a directory if it is missing, with the mode of :func:`access_like`.

    Raises:
        OSError: it cannot be made.
    """
    mode = access_like(directory.parent).directory_mode
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=mode)
        made = stat.S_IMODE(os.stat(directory).st_mode)
        directory.chmod(made | mode)  # keeps what is inherited, as the set-group-ID bit


def _refusal(level: Path, *, is_root: bool, access: Access) -> str | None:
    status = os.stat(level, follow_symlinks=is_root)
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link; inside the root there must be none"
    if access.is_shared and not status.st_mode & stat.S_IWGRP:
        mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
        return f"cannot be written by its group ({mode}), which option 'group_access' is for"
    if access.is_anyone_trusted:
        return None
    allowed = "unless option 'unsafe_root' is true"
    if status.st_mode & stat.S_IWOTH:
        return f"can be written by everyone (mode {stat.S_IMODE(status.st_mode):04o}), {allowed}"
    groups = {os.getegid(), *os.getgroups()}
    if status.st_uid != os.geteuid() and not (access.is_shared and status.st_gid in groups):
        owners = "this user, or a group of this user's" if access.is_shared else "this user"
        return f"belongs to user {status.st_uid}; it must belong to {owners}, {allowed}"
    return None
