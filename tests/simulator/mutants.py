# SPDX-License-Identifier: Apache-2.0
"""Cores with one mistake each: what the simulator must be able to find."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pykvcache.layout import BlockSpan
from pykvcache.pool import SlotLedger
from pykvcache.transfer.core import Limits, Operation, TransferCore
from pykvcache.transfer.jobs import ChunkTransfer, Direction, JobResult
from pykvcache.transfer.operations import (
    Action,
    ChecksumOperation,
    Completion,
    CopyOperation,
    FileOperation,
)


def action_of(operation: Operation) -> Action | None:
    """The action of a file operation."""
    return operation.action if isinstance(operation, FileOperation) else None


class OneTransferTooMany(TransferCore):
    """Exceeds ``io_depth``."""

    def __init__(self, limits: Limits, ledger: SlotLedger, writer: str) -> None:
        super().__init__(limits, ledger, writer)
        self._budget.io_depth += 1


class OneFileTooMany(TransferCore):
    """Exceeds ``open_lookahead``."""

    def __init__(self, limits: Limits, ledger: SlotLedger, writer: str) -> None:
        more = limits.open_lookahead + 1
        super().__init__(replace(limits, open_lookahead=more), ledger, writer)


class NoDeadline(TransferCore):
    """Waits for a read as long as it takes."""

    def __init__(self, limits: Limits, ledger: SlotLedger, writer: str) -> None:
        super().__init__(replace(limits, load_deadline_s=1e9), ledger, writer)


class StoresTakeAllSlots(TransferCore):
    """Keeps no slots for loads."""

    def __init__(self, limits: Limits, ledger: SlotLedger, writer: str) -> None:
        super().__init__(limits, ledger, writer)
        self._budget.store_slots_max = ledger.capacity


class SkipsOperation(TransferCore):
    """Believes that one kind of operation is done without asking for it."""

    skipped: Action

    def advance(self, now: float) -> list[Operation]:
        issued = super().advance(now)
        skipped = [operation for operation in issued if action_of(operation) is self.skipped]
        self.complete([Completion(operation.token, 0) for operation in skipped], now)
        return [operation for operation in issued if operation not in skipped]


class SkipsClose(SkipsOperation):
    """Leaks descriptors."""

    skipped = Action.CLOSE


class SkipsUnlink(SkipsOperation):
    """Leaves temporaries behind."""

    skipped = Action.UNLINK


class SkipsLink(SkipsOperation):
    """Reports a store that nobody can find."""

    skipped = Action.LINK


class SkipsSync(SkipsOperation):
    """Takes for durable what the storage may lose."""

    skipped = Action.SYNC


class WritesBeforeReads(TransferCore):
    """Turns the priorities round."""

    def advance(self, now: float) -> list[Operation]:
        return sorted(super().advance(now), key=lambda item: action_of(item) is not Action.WRITE)


class ForgetsForsake(TransferCore):
    """Publishes what was copied from reused blocks."""

    def forsake(self, job_ids: Iterable[int], now: float) -> None:
        pass


class ForgetsFlush(TransferCore):
    """Keeps what should be dropped."""

    def flush(self, job_ids: Iterable[int]) -> None:
        pass


class SettledTooEarly(TransferCore):
    """Lets the engine reuse blocks that are being copied."""

    def settled(self, job_ids: Iterable[int]) -> bool:
        return True


class Watching(TransferCore):
    """Remembers what is in flight, and may change completions before they count."""

    def __init__(self, limits: Limits, ledger: SlotLedger, writer: str) -> None:
        super().__init__(limits, ledger, writer)
        self.slots = ledger
        self.flying: dict[int, Operation] = {}

    def advance(self, now: float) -> list[Operation]:
        issued = super().advance(now)
        self.flying.update({operation.token: operation for operation in issued})
        return issued

    def complete(self, completions: Iterable[Completion], now: float) -> None:
        believed = [self.believe(self.flying.pop(done.token), done) for done in completions]
        super().complete(believed, now)

    def believe(self, operation: Operation, done: Completion) -> Completion:
        """What the core takes this completion for."""
        return done


class BelievesShortTransfers(Watching):
    """Takes a part for the whole."""

    def believe(self, operation: Operation, done: Completion) -> Completion:
        if action_of(operation) in (Action.READ, Action.WRITE) and done.result >= 0:
            assert isinstance(operation, FileOperation)
            return replace(done, result=operation.length)
        return done


class BelievesDefects(Watching):
    """Loads files that are not what was asked for."""

    def believe(self, operation: Operation, done: Completion) -> Completion:
        return replace(done, defect=None)


class ComparesEveryOther(TransferCore):
    """Lets bytes pass that it should compare."""

    def __init__(self, limits: Limits, ledger: SlotLedger, writer: str) -> None:
        super().__init__(replace(limits, check_every=2), ledger, writer)


class SkipsChecksums(TransferCore):
    """Believes that checksums of one direction are computed without asking for them."""

    skipped: Direction

    def advance(self, now: float) -> list[Operation]:
        issued = super().advance(now)
        skipped = [
            operation
            for operation in issued
            if isinstance(operation, ChecksumOperation) and operation.direction is self.skipped
        ]
        self.complete([Completion(operation.token, 0) for operation in skipped], now)
        return [operation for operation in issued if operation not in skipped]


class ComparesNothing(SkipsChecksums):
    """Hands out whatever was read."""

    skipped = Direction.LOAD


class SealsNothing(SkipsChecksums):
    """Writes files without a trailer."""

    skipped = Direction.STORE


class BelievesFailedCopies(Watching):
    """Takes a failed device copy for a good one."""

    def believe(self, operation: Operation, done: Completion) -> Completion:
        return replace(done, result=0) if isinstance(operation, CopyOperation) else done


class BelievesFailedCloses(Watching):
    """Publishes what a network filesystem could not keep."""

    def believe(self, operation: Operation, done: Completion) -> Completion:
        return replace(done, result=0) if action_of(operation) is Action.CLOSE else done


class CallsPresentAFailure(Watching):
    """Takes another writer's file for an error."""

    def believe(self, operation: Operation, done: Completion) -> Completion:
        if action_of(operation) is Action.LINK and done.result == -errno.EEXIST:
            return replace(done, result=-errno.EIO)
        return done


