# SPDX-License-Identifier: Apache-2.0
"""The reactor's thread: a disk in memory that fails or holds still, jobs that always end."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import pykvcache.reactor.reactor as reactor_module
from pykvcache.checksum import checksum
from pykvcache.layout import FORMAT_VERSION, PAGE, Trailer, decode_trailer, quarantine_name
from pykvcache.pool import Pool
from pykvcache.reactor.copier import Copier, NoCopier
from pykvcache.reactor.reactor import Reactor
from pykvcache.transfer.core import Limits
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure, Job, JobResult
from pykvcache.transfer.operations import Action
from tests.core.driver import FILE_BYTES, PAYLOAD_BYTES, chunk_of
from tests.core.fakes import (
    HOLD,
    WAIT_S,
    BrokenCopier,
    HeldCopier,
    MemoryDisk,
    MemoryEngine,
    wait_until,
)

FINGERPRINT = bytes(range(32))
LIMITS = Limits(io_depth=2, open_lookahead=4, load_deadline_s=1000.0, jobs_max=4096)
SLOTS = 4


class Bench:
    """A running reactor over a disk in memory."""

    def __init__(self, copier: Copier, limits: Limits = LIMITS) -> None:
        self.disk = MemoryDisk()
        self.copier = copier
        self.engines: list[MemoryEngine] = []
        self.cores: set[int] = set()
        self.reactor = Reactor(
            limits,
            Pool(SLOTS, FILE_BYTES),
            self._make_engine,
            copier,
            fingerprint=FINGERPRINT,
            writer="ab",
        )
        self._job_ids = itertools.count(1)
        self._taken: dict[int, JobResult] = {}

    def _make_engine(self, buffers: object) -> MemoryEngine:
        self.cores = os.sched_getaffinity(0)
        self.engines.append(MemoryEngine(self.disk, buffers))  # type: ignore[arg-type]
        return self.engines[-1]

    def submit(self, direction: Direction, *chunks: ChunkTransfer) -> int:
        job_id = next(self._job_ids)
        self.reactor.submit(Job(job_id, direction, chunks, self.reactor.fence()))
        return job_id

    def store(self, *names: str) -> int:
        return self.submit(Direction.STORE, *map(chunk_of, names))

    def load(self, *names: str) -> int:
        return self.submit(Direction.LOAD, *map(chunk_of, names))

    def result(self, job_id: int) -> JobResult:
        """Wait for a job's result."""
        wait_until(lambda: job_id in self._take(), f"job {job_id} does not end")
        return self._taken[job_id]

    def failure(self, job_id: int) -> Failure:
        """Wait for a job's result, in which all chunks failed alike."""
        result = self.result(job_id)
        assert len(result.failures) == result.chunks
        (failure,) = set(result.failures.values())
        return failure

    def _take(self) -> dict[int, JobResult]:
        for result in self.reactor.take_results():
            assert result.job_id not in self._taken, "a job ended twice"
            self._taken[result.job_id] = result
        return self._taken

    def put(self, name: str, **changes: object) -> None:
        """Place the file of a chunk, with fields of its trailer changed."""
        chunk = chunk_of(name)
        fields: dict[str, object] = {
            "key": chunk.key,
            "fingerprint": FINGERPRINT,
            "payload_bytes": PAYLOAD_BYTES,
            "span": chunk.span,
            "time_ns": 1,
            "writer": b"xy",
            "checksum": checksum(bytes(PAYLOAD_BYTES)),
        }
        page = bytearray(PAGE)
        Trailer(**{**fields, **changes}).encode_into(memoryview(page))  # type: ignore[arg-type]
        self.disk.files[chunk.path] = bytes(PAYLOAD_BYTES) + bytes(page)

    def end(self) -> None:
        """Let everything go, stop, and check that nothing was left behind."""
        self.disk.let_go()
        if isinstance(self.copier, HeldCopier):
            self.copier.let_go.set()
        self.reactor.stop(WAIT_S)
        assert not self.reactor._thread.is_alive()
        self.disk.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    benches = []

    def make_bench(copier: Copier | None = None, limits: Limits = LIMITS) -> Bench:
        bench = Bench(copier or NoCopier(), limits)
        benches.append(bench)
        bench.reactor.start()
        return bench

    yield make_bench
    for bench in benches:
        bench.end()


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make()


