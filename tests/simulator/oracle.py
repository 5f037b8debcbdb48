# SPDX-License-Identifier: Apache-2.0
"""What must hold: kept in terms of jobs, results and the world, never of the core's insides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pykvcache.transfer.core import Limits, TransferCore
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure, Job, JobResult
from pykvcache.transfer.operations import Action, CopyOperation, FileOperation
from pykvcache.transfer.preloads import OPENED_PER_READ
from tests.simulator.meter import Meter
from tests.simulator.watched import WatchedLedger, require
from tests.simulator.world import Operation, World

FAR_DEADLINE_S = 1e6
"""Seconds; loads reach it only when an operation never returns."""


@dataclass(eq=False)
class Entry:
    """A job that was submitted."""

    job: Job
    submitted_at: float
    deadline: float
    excuses: set[Failure] = field(default_factory=set)
    """Failures that something other than an operation may give its chunks."""

    @property
    def is_load(self) -> bool:
        return self.job.direction is Direction.LOAD


@dataclass(frozen=True)
class PendingFlush:
    """The engine waits for these jobs' blocks until then."""

    job_ids: frozenset[int]
    stores: tuple[Entry, ...]
    expires_at: float


class Oracle:
    """Knows every job, and judges what the core does with it."""

    def __init__(self, limits: Limits, ledger: WatchedLedger, world: World) -> None:
        self.open: dict[int, Entry] = {}
        """Jobs without a result."""
        self.failures: Counter[Failure] = Counter()
        self.preloads: set[str] = set()
        """Files to be read ahead."""
        self._limits = limits
        self._ledger = ledger
        self._world = world
        self._read_meter = Meter(limits.read_bandwidth_max)
        self._write_meter = Meter(limits.write_bandwidth_max)
        self._entry_of: dict[ChunkTransfer, Entry] = {}
        self._given_up: set[ChunkTransfer] = set()
        self._not_to_copy: set[ChunkTransfer] = set()
        self._closed = False
        world.is_wanted = self._is_wanted
        world.is_path_wanted = lambda path: self._is_on_path(path, Direction.LOAD)
        world.is_wanted_ahead = lambda path: path in self.preloads
        world.loads_of = self._loads_of
        world.is_target_wanted = lambda path: self._is_on_path(path, Direction.STORE)

    # --- what happens

    def accept(self, job: Job, now: float) -> Entry:
        """A job is about to be submitted; its excuses say whether it must be refused."""
        entry = Entry(job, now, now + self._limits.load_deadline_s)
        if self._closed:
            entry.excuses.add(Failure.SHUTDOWN)
        elif len(self.open) >= self._limits.jobs_max:
            entry.excuses.add(Failure.OVERLOAD)
        self._entry_of.update(dict.fromkeys(job.chunks, entry))
        self.open[job.job_id] = entry
        return entry

    def stores(self, job_ids: Iterable[int]) -> list[Entry]:
        """Those of the jobs that are stores and have no result."""
        entries = [self.open[job] for job in sorted(job_ids) if job in self.open]
        return [entry for entry in entries if not entry.is_load]

    def excuse(self, entries: Iterable[Entry], failure: Failure) -> None:
        """From now on chunks of these jobs may fail so."""
        for entry in entries:
            entry.excuses.add(failure)

    def close(self) -> None:
        """The core is about to be closed or abandoned."""
        self._closed = True
        self.excuse(self.open.values(), Failure.SHUTDOWN)
        for entry in self.open.values():
            self._give_up(entry) if entry.is_load else self._copy_no_more(entry)

    def pause(self, now: float) -> None:
        """The core is about to leave the disk alone: loads end now."""
        require(self._limits.pause_after_faults > 0, "the core pauses although it never should")
        for entry in self.open.values():
            if entry.is_load:
                entry.deadline = min(entry.deadline, now)
                entry.excuses.add(Failure.PAUSED)
                self._give_up(entry)

    def expire(self, now: float) -> None:
        """The core was told the time."""
        for entry in self.open.values():
            if entry.is_load and entry.deadline <= now:
                self._give_up(entry)

    def end(self, result: JobResult, now: float) -> Entry:
        """A result came: judge it."""
        entry = self.open.pop(result.job_id, None)
        require(entry is not None, f"a second result, or of no job: {result}")
        assert entry is not None
        self._check_result(entry, result, now)
        return entry

    def _give_up(self, entry: Entry) -> None:
        """A load ends, except for what is being copied to its blocks."""
        self._given_up.update(set(entry.job.chunks) - self._world.copying.keys())

    def _copy_no_more(self, entry: Entry) -> None:
        """What a store has not begun to copy by now is dropped."""
        self._not_to_copy.update(set(entry.job.chunks) - self._world.copies_out_seen)

    # --- what must hold

    def _is_wanted(self, chunk: ChunkTransfer) -> bool:
        return self._entry_of[chunk].job.job_id in self.open and chunk not in self._given_up

    def _is_on_path(self, path: str, direction: Direction) -> bool:
        return any(
            chunk.path == path and chunk not in self._given_up
            for entry in self.open.values()
            if entry.job.direction is direction
            for chunk in entry.job.chunks
        )

    def _loads_of(self, path: str) -> list[ChunkTransfer]:
        world = self._world
        return [
            chunk
            for entry in self.open.values()
            if entry.is_load
            for chunk in entry.job.chunks
            if chunk.path == path
            and chunk not in self._given_up
            and chunk not in world.copied_in
            and chunk not in world.copying
        ]

    def check_operations(self, operations: list[Operation], now: float) -> None:
        """Judge what one turn asks for."""
        for operation in operations:
            if isinstance(operation, FileOperation):
                self._meter(operation, now)
        for operation in operations:
            if isinstance(operation, CopyOperation):
                self._check_copy(operation)
        actions = [
            item.action
            for item in operations
            if isinstance(item, FileOperation) and not self._may_be_ahead(item)
        ]
        if Action.READ in actions and Action.WRITE in actions:
            last_read = len(actions) - 1 - actions[::-1].index(Action.READ)
            require(last_read < actions.index(Action.WRITE), "a read is issued after a write")

    def _meter(self, operation: FileOperation, now: float) -> None:
        if operation.action is Action.READ:
            patient = self._is_ahead(operation)
            self._read_meter.start(operation.length, now, patient=patient)
        elif operation.action is Action.WRITE:
            self._write_meter.start(operation.length, now, patient=False)

    def _is_ahead(self, operation: FileOperation) -> bool:
        """Whether it is a read that no load waits for."""
        chunk = operation.chunk
        return (
            operation.action is Action.READ
            and chunk is not None
            and chunk.span.count == 0
            and not self._loads_of(chunk.path)
        )

    def _may_be_ahead(self, operation: FileOperation) -> bool:
        """Whether no load may wait for it: one may have failed at this file and not ended yet, and
        the file be read ahead of another one since."""
        chunk = operation.chunk
        has_failed = chunk is not None and bool(self._world.faults[chunk.path])
        is_read_ahead = chunk is not None and chunk.span.count == 0
        return self._is_ahead(operation) or (has_failed and is_read_ahead)

    def _check_copy(self, operation: CopyOperation) -> None:
        for copy in operation.copies:
            entry = self._entry_of[copy.chunk]
            require(copy.fence == entry.job.fence, f"another job's fence: {copy}")
            require(operation.direction is entry.job.direction, f"wrong way: {copy}")
            require(copy.chunk not in self._not_to_copy, f"copied after its flush: {copy}")

    def check_turn(self, core: TransferCore, operations: list[Operation], now: float) -> None:
        """Judge the state after a turn."""
        world, ledger, limits = self._world, self._ledger, self._limits
        require(ledger.free + ledger.leased + ledger.retained == ledger.capacity, "slots are lost")
        require(ledger.leased == len(ledger.leases), "the ledger lost count")
        require(core.jobs == len(self.open), "jobs are lost")
        io = world.count(Action.READ, Action.WRITE)
        require(io <= limits.io_depth, f"{io} transfers in flight, io_depth {limits.io_depth}")
        require(
            len(world.store_slots) <= ledger.capacity - limits.io_depth,
            f"stores hold {len(world.store_slots)} of {ledger.capacity} slots",
        )
        self._check_nothing_waits_needlessly(core, io, operations, now)
        self._check_reads_ahead(core, operations)
        require(len(world.quarantined) <= limits.quarantine_files_max, "too many are put aside")
        self._check_deadlines(core, now)
        for entry in self.stores(self.open):
            self._check_settled(core, entry)

    def _check_nothing_waits_needlessly(
        self, core: TransferCore, io: int, operations: list[Operation], now: float
    ) -> None:
        world, ledger, limits = self._world, self._ledger, self._limits
        queues = core.queue_lengths()
        demand, preload = core._reads.demand, core._reads.preload
        opened, created = len(demand.opened), world.opened(writable=True)
        creating = world.creating()
        require(world.opened(writable=False) == opened + len(preload.opened), "a file is lost")
        require(world.count(Action.OPEN) == demand.opening + preload.opening, "an open is lost")
        ahead_max = limits.open_lookahead
        opening = demand.opening
        taken_over = OPENED_PER_READ * limits.preload.depth  # at most, by loads
        require(
            opening + opened <= ahead_max + taken_over, f"{opening} opening + {opened} opened files"
        )
        require(creating + created <= ahead_max, f"{creating} creating + {created} created files")
        can_read = io < limits.io_depth and self._read_meter.has_some(now)
        can_write = io < limits.io_depth and self._write_meter.has_some(now)
        any_slot = core._dram.available(demand=True)
        require(any_slot == ledger.free + ledger.retained, "a retained slot cannot be had")
        require(not (opened and can_read and any_slot), "an opened read waits needlessly")
        require(not (created and can_write), "a created write waits needlessly")
        if queues["load_waiting"]:
            require(opening + opened >= ahead_max, "a load waits needlessly for its open")
        if queues["store_copied"] > created:
            require(creating + created >= ahead_max, "a store waits needlessly for its file")
        if queues["store_waiting"]:
            full = len(world.store_slots) >= ledger.capacity - limits.io_depth
            available = core._dram.available(demand=False)
            require(full or not available, "a store waits needlessly for a slot")
        writes = [item for item in operations if getattr(item, "action", None) is Action.WRITE]
        require(
            not (writes and opened and any_slot and self._read_meter.has_some(now)),
            "a write starts while a read could have started",
        )

    def _check_reads_ahead(self, core: TransferCore, operations: list[Operation]) -> None:
        """Reading ahead comes last, and within its budget."""
        limits, ledger, lane = self._limits.preload, self._ledger, core._reads.preload
        reading = [
            flight.operation.chunk
            for flight in self._world.flights.values()
            if isinstance(flight.operation, FileOperation)
            and flight.operation.action is Action.READ
        ]
        keys = [chunk.key for chunk in reading if chunk is not None]
        for operation in operations:
            if not isinstance(operation, FileOperation) or operation.action is not Action.READ:
                continue
            chunk = operation.chunk
            assert chunk is not None
            if chunk.span.count:
                continue
            # A read whose load was given up may never return: nobody joins it.
            given_up = any(chunk.key == lost.key for lost in self._given_up)
            once = keys.count(chunk.key) == 1
            require(once or given_up, f"read twice at once: {chunk.key.hex()}")
            if self._loads_of(chunk.path):
                continue
            require(chunk.key not in core._dram, f"read although in DRAM: {chunk.key.hex()}")
            demand = core._reads.demand
            wanting = core._reads._waiting or demand.opening or demand.opened
            require(not wanting, "read ahead while a load waits")
            require(
                ledger.free + ledger.retained >= self._limits.io_depth,
                "read ahead into the slots kept for loads",
            )
        require(lane.reading <= limits.depth, f"{lane.reading} reads ahead")
        require(core.staged <= limits.slots_max, f"{core.staged} slots hold staged chunks")
        if limits.bytes_max:
            require(lane.reading_bytes <= limits.bytes_max, "too many bytes are read ahead")

    def _check_deadlines(self, core: TransferCore, now: float) -> None:
        pending = []
        for entry in self.open.values():
            if entry.is_load and entry.deadline > now:
                pending.append(entry.deadline)
            elif entry.is_load:
                require(
                    not self._world.copying.keys().isdisjoint(entry.job.chunks),
                    f"load {entry.job.job_id} outlives its deadline",
                )
        if self._closed:
            return
        next_deadline, next_end = core.next_deadline(), min(pending, default=None)
        throttled = not (self._read_meter.has_some(now) and self._write_meter.has_some(now))
        may_wake = throttled or self._limits.read_bandwidth_max  # reading ahead wants half of it
        woken = next_deadline is not None and now < next_deadline <= (next_end or math.inf)
        require(
            next_deadline == next_end or (may_wake and woken),
            f"next deadline is {next_deadline}, loads end at {pending}",
        )

    def check_flushed(
        self, flush: PendingFlush, flushes: list[PendingFlush], operations: list[Operation]
    ) -> None:
        """What the flush found no slot for is dropped, and nothing else went before it."""
        dropped: set[ChunkTransfer] = set()
        for entry in flush.stores:
            dropped |= set(entry.job.chunks) - self._world.copies_out_seen - self._not_to_copy
            self._copy_no_more(entry)
        if dropped:
            others = [
                copy.chunk
                for item in operations
                if isinstance(item, CopyOperation) and item.direction is Direction.STORE
                for copy in item.copies
                if not any(self._entry_of[copy.chunk] in pending.stores for pending in flushes)
            ]
            require(not others, f"{others} were copied, flushed {dropped} were not")

    def _check_settled(self, core: TransferCore, entry: Entry) -> None:
        chunks = set(entry.job.chunks)
        waiting = chunks - self._world.copies_out_seen - self._not_to_copy
        needed = waiting | (chunks & self._world.copying.keys())
        settled = core.settled([entry.job.job_id])
        require(settled == (not needed), f"settled is {settled} while blocks are needed: {needed}")

    def _check_result(self, entry: Entry, result: JobResult, now: float) -> None:
        job, world = entry.job, self._world
        stored = world.durable if self._limits.syncs else world.published
        done = world.copied_in if entry.is_load else stored | world.present
        transferred = {chunk for chunk in job.chunks if chunk.key not in result.failures}
        require(result.direction is job.direction, f"wrong direction: {result}")
        require(result.chunks == len(job.chunks), f"wrong number of chunks: {result}")
        require(result.seconds == now - entry.submitted_at, f"wrong time: {result}")
        require(transferred <= done, f"success without a transfer: {result}")
        require(
            result.copied_bytes == sum(chunk.copy_bytes for chunk in transferred),
            f"wrong bytes copied: {result}",
        )
        present = world.present.intersection(transferred)
        require(result.present == len(present), f"wrong number present: {result}")
        if entry.is_load:
            require(result.file_bytes <= world.read_bytes, f"more read than was: {result}")
        else:
            written = sum(world.written_bytes[chunk] for chunk in job.chunks)
            require(result.file_bytes == written, f"wrong bytes written: {result}")
        require(result.success == (not result.failures), f"success and failures: {result}")
        for chunk in set(job.chunks) - transferred:
            self._check_failure(entry, chunk, result.failures[chunk.key], now)

    def _check_failure(
        self, entry: Entry, chunk: ChunkTransfer, failure: Failure, now: float
    ) -> None:
        self.failures[failure] += 1
        if failure is Failure.DEADLINE:
            require(entry.is_load and now >= entry.deadline, f"too early: {entry.job}")
            may_wait = self._world.weather.stuck or self._limits.load_deadline_s < FAR_DEADLINE_S
            require(may_wait, f"a load starves although every operation returns: {entry.job}")
            return
        if failure is Failure.PAUSED:
            weather = self._world.weather
            may_pause = weather.fault or weather.stuck
            may_pause = may_pause or self._limits.load_deadline_s < FAR_DEADLINE_S
            require(self._limits.pause_after_faults and may_pause, "paused without a fault")
            return
        if failure is Failure.WRONG_CONTENT:
            self._world.convict(chunk.path)
        faults = self._world.faults
        directory = chunk.path.rpartition("/")[0]
        causes = entry.excuses | faults[chunk.path] | faults[chunk] | faults[directory]
        require(failure in causes, f"{failure} of {chunk} without a cause, only {causes}")

    def check_no_load_waits(self) -> None:
        """Loads end without the operations that never return."""
        loads = [entry.job.job_id for entry in self.open.values() if entry.is_load]
        require(not loads, f"loads wait for ever: {loads}")

    def check_rest(self, core: TransferCore) -> None:
        """Judge what is left when nothing happens any more."""
        world = self._world
        require(not self.open, f"jobs without a result: {sorted(self.open)}")
        require(core.idle, "the core is not idle at rest")
        ledger = self._ledger
        require(not ledger.leased, f"{ledger.leased} slots are lost")
        if self._limits.dram_policy == "none":
            require(ledger.retained == core.staged, f"{ledger.retained} slots are kept in vain")
        if self._closed:
            require(not core.staged, f"{core.staged} slots are kept for nobody")
        preloading = len(core._reads.preload.opened)
        require(
            len(world.descriptors) == preloading, f"descriptors are left open: {world.descriptors}"
        )
        require(not (preloading and self._closed), f"{preloading} files are open for nobody")
        require(not world.temporaries, f"temporaries are left: {world.temporaries}")
        require(not world.spoilt, f"bad files are left: {world.spoilt}")
