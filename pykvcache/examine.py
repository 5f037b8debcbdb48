# SPDX-License-Identifier: Apache-2.0
"""Reads a chunk's file and says whether it is what its name says, as a load would."""

from __future__ import annotations

import hashlib
import os
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
        payload_bytes = os.fstat(descriptor).st_size - PAGE
        if payload_bytes < 0:
            return Defect.NO_TRAILER
        trailer = decode_trailer(os.pread(descriptor, PAGE, payload_bytes))
        if isinstance(trailer, Defect):
            return trailer
        named = Path(ChunkPaths(Path()).final(trailer.key)).name
        if os.path.basename(path) != named:
            return Defect.KEY
        if trailer.fingerprint != fingerprint:
            return Defect.IDENTITY
        if file_bytes(trailer.payload_bytes) != payload_bytes + PAGE:
            return Defect.LENGTH
        digest = xxhash.xxh3_128()
        left = payload_bytes
        while left and (piece := file.read(min(PIECE_BYTES, left))):
            digest.update(piece)
            left -= len(piece)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return None if not left and digest.digest() == trailer.checksum else Defect.CHECKSUM
