# SPDX-License-Identifier: Apache-2.0
"""Writes a wheel whose unchanged members are copied as the compressed bytes that they already are.

Inflating and deflating an upstream wheel takes many seconds, copying it less than one. `zipfile`
can't copy a member raw, so the archive is written here: the classic ZIP format, which a wheel
with fewer than 65,535 members and under 4 GiB fits into (both are checked). The output depends on
nothing but the input: no clock, no user, no platform.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO

from .errors import BuildError

# Every member that is made here carries this time: 2026-01-01 00:00:00 in MS-DOS form.
DOS_DATE = (2026 - 1980) << 9 | 1 << 5 | 1
DOS_TIME = 0
# A regular file, rw-r--r--, in the upper half of the external attributes.
FILE_MODE = 0o100644 << 16
LIMIT_BYTES = 0xFFFFFFFF
LIMIT_MEMBERS = 0xFFFF
COPY_BYTES = 1 << 20

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s4B4H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_UTF8_NAME = 0x800
_UNIX = 3
_VERSION_DEFLATE = 20


@dataclass(frozen=True)
class _Member:
    name: str
    method: int
    time: int
    date: int
    crc: int
    packed_bytes: int
    size_bytes: int
    mode: int
    offset: int

    @property
    def raw_name(self) -> bytes:
        return self.name.encode("utf-8")

    @property
    def flags(self) -> int:
        return 0 if self.name.isascii() else _UTF8_NAME

    def local_header(self) -> bytes:
        return (
            _LOCAL.pack(
                b"PK\3\4",
                _VERSION_DEFLATE,
                self.flags,
                self.method,
                self.time,
                self.date,
                self.crc,
                self.packed_bytes,
                self.size_bytes,
                len(self.raw_name),
                0,
            )
            + self.raw_name
        )

    def central_header(self) -> bytes:
        return (
            _CENTRAL.pack(
                b"PK\1\2",
                _VERSION_DEFLATE,
                _UNIX,
                _VERSION_DEFLATE,
                0,
                self.flags,
                self.method,
                self.time,
                self.date,
                self.crc,
                self.packed_bytes,
                self.size_bytes,
                len(self.raw_name),
                0,
                0,
                0,
                0,
                self.mode,
                self.offset,
            )
            + self.raw_name
        )


class WheelWriter:
    """A wheel being written to an open file; also keeps its RECORD.

    Use as a context manager: a normal exit appends RECORD and the central directory, an exception
    leaves the file as it is.
    """

    def __init__(self, file: BinaryIO, dist_info: str) -> None:
        self._file = file
        self._dist_info = dist_info
        self._members: list[_Member] = []
        self._names: set[str] = set()
        self._offset = 0
        self._record: list[tuple[str, str, str]] = []

    def copy(self, source: BinaryIO, info: zipfile.ZipInfo, name: str, digest: str) -> None:
        """Copy a member's compressed bytes under another name.

        Args:
            source: the archive that `info` describes a member of.
            digest: hash of the member's content, as RECORD states it.
        """
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BuildError(
                f"{info.filename}: compression method {info.compress_type}; wheels use 0 or 8"
            )
        year, month, day, hour, minute, second = info.date_time
        member = _Member(
            name=name,
            method=info.compress_type,
            time=hour << 11 | minute << 5 | second // 2,
            date=(year - 1980) << 9 | month << 5 | day,
            crc=info.CRC,
            packed_bytes=info.compress_size,
            size_bytes=info.file_size,
            mode=info.external_attr,
            offset=self._offset,
        )
        self._begin(member)
        for piece in packed_pieces(source, info):
            self._file.write(piece)
        self._record.append((name, digest, str(info.file_size)))

    def write(self, name: str, data: bytes) -> None:
        """Add a member that is made here."""
        self._write(name, data)
        self._record.append((name, record_hash(data), str(len(data))))

    def _write(self, name: str, data: bytes) -> None:
        deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = deflate.compress(data) + deflate.flush()
        member = _Member(
            name=name,
            method=zipfile.ZIP_DEFLATED,
            time=DOS_TIME,
            date=DOS_DATE,
            crc=zlib.crc32(data),
            packed_bytes=len(packed),
            size_bytes=len(data),
            mode=FILE_MODE,
            offset=self._offset,
        )
        self._begin(member)
        self._file.write(packed)

    def _begin(self, member: _Member) -> None:
        if member.name in self._names:
            raise BuildError(f"{member.name} would be in the wheel twice")
        header = member.local_header()
        end = self._offset + len(header) + member.packed_bytes
        if end > LIMIT_BYTES or member.size_bytes > LIMIT_BYTES:
            raise BuildError(f"{member.name}: the wheel would exceed 4 GiB, which isn't supported")
        if len(self._members) + 1 >= LIMIT_MEMBERS:
            raise BuildError(f"{member.name}: more than {LIMIT_MEMBERS} members aren't supported")
        self._names.add(member.name)
        self._members.append(member)
        self._offset = end
        self._file.write(header)

    def __enter__(self) -> WheelWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._finish()

    def _finish(self) -> None:
        record = f"{self._dist_info}/RECORD"
        self._write(record, record_bytes([*self._record, (record, "", "")]))
        directory = b"".join(member.central_header() for member in self._members)
        count = len(self._members)
        self._file.write(directory)
        self._file.write(_END.pack(b"PK\5\6", 0, 0, count, count, len(directory), self._offset, 0))


def packed_pieces(source: BinaryIO, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """A member's compressed bytes, in pieces, as they lie in its archive."""
    source.seek(info.header_offset)
    header = _LOCAL.unpack(source.read(_LOCAL.size))
    name_bytes, extra_bytes = header[-2:]
    source.seek(name_bytes + extra_bytes, io.SEEK_CUR)
    left = info.compress_size
    while left:
        piece = source.read(min(left, COPY_BYTES))
        if not piece:
            raise BuildError(f"{info.filename}: the archive ends before this member does")
        yield piece
        left -= len(piece)


def record_hash(data: bytes) -> str:
    """The hash of a file as RECORD states it."""
    digest = hashlib.sha256(data).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def record_bytes(rows: list[tuple[str, str, str]]) -> bytes:
    """RECORD: rows of path, hash, size in bytes."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8")


def read_record(data: bytes) -> dict[str, str]:
    """Path -> hash of a RECORD."""
    return {row[0]: row[1] for row in csv.reader(io.StringIO(data.decode("utf-8"))) if row}