@pytest.fixture
def short_abandon_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reactor_module, "ABANDON_TIMEOUT_S", 0.05)


# --- ordinary work


def test_what_is_stored_is_loaded(bench: Bench) -> None:
    stored = bench.result(bench.store("a", "b", "c", "d", "e", "f"))
    assert stored.success
    assert stored.file_bytes == 6 * FILE_BYTES
    assert bench.result(bench.store("a")).present == 1
    loaded = bench.result(bench.load("f", "a"))
    assert loaded.success
    assert loaded.copied_bytes == 2 * PAYLOAD_BYTES
    assert bench.failure(bench.load("missing")) is Failure.NOT_FOUND


def test_a_file_says_what_it_holds(bench: Bench) -> None:
    chunk = chunk_of("a", first=1, count=2)
    bench.result(bench.submit(Direction.STORE, chunk))
    file = bench.disk.files[chunk.path]
    assert len(file) == FILE_BYTES
    trailer = decode_trailer(file[-PAGE:])
    assert isinstance(trailer, Trailer)
    assert (trailer.key, trailer.fingerprint, trailer.span) == (chunk.key, FINGERPRINT, chunk.span)
    assert (trailer.payload_bytes, trailer.writer) == (PAYLOAD_BYTES, b"ab")
    assert trailer.time_ns > 1_600_000_000_000_000_000


@pytest.mark.parametrize(
    "changes",
    [{"key": b"other"}, {"fingerprint": bytes(32)}, {"payload_bytes": PAGE}],
    ids=["key", "identity", "length"],
)
def test_a_file_of_something_else_is_a_miss_and_put_aside(
    bench: Bench, changes: dict[str, object]
) -> None:
    bench.put("a", **changes)
    bench.put("good")
    content = bench.disk.files[chunk_of("a").path]
    result = bench.result(bench.load("a", "good"))
    assert result.failures == {b"a": Failure.WRONG_CONTENT}
    wait_until(lambda: quarantined(bench, 0) == content, "the bad file stays")
    assert bench.disk.files.keys() == {chunk_of("good").path, quarantine_name(PATH, 0)}


PATH = chunk_of("any").path


def quarantined(bench: Bench, number: int) -> bytes | None:
    """What is in quarantine under that number."""
    return bench.disk.files.get(quarantine_name(PATH, number))


def test_a_payload_with_a_flipped_bit_is_a_miss_and_put_aside(bench: Bench) -> None:
    bench.put("a")
    bench.put("good")
    path = chunk_of("a").path
    bench.disk.files[path] = b"\1" + bench.disk.files[path][1:]
    result = bench.result(bench.load("a", "good"))
    assert result.failures == {b"a": Failure.CHECKSUM}
    wait_until(lambda: quarantined(bench, 0), "the bad file stays")
    assert bench.result(bench.store("a")).present == 0


def test_a_file_of_the_format_before_is_a_miss_and_deleted(bench: Bench) -> None:
    bench.put("a")
    path = chunk_of("a").path
    page = bytearray(bench.disk.files[path][-PAGE:])
    struct.pack_into("<H", page, 8, FORMAT_VERSION - 1)
    struct.pack_into("<I", page, PAGE - 4, zlib.crc32(page[:-4]))
    bench.disk.files[path] = bytes(PAYLOAD_BYTES) + bytes(page)
    assert bench.failure(bench.load("a")) is Failure.WRONG_CONTENT
    wait_until(lambda: not bench.disk.files, "nothing went wrong with it that someone may look at")


def test_what_the_trailer_says_alone_counts_when_nothing_is_compared(
    make: Callable[..., Bench],
) -> None:
    bench = make(limits=replace(LIMITS, check_every=0))
    bench.put("a", checksum=bytes(16))
    bench.put("damaged")
    damaged = chunk_of("damaged").path
    bench.disk.files[damaged] = bench.disk.files[damaged][:-1] + b"?"
    result = bench.result(bench.load("a", "damaged"))
    assert result.failures == {b"damaged": Failure.TRAILER}


