# SPDX-License-Identifier: Apache-2.0
"""Names, trailer pages and their defects."""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache.checksum import ALGORITHM
from pykvcache.layout import (
    FORMAT_VERSION,
    KEY_BYTES_MAX,
    PAGE,
    SUFFIX,
    BlockSpan,
    ChunkPaths,
    Defect,
    Trailer,
    decode_trailer,
    file_bytes,
    find_trailer,
    model_directory,
    padded,
    rank_directory,
    temporary_name,
)

TRAILER = Trailer(
    key=b"\x00key",
    fingerprint=bytes(range(32)),
    payload_bytes=3 * PAGE,
    span=BlockSpan(2, 14),
    time_ns=1_700_000_000_000_000_000,
    writer=b"0123456789abcdef",
    checksum=bytes(range(100, 116)),
)
VERSION_AT, ALGORITHM_AT, KEY_LENGTH_AT = 8, 10, 36
"""Offsets in the page, from the layout's description."""

trailers = st.builds(
    Trailer,
    key=st.binary(min_size=1, max_size=KEY_BYTES_MAX),
    fingerprint=st.binary(min_size=32, max_size=32),
    payload_bytes=st.integers(0, (1 << 64) - 1),
    span=st.builds(BlockSpan, st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1)),
    time_ns=st.integers(0, (1 << 64) - 1),
    writer=st.text("0123456789abcdef", max_size=32).map(str.encode),
    checksum=st.binary(min_size=16, max_size=16),
)


def encode(trailer: Trailer) -> bytearray:
    page = bytearray(b"\xff" * PAGE)
    trailer.encode_into(memoryview(page))
    return page


def with_crc(page: bytearray) -> bytearray:
    """The page with a checksum that fits, as another version of this program would write it."""
    page[PAGE - 4 :] = struct.pack("<I", zlib.crc32(page[: PAGE - 4]))
    return page


def defect_of(page: bytes | bytearray, **expected: Any) -> Defect | None:
    fields: dict[str, Any] = {
        "key": TRAILER.key,
        "fingerprint": TRAILER.fingerprint,
        "payload_bytes": TRAILER.payload_bytes,
        "span": TRAILER.span,
    }
    found = find_trailer(bytes(page), **{**fields, **expected})
    if isinstance(found, Defect):
        return found
    assert found.span == TRAILER.span, "the blocks of the file, whatever was expected"
    return None


@given(trailers)
def test_a_trailer_reads_back_as_it_was_written(trailer: Trailer) -> None:
    page = encode(trailer)
    assert decode_trailer(bytes(page)) == trailer
    assert decode_trailer(memoryview(page)) == trailer


def test_the_page_is_the_documented_one() -> None:
    page = encode(TRAILER)
    assert page[:8] == b"PYKVCHNK"
    assert struct.unpack_from("<HHIIQQH", page, 8) == (
        FORMAT_VERSION,
        ALGORITHM,
        14,
        2,
        3 * PAGE,
        TRAILER.time_ns,
        4,
    )
    assert page[38:70] == TRAILER.fingerprint
    assert page[70:102] == TRAILER.writer.ljust(32, b"\0")
    assert page[102:118] == TRAILER.checksum
    assert page[118:128] == bytes(10)
    assert page[128:132] == TRAILER.key
    assert page[132 : PAGE - 4] == bytes(PAGE - 4 - 132), "nothing of the slot's past is written"


def test_any_flipped_byte_is_a_defect() -> None:
    page = encode(TRAILER)
    used = [*range(256), *range(256, PAGE - 4, 97), *range(PAGE - 4, PAGE)]
    for offset in used:
        for flip in (0x01, 0x80, 0xFF):
            page[offset] ^= flip
            assert defect_of(page) is Defect.NO_TRAILER, offset
            page[offset] ^= flip
    assert defect_of(page) is None


@given(st.integers(0, PAGE - 1), st.integers(1, 255))
def test_whichever_byte_is_flipped(offset: int, flip: int) -> None:
    page = encode(TRAILER)
    page[offset] ^= flip
    assert isinstance(decode_trailer(bytes(page)), Defect)


@pytest.mark.parametrize("page", [bytes(PAGE), b"\xff" * PAGE, b"PYKVCHNK" + bytes(PAGE - 8)])
def test_a_page_that_is_no_trailer(page: bytes) -> None:
    assert defect_of(page) is Defect.NO_TRAILER


def test_a_page_taken_for_intact_must_still_be_the_one_expected() -> None:
    page = encode(TRAILER)
    page[-1] ^= 1
    assert decode_trailer(bytes(page), intact=True) == TRAILER
    assert defect_of(page, intact=True, key=b"other") is Defect.KEY
    assert defect_of(bytes(PAGE), intact=True) is Defect.NO_TRAILER


