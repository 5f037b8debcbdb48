# SPDX-License-Identifier: Apache-2.0
"""The io_uring engine: every file operation is one entry of a ring, with no thread of ours.

Every operation but a close goes to a kernel worker at once (``IOSQE_ASYNC``). An inline attempt
runs inside the submitting call: it would pin and map tens of MiB there, and wait there for a full
device queue or a slow server, while finished transfers wait to be reaped. Measured at depth 8, the
detour through a worker costs no bandwidth and at most 0.003 s of CPU per GB at 5.6 MiB.
The kernel starts at most min(entries, 4 x CPUs) such workers (io_uring(7), io-wq); a direct
read keeps one only while it is being queued.

Transfers and steps (opening, closing, linking) have a ring each, so that a thread which cannot
start a transfer is not woken for steps.

Buffers and paths are referenced until the completion. A cancelled transfer could still write
to its buffer, so nothing is ever cancelled: a slot is busy until its own completion comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import select
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

from pykvcache.access import PRIVATE, Access
from pykvcache.errors import InvariantError
from pykvcache.openat2 import AT_FDCWD
from pykvcache.reactor import ring
from pykvcache.reactor.calls import (
    create_flags,
    directory_flags,
    encode_path,
    is_cut_short,
    open_how,
    parts_of,
    read_flags,
    without_front,
)
from pykvcache.reactor.engine import IoEngine
from pykvcache.reactor.rows import Rows
from pykvcache.transfer.operations import Action, Completion, FileOperation

ENTRIES = 256
"""Operations of each ring with the kernel at a time, far above what is in flight; more wait."""

_DIRECTORY_AS_LENGTH = AT_FDCWD & 0xFFFFFFFF
"""LINKAT takes the second directory in the unsigned length field."""


class _Part(ctypes.Structure):
    """``struct iovec`` of readv(2)."""

    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Pending:
    """An operation that has not completed, and what must live as long."""

    __slots__ = ("done", "is_transfer", "operation", "path", "refused", "target", "vector")

    def __init__(self, operation: FileOperation) -> None:
        self.operation = operation
        self.is_transfer = operation.action is Action.READ or operation.action is Action.WRITE
        self.done = 0
        """Bytes that earlier parts of a transfer which the kernel cut short have moved."""
        self.path: ctypes.c_char_p | None = None
        self.target: ctypes.c_char_p | None = None
        self.vector: ctypes.Array[_Part] | None = None
        self.refused = False
        """Whether a NOP stands in for an operation that cannot be expressed."""


class UringEngine(IoEngine):
    """See :class:`IoEngine`.

    Args:
        buffers: each slot's writable memory, by slot.
        direct: whether files are opened with O_DIRECT.
        entries: operations of each ring with the kernel at a time, a power of two.
        rows: where payloads lie that are not in slots.
        access: modes of what is made.

    Raises:
        OSError: the kernel or a sandbox refuses the ring.
    """

    name: ClassVar[str] = "io_uring"

    def __init__(
        self,
        buffers: Sequence[memoryview],
        direct: bool,
        entries: int = ENTRIES,
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
        self._pending: dict[int, _Pending] = {}
        with contextlib.ExitStack() as undo:
            self._transfers = _Queue(entries)
            undo.callback(self._transfers.ring.close)
            self._steps = _Queue(entries)
            undo.callback(self._steps.ring.close)
            self._either = select.epoll()
            for queue in (self._transfers, self._steps):
                self._either.register(queue.ring.descriptor, select.EPOLLIN)
            undo.pop_all()

    def fileno(self) -> int:
        return self._either.fileno()

    def transfers_fileno(self) -> int:
        return self._transfers.ring.descriptor

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def submit(self, operations: Sequence[FileOperation]) -> None:
        for operation in operations:
            if operation.token in self._pending:
                raise InvariantError(f"token {operation.token} is in flight already")
            pending = _Pending(operation)
            self._pending[operation.token] = pending
            queue = self._transfers if pending.is_transfer else self._steps
            queue.waiting.append(pending)
        self._start_waiting()

    def reap(self) -> list[Completion]:
        completions: list[Completion] = []
        for queue in (self._transfers, self._steps):
            for token, result in queue.ring.completions():
                pending = self._pending[token]
                queue.with_kernel -= 1
                if pending.is_transfer and _goes_on(pending, result):
                    queue.waiting.append(pending)
                    continue
                del self._pending[token]
                if pending.refused:
                    result = -errno.EINVAL
                elif result >= 0:
                    result += pending.done
                completions.append(Completion(token, result))
        self._start_waiting()
        return completions

    def close(self) -> None:
        if self._pending:
            raise InvariantError(f"{len(self._pending)} operations are in flight")
        self._either.close()
        self._transfers.ring.close()
        self._steps.ring.close()

    def _start_waiting(self) -> None:
        for queue in (self._transfers, self._steps):
            queue.start_waiting(self._push)

    def _push(self, onto: ring.Ring, pending: _Pending) -> None:
        operation = pending.operation
        action = operation.action
        if pending.is_transfer:
            self._push_transfer(onto, pending)
        elif action is Action.CLOSE:
            # The kernel itself hands those closes that can wait to a worker (``f_op->flush``).
            onto.push(ring.CLOSE, operation.descriptor, operation.token)
        elif action is Action.SYNC:
            onto.push(ring.FSYNC, operation.descriptor, operation.token, flags=ring.ASYNC)
        else:
            self._push_path(onto, pending)

    def _push_transfer(self, onto: ring.Ring, pending: _Pending) -> None:
        operation = pending.operation
        is_read = operation.action is Action.READ
        parts = without_front(parts_of(operation, self._buffers, self._rows), pending.done)
        if len(parts) == 1:
            opcode = ring.READ if is_read else ring.WRITE
            address, length = _address_of(parts[0]), len(parts[0])
        else:
            opcode = ring.READV if is_read else ring.WRITEV
            pending.vector = (_Part * len(parts))(
                *(_Part(_address_of(part), len(part)) for part in parts)
            )
            address, length = ctypes.addressof(pending.vector), len(parts)
        onto.push(
            opcode,
            operation.descriptor,
            operation.token,
            flags=ring.ASYNC,
            address=address,
            length=length,
            offset=pending.done,
        )

    def _push_path(self, onto: ring.Ring, pending: _Pending) -> None:
        operation = pending.operation
        path = ctypes.c_char_p(encode_path(operation.path))
        pending.path = path
        opcode, length, offset = ring.UNLINKAT, 0, 0
        match operation.action:
            case Action.OPEN | Action.CREATE | Action.OPEN_DIRECTORY:
                how = self._hows[operation.action]
                opcode, length = ring.OPENAT2, ctypes.sizeof(how)
                offset = ctypes.addressof(how)
            case Action.LINK | Action.RENAME:
                pending.target = ctypes.c_char_p(encode_path(operation.target))
                is_link = operation.action is Action.LINK
                opcode = ring.LINKAT if is_link else ring.RENAMEAT
                length = _DIRECTORY_AS_LENGTH
                offset = _pointer(pending.target)
            case Action.MKDIR:
                opcode, length = ring.MKDIRAT, self._access.directory_mode
        onto.push(
            opcode,
            AT_FDCWD,
            operation.token,
            flags=ring.ASYNC,
            address=_pointer(path),
            length=length,
            offset=offset,
        )


class _Queue:
    """A ring, and the operations that wait for room in it."""

    def __init__(self, entries: int) -> None:
        self.ring = ring.Ring(entries)
        self.waiting: deque[_Pending] = deque()
        self.with_kernel = 0

    def start_waiting(self, push: Callable[[ring.Ring, _Pending], None]) -> None:
        """Push what the ring has room for, so that its completions cannot overflow."""
        while self.waiting and self.with_kernel < self.ring.entries:
            pending = self.waiting.popleft()
            self.with_kernel += 1
            try:
                push(self.ring, pending)
            except (ValueError, struct.error):  # a path or number that no call could take
                pending.refused = True
                self.ring.push(ring.NOP, -1, pending.operation.token)
        if self.ring.unsubmitted:
            self.ring.submit()


def _goes_on(pending: _Pending, result: int) -> bool:
    """Whether a transfer has not ended with this result: it was cut short or interrupted."""
    if pending.refused:
        return False
    if is_cut_short(result, pending.operation.length - pending.done):
        pending.done += result
        return True
    return result == -errno.EINTR


def _address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _pointer(text: ctypes.c_char_p) -> int:
    return ctypes.c_void_p.from_buffer(text).value or 0
