# SPDX-License-Identifier: Apache-2.0
"""Plays every fault of the disk that the core can be told, and says what became of it.

The table in the documentation is made from this (`scripts/docs.py`); `test_fault_table.py` holds it
to what must be.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

from pykvcache.layout import Defect
from pykvcache.transfer.jobs import Direction, Failure
from pykvcache.transfer.operations import Action, FileOperation
from tests.core.driver import DEADLINE_S, FILE_BYTES, Driver, chunk_of

LOAD_ACTIONS = (Action.OPEN, Action.READ)
STORE_ACTIONS = (Action.CREATE, Action.WRITE, Action.LINK)
ERRORS = (
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.ENOENT,
    errno.ESTALE,
    errno.ELOOP,
    errno.EMFILE,
    errno.ENODEV,
)
SHORT = FILE_BYTES // 2
FAULTS_MAX = 3
"""In a row, after which the disk is left alone."""


@dataclass(frozen=True)
class Played:
    """What became of one fault.

    Attributes:
        fault: an errno's name, or what happened.
        direction: of the job.
        action: the operation that it struck.
        failure: the reason that was counted.
        file: what was done to the file.
        is_paused: whether the disk is left alone after three in a row.
        recovers: whether the same job succeeds when the fault has gone.
    """

    fault: str
    direction: Direction
    action: Action
    failure: Failure
    file: str
    is_paused: bool
    recovers: bool


def played() -> Iterator[Played]:
    """Every fault in every operation that it can strike."""
    for code in ERRORS:
        name = errno.errorcode[code]
        for action in LOAD_ACTIONS:
            yield _play(name, Direction.LOAD, action, -code, None)
        for action in STORE_ACTIONS:
            yield _play(name, Direction.STORE, action, -code, None)
    yield _play("short", Direction.LOAD, Action.READ, SHORT, None)
    yield _play("short", Direction.STORE, Action.WRITE, SHORT, None)
    for defect in Defect:
        if defect is not Defect.CHECKSUM:
            yield _play(f"wrong: {defect.value}", Direction.LOAD, Action.READ, None, defect)
    yield _play("never returns", Direction.LOAD, Action.READ, None, None, hangs=True)


def _play(
    fault: str,
    direction: Direction,
    action: Action,
    result: int | None,
    defect: Defect | None,
    *,
    hangs: bool = False,
) -> Played:
    driver = Driver(pause_after_faults=FAULTS_MAX)
    failure, file = None, ""
    for _ in range(FAULTS_MAX):
        failure, file = _strike(driver, direction, action, result, defect, hangs)
        if hangs:
            break
    is_paused = driver.core.is_paused
    driver.now += 1000.0
    driver.finish()
    job = _submit(driver, direction)
    driver.finish()
    recovers = driver.results()[job].success
    driver.assert_at_rest()
    assert failure is not None, f"{fault} of {action} did not fail"
    return Played(fault, direction, action, failure, file, is_paused, recovers)


def _submit(driver: Driver, direction: Direction) -> int:
    chunk = chunk_of("a")
    return driver.load(chunk) if direction is Direction.LOAD else driver.store(chunk)


def _strike(
    driver: Driver,
    direction: Direction,
    struck_action: Action,
    result: int | None,
    defect: Defect | None,
    hangs: bool,
) -> tuple[Failure | None, str]:
    """Let one job meet the fault."""
    job = _submit(driver, direction)
    driver.advance()
    while not driver.files(struck_action):
        driver.complete(list(driver.issued))
    if hangs:
        driver.now += DEADLINE_S
        driver.advance()
        return driver.results()[job].failures.get(b"a"), "stays"
    struck = driver.file(struck_action)
    driver.complete(struck, result, defect)
    # A directory that is missing is made, and the file created again: the fault stays.
    while again := driver.files(Action.MKDIR) + driver.files(struck_action):
        driver.complete(again, result)
    seen: set[Action] = set()
    while driver.issued:
        files = [item for item in driver.issued if isinstance(item, FileOperation)]
        seen |= {item.action for item in files if _is_of_the_chunk(item)}
        driver.complete(list(driver.issued))
    outcomes = ((Action.RENAME, "put aside"), (Action.UNLINK, "removed"))
    file = next((outcome for action, outcome in outcomes if action in seen), "stays")
    return driver.results()[job].failures.get(b"a"), file


def _is_of_the_chunk(operation: FileOperation) -> bool:
    """Not of a temporary, which goes whenever a store fails."""
    return operation.path.endswith(".kv")


def rows() -> Iterator[str]:
    """The table; operations with the same outcome share a line."""
    columns = ("fault", "struck", "counted as", "the client sees", "the file", "three in a row")
    yield f"| {' | '.join((*columns, 'when it is gone'))} |"
    yield "| --- " * (len(columns) + 1) + "|"
    merged: dict[tuple[object, ...], list[str]] = {}
    for each in played():
        outcome = (each.fault, each.direction, each.failure, each.file, each.is_paused)
        assert each.recovers, each
        merged.setdefault(outcome, []).append(each.action.name.lower())
    for (fault, direction, failure, file, is_paused), actions in merged.items():
        client = "the answer, recomputed" if direction is Direction.LOAD else "the answer"
        after = "next load succeeds" if direction is Direction.LOAD else "next store succeeds"
        pause = "disk left alone" if is_paused else "-"
        what = f"{direction}: {', '.join(actions)}"
        if direction is Direction.STORE:
            file = "never appears"
        yield f"| {fault} | {what} | `{failure}` | {client} | {file} | {pause} | {after} |"
