# SPDX-License-Identifier: Apache-2.0
"""Rounds of eviction on real directories."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pykvcache.capacity import evictor as evictor_module
from pykvcache.capacity.budget import Budget, estimate
from pykvcache.capacity.evictor import Evictor, Round, Stopped
from pykvcache.capacity.pins import Pins
from pykvcache.capacity.policy import Policy
from pykvcache.capacity.record import Record
from pykvcache.sizes import Size
from tests.capacity.roots import NOW_S, Disk, Root, key_of, never


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path / "kv")


def evictor(root: Root, capacity: int, **options: object) -> Evictor:
    arguments: dict[str, object] = {
        "files_per_s": 0.0,
        "pause": never,
        "space": Disk(root),
        "clock": lambda: NOW_S,
        **options,
    }
    budget = Budget(Size(capacity), Size(), high=0.95, low=0.9)
    return Evictor(root.path, budget, Policy.LRU, **arguments)  # type: ignore[arg-type]


def run(root: Root, capacity: int, **options: object) -> Round:
    done = evictor(root, capacity, **options).run()
    assert done is not None
    return done


def test_the_least_recently_used_go_until_the_low_mark(root: Root) -> None:
    root.fill(range(20))
    done = run(root, 1000)
    assert root.numbers() == list(range(11, 20))
    assert (done.files, done.size, done.excess) == (11, 1100, 0)
    assert (done.usage.files, done.usage.size, done.limit) == (9, 900, 1000)


def test_below_the_high_mark_nothing_goes(root: Root) -> None:
    root.fill(range(9))
    done = run(root, 1000)
    assert (done.files, done.usage.files, done.usage.size) == (0, 9, 900)
    assert len(root.numbers()) == 9


def test_what_was_put_aside_counts_and_goes_first(root: Root) -> None:
    root.fill(range(9))
    aside = root.directories[0] / "quarantine"
    aside.mkdir()
    for number in range(3):
        (aside / f"{number:03x}.kv").write_bytes(bytes(100))
    done = run(root, 1000)
    assert (done.files, done.usage.files, done.usage.size) == (3, 9, 900)
    assert root.numbers() == list(range(9))
    assert list(aside.iterdir()) == []


def test_a_dry_round_only_tells(root: Root) -> None:
    root.fill(range(20))
    done = evictor(root, 1000).run(dry=True)
    assert done is not None
    assert (done.files, done.usage.size) == (11, 900)
    assert len(root.numbers()) == 20
    assert Record(root.path).read() is None


def test_more_can_be_asked_for(root: Root) -> None:
    root.fill(range(5))
    done = evictor(root, 1_000_000).run(extra=250)
    assert done is not None and done.files == 3
    assert root.numbers() == [3, 4]


def test_the_count_is_left_for_others(root: Root) -> None:
    root.fill(range(20))
    run(root, 1000)
    usage = Record(root.path).read()
    assert usage is not None
    assert (usage.files, usage.size, usage.free) == (9, 900, 1_000_000 - 900)


def test_what_others_write_during_a_round_is_not_forgotten(root: Root) -> None:
    root.fill(range(100))
    disk = Disk(root)
    written = iter(range(1000, 1010))

    def writing(_seconds: float) -> bool:
        for number in written:
            root.add(number, 100, NOW_S)
        return False

    done = run(root, 9000, space=disk, pause=writing)
    usage = Record(root.path).read()
    assert usage is not None and done.files
    assert estimate(usage, disk(root.path)) >= root.size()


def test_all_ranks_and_identities_are_one_root(tmp_path: Path) -> None:
    one, other = Root(tmp_path, ranks=2, model="one"), Root(tmp_path, model="other")
    one.add(1, 400, NOW_S - 50, rank=0)
    one.add(1, 400, NOW_S - 50, rank=1)
    other.add(2, 400, NOW_S - 10)
    run(one, 500)
    assert not one.file(1, 0).exists() and not one.file(1, 1).exists()
    assert other.file(2).exists()


def test_what_does_not_look_like_ours_stays(root: Root) -> None:
    root.fill(range(20))
    foreign = [
        root.path / "notes.kv",
        root.path / "photos" / "rank-0000" / "abc" / "ab.kv",
        root.identity / "rank-0000" / "holiday" / "ab.kv",
        root.identity / "rank-0000" / "abc" / "holiday.kv",
        root.identity / "rank-0000" / "abc" / "ab.txt",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10_000))
    outside = root.path.parent / "outside.kv"
    outside.write_bytes(b"x")
    link = root.identity / "rank-0000" / "abc" / "abcd.kv"
    link.symlink_to(outside)
    done = run(root, 1)
    assert root.numbers() == []
    assert all(path.exists() for path in foreign)
    assert outside.exists() and link.is_symlink()
    assert done.skipped == {"not_a_file": 1}


def test_pinned_chunks_stay_and_are_said_to_be_too_many(root: Root) -> None:
    root.fill(range(20))
    for number in range(10):
        Pins(root.identity).add(key_of(number).hex())
    done = run(root, 500)
    assert root.numbers() == list(range(10))
    assert done.usage.pinned == 1000
    assert done.excess == 550


def test_a_chunk_pinned_while_a_round_runs_stays(root: Root, monkeypatch: object) -> None:
    root.fill(range(20))
    worker = evictor(root, 1000)
    counted = worker._count

    def pinning(after: object) -> object:
        found = counted(after)  # type: ignore[arg-type]
        Pins(root.identity).add(key_of(0).hex())
        return found

    worker._count = pinning  # type: ignore[assignment, method-assign]
    assert worker.run() is not None
    assert root.numbers() == [0, *range(12, 20)]


def test_a_chunk_used_while_a_round_runs_stays(root: Root) -> None:
    root.fill(range(20))
    worker = evictor(root, 1000)
    counted = worker._count

    def using(after: object) -> object:
        found = counted(after)  # type: ignore[arg-type]
        os.utime(root.file(0), (0, NOW_S))
        return found

    worker._count = using  # type: ignore[assignment, method-assign]
    assert worker.run() is not None
    assert 0 in root.numbers()
    assert root.size() == 900


def test_a_file_that_cannot_be_removed_is_skipped_and_reported(root: Root) -> None:
    root.fill(range(20))
    path = root.file(0)
    if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", path]).returncode:
        pytest.skip("the filesystem or this user cannot make a file immutable")
    try:
        done = run(root, 1000)
    finally:
        subprocess.run(["chattr", "-i", path], check=True)
    assert root.numbers() == [0, *range(12, 20)]
    assert done.skipped == {"EPERM": 1}
    assert done.problems == [(str(path), "Operation not permitted")]
    assert done.excess == 0


def test_a_directory_in_a_chunks_place_is_skipped_and_reported(root: Root) -> None:
    root.fill(range(20))
    root.file(0).unlink()
    root.file(0).mkdir()
    done = run(root, 1000)
    assert root.numbers() == list(range(11, 20))
    assert done.skipped == {"not_a_file": 1}
    assert done.problems == [(str(root.file(0)), "is not a file")]


def test_no_number_of_stubborn_files_keeps_the_others_from_going(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evictor_module, "VICTIMS_MAX", 3)
    root.fill(range(30))
    stubborn = {str(root.file(number)) for number in range(10)}
    unlink = os.unlink

    def refusing(path: str) -> None:
        if path in stubborn:
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path)

    monkeypatch.setattr(evictor_module.os, "unlink", refusing)
    done = run(root, 2000)
    assert root.numbers() == [*range(10), *range(22, 30)]
    assert done.skipped == {"EPERM": 10}


def test_leftovers_of_killed_writers_go_when_they_are_old(root: Root) -> None:
    root.fill(range(2))
    old, young = (root.file(0).with_name(f".{name}.kv.writer.1.tmp") for name in ("aa", "bb"))
    for path, age_s in ((old, 3601), (young, 3599)):
        path.write_bytes(bytes(50))
        os.utime(path, (0, NOW_S - age_s))
    done = run(root, 1000)
    assert not old.exists() and young.exists()
    assert done.temporaries == 1
    assert done.usage.size == 250


def test_a_reader_keeps_what_it_has_opened(root: Root) -> None:
    path = root.add(1, 5000, NOW_S - 100)
    with open(path, "rb") as file:
        run(root, 1)
        assert not path.exists()
        assert len(file.read()) == 5000


def test_a_round_pauses_and_can_be_stopped(root: Root) -> None:
    root.fill(range(300))
    pauses: list[float] = []

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return seconds > 0

    with pytest.raises(Stopped):
        evictor(root, 1, files_per_s=32.0, pause=pause).run()
    assert pauses[-1] == 2.0
    assert len(root.numbers()) == 300 - evictor_module.BATCH_FILES
    with Record(root.path).try_lock() as held:
        assert held


def test_a_missing_root_is_an_error(root: Root) -> None:
    shutil.rmtree(root.path)
    with pytest.raises(FileNotFoundError):
        evictor(root, 1).run()


# --- other processes

HOLD = """
import sys
from pathlib import Path
from pykvcache.capacity.record import Record
with Record(Path(sys.argv[1])).try_lock() as held:
    print(held, flush=True)
    sys.stdin.read()
