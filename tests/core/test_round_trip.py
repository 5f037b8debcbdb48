# SPDX-License-Identifier: Apache-2.0
"""Tensors to files and back: the reactor with real engines, files and CPU copies."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pykvcache.geometry import ChunkGeometry, PageReference
from pykvcache.layout import PAGE, BlockSpan, ChunkPaths, padded
from pykvcache.pool import Pool
from pykvcache.reactor.copier import Copier
from pykvcache.reactor.device import make_copier
from pykvcache.reactor.engine import IoEngine
from pykvcache.reactor.reactor import Reactor
from pykvcache.reactor.threads import ThreadsEngine
from pykvcache.reactor.uring import UringEngine
from pykvcache.transfer.core import Limits
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure, Job, JobResult
from tests.core.fakes import WAIT_S, wait_until

BLOCKS = 40
BLOCKS_PER_CHUNK = 4
LAYERS = 3
PAGE_BYTES = 1000
OTHER_PAGE_BYTES = 3000
"""Neither divides the file's page: payloads need padding."""

GEOMETRY = ChunkGeometry(
    groups=(
        tuple(PageReference(layer, PAGE_BYTES) for layer in range(LAYERS)),
        (PageReference(LAYERS, OTHER_PAGE_BYTES),),
    ),
    blocks_per_chunk=BLOCKS_PER_CHUNK,
)
WHOLE = BlockSpan(0, BLOCKS_PER_CHUNK)


def layers_after_each_other() -> list[torch.Tensor]:
    """One storage, ``(layer, block, page)``: equal gaps between the layers."""
    storage = torch.zeros((LAYERS, BLOCKS, PAGE_BYTES), dtype=torch.int8)
    return list(storage)


def layers_in_each_block() -> list[torch.Tensor]:
    """One storage, ``(block, layer, page)``: rows are strided."""
    storage = torch.zeros((BLOCKS, LAYERS, PAGE_BYTES), dtype=torch.int8)
    return [storage[:, layer] for layer in range(LAYERS)]


def layers_apart() -> list[torch.Tensor]:
    """A storage for each layer."""
    return [torch.zeros((BLOCKS, PAGE_BYTES), dtype=torch.int8) for _ in range(LAYERS)]


def layers_padded() -> list[torch.Tensor]:
    """Rows longer than the page, and unequal gaps."""
    storage = torch.zeros((LAYERS + 1, BLOCKS, PAGE_BYTES + 24), dtype=torch.int8)
    return [storage[layer, :, :PAGE_BYTES] for layer in (0, 1, 3)]


LAYOUTS = [layers_after_each_other, layers_in_each_block, layers_apart, layers_padded]


def uring(buffers: Sequence[memoryview]) -> IoEngine:
    return UringEngine(buffers, direct=False)


def threads(buffers: Sequence[memoryview]) -> IoEngine:
    return ThreadsEngine(buffers, direct=False, workers=2)


ENGINES = [threads, uring]


