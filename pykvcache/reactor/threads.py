# SPDX-License-Identifier: Apache-2.0
"""The thread engine: the same operations as plain system calls, which release the lock.

For kernels and sandboxes without io_uring. Two queues with threads of their own, so that
opening the next files does not wait behind transfers, nor publishing behind a slow read.
Daemon threads: a read from a dead server must not keep the interpreter from exiting.
A pool like this reaches the disk's bandwidth too; it costs a thread switch per operation.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import ClassVar

from pykvcache.access import PRIVATE, Access
from pykvcache.errors import InvariantError
from pykvcache.reactor.calls import (
    create_flags,
    directory_flags,
    encode_path,
    is_cut_short,
    open_file,
    open_how,
    parts_of,
    read_flags,
    without_front,
)
from pykvcache.reactor.engine import IoEngine
from pykvcache.reactor.rows import Rows
from pykvcache.transfer.operations import Action, Completion, FileOperation

METADATA_WORKERS = 4
"""Threads for opens, links and the like: microseconds each on a local disk, a round trip or a
few on a network filesystem, where four at a time keep up with eight transfers of MiBs."""

_Inbox = SimpleQueue[FileOperation | None]


class ThreadsEngine(IoEngine):
    """See :class:`IoEngine`.

    Args:
        buffers: each slot's writable memory, by slot.
        direct: whether files are opened with O_DIRECT.
        workers: transfers at a time (``io_depth``).
        rows: where payloads lie that are not in slots.
        access: modes of what is made.
    """

    name: ClassVar[str] = "threads"

    def __init__(
        self,
        buffers: Sequence[memoryview],
        direct: bool,
        workers: int,
        rows: Rows | None = None,
        access: Access = PRIVATE,
    ) -> None:
        self._buffers = buffers
        self._rows = rows
        self._access = access
        self._hows = {
            Action.OPEN: open_how(read_flags(direct)),
            Action.OPEN_DIRECTORY: open_how(directory_flags()),
            Action.CREATE: open_how(create_flags(direct), access.file_mode),
        }
        self._tokens: set[int] = set()
        self._completed: list[Completion] = []
        self._lock = threading.Lock()
        """Keeps ``_completed`` and the event descriptor in step."""
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._transfers: _Inbox = SimpleQueue()
        self._metadata: _Inbox = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(inbox,), name=name, daemon=True)
            for inbox, name, count in (
                (self._transfers, "pykvcache-transfer", workers),
                (self._metadata, "pykvcache-metadata", METADATA_WORKERS),
            )
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        return self._event

    @property
    def in_flight(self) -> int:
        return len(self._tokens)

    def submit(self, operations: Sequence[FileOperation]) -> None:
        for operation in operations:
            if operation.token in self._tokens:
                raise InvariantError(f"token {operation.token} is in flight already")
            self._tokens.add(operation.token)
            if operation.action in (Action.READ, Action.WRITE):
                self._transfers.put(operation)
            else:
                self._metadata.put(operation)

    def reap(self) -> list[Completion]:
        with self._lock:
            completed, self._completed = self._completed, []
            if completed:
                os.eventfd_read(self._event)
        self._tokens.difference_update(completion.token for completion in completed)
        return completed

    def close(self) -> None:
        if self._tokens:
            raise InvariantError(f"{len(self._tokens)} operations are in flight")
        for thread in self._threads:
            inbox = self._metadata if thread.name == "pykvcache-metadata" else self._transfers
            inbox.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._event)

    def _work(self, inbox: _Inbox) -> None:
        while (operation := inbox.get()) is not None:
            completion = Completion(operation.token, self._perform(operation))
            with self._lock:
                self._completed.append(completion)
                if len(self._completed) == 1:
                    os.eventfd_write(self._event, 1)

    def _perform(self, operation: FileOperation) -> int:
        try:
            if operation.action in (Action.READ, Action.WRITE):
                return self._transfer(operation)
            return self._call(operation)
        except OSError as error:
            return -(error.errno or errno.EIO)
        except (ValueError, OverflowError):  # a path or number that no call could take
            return -errno.EINVAL

    def _call(self, operation: FileOperation) -> int:
        if operation.action is Action.CLOSE:
            os.close(operation.descriptor)
            return 0
        if operation.action is Action.SYNC:
            os.fsync(operation.descriptor)
            return 0
        path = encode_path(operation.path)
        match operation.action:
            case Action.OPEN | Action.CREATE | Action.OPEN_DIRECTORY:
                return open_file(path, self._hows[operation.action])
            case Action.LINK:
                os.link(path, encode_path(operation.target), follow_symlinks=False)
            case Action.RENAME:
                os.rename(path, encode_path(operation.target))
            case Action.UNLINK:
                os.unlink(path)
            case Action.MKDIR:
                os.mkdir(path, self._access.directory_mode)
        return 0

    def _transfer(self, operation: FileOperation) -> int:
        parts = parts_of(operation, self._buffers, self._rows)
        call = os.preadv if operation.action is Action.READ else os.pwritev
        done = call(operation.descriptor, parts, 0)
        while is_cut_short(done, operation.length):
            more = call(operation.descriptor, without_front(parts, done), done)
            if not more:
                break
            done += more
        return done
