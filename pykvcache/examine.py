# SPDX-License-Identifier: Apache-2.0
"""Reads a chunk's file and says whether it is what its name says, as a load would."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from pykvcache.identity import FILE_NAME
from pykvcache.layout import PAGE, ChunkPaths, Defect, decode_trailer, file_bytes

PIECE_BYTES = 8 << 20
"""Read at a time, so that memory does not depend on the size of chunks."""

IDENTITY_BYTES_MAX = 1 << 20


def fingerprint_of(rank: Path) -> bytes:
    """What the trailers of a rank's files must name.

    Raises:
        OSError: its identity cannot be read.
    """
    descriptor = os.open(rank / FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        return hashlib.sha256(file.read(IDENTITY_BYTES_MAX)).digest()


def find_defect(path: str, fingerprint: bytes) -> Defect | None:
    """What is wrong with a file; None if nothing is. What was read leaves the page cache again.

    Args:
        path: ``.../<leaf>/<key in hex>.kv``.
        fingerprint: of its rank.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        pieces = Pieces(lambda size: file.read(size) or b"", os.fstat(descriptor).st_size)
        for _piece in pieces:
            pass
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return pieces.defect(os.path.basename(path), fingerprint)


class Pieces:
    """A file's content piece by piece, and what is wrong with it when all have been taken."""

    def __init__(self, read: Callable[[int], bytes], size: int) -> None:
        """Args:
        read: returns at most so many bytes, none at the end.
        size: bytes that there should be.
        """
        self._read = read
        self._payload_bytes = size - PAGE
        self._digest = xxhash.xxh3_128()
        self._page = b""

    def __iter__(self) -> Iterator[bytes]:
        left = self._payload_bytes
        while left > 0 and (piece := self._read(min(PIECE_BYTES, left))):
            left -= len(piece)
            self._digest.update(piece)
            yield piece
        if left <= 0:
            self._page = self._read(PAGE)
            yield self._page

    def defect(self, name: str, fingerprint: bytes) -> Defect | None:
        """What is wrong.

        Args:
            name: of the file, without directories.
            fingerprint: of its rank.
        """
        trailer = decode_trailer(self._page)
        if isinstance(trailer, Defect):
            return trailer
        if name != os.path.basename(ChunkPaths(Path()).final(trailer.key)):
            return Defect.KEY
        if trailer.fingerprint != fingerprint:
            return Defect.IDENTITY
        if file_bytes(trailer.payload_bytes) != self._payload_bytes + PAGE:
            return Defect.LENGTH
        return None if self._digest.digest() == trailer.checksum else Defect.CHECKSUM
