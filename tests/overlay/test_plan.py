# SPDX-License-Identifier: Apache-2.0
"""Jobs are split so that no block is ever attached to the wrong place of the wrong chunk."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.plan", reason="needs the patched vLLM")

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, make_offload_key

from pykvcache.geometry import ChunkGeometry, PageReference
from pykvcache.layout import BlockSpan, file_bytes
from pykvcache.transfer.jobs import Direction
from vllm.v1.kv_offload.pykvcache.plan import ChunkSpec, PlanError, Planner

PAGES = ((PageReference(0, 1000), PageReference(1, 500)), (PageReference(2, 3000),))
BLOCK_BYTES = (1500, 3000)


def planner(blocks_per_chunk: int, group_ids: tuple[int, ...] = (0, 1)) -> Planner:
    geometry = ChunkGeometry(PAGES[: len(group_ids)], blocks_per_chunk)
    return Planner(geometry, group_ids, lambda key: f"/{key.hex()}")


def key(chunk: int, group: int = 0) -> OffloadKey:
    return make_offload_key(chunk.to_bytes(32, "big"), group)


def keys(*chunks: int, group: int = 0) -> list[OffloadKey]:
    return [key(chunk, group) for chunk in chunks]


def device(*groups: tuple[int, list[int]]) -> GPULoadStoreSpec:
    """For each group, the index of its first block and its block ids."""
    return GPULoadStoreSpec(
        [block for _, blocks in groups for block in blocks],
        group_sizes=[len(blocks) for _, blocks in groups],
        block_indices=[first for first, _ in groups],
    )


def split(
    planner: Planner, direction: Direction, wanted: list[OffloadKey], blocks: GPULoadStoreSpec
) -> list[tuple[OffloadKey, BlockSpan, tuple[int, ...]]]:
    chunks = planner.split(direction, ChunkSpec(tuple(wanted)), blocks)
    return [(OffloadKey(chunk.key), chunk.span, chunk.block_ids) for chunk in chunks]


def test_whole_chunks_of_two_groups() -> None:
    wanted = keys(0, 1) + keys(1, group=1)
    blocks = device((0, [11, 12, 13, 14]), (2, [21, 22]))

    chunks = planner(2).split(Direction.STORE, ChunkSpec(tuple(wanted)), blocks)

    assert [chunk.key for chunk in chunks] == wanted
    assert [chunk.block_ids for chunk in chunks] == [(11, 12), (13, 14), (21, 22)]
    assert [chunk.group for chunk in chunks] == [0, 0, 1]
    assert [chunk.span for chunk in chunks] == [BlockSpan(0, 2)] * 3
    assert [chunk.copy_bytes for chunk in chunks] == [3000, 3000, 6000]
    assert [chunk.payload_bytes for chunk in chunks] == [3000, 3000, 6000]
    assert [chunk.file_bytes for chunk in chunks] == [*[file_bytes(3000)] * 2, file_bytes(6000)]
    assert [chunk.path for chunk in chunks] == [f"/{each.hex()}" for each in wanted]


def test_the_geometry_counts_groups_and_the_keys_name_them() -> None:
    """vLLM leaves groups out that cannot be offloaded, and numbers the others as before."""
    wanted = keys(0, group=3) + keys(0, group=1)

    chunks = planner(1, (1, 3)).split(
        Direction.LOAD, ChunkSpec(tuple(wanted)), device((0, [5]), (0, [6]))
    )

    assert [(chunk.key, chunk.group, chunk.block_ids) for chunk in chunks] == [
        (key(0, 1), 0, (5,)),
        (key(0, 3), 1, (6,)),
    ]


def test_a_load_starts_and_ends_inside_chunks() -> None:
    """Blocks 0 to 4 are computed; the hit ends with block 9. Chunks hold four."""
    found = split(
        planner(4, (0,)), Direction.LOAD, keys(1, 2), device((5, [105, 106, 107, 108, 109]))
    )
    assert found == [
        (key(1), BlockSpan(1, 3), (105, 106, 107)),
        (key(2), BlockSpan(0, 2), (108, 109)),
    ]


def test_a_load_within_one_chunk() -> None:
    found = split(planner(8, (0,)), Direction.LOAD, keys(0), device((2, [7, 8, 9])))
    assert found == [(key(0), BlockSpan(2, 3), (7, 8, 9))]


def test_a_window_gave_up_the_first_blocks_of_a_store() -> None:
    found = split(planner(4, (0,)), Direction.STORE, keys(3, 4), device((14, [1, 2, 3, 4, 5, 6])))
    assert found == [(key(3), BlockSpan(2, 2), (1, 2)), (key(4), BlockSpan(0, 4), (3, 4, 5, 6))]


def test_recurrent_state_is_the_last_block_of_its_chunk() -> None:
    """vLLM stores such a state alone, with all other groups empty."""
    found = split(planner(4), Direction.STORE, keys(2, group=1), device((0, []), (11, [77])))
    assert found == [(key(2, 1), BlockSpan(3, 1), (77,))]


def test_chunks_of_a_store_need_not_follow_each_other() -> None:
    """Those in between are held already, or out of reach of any window."""
    found = split(planner(2, (0,)), Direction.STORE, keys(1, 7), device((2, [4, 5, 16, 17])))
    assert found == [(key(1), BlockSpan(0, 2), (4, 5)), (key(7), BlockSpan(0, 2), (16, 17))]


@pytest.mark.parametrize("direction", Direction)
def test_a_job_of_nothing(direction: Direction) -> None:
    assert split(planner(4), direction, [], device((0, []), (0, []))) == []


@pytest.mark.parametrize(
    ("direction", "wanted", "blocks"),
    [
        pytest.param(Direction.LOAD, keys(0), [1, 2, 3, 4, 5], id="more blocks than chunks"),
        pytest.param(Direction.LOAD, keys(0, 1), [1, 2, 3, 4], id="more chunks than blocks"),
        pytest.param(Direction.LOAD, [], [1], id="no key"),
        pytest.param(Direction.LOAD, keys(0), [], id="no block"),
        pytest.param(Direction.LOAD, keys(0), [1, 2, 0, 4], id="load into the null block"),
        pytest.param(Direction.STORE, keys(0), [1, 2, 0, 4], id="store of the null block"),
        pytest.param(Direction.STORE, keys(0), [1, 2, 3], id="store that ends inside a chunk"),
        pytest.param(Direction.STORE, keys(0, 1), [1, 2, 3, 4, 5, 6], id="gap in a second chunk"),
        pytest.param(Direction.STORE, keys(0, 1, 2), list(range(1, 9)), id="gaps of a whole chunk"),
        pytest.param(Direction.LOAD, keys(0, group=1), [1, 2, 3, 4], id="key of another group"),
    ],
)
def test_a_job_whose_keys_and_blocks_do_not_match_is_refused(
    direction: Direction, wanted: list[OffloadKey], blocks: list[int]
) -> None:
    with pytest.raises(PlanError, match="group 0"):
        split(planner(4, (0,)), direction, wanted, device((0, blocks)))


@st.composite
def window_stores(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[int]]]]:
    """Chunks that vLLM stores for a windowed group: each with its index and blocks, 0 where a
    block was given up. vLLM offers a chunk only with its last block."""
    whole = draw(st.integers(1, 5))
    indices = sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=5)))
    chunks = []
    for index in indices:
        kept = draw(st.lists(st.booleans(), min_size=whole - 1, max_size=whole - 1))
        blocks = [100 * index + i + 1 for i in range(whole)]
        chunks.append((index, [b if k else 0 for b, k in zip(blocks, [*kept, True], strict=True)]))
    return whole, chunks


@given(window_stores())
def test_whatever_blocks_a_window_lost_none_lands_in_a_wrong_place(
    store: tuple[int, list[tuple[int, list[int]]]],
) -> None:
    whole, chunks = store
    held = [
        (index * whole + place, block)
        for index, blocks in chunks
        for place, block in enumerate(blocks)
        if block
    ]
    spec = device((held[0][0], [block for _, block in held]))
    try:
        found = split(
            planner(whole, (0,)), Direction.STORE, [key(index) for index, _ in chunks], spec
        )
    except PlanError:
        lost_at_the_start = chunks[0][1].index(held[0][1])
        assert any(
            0 in blocks[lost_at_the_start if n == 0 else 0 :]
            for n, (_, blocks) in enumerate(chunks)
        ), "a store without gaps was refused"
        return
    assert [each for each, _, _ in found] == [key(index) for index, _ in chunks]
    for (_, span, block_ids), (_, blocks) in zip(found, chunks, strict=True):
        assert list(block_ids) == blocks[span.first : span.end]
        assert not any(blocks[: span.first])
        assert span.end == whole