@dataclass
class Cache:
    """KV cache tensors, and a reactor between them and files."""

    tensors: list[torch.Tensor]
    reactor: Reactor
    paths: ChunkPaths
    job_ids: Iterator[int]

    def chunk(
        self, name: str, block_ids: Sequence[int], group: int = 0, first: int = 0
    ) -> ChunkTransfer:
        key = name.encode() + bytes([group])
        return ChunkTransfer(
            key=key,
            path=self.paths.final(key),
            payload_bytes=GEOMETRY.payload_bytes[group],
            file_bytes=GEOMETRY.file_bytes[group],
            span=BlockSpan(first, len(block_ids)),
            group=group,
            block_ids=tuple(block_ids),
            copy_bytes=GEOMETRY.block_bytes[group] * len(block_ids),
        )

    def transfer(self, direction: Direction, *chunks: ChunkTransfer) -> JobResult:
        """Run one job to its end."""
        self.reactor.submit(Job(next(self.job_ids), direction, chunks, self.reactor.fence()))
        results: list[JobResult] = []

        def has_ended() -> bool:
            results.extend(self.reactor.take_results())
            return bool(results)

        wait_until(has_ended, "the job does not end")
        (result,) = results
        return result

    def pages(self, chunk: ChunkTransfer) -> list[torch.Tensor]:
        """What the chunk's device blocks hold: one tensor for each reference."""
        references = GEOMETRY.groups[chunk.group]
        return [self.tensors[page.tensor][list(chunk.block_ids)].clone() for page in references]

    def scramble(self, seed: int) -> None:
        """Fill the cache with other bytes."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors:
            fresh = torch.randint(-128, 128, tensor.shape, dtype=torch.int8, generator=generator)
            tensor.copy_(fresh)


@pytest.fixture(params=ENGINES, ids=lambda engine: engine.__name__)
def open_cache(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[Callable[[], list[torch.Tensor]]], Cache]]:
    reactors: list[Reactor] = []

    def open_one(layout: Callable[[], list[torch.Tensor]]) -> Cache:
        tensors = [*layout(), torch.zeros((BLOCKS, OTHER_PAGE_BYTES), dtype=torch.int8)]
        pool = Pool(6, GEOMETRY.slot_bytes)
        pool.memory[:] = b"\xee" * pool.size  # what other chunks left behind
        copier: Copier = make_copier(tensors, GEOMETRY, pool, None)
        limits = Limits(io_depth=2, open_lookahead=4, load_deadline_s=1000.0, jobs_max=100)
        reactor = Reactor(
            limits, pool, request.param, copier, fingerprint=bytes(32), writer=f"{len(reactors)}"
        )
        try:
            reactor.start()
        except OSError as error:
            pytest.skip(f"no {request.param.__name__} engine here: {error}")
        reactors.append(reactor)
        cache = Cache(tensors, reactor, ChunkPaths(tmp_path / "rank-0000"), itertools.count(1))
        cache.scramble(seed=1)
        return cache

    (tmp_path / "rank-0000").mkdir()
    yield open_one
    for reactor in reactors:
        reactor.stop(WAIT_S)
        assert not reactor._thread.is_alive()
        assert reactor.gauges.slots_in_use == 0
    assert not list(tmp_path.rglob(".*.tmp"))


OpenCache = Callable[[Callable[[], list[torch.Tensor]]], Cache]


def all_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_come_back_into_other_blocks(
    open_cache: OpenCache, layout: Callable[[], list[torch.Tensor]]
) -> None:
    cache = open_cache(layout)
    scattered = random.Random(7).sample(range(BLOCKS), BLOCKS)
    pieces = [scattered[start : start + BLOCKS_PER_CHUNK] for start in range(0, 24, 4)]
    stored = [
        cache.chunk(f"chunk{index}", piece, group=index % 2) for index, piece in enumerate(pieces)
    ]
    expected = [cache.pages(chunk) for chunk in stored]
    result = cache.transfer(Direction.STORE, *stored)
    assert result.success
    assert result.copied_bytes == sum(chunk.copy_bytes for chunk in stored)

    cache.scramble(seed=2)
    untouched = set(range(BLOCKS)) - set(scattered[:24])
    before = [tensor[sorted(untouched)].clone() for tensor in cache.tensors]
    loaded = [
        cache.chunk(f"chunk{index}", piece, group=index % 2)
        for index, piece in enumerate(reversed(pieces))
    ]
    assert cache.transfer(Direction.LOAD, *loaded).success
    for chunk, pages in zip(loaded, expected, strict=True):
        assert all_equal(cache.pages(chunk), pages)
    after = [tensor[sorted(untouched)] for tensor in cache.tensors]
    assert all_equal(before, after), "no other block is written"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_part_of_a_chunk(open_cache: OpenCache, layout: Callable[[], list[torch.Tensor]]) -> None:
    cache = open_cache(layout)
    whole = cache.chunk("whole", [9, 3, 30, 21])
    pages = cache.pages(whole)
    assert cache.transfer(Direction.STORE, whole).success
    cache.scramble(seed=2)
    part = cache.chunk("whole", [17, 5], first=1)
    assert cache.transfer(Direction.LOAD, part).success
    assert all_equal(cache.pages(part), [page[1:3] for page in pages])


def test_a_chunk_stored_in_part_holds_that_part_and_no_other_bytes(
    open_cache: OpenCache,
) -> None:
    cache = open_cache(layers_apart)
    part = cache.chunk("part", [8, 2], first=2)
    pages = cache.pages(part)
    assert cache.transfer(Direction.STORE, part).success
    file = Path(part.path).read_bytes()
    payload = b"".join(bytes(2 * PAGE_BYTES) + page.numpy().tobytes() for page in pages)
    assert file[: part.payload_bytes] == payload
    assert file[part.payload_bytes : padded(part.payload_bytes)] == bytes(
        padded(part.payload_bytes) - part.payload_bytes
    )
    assert len(file) == part.file_bytes
    wait_until(lambda: os.stat(part.path).st_nlink == 1, "the temporary name is not removed")

    cache.scramble(seed=2)
    again = cache.chunk("part", [30, 31], first=2)
    assert cache.transfer(Direction.LOAD, again).success
    assert all_equal(cache.pages(again), pages)

    wanted = cache.chunk("part", [1, 2, 3, 4])
    before = cache.pages(wanted)
    result = cache.transfer(Direction.LOAD, wanted)
    assert result.failures == {wanted.key: Failure.WRONG_CONTENT}
    assert all_equal(cache.pages(wanted), before)
    wait_until(lambda: not Path(part.path).exists(), "a whole chunk could never be stored there")


def test_the_last_page_protects_what_is_loaded(open_cache: OpenCache) -> None:
    cache = open_cache(layers_apart)
    chunk = cache.chunk("a", [0, 1, 2, 3])
    assert cache.transfer(Direction.STORE, chunk).success
    damaged = bytearray(Path(chunk.path).read_bytes())
    damaged[-PAGE + 60] ^= 1
    Path(chunk.path).write_bytes(damaged)
    cache.scramble(seed=2)
    before = cache.pages(chunk)
    result = cache.transfer(Direction.LOAD, chunk)
    assert result.failures == {chunk.key: Failure.TRAILER}
    assert all_equal(cache.pages(chunk), before)


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("place", ["first", "last", "padding"])
def test_a_damaged_payload_reaches_no_block(open_cache: OpenCache, group: int, place: str) -> None:
    cache = open_cache(layers_apart)
    chunk = cache.chunk("a", [0, 1, 2, 3], group)
    assert cache.transfer(Direction.STORE, chunk).success
    damaged = bytearray(Path(chunk.path).read_bytes())
    damaged[{"first": 0, "last": chunk.payload_bytes - 1, "padding": -PAGE - 1}[place]] ^= 4
    Path(chunk.path).write_bytes(damaged)
    cache.scramble(seed=2)
    before = cache.pages(chunk)
    result = cache.transfer(Direction.LOAD, chunk)
    assert result.failures == {chunk.key: Failure.CHECKSUM}
    assert all_equal(cache.pages(chunk), before)
    wait_until(lambda: not Path(chunk.path).exists(), "it would stay a miss for ever")
    assert cache.transfer(Direction.STORE, chunk).present == 0
    assert cache.transfer(Direction.LOAD, chunk).success


def test_files_that_vanish_or_are_cut_or_cannot_be_read(open_cache: OpenCache) -> None:
    cache = open_cache(layers_apart)
    chunks = [
        cache.chunk(name, list(range(4 * index, 4 * index + 4)))
        for index, name in enumerate(("good", "gone", "cut", "directory", "link"))
    ]
    assert cache.transfer(Direction.STORE, *chunks).success
    good, gone, cut, directory, link = (Path(chunk.path) for chunk in chunks)
    gone.unlink()
    os.truncate(cut, cut.stat().st_size // 2)
    directory.unlink()
    directory.mkdir()
    link.unlink()
    link.symlink_to(good)
    result = cache.transfer(Direction.LOAD, *chunks)
    assert [result.failures.get(chunk.key) for chunk in chunks] == [
        None,
        Failure.NOT_FOUND,
        Failure.SHORT_TRANSFER,
        Failure.WRONG_CONTENT,
        Failure.PERMISSION,
    ]


def test_two_servers_store_the_same_chunk(open_cache: OpenCache) -> None:
    first, second = open_cache(layers_apart), open_cache(layers_in_each_block)
    chunk = first.chunk("shared", [5, 4, 3, 2])
    pages = first.pages(chunk)
    assert first.transfer(Direction.STORE, chunk).present == 0
    assert second.transfer(Direction.STORE, second.chunk("shared", [0, 1, 2, 3])).present == 1
    loaded = second.chunk("shared", [9, 8, 7, 6])
    assert second.transfer(Direction.LOAD, loaded).success
    assert all_equal(second.pages(loaded), pages), "first writer wins, and layouts agree"
