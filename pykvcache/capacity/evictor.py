# SPDX-License-Identifier: Apache-2.0
"""One round: count what is there, remove what is too much, leave word of what is left.

A removed file that someone reads stays until it is closed; one that is about to be opened is a
miss. Directories stay, as a writer may be about to use them.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pykvcache.capacity.budget import Budget, Space, Usage
from pykvcache.capacity.pins import Pins
from pykvcache.capacity.policy import SECOND_NS, Policy, Victim, Victims, rank
from pykvcache.capacity.record import Record
from pykvcache.capacity.scan import FileEntry, Leaf, identities, leaves, put_aside
from pykvcache.layout import SUFFIX

VICTIMS_MAX = 32_768
"""Files found in one pass over the directory: 160 GiB of small chunks, in some 20 MiB of memory.
What must go beyond them is found by another pass."""

BATCH_FILES = 64
"""Files removed between two pauses, and under one holding of the pins' lock."""

TEMPORARY_AGE_S = 3600.0
"""Seconds after which a temporary is a killed writer's: no write takes so long."""

FIRST = -1
"""Before every chunk's rank: what was put aside is of no use to a server."""

PROBLEMS_MAX = 100
"""Files named in a report; the others are only counted."""

Pause = Callable[[float], bool]
"""Waits so many seconds (0: only lets others run); True ends the round."""


class Stopped(Exception):
    """The round was ended before it was done."""


class _End(enum.Enum):
    REMOVED = enum.auto()
    GONE = enum.auto()
    """Somebody else removed it."""
    KEPT = enum.auto()


@dataclass(slots=True)
class Round:
    """What a round did.

    Attributes:
        usage: what is there after it.
        limit: bytes that may be there.
        files, size: evicted, and their bytes.
        temporaries: leftovers of killed writers that were removed.
        excess: bytes that are still too many: pinned, or not to be removed.
        skipped: by reason (an errno's name or 'not_a_file'), what could not be removed or read.
        problems: some of those, as ``(path, why)``.
    """

    usage: Usage
    limit: int
    files: int = 0
    size: int = 0
    temporaries: int = 0
    excess: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[str, str]] = field(default_factory=list)


def space_of(root: Path) -> Space:
    """The root's filesystem; a project quota counts as one where the filesystem shows it.

    Raises:
        OSError: the root is not there.
    """
    found = os.statvfs(root)
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


