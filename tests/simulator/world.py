# SPDX-License-Identifier: Apache-2.0
"""A disk and a device that complete operations late, in any order, and sometimes badly.

Bytes are symbols: block ``i`` of the chunk with key ``k`` holds ``("kv", k, i)``, a block that
the engine has reused holds something else. So whatever reaches a file or a device block
can be compared with what belongs there. The world raises :class:`Violation` when an operation
is one that the core must never ask for.
"""

from __future__ import annotations

import errno
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from pykvcache.layout import PAGE, QUARANTINE, TEMPORARY_SUFFIX, BlockSpan, Defect
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure
from pykvcache.transfer.operations import (
    Action,
    ChecksumOperation,
    Completion,
    CopyOperation,
    FileOperation,
)
from pykvcache.transfer.outcomes import failure_of, failure_of_defect
from tests.simulator.watched import WatchedLedger, require

ROOT = "root/rank-0000"
"""Directory of all files; nothing happens to it."""

Operation = FileOperation | CopyOperation | ChecksumOperation
Content = dict[int, object]
"""Blocks of a chunk, by index in the chunk."""


def right_content(chunk: ChunkTransfer) -> Content:
    """What belongs into the file of that chunk, or onto its device blocks."""
    span = chunk.span
    return {index: ("kv", chunk.key, index) for index in range(span.first, span.end)}


@dataclass(eq=False)
class File:
    """A file; ``content`` is what its trailer says is in it."""

    length: int = 0
    content: Content = field(default_factory=dict)
    defect: Defect | None = None
    stored: ChunkTransfer | None = None
    """The chunk that was written, for files that the core made."""
    synced: bool = False
    whole: bool = False
    """Written wholly, and closed without an error."""


@dataclass(eq=False)
class Descriptor:
    """An open file and what was done with it."""

    file: File
    path: str
    writable: bool
    transferred: bool = False
    closing: bool = False