def test_who_does_not_even_ask_the_page_still_asks_whose_it_is(
    make: Callable[..., Bench],
) -> None:
    bench = make(limits=replace(LIMITS, check_every=0, checks_trailers=False))
    bench.put("damaged")
    damaged = chunk_of("damaged").path
    bench.disk.files[damaged] = bench.disk.files[damaged][:-1] + b"?"
    bench.put("a", fingerprint=bytes(32))
    result = bench.result(bench.load("a", "damaged"))
    assert result.failures == {b"a": Failure.WRONG_CONTENT}


def test_a_truncated_file_is_a_miss(bench: Bench) -> None:
    path = chunk_of("a").path
    bench.put("a")
    bench.disk.files[path] = bench.disk.files[path][: FILE_BYTES // 2]
    assert bench.failure(bench.load("a")) is Failure.SHORT_TRANSFER


@pytest.mark.parametrize(
    ("direction", "action", "result", "failure"),
    [
        (Direction.LOAD, Action.OPEN, -errno.EMFILE, Failure.NO_DESCRIPTORS),
        (Direction.LOAD, Action.READ, -errno.EIO, Failure.IO_ERROR),
        (Direction.STORE, Action.CREATE, -errno.EACCES, Failure.PERMISSION),
        (Direction.STORE, Action.WRITE, -errno.ENOSPC, Failure.NO_SPACE),
        (Direction.STORE, Action.WRITE, PAGE, Failure.SHORT_TRANSFER),
        (Direction.STORE, Action.CLOSE, -errno.EIO, Failure.IO_ERROR),
        (Direction.STORE, Action.LINK, -errno.EDQUOT, Failure.NO_SPACE),
    ],
)
def test_a_failing_disk_fails_the_chunk_and_nothing_else(
    bench: Bench, direction: Direction, action: Action, result: int, failure: Failure
) -> None:
    bench.put("a")
    bench.disk.rule = lambda operation: result if operation.action is action else None
    chunk = chunk_of("a" if direction is Direction.LOAD else "new")
    assert bench.failure(bench.submit(direction, chunk)) is failure
    bench.disk.rule = lambda operation: None
    assert bench.result(bench.load("a")).success
    assert bench.result(bench.store("other")).success
    wait_until(lambda: bench.reactor.gauges.slots_in_use == 0, "a slot is lost")


def test_jobs_beyond_the_limit_fail_at_once(make: Callable[..., Bench]) -> None:
    bench = make(limits=Limits(2, 4, 1000.0, jobs_max=1))
    bench.put("a")
    bench.disk.rule = lambda operation: HOLD if operation.action is Action.READ else None
    waiting = bench.load("a")
    bench.disk.wait_until_holding()
    assert bench.failure(bench.store("b")) is Failure.OVERLOAD
    bench.disk.let_go()
    assert bench.result(waiting).success


def test_gauges_show_what_is_in_use(make: Callable[..., Bench]) -> None:
    bench = make(HeldCopier())
    assert bench.reactor.gauges.slots == SLOTS
    bench.store("a", "b", "c")
    wait_until(lambda: bench.reactor.gauges.slots_in_use == SLOTS - LIMITS.io_depth, "no store")
    gauges = bench.reactor.gauges
    assert (gauges.jobs, gauges.queues["store_waiting"]) == (1, 1)


def test_the_ring_is_made_by_a_thread_that_is_not_bound_to_its_makers_core(
    make: Callable[..., Bench],
) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # as vLLM's CPU worker binds the thread that starts it
    try:
        with ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, cores)) as other:
            other.submit(int).result()  # a thread of the process that may run anywhere
            bench = make()
    finally:
        os.sched_setaffinity(0, cores)
    assert bench.cores == cores


def test_an_idle_reactor_sleeps(bench: Bench) -> None:
    bench.result(bench.store("a"))
    wait_until(lambda: bench.reactor._core.idle, "not idle")
    turns = itertools.count()
    bench.reactor._clock = lambda: float(next(turns))
    bench.result(bench.store("b"))
    wait_until(lambda: bench.reactor._core.idle, "not idle")
    assert next(turns) < 60, "a store takes about ten turns"