class LosesResults(TransferCore):
    """Never says how every tenth job ended."""

    def take_results(self) -> list[JobResult]:
        return [result for result in super().take_results() if result.job_id % 10]


class RepeatsResults(TransferCore):
    """Says twice how a job ended."""

    def take_results(self) -> list[JobResult]:
        return super().take_results() * 2


class ReleasesBeforeTheWrite(Watching):
    """Gives a store's slot back while it is being written."""

    def advance(self, now: float) -> list[Operation]:
        issued = super().advance(now)
        for operation in issued:
            if isinstance(operation, FileOperation) and operation.action is Action.WRITE:
                self.slots.release(operation.slot)
        return issued


class ReleasesAbandonedReads(Watching):
    """Gives a slot back while a read that nobody waits for may still write to it."""

    def close(self, now: float) -> None:
        super().close(now)
        for operation in self.flying.values():
            if isinstance(operation, FileOperation) and operation.action is Action.READ:
                self.slots.release(operation.slot)


class ReadsAheadOfLoads(TransferCore):
    """Reads ahead although a load waits."""

    def advance(self, now: float) -> list[Operation]:
        waits = type(self._reads).is_wanting
        try:
            type(self._reads).is_wanting = False  # type: ignore[method-assign, assignment]
            return super().advance(now)
        finally:
            type(self._reads).is_wanting = waits  # type: ignore[method-assign]


