# SPDX-License-Identifier: Apache-2.0
"""What both engines promise, tried on real files, buffered and direct."""

from __future__ import annotations

import errno
import mmap
import os
import random
import resource
import select
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from pykvcache.errors import InvariantError
from pykvcache.layout import PAGE, BlockSpan
from pykvcache.reactor.engine import IoEngine
from pykvcache.reactor.ring import READ, WRITE, Ring
from pykvcache.reactor.rows import Rows
from pykvcache.reactor.threads import ThreadsEngine
from pykvcache.reactor.uring import UringEngine
from pykvcache.transfer.jobs import ChunkTransfer
from pykvcache.transfer.operations import Action, Completion, FileOperation

SLOTS = 8
SLOT_BYTES = 16 * PAGE
ENTRIES = 8
WAIT_MS = 30_000


ROWS = 3
ROW_PAGES = 3
MakeEngine = Callable[[list[memoryview], bool, Rows], IoEngine]


def make_uring(buffers: list[memoryview], direct: bool, rows: Rows) -> IoEngine:
    return UringEngine(buffers, direct, entries=ENTRIES, rows=rows)


def make_threads(buffers: list[memoryview], direct: bool, rows: Rows) -> IoEngine:
    return ThreadsEngine(buffers, direct, workers=3, rows=rows)