class Evictor:
    """Removes files of a root, whoever else uses it."""

    def __init__(
        self,
        root: Path,
        budget: Budget,
        policy: Policy | None,
        *,
        files_per_s: float,
        pause: Pause,
        space: Callable[[Path], Space] = space_of,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        root: of the files.
        budget, policy: what may stay, and what goes first; without a policy nothing goes.
        files_per_s: removed at most; 0 for no limit.
        pause: called between batches and after each leaf directory.
        space: asks the filesystem.
        clock: seconds of the Unix epoch.
        """
        self._root = root
        self._budget = budget
        self._policy = policy
        self._files_per_s = files_per_s
        self._pause = pause
        self._space = space
        self._clock = clock
        self.record = Record(root)

    def run(self, extra: int = 0, *, dry: bool = False) -> Round | None:
        """Count, and evict what is too much; None if another process is at it.

        Args:
            extra: bytes to evict at least, whatever the limits say.
            dry: only say what would go.

        Raises:
            OSError: the root, or the lock file in it, cannot be used.
            Stopped: ``pause`` said so; what was evicted by then is gone.
        """
        with self.record.try_lock() as held:
            if not held:
                return None
            return self._run(extra, dry)

    def _run(self, extra: int, dry: bool) -> Round:
        found, victims = self._count(None)
        space = self._space(self._root)
        limit = self._budget.limit(found.usage.size, space)
        found.limit = limit
        excess = max(self._budget.excess(found.usage.size, space), extra)
        if self._policy is None:
            excess = 0
        if not dry:
            self.record.write(found.usage)
        while excess > 0:
            ordered = victims.in_order()
            freed = self._evict(found, ordered, excess, dry)
            excess -= freed
            if excess <= 0 or victims.is_complete or not ordered:
                break
            # Starts behind what was tried, so that files which cannot be removed, however
            # many and old, are never all that is found.
            _, victims = self._count(ordered[-1])
        found.excess = max(excess, 0)
        return found

    def _count(self, after: Victim | None) -> tuple[Round, Victims]:
        start = self._clock()
        # Before the count, so that what is written meanwhile is taken into account twice at worst.
        free = self._space(self._root).free
        now_ns = int(start * SECOND_NS)
        victims = Victims(VICTIMS_MAX, after)
        files = size = pinned_size = 0
        found = Round(Usage(0, 0, 0, 0, 0.0, 0.0), 0)
        for path, aside in self._put_aside():
            files += len(aside)
            size += sum(file.size for file in aside)
            for file in aside if self._policy is not None else ():
                victims.offer(Victim(FIRST, path, file.name, file.size, file.time_ns))
        for leaf, pinned in self._leaves(found):
            for chunk in leaf.chunks:
                files += 1
                size += chunk.size
                if chunk.name.removesuffix(SUFFIX) in pinned:
                    pinned_size += chunk.size
                    continue
                if self._policy is None:
                    continue
                order = rank(self._policy, chunk.time_ns, now_ns)
                victims.offer(Victim(order, leaf.path, chunk.name, chunk.size, chunk.time_ns))
            for temporary in leaf.temporaries:
                size += self._sweep(found, leaf, temporary, now_ns)
            self._rest(0.0)
        end = self._clock()
        found.usage = Usage(files, size, pinned_size, free, end, end - start)
        return found, victims

    def _put_aside(self) -> Iterator[tuple[str, list[FileEntry]]]:
        def ignore(_path: str, _error: OSError) -> None:
            """What cannot be read is said when the chunks are counted."""

        for identity in identities(self._root, ignore):
            yield from put_aside(identity, ignore)

    def _leaves(self, found: Round) -> Iterator[tuple[Leaf, set[str]]]:
        def problem(path: str, error: OSError) -> None:
            _note(found, path, error)

        for identity in identities(self._root, problem):
            pinned = Pins(identity).keys()
            for leaf in leaves(identity, problem):
                for name in leaf.strange:
                    found.skipped["not_a_file"] += 1
                    _add_problem(found, f"{leaf.path}/{name}", "is not a file")
                yield leaf, pinned

    def _sweep(self, found: Round, leaf: Leaf, temporary: FileEntry, now_ns: int) -> int:
        """Remove it if it is old; its bytes if it stays."""
        if now_ns - temporary.time_ns < TEMPORARY_AGE_S * SECOND_NS:
            return temporary.size
        try:
            os.unlink(f"{leaf.path}/{temporary.name}")
        except OSError as error:
            _note(found, f"{leaf.path}/{temporary.name}", error)
            return temporary.size
        found.temporaries += 1
        return 0

    def _evict(self, found: Round, victims: list[Victim], excess: int, dry: bool) -> int:
        """Remove from the front until so many bytes are free; the bytes that are."""
        freed = 0
        for start in range(0, len(victims), BATCH_FILES):
            batch = victims[start : start + BATCH_FILES]
            freed += self._evict_batch(found, batch, excess - freed, dry)
            if freed >= excess:
                break
            if not dry:
                self._rest(len(batch) / self._files_per_s if self._files_per_s else 0.0)
        return freed

    def _evict_batch(self, found: Round, batch: list[Victim], excess: int, dry: bool) -> int:
        freed = files = size = gone = 0
        with contextlib.ExitStack() as locks:
            pins: dict[Path, Pins] = {}
            for victim in batch:
                if freed >= excess:
                    break
                identity = Path(victim.directory).parent.parent
                if identity not in pins and not dry:
                    pins[identity] = Pins(identity)
                    with contextlib.suppress(OSError):  # where it cannot be pinned either
                        locks.enter_context(pins[identity].locked())
                end = _End.REMOVED if dry else self._remove(found, victim, pins[identity])
                if end is _End.REMOVED:
                    files += 1
                    size += victim.size
                if end is not _End.KEPT:
                    gone += 1
                    freed += victim.size
        found.files += files
        found.size += size
        usage = found.usage
        found.usage = Usage(
            usage.files - gone,
            usage.size - freed,
            usage.pinned,
            # Not what is free by now: what others wrote since the count is not in the size either.
            usage.free + freed,
            self._clock(),
            usage.seconds,
        )
        if not dry:
            self.record.write(found.usage)
        return freed

    def _remove(self, found: Round, victim: Victim, pins: Pins) -> _End:
        """Remove the file; one used or pinned since it was counted stays."""
        path = victim.path
        try:
            if os.lstat(path).st_mtime_ns != victim.time_ns:
                return _End.KEPT
            if pins.holds(victim.name.removesuffix(SUFFIX)):
                return _End.KEPT
            os.unlink(path)
        except FileNotFoundError:
            return _End.GONE
        except OSError as error:
            _note(found, path, error)
            return _End.KEPT
        return _End.REMOVED

    def _rest(self, seconds: float) -> None:
        if self._pause(seconds):
            raise Stopped


def _note(found: Round, path: str, error: OSError) -> None:
    found.skipped[errno.errorcode.get(error.errno or 0, "error")] += 1
    _add_problem(found, path, error.strerror or str(error))


def _add_problem(found: Round, path: str, why: str) -> None:
    if len(found.problems) < PROBLEMS_MAX:
        found.problems.append((path, why))