class ReadsAheadIntoEverySlot(TransferCore):
    """Leaves loads no slots, and stores none either."""

    def __init__(self, limits: Limits, ledger: SlotLedger, writer: str) -> None:
        super().__init__(limits, ledger, writer)
        preloads, lane = self._preloads, self._reads.preload

        def may_start(now: float) -> bool:
            return bool(
                lane.opened
                and self._budget.has_depth
                and lane.reading < limits.preload.depth
                and self._dram.available(demand=False)
            )

        preloads._may_start = may_start  # type: ignore[method-assign]


class ForgetsWithdrawals(TransferCore):
    """Reads ahead for requests that are gone."""

    def preload(self, chunks: Sequence[ChunkTransfer], now: float) -> None:
        super().preload([*chunks, *self._preloads._wanted.values()], now)


class NeverUnpins(TransferCore):
    """Loses the slots of loads."""

    def __init__(self, limits: Limits, ledger: SlotLedger, writer: str) -> None:
        super().__init__(limits, ledger, writer)
        self._dram.unpin = lambda resident: None  # type: ignore[method-assign]


class TakesPartsForWholeChunks(Watching):
    """Loads blocks that a file does not hold from DRAM."""

    def believe(self, operation: Operation, done: Completion) -> Completion:
        return done if done.span is None else replace(done, span=BlockSpan(0, 64))


class IgnoresBandwidth(TransferCore):
    """Reads and writes as fast as it can."""

    def __init__(self, limits: Limits, ledger: SlotLedger, writer: str) -> None:
        unlimited = replace(limits, read_bandwidth_max=0, write_bandwidth_max=0)
        super().__init__(unlimited, ledger, writer)


class ReadsAheadWithTheLoadsBudget(TransferCore):
    """Leaves loads nothing of the bytes per second."""

    def __init__(self, limits: Limits, ledger: SlotLedger, writer: str) -> None:
        super().__init__(limits, ledger, writer)
        budget = self._budget.read_bandwidth
        allows = budget.allows
        budget.allows = lambda now, patient=False: allows(now)  # type: ignore[method-assign]


class NeverRefillsTheBudget(TransferCore):
    """Stops for good when the first burst is used up."""

    def __init__(self, limits: Limits, ledger: SlotLedger, writer: str) -> None:
        super().__init__(limits, ledger, writer)
        budget = self._budget.write_bandwidth
        allows = budget.allows
        budget.allows = lambda now, patient=False: allows(0.0)  # type: ignore[method-assign]


class StoresBehindThrottledLoads(TransferCore):
    """Lets a load that waits for its bandwidth hold up stores, which have their own."""

    def __init__(self, limits: Limits, ledger: SlotLedger, writer: str) -> None:
        super().__init__(limits, ledger, writer)
        start = self._writes.start

        def start_unless_loads_wait(operations: list[Operation]) -> None:
            if not self._reads.demand.opened:
                start(operations)

        self._writes.start = start_unless_loads_wait  # type: ignore[method-assign]


MUTANTS: tuple[type[TransferCore], ...] = (
    OneTransferTooMany,
    OneFileTooMany,
    NoDeadline,
    StoresTakeAllSlots,
    SkipsClose,
    SkipsUnlink,
    SkipsLink,
    SkipsSync,
    WritesBeforeReads,
    ForgetsForsake,
    ForgetsFlush,
    SettledTooEarly,
    BelievesShortTransfers,
    BelievesDefects,
    ComparesEveryOther,
    ComparesNothing,
    SealsNothing,
    BelievesFailedCopies,
    BelievesFailedCloses,
    CallsPresentAFailure,
    LosesResults,
    RepeatsResults,
    ReleasesBeforeTheWrite,
    ReleasesAbandonedReads,
    ReadsAheadOfLoads,
    ReadsAheadIntoEverySlot,
    ForgetsWithdrawals,
    NeverUnpins,
    TakesPartsForWholeChunks,
    IgnoresBandwidth,
    ReadsAheadWithTheLoadsBudget,
    NeverRefillsTheBudget,
    StoresBehindThrottledLoads,
)
