# SPDX-License-Identifier: Apache-2.0
"""Whatever lies in the directory: nothing crashes, and nothing but the real thing is accepted."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvcache.checksum import checksum
from pykvcache.errors import ConfigError
from pykvcache.identity import FILE_NAME, claim_directory
from pykvcache.layout import (
    KEY_BYTES_MAX,
    PAGE,
    BlockSpan,
    Defect,
    Trailer,
    decode_trailer,
    find_trailer,
)
from pykvcache.pool import Pool
from pykvcache.reactor.trailers import Trailers
from pykvcache.transfer.jobs import Direction
from pykvcache.transfer.operations import (
    Action,
    ChecksumOperation,
    Completion,
    FileOperation,
)
from tests.core.driver import FILE_BYTES, PAYLOAD_BYTES, chunk_of
from tests.core.test_identity import IDENTITY, RANK

EXAMPLES = 200
SOAK_EXAMPLES = 30_000
"""Of each of the parsers below: together more than 100,000."""

PAYLOAD = bytes(range(256)) * (PAYLOAD_BYTES // 256)
FINGERPRINT = bytes(range(32))
CHUNK = chunk_of("a")
TRAILER = Trailer(
    key=CHUNK.key,
    fingerprint=FINGERPRINT,
    payload_bytes=PAYLOAD_BYTES,
    span=CHUNK.span,
    time_ns=1,
    writer=b"ab",
    checksum=checksum(PAYLOAD),
)
EXPECTED = {
    "key": CHUNK.key,
    "fingerprint": FINGERPRINT,
    "payload_bytes": PAYLOAD_BYTES,
    "span": CHUNK.span,
}
HEAD = 160
"""Bytes in which all fields of this trailer lie."""

Edit = tuple[int, bytes]


def edits(size: int) -> st.SearchStrategy[list[Edit]]:
    """Bytes to put over others, most of them where the fields are, or at the end."""
    places = st.one_of(
        st.integers(0, min(HEAD, size)), st.integers(0, size), st.integers(size - 8, size)
    )
    return st.lists(st.tuples(places, st.binary(min_size=1, max_size=12)), max_size=4)


def edited(page: bytes, changes: list[Edit]) -> bytes:
    changed = bytearray(page)
    for place, new in changes:
        new = new[: len(changed) - place]
        changed[place : place + len(new)] = new
    return bytes(changed)


def page_of(trailer: Trailer) -> bytes:
    page = bytearray(PAGE)
    trailer.encode_into(memoryview(page))
    return bytes(page)


GOOD_PAGE = page_of(TRAILER)
GOOD_FILE = PAYLOAD + GOOD_PAGE


def with_crc(page: bytes) -> bytes:
    return page[:-4] + struct.pack("<I", zlib.crc32(page[:-4]))


def examine_page(page: bytes) -> None:
    """Pages of any size and content."""
    for intact in (False, True):
        assert isinstance(decode_trailer(page, intact=intact), Trailer | Defect)
    found = find_trailer(page, **EXPECTED)  # type: ignore[arg-type]
    if page == GOOD_PAGE:
        assert found == TRAILER
    elif isinstance(found, Trailer):
        assert with_crc(page) == page, "a damaged page is accepted"
        assert_expected(found)


def assert_expected(found: Trailer) -> None:
    """What may differ from the chunk's own trailer and still be it."""
    assert found.span.covers(CHUNK.span)
    free = replace(
        TRAILER,
        span=found.span,
        time_ns=found.time_ns,
        writer=found.writer,
        checksum=found.checksum,
    )
    assert found == free, "another chunk's trailer is accepted"


def examine_consistent_page(page: bytes) -> None:
    """Pages of which nobody can say that they were damaged."""
    examine_page(with_crc(page))