@dataclass(eq=False)
class Flight:
    """An operation in flight; ``early`` is what a copy out saw when it started."""

    operation: Operation
    ready_at: float
    early: dict[int, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Weather:
    """How bad the world is: probabilities for each operation."""

    fault: float
    slow: float
    stuck: float
    defect: float


class World:
    """The disk, the slots and the device under one core."""

    def __init__(self, random: Random, weather: Weather, ledger: WatchedLedger) -> None:
        self.random = random
        self.weather = weather
        self.ledger = ledger
        ledger.on_release = self._released
        ledger.on_retain = self._retained
        self.now = 0.0
        self.files: dict[str, File] = {}
        self.directories: set[str] = set()
        self.blocks: dict[int, object] = {}
        self.flights: dict[int, Flight] = {}
        self.descriptors: dict[int, Descriptor] = {}
        self._next_descriptor = 3
        self._memory: dict[int, Content] = {}
        self._slot_users: defaultdict[int, dict[int, bool]] = defaultdict(dict)
        """Operations that use a slot, and whether they only read it."""
        self.store_slots: dict[int, ChunkTransfer] = {}
        self._sealed: set[int] = set()
        """Slots of stores that have their trailer."""
        self._came_from: dict[int, File] = {}
        """The files that were read into slots."""
        self.faults: defaultdict[object, set[Failure]] = defaultdict(set)
        """Failures that were caused, by the final path, or the chunk of a copy."""
        self._spoilt: dict[str, File] = {}
        self._suspect: dict[str, File] = {}
        """Read ahead, and without blocks that a load wants: bad, if the load is left to it."""
        self._vanished: set[str] = set()
        self._directory_missed: set[str] = set()
        self.copying: dict[ChunkTransfer, Direction] = {}
        self.copied_in: set[ChunkTransfer] = set()
        self.copies_out_seen: set[ChunkTransfer] = set()
        self.published: set[ChunkTransfer] = set()
        self.durable: set[ChunkTransfer] = set()
        """Published, and their directory synced after that."""
        self.syncs = False
        self.present: set[ChunkTransfer] = set()
        self.written_bytes: defaultdict[ChunkTransfer, int] = defaultdict(int)
        self.read_bytes = 0
        self.is_wanted: Callable[[ChunkTransfer], bool] = lambda chunk: True
        """Whether the chunk's job has not ended."""
        self.is_path_wanted: Callable[[str], bool] = lambda path: True
        """Whether a load that has not ended waits for this file."""
        self.is_wanted_ahead: Callable[[str], bool] = lambda path: False
        """Whether this file is to be read ahead."""
        self.loads_of: Callable[[str], list[ChunkTransfer]] = lambda path: []
        """Chunks of this file that loads wait for."""
        self.is_target_wanted: Callable[[str], bool] = lambda path: True
        """Whether a store that has not ended writes this file."""

    # --- set-up and questions

    def put_file(self, chunk: ChunkTransfer, defect: Defect | None, length: int) -> None:
        """Place a file that some other server wrote."""
        directory = chunk.path.rpartition("/")[0]
        self.directories.add(directory)
        self.files[chunk.path] = File(length, right_content(chunk), defect, whole=True)

    def vanish(self) -> None:
        """Somebody deletes a directory with all that is in it."""
        if not self.directories:
            return
        directory = self.random.choice(sorted(self.directories))
        self.directories.remove(directory)
        for path in [path for path in self.files if path.startswith(f"{directory}/")]:
            del self.files[path]
            self._vanished.add(path)

    def count(self, *actions: Action) -> int:
        """File operations in flight of these kinds."""
        return sum(
            isinstance(flight.operation, FileOperation) and flight.operation.action in actions
            for flight in self.flights.values()
        )

    def opened(self, *, writable: bool) -> int:
        """Descriptors whose transfer has not started."""
        return sum(
            not (entry.transferred or entry.closing) and entry.writable == writable
            for entry in self.descriptors.values()
        )

    def creating(self) -> int:
        """Stores' files that are being created."""
        return sum(
            isinstance(flight.operation, FileOperation)
            and flight.operation.action in (Action.CREATE, Action.MKDIR)
            and not flight.operation.path.endswith(QUARANTINE)
            for flight in self.flights.values()
        )

    @property
    def quarantined(self) -> list[str]:
        """Files that were put aside."""
        return [path for path in self.files if f"/{QUARANTINE}/" in path]

    @property
    def temporaries(self) -> list[str]:
        """Temporary names that exist."""
        return [path for path in self.files if path.endswith(TEMPORARY_SUFFIX)]

    def convict(self, path: str) -> None:
        """A load failed by what the file holds."""
        if path in self._suspect:
            self._spoilt[path] = self._suspect[path]

    @property
    def spoilt(self) -> list[str]:
        """Files that were found to be bad and are still there."""
        return [path for path, file in self._spoilt.items() if self.files.get(path) is file]

    def next_ready(self) -> float:
        """When the next operation in flight completes; infinity when none ever does."""
        return min((flight.ready_at for flight in self.flights.values()), default=math.inf)

    def release_stuck(self) -> None:
        """What never returned returns after all."""
        for flight in self.flights.values():
            if flight.ready_at == math.inf:
                flight.ready_at = self.now

    # --- starting

    def start(self, operation: Operation) -> None:
        """Take an operation from the core."""
        require(operation.token not in self.flights, f"token {operation.token} used twice")
        flight = Flight(operation, self.now + self._delay(operation))
        if isinstance(operation, CopyOperation):
            self._start_copy(operation, flight)
        elif isinstance(operation, ChecksumOperation):
            self._start_checksum(operation)
        else:
            self._start_file(operation)
        self.flights[operation.token] = flight

    def _delay(self, operation: Operation) -> float:
        draw = self.random.random()
        if isinstance(operation, FileOperation) and operation.action in (Action.OPEN, Action.READ):
            if draw < self.weather.stuck:
                return math.inf
            draw -= self.weather.stuck
        return self.random.uniform(0, 15 if draw < self.weather.slow else 1)

    def _use_slot(self, slot: int, token: int, *, reads: bool = False) -> None:
        users = self._slot_users[slot]
        alone = all(user == token or (reads and shares) for user, shares in users.items())
        require(alone, f"slot {slot} is used by operations {list(users)} and {token}")
        users[token] = reads
        require(slot in self.ledger.leases, f"slot {slot} is used but not leased")

    def _retained(self, slot: int) -> None:
        users = self._slot_users[slot]
        require(not users, f"slot {slot} is given up while operations {list(users)} use it")
        self._sealed.discard(slot)
        self.store_slots.pop(slot, None)

    def _released(self, slot: int) -> None:
        self._retained(slot)
        self._memory.pop(slot, None)

    def _start_copy(self, operation: CopyOperation, flight: Flight) -> None:
        require(operation.copies, "a copy of nothing")
        for copy in operation.copies:
            loading = operation.direction is Direction.LOAD
            self._use_slot(copy.slot, operation.token, reads=loading)
            require(self.is_wanted(copy.chunk), f"copy for a job that ended: {copy.chunk}")
            require(copy.chunk not in self.copying, f"chunk copied twice at once: {copy.chunk}")
            self.copying[copy.chunk] = operation.direction
            if operation.direction is Direction.STORE:
                require(copy.chunk not in self.copies_out_seen, f"stored twice: {copy.chunk}")
                self.copies_out_seen.add(copy.chunk)
                self.store_slots[copy.slot] = copy.chunk
                for block in copy.chunk.block_ids:
                    flight.early[block] = self.blocks[block]

    def _start_checksum(self, operation: ChecksumOperation) -> None:
        self._use_slot(operation.slot, operation.token)
        if operation.direction is Direction.STORE:
            require(operation.slot not in self._sealed, f"sealed twice: {operation}")
            right = self.store_slots.get(operation.slot) is operation.chunk
            require(right, f"sealed as another chunk: {operation}")

    def _start_file(self, operation: FileOperation) -> None:
        match operation.action:
            case Action.READ | Action.WRITE:
                self._start_transfer(operation)
            case Action.CLOSE:
                entry = self._descriptor(operation)
                users = [
                    flight.operation
                    for flight in self.flights.values()
                    if isinstance(flight.operation, FileOperation)
                    and flight.operation.descriptor == operation.descriptor
                ]
                require(not users, f"descriptor closed while in use: {users}")
                entry.closing = True
            case Action.SYNC:
                self._descriptor(operation)
            case Action.OPEN:
                self._check_wanted(operation.path)
            case Action.CREATE if operation.path not in self._directory_missed:
                wanted = self.is_target_wanted(_final_path(operation.path))
                require(wanted, f"nobody stores {operation.path}")
            case Action.LINK:
                self._start_link(operation)
            case Action.RENAME:
                bad = operation.path in self._spoilt
                require(bad, f"a good file is put aside: {operation.path}")
            case Action.UNLINK if not operation.path.endswith(TEMPORARY_SUFFIX):
                bad = operation.path in self._spoilt or operation.path in self._suspect
                require(bad, f"a good file is deleted: {operation.path}")

    def _check_wanted(self, path: str) -> None:
        require(self.is_path_wanted(path) or self.is_wanted_ahead(path), f"nobody wants {path}")

    def _start_transfer(self, operation: FileOperation) -> None:
        entry = self._descriptor(operation)
        chunk = operation.chunk
        require(chunk is not None, f"transfer without its chunk: {operation}")
        assert chunk is not None
        self._use_slot(operation.slot, operation.token)
        require(operation.length == chunk.file_bytes, f"wrong length: {operation}")
        require(not entry.transferred, f"a second transfer of one descriptor: {operation}")
        writing = operation.action is Action.WRITE
        require(entry.writable == writing, f"descriptor of the other kind: {operation}")
        entry.transferred = True
        if writing:
            require(self.is_wanted(chunk), f"write for a job that ended: {chunk}")
            require(operation.slot in self._sealed, f"written without a trailer: {chunk}")
            require(entry.path.startswith(_temporary_prefix(chunk.path)), f"{entry.path}: {chunk}")
            entry.file.stored = chunk
        else:
            require(entry.path == chunk.path, f"{entry.path} is read for {chunk}")
            self._check_wanted(chunk.path)

    def _descriptor(self, operation: FileOperation) -> Descriptor:
        entry = self.descriptors.get(operation.descriptor)
        require(entry is not None, f"descriptor that is not open: {operation}")
        assert entry is not None
        require(not entry.closing, f"descriptor used after its close: {operation}")
        return entry

    def _start_link(self, operation: FileOperation) -> None:
        if operation.path in self._vanished:
            return
        file = self.files.get(operation.path)
        require(file is not None, f"link of a temporary that is not there: {operation}")
        assert file is not None
        chunk = file.stored
        require(chunk is not None and file.whole, f"link of a file not wholly written: {operation}")
        assert chunk is not None
        require(file.synced or not self.syncs, f"linked before it was synced: {operation}")
        require(operation.target == chunk.path, f"linked to another name: {operation}")
        require(self.is_wanted(chunk), f"link for a job that ended: {chunk}")
        users = [entry for entry in self.descriptors.values() if entry.file is file]
        require(not users, f"linked before it is closed: {operation}")
        require(chunk not in self.store_slots.values(), f"written, but holds its slot: {chunk}")

    # --- completing

    def complete_some(self, share: float) -> list[Completion]:
        """Completions of operations that are ready, of about that share, in random order."""
        ready = [
            token
            for token, flight in self.flights.items()
            if flight.ready_at <= self.now and self.random.random() < share
        ]
        self.random.shuffle(ready)
        return [self._complete(self.flights.pop(token)) for token in ready]

    def _complete(self, flight: Flight) -> Completion:
        operation = flight.operation
        if isinstance(operation, CopyOperation):
            return Completion(operation.token, self._end_copy(operation, flight))
        if isinstance(operation, ChecksumOperation):
            return self._end_checksum(operation)
        if operation.action is Action.READ:
            return self._end_read(operation)
        end = {
            Action.OPEN: self._end_open,
            Action.CREATE: self._end_create,
            Action.WRITE: self._end_write,
            Action.OPEN_DIRECTORY: self._end_open_directory,
            Action.SYNC: self._end_sync,
            Action.CLOSE: self._end_close,
            Action.LINK: self._end_link,
            Action.RENAME: self._end_rename,
            Action.UNLINK: self._end_unlink,
            Action.MKDIR: self._end_mkdir,
        }[operation.action]
        return Completion(operation.token, end(operation))

    def _fault(self, blamed: object, *codes: int) -> int:
        """Zero, or now and then one of these errors, remembered against who suffers."""
        if self.random.random() >= self.weather.fault:
            return 0
        return self._blame(blamed, self.random.choice(codes))

    def _blame(self, blamed: object, code: int) -> int:
        self.faults[blamed].add(failure_of(-code))
        return -code

    def _end_copy(self, operation: CopyOperation, flight: Flight) -> int:
        failed = self.random.random() < self.weather.fault / 2
        for copy in operation.copies:
            self._slot_users[copy.slot].pop(operation.token, None)
            del self.copying[copy.chunk]
            if failed:
                self.faults[copy.chunk].add(Failure.DEVICE_COPY)
            elif operation.direction is Direction.STORE:
                self._copy_out(copy.slot, copy.chunk, flight)
            else:
                self._copy_in(copy.slot, copy.chunk)
        return -errno.EIO if failed else 0

    def _end_checksum(self, operation: ChecksumOperation) -> Completion:
        del self._slot_users[operation.slot][operation.token]
        if operation.direction is Direction.STORE:
            self._sealed.add(operation.slot)
            return Completion(operation.token, 0)
        file, path = self._came_from[operation.slot], operation.chunk.path
        if file.defect is Defect.CHECKSUM:
            self.faults[path].add(Failure.CHECKSUM)
            self._spoilt[path] = file
            return Completion(operation.token, 0, Defect.CHECKSUM)
        self._suspect_part(operation.chunk, file)
        return Completion(operation.token, 0)

    def _copy_out(self, slot: int, chunk: ChunkTransfer, flight: Flight) -> None:
        # Each block is read at the start or at the end: a block reused meanwhile may be seen.
        self._memory[slot] = {
            index: self.random.choice((flight.early[block], self.blocks[block]))
            for index, block in zip(_indexes(chunk.span), chunk.block_ids, strict=True)
        }

    def _copy_in(self, slot: int, chunk: ChunkTransfer) -> None:
        require(self.is_wanted(chunk), f"device blocks written after the load's end: {chunk}")
        memory = self._memory[slot]
        for index, block in zip(_indexes(chunk.span), chunk.block_ids, strict=True):
            self.blocks[block] = memory.get(index, "garbage")
        loaded = {
            index: self.blocks[block]
            for index, block in zip(_indexes(chunk.span), chunk.block_ids, strict=True)
        }
        require(loaded == right_content(chunk), f"wrong data loaded: {chunk} got {loaded}")
        self.copied_in.add(chunk)

    def _new_descriptor(
        self, file: File, path: str, writable: bool, transferred: bool = False
    ) -> int:
        number = self._next_descriptor
        self._next_descriptor += 1
        self.descriptors[number] = Descriptor(file, path, writable, transferred)
        return number

    def _end_open(self, operation: FileOperation) -> int:
        path = operation.path
        if path not in self.files:
            return self._blame(path, errno.ENOENT)
        fault = self._fault(path, errno.EMFILE, errno.EIO, errno.EACCES)
        return fault or self._new_descriptor(self.files[path], path, writable=False)

    def _end_create(self, operation: FileOperation) -> int:
        path = operation.path
        final = _final_path(path)
        require(path not in self.files, f"temporary name used twice: {path}")
        if path.rpartition("/")[0] not in self.directories:
            if path in self._directory_missed:  # made once for this write, and gone again
                return self._blame(final, errno.ENOENT)
            self._directory_missed.add(path)
            return -errno.ENOENT
        fault = self._fault(final, errno.ENOSPC, errno.EMFILE, errno.EIO)
        if fault:
            return fault
        self.files[path] = File()
        return self._new_descriptor(self.files[path], path, writable=True)

    def _end_read(self, operation: FileOperation) -> Completion:
        del self._slot_users[operation.slot][operation.token]
        chunk = operation.chunk
        assert chunk is not None
        entry = self.descriptors[operation.descriptor]
        self._memory[operation.slot] = {}
        fault = self._fault(chunk.path, errno.EIO, errno.ESTALE)
        if fault:
            return Completion(operation.token, fault)
        file = entry.file
        length = min(file.length, operation.length)
        if length < operation.length:
            self.faults[chunk.path].add(Failure.SHORT_TRANSFER)
            self._spoilt[chunk.path] = file
            return Completion(operation.token, length)
        self.read_bytes += length
        self._memory[operation.slot] = dict(file.content)
        defect = file.defect
        if defect is Defect.CHECKSUM:  # as yet nobody knows
            self._memory[operation.slot] = dict.fromkeys(file.content, "rotten")
            defect = None
        if defect is None and not right_content(chunk).items() <= file.content.items():
            defect = Defect.BLOCKS
        if defect is not None:
            self.faults[chunk.path].add(failure_of_defect(defect))
            self._spoilt[chunk.path] = file
            return Completion(operation.token, length, defect)
        self._came_from[operation.slot] = file
        self._suspect_part(chunk, file)
        span = BlockSpan(min(file.content), len(file.content))
        return Completion(operation.token, length, span=span)

    def _suspect_part(self, chunk: ChunkTransfer, file: File) -> None:
        """A chunk read ahead turns out to be less than loads want."""
        for load in self.loads_of(chunk.path) if chunk.span.count == 0 else ():
            if not right_content(load).items() <= file.content.items():
                self.faults[chunk.path].add(Failure.WRONG_CONTENT)
                self._suspect[chunk.path] = file

    def _end_write(self, operation: FileOperation) -> int:
        del self._slot_users[operation.slot][operation.token]
        chunk = operation.chunk
        assert chunk is not None
        file = self.descriptors[operation.descriptor].file
        fault = self._fault(chunk.path, errno.ENOSPC, errno.EIO, errno.EDQUOT)
        if fault:
            return fault
        file.content = dict(self._memory[operation.slot])
        file.length = operation.length
        if self.random.random() < self.weather.fault:
            file.length = self.random.randrange(0, operation.length, PAGE)
            self.faults[chunk.path].add(Failure.SHORT_TRANSFER)
            return file.length
        file.whole = True
        self.written_bytes[chunk] += operation.length
        return file.length

    def _end_open_directory(self, operation: FileOperation) -> int:
        path = operation.path
        if path == ROOT:
            return self._new_descriptor(File(), path, writable=False, transferred=True)
        if path not in self.directories:
            return self._blame(path, errno.ENOENT)
        fault = self._fault(path, errno.EMFILE, errno.EIO)
        return fault or self._new_descriptor(File(), path, writable=False, transferred=True)

    def _end_sync(self, operation: FileOperation) -> int:
        entry = self.descriptors[operation.descriptor]
        if entry.path == ROOT:
            return 0
        blamed = _final_path(entry.path) if entry.writable else entry.path
        fault = self._fault(blamed, errno.EIO, errno.ENOSPC)
        if not fault and entry.writable:
            entry.file.synced = True
        elif not fault:
            prefix = f"{entry.path}/"
            self.durable |= {item for item in self.published if item.path.startswith(prefix)}
        return fault

    def _end_close(self, operation: FileOperation) -> int:
        entry = self.descriptors.pop(operation.descriptor)
        if not entry.writable:
            return 0
        fault = self._fault(_final_path(entry.path), errno.EIO, errno.ENOSPC)
        if fault:
            entry.file.whole = False
        return fault

    def _end_link(self, operation: FileOperation) -> int:
        if operation.path in self._vanished:
            return self._blame(operation.target, errno.ENOENT)
        file = self.files.get(operation.path)
        require(file is not None, f"temporary deleted while it is linked: {operation}")
        assert file is not None and file.stored is not None
        if operation.target in self.files:
            self.present.add(file.stored)
            return -errno.EEXIST
        fault = self._fault(operation.target, errno.EIO, errno.ENOSPC, errno.EPERM)
        if fault:
            return fault
        require(file.content == right_content(file.stored), f"wrong data stored: {file}")
        self.files[operation.target] = file
        self.published.add(file.stored)
        return 0

    def _end_unlink(self, operation: FileOperation) -> int:
        if operation.path not in self.files:
            return -errno.ENOENT
        del self.files[operation.path]
        return 0

    def _end_rename(self, operation: FileOperation) -> int:
        directory = operation.target.rpartition("/")[0]
        if operation.path not in self.files or directory not in self.directories:
            return -errno.ENOENT
        if self.random.random() < self.weather.fault:
            return -self.random.choice((errno.EIO, errno.ENOSPC, errno.EPERM))
        self.files[operation.target] = self.files.pop(operation.path)
        return 0

    def _end_mkdir(self, operation: FileOperation) -> int:
        if operation.path in self.directories:
            return -errno.EEXIST
        if self.random.random() < self.weather.fault:
            for failure in (Failure.PERMISSION, Failure.NO_SPACE):
                self.faults[operation.path].add(failure)
            return -self.random.choice((errno.EACCES, errno.ENOSPC))
        self.directories.add(operation.path)
        return 0


def _indexes(span: BlockSpan) -> Iterable[int]:
    return range(span.first, span.end)


def _temporary_prefix(final: str) -> str:
    directory, _, name = final.rpartition("/")
    return f"{directory}/.{name}."


def _final_path(temporary: str) -> str:
    directory, _, name = temporary.rpartition("/")
    return f"{directory}/{name[1:].rsplit('.', 3)[0]}"
