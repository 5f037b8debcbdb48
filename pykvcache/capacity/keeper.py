# SPDX-License-Identifier: Apache-2.0
"""The thread in which a server keeps its root within the limits.

One for each engine, in the scheduler's process: there is one of those however many ranks there
are, it knows which chunks are used, and it moves no KV data. Servers that share a root all have
one; the lock lets one at a time evict, and the others read what it counted.

The server waits for it nowhere: the scheduler reads a flag and appends to a queue. It works in
small pieces and rests several times as long as it worked, because it shares the interpreter with
the scheduler and, with a single worker, with the reactor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pykvcache.capacity.admission import Room
from pykvcache.capacity.budget import Budget, Space, Usage, estimate
from pykvcache.capacity.evictor import Evictor, Round, Stopped, space_of
from pykvcache.capacity.policy import SECOND_NS, Policy, time_of_use
from pykvcache.config import Config
from pykvcache.layout import ChunkPaths
from pykvcache.sizes import format_bytes, parse_size

POLL_S = 1.0
"""Between two looks at the filesystem's free space, one system call each: what a drive writes
meanwhile is small against the distance from the high watermark to the limit."""

REST_FACTOR = 3.0
"""A pause is so many times as long as the work before it; while stores are refused, as long."""

RETRY_S = 30.0
"""Seconds until a round is repeated that could not free enough (pinned or stubborn files), and
for which stores pause after a write found no room while the filesystem shows some (quotas)."""

NO_SPACE_SHARE = 0.05
"""Of what is there, evicted when a write found no room though the limits are kept."""

COUNT_DUTY = 20.0
"""Counts without need are so many times their own length apart."""

TOUCHED_MAX = 1 << 17
"""Chunks whose last touch is remembered; about 20 MiB."""

TOUCHES_MAX = 4096
"""Requests whose chunks wait to be touched; beyond it the oldest are left out."""

Chunks = Sequence[tuple[bytes, int]]
"""Keys with the tokens from the start of the prefix to each chunk's end."""


@dataclass(frozen=True, slots=True)
class Figures:
    """For metrics: what is there, and what was evicted and skipped since the start."""

    usage: Usage | None = None
    limit: int = 0
    is_full: bool = False
    evicted_files: int = 0
    evicted_size: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


def budget_of(config: Config) -> Budget:
    """The limits that the options ask for."""
    return Budget(
        capacity=parse_size(config.capacity) if config.capacity else None,
        free_min=parse_size(config.free_space_min),
        high=config.capacity_high_watermark,
        low=config.capacity_low_watermark,
    )


def policy_of(config: Config) -> Policy | None:
    """The policy that the options ask for; None to evict nothing."""
    return None if config.eviction_policy == "none" else Policy(config.eviction_policy)


