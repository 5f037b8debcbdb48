# SPDX-License-Identifier: Apache-2.0
"""Chunks of one identity as one file, to move a cache from machine to machine.

An archive is a plain tar file (pax, not compressed: KV data does not) with the names of the root:
``<identity>/identity.json``, ``<identity>/rank-0000/identity.json`` and the chunks below it.

Nothing in one that is taken in is trusted: names are matched whole, an identity must have the
fingerprint that its directory's name carries, and every chunk is looked at as a load would before
it is published, like a store.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec

from pykvcache.access import Access, make_directories
from pykvcache.errors import ConfigError
from pykvcache.examine import IDENTITY_BYTES_MAX, Pieces
from pykvcache.identity import FILE_NAME, claim_for
from pykvcache.layout import ChunkPaths, model_directory, rank_directory, temporary_name

_DIRECTORY = r"([A-Za-z0-9_-][A-Za-z0-9._-]*)"
_IDENTITY = re.compile(_DIRECTORY + r"/identity\.json")
_RANK = re.compile(_DIRECTORY + r"/(rank-(\d{4,}))/identity\.json")
_CHUNK = re.compile(_DIRECTORY + r"/(rank-\d{4,})/[0-9a-f]{3}/((?:[0-9a-f]{2})+)\.kv")

Progress = Callable[[int], None]
"""Told bytes that have been moved."""


@dataclass(slots=True)
class Taken:
    """What became of an archive's chunks."""

    identities: list[str] = field(default_factory=list)
    files: int = 0
    size: int = 0
    present: int = 0
    """There already, and left as they were."""
    bad: Counter[str] = field(default_factory=Counter)
    """Left out, by what was wrong: a :class:`Defect`, or 'name'."""


def write_archive(
    archive: Path, identity: Path, files: Iterable[Path], progress: Progress
) -> tuple[int, int]:
    """Write the files, all of one identity, and what says whose they are.

    Args:
        archive: made, or replaced as a whole.
        identity: its directory.
        files: chunks; one that has gone meanwhile is left out.
        progress: see :data:`Progress`.

    Returns:
        Files and bytes written.

    Raises:
        OSError: a file cannot be read, or the archive not be written.
    """
    temporary = archive.with_name(f".{archive.name}.{secrets.token_hex(8)}.tmp")
    count = size = 0
    ranks: set[Path] = set()
    try:
        with tarfile.open(temporary, "x:", format=tarfile.PAX_FORMAT) as tar:
            _add(tar, identity / FILE_NAME, identity)
            for file in files:
                with contextlib.suppress(FileNotFoundError), _opened(file) as opened:
                    rank = file.parent.parent
                    if rank not in ranks:
                        _add(tar, rank / FILE_NAME, identity)
                        ranks.add(rank)
                    info = _info(file, identity, os.fstat(opened.fileno()).st_size)
                    tar.addfile(info, opened)
                    count += 1
                    size += info.size
                    progress(info.size)
        os.replace(temporary, archive)
    finally:
        temporary.unlink(missing_ok=True)
    return count, size


def _add(tar: tarfile.TarFile, file: Path, identity: Path) -> None:
    with _opened(file) as opened:
        tar.addfile(_info(file, identity, os.fstat(opened.fileno()).st_size), opened)


def _opened(path: Path) -> BinaryIO:
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


