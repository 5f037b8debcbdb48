# SPDX-License-Identifier: Apache-2.0
"""The keeper turn by turn, over real files and a made-up disk."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pykvcache.capacity import keeper as keeper_module
from pykvcache.capacity.evictor import Stopped
from pykvcache.capacity.keeper import Keeper
from pykvcache.capacity.policy import depth_of, time_of_use
from pykvcache.capacity.record import Record
from pykvcache.config import Config
from pykvcache.layout import ChunkPaths
from tests.capacity.roots import NOW_S, SECOND_NS, Disk, Root, key_of

LOG = logging.getLogger("tests.keeper")


class Site:
    """A root, its disk and clock, and keepers over them."""

    def __init__(self, path: Path, ranks: int = 1) -> None:
        self.root = Root(path, ranks)
        self.disk = Disk(self.root)
        self.now_s = NOW_S

    def keeper(self, **options: object) -> Keeper:
        defaults = {"root": self.root.path, "free_space_min": "0", "capacity": "2000"}
        paths = [ChunkPaths(directory) for directory in self.root.directories]
        config = Config(**{**defaults, **options})  # type: ignore[arg-type]
        return Keeper(config, paths, LOG, space=self.disk, clock=lambda: self.now_s)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "kv")


# --- eviction


def test_a_first_turn_counts_and_evicts(site: Site) -> None:
    site.root.fill(range(30))
    keeper = site.keeper()
    keeper.turn()
    assert site.root.numbers() == list(range(12, 30))
    figures = keeper.figures
    assert figures.usage is not None and figures.usage.size == 1800
    assert (figures.evicted_files, figures.evicted_size, figures.limit) == (12, 1200, 2000)
    assert not keeper.is_full


def test_files_that_were_there_before_the_start_count(site: Site) -> None:
    """Another server's, or those of the server before the restart."""
    site.root.fill(range(10))
    site.keeper().turn()
    site.root.fill(range(10, 30))
    keeper = site.keeper()
    keeper.turn()
    assert site.root.numbers() == list(range(12, 30))


def test_what_was_written_since_the_count_brings_a_round_forward(site: Site) -> None:
    keeper = site.keeper()
    keeper.turn()
    site.root.fill(range(19))
    keeper.turn()
    assert keeper.figures.evicted_files == 0
    site.root.fill(range(19, 20))
    keeper.turn()
    assert keeper.figures.evicted_files == 2


def test_what_another_keeper_has_counted_is_not_counted_again(site: Site) -> None:
    site.root.fill(range(3))
    site.keeper().turn()
    record = Record(site.root.path)
    site.now_s += 10
    other = site.keeper()
    other.turn()
    usage = record.read()
    assert usage is not None and usage.at_s == NOW_S
    assert other.figures.usage == usage
    site.now_s += 300
    other.turn()
    usage = record.read()
    assert usage is not None and usage.at_s == site.now_s


def test_without_a_capacity_the_free_space_decides(site: Site) -> None:
    site.root.fill(range(30))
    keeper = site.keeper(capacity="", free_space_min="90%")
    keeper.turn()
    assert keeper.figures.evicted_files == 0
    site.disk.others = 99_000  # leaves 1,000 bytes to the root
    keeper.turn()
    assert site.root.size() == 900