class Keeper:
    """Touches what is used, evicts what is too much, and says when nothing may be stored."""

    def __init__(
        self,
        config: Config,
        ranks: Sequence[ChunkPaths],
        log: logging.Logger,
        *,
        space: Callable[[Path], Space] = space_of,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        config: the options.
        ranks: where each rank's files lie.
        log: takes what an operator should know.
        space, clock: see :class:`~pykvcache.capacity.evictor.Evictor`.
        """
        self._root = config.root
        self._ranks = ranks
        self._log = log
        self._space = space
        self._clock = clock
        self._budget = budget_of(config)
        self._scan_interval_s = config.capacity_scan_interval_s
        self._touch_interval_s = config.touch_interval_s
        self._evictor = Evictor(
            config.root,
            self._budget,
            policy_of(config),
            files_per_s=config.eviction_files_per_s,
            pause=self._pause,
            space=space,
            clock=clock,
        )
        self._touches: deque[tuple[float, Chunks]] = deque(maxlen=TOUCHES_MAX)
        self._touched: OrderedDict[bytes, int] = OrderedDict()
        self._reported: set[str] = set()
        self._said = False
        self._said_full = False
        self._stop = threading.Event()
        self._resumed_s = 0.0
        self._looked_s = 0.0
        self._no_space_seen_ns = self._evictor.record.no_space_at_ns()
        self._no_space_until_s = 0.0
        self.figures = Figures()
        """The latest; replaced as a whole."""
        self.room = Room(0, 0)
        """Likewise, what may be stored until the next look; nothing before the first."""
        self._thread = threading.Thread(target=self._run, name="pykvcache-keeper", daemon=True)

    # --- the scheduler's thread

    @property
    def is_full(self) -> bool:
        """Whether nothing may be stored for now."""
        return self.room.size <= 0

    def touch(self, chunks: Chunks) -> None:
        """These were used, all chunks of a prefix from its start on. Never blocks."""
        if chunks:
            self._touches.append((self._clock(), chunks))

    def start(self) -> None:
        """Look once, so that stores need not wait for the thread, and start it."""
        with contextlib.suppress(OSError):  # the thread will say so
            self._look()
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread; a filesystem that hangs is left behind after the timeout."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # --- the keeper's thread

    def _run(self) -> None:
        failed = False
        while not self._stop.is_set():
            try:
                self.turn()
                failed = False
            except Stopped:
                return
            except OSError as error:
                if not failed:
                    self._log.warning("KV offloading cannot look after its root: %s", error)
                failed = True
            except Exception:  # a bug, and none that a server should end for
                if not failed:
                    self._log.exception("KV offloading failed to look after its root")
                failed = True
            self._stop.wait(POLL_S)

    def turn(self) -> None:
        """Touch, look at the free space, and run a round if one is due.

        Raises:
            OSError: the root cannot be read or its lock file not be made.
            Stopped: the thread is to end.
        """
        self._resumed_s = time.perf_counter()
        self._touch_files()
        space, usage = self._look()
        extra = self._no_space(usage, space)
        if extra or self._is_due(usage, space):
            done = self._evictor.run(extra)
            if done is not None:
                if extra and done.files:
                    self._no_space_until_s = 0.0
                self._report(done)
                self._look()
        self._report_full()

    def _look(self) -> tuple[Space, Usage | None]:
        """Ask the filesystem, and say whether stores may go on."""
        space = self._space(self._root)
        usage = self._evictor.record.read()
        self._looked_s = self._clock()
        used = estimate(usage, space) if usage else 0
        limit = self._budget.limit(used, space)
        uncounted = usage is None and self._budget.capacity is not None
        full = used >= limit or uncounted or self._looked_s < self._no_space_until_s
        self.room = Room(self.room.look + 1, 0 if full else limit - used)
        figures = self.figures
        self.figures = Figures(
            usage, limit, full, figures.evicted_files, figures.evicted_size, figures.skipped
        )
        return space, usage

    def _is_due(self, usage: Usage | None, space: Space) -> bool:
        if usage is None:
            return True
        age_s = self._clock() - usage.at_s
        apart_s = COUNT_DUTY * usage.seconds
        if not 0 <= age_s < max(self._scan_interval_s, apart_s):  # or a clock that was wrong
            return True
        if not self._budget.is_high(estimate(usage, space), space):
            return False
        was_high = self._budget.is_high(usage.size, Space(space.total, usage.free))
        return not was_high or age_s >= max(RETRY_S, apart_s)

    def _no_space(self, usage: Usage | None, space: Space) -> int:
        """Bytes to evict because a write has found no room since the last count."""
        at_ns = self._evictor.record.no_space_at_ns()
        if at_ns > self._no_space_seen_ns:
            self._no_space_seen_ns = at_ns
            if usage is not None and usage.at_s * SECOND_NS < at_ns:
                self._no_space_until_s = self._clock() + RETRY_S
                self._look()
                # At least something: what was counted may be from before the root was filled.
                return max(1, int(NO_SPACE_SHARE * estimate(usage, space)))
        return 0

    def _pause(self, seconds: float) -> bool:
        """Let others run, and keep up with what is not the round's."""
        now_s = time.perf_counter()
        factor = 1.0 if self.is_full else REST_FACTOR
        stopped = self._stop.wait(max(seconds, factor * (now_s - self._resumed_s)))
        self._resumed_s = time.perf_counter()
        self._touch_files()
        if abs(self._clock() - self._looked_s) >= POLL_S:
            self._look()
        return stopped

    def _touch_files(self) -> None:
        while self._touches and not self._stop.is_set():
            now_s, chunks = self._touches.popleft()
            # From the end: where only the present time can be set, the first is the newest too.
            for key, depth in reversed(chunks):
                self._touch_chunk(key, time_of_use(now_s, depth, self._touch_interval_s))

    def _touch_chunk(self, key: bytes, time_ns: int) -> None:
        if self._touched.get(key) == time_ns:
            return
        found = True
        for rank in self._ranks:
            try:
                _set_time(rank.final(key), time_ns)
            except OSError:  # not stored, or evicted: nothing to keep
                found = False
        if found:
            self._touched[key] = time_ns
            self._touched.move_to_end(key)
            if len(self._touched) > TOUCHED_MAX:
                self._touched.popitem(last=False)

    def _report(self, done: Round) -> None:
        figures = self.figures
        self.figures = Figures(
            done.usage,
            done.limit,
            figures.is_full,
            figures.evicted_files + done.files,
            figures.evicted_size + done.size,
            figures.skipped + done.skipped,
        )
        if done.files or not self._said:
            self._said = True
            self._log.info(
                "KV offloading root '%s': %d files, %s of at most %s (%s pinned), counted in "
                "%.1f s; evicted %d files, %s",
                self._root,
                done.usage.files,
                format_bytes(done.usage.size),
                format_bytes(done.limit),
                format_bytes(done.usage.pinned),
                done.usage.seconds,
                done.files,
                format_bytes(done.size),
            )
        self._report_problems(done)

    def _report_full(self) -> None:
        """Say when a round has not helped; that stores pause until one has is only counted."""
        figures = self.figures
        if figures.is_full and not self._said_full:
            self._log.warning(
                "KV offloading stores nothing for now: the root '%s' holds %s of at most %s, and "
                "%s are free on its filesystem",
                self._root,
                format_bytes(figures.usage.size if figures.usage else 0),
                format_bytes(figures.limit),
                format_bytes(self._space(self._root).free),
            )
        elif self._said_full and not figures.is_full:
            self._log.info("KV offloading stores again")
        self._said_full = figures.is_full

    def _report_problems(self, done: Round) -> None:
        new = [problem for problem in done.problems if problem[0] not in self._reported]
        self._reported = {path for path, _why in done.problems}
        if new:
            path, why = new[0]
            self._log.warning(
                "KV offloading: %d entries of the root cannot be removed or read, such as '%s': %s",
                done.skipped.total(),
                path,
                why,
            )
        if done.excess:
            self._log.warning(
                "KV offloading: %s more than the limit are left in the root: pinned (%s), in use, "
                "or not to be removed",
                format_bytes(done.excess),
                format_bytes(done.usage.pinned),
            )


def _set_time(path: str, time_ns: int) -> None:
    """Of another user's file that a group shares, only the present can be set as its time."""
    try:
        os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)
    except PermissionError:
        os.utime(path, follow_symlinks=False)