class Bench:
    """An engine with its buffers, and tokens given out one by one."""

    def __init__(self, make: MakeEngine, direct: bool, directory: Path) -> None:
        memory = memoryview(mmap.mmap(-1, SLOTS * SLOT_BYTES))
        self.buffers = [
            memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] for slot in range(SLOTS)
        ]
        rows = memoryview(mmap.mmap(-1, ROWS * ROW_PAGES * PAGE))
        self.rows = Rows(rows.cast("B", (ROWS, ROW_PAGES * PAGE)))
        self.engine = make(self.buffers, direct, self.rows)
        self.direct = direct
        self.directory = directory
        self._tokens = iter(range(1, 1 << 62))

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def operation(self, action: Action, **fields: object) -> FileOperation:
        return FileOperation(next(self._tokens), action, **fields)  # type: ignore[arg-type]

    def wait(self, count: int) -> list[Completion]:
        """Reap until that many completions have come."""
        poll = select.poll()
        poll.register(self.engine.fileno(), select.POLLIN)
        completions: list[Completion] = []
        while len(completions) < count:
            assert poll.poll(WAIT_MS), f"only {completions} of {count} completions came"
            completions += self.engine.reap()
        return completions

    def run(self, action: Action, **fields: object) -> int:
        """One operation from start to end; its result."""
        operation = self.operation(action, **fields)
        self.engine.submit([operation])
        (completion,) = self.wait(1)
        assert completion.token == operation.token
        assert completion.defect is None
        return completion.result

    def run_all(self, operations: Iterable[FileOperation]) -> dict[int, int]:
        """All operations at once; results by token."""
        listed = list(operations)
        self.engine.submit(listed)
        completions = self.wait(len(listed))
        results = {completion.token: completion.result for completion in completions}
        assert sorted(c.token for c in completions) == sorted(o.token for o in listed)
        return results

    def is_readable(self) -> bool:
        poll = select.poll()
        poll.register(self.engine.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def wait_readable(self) -> None:
        poll = select.poll()
        poll.register(self.engine.fileno(), select.POLLIN)
        assert poll.poll(WAIT_MS)

    def drain(self) -> None:
        while self.engine.in_flight:
            self.wait(1)


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def direct(request: pytest.FixtureRequest, tmp_path: Path) -> bool:
    if request.param:
        try:
            os.close(os.open(tmp_path / "direct", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
        except OSError as error:
            pytest.skip(f"the filesystem of {tmp_path} refuses O_DIRECT: {error.strerror}")
    return bool(request.param)


@pytest.fixture(params=[make_uring, make_threads], ids=["io_uring", "threads"])
def bench(request: pytest.FixtureRequest, direct: bool, tmp_path: Path) -> Iterator[Bench]:
    directory = tmp_path / "files"
    directory.mkdir()
    try:
        bench = Bench(request.param, direct, directory)
    except OSError as error:
        pytest.skip(f"no io_uring here: {error.strerror}")
    yield bench
    bench.drain()
    bench.engine.close()


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Modes as asked for, none masked."""
    previous = os.umask(0)
    yield
    os.umask(previous)


def store(bench: Bench, name: str, data: bytes, slot: int = 0) -> None:
    bench.buffers[slot][: len(data)] = data
    descriptor = bench.run(Action.CREATE, path=bench.path(name))
    assert descriptor >= 0
    assert bench.run(Action.WRITE, descriptor=descriptor, slot=slot, length=len(data)) == len(data)
    assert bench.run(Action.CLOSE, descriptor=descriptor) == 0


def load(bench: Bench, name: str, length: int, slot: int = 0) -> int:
    """The count of one read into the slot."""
    descriptor = bench.run(Action.OPEN, path=bench.path(name))
    assert descriptor >= 0
    result = bench.run(Action.READ, descriptor=descriptor, slot=slot, length=length)
    assert bench.run(Action.CLOSE, descriptor=descriptor) == 0
    return result


def test_what_is_stored_is_loaded(bench: Bench) -> None:
    data = random.Random(1).randbytes(SLOT_BYTES)
    assert bench.run(Action.MKDIR, path=bench.path("abc")) == 0
    store(bench, "abc/temporary", data, slot=1)
    assert (
        bench.run(Action.LINK, path=bench.path("abc/temporary"), target=bench.path("abc/final"))
        == 0
    )
    assert bench.run(Action.UNLINK, path=bench.path("abc/temporary")) == 0
    assert os.listdir(bench.path("abc")) == ["final"]
    assert Path(bench.path("abc/final")).read_bytes() == data
    assert load(bench, "abc/final", SLOT_BYTES, slot=5) == SLOT_BYTES
    assert bytes(bench.buffers[5]) == data


def test_a_transfer_touches_nothing_beyond_its_length(bench: Bench) -> None:
    data = random.Random(2).randbytes(SLOT_BYTES)
    store(bench, "file", data)
    for buffer in bench.buffers:
        buffer[:] = b"\xee" * SLOT_BYTES
    assert load(bench, "file", 3 * PAGE, slot=4) == 3 * PAGE
    assert bytes(bench.buffers[4]) == data[: 3 * PAGE] + b"\xee" * (SLOT_BYTES - 3 * PAGE)
    for slot in set(range(SLOTS)) - {4}:
        assert bytes(bench.buffers[slot]) == b"\xee" * SLOT_BYTES


def test_create_refuses_a_name_that_exists(bench: Bench) -> None:
    store(bench, "file", bytes(PAGE))
    assert bench.run(Action.CREATE, path=bench.path("file")) == -errno.EEXIST
    assert Path(bench.path("file")).stat().st_size == PAGE


def test_link_leaves_a_name_that_exists(bench: Bench) -> None:
    store(bench, "first", b"1" * PAGE)
    store(bench, "second", b"2" * PAGE)
    result = bench.run(Action.LINK, path=bench.path("second"), target=bench.path("first"))
    assert result == -errno.EEXIST
    assert Path(bench.path("first")).read_bytes() == b"1" * PAGE


def test_rename_replaces_a_name_that_exists(bench: Bench) -> None:
    store(bench, "first", b"1" * PAGE)
    store(bench, "second", b"2" * PAGE)
    rename = {"path": bench.path("second"), "target": bench.path("first")}
    assert bench.run(Action.RENAME, **rename) == 0
    assert Path(bench.path("first")).read_bytes() == b"2" * PAGE
    assert not Path(bench.path("second")).exists()
    assert bench.run(Action.RENAME, **rename) == -errno.ENOENT


def test_files_and_directories_can_be_synced(bench: Bench) -> None:
    store(bench, "file", bytes(PAGE))
    opened = (
        bench.run(Action.OPEN, path=bench.path("file")),
        bench.run(Action.OPEN_DIRECTORY, path=str(bench.directory)),
    )
    for descriptor in opened:
        assert bench.run(Action.SYNC, descriptor=descriptor) == 0
        assert bench.run(Action.CLOSE, descriptor=descriptor) == 0
        assert bench.run(Action.SYNC, descriptor=descriptor) == -errno.EBADF
    assert bench.run(Action.OPEN_DIRECTORY, path=bench.path("file")) == -errno.ENOTDIR


def test_mkdir_refuses_a_name_that_exists(bench: Bench) -> None:
    assert bench.run(Action.MKDIR, path=bench.path("abc")) == 0
    assert bench.run(Action.MKDIR, path=bench.path("abc")) == -errno.EEXIST


@pytest.mark.parametrize("action", [Action.OPEN, Action.UNLINK, Action.LINK])
def test_a_missing_file_is_enoent(bench: Bench, action: Action) -> None:
    result = bench.run(action, path=bench.path("missing"), target=bench.path("target"))
    assert result == -errno.ENOENT


@pytest.mark.parametrize("action", [Action.CREATE, Action.MKDIR])
def test_a_missing_parent_is_enoent(bench: Bench, action: Action) -> None:
    assert bench.run(action, path=bench.path("missing/name")) == -errno.ENOENT


@pytest.mark.parametrize("size", [PAGE, 5 * PAGE])
def test_the_end_of_the_file_gives_a_short_count(bench: Bench, size: int) -> None:
    data = random.Random(3).randbytes(size)
    store(bench, "file", data)
    assert load(bench, "file", SLOT_BYTES, slot=2) == size
    assert bytes(bench.buffers[2][:size]) == data


def test_a_file_cut_inside_a_page_gives_a_short_count(bench: Bench) -> None:
    data = random.Random(4).randbytes(2 * PAGE + 100)
    Path(bench.path("file")).write_bytes(data)
    assert load(bench, "file", SLOT_BYTES, slot=2) == len(data)
    assert bytes(bench.buffers[2][: len(data)]) == data


def test_an_empty_file_gives_zero(bench: Bench) -> None:
    Path(bench.path("file")).touch()
    assert load(bench, "file", PAGE) == 0


def in_row(row: int, payload_pages: int = ROW_PAGES) -> ChunkTransfer:
    size = payload_pages * PAGE
    return ChunkTransfer(b"key", "", size, size + PAGE, BlockSpan(0, 1), 0, (), 0, row)


def test_a_payload_lies_in_its_row_and_the_rest_in_the_slot(bench: Bench) -> None:
    row, length = ROW_PAGES * PAGE, (ROW_PAGES + 1) * PAGE
    data = random.Random(7).randbytes(length)
    bench.rows.view(1)[:] = data[:row]
    bench.buffers[2][:PAGE] = data[row:]
    descriptor = bench.run(Action.CREATE, path=bench.path("file"))
    place = {"descriptor": descriptor, "slot": 2, "length": length, "chunk": in_row(1)}
    assert bench.run(Action.WRITE, **place) == length
    assert bench.run(Action.CLOSE, descriptor=descriptor) == 0
    assert Path(bench.path("file")).read_bytes() == data
    descriptor = bench.run(Action.OPEN, path=bench.path("file"))
    place = {"descriptor": descriptor, "slot": 4, "length": length, "chunk": in_row(2)}
    assert bench.run(Action.READ, **place) == length
    assert bench.run(Action.CLOSE, descriptor=descriptor) == 0
    assert bytes(bench.rows.view(2)) == data[:row]
    assert bytes(bench.buffers[4]) == data[row:] + bytes(SLOT_BYTES - PAGE)
    assert bytes(bench.rows.view(0)) == bytes(row)


@pytest.mark.parametrize(("row", "pages"), [(ROWS, ROW_PAGES), (0, 1), (0, ROW_PAGES + 1)])
def test_a_row_that_there_is_not_is_refused(bench: Bench, row: int, pages: int) -> None:
    chunk = in_row(row, pages)
    descriptor = bench.run(Action.CREATE, path=bench.path("file"))
    place = {"descriptor": descriptor, "slot": 0, "length": chunk.file_bytes, "chunk": chunk}
    assert bench.run(Action.WRITE, **place) == -errno.EINVAL
    assert bench.run(Action.CLOSE, descriptor=descriptor) == 0


@pytest.mark.parametrize("size", [0, PAGE, ROW_PAGES * PAGE, ROW_PAGES * PAGE + 100])
def test_a_short_file_gives_a_short_count_in_a_row_too(bench: Bench, size: int) -> None:
    data = random.Random(8).randbytes(size)
    Path(bench.path("file")).write_bytes(data)
    descriptor = bench.run(Action.OPEN, path=bench.path("file"))
    length = (ROW_PAGES + 1) * PAGE
    place = {"descriptor": descriptor, "slot": 0, "length": length, "chunk": in_row(0)}
    assert bench.run(Action.READ, **place) == size
    assert bench.run(Action.CLOSE, descriptor=descriptor) == 0
    assert (bytes(bench.rows.view(0)) + bytes(bench.buffers[0]))[:size] == data


@pytest.fixture
def kernel_cuts_at_two_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the kernel move at most two pages at a time, as it does at its own limits."""
    limit = 2 * PAGE
    push, preadv, pwritev = Ring.push, os.preadv, os.pwritev

    def push_less(ring: Ring, opcode: int, *args: int, length: int = 0, **fields: int) -> None:
        length = min(length, limit) if opcode in (READ, WRITE) else length
        push(ring, opcode, *args, length=length, **fields)

    monkeypatch.setattr(Ring, "push", push_less)
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:limit]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [views[0][:limit]], at))