"""

EVICT = """
import sys
from pathlib import Path
from pykvcache.capacity.budget import Budget, Space
from pykvcache.capacity.evictor import Evictor
from pykvcache.capacity.policy import Policy
from pykvcache.sizes import Size
budget = Budget(Size(int(sys.argv[2])), Size(), 0.95, 0.9)
evictor = Evictor(Path(sys.argv[1]), budget, Policy.LRU, files_per_s=0, pause=lambda seconds: False)
print("ready", flush=True)
sys.stdin.readline()
done = [evictor.run() for _ in range(5)]
print(sum(round.files for round in done if round), flush=True)
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_killed_holder_of_the_lock_wedges_nobody(root: Root) -> None:
    root.fill(range(20))
    holder = start(HOLD, root.path)
    assert holder.stdout is not None and holder.stdout.readline() == "True\n"
    assert evictor(root, 1000).run() is None
    assert len(root.numbers()) == 20
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.communicate()
    assert run(root, 1000).files == 11


def test_processes_that_race_evict_no_more_than_one(root: Root) -> None:
    root.fill(range(500))
    racers = [start(EVICT, root.path, 20_000) for _ in range(3)]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    evicted = [int(racer.communicate("go\n")[0]) for racer in racers]
    assert sum(evicted) == 320
    assert root.numbers() == list(range(320, 500))


def test_without_locks_on_the_filesystem_racers_still_evict_each_file_once(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have counted before either removes."""
    root.fill(range(20))
    monkeypatch.setattr("fcntl.flock", _no_locks)
    first, second = evictor(root, 1000), evictor(root, 1000)
    counted = first._count

    def racing(after: object) -> object:
        found = counted(after)  # type: ignore[arg-type]
        assert second.run() is not None
        return found

    first._count = racing  # type: ignore[assignment, method-assign]
    done = first.run()
    assert done is not None and (done.files, done.usage.files) == (0, 9)
    assert root.size() == 900


def _no_locks(_descriptor: int, _operation: int) -> None:
    raise OSError(37, "No locks available")


def test_a_record_that_is_none_is_not_believed(root: Root) -> None:
    record = Record(root.path)
    assert record.read() is None
    for text in ("", "{", "[]", '{"files": 1}', '{"files":"x","size":1,"pinned":1,"free":1}'):
        (root.path / ".capacity").write_text(text)
        assert record.read() is None
    with contextlib.suppress(OSError):
        run(root, 1000)
    assert record.read() is not None
