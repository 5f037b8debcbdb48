# SPDX-License-Identifier: Apache-2.0
"""Where the pages of a chunk lie."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pykvcache.geometry import ChunkGeometry, PageReference
from pykvcache.layout import PAGE

references = st.builds(PageReference, st.integers(0, 99), st.integers(1, 1 << 20))
geometries = st.builds(
    ChunkGeometry,
    st.lists(st.lists(references, min_size=1, max_size=6).map(tuple), min_size=1, max_size=4).map(
        tuple
    ),
    st.integers(1, 64),
)


def test_sizes_and_offsets_of_two_groups() -> None:
    geometry = ChunkGeometry(
        groups=(
            (PageReference(0, 1000), PageReference(1, 1000), PageReference(2, 50)),
            (PageReference(3, 4096),),
        ),
        blocks_per_chunk=4,
    )
    assert geometry.block_bytes == (2050, 4096)
    assert geometry.payload_bytes == (8200, 16384)
    assert geometry.offsets(0) == (0, 4000, 8000)
    assert geometry.offsets(1) == (0,)
    assert geometry.file_bytes == (3 * PAGE + PAGE, 16384 + PAGE)
    assert geometry.slot_bytes == 16384 + PAGE


@given(geometries)
def test_pages_fill_the_payload_without_gap_or_overlap(geometry: ChunkGeometry) -> None:
    for group, pages in enumerate(geometry.groups):
        end = 0
        for offset, page in zip(geometry.offsets(group), pages, strict=True):
            assert offset == end
            end += page.page_bytes * geometry.blocks_per_chunk
        assert end == geometry.payload_bytes[group]


@given(geometries)
def test_a_slot_holds_the_file_of_any_group_in_whole_pages(geometry: ChunkGeometry) -> None:
    assert geometry.slot_bytes % PAGE == 0
    for payload_bytes, file_bytes in zip(geometry.payload_bytes, geometry.file_bytes, strict=True):
        assert file_bytes % PAGE == 0
        assert payload_bytes + PAGE <= file_bytes < payload_bytes + 2 * PAGE
        assert file_bytes <= geometry.slot_bytes
