# SPDX-License-Identifier: Apache-2.0
"""The trailer page: written behind the payload before a WRITE, examined after a READ."""

from __future__ import annotations

import time

from pykvcache.checksum import checksum
from pykvcache.layout import PAGE, Defect, Trailer, find_trailer
from pykvcache.pool import Pool
from pykvcache.reactor.rows import Rows
from pykvcache.transfer.jobs import ChunkTransfer
from pykvcache.transfer.operations import Action, Completion, FileOperation


class Trailers:
    """What the files of one reactor say of themselves."""

    def __init__(
        self, pool: Pool, fingerprint: bytes, writer: str, rows: Rows | None = None
    ) -> None:
        """Args:
        pool: whose slots end in the trailer page.
        fingerprint: the identity's, written and expected.
        writer: who writes, for people.
        rows: where payloads lie that are not in slots.
        """
        self._pool = pool
        self._fingerprint = fingerprint
        self._writer = writer.encode()
        self._rows = rows
        self._expected: dict[int, FileOperation] = {}

    def prepare(self, operation: FileOperation) -> FileOperation:
        """Before the operation is submitted."""
        if operation.action is Action.READ:
            self._expected[operation.token] = operation
        elif operation.action is Action.WRITE:
            self._write(operation)
        return operation

    def _write(self, operation: FileOperation) -> None:
        chunk = operation.chunk
        assert chunk is not None
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
        )
        if isinstance(found, Defect):
            return Completion(completion.token, completion.result, defect=found)
        if found.checksum != self._checksum(operation.slot, chunk):
            return Completion(completion.token, completion.result, defect=Defect.CHECKSUM)
        return Completion(completion.token, completion.result, span=found.span)

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