def test_copies_run_on_the_reactors_thread_after_the_fence_of_their_job(
    make: Callable[..., Bench],
) -> None:
    copier = HeldCopier()
    copier.let_go.set()
    bench = make(copier)
    assert copier.thread not in (None, threading.get_ident())
    for name in "abc":
        assert bench.result(bench.store(name)).success
    assert copier.fences == [0, 1, 2]
    bench.reactor.stop(WAIT_S)
    assert copier.closed


# --- what never returns


def test_a_load_ends_at_its_deadline_though_its_read_never_returns(
    make: Callable[..., Bench],
) -> None:
    bench = make(limits=Limits(2, 4, load_deadline_s=0.05, jobs_max=10))
    bench.put("a")
    bench.disk.rule = lambda operation: HOLD if operation.action is Action.READ else None
    assert bench.failure(bench.load("a")) is Failure.DEADLINE
    assert bench.reactor.gauges.slots_in_use == 1
    bench.disk.let_go()
    wait_until(lambda: bench.reactor.gauges.slots_in_use == 0, "the slot is lost")


@pytest.mark.usefixtures("short_abandon_timeout")
def test_a_read_that_never_returns_does_not_hold_up_the_end(bench: Bench) -> None:
    bench.put("a")
    bench.disk.rule = lambda operation: HOLD if operation.action is Action.READ else None
    job = bench.load("a")
    bench.disk.wait_until_holding()
    finished = stop_in_background(bench.reactor, timeout_s=WAIT_S * 10)
    assert bench.failure(job) is Failure.SHUTDOWN
    assert finished.wait(WAIT_S), "nobody needs the read any more"
    assert not bench.engines[0].closed, "the kernel may yet write to its buffer"


@pytest.mark.usefixtures("short_abandon_timeout")
def test_a_write_that_never_returns_is_waited_for_until_the_timeout(bench: Bench) -> None:
    bench.disk.rule = lambda operation: HOLD if operation.action is Action.WRITE else None
    job = bench.store("a")
    bench.disk.wait_until_holding()
    bench.reactor.stop(0.05)
    assert not bench.reactor._thread.is_alive()
    assert bench.failure(job) is Failure.SHUTDOWN


@pytest.mark.usefixtures("short_abandon_timeout")
def test_the_end_comes_when_only_what_nobody_needs_is_left(bench: Bench) -> None:
    bench.put("a")
    held = (Action.READ, Action.WRITE)
    bench.disk.rule = lambda operation: HOLD if operation.action in held else None
    load, store = bench.load("a"), bench.store("b")
    wait_until(lambda: set(held) <= set(bench.disk.seen), "not held")
    finished = stop_in_background(bench.reactor, timeout_s=WAIT_S * 10)
    assert bench.failure(load) is Failure.SHUTDOWN
    assert not finished.is_set()
    bench.disk.let_go(Action.WRITE)
    assert bench.result(store).success
    assert finished.wait(WAIT_S)


@pytest.mark.usefixtures("short_abandon_timeout")
def test_what_is_abandoned_is_cleaned_up(make: Callable[..., Bench]) -> None:
    bench = make(limits=Limits(io_depth=1, open_lookahead=4, load_deadline_s=1000.0, jobs_max=9))
    bench.disk.rule = lambda operation: HOLD if operation.action is Action.WRITE else None
    bench.store("a", "b", "c")
    wait_until(lambda: bench.reactor.gauges.queues.get("store_copied") == 2, "not created")
    assert len(bench.disk.files) == 3
    bench.reactor.stop(0.05)
    assert len(bench.disk.files) == 1, "only the temporary that is still being written is left"


@pytest.mark.usefixtures("short_abandon_timeout")
@pytest.mark.parametrize("direction", Direction)
def test_a_copy_that_never_returns_does_not_hold_up_the_end(
    make: Callable[..., Bench], direction: Direction
) -> None:
    copier = HeldCopier()
    bench = make(copier)
    bench.put("a")
    job = bench.submit(direction, chunk_of("a"))
    copier.wait_until_launched()
    finished = stop_in_background(bench.reactor, timeout_s=0.05)
    assert finished.wait(WAIT_S)
    assert not bench.reactor._thread.is_alive()
    assert bench.failure(job) is Failure.SHUTDOWN
    assert not copier.closed, "the device may yet write to the pool"