@pytest.mark.parametrize("pages", [1, 2, 4, 5, 16])
def test_a_transfer_that_the_kernel_cuts_goes_on(
    bench: Bench, kernel_cuts_at_two_pages: None, pages: int
) -> None:
    data = random.Random(5).randbytes(pages * PAGE)
    store(bench, "file", data)
    assert Path(bench.path("file")).read_bytes() == data
    assert load(bench, "file", len(data), slot=3) == len(data)
    assert bytes(bench.buffers[3][: len(data)]) == data
    assert load(bench, "file", SLOT_BYTES, slot=4) == len(data)
    assert bytes(bench.buffers[4][: len(data)]) == data


def test_an_interrupted_transfer_is_repeated(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only io_uring says EINTR; the interpreter repeats interrupted calls itself (PEP 475)."""
    store(bench, "file", b"x" * PAGE)
    descriptor = bench.run(Action.OPEN, path=bench.path("file"))
    completions = Ring.completions
    interruptions = [-errno.EINTR, -errno.EINTR]

    def interrupted(ring: Ring) -> list[tuple[int, int]]:
        return [
            (token, interruptions.pop() if interruptions else result)
            for token, result in completions(ring)
        ]

    monkeypatch.setattr(Ring, "completions", interrupted)
    assert bench.run(Action.READ, descriptor=descriptor, slot=1, length=PAGE) == PAGE
    assert bytes(bench.buffers[1][:PAGE]) == b"x" * PAGE
    assert bench.run(Action.CLOSE, descriptor=descriptor) == 0


def test_a_directory_cannot_be_read(bench: Bench) -> None:
    descriptor = bench.run(Action.OPEN, path=str(bench.directory))
    if descriptor >= 0:
        result = bench.run(Action.READ, descriptor=descriptor, slot=0, length=PAGE)
        assert bench.run(Action.CLOSE, descriptor=descriptor) == 0
        assert result == -errno.EISDIR
    else:
        assert bench.direct
        assert descriptor == -errno.EINVAL


@pytest.mark.parametrize("action", [Action.OPEN, Action.CREATE])
def test_a_symbolic_link_is_refused(bench: Bench, action: Action) -> None:
    store(bench, "file", bytes(PAGE))
    os.symlink(bench.path("file"), bench.path("symlink"))
    expected = -errno.ELOOP if action is Action.OPEN else -errno.EEXIST
    assert bench.run(action, path=bench.path("symlink")) == expected


@pytest.mark.parametrize("action", [Action.OPEN, Action.CREATE])
def test_a_symbolic_link_on_the_way_is_refused(bench: Bench, action: Action) -> None:
    assert bench.run(Action.MKDIR, path=bench.path("abc")) == 0
    store(bench, "abc/file", bytes(PAGE))
    os.symlink(bench.path("abc"), bench.path("link"))
    name = "link/file" if action is Action.OPEN else "link/new"
    assert bench.run(action, path=bench.path(name)) == -errno.ELOOP
    assert os.listdir(bench.path("abc")) == ["file"]


def test_link_names_the_symbolic_link_itself(bench: Bench) -> None:
    os.symlink("nowhere", bench.path("symlink"))
    assert bench.run(Action.LINK, path=bench.path("symlink"), target=bench.path("other")) == 0
    assert os.readlink(bench.path("other")) == "nowhere"


def test_files_and_directories_are_the_users_alone(bench: Bench, open_umask: None) -> None:
    store(bench, "file", bytes(PAGE))
    assert bench.run(Action.MKDIR, path=bench.path("abc")) == 0
    assert stat.S_IMODE(os.stat(bench.path("file")).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(bench.path("abc")).st_mode) == 0o700


def test_descriptors_are_not_inherited(bench: Bench) -> None:
    created = bench.run(Action.CREATE, path=bench.path("file"))
    opened = bench.run(Action.OPEN, path=bench.path("file"))
    assert not os.get_inheritable(created)
    assert not os.get_inheritable(opened)
    for descriptor in (created, opened):
        assert bench.run(Action.CLOSE, descriptor=descriptor) == 0


def test_direct_and_buffered_descriptors(bench: Bench) -> None:
    created = bench.run(Action.CREATE, path=bench.path("file"))
    opened = bench.run(Action.OPEN, path=bench.path("file"))
    for descriptor in (created, opened):
        flags = int(
            next(
                line.split()[1]
                for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
                if line.startswith("flags:")
            ),
            base=8,
        )
        assert bool(flags & os.O_DIRECT) == bench.direct
        assert bench.run(Action.CLOSE, descriptor=descriptor) == 0


@pytest.mark.parametrize("action", [Action.READ, Action.WRITE, Action.CLOSE])
def test_a_closed_descriptor_is_ebadf(bench: Bench, action: Action) -> None:
    descriptor = os.open(bench.directory, os.O_RDONLY)
    os.close(descriptor)
    assert bench.run(action, descriptor=descriptor, slot=0, length=PAGE) == -errno.EBADF
    assert bench.run(action, descriptor=-1, slot=0, length=PAGE) == -errno.EBADF


@pytest.mark.parametrize("action", [Action.READ, Action.WRITE, Action.CLOSE])
def test_a_number_that_no_descriptor_can_have_is_refused(bench: Bench, action: Action) -> None:
    result = bench.run(action, descriptor=1 << 40, slot=0, length=PAGE)
    assert result == -errno.EINVAL


def test_the_wrong_direction_is_ebadf(bench: Bench) -> None:
    descriptor = bench.run(Action.CREATE, path=bench.path("file"))
    assert bench.run(Action.READ, descriptor=descriptor, slot=0, length=PAGE) == -errno.EBADF
    assert bench.run(Action.CLOSE, descriptor=descriptor) == 0


@pytest.mark.parametrize(
    ("slot", "length"), [(0, 0), (0, SLOT_BYTES + PAGE), (SLOTS, PAGE), (-1, PAGE)]
)
@pytest.mark.parametrize("action", [Action.READ, Action.WRITE])
def test_a_transfer_outside_its_slot_is_refused(
    bench: Bench, action: Action, slot: int, length: int
) -> None:
    store(bench, "file", bytes(SLOT_BYTES))
    for buffer in bench.buffers:
        buffer[:] = b"\xee" * SLOT_BYTES
    descriptor = bench.run(Action.OPEN, path=bench.path("file"))
    result = bench.run(action, descriptor=descriptor, slot=slot, length=length)
    assert bench.run(Action.CLOSE, descriptor=descriptor) == 0
    assert result == -errno.EINVAL
    assert all(bytes(buffer) == b"\xee" * SLOT_BYTES for buffer in bench.buffers)


@pytest.mark.parametrize("action", [Action.OPEN, Action.CREATE, Action.UNLINK, Action.MKDIR])
def test_a_path_that_no_file_can_have(bench: Bench, action: Action) -> None:
    for name in ("file", "fil"):
        Path(bench.path(name)).touch()
    too_long = bench.path("x" * 5000)
    results = bench.run_all(
        [
            bench.operation(action, path=bench.path("fil\0e")),
            bench.operation(action, path=bench.path("\ud800")),
            bench.operation(action, path=too_long),
            bench.operation(Action.OPEN, path=bench.path("file")),
        ]
    )
    *refused, descriptor = (result for _, result in sorted(results.items()))
    assert refused == [-errno.EINVAL, -errno.EINVAL, -errno.ENAMETOOLONG]
    assert sorted(os.listdir(bench.directory)) == ["fil", "file"]
    assert bench.run(Action.CLOSE, descriptor=descriptor) == 0


def test_names_that_are_not_ascii(bench: Bench) -> None:
    for name in ("ümläut", os.fsdecode(b"\xff\xfe")):
        store(bench, name, name.encode(errors="surrogateescape").ljust(PAGE, b"."))
        assert load(bench, name, PAGE) == PAGE
        assert os.fsencode(name) in os.listdir(os.fsencode(bench.directory))


def test_running_out_of_descriptors_is_emfile(bench: Bench) -> None:
    store(bench, "file", bytes(PAGE))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(bench.directory, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        result = bench.run(Action.OPEN, path=bench.path("file"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert result == -errno.EMFILE


def test_a_full_device_is_enospc(bench: Bench) -> None:
    if bench.direct:
        pytest.skip("the always full device has no direct I/O")
    descriptor = os.open("/dev/full", os.O_WRONLY)
    result = bench.run(Action.WRITE, descriptor=descriptor, slot=0, length=PAGE)
    assert bench.run(Action.CLOSE, descriptor=descriptor) == 0
    assert result == -errno.ENOSPC


def test_more_operations_than_the_engine_takes_at_once(bench: Bench) -> None:
    count = 20 * ENTRIES
    results = bench.run_all(
        bench.operation(Action.MKDIR, path=bench.path(f"{number:03}")) for number in range(count)
    )
    assert set(results.values()) == {0}
    assert sorted(os.listdir(bench.directory)) == [f"{number:03}" for number in range(count)]


def test_more_submissions_while_the_engine_is_full(bench: Bench) -> None:
    operations = [
        bench.operation(Action.MKDIR, path=bench.path(f"{number:03}"))
        for number in range(10 * ENTRIES)
    ]
    for operation in operations:
        bench.engine.submit([operation])
    assert bench.engine.in_flight == len(operations)
    completions = bench.wait(len(operations))
    assert sorted(completion.token for completion in completions) == [
        operation.token for operation in operations
    ]
    assert bench.engine.in_flight == 0
    assert not bench.is_readable()
    assert bench.engine.reap() == []


def test_an_operation_that_waits_does_not_hold_up_others(bench: Bench) -> None:
    """Out of order: opening a FIFO ends when someone opens its other end."""
    if bench.direct:
        pytest.skip("a FIFO has no direct I/O")
    os.mkfifo(bench.path("fifo"))
    waiting = bench.operation(Action.OPEN, path=bench.path("fifo"))
    bench.engine.submit([waiting])
    store(bench, "file", b"x" * PAGE)
    assert load(bench, "file", PAGE, slot=1) == PAGE
    assert bench.engine.in_flight == 1
    writer = os.open(bench.path("fifo"), os.O_WRONLY)
    (completion,) = bench.wait(1)
    assert completion.token == waiting.token
    os.close(writer)
    assert bench.run(Action.CLOSE, descriptor=completion.result) == 0


def test_completions_come_by_reaping_alone(bench: Bench) -> None:
    assert not bench.is_readable()
    assert bench.engine.reap() == []
    bench.engine.submit([bench.operation(Action.MKDIR, path=bench.path("abc"))])
    bench.wait_readable()
    assert bench.engine.in_flight == 1
    assert bench.is_readable()
    assert [completion.result for completion in bench.engine.reap()] == [0]
    assert bench.engine.in_flight == 0
    assert not bench.is_readable()
    assert bench.engine.reap() == []


def test_nothing_submitted_is_nothing_done(bench: Bench) -> None:
    bench.engine.submit([])
    assert bench.engine.in_flight == 0
    assert not bench.is_readable()


def test_closing_with_operations_in_flight_is_refused(bench: Bench) -> None:
    bench.engine.submit([bench.operation(Action.MKDIR, path=bench.path("abc"))])
    with pytest.raises(InvariantError, match="1 operations are in flight"):
        bench.engine.close()
    bench.wait_readable()
    with pytest.raises(InvariantError, match="in flight"):
        bench.engine.close()
    assert [completion.result for completion in bench.engine.reap()] == [0]


def test_a_token_in_flight_is_refused(bench: Bench) -> None:
    operation = bench.operation(Action.MKDIR, path=bench.path("abc"))
    bench.engine.submit([operation])
    with pytest.raises(InvariantError, match=f"token {operation.token} is in flight"):
        bench.engine.submit([operation])
    bench.drain()


@pytest.mark.parametrize("make", [make_uring, make_threads], ids=["io_uring", "threads"])
def test_closing_gives_back_descriptors_and_threads(
    make: Callable[[list[memoryview], bool], IoEngine], direct: bool, tmp_path: Path
) -> None:
    before = os.listdir("/proc/self/fd"), threading.enumerate()
    try:
        bench = Bench(make, direct, tmp_path)
    except OSError as error:
        pytest.skip(f"no io_uring here: {error.strerror}")
    store(bench, "file", bytes(PAGE))
    bench.engine.close()
    assert (os.listdir("/proc/self/fd"), threading.enumerate()) == before


class Model:
    """Names and contents that the files should have."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.directories: set[str] = set()

    def expect(self, operation: FileOperation, data: bytes) -> int:
        """Apply a metadata operation or a store; the expected result, descriptors as 0."""
        name, target = Path(operation.path).name, Path(operation.target).name
        taken = self.files.keys() | self.directories
        match operation.action:
            case Action.CREATE if name in taken:
                return -errno.EEXIST
            case Action.CREATE:
                self.files[name] = data
                return 0
            case Action.MKDIR if name in taken:
                return -errno.EEXIST
            case Action.MKDIR:
                self.directories.add(name)
                return 0
            case Action.UNLINK if name in self.directories:
                return -errno.EISDIR
            case Action.UNLINK | Action.LINK | Action.OPEN if name not in taken:
                return -errno.ENOENT
            case Action.UNLINK:
                del self.files[name]
                return 0
            case Action.LINK if target in taken:
                return -errno.EEXIST
            case Action.LINK if name in self.directories:
                return -errno.EPERM
            case Action.LINK:
                self.files[target] = self.files[name]
                return 0
            case Action.OPEN:
                return 0
        raise AssertionError(operation)


@pytest.mark.parametrize("seed", range(3))
def test_many_mixed_operations_agree_with_a_model(bench: Bench, seed: int) -> None:
    """Rounds of operations on distinct names run together, so that their order cannot matter."""
    rng = random.Random(seed)
    model = Model()
    names = [f"name-{number}" for number in range(24)]
    for _ in range(25):
        rng.shuffle(names)
        fresh = [
            _random_operation(bench, model, rng, *pair)
            for pair in zip(names[::2], names[1::2], strict=True)
        ]
        expected, contents = {}, {}
        for operation in fresh:
            contents[operation.token] = rng.randbytes(rng.randint(1, 16) * PAGE)
            expected[operation.token] = model.expect(operation, contents[operation.token])
        results = bench.run_all(fresh)
        assert {t: min(r, 0) for t, r in results.items()} == expected, f"seed {seed}"
        _transfer(bench, model, fresh, results, contents)
    for name, data in model.files.items():
        assert Path(bench.path(name)).read_bytes() == data, f"seed {seed}, {name}"
    assert set(os.listdir(bench.directory)) == model.files.keys() | model.directories


def _random_operation(
    bench: Bench, model: Model, rng: random.Random, name: str, other: str
) -> FileOperation:
    actions = [Action.CREATE, Action.CREATE, Action.LINK, Action.UNLINK, Action.MKDIR]
    if name not in model.directories:
        actions += [Action.OPEN] * 3
    return bench.operation(rng.choice(actions), path=bench.path(name), target=bench.path(other))


def _transfer(
    bench: Bench,
    model: Model,
    opened: list[FileOperation],
    results: dict[int, int],
    contents: dict[int, bytes],
) -> None:
    """Write what was created and read what was opened, as many at once as there are slots."""
    files = [
        operation
        for operation in opened
        if operation.action in (Action.CREATE, Action.OPEN) and results[operation.token] >= 0
    ]
    for start in range(0, len(files), SLOTS):
        transfers, expected = [], {}
        for slot, operation in enumerate(files[start : start + SLOTS]):
            descriptor = results[operation.token]
            if operation.action is Action.CREATE:
                data = contents[operation.token]
                bench.buffers[slot][: len(data)] = data
                action, length = Action.WRITE, len(data)
            else:
                data = model.files[Path(operation.path).name]
                action, length = Action.READ, SLOT_BYTES
            transfer = bench.operation(action, descriptor=descriptor, slot=slot, length=length)
            transfers.append(transfer)
            expected[transfer.token] = len(data)
        assert bench.run_all(transfers) == expected
        for transfer, operation in zip(transfers, files[start:], strict=False):
            if operation.action is Action.OPEN:
                data = model.files[Path(operation.path).name]
                assert bytes(bench.buffers[transfer.slot][: len(data)]) == data
        closes = [bench.operation(Action.CLOSE, descriptor=t.descriptor) for t in transfers]
        assert set(bench.run_all(closes).values()) == {0}
