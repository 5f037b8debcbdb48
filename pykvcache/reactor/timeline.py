# SPDX-License-Identifier: Apache-2.0
"""The reactor's operations as spans of a trace: from their submission to their completion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pykvcache.trace import Lanes, Tracer
from pykvcache.transfer.operations import (
    Action,
    ChecksumOperation,
    Completion,
    CopyOperation,
    FileOperation,
)

_TRACKS = {Action.OPEN: "open", Action.READ: "read", Action.WRITE: "write"}
"""Tracks of their own; the other actions share one."""


class Timeline:
    """Traces one reactor; its thread only."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._lanes = Lanes()
        self._going_on: dict[int, tuple[str, str, int, dict[str, Any]]] = {}

    def turn(
        self,
        completions: Iterable[Completion],
        operations: Iterable[FileOperation | CopyOperation | ChecksumOperation],
    ) -> None:
        """Record what has ended and what begins."""
        now = self._tracer.now()
        for completion in completions:
            track, name, start, args = self._going_on.pop(completion.token)
            self._lanes.give_back(track)
            if completion.result < 0:
                args["errno"] = -completion.result
            self._tracer.span(track, name, start, now, args)
        for operation in operations:
            track, name, args = _described(operation)
            self._going_on[operation.token] = (self._lanes.take(track), name, now, args)


def _described(
    operation: FileOperation | CopyOperation | ChecksumOperation,
) -> tuple[str, str, dict[str, Any]]:
    if isinstance(operation, CopyOperation):
        size = sum(copy.chunk.copy_bytes for copy in operation.copies)
        counts = {"chunks": len(operation.copies), "bytes": size}
        return "copy", f"copy for {operation.direction}", counts
    if isinstance(operation, ChecksumOperation):
        key = operation.chunk.key.hex()[:16]
        size = operation.chunk.file_bytes
        return "checksum", f"checksum for {operation.direction}", {"bytes": size, "key": key}
    name = operation.action.name.lower()
    args: dict[str, Any] = {"bytes": operation.length} if operation.length else {}
    if operation.chunk is not None:
        args["key"] = operation.chunk.key.hex()[:16]
    return _TRACKS.get(operation.action, "file"), name, args
