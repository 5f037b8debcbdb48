# SPDX-License-Identifier: Apache-2.0
"""Seeded schedules of the transfer core: one seed, one schedule, the same every time.

A schedule plays the engine and the reactor's loop against a :class:`World`: jobs, flushes,
forsaken stores, a close or an abandonment at any moment, a virtual clock. What must hold is
checked in every turn, and once more when everything has come to rest.

As a program it runs a range of seeds and prints those that fail::

    PYTHONPATH=. python tests/simulator/simulator.py FIRST COUNT
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

from pykvcache.layout import PAGE, BlockSpan, ChunkPaths, Defect, file_bytes
from pykvcache.pool import SlotLedger
from pykvcache.transfer.core import Limits, TransferCore
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Failure, Job
from pykvcache.transfer.preloads import PreloadLimits
from tests.simulator.oracle import FAR_DEADLINE_S, Oracle, PendingFlush
from tests.simulator.watched import Violation, WatchedLedger, require
from tests.simulator.world import ROOT, Operation, Weather, World, right_content

CoreFactory = Callable[[Limits, SlotLedger, str], TransferCore]

GROUPS = ((3 * PAGE, 4), (PAGE + 512, 2))
"""Payload bytes and blocks of a chunk, for each KV cache group."""

RATES = (0, 0, 8 * PAGE, 60 * PAGE)
"""Bytes per second: none, a chunk every half second, some chunks a second."""

KEYS = 10
PATHS = ChunkPaths(ROOT)  # type: ignore[arg-type]
TURNS_TO_REST_MAX = 2000
"""Far more turns than any schedule needs from its last action until all is idle."""


class Simulation:
    """One schedule."""

    def __init__(
        self, seed: int, make_core: CoreFactory = TransferCore, verbose: bool = False
    ) -> None:
        self.random = random = Random(seed)
        self.verbose = verbose
        io_depth = random.randint(1, 4)
        self.ledger = WatchedLedger(io_depth + random.randint(1, 8))
        spare = self.ledger.capacity - io_depth - 1
        self.limits = Limits(
            io_depth=io_depth,
            open_lookahead=random.randint(1, 6),
            load_deadline_s=random.choice((3.0, 20.0, FAR_DEADLINE_S)),
            jobs_max=random.choice((3, 100, 100)),
            preload=random.choice(
                (
                    PreloadLimits(),
                    PreloadLimits(
                        depth=random.randint(1, 3),
                        slots_max=random.randint(0, spare),
                        bytes_max=random.choice((0, 0, 5 * PAGE)),
                        ttl_s=random.choice((5.0, math.inf)),
                    ),
                )
            ),
            dram_policy=random.choice(("none", "lru", "arc")),
            read_bandwidth_max=random.choice(RATES),
            write_bandwidth_max=random.choice(RATES),
            check_every=random.choice((1, 1, 0, 3)),
            syncs=random.random() < 0.3,
            quarantine_files_max=random.choice((0, 1, 16)),
            pause_after_faults=random.choice((0, 0, 1, 4)),
            pause_s=random.choice((0.5, 5.0)),
        )
        weather = Weather(
            fault=random.choice((0.0, 0.02, 0.1, 0.3)),
            slow=random.choice((0.0, 0.1, 0.4)),
            stuck=random.choice((0.0, 0.0, 0.05, 0.3)),
            defect=random.choice((0.0, 0.1, 0.4)),
        )
        self.world = World(random, weather, self.ledger)
        self.world.syncs = self.limits.syncs
        self.core = make_core(self.limits, self.ledger, "abcd")
        self.oracle = Oracle(self.limits, self.ledger, self.world)
        self.now = 0.0
        self._watch_pauses()
        self._defects = [
            # What is not compared is loaded.
            defect
            for defect in Defect
            if defect is not Defect.CHECKSUM or self.limits.check_every == 1
        ]
        self._preload_share = random.choice((0.12, 0.6))
        """The engine mostly submits jobs, or mostly shows requests that wait."""
        self._flushes: list[PendingFlush] = []
        self._forsake_next: set[int] = set()
        self._fresh_blocks = itertools.count()
        self._job_ids = itertools.count(1)

    def _watch_pauses(self) -> None:
        pause = self.core._pause

        def watched() -> None:
            self.oracle.pause(self.now)
            pause()

        self.core._pause = watched  # type: ignore[method-assign]

    def run(self) -> None:
        """Play the schedule.

        Raises:
            Violation: a property does not hold.
        """
        self._put_files()
        ends_early = self.random.random() < 0.3
        for _ in range(self.random.randint(10, 60)):
            self._forsake_late()
            self._act(ends_early)
            self._turn()
            self.now += self.random.choice((0.0, 0.1, self.random.expovariate(1.0)))
        self._come_to_rest()
        self.oracle.check_rest(self.core)

    def _note(self, text: str) -> None:
        if self.verbose:
            print(f"{self.now:8.2f}  {text}")

    # --- the engine's side

    def _put_files(self) -> None:
        for index in range(KEYS):
            chunk = self._chunk(index)
            if self.random.random() < 0.25:
                continue
            defect, length = None, chunk.file_bytes
            if self.random.random() < self.world.weather.defect:
                defect = self.random.choice((None, *self._defects))
                if defect is None:
                    length = self.random.randrange(0, length, 512)
            self.world.put_file(chunk, defect, length)

    def _chunk(self, index: int) -> ChunkTransfer:
        payload_bytes, blocks = GROUPS[index % len(GROUPS)]
        key = bytes((index % 3, index))
        first = self.random.randrange(blocks) if self.random.random() < 0.2 else 0
        span = BlockSpan(first, blocks - first)
        return ChunkTransfer(
            key=key,
            path=PATHS.final(key),
            payload_bytes=payload_bytes,
            file_bytes=file_bytes(payload_bytes),
            span=span,
            group=index % len(GROUPS),
            block_ids=tuple(itertools.islice(self._fresh_blocks, span.count)),
            copy_bytes=payload_bytes * span.count // blocks,
        )

    def _act(self, ends_early: bool) -> None:
        if self.random.random() < self._preload_share:
            self._preload()
            return
        draw = self.random.random()
        if draw < 0.51:
            for _ in range(self.random.randint(1, 2)):
                self._submit(self.random.choice(tuple(Direction)))
        elif draw < 0.62:
            self._flush()
        elif draw < 0.64:
            self._forsake(self._some_open_jobs())
        elif draw < 0.65:
            self._note("a directory vanishes")
            self.world.vanish()
        elif draw < 0.70 and ends_early:
            self._close() if self.random.random() < 0.7 else self._abandon()

    def _submit(self, direction: Direction) -> None:
        count = min(KEYS, self.random.choice((0, 1, 1, 2, 3, self.ledger.capacity + 2)))
        chunks = tuple(map(self._chunk, self.random.sample(range(KEYS), count)))
        job_id = next(self._job_ids)
        job = Job(job_id, direction, chunks, fence=("fence", job_id))
        for chunk in chunks:
            for block, right in zip(chunk.block_ids, right_content(chunk).values(), strict=True):
                self.world.blocks[block] = right if direction is Direction.STORE else "empty"
        self._note(f"submit {direction} {job_id}: {[chunk.key.hex() for chunk in chunks]}")
        entry = self.oracle.accept(job, self.now)
        self.core.submit(job, self.now)
        if entry.excuses:
            require(self.core.settled([job_id]), f"job {job_id} is accepted: {entry.excuses}")
        self._collect()

    def _preload(self) -> None:
        """The waiting requests change: some come, some run or are aborted."""
        count = self.random.choice((0, 1, 3, KEYS))
        chunks = [
            replace(self._chunk(index), span=BlockSpan(0, 0), block_ids=(), copy_bytes=0)
            for index in self.random.sample(range(KEYS), count)
        ]
        self._note(f"preload {[chunk.key.hex() for chunk in chunks]}")
        self.oracle.preloads = {chunk.path for chunk in chunks}
        self.core.preload(chunks, self.now)

    def _some_open_jobs(self) -> frozenset[int]:
        return frozenset(job for job in self.oracle.open if self.random.random() < 0.4)

    def _flush(self) -> None:
        job_ids = self._some_open_jobs()
        stores = tuple(self.oracle.stores(job_ids))
        self._note(f"flush {sorted(job_ids)}")
        self.oracle.excuse(stores, Failure.DROPPED)
        self.core.flush(job_ids)
        self._flushes.append(PendingFlush(job_ids, stores, self.now + self.random.uniform(0, 6)))

    def _forsake(self, job_ids: Iterable[int]) -> None:
        stores = self.oracle.stores(job_ids)
        self._note(f"forsake {[entry.job.job_id for entry in stores]}")
        self.oracle.excuse(stores, Failure.DROPPED)
        self.core.forsake(job_ids, self.now)
        self._collect()
        require(not self.oracle.stores(job_ids), f"forsaken stores go on: {job_ids}")

    def _forsake_late(self) -> None:
        """What the engine sent when its flush timed out, a turn ago."""
        forsaken, self._forsake_next = self._forsake_next, set()
        if forsaken:
            self._forsake(forsaken)

    def _close(self) -> None:
        self._note("close")
        self.oracle.close()
        self.core.close(self.now)
        self._collect()

    def _abandon(self) -> None:
        self._note("abandon")
        self.oracle.close()
        self.core.abandon(self.now)
        self._collect()
        require(not self.oracle.stores(self.oracle.open), "stores go on after abandon")

    def _reuse_blocks(self, chunks: Iterable[ChunkTransfer]) -> None:
        for chunk in chunks:
            for block in chunk.block_ids:
                self.world.blocks[block] = "reused"

    # --- the reactor's side

    def _turn(self, share: float | None = None) -> None:
        self.world.now = self.now
        completions = self.world.complete_some(share or self.random.choice((0.3, 0.7, 1.0)))
        for completion in completions:
            self._note(f"done {completion}")
        self.core.complete(completions, self.now)
        self._collect()
        operations = self.core.advance(self.now)
        self.oracle.expire(self.now)
        self._collect()
        self.oracle.check_operations(operations, self.now)
        for operation in operations:
            self._note(f"start {operation}")
            self.world.start(operation)
        self._watch_flushes(operations)
        self.oracle.check_turn(self.core, operations, self.now)

    def _collect(self) -> None:
        for result in self.core.take_results():
            self._note(f"result {result}")
            entry = self.oracle.end(result, self.now)
            self._reuse_blocks(entry.job.chunks)

    def _watch_flushes(self, operations: list[Operation]) -> None:
        waiting = []
        for flush in self._flushes:
            self.oracle.check_flushed(flush, self._flushes, operations)
            settled = self.core.settled(flush.job_ids)
            if settled or self.now >= flush.expires_at:
                for entry in self.oracle.stores(flush.job_ids):
                    self._reuse_blocks(entry.job.chunks)
            if not settled and self.now >= flush.expires_at:
                # The engine goes on at once; the reactor hears of it in its next turn.
                self._forsake_next |= flush.job_ids
            elif not settled:
                waiting.append(flush)
        self._flushes = waiting

    def _come_to_rest(self) -> None:
        """No more actions: time goes on until nothing is left to wait for."""
        for _ in range(TURNS_TO_REST_MAX):
            self._forsake_late()
            self._turn(share=1.0)
            moments = [self.world.next_ready(), self.core.next_deadline() or math.inf]
            moments += [flush.expires_at for flush in self._flushes]
            if min(moments) < math.inf:
                self.now = max(self.now, min(moments))
            elif self.world.flights:
                self.oracle.check_no_load_waits()
                self._note("what never returned returns")
                self.world.release_stuck()
            elif not self._forsake_next:
                return
        raise Violation(f"not at rest after {TURNS_TO_REST_MAX} turns")


def run_seed(seed: int, make_core: CoreFactory = TransferCore, verbose: bool = False) -> Simulation:
    """Play the schedule of a seed.

    Raises:
        Violation: a property does not hold, or the core raised; says how to repeat it.
    """
    simulation = Simulation(seed, make_core, verbose)
    try:
        simulation.run()
    except Exception as error:
        raise Violation(
            f"seed {seed}: {type(error).__name__}: {error}\n"
            f"repeat it with: SEED={seed} python -m pytest tests/simulator"
        ) from error
    return simulation


def main(first: int, count: int) -> int:
    """Run ``count`` seeds from ``first`` on; the exit status says whether all hold."""
    failed = 0
    for seed in range(first, first + count):
        try:
            run_seed(seed)
        except Violation as violation:
            failed += 1
            print(violation)
    print(f"{count} schedules, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
