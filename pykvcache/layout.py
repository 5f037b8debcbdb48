# SPDX-License-Identifier: Apache-2.0
"""Names and pages: where a chunk lies under the root, and what its file says of itself.

    <root>/<model>-<fingerprint>/identity.json      what the bytes below depend on
    <root>/<model>-<fingerprint>/rank-0000/abc/<key in hex>.kv

A file holds the payload of one chunk, padded to :data:`PAGE`, then one trailer page.
The trailer comes last so that payload and trailer are one aligned transfer from the
start of a slot, and so that a file cut short has no trailer. Names are built from hex
digits only; 4,096 leaf directories keep each below 1,000 entries at four million files
(the paper, section 5.4, measured no slow-down at a million files in such a hierarchy).

Trailer page, little-endian, 4,096 bytes (format version 1)::

    magic 8s | format u16 | checksum algorithm u16 | block count u32 | first block u32
    | payload bytes u64 | time ns u64 | key length u16 | key 64s | fingerprint 32s
    | writer 32s | payload checksum 16s | ... zeros ... | CRC-32 of the page before it u32
"""

from __future__ import annotations

import enum
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
"""Bytes; alignment of addresses, lengths and offsets that O_DIRECT needs (open(2))."""

FORMAT_VERSION = 1
SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"

_MAGIC = b"PYKVCHNK"
_FIELDS = struct.Struct("<8sHHIIQQH64s32s32s16s")
_CRC = struct.Struct("<I")
_CRC_OFFSET = PAGE - _CRC.size
_KEY_BYTES_MAX = 64
_FAN_OUT_DIGITS = 3


class Defect(enum.Enum):
    """Why a file that could be read is not the chunk that was asked for."""

    NO_TRAILER = "no_trailer"
    FORMAT = "format"
    KEY = "key"
    IDENTITY = "identity"
    LENGTH = "length"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Blocks of a chunk that carry data: ``[first, first + count)``.

    All of them, except where a sliding window had already given up the chunk's first blocks.
    """

    first: int
    count: int

    def covers(self, other: BlockSpan) -> bool:
        """Whether every block of ``other`` is one of these; an empty one has none."""
        return other.count == 0 or (self.first <= other.first and other.end <= self.end)

    @property
    def end(self) -> int:
        """The block after the last."""
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class Trailer:
    """What a file says of itself.

    Attributes:
        key: the chunk's key, at most 64 bytes.
        fingerprint: SHA-256 of the identity, 32 bytes.
        payload_bytes: bytes before the trailer, a multiple of :data:`PAGE`.
        span: the blocks that carry data.
        time_ns: when it was written, nanoseconds of the Unix epoch.
        writer: who wrote it, at most 32 bytes, for people.
    """

    key: bytes
    fingerprint: bytes
    payload_bytes: int
    span: BlockSpan
    time_ns: int
    writer: bytes

    def encode_into(self, page: memoryview) -> None:
        """Write the page.

        Args:
            page: writable, 4,096 bytes.
        """
        page[:] = bytes(PAGE)
        _FIELDS.pack_into(
            page,
            0,
            _MAGIC,
            FORMAT_VERSION,
            0,
            self.span.count,
            self.span.first,
            self.payload_bytes,
            self.time_ns,
            len(self.key),
            self.key,
            self.fingerprint,
            self.writer,
            bytes(16),
        )
        _CRC.pack_into(page, _CRC_OFFSET, zlib.crc32(page[:_CRC_OFFSET]))


def decode_trailer(page: memoryview | bytes) -> Trailer | Defect:
    """Read a trailer page of 4,096 bytes; a page that is none is a :class:`Defect`."""
    fields = _FIELDS.unpack_from(page)
    magic, version, _algorithm, count, first, payload_bytes, time_ns, key_bytes = fields[:8]
    if magic != _MAGIC:
        return Defect.NO_TRAILER
    (crc,) = _CRC.unpack_from(page, _CRC_OFFSET)
    if crc != zlib.crc32(page[:_CRC_OFFSET]):
        return Defect.NO_TRAILER
    if version != FORMAT_VERSION or key_bytes > _KEY_BYTES_MAX:
        return Defect.FORMAT
    key, fingerprint, writer, _checksum = fields[8:]
    return Trailer(
        key=key[:key_bytes],
        fingerprint=fingerprint,
        payload_bytes=payload_bytes,
        span=BlockSpan(first, count),
        time_ns=time_ns,
        writer=writer.rstrip(b"\0"),
    )


def find_span(
    page: memoryview | bytes, *, key: bytes, fingerprint: bytes, payload_bytes: int, span: BlockSpan
) -> BlockSpan | Defect:
    """The blocks that a file holds, when its trailer page is what a load expects.

    Args:
        page: 4,096 bytes.
        key, fingerprint, payload_bytes: see :class:`Trailer`.
        span: blocks that it must hold at least.
    """
    trailer = decode_trailer(page)
    if isinstance(trailer, Defect):
        return trailer
    if trailer.key != key:
        return Defect.KEY
    if trailer.fingerprint != fingerprint:
        return Defect.IDENTITY
    if trailer.payload_bytes != payload_bytes:
        return Defect.LENGTH
    return trailer.span if trailer.span.covers(span) else Defect.BLOCKS


def padded(size: int) -> int:
    """The size in bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def file_bytes(payload_bytes: int) -> int:
    """Size of the file that holds a payload of that many bytes."""
    return padded(payload_bytes) + PAGE


def model_directory(root: Path, model: str, fingerprint: bytes) -> Path:
    """The directory of one identity; readable for people, distinct by fingerprint."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", model.rstrip("/").rsplit("/", 1)[-1])[:64] or "model"
    return root / f"{name.lstrip('.') or 'model'}-{fingerprint.hex()[:16]}"


def rank_directory(directory: Path, rank: int) -> Path:
    """The directory of one rank's files; ranks hold different bytes under the same key."""
    return directory / f"rank-{rank:04d}"


class ChunkPaths:
    """Names of one rank's chunk files."""

    def __init__(self, directory: Path) -> None:
        self._prefix = f"{directory}/"

    def final(self, key: bytes) -> str:
        """The published name; a reader opens nothing else."""
        digits = key.hex()
        return f"{self._prefix}{digits[:_FAN_OUT_DIGITS]}/{digits}{SUFFIX}"


def temporary_name(final: str, writer: str, number: int) -> str:
    """A name next to the final one that no other writer uses and no reader opens."""
    directory, _, name = final.rpartition("/")
    return f"{directory}/.{name}.{writer}.{number}{TEMPORARY_SUFFIX}"
