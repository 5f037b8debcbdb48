# SPDX-License-Identifier: Apache-2.0
"""Names and pages: where a chunk lies under the root, and what its file says of itself.

    <root>/<model>-<fingerprint>/identity.json      what the bytes below depend on
    <root>/<model>-<fingerprint>/rank-0000/abc/<key in hex>.kv

A file holds the payload of one chunk, padded to :data:`PAGE`, then one trailer page.
The trailer comes last so that payload and trailer are one aligned transfer from the
start of a slot, and so that a file cut short has no trailer. Names are built from hex
digits only; 4,096 leaf directories keep each below 1,000 entries at four million files
(the paper, section 5.4, measured no slow-down at a million files in such a hierarchy).

Trailer page, little-endian, 4,096 bytes (format version 2)::

    magic 8s | format u16 | checksum algorithm u16 | block count u32 | first block u32
    | payload bytes u64 | time ns u64 | key length u16 | fingerprint 32s | writer 32s
    | checksum 16s | ... zeros to 128 ... | key | ... zeros ... | CRC-32 of the page before it u32

The checksum is that of everything before the page (:mod:`pykvcache.checksum`). A page of another
format version is a defect like any other: its file is a miss, and is replaced.
"""

from __future__ import annotations

import enum
import hashlib
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from pykvcache.checksum import ALGORITHM

PAGE = 4096
"""Bytes; alignment of addresses, lengths and offsets that O_DIRECT needs (open(2))."""

FORMAT_VERSION = 2
SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"
QUARANTINE = "quarantine"
"""Directory beside those of the chunks; no hex digits, so no chunk's."""

_MAGIC = b"PYKVCHNK"
_FIELDS = struct.Struct("<8sHHIIQQH32s32s16s")
_KEY_OFFSET = 128
_CRC = struct.Struct("<I")
_CRC_OFFSET = PAGE - _CRC.size
KEY_BYTES_MAX = 1024
"""Bytes of a key; vLLM's have 36."""
_NAMED_KEY_BYTES_MAX = 64
"""Longer keys are named by their digest: a file name has at most 255 characters (NAME_MAX)."""
_FAN_OUT_DIGITS = 3


class Defect(enum.Enum):
    """Why a file that could be read is not the chunk that was asked for."""

    NO_TRAILER = "no_trailer"
    FORMAT = "format"
    KEY = "key"
    IDENTITY = "identity"
    LENGTH = "length"
    BLOCKS = "blocks"
    CHECKSUM = "checksum"


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
        key: the chunk's key, at most 1,024 bytes.
        fingerprint: SHA-256 of the identity, 32 bytes.
        payload_bytes: bytes of the payload, before padding.
        span: the blocks that carry data.
        time_ns: when it was written, nanoseconds of the Unix epoch.
        writer: who wrote it, at most 32 bytes, for people.
        checksum: of everything before the page.
    """

    key: bytes
    fingerprint: bytes
    payload_bytes: int
    span: BlockSpan
    time_ns: int
    writer: bytes
    checksum: bytes

    def encode_into(self, page: memoryview) -> None:
        """Write the page.

        Args:
            page: writable, 4,096 bytes.

        Raises:
            ValueError: the key is too long to be written whole.
        """
        if len(self.key) > KEY_BYTES_MAX:
            raise ValueError(f"key of {len(self.key)} bytes, at most {KEY_BYTES_MAX}")
        page[:] = bytes(PAGE)
        _FIELDS.pack_into(
            page,
            0,
            _MAGIC,
            FORMAT_VERSION,
            ALGORITHM,
            self.span.count,
            self.span.first,
            self.payload_bytes,
            self.time_ns,
            len(self.key),
            self.fingerprint,
            self.writer,
            self.checksum,
        )
        page[_KEY_OFFSET : _KEY_OFFSET + len(self.key)] = self.key
        _CRC.pack_into(page, _CRC_OFFSET, zlib.crc32(page[:_CRC_OFFSET]))


def decode_trailer(page: memoryview | bytes, *, intact: bool = False) -> Trailer | Defect:
    """Read a trailer page of 4,096 bytes; a page that is none is a :class:`Defect`.

    ``intact`` takes for granted that the page is as it was written.
    """
    if len(page) != PAGE:
        return Defect.NO_TRAILER
    magic, version, algorithm, count, first, payload_bytes, time_ns, key_bytes, *texts = (
        _FIELDS.unpack_from(page)
    )
    if magic != _MAGIC:
        return Defect.NO_TRAILER
    (crc,) = _CRC.unpack_from(page, _CRC_OFFSET)
    if not intact and crc != zlib.crc32(page[:_CRC_OFFSET]):
        return Defect.NO_TRAILER
    if version != FORMAT_VERSION or algorithm != ALGORITHM or key_bytes > KEY_BYTES_MAX:
        return Defect.FORMAT
    fingerprint, writer, checksum = texts
    return Trailer(
        key=bytes(page[_KEY_OFFSET : _KEY_OFFSET + key_bytes]),
        fingerprint=fingerprint,
        payload_bytes=payload_bytes,
        span=BlockSpan(first, count),
        time_ns=time_ns,
        writer=writer.rstrip(b"\0"),
        checksum=checksum,
    )


def find_trailer(
    page: memoryview | bytes,
    *,
    key: bytes,
    fingerprint: bytes,
    payload_bytes: int,
    span: BlockSpan,
    intact: bool = False,
) -> Trailer | Defect:
    """The trailer of a file, when it is what a load expects.

    Args:
        page: 4,096 bytes.
        key, fingerprint, payload_bytes: see :class:`Trailer`.
        span: blocks that it must hold at least.
    """
    trailer = decode_trailer(page, intact=intact)
    if isinstance(trailer, Defect):
        return trailer
    if trailer.key != key:
        return Defect.KEY
    if trailer.fingerprint != fingerprint:
        return Defect.IDENTITY
    if trailer.payload_bytes != payload_bytes:
        return Defect.LENGTH
    return trailer if trailer.span.covers(span) else Defect.BLOCKS


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
        if len(key) > _NAMED_KEY_BYTES_MAX:
            key = hashlib.sha256(key).digest()
        digits = key.hex()
        return f"{self._prefix}{digits[:_FAN_OUT_DIGITS]}/{digits}{SUFFIX}"


def quarantine_name(final: str, number: int) -> str:
    """Where a rank's file goes that is not what its name says."""
    directory = final.rsplit("/", 2)[0]
    return f"{directory}/{QUARANTINE}/{number:03x}{SUFFIX}"


def temporary_name(final: str, writer: str, number: int) -> str:
    """A name next to the final one that no other writer uses and no reader opens."""
    directory, _, name = final.rpartition("/")
    return f"{directory}/.{name}.{writer}.{number}{TEMPORARY_SUFFIX}"