def _info(file: Path, identity: Path, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(f"{identity.name}/{file.relative_to(identity)}")
    info.size, info.mode = size, 0o600
    return info


class Reader:
    """Takes an archive into a root."""

    def __init__(self, root: Path, access: Access, progress: Progress) -> None:
        """Args:
        root: where to.
        access: whose the files are to be.
        progress: see :data:`Progress`.
        """
        self._root = Path(os.path.realpath(root))
        self._access = access
        self._progress = progress
        self._writer = f"{os.getpid():x}-{secrets.token_hex(6)}"
        self._fingerprints: dict[str, bytes] = {}
        """By directory, relative to the root: those of identities and of ranks."""
        self.taken = Taken()

    def read(self, archive: Path) -> Taken:
        """Take everything in that is as it should be.

        Raises:
            ConfigError: it is no archive, it is damaged, or something in the root contradicts it.
                What was taken in by then stays.
            OSError: the root cannot be written.
        """
        try:
            tar = tarfile.open(archive, "r:")  # noqa: SIM115  (closed below; this error is named)
        except (tarfile.TarError, OSError, ValueError, EOFError) as error:
            raise ConfigError(f"archive is '{archive}': it cannot be read ({error})") from None
        with tar:
            while (member := _next(tar, archive)) is not None:
                self._take(tar, member, archive)
                tar.members = []  # type: ignore[attr-defined]  # they would be kept
        return self.taken

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo, archive: Path) -> None:
        name = member.name
        is_plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.sparse
        content = tar.extractfile(member) if is_plain else None
        if content is None:
            self.taken.bad["name"] += 1
        elif match := _IDENTITY.fullmatch(name):
            self._take_identity(match[1], content.read(IDENTITY_BYTES_MAX))
        elif match := _RANK.fullmatch(name):
            self._take_rank(match[1], match[2], int(match[3]), content.read(IDENTITY_BYTES_MAX))
        elif match := _CHUNK.fullmatch(name):
            try:
                self._take_chunk(f"{match[1]}/{match[2]}", match[3], content, member.size)
            except tarfile.TarError as error:
                raise ConfigError(f"archive is '{archive}': it ends early ({error})") from None
        else:
            self.taken.bad["name"] += 1

    def _take_identity(self, name: str, text: bytes) -> None:
        fingerprint = hashlib.sha256(text).digest()
        model = _fields(text).get("model")
        if not isinstance(model, str) or name != model_directory(Path(), model, fingerprint).name:
            raise ConfigError(
                f"the archive's '{name}/{FILE_NAME}' does not describe what its name says"
            )
        claim_for(text, self._root / name, self._root, self._access)
        self._fingerprints[name] = fingerprint
        self.taken.identities.append(name)

    def _take_rank(self, name: str, rank: str, number: int, text: bytes) -> None:
        server = self._fingerprints.get(name)
        fields = _fields(text)
        is_named = rank == rank_directory(Path(), number).name
        if (
            server is None
            or not is_named
            or (fields.get("server"), fields.get("rank")) != (server.hex(), number)
        ):
            raise ConfigError(
                f"the archive's '{name}/{rank}/{FILE_NAME}' does not belong to its identity"
            )
        claim_for(text, self._root / name / rank, self._root, self._access)
        self._fingerprints[f"{name}/{rank}"] = hashlib.sha256(text).digest()

    def _take_chunk(self, rank: str, digits: str, content: IO[bytes], size: int) -> None:
        fingerprint = self._fingerprints.get(rank)
        key = bytes.fromhex(digits)
        final = ChunkPaths(self._root / rank).final(key)
        if fingerprint is None or os.path.basename(final) != f"{digits}.kv":
            self.taken.bad["name"] += 1
            return
        if os.path.lexists(final):
            self.taken.present += 1
            self._progress(size)
            return
        make_directories(Path(final).parent, self._root, self._access)
        temporary = temporary_name(final, self._writer, 1)
        pieces = Pieces(content.read, size)
        try:
            _write(temporary, self._access.file_mode, pieces)
            defect = pieces.defect(os.path.basename(final), fingerprint)
            if defect is not None:
                self.taken.bad[defect.value] += 1
            elif _link(temporary, final):
                self.taken.files += 1
                self.taken.size += size
            else:
                self.taken.present += 1
        finally:
            Path(temporary).unlink(missing_ok=True)
        self._progress(size)


def _fields(text: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _next(tar: tarfile.TarFile, archive: Path) -> tarfile.TarInfo | None:
    try:
        return tar.next()
    except (tarfile.TarError, OSError, ValueError, EOFError, OverflowError) as error:
        raise ConfigError(f"archive is '{archive}': it is damaged ({error})") from None


def _write(path: str, mode: int, pieces: Iterable[bytes]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, mode), "wb", buffering=0) as file:
        for piece in pieces:
            file.write(piece)


def _link(temporary: str, final: str) -> bool:
    """Publish; False if somebody else was first."""
    try:
        os.link(temporary, final, follow_symlinks=False)
    except FileExistsError:
        return False
    return True
