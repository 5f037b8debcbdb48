# SPDX-License-Identifier: Apache-2.0
"""This backend as a secondary tier, under vLLM's real manager of tiers."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.tier", reason="needs the patched vLLM")

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from pykvcache.errors import ConfigError
from pykvcache.layout import PAGE
from pykvcache.reactor.reactor import Reactor
from tests.overlay.small_tiering import (
    ROW_BYTES,
    ROWS,
    Tiering,
    job_of,
    key_of,
    make_tier,
    tier_spec,
    tiering,
)
from vllm.v1.kv_offload.pykvcache import preload
from vllm.v1.kv_offload.pykvcache.metrics import (
    CHUNKS,
    DROPPED,
    FAILURES,
    FILE_BYTES,
    REFUSED,
    TIER_METRICS,
)
from vllm.v1.kv_offload.pykvcache.tier import PyKVCacheTier

HIT, MISS = LookupResult.HIT, LookupResult.MISS
RETRY, PENDING = LookupResult.RETRY, LookupResult.HIT_PENDING

PROMOTED_MAX = 6
"""Of eight rows a quarter is kept from promotions."""

BAD = 1 << 60
"""Its file is in another directory than those of small numbers."""


def content(key: OffloadKey) -> bytes:
    return (key * ROW_BYTES)[:ROW_BYTES]


def contents(*numbers: int) -> dict[OffloadKey, bytes]:
    return {key_of(number): content(key_of(number)) for number in numbers}


def files(root: Path) -> dict[str, Path]:
    """By the key in their names, in hex."""
    return {path.stem: path for path in root.rglob("*.kv")}


def store(root: Path, *numbers: int) -> list[OffloadKey]:
    """Have a server write chunks, one by one, and stop."""
    with tiering(root) as server:
        server.arrive("writer")
        for number in numbers:
            server.store("writer", contents(number))
            server.step("writer")
    return [key_of(number) for number in numbers]


def counts(tier: PyKVCacheTier) -> dict[str, dict[tuple[str, ...], float]]:
    stats = tier.get_stats()
    return {} if stats is None else stats.data["data"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def server(root: Path) -> Iterator[Tiering]:
    with tiering(root) as small:
        yield small


# --- there and back


def test_what_one_server_stored_another_one_loads(root: Path) -> None:
    keys = store(root, 1, 2, 3)
    with tiering(root) as server:
        server.arrive("reader")
        assert server.look_up("reader", [*keys, key_of(4)]) == [PENDING] * 3 + [MISS]
        server.step()
        assert server.look_up("reader", keys) == [HIT] * 3
        assert server.load("reader", keys) == [content(key) for key in keys]
        source = server.manager.get_load_source(keys[0], ReqContext("reader"))
        assert source is CacheHitSource.DISK


def test_files_hold_a_row_and_its_trailer_page(root: Path) -> None:
    keys = store(root, 1, 2)
    assert set(files(root)) == {key.hex() for key in keys}
    for key in keys:
        data = files(root)[key.hex()].read_bytes()
        assert data[:ROW_BYTES] == content(key)
        assert len(data) == ROW_BYTES + PAGE


def test_what_is_there_is_not_written_again(root: Path) -> None:
    keys = store(root, 1, 2)
    before = {name: path.stat().st_ino for name, path in files(root).items()}
    with tiering(root) as server:
        server.arrive("writer")
        server.store("writer", contents(1, 2, 3))
        server.step("writer")
        written = counts(server.tier)[FILE_BYTES]
    after = {name: path.stat().st_ino for name, path in files(root).items()}
    assert {name: after[name] for name in before} == before
    assert written == {("store",): ROW_BYTES + PAGE}
    assert len(after) == len(keys) + 1


def test_memory_that_is_no_whole_pages_is_read_with_buffered_io(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = bytearray(b"abcd" * 100)
    tier = make_tier(memoryview(memory).cast("B", (4, 100)), root)
    tier.submit_store(job_of(1, [key_of(1)], [1]))
    tier.drain_jobs()
    memory[:] = bytes(400)
    tier.submit_load(job_of(2, [key_of(1)], [3], promotion=True))
    tier.drain_jobs()
    assert [result.success for result in tier.get_finished_jobs()] == [True, True]
    assert bytes(memory) == bytes(300) + b"abcd" * 25
    tier.shutdown()


def test_direct_io_alone_is_refused_for_such_memory(root: Path) -> None:
    memory = memoryview(bytearray(400)).cast("B", (4, 100))
    with pytest.raises(ConfigError, match=r"'direct_io' is 'on', but .* 'auto' or 'off'"):
        make_tier(memory, root, direct_io="on")


# --- what fails


def test_a_file_that_has_gone_is_a_miss_and_the_others_are_loaded(root: Path) -> None:
    keys = store(root, 1, 2, 3)
    with tiering(root) as server:
        server.arrive("reader")
        assert server.look_up("reader", keys) == [PENDING] * 3
        files(root)[keys[1].hex()].unlink()
        server.step()
        assert server.look_up("reader", keys) == [HIT, MISS, HIT]
        assert server.load("reader", [keys[0], keys[2]]) == [content(keys[0]), content(keys[2])]
        assert counts(server.tier)[FAILURES] == {("load", "not_found"): 1}


@pytest.mark.parametrize("damage", ["truncated", "another chunk's"])
def test_a_bad_file_is_a_miss(root: Path, damage: str) -> None:
    keys = store(root, 1, 2)
    path, other = (files(root)[key.hex()] for key in keys)
    if damage == "truncated":
        os.truncate(path, PAGE)
    else:
        path.unlink()
        os.link(other, path)
    with tiering(root) as server:
        server.arrive("reader")
        assert server.fetch("reader", keys) == [MISS, HIT]
    assert keys[0].hex() not in files(root), "it would stay a miss for ever"
    assert keys[1].hex() in files(root)


def test_a_store_that_fails_is_a_miss_and_no_event(root: Path) -> None:
    spec = tier_spec(events=True)
    with tiering(root, spec=spec, enable_kv_events=True) as server:
        bad, good = key_of(BAD), key_of(2)
        place = Path(server.tier._paths.final(bad)).parent
        assert place != Path(server.tier._paths.final(good)).parent
        place.touch()  # where its directory would be
        server.arrive("writer")
        server.store("writer", contents(BAD, 2))
        server.step("writer")
        (event,) = server.tier.take_events()
        assert event.keys == [good]
        server.reset()
        assert server.fetch("writer", [bad, good]) == [MISS, HIT]


def test_a_row_that_does_not_exist_fails_its_chunk_alone(server: Tiering) -> None:
    keys = [key_of(1), key_of(2)]
    for job_id, promotion in ((100, False), (101, True)):
        job = job_of(job_id, keys, [0, ROWS], promotion=promotion)
        (server.tier.submit_load if promotion else server.tier.submit_store)(job)
        server.settle()
    for result in server.tier.get_finished_jobs():
        assert not result.success
        assert result.successful_keys == (keys[0],)


def test_a_full_root_takes_no_stores(root: Path) -> None:
    with tiering(root, free_space_min="100%") as server:
        server.arrive("writer")
        server.store("writer", contents(1, 2))
        server.settle()
        assert sum(counts(server.tier)[REFUSED].values()) == 2
    assert not list(root.rglob("*.kv"))


def test_stores_are_left_out_when_too_much_memory_waits_to_be_written(
    root: Path, server: Tiering
) -> None:
    jobs = [job_of(100 + n, [key_of(4 * n + at) for at in range(4)], range(4)) for n in range(3)]
    for job in jobs:  # nothing is collected between them
        server.tier.submit_store(job)
    server.settle()
    results = {result.job_id: result.success for result in server.tier.get_finished_jobs()}
    assert results == {100: True, 101: False, 102: False}
    assert len(files(root)) == PROMOTED_MAX
    dropped = counts(server.tier)[DROPPED]
    assert sum(dropped.values()) == 12 - PROMOTED_MAX


def test_what_was_left_out_can_be_stored_later(root: Path, server: Tiering) -> None:
    keys = [key_of(number) for number in range(ROWS)]
    server.tier.submit_store(job_of(100, keys, range(ROWS)))
    server.settle()
    assert len(files(root)) == PROMOTED_MAX
    server.tier.submit_store(job_of(101, keys[PROMOTED_MAX:], range(ROWS - PROMOTED_MAX)))
    server.settle()
    assert len(files(root)) == ROWS
    assert list(server.tier.get_finished_jobs())[-1].success


# --- who gets the memory


def test_the_queue_decides_who_is_promoted(root: Path) -> None:
    first, second = store(root, 1, 2, 3), store(root, 4, 5, 6)
    with tiering(root) as server:
        server.arrive("first", "second")
        server.tier.note_queue(["second", "first"])
        assert server.look_up("first", first) == [RETRY] * 3
        assert server.look_up("second", second) == [PENDING] * 3
        server.step()
        assert server.look_up("second", second) == [HIT] * 3
        assert server.look_up("first", first) == [PENDING] * 3, "there is room for both"


def test_the_hooks_show_the_tier_who_waits_for_its_turn_alone(root: Path) -> None:
    keys = store(root, 1, 2)
    with tiering(root, preload_lookahead=3) as server:
        scheduler: Any = SimpleNamespace(manager=server.manager)
        assert preload.lookahead_of(scheduler) == 3
        waiting: Any = [
            SimpleNamespace(request_id="held up", status=RequestStatus.WAITING_FOR_STREAMING_REQ),
            SimpleNamespace(request_id="second", status=RequestStatus.WAITING),
            SimpleNamespace(request_id="first", status=RequestStatus.PREEMPTED),
        ]
        preload.note_candidates(scheduler, None, waiting)
        server.arrive("first", "second")
        assert server.look_up("first", keys[:1]) == [RETRY]
        assert server.look_up("second", keys[1:]) == [PENDING]
        server.step()


def test_the_hooks_leave_other_tiers_alone(server: Tiering) -> None:
    manager = TieringOffloadingManager(server.manager.primary_tier, [])
    scheduler: Any = SimpleNamespace(manager=manager)
    assert preload.lookahead_of(scheduler) == 0
    preload.note_candidates(scheduler, None, [])


def test_a_request_for_which_there_is_no_room_waits_and_loses_nothing(root: Path) -> None:
    first, second = store(root, 1, 2, 3, 4), store(root, 5, 6, 7, 8)
    with tiering(root) as server:
        server.arrive("first", "second")
        server.tier.note_queue(["first", "second"])
        assert server.fetch("first", first) == [HIT] * 4
        for _ in range(3):
            assert server.look_up("second", second) == [RETRY] * 4
            server.step()
        assert server.load("first", first) == [content(key) for key in first]
        server.step("first")
        server.finish("first")
        assert server.fetch("second", second) == [HIT] * 4
        server.step("second")
        assert server.tier.promotions.rows_held == 0


def test_what_does_not_fit_at_once_is_recomputed(root: Path) -> None:
    keys = store(root, *range(ROWS))
    with tiering(root) as server:
        server.arrive("reader")
        assert server.fetch("reader", keys) == [HIT] * PROMOTED_MAX + [MISS] * 2


def test_an_aborted_request_holds_nothing(root: Path) -> None:
    keys = store(root, 1, 2)
    with tiering(root) as server:
        server.arrive("reader")
        assert server.look_up("reader", keys) == [PENDING] * 2
        server.finish("reader")
        assert server.tier.promotions.rows_held == 0
        server.step()


def test_reading_ahead_can_be_turned_off(root: Path) -> None:
    first, second = store(root, 1, 2), store(root, 3, 4)
    with tiering(root, preload_lookahead=0) as server:
        assert server.tier.lookahead == 1
        server.arrive("first", "second")
        server.tier.note_queue(["first"])
        assert server.fetch("first", first) == [HIT] * 2
        assert server.look_up("second", second) == [RETRY] * 2
        server.step("first")
        server.tier.note_queue(["second"])
        assert server.fetch("second", second) == [HIT] * 2


# --- reset and end


def test_a_reset_waits_for_transfers_and_keeps_files(root: Path, server: Tiering) -> None:
    server.arrive("writer")
    server.store("writer", contents(1, 2))
    server.reset()
    assert not server.tier._jobs
    assert server.tier.promotions.rows_busy == 0
    assert len(files(root)) == 2
    assert server.fetch("writer", [key_of(1), key_of(2)]) == [HIT] * 2


def test_a_reset_forgets_promotions_that_were_not_submitted(root: Path) -> None:
    keys = store(root, 1, 2)
    with tiering(root) as server:
        server.arrive("reader")
        assert server.look_up("reader", keys) == [PENDING] * 2
        server.reset()
        assert server.tier.promotions.rows_held == 0
        assert server.fetch("reader", keys) == [HIT] * 2


def test_shutdown_finishes_stores_and_lets_go_of_the_memory(root: Path) -> None:
    mapping = mmap.mmap(-1, ROWS * ROW_BYTES)
    view = memoryview(mapping).cast("B", (ROWS, ROW_BYTES))
    tier = make_tier(view, root)
    tier.submit_store(job_of(1, [key_of(1)], [0]))
    tier.shutdown()
    tier.shutdown()
    assert len(files(root)) == 1
    view.release()
    tier._primary_kv_view.release()
    mapping.close()


def test_a_start_that_fails_lets_go_of_the_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(reactor: Reactor) -> None:
        raise OSError("no ring")

    monkeypatch.setattr(Reactor, "start", start)
    mapping = mmap.mmap(-1, ROWS * ROW_BYTES)
    view = memoryview(mapping).cast("B", (ROWS, ROW_BYTES))
    with pytest.raises(OSError, match="no ring"):
        make_tier(view, root)
    view.release()
    mapping.close()


# --- what it tells


def test_stored_chunks_are_events_if_asked_for(root: Path) -> None:
    spec = tier_spec(events=True)
    with tiering(root, spec=spec, enable_kv_events=True, locality="LOCAL") as server:
        server.arrive("writer")
        server.store("writer", contents(1, 2))
        server.step()
        (event,) = server.tier.take_events()
        assert set(event.keys) == {key_of(1), key_of(2)}
        assert (event.medium, event.removed) == (Medium.STORAGE, False)
        assert event.locality is Locality.LOCAL
        assert list(server.tier.take_events()) == []


@pytest.mark.parametrize(("globally", "tier"), [(True, False), (False, True)])
def test_events_need_both_switches(root: Path, globally: bool, tier: bool) -> None:
    spec = tier_spec(events=globally)
    with tiering(root, spec=spec, enable_kv_events=tier) as server:
        server.arrive("writer")
        server.store("writer", contents(1))
        server.step()
        assert list(server.tier.take_events()) == []


def test_metrics_are_those_that_are_defined(root: Path) -> None:
    keys = store(root, 1, 2)
    with tiering(root) as server:
        server.arrive("reader")
        server.fetch("reader", keys)
        server.store("reader", contents(3))
        server.step("reader")
        seen = counts(server.tier)
        assert counts(server.tier) == {}
    defined = PyKVCacheTier.build_metric_definitions({})
    assert set(defined) == set(TIER_METRICS)
    assert seen.keys() <= defined.keys()
    assert seen[CHUNKS] == {("load", "transferred"): 2, ("store", "transferred"): 1}
    for name, values in seen.items():
        for labels in values:
            assert len(labels) == len(defined[name].labelnames), name