def stop_in_background(reactor: Reactor, timeout_s: float) -> threading.Event:
    """Stop on another thread; the event says that the reactor's thread has ended."""
    finished = threading.Event()

    def stop() -> None:
        reactor.stop(timeout_s)
        if not reactor._thread.is_alive():
            finished.set()

    threading.Thread(target=stop, daemon=True).start()
    return finished


# --- flush


def test_a_flush_of_nothing_returns(bench: Bench) -> None:
    assert bench.reactor.flush([], WAIT_S)
    assert bench.reactor.flush([99], WAIT_S)
    wait_until(lambda: not bench.reactor._flushes, "a flush is kept")


def test_a_flush_does_not_wait_for_the_disk(bench: Bench) -> None:
    bench.disk.rule = lambda operation: HOLD if operation.action is Action.WRITE else None
    job = bench.store("a")
    assert bench.reactor.flush([job], WAIT_S)
    bench.disk.wait_until_holding()
    bench.disk.let_go()
    assert bench.result(job).success


def test_a_flush_drops_what_finds_no_slot(make: Callable[..., Bench]) -> None:
    copier = HeldCopier()
    bench = make(copier)
    running = bench.store("a", "b")
    wait_until(lambda: bench.reactor.gauges.slots_in_use == 2, "no store")
    flushed = bench.store("c")
    assert bench.reactor.flush([flushed], WAIT_S), "it needs nothing of the device any more"
    assert bench.failure(flushed) is Failure.DROPPED
    copier.let_go.set()
    assert bench.result(running).success


def test_a_flush_that_times_out_forsakes_its_stores(make: Callable[..., Bench]) -> None:
    copier = HeldCopier()
    bench = make(copier)
    job = bench.store("a")
    copier.wait_until_launched()
    assert bench.reactor.flush([job], 0.01) is False
    assert bench.failure(job) is Failure.DROPPED
    copier.let_go.set()
    wait_until(lambda: bench.reactor.gauges.slots_in_use == 0, "the slot is lost")
    bench.reactor.stop(WAIT_S)
    assert Action.LINK not in bench.disk.seen
    assert not bench.disk.files


def test_a_flush_waits_for_loads(bench: Bench) -> None:
    bench.put("a")
    bench.disk.rule = lambda operation: HOLD if operation.action is Action.READ else None
    job = bench.load("a")
    assert not bench.reactor.flush([job], 0.01)
    bench.disk.let_go()
    assert bench.reactor.flush([job], WAIT_S)
    assert bench.result(job).success


# --- the end


def test_stopping_finishes_stores_whose_data_is_in_the_pool(bench: Bench) -> None:
    bench.disk.rule = lambda operation: HOLD if operation.action is Action.WRITE else None
    job = bench.store("a", "b", "lost")
    bench.disk.wait_until_holding()
    finished = stop_in_background(bench.reactor, timeout_s=WAIT_S)
    wait_until(lambda: bench.reactor._stopped, "not stopping")
    bench.disk.let_go()
    assert finished.wait(WAIT_S)
    result = bench.result(job)
    assert set(result.failures.values()) <= {Failure.SHUTDOWN}
    assert chunk_of("a").path in bench.disk.files
    assert chunk_of("b").path in bench.disk.files
    assert not [path for path in bench.disk.files if path.endswith(".tmp")]
    assert bench.engines[0].closed


def test_stopping_twice_and_a_job_after_it(bench: Bench) -> None:
    bench.reactor.stop(WAIT_S)
    bench.reactor.stop(WAIT_S)
    assert bench.failure(bench.store("a")) is Failure.SHUTDOWN
    assert bench.failure(bench.load("a")) is Failure.SHUTDOWN
    assert bench.result(bench.load()).success, "nothing was asked for"
    assert bench.reactor.flush([1, 2], WAIT_S)


def test_a_reactor_that_was_never_started_can_be_stopped() -> None:
    bench = Bench(NoCopier())
    bench.reactor.stop(0)
    assert bench.failure(bench.load("a")) is Failure.SHUTDOWN
    bench.disk.close()


def test_an_engine_that_cannot_be_made_is_the_callers_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(buffers: object) -> MemoryEngine:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    reactor = Reactor(
        LIMITS, Pool(SLOTS, FILE_BYTES), refuse, NoCopier(), fingerprint=FINGERPRINT, writer="ab"
    )
    with pytest.raises(PermissionError):
        reactor.start()
    reactor.stop(WAIT_S)
    assert not caplog.records


