# SPDX-License-Identifier: Apache-2.0
"""The trailer page: written behind the payload before a WRITE, examined after a READ."""

from __future__ import annotations

import time

from pykvcache.layout import PAGE, Defect, Trailer, find_span
from pykvcache.pool import Pool
from pykvcache.transfer.jobs import ChunkTransfer
from pykvcache.transfer.operations import Action, Completion, FileOperation


class Trailers:
    """What the files of one reactor say of themselves."""

    def __init__(self, pool: Pool, fingerprint: bytes, writer: str) -> None:
        """Args:
        pool: whose slots end in the trailer page.
        fingerprint: the identity's, written and expected.
        writer: who writes, for people.
        """
        self._pool = pool
        self._fingerprint = fingerprint
        self._writer = writer.encode()
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
        ).encode_into(tail[padding:])

    def examine(self, completions: list[Completion]) -> list[Completion]:
        """What completed, with what a whole READ turned out to hold."""
        return [
            self._check(completion) if completion.token in self._expected else completion
            for completion in completions
        ]

    def _check(self, completion: Completion) -> Completion:
        operation = self._expected.pop(completion.token)
        chunk = operation.chunk
        assert chunk is not None
        if completion.result != operation.length:
            return completion
        found = find_span(
            self._tail(operation.slot, chunk)[-PAGE:],
            key=chunk.key,
            fingerprint=self._fingerprint,
            payload_bytes=chunk.payload_bytes,
            span=chunk.span,
        )
        if isinstance(found, Defect):
            return Completion(completion.token, completion.result, defect=found)
        return Completion(completion.token, completion.result, span=found)

    def _tail(self, slot: int, chunk: ChunkTransfer) -> memoryview:
        """What follows the payload in the file: padding and the trailer page."""
        start = chunk.payload_bytes if chunk.row < 0 else 0
        return self._pool.view(slot)[start : start + chunk.file_bytes - chunk.payload_bytes]
