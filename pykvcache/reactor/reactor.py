# SPDX-License-Identifier: Apache-2.0
"""One thread that turns the core: mailbox, completions, decisions, submission.

The thread sleeps in ``poll``, which releases the interpreter lock, on the engine's
descriptor and on an eventfd that the mailbox and the sealer ring. CUDA events have no
descriptor, so while copies are in flight the thread looks again every ``Copier.poll_s``.

The engine's thread hands over jobs and takes results; it waits for nothing but
:meth:`Reactor.flush`, which is bounded by its timeout and never waits for the disk.
An exception on the reactor's thread is a bug: it is logged once, every job then fails
(a load is recomputed, a store is a miss), and the engine lives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pykvcache.pool import Pool, SlotLedger
from pykvcache.reactor.affinity import spread_over_process
from pykvcache.reactor.copier import Copier
from pykvcache.reactor.engine import IoEngine
from pykvcache.reactor.messages import (
    Flush,
    Forsake,
    Message,
    Preload,
    failed_result,
    is_load_in_place,
)
from pykvcache.reactor.outbox import Outbox
from pykvcache.reactor.rows import Rows
from pykvcache.reactor.timeline import Timeline
from pykvcache.reactor.trailers import Sealer, Trailers
from pykvcache.transfer.core import Limits, TransferCore
from pykvcache.transfer.jobs import ChunkTransfer, Failure, Job, JobResult
from pykvcache.transfer.operations import ChecksumOperation, CopyOperation, FileOperation

logger = logging.getLogger(__name__)

ENGINE_POLL_S = 1.0
"""Seconds after which the engine is asked anyway while operations are with it: a kernel short
of memory may have refused a submission, which no completion announces."""

WRITER_POLL_S = 0.0002
"""Seconds between looks at what is in flight when the reactor has failed."""

ABANDON_TIMEOUT_S = 2.0
"""Seconds a stopping reactor waits for operations that nobody needs any more; a read that
never returns must not hold up the server's end."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """A snapshot for metrics; chunks, except where the name says otherwise."""

    slots_in_use: int = 0
    slots_retained: int = 0
    slots_staged: int = 0
    """Of those retained, the ones whose chunks requests wait for."""
    slots: int = 0
    jobs: int = 0
    unread: int = 0
    """That loads wait for and that are still to be read from files."""
    queues: Mapping[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    """From files, since the start."""
    preload_failures: Mapping[Failure, int] = field(default_factory=dict)
    """Since the start."""
    is_paused: bool = False
    """Whether the disk is left alone because it does not work."""


class Reactor:
    """The transfers of one worker, on a thread of their own."""

    def __init__(
        self,
        limits: Limits,
        pool: Pool,
        make_engine: Callable[[Sequence[memoryview]], IoEngine],
        copier: Copier,
        *,
        fingerprint: bytes,
        writer: str,
        rows: Rows | None = None,
        timeline: Timeline | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        limits: see :class:`~pykvcache.transfer.core.Limits`.
        pool: the staging memory.
        make_engine: called on the reactor's thread with the slots' memory; a ring must be
            made by the thread that uses it, after any fork.
        copier: the device side.
        fingerprint: the identity's, written into and expected in every trailer.
        writer: hex digits that no other writer of the root uses.
        rows: where payloads lie that are not in slots.
        timeline: records every operation.
        """
        self._pool = pool
        self._ledger = SlotLedger(pool.slots)
        self._core = TransferCore(limits, self._ledger, writer)
        self._make_engine = make_engine
        self._copier = copier
        self._trailers = Trailers(
            pool, fingerprint, writer, rows, intact=not limits.checks_trailers
        )
        self._timeline = timeline
        self._clock = clock
        self._mailbox: deque[Message] = deque()
        self._results: Outbox[JobResult] = Outbox()
        self._dram_changes: Outbox[tuple[bytes, int]] = Outbox()
        self._flushes: list[Flush] = []
        self._open: dict[int, Job] = {}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._failed = False
        self._stopped = False
        self._stop_at: float | None = None
        self._stop_deadline: float | None = None
        self._abandoned = False
        self._gauges = Gauges(slots=pool.slots)
        self._thread = threading.Thread(target=self._run, name="pykvcache-reactor", daemon=True)

    # --- the engine's thread

    def start(self) -> None:
        """Start the thread; returns when its engine is ready.

        Raises:
            Exception: whatever making the engine raised.
        """
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def fence(self) -> object:
        """See :meth:`pykvcache.reactor.copier.Copier.fence`."""
        return self._copier.fence()

    def submit(self, job: Job) -> None:
        """Hand over a job; it ends with exactly one result. Never blocks."""
        self._send(job)
        if self._failed or self._stopped:
            self._bury_mailbox()

    def preload(self, chunks: Sequence[ChunkTransfer]) -> None:
        """Read these into the pool ahead of loads, in this order, as far as the limits allow.

        The list replaces the one before; what is on neither is not kept for anyone. Never
        blocks, and promises nothing: a load reads what is not there.
        """
        self._send(Preload(tuple(chunks)))

    def take_dram_changes(self) -> list[tuple[bytes, int]]:
        """Keys of chunks that came into the pool (+1) or left it (-1) since the last call."""
        return self._dram_changes.take()

    def take_results(self) -> list[JobResult]:
        """The jobs that have ended since the last call."""
        return self._results.take()

    def await_result(self, timeout_s: float) -> None:
        """Return when a job has ended that was not taken yet, or after the timeout."""
        self._results.wait(timeout_s)

    def flush(self, job_ids: Iterable[int], timeout_s: float) -> bool:
        """Wait until the device blocks of these jobs are no longer needed.

        Store chunks that cannot be copied at once are dropped; loads are waited for.

        Returns:
            False when the timeout came first; stores not copied by then are dropped.
        """
        flush = Flush(frozenset(job_ids))
        self._send(flush)
        if self._failed or self._stopped:
            self._bury_mailbox()
        if flush.done.wait(timeout_s):
            return True
        self._send(Forsake(flush.job_ids))
        return False

    @property
    def gauges(self) -> Gauges:
        """The latest snapshot; at most one turn of the loop old."""
        return self._gauges

    def stop(self, timeout_s: float) -> None:
        """End the thread: loads fail, stores whose data is in the pool are finished within
        the timeout. Idempotent."""
        if self._stopped or not self._thread.is_alive():
            self._stopped = True
            return
        self._stop_at = self._clock() + timeout_s
        self._stopped = True
        self._ring()
        self._thread.join(timeout_s + 2 * ABANDON_TIMEOUT_S)

    @property
    def is_quiet(self) -> bool:
        """Whether the thread has ended and no transfer uses memory any more."""
        is_ended = not self._thread.is_alive() and self._sealer.is_ended
        return is_ended and self._engine.in_flight == 0

    def _send(self, message: Message) -> None:
        self._mailbox.append(message)
        self._ring()

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    # --- the reactor's thread

    def _run(self) -> None:
        try:
            spread_over_process()
            self._engine = self._make_engine(self._pool.views())
            self._copier.enter_thread()
            self._sealer = Sealer(self._trailers, self._ring)
        except BaseException as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        try:
            self._loop()
        except Exception:
            logger.exception("The KV offloading reactor failed; offloading is off from here on")
            self._failed = True
            self._await_writers()
        self._sealer.close(ABANDON_TIMEOUT_S)
        self._answer_everything()

    def _loop(self) -> None:
        self._for_anything = self._poller(self._engine.fileno())
        self._for_transfers = self._poller(self._engine.transfers_fileno())
        while not self._ended():
            for descriptor, _events in self._wait():
                if descriptor == self._bell:
                    os.eventfd_read(self._bell)
            self._turn()
        if self._engine.in_flight == 0:
            self._engine.close()
        if self._copier.in_flight == 0:
            self._copier.close()

    def _turn(self) -> None:
        now = self._clock()
        self._read_mailbox(now)
        self._heed_stop(now)
        completions = self._trailers.examine(self._engine.reap())
        completions += self._sealer.reap() + self._copier.reap()
        self._core.complete(completions, now)
        files: list[FileOperation] = []
        copies: list[CopyOperation] = []
        operations = self._core.advance(now)
        if self._timeline is not None:
            self._timeline.turn(completions, operations)
        for operation in operations:
            if isinstance(operation, FileOperation):
                files.append(self._trailers.prepare(operation))
            elif isinstance(operation, ChecksumOperation):
                self._sealer.submit(operation)
            else:
                copies.append(operation)
        if files:  # before the copies: the disk works while the CPU copies
            self._engine.submit(files)
        for copy in copies:
            self._copier.launch(copy)
        self._publish()

    def _read_mailbox(self, now: float) -> None:
        while self._mailbox:
            message = self._mailbox.popleft()
            if isinstance(message, Job):
                self._open[message.job_id] = message
                self._core.submit(message, now)
            elif isinstance(message, Flush):
                self._core.flush(message.job_ids)
                self._flushes.append(message)
            elif isinstance(message, Preload):
                self._core.preload(message.chunks, now)
            else:
                self._core.forsake(message.job_ids, now)

    def _heed_stop(self, now: float) -> None:
        """Close when asked to stop; abandon at the deadline, or when every job has ended and
        only operations that nobody needs are left."""
        if self._stop_at is None:
            return
        if self._stop_deadline is None:
            self._core.close(now)
            self._stop_deadline = self._stop_at
        if self._is_abandonment_due(now):
            self._core.abandon(now)
            self._abandoned = True
            self._stop_deadline = now + ABANDON_TIMEOUT_S

    def _is_abandonment_due(self, now: float) -> bool:
        return (
            self._stop_deadline is not None
            and not self._abandoned
            and (now >= self._stop_deadline or not self._core.jobs)
        )

    def _publish(self) -> None:
        # Before the results: the step that takes the last of them may be the last to look.
        self._gauges = Gauges(
            slots_in_use=self._ledger.leased,
            slots_retained=self._ledger.retained,
            slots_staged=self._core.staged,
            slots=self._ledger.capacity,
            jobs=self._core.jobs,
            unread=self._core.unread,
            queues=self._core.queue_lengths(),
            bytes_read=self._core.bytes_read,
            preload_failures=dict(self._core.preload_failures),
            is_paused=self._core.is_paused,
        )
        self._dram_changes.put(self._core.take_dram_changes())
        results = self._core.take_results()
        for result in results:
            del self._open[result.job_id]
        self._results.put(results)
        if self._flushes:
            waiting = []
            for flush in self._flushes:
                if self._core.settled(flush.job_ids):
                    flush.done.set()
                else:
                    waiting.append(flush)
            self._flushes = waiting

    def _poller(self, engine_descriptor: int) -> select.poll:
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        poller.register(engine_descriptor, select.POLLIN)
        return poller

    def _wait(self) -> list[tuple[int, int]]:
        """Sleep until there is something to do; poll's own timeout has whole milliseconds."""
        poller = self._for_transfers if self._core.depth_is_full else self._for_anything
        if self._mailbox or self._is_abandonment_due(self._clock()):
            return poller.poll(0)
        if self._copier.in_flight:
            events = poller.poll(0)
            if not events and self._copier.poll_s:
                time.sleep(self._copier.poll_s)
            return events
        moments = (self._core.next_deadline(), self._stop_deadline)
        seconds = [moment - self._clock() for moment in moments if moment is not None]
        if self._engine.in_flight:
            seconds.append(ENGINE_POLL_S)
        return poller.poll(max(0.0, min(seconds) * 1000) if seconds else None)

    def _ended(self) -> bool:
        if self._stop_deadline is None:
            return False
        return self._core.idle or (self._abandoned and self._clock() >= self._stop_deadline)

    def _await_writers(self) -> None:
        """Device copies and reads in flight still write blocks and rows: only then may their
        loads be said to have failed, because the engine reuses these."""
        give_up_at = self._clock() + ABANDON_TIMEOUT_S
        for writer in (self._engine, self._copier):
            with contextlib.suppress(Exception):  # it may be what failed
                while writer.in_flight and self._clock() < give_up_at:
                    writer.reap()
                    time.sleep(WRITER_POLL_S)

    def _answer_everything(self) -> None:
        """Nothing turns the core any more: fail what is left, whatever state the core is in,
        but for loads into rows that a read may still write: no answer is better than wrong KV."""
        is_writing = self._failed and self._engine.in_flight > 0
        self._results.put(
            failed_result(job, Failure.SHUTDOWN)
            for job in self._open.values()
            if not (is_writing and is_load_in_place(job))
        )
        self._open.clear()
        for flush in self._flushes:
            flush.done.set()
        self._bury_mailbox()

    def _bury_mailbox(self) -> None:
        """Answer what came too late; both threads may do so, each message has one taker."""
        while self._mailbox:
            try:
                message = self._mailbox.popleft()
            except IndexError:
                return
            if isinstance(message, Job):
                self._results.put([failed_result(message, Failure.SHUTDOWN)])
            elif isinstance(message, Flush):
                message.done.set()
