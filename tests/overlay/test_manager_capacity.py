# SPDX-License-Identifier: Apache-2.0
"""What the manager does with a root that has limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.manager", reason="needs the patched vLLM")

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

from pykvcache.capacity.admission import Room
from pykvcache.capacity.budget import Usage
from pykvcache.capacity.keeper import Chunks, Figures, Keeper
from pykvcache.config import Config
from vllm.v1.kv_offload.pykvcache import metrics
from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager

CHUNK_BYTES = 100


def key(chunk: int) -> OffloadKey:
    return make_offload_key(chunk.to_bytes(32, "big"), 0)


class FakeKeeper:
    """Says what it is told to, and remembers what it was told."""

    def __init__(self) -> None:
        self.figures = Figures()
        self.room = Room(1, 10_000)
        self.touched: list[list[tuple[bytes, int]]] = []
        self.stopped = False

    def touch(self, chunks: Chunks) -> None:
        self.touched.append(list(chunks))

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def keeper() -> FakeKeeper:
    return FakeKeeper()


@pytest.fixture
def manager(tmp_path: Path, keeper: FakeKeeper) -> PyKVCacheManager:
    directories = [tmp_path / "rank-0000"]
    options = Config(root=tmp_path)
    return PyKVCacheManager(options, directories, None, cast(Keeper, keeper), CHUNK_BYTES)


@pytest.fixture
def request_of_three() -> ReqContext:
    context = ReqContext("request")
    for chunk in range(3):
        context.set_offload_key_position(key(chunk), 256 * (chunk + 1))
    return context


def stats_of(manager: PyKVCacheManager) -> dict[str, Any]:
    stats = manager.get_stats()
    return stats.data if stats is not None else {}


def test_a_full_root_refuses_stores_and_counts_them(
    manager: PyKVCacheManager, keeper: FakeKeeper
) -> None:
    request = ReqContext("request")
    keeper.room = Room(1, 0)
    output = manager.prepare_store([key(1), key(2)], request)
    assert output is not None and list(output.keys_to_store) == []
    assert metrics.REFUSED in str(stats_of(manager))
    keeper.room = Room(2, 10_000)
    output = manager.prepare_store([key(1), key(2)], request)
    assert output is not None and list(output.keys_to_store) == [key(1), key(2)]


def test_a_look_admits_a_quarter_of_the_room_from_the_start_of_the_prefix(
    manager: PyKVCacheManager, keeper: FakeKeeper
) -> None:
    """Counting what is being stored and what has been since, until the next look."""
    request = ReqContext("request")
    keeper.room = Room(1, 12 * CHUNK_BYTES)
    first = manager.prepare_store([key(chunk) for chunk in range(2)], request)
    second = manager.prepare_store([key(chunk) for chunk in range(2, 5)], request)
    assert first is not None and list(first.keys_to_store) == [key(0), key(1)]
    assert second is not None and list(second.keys_to_store) == [key(2)]
    manager.complete_store([key(0), key(1), key(2)], request)
    third = manager.prepare_store([key(3)], request)
    assert third is not None and list(third.keys_to_store) == []
    keeper.room = Room(3, 40 * CHUNK_BYTES)
    fourth = manager.prepare_store([key(chunk) for chunk in range(3, 20)], request)
    assert fourth is not None and list(fourth.keys_to_store) == [key(c) for c in range(3, 10)]


def test_the_whole_prefix_is_touched_when_it_is_used(
    manager: PyKVCacheManager, keeper: FakeKeeper, request_of_three: ReqContext
) -> None:
    prefix = [(bytes(key(chunk)), 256 * (chunk + 1)) for chunk in range(3)]
    manager.prepare_load([key(2)], request_of_three)
    manager.complete_store([key(2)], request_of_three)
    manager.on_request_finished(request_of_three)
    assert keeper.touched == [prefix] * 3


def test_a_failed_store_touches_nothing(
    manager: PyKVCacheManager, keeper: FakeKeeper, request_of_three: ReqContext
) -> None:
    manager.complete_store([key(2)], request_of_three, success=False)
    assert keeper.touched == []


def test_figures_become_metrics_once(manager: PyKVCacheManager, keeper: FakeKeeper) -> None:
    stats_of(manager)
    usage = Usage(files=3, size=300, pinned=100, free=1, at_s=0.0, seconds=0.0)
    keeper.figures = Figures(usage, 1000, False, evicted_files=2, evicted_size=200)
    text = str(stats_of(manager))
    for name in (metrics.ROOT_BYTES, metrics.ROOT_LIMIT, metrics.EVICTED_FILES):
        assert name in text
    assert stats_of(manager) == {}


def test_every_name_is_defined() -> None:
    defined = metrics.metric_definitions()
    names = {name for name in vars(metrics).values() if isinstance(name, str)}
    assert {name for name in names if name.startswith("vllm:kv_offload_")} == set(defined)


def test_shutdown_ends_the_keeper(manager: PyKVCacheManager, keeper: FakeKeeper) -> None:
    manager.shutdown()
    assert keeper.stopped