def examine_file(content: bytes) -> None:
    """Whole files, through what the reactor asks."""
    POOL.view(0)[:FILE_BYTES] = content
    read = FileOperation(1, Action.READ, slot=0, length=FILE_BYTES, chunk=CHUNK)
    TRAILERS.prepare(read)
    (done,) = TRAILERS.examine([Completion(1, FILE_BYTES)])
    if done.defect is None:
        operation = ChecksumOperation(2, Direction.LOAD, 0, CHUNK)
        done = replace(done, defect=TRAILERS.compare(operation))
    assert (done.defect is None) == (content == GOOD_FILE)


POOL = Pool(1, FILE_BYTES)
TRAILERS = Trailers(POOL, FINGERPRINT, "ab")

pages = st.one_of(
    edits(PAGE).map(lambda changes: edited(GOOD_PAGE, changes)),
    st.builds(
        lambda key, fingerprint, size, span, text: page_of(
            Trailer(key, fingerprint, size, span, 1, text[:32], text[32:])
        ),
        st.one_of(st.just(CHUNK.key), st.binary(max_size=KEY_BYTES_MAX)),
        st.one_of(st.just(FINGERPRINT), st.binary(min_size=32, max_size=32)),
        st.one_of(st.just(PAYLOAD_BYTES), st.integers(0, (1 << 64) - 1)),
        st.builds(BlockSpan, st.integers(0, 8), st.integers(0, 8)),
        st.binary(min_size=48, max_size=48),
    ),
    st.binary(max_size=PAGE + 1),
    st.binary(max_size=HEAD).map(lambda head: b"PYKVCHNK" + head.ljust(PAGE - 8, b"\0")),
)
whole_pages = pages.map(lambda page: page[:PAGE].ljust(PAGE, b"\0"))
files = st.one_of(
    edits(FILE_BYTES).map(lambda changes: edited(GOOD_FILE, changes)),
    whole_pages.map(lambda page: PAYLOAD + page),
    st.integers(0, FILE_BYTES).map(lambda size: GOOD_FILE[:size].ljust(FILE_BYTES, b"\0")),
)
PARSERS: dict[str, tuple[st.SearchStrategy[bytes], Callable[[bytes], None]]] = {
    "page": (pages, examine_page),
    "consistent page": (whole_pages, examine_consistent_page),
    "file": (files, examine_file),
}
identities = st.one_of(
    edits(len(IDENTITY.canonical)).map(
        lambda changes: edited(IDENTITY.canonical.encode(), changes)
    ),
    st.binary(max_size=2000),
    st.integers(0, len(IDENTITY.canonical)).map(lambda size: IDENTITY.canonical.encode()[:size]),
    st.binary(min_size=1, max_size=9).map(lambda more: IDENTITY.canonical.encode() + more),
    st.sampled_from([RANK.canonical.encode(), b"cos\nsystem\n(S'exit'\ntR.", b"\x80\x04."]),
)


def fuzz(parser: str, examples: int) -> None:
    strategy, examine = PARSERS[parser]
    settings(max_examples=examples)(given(strategy)(examine))()


def fuzz_identity(root: Path, examples: int) -> None:
    directory = IDENTITY.directory(root)
    claim_directory(IDENTITY, directory, root)
    path = directory / FILE_NAME

    def examine(content: bytes) -> None:
        path.write_bytes(content)
        try:
            claim_directory(IDENTITY, directory, root)
        except ConfigError:
            accepted = False
        else:
            accepted = True
        assert accepted == (content == IDENTITY.canonical.encode())
        assert path.read_bytes() == content

    settings(max_examples=examples)(given(identities)(examine))()


@pytest.mark.parametrize("parser", PARSERS)
def test_only_the_chunks_own_trailer_is_accepted(parser: str) -> None:
    fuzz(parser, EXAMPLES)


def test_only_this_identity_is_accepted(tmp_path: Path) -> None:
    fuzz_identity(tmp_path / "root", EXAMPLES)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("parser", PARSERS)
def test_only_the_chunks_own_trailer_is_accepted_ever(parser: str) -> None:
    fuzz(parser, SOAK_EXAMPLES)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_only_this_identity_is_accepted_ever(tmp_path: Path) -> None:
    fuzz_identity(tmp_path / "root", SOAK_EXAMPLES)
