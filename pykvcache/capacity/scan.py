# SPDX-License-Identifier: Apache-2.0
"""Reads what is in a root, one leaf directory after the other.

Only what has the layout's names is looked at, below directories with an ``identity.json``:
whatever else a user keeps under the root is neither counted nor ever removed. Links are not
followed. Memory is that of one leaf directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pykvcache.identity import FILE_NAME
from pykvcache.layout import QUARANTINE, SUFFIX, TEMPORARY_SUFFIX

_RANK = re.compile(r"rank-\d{4,}")
_LEAF = re.compile(r"[0-9a-f]{3}")
_CHUNK = re.compile(r"(?:[0-9a-f]{2})+" + re.escape(SUFFIX))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file: name, bytes, modification time in nanoseconds."""

    name: str
    size: int
    time_ns: int


@dataclass(slots=True)
class Leaf:
    """One leaf directory.

    Attributes:
        identity: the directory of the identity it belongs to.
        path: its own.
        chunks: published chunk files.
        temporaries: of writers, at work or killed.
        strange: names of chunks that are no files.
    """

    identity: Path
    path: str
    chunks: list[FileEntry] = field(default_factory=list)
    temporaries: list[FileEntry] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)


Problem = Callable[[str, OSError], None]
"""Told of what cannot be read; its path, and why."""


def identities(root: Path, problem: Problem) -> list[Path]:
    """The directories of identities, sorted."""
    return [
        root / name
        for name in _names(str(root), problem)
        if not name.startswith(".") and os.path.isfile(root / name / FILE_NAME)
    ]


def leaves(identity: Path, problem: Problem) -> Iterator[Leaf]:
    """What is in one identity's directory."""
    for rank in _names(str(identity), problem):
        if not _RANK.fullmatch(rank):
            continue
        for leaf in _names(f"{identity}/{rank}", problem):
            if _LEAF.fullmatch(leaf):
                yield _read(identity, f"{identity}/{rank}/{leaf}", problem)


def put_aside(identity: Path, problem: Problem) -> Iterator[tuple[str, list[FileEntry]]]:
    """Each rank's quarantine: its path, and the files in it."""
    for rank in _names(str(identity), problem):
        path = f"{identity}/{rank}/{QUARANTINE}"
        if _RANK.fullmatch(rank) and os.path.isdir(path):
            files: list[FileEntry] = []
            with contextlib.suppress(OSError), os.scandir(path) as entries:
                for entry in entries:
                    if entry.name.endswith(SUFFIX):
                        _add(entry, files, [])
            yield path, files


def _names(directory: str, problem: Problem) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            problem(directory, error)
        return []


def _read(identity: Path, path: str, problem: Problem) -> Leaf:
    leaf = Leaf(identity, path)
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and _CHUNK.fullmatch(entry.name):
                    _add(entry, leaf.chunks, leaf.strange)
                elif entry.name.endswith(TEMPORARY_SUFFIX):
                    _add(entry, leaf.temporaries, [])
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            problem(path, error)
    return leaf


def _add(entry: os.DirEntry[str], files: list[FileEntry], strange: list[str]) -> None:
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(found.st_mode):
            files.append(FileEntry(entry.name, found.st_size, found.st_mtime_ns))
        else:
            strange.append(entry.name)
