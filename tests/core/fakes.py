# SPDX-License-Identifier: Apache-2.0
"""An engine and a copier in memory, which fail or hold still when a test says so."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import pytest

from pykvcache.reactor.copier import Copier
from pykvcache.reactor.engine import IoEngine
from pykvcache.transfer.operations import Action, Completion, CopyOperation, FileOperation


class _Hold:
    """A rule's answer: this operation does not return."""


HOLD: Final = _Hold()
Rule = Callable[[FileOperation], int | _Hold | None]
"""What becomes of an operation: None goes well, a number is its result, HOLD keeps it."""

WAIT_S = 20.0
"""Seconds after which a test gives up; nothing that works takes this long."""


def wait_until(condition: Callable[[], object], otherwise: str) -> None:
    """Look until the condition holds; fails after :data:`WAIT_S`."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.001)):
        if condition():
            return
        pause.wait(0.001)
    pytest.fail(otherwise)


class MemoryDisk:
    """Files in memory; outlives the engine, and is where the test looks and interferes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.rule: Rule = lambda operation: None
        self.seen: list[Action] = []
        self.has_quarantine = False
        self.holding = threading.Event()
        """Set when an operation is held."""
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._let_go: frozenset[Action] = frozenset()

    def let_go(self, *actions: Action) -> None:
        """What is held of these kinds, or all of it, goes well after all."""
        self._let_go = frozenset(actions or Action)
        os.eventfd_write(self.bell, 1)

    def is_let_go(self, operation: FileOperation) -> bool:
        """Whether a held operation may complete."""
        return operation.action in self._let_go

    def wait_until_holding(self) -> None:
        """Wait for an operation to be held."""
        assert self.holding.wait(WAIT_S), "no operation was held"

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.bell)


class MemoryEngine(IoEngine):
    """Completes everything at once, except for what the disk's rule says."""

    name: ClassVar[str] = "memory"

    def __init__(self, disk: MemoryDisk, buffers: Sequence[memoryview]) -> None:
        self._disk = disk
        self._buffers = buffers
        self._open: dict[int, str] = {}
        self._held: list[FileOperation] = []
        self._done: list[Completion] = []
        self._next_descriptor = 3
        self.closed = False

    def fileno(self) -> int:
        return self._disk.bell

    @property
    def in_flight(self) -> int:
        return len(self._held) + len(self._done)

    def submit(self, operations: Sequence[FileOperation]) -> None:
        for operation in operations:
            self._disk.seen.append(operation.action)
            answer = self._disk.rule(operation)
            if isinstance(answer, _Hold):
                self._held.append(operation)
                self._disk.holding.set()
                continue
            result = self._perform(operation) if answer is None else answer
            self._done.append(Completion(operation.token, result))
        if self._done:
            os.eventfd_write(self._disk.bell, 1)

    def reap(self) -> list[Completion]:
        for item in list(self._held):
            if self._disk.is_let_go(item):
                self._held.remove(item)
                self._done.append(Completion(item.token, self._perform(item)))
        done, self._done = self._done, []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._disk.bell)
        return done

    def close(self) -> None:
        assert not self.in_flight
        self.closed = True

    def _perform(self, operation: FileOperation) -> int:
        files, path = self._disk.files, operation.path
        match operation.action:
            case Action.OPEN:
                return self._new_descriptor(path) if path in files else -errno.ENOENT
            case Action.CREATE:
                files[path] = b""
                return self._new_descriptor(path)
            case Action.READ:
                data = files[self._open[operation.descriptor]][: operation.length]
                self._buffers[operation.slot][: len(data)] = data
                return len(data)
            case Action.WRITE:
                data = bytes(self._buffers[operation.slot][: operation.length])
                files[self._open[operation.descriptor]] = data
                return len(data)
            case Action.CLOSE:
                del self._open[operation.descriptor]
            case Action.LINK:
                if operation.target in files:
                    return -errno.EEXIST
                files[operation.target] = files[path]
            case Action.RENAME if path not in files or not self._disk.has_quarantine:
                return -errno.ENOENT
            case Action.RENAME:
                files[operation.target] = files.pop(path)
            case Action.MKDIR if operation.path.endswith("quarantine"):
                self._disk.has_quarantine = True
            case Action.UNLINK:
                if files.pop(path, None) is None:
                    return -errno.ENOENT
        return 0

    def _new_descriptor(self, path: str) -> int:
        self._next_descriptor += 1
        self._open[self._next_descriptor] = path
        return self._next_descriptor


class HeldCopier(Copier):
    """Copies nothing, and completes only what it was told to let go."""

    poll_s = 0.0005

    def __init__(self) -> None:
        self.launched = threading.Event()
        self.let_go = threading.Event()
        self.thread: int | None = None
        self.fences: list[object] = []
        """Those of the copies launched."""
        self.closed = False
        self._held: list[CopyOperation] = []
        self._fences = itertools.count()

    def fence(self) -> object:
        return next(self._fences)

    def enter_thread(self) -> None:
        self.thread = threading.get_ident()

    def close(self) -> None:
        self.closed = True

    def launch(self, operation: CopyOperation) -> None:
        assert threading.get_ident() == self.thread
        self.fences += [copy.fence for copy in operation.copies]
        self._held.append(operation)
        self.launched.set()

    def reap(self) -> list[Completion]:
        if not self.let_go.is_set():
            return []
        held, self._held = self._held, []
        return [Completion(operation.token, 0) for operation in held]

    @property
    def in_flight(self) -> int:
        return len(self._held)

    def wait_until_launched(self) -> None:
        """Wait for a copy."""
        assert self.launched.wait(WAIT_S), "no copy was launched"


class BrokenCopier(HeldCopier):
    """Raises, as a bug would."""

    def launch(self, operation: CopyOperation) -> None:
        raise RuntimeError("a bug in the copier")