# --- bugs


def raise_at(action: Action) -> Callable[[object], None]:
    def rule(operation: object) -> None:
        if getattr(operation, "action", None) is action:
            raise RuntimeError("a bug in the engine")

    return rule


def only_error(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    return record.getMessage()


@pytest.mark.parametrize("action", [Action.OPEN, Action.READ, Action.CREATE, Action.CLOSE])
def test_a_bug_in_the_engine_fails_every_job_and_leaves_the_server_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture, action: Action
) -> None:
    bench.put("a")
    bench.disk.rule = raise_at(action)
    jobs = [bench.load("a"), bench.store("b"), bench.load("c")]
    results = [bench.result(job) for job in jobs]
    assert not all(result.success for result in results)
    assert bench.failure(bench.load("a")) is Failure.SHUTDOWN
    assert bench.failure(bench.store("d")) is Failure.SHUTDOWN
    assert bench.reactor.flush(jobs, WAIT_S)
    assert only_error(caplog).startswith("The KV offloading reactor failed")
    bench.reactor.stop(0)


@pytest.mark.parametrize("direction", Direction)
def test_a_bug_in_the_copier_fails_every_job(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture, direction: Direction
) -> None:
    bench = make(BrokenCopier())
    bench.put("a")
    assert bench.failure(bench.submit(direction, chunk_of("a"))) is Failure.SHUTDOWN
    assert bench.failure(bench.load("a")) is Failure.SHUTDOWN
    assert only_error(caplog).startswith("The KV offloading reactor failed")


@pytest.mark.parametrize(("direction", "method"), [("load", "compare"), ("store", "seal")])
def test_a_bug_in_the_trailers_fails_every_job(
    bench: Bench,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
    method: str,
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("a bug in the trailers")

    bench.put("a")
    monkeypatch.setattr(bench.reactor._trailers, method, fail)
    assert bench.failure(bench.submit(Direction(direction), chunk_of("a"))) is Failure.SHUTDOWN
    assert bench.failure(bench.load("a")) is Failure.SHUTDOWN
    assert only_error(caplog).startswith("The KV offloading reactor failed")


def test_a_bug_in_the_core_fails_every_job(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put("a")
    bench.disk.rule = lambda operation: HOLD if operation.action is Action.READ else None
    waiting = bench.load("a")
    bench.disk.wait_until_holding()

    def fail(*arguments: object) -> None:
        raise RuntimeError("a bug in the core")

    for method in ("advance", "close", "abandon"):
        monkeypatch.setattr(bench.reactor._core, method, fail)
    later = bench.load("b")
    assert bench.failure(waiting) is Failure.SHUTDOWN
    assert bench.failure(later) is Failure.SHUTDOWN
    assert only_error(caplog).startswith("The KV offloading reactor failed")


def test_a_bug_ends_the_flush_that_waits(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.put("a")
    bench.disk.rule = lambda operation: HOLD if operation.action is Action.READ else None
    job = bench.load("a")
    bench.disk.wait_until_holding()
    finished = threading.Event()

    def flush() -> None:
        bench.reactor.flush([job], WAIT_S * 10)
        finished.set()

    threading.Thread(target=flush, daemon=True).start()
    wait_until(lambda: bench.reactor._flushes, "no flush")
    bench.disk.rule = raise_at(Action.OPEN)
    bench.load("b")
    assert finished.wait(WAIT_S)
    assert only_error(caplog)


def test_a_load_is_not_failed_while_its_blocks_are_written(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    copier = HeldCopier()
    bench = make(copier)
    bench.put("a")
    copied = bench.load("a")
    copier.wait_until_launched()
    bench.disk.rule = raise_at(Action.OPEN)
    failed = bench.load("b")
    wait_until(lambda: bench.reactor._failed, "the bug is not noticed")
    assert not bench.reactor.take_results(), "the engine would reuse blocks that are written"
    copier.let_go.set()
    assert bench.failure(copied) is Failure.SHUTDOWN
    assert bench.failure(failed) is Failure.SHUTDOWN
    assert only_error(caplog)
