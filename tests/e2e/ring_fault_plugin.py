# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin that has file operations fail on order: between the reactor and its I/O engine.

Runs inside the server under test, from a copy outside the repository. PYKVCACHE_RING_FAULT names
the file that holds the order; the fault lasts as long as the file does. The order is JSON: the
`action` that is struck, and one of

- `errno`: the operation ends with it, and was not carried out;
- `short`: a transfer moves half of its bytes, it says;
- `hangs`: it ends when the fault does;
- `bytes_per_s`: transfers end as on a device that is no faster, one after another.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pykvcache.reactor.engine import IoEngine
from pykvcache.reactor.threads import ThreadsEngine
from pykvcache.reactor.uring import UringEngine
from pykvcache.transfer.operations import Action, Completion, FileOperation

NOWHERE = "/dev/null/nowhere"
"""No operation on this path does anything."""
PATHS = (Action.OPEN, Action.CREATE, Action.LINK, Action.RENAME, Action.UNLINK, Action.MKDIR)


class RingFault:
    """What is wrong with one I/O engine."""

    def __init__(self) -> None:
        self._order = Path(os.environ["PYKVCACHE_RING_FAULT"])
        self._answers: dict[int, int | None] = {}
        """By token, what becomes of it: a result, None for half of the bytes."""
        self._slow: dict[int, int] = {}
        """By token, the bytes of a transfer that is too fast."""
        self._stuck: set[int] = set()
        self._held: list[tuple[float, Completion]] = []
        """From when on they may be told."""
        self._free_at = 0.0

    def order(self) -> dict[str, Any] | None:
        """What is to happen now."""
        try:
            order: dict[str, Any] = json.loads(self._order.read_text())
        except FileNotFoundError:
            return None
        return order

    @property
    def held(self) -> int:
        """Operations that have ended, of which the reactor has not been told."""
        return len(self._held)

    def struck(self, operation: FileOperation) -> FileOperation:
        """The operation to carry out instead."""
        order = self.order()
        if order is None or operation.action.name != order["action"]:
            return operation
        if "errno" in order:
            self._answers[operation.token] = -order["errno"]
            if operation.action in PATHS:
                return dataclasses.replace(operation, path=NOWHERE)
            return dataclasses.replace(operation, descriptor=-1)
        if "short" in order:
            self._answers[operation.token] = None
        elif "hangs" in order:
            self._stuck.add(operation.token)
        else:
            self._slow[operation.token] = order["bytes_per_s"]
        return operation

    def told(self, completions: Sequence[Completion]) -> list[Completion]:
        """What the reactor hears now."""
        now = time.monotonic()
        if self._stuck and self.order() is None:
            self._stuck.clear()
            self._held = [(min(at, now), completion) for at, completion in self._held]
        for completion in completions:
            self._held.append((self._time_of(completion, now), self._answer(completion)))
        due = [completion for at, completion in self._held if at <= now]
        self._held = [each for each in self._held if each[0] > now]
        return due

    def _time_of(self, completion: Completion, now: float) -> float:
        if completion.token in self._stuck:
            return float("inf")
        rate = self._slow.pop(completion.token, None)
        if rate is None:
            return now
        self._free_at = max(self._free_at, now) + max(completion.result, 0) / rate
        return self._free_at

    def _answer(self, completion: Completion) -> Completion:
        if completion.token not in self._answers:
            return completion
        result = self._answers.pop(completion.token)
        return dataclasses.replace(
            completion, result=completion.result // 2 if result is None else result
        )


def wrap(engine: type[IoEngine]) -> None:
    """Put the fault before this kind of engine, once."""
    if hasattr(engine, "ring_fault"):
        return
    start, submit, reap, in_flight = (
        engine.__init__,
        engine.submit,
        engine.reap,
        engine.in_flight.fget,  # type: ignore[attr-defined]
    )

    def started(self: Any, *arguments: Any, **named: Any) -> None:
        start(self, *arguments, **named)
        self.ring_fault = RingFault()

    def submitted(self: Any, operations: Sequence[FileOperation]) -> None:
        submit(self, [self.ring_fault.struck(operation) for operation in operations])

    def reaped(self: Any) -> list[Completion]:
        told: list[Completion] = self.ring_fault.told(reap(self))
        return told

    engine.ring_fault = None  # type: ignore[attr-defined]
    engine.__init__ = started  # type: ignore[assignment]
    engine.submit = submitted  # type: ignore[method-assign]
    engine.reap = reaped  # type: ignore[method-assign]
    engine.in_flight = property(  # type: ignore[assignment,method-assign]
        lambda self: in_flight(self) + self.ring_fault.held
    )


def register() -> None:
    """Entry point, called in every process of the server."""
    for engine in (UringEngine, ThreadsEngine):
        wrap(engine)
