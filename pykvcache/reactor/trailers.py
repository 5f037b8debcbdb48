# SPDX-License-Identifier: Apache-2.0
"""The trailer page: written behind the payload before a WRITE, examined after a READ.

Checksums take milliseconds for a chunk of tens of MB, so :class:`Sealer` has a thread of its own:
the reactor's keeps the disk's queue filled meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from pykvcache.checksum import checksum
from pykvcache.layout import PAGE, Defect, Trailer, decode_trailer, find_trailer
from pykvcache.pool import Pool
from pykvcache.reactor.rows import Rows
from pykvcache.transfer.jobs import ChunkTransfer, Direction
from pykvcache.transfer.operations import Action, ChecksumOperation, Completion, FileOperation


class Trailers:
    """What the files of one reactor say of themselves."""

    def __init__(
        self,
        pool: Pool,
        fingerprint: bytes,
        writer: str,
        rows: Rows | None = None,
        *,
        intact: bool = False,
    ) -> None:
        """Args:
        pool: whose slots end in the trailer page.
        fingerprint: the identity's, written and expected.
        writer: who writes, for people.
        rows: where payloads lie that are not in slots.
        intact: whether trailers that are read are taken for what was written.
        """
        self._pool = pool
        self._fingerprint = fingerprint
        self._writer = writer.encode()
        self._rows = rows
        self._intact = intact
        self._expected: dict[int, FileOperation] = {}

    def prepare(self, operation: FileOperation) -> FileOperation:
        """Before the operation is submitted."""
        if operation.action is Action.READ:
            self._expected[operation.token] = operation
        return operation

    def seal(self, operation: ChecksumOperation) -> None:
        """Complete what is to be written with padding and trailer. Any thread."""
        chunk = operation.chunk
        tail = self._tail(operation.slot, chunk)
        padding = len(tail) - PAGE
        tail[:padding] = bytes(padding)
        Trailer(
            key=chunk.key,
            fingerprint=self._fingerprint,
            payload_bytes=chunk.payload_bytes,
            span=chunk.span,
            time_ns=time.time_ns(),
            writer=self._writer,
            checksum=self._checksum(operation.slot, chunk),
        ).encode_into(tail[padding:])

    def examine(self, completions: list[Completion]) -> list[Completion]:
        """What completed, with what a whole READ turned out to hold."""
        return [
            self._examine(completion) if completion.token in self._expected else completion
            for completion in completions
        ]

    def _examine(self, completion: Completion) -> Completion:
        operation = self._expected.pop(completion.token)
        chunk = operation.chunk
        assert chunk is not None
        if completion.result != operation.length:
            return completion
        found = find_trailer(
            self._tail(operation.slot, chunk)[-PAGE:],
            key=chunk.key,
            fingerprint=self._fingerprint,
            payload_bytes=chunk.payload_bytes,
            span=chunk.span,
            intact=self._intact,
        )
        if isinstance(found, Defect):
            return Completion(completion.token, completion.result, defect=found)
        return Completion(completion.token, completion.result, span=found.span)

    def compare(self, operation: ChecksumOperation) -> Defect | None:
        """What is wrong with the bytes that have been read. Any thread."""
        trailer = decode_trailer(self._tail(operation.slot, operation.chunk)[-PAGE:])
        if isinstance(trailer, Defect):
            return trailer
        if trailer.checksum != self._checksum(operation.slot, operation.chunk):
            return Defect.CHECKSUM
        return None

    def _checksum(self, slot: int, chunk: ChunkTransfer) -> bytes:
        """That of everything before the trailer page."""
        padding = self._tail(slot, chunk)[:-PAGE]
        if chunk.row < 0:
            return checksum(self._pool.view(slot)[: chunk.payload_bytes + len(padding)])
        assert self._rows is not None
        return checksum(self._rows.view(chunk.row)[: chunk.payload_bytes], padding)

    def _tail(self, slot: int, chunk: ChunkTransfer) -> memoryview:
        """What follows the payload in the file: padding and the trailer page."""
        start = chunk.payload_bytes if chunk.row < 0 else 0
        return self._pool.view(slot)[start : start + chunk.file_bytes - chunk.payload_bytes]


class Sealer:
    """Carries out checksum operations on a thread beside the reactor's, which makes it, hands
    over operations and reaps them."""

    def __init__(self, trailers: Trailers, ring: Callable[[], None]) -> None:
        """Args:
        trailers: what seals and compares.
        ring: called on the other thread when an operation has completed.
        """
        self._trailers = trailers
        self._ring = ring
        self._todo: SimpleQueue[ChecksumOperation | None] = SimpleQueue()
        self._done: deque[Completion | Exception] = deque()
        self._thread = threading.Thread(target=self._run, name="pykvcache-sealer", daemon=True)
        self._thread.start()

    def submit(self, operation: ChecksumOperation) -> None:
        """Start the operation."""
        self._todo.put(operation)

    def reap(self) -> list[Completion]:
        """The operations that have completed since the last call; does not block.

        Raises:
            Exception: a bug on the other thread.
        """
        completions = []
        while self._done:
            done = self._done.popleft()
            if isinstance(done, Exception):
                raise done
            completions.append(done)
        return completions

    @property
    def is_ended(self) -> bool:
        """Whether the thread has ended, and looks at no memory any more."""
        return not self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """End the thread when it has done what was submitted."""
        self._todo.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (operation := self._todo.get()) is not None:
            try:
                self._done.append(self._carry_out(operation))
            except Exception as error:
                self._done.append(error)
            self._ring()

    def _carry_out(self, operation: ChecksumOperation) -> Completion:
        if operation.direction is Direction.LOAD:
            return Completion(operation.token, 0, self._trailers.compare(operation))
        self._trailers.seal(operation)
        return Completion(operation.token, 0)