def test_nothing_is_stored_while_the_root_is_full(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    site.root.fill(range(10))
    keeper = site.keeper(eviction_policy="none")
    keeper.turn()
    assert not keeper.is_full
    site.root.fill(range(10, 20))
    keeper.turn()
    assert keeper.is_full
    assert len(site.root.numbers()) == 20
    assert "stores nothing for now" in caplog.text
    for number in range(5):
        site.root.file(number).unlink()
    site.now_s += 300
    keeper.turn()
    assert not keeper.is_full
    assert "stores again" in caplog.text


def test_nothing_is_stored_before_what_is_there_was_counted(site: Site) -> None:
    keeper = site.keeper()
    assert keeper.room.size == 0
    with Record(site.root.path).try_lock():  # somebody else is counting
        keeper.turn()
        assert keeper.room.size == 0
    keeper.turn()
    assert keeper.room.size == 2000


def test_without_a_capacity_the_free_space_is_known_before_a_count(site: Site) -> None:
    keeper = site.keeper(capacity="", free_space_min="90%")
    with Record(site.root.path).try_lock():
        keeper.turn()
    assert keeper.room.size == 100_000


def test_each_look_tells_the_room_that_is_left(site: Site) -> None:
    keeper = site.keeper()
    keeper.turn()
    before = keeper.room
    site.root.fill(range(3))
    keeper.turn()
    assert keeper.room.size == before.size - 300
    assert keeper.room.look > before.look


def test_a_disk_that_others_fill_is_full_whatever_is_evicted(site: Site) -> None:
    site.root.fill(range(10))
    site.disk.others = site.disk.total - 1100
    keeper = site.keeper(free_space_min="0.2%")
    keeper.turn()
    assert site.root.numbers() == []
    assert keeper.is_full


def test_a_round_that_cannot_free_enough_is_not_repeated_at_once(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    from pykvcache.capacity.pins import Pins

    site.root.fill(range(30))
    for number in range(30):
        Pins(site.root.identity).add(key_of(number).hex())
    keeper = site.keeper()
    keeper.turn()
    assert keeper.is_full
    assert "1.2 KiB more than the limit" in caplog.text and "pinned (2.9 KiB)" in caplog.text
    record = Record(site.root.path)
    site.now_s += keeper_module.RETRY_S - 1
    keeper.turn()
    usage = record.read()
    assert usage is not None and usage.at_s == NOW_S
    site.now_s += 1
    keeper.turn()
    usage = record.read()
    assert usage is not None and usage.at_s == site.now_s


def test_a_stubborn_file_is_named_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.root.file(0).mkdir(parents=True)
    keeper = site.keeper()
    for _ in range(3):
        keeper.turn()
        site.now_s += 300
    assert caplog.text.count(str(site.root.file(0))) == 1
    assert keeper.figures.skipped == {"not_a_file": 3}


def test_while_another_process_evicts_nothing_is_done(site: Site) -> None:
    site.root.fill(range(30))
    keeper = site.keeper()
    with Record(site.root.path).try_lock() as held:
        assert held
        keeper.turn()
    assert len(site.root.numbers()) == 30
    keeper.turn()
    assert len(site.root.numbers()) == 18


def test_a_write_that_found_no_room_evicts_once_for_all_keepers(site: Site) -> None:
    site.root.fill(range(10))
    keepers = [site.keeper(), site.keeper()]
    for keeper in keepers:
        keeper.turn()
    site.now_s += 5
    Record(site.root.path).report_no_space()
    os.utime(site.root.path / ".no-space", (0, site.now_s))
    site.now_s += 1
    for keeper in keepers:
        keeper.turn()
    assert site.root.numbers() == list(range(1, 10))
    assert not any(keeper.is_full for keeper in keepers)


def test_what_was_stored_since_the_last_count_goes_too_when_there_is_no_room(site: Site) -> None:
    keeper = site.keeper()
    keeper.turn()  # counts an empty root
    site.root.fill(range(10))
    site.now_s += 5
    Record(site.root.path).report_no_space()
    os.utime(site.root.path / ".no-space", (0, site.now_s))
    site.now_s += 1
    keeper.turn()
    assert site.root.numbers() == list(range(1, 10))
    assert not keeper.is_full


def test_a_write_that_found_no_room_pauses_stores_if_nothing_can_go(site: Site) -> None:
    keeper = site.keeper()
    keeper.turn()
    Record(site.root.path).report_no_space()
    os.utime(site.root.path / ".no-space", (0, site.now_s + 1))
    site.now_s += 2
    keeper.turn()
    assert keeper.is_full
    site.now_s += keeper_module.RETRY_S
    keeper.turn()
    assert not keeper.is_full


# --- recency


def times(root: Root, numbers: list[int], rank: int = 0) -> list[int]:
    return [root.file(number, rank).stat().st_mtime_ns for number in numbers]


def test_a_prefix_that_was_used_gets_times_in_its_order(tmp_path: Path) -> None:
    site = Site(tmp_path / "kv", ranks=2)
    for rank in (0, 1):
        for number in range(3):
            site.root.add(number, 10, NOW_S - 5000, rank)
    keeper = site.keeper()
    keeper.touch([(key_of(number), 256 * (number + 1)) for number in range(4)])  # 3 isn't stored
    keeper.turn()
    for rank in (0, 1):
        found = times(site.root, [0, 1, 2], rank)
        assert found == sorted(found, reverse=True)
        assert [depth_of(time_ns) for time_ns in found] == [256, 512, 768]
        assert NOW_S - 60 <= found[2] / SECOND_NS <= NOW_S + 1


def test_the_least_recently_used_prefix_goes_from_its_end(site: Site) -> None:
    site.root.fill(range(20))
    keeper = site.keeper(capacity="1000000")
    keeper.touch([(key_of(number), 256 * (number + 1)) for number in range(10)])
    keeper.turn()
    site.now_s += 60
    keeper.touch([(key_of(number), 256 * (number - 9)) for number in range(10, 20)])
    keeper.turn()
    site.keeper(capacity="1500").turn()  # counts only what the record is too old for
    site.now_s += 300
    site.keeper(capacity="1500").turn()
    assert site.root.numbers() == [*range(3), *range(10, 20)]


def test_a_chunk_is_touched_once_an_interval(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.root.fill(range(2))
    touched: list[str] = []
    utime = os.utime

    def counting(path: str, *, ns: tuple[int, int], follow_symlinks: bool) -> None:
        touched.append(path)
        utime(path, ns=ns, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(keeper_module.os, "utime", counting)
    keeper = site.keeper()
    start = NOW_S // 60 * 60
    for second, expected in ((0, 2), (59, 2), (60, 4), (61, 4)):
        site.now_s = start + second
        keeper.touch([(key_of(0), 256), (key_of(1), 512)])
        keeper.turn()
        assert len(touched) == expected, second


def test_what_is_remembered_of_touches_is_bounded(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "TOUCHED_MAX", 2)
    site.root.fill(range(5))
    keeper = site.keeper()
    keeper.touch([(key_of(number), 1) for number in range(5)])
    keeper.turn()
    assert len(keeper._touched) == 2


def test_a_stored_chunk_is_not_older_than_those_stored_after_it(site: Site) -> None:
    """Its own time comes from the write; the touch at the end of the store puts them in order."""
    site.root.add(1, 10, NOW_S + 5)
    site.root.add(0, 10, NOW_S + 6)
    keeper = site.keeper()
    keeper.touch([(key_of(0), 256), (key_of(1), 512)])
    keeper.turn()
    assert times(site.root, [0, 1]) == [
        time_of_use(NOW_S, 256, 60.0),
        time_of_use(NOW_S, 512, 60.0),
    ]


# --- the thread


def test_the_thread_does_its_turns_and_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "POLL_S", 0.001)
    keeper = site.keeper()
    turned = threading.Semaphore(0)
    turn = keeper.turn

    def counted() -> None:
        turn()
        turned.release()

    monkeypatch.setattr(keeper, "turn", counted)
    keeper.start()
    for _ in range(3):
        assert turned.acquire(timeout=60)
    keeper.stop()
    assert not keeper._thread.is_alive()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyError("bug")])
def test_an_error_is_said_once_and_ends_nothing(
    error: Exception,
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(keeper_module, "POLL_S", 0.001)
    keeper = site.keeper()
    turned = threading.Semaphore(0)

    def failing() -> None:
        turned.release()
        raise error

    monkeypatch.setattr(keeper, "turn", failing)
    keeper.start()
    for _ in range(3):
        assert turned.acquire(timeout=60)
    keeper.stop()
    assert not keeper._thread.is_alive()
    assert len(caplog.records) == 1


def test_a_round_ends_when_the_keeper_stops(site: Site) -> None:
    site.root.fill(range(300))
    keeper = site.keeper()
    keeper._stop.set()
    with pytest.raises(Stopped):
        keeper.turn()
    assert len(site.root.numbers()) == 300


def test_a_root_that_vanishes_and_comes_back(site: Site) -> None:
    site.root.fill(range(30))
    away = site.root.path.with_name("away")
    keeper = site.keeper()
    shutil.move(site.root.path, away)
    with pytest.raises(OSError):
        keeper.turn()
    shutil.move(away, site.root.path)
    keeper.turn()
    assert len(site.root.numbers()) == 18


def test_figures_are_values(site: Site) -> None:
    keeper = site.keeper()
    before = keeper.figures
    keeper.turn()
    assert keeper.figures is not before
    assert replace(before, limit=1).limit == 1
