# SPDX-License-Identifier: Apache-2.0
"""The life of a chunk on the worker: every state, event and transition, in one table.

A *read* is one file on its way to the device; several jobs that want the same chunk
share it. A *write* is one chunk on its way to a file; it is *sealed* with its trailer.
Whatever is not in the table is a bug and raises; the diagram in the documentation is
drawn from this table.
"""

from __future__ import annotations

import enum
from types import MappingProxyType

from pykvcache.errors import InvariantError


class State(enum.StrEnum):
    """Where a chunk is. ``ENDED`` is the only final state, of reads and writes alike."""

    WAITING = "waiting"
    OPENING = "opening"
    OPENED = "opened"
    READING = "reading"
    CHECKING = "checking"
    READ = "read"
    COPYING_IN = "copying in"
    COPYING_OUT = "copying out"
    COPIED = "copied"
    SEALING = "sealing"
    SEALED = "sealed"
    CREATING = "creating"
    MAKING_DIRECTORY = "making directory"
    CREATED = "created"
    WRITING = "writing"
    SYNCING = "syncing"
    CLOSING = "closing"
    LINKING = "linking"
    PUBLISHING = "publishing"
    ENDED = "ended"


class Event(enum.StrEnum):
    """What moves it: an operation is issued, it succeeds or fails, nobody wants the
    chunk, it is in DRAM already, or it stays there for later."""

    ISSUE = "issue"
    SUCCEED = "succeed"
    NO_DIRECTORY = "no directory"
    FAIL = "fail"
    ABANDON = "abandon"
    HIT = "hit"
    KEEP = "keep"


_S, _E = State, Event

READ_TRANSITIONS = MappingProxyType(
    {
        (_S.WAITING, _E.ISSUE): _S.OPENING,
        (_S.WAITING, _E.ABANDON): _S.ENDED,
        (_S.WAITING, _E.HIT): _S.READ,
        (_S.OPENING, _E.SUCCEED): _S.OPENED,
        (_S.OPENING, _E.FAIL): _S.ENDED,
        (_S.OPENED, _E.ISSUE): _S.READING,
        (_S.OPENED, _E.ABANDON): _S.ENDED,
        (_S.READING, _E.SUCCEED): _S.CHECKING,
        (_S.READING, _E.FAIL): _S.ENDED,
        (_S.CHECKING, _E.SUCCEED): _S.READ,
        (_S.CHECKING, _E.FAIL): _S.ENDED,
        (_S.READ, _E.ISSUE): _S.COPYING_IN,
        (_S.READ, _E.ABANDON): _S.ENDED,
        (_S.READ, _E.KEEP): _S.ENDED,
        (_S.COPYING_IN, _E.SUCCEED): _S.ENDED,
        (_S.COPYING_IN, _E.FAIL): _S.ENDED,
    }
)

WRITE_TRANSITIONS = MappingProxyType(
    {
        (_S.WAITING, _E.ISSUE): _S.COPYING_OUT,
        (_S.WAITING, _E.ABANDON): _S.ENDED,
        (_S.COPYING_OUT, _E.SUCCEED): _S.COPIED,
        (_S.COPYING_OUT, _E.FAIL): _S.ENDED,
        (_S.COPIED, _E.ISSUE): _S.SEALING,
        (_S.COPIED, _E.ABANDON): _S.ENDED,
        (_S.SEALING, _E.SUCCEED): _S.SEALED,
        (_S.SEALED, _E.ISSUE): _S.CREATING,
        (_S.SEALED, _E.ABANDON): _S.ENDED,
        (_S.CREATING, _E.SUCCEED): _S.CREATED,
        (_S.CREATING, _E.NO_DIRECTORY): _S.MAKING_DIRECTORY,
        (_S.CREATING, _E.FAIL): _S.ENDED,
        (_S.MAKING_DIRECTORY, _E.SUCCEED): _S.CREATING,
        (_S.MAKING_DIRECTORY, _E.FAIL): _S.ENDED,
        (_S.CREATED, _E.ISSUE): _S.WRITING,
        (_S.CREATED, _E.ABANDON): _S.ENDED,
        (_S.WRITING, _E.SUCCEED): _S.SYNCING,
        (_S.WRITING, _E.FAIL): _S.ENDED,
        (_S.SYNCING, _E.SUCCEED): _S.CLOSING,
        (_S.SYNCING, _E.FAIL): _S.ENDED,
        (_S.CLOSING, _E.SUCCEED): _S.LINKING,
        (_S.CLOSING, _E.FAIL): _S.ENDED,
        (_S.CLOSING, _E.ABANDON): _S.ENDED,
        (_S.LINKING, _E.SUCCEED): _S.PUBLISHING,
        (_S.LINKING, _E.FAIL): _S.ENDED,
        (_S.PUBLISHING, _E.SUCCEED): _S.ENDED,
        (_S.PUBLISHING, _E.FAIL): _S.ENDED,
    }
)


def next_read_state(state: State, event: Event) -> State:
    """The state of a read after the event.

    Raises:
        InvariantError: the table has no such transition.
    """
    try:
        return READ_TRANSITIONS[state, event]
    except KeyError:
        raise _impossible("read", state, event) from None


def next_write_state(state: State, event: Event) -> State:
    """The state of a write after the event.

    Raises:
        InvariantError: the table has no such transition.
    """
    try:
        return WRITE_TRANSITIONS[state, event]
    except KeyError:
        raise _impossible("write", state, event) from None


def _impossible(name: str, state: State, event: Event) -> InvariantError:
    return InvariantError(f"a {name} that is {state} cannot {event}")