def test_another_format_is_a_defect_of_its_own() -> None:
    for offset, value in (
        (VERSION_AT, FORMAT_VERSION + 1),
        (VERSION_AT, FORMAT_VERSION - 1),
        (ALGORITHM_AT, ALGORITHM + 1),
        (KEY_LENGTH_AT, KEY_BYTES_MAX + 1),
    ):
        page = encode(TRAILER)
        struct.pack_into("<H", page, offset, value)
        assert defect_of(with_crc(page)) is Defect.FORMAT


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE + 1])
def test_less_or_more_than_a_page_is_no_trailer(size: int) -> None:
    page = bytes(encode(TRAILER)) + b"\0"
    assert defect_of(page[:size]) is Defect.NO_TRAILER


def test_a_key_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"key of 1025 bytes, at most 1024"):
        encode(replace(TRAILER, key=bytes(KEY_BYTES_MAX + 1)))


@pytest.mark.parametrize(
    ("expected", "defect"),
    [
        ({}, None),
        ({"key": b"\x00kez"}, Defect.KEY),
        ({"key": b"\x00key\x00"}, Defect.KEY),
        ({"fingerprint": bytes(32)}, Defect.IDENTITY),
        ({"payload_bytes": 4 * PAGE}, Defect.LENGTH),
        ({"span": BlockSpan(1, 15)}, Defect.BLOCKS),
        ({"span": BlockSpan(2, 15)}, Defect.BLOCKS),
        ({"span": BlockSpan(5, 3)}, None),
    ],
)
def test_what_is_asked_for_and_what_is_there(
    expected: dict[str, Any], defect: Defect | None
) -> None:
    assert defect_of(encode(TRAILER), **expected) is defect


def test_every_defect_can_be_found() -> None:
    other = with_crc(encode(TRAILER))
    struct.pack_into("<H", other, VERSION_AT, 99)
    found = {
        defect_of(bytes(PAGE)),
        defect_of(with_crc(other)),
        defect_of(encode(replace(TRAILER, key=b"other"))),
        defect_of(encode(replace(TRAILER, fingerprint=bytes(32)))),
        defect_of(encode(replace(TRAILER, payload_bytes=1))),
        defect_of(encode(replace(TRAILER, span=BlockSpan(0, 1)))),
    }
    assert found == set(Defect) - {Defect.CHECKSUM}, "that needs the payload"


@given(st.integers(0, 1 << 40))
def test_sizes_are_rounded_up_to_pages(size: int) -> None:
    assert padded(size) % PAGE == 0
    assert 0 <= padded(size) - size < PAGE
    assert file_bytes(size) == padded(size) + PAGE


@given(st.binary(min_size=2, max_size=64))
def test_chunk_names_are_hex_in_one_of_4096_directories(key: bytes) -> None:
    path = ChunkPaths(Path("/data/rank-0000")).final(key)
    match = re.fullmatch(r"/data/rank-0000/([0-9a-f]{3})/([0-9a-f]+)\.kv", path)
    assert match
    assert bytes.fromhex(match[2]) == key
    assert match[2].startswith(match[1])


@given(st.binary(min_size=65, max_size=KEY_BYTES_MAX))
def test_long_keys_are_named_by_their_digest(key: bytes) -> None:
    path = ChunkPaths(Path("root")).final(key)
    assert re.fullmatch(r"root/([0-9a-f]{3})/\1[0-9a-f]{61}\.kv", path)


@given(st.lists(st.binary(min_size=2, max_size=100), unique=True, min_size=2, max_size=5))
def test_chunk_names_differ_as_keys_do(keys: list[bytes]) -> None:
    paths = ChunkPaths(Path("root"))
    assert len({paths.final(key) for key in keys}) == len(keys)


def test_temporary_names_lie_next_to_the_final_one_and_cannot_be_taken_for_one() -> None:
    final = ChunkPaths(Path("/data")).final(b"\xab\xcd")
    names = {
        temporary_name(final, writer, number) for writer in ("aa", "ab") for number in (1, 2, 12)
    }
    assert len(names) == 6
    for name in names:
        assert Path(name).parent == Path(final).parent
        assert Path(name).name.startswith(".")
        assert not name.endswith(SUFFIX)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("/models/my model/", "my_model"),
        ("../..", "model"),
        ("", "model"),
        ("a/.hidden", "hidden"),
        ("x" * 300, "x" * 64),
        ("модель", "_"),
    ],
)
def test_a_models_directory_is_readable_and_safe(model: str, name: str) -> None:
    fingerprint = bytes.fromhex("00112233445566778899" + "aa" * 22)
    directory = model_directory(Path("/data"), model, fingerprint)
    assert directory == Path(f"/data/{name}-0011223344556677")


def test_ranks_have_directories_of_their_own() -> None:
    assert rank_directory(Path("m"), 3) == Path("m/rank-0003")
    assert rank_directory(Path("m"), 12345) == Path("m/rank-12345")
