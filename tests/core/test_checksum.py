# SPDX-License-Identifier: Apache-2.0
"""The checksum of payloads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pykvcache.checksum import checksum


def test_it_is_the_one_that_files_have() -> None:
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum(b"", b"") == checksum(b"")
    assert len(checksum(bytes(1 << 20))) == 16


@given(st.binary(max_size=5000), st.integers(0, 5000))
def test_parts_count_as_the_whole(data: bytes, cut: int) -> None:
    assert checksum(data[:cut], memoryview(data)[cut:]) == checksum(data)


@given(st.binary(min_size=1, max_size=5000), st.data())
def test_whichever_bit_is_flipped(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert checksum(flipped) != checksum(data)
