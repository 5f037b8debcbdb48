# SPDX-License-Identifier: Apache-2.0
"""Plays every fault of a disk under a real server: what its client sees, what is counted, and that
all is well when the fault has gone. The table in `docs/faults.md` is what came out.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pykvcache.layout import TEMPORARY_SUFFIX
from pykvcache.transfer.jobs import Direction, Failure
from pykvcache.transfer.operations import Action
from scripts.serving import LOAD_BYTES, STORES_PENDING, Completion, Prompts, Server, kv_files
from tests.e2e.sites import (
    FAILURES,
    FROM_DISK_ONLY,
    HERE,
    KV_BYTES_PER_TOKEN,
    Site,
    assert_same_answer,
)

CHUNKS = 3
TOKENS_PER_CHUNK = 64
PROMPT_TOKENS = CHUNKS * TOKENS_PER_CHUNK + 16
TINY_TOKENS = 20
"""Less than a chunk: nothing to load or to store, but a step whose report brings the counts."""
ANSWER_TOKENS = 4
CHUNK_BYTES = TOKENS_PER_CHUNK * KV_BYTES_PER_TOKEN
PAUSED = "vllm:kv_offload_paused"

COVERED = "another filesystem in its place, as if unmounted"
MOVED = "moved away, and back"
REMOVED = "removed with all chunks"

LOAD_DEADLINE_S = 4.0
SLOW_BYTES_PER_S = 1_000_000
GIVE_UP_S = 60.0
"""After this, what was expected has not happened."""


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        fault: an errno's name, or what happens.
        direction: of the transfers that meet it.
        action: the operation that it strikes; None if it is the root's directory that changes.
        order: what `ring_fault_plugin` is told.
        reasons: what may be counted; empty if nothing fails.
        pauses: whether the disk is left alone; None if that depends on whether other operations
            succeed in between.
        is_slow: whether it takes seconds.
    """

    fault: str
    direction: Direction
    action: Action | None
    order: Mapping[str, Any] = field(default_factory=dict, hash=False)
    reasons: frozenset[Failure] = frozenset()
    pauses: bool | None = False
    is_slow: bool = False

    @property
    def name(self) -> str:
        """Of the row in the table."""
        struck = f"{self.direction}: {self.action.name.lower()}" if self.action else "the root"
        return f"{self.fault} | {struck}"


def _errno(code: int, action: Action, reason: Failure, *, pauses: bool | None = False) -> Case:
    is_load = action in (Action.OPEN, Action.READ)
    return Case(
        errno.errorcode[code],
        Direction.LOAD if is_load else Direction.STORE,
        action,
        {"errno": code},
        frozenset((reason,)),
        pauses,
    )


CASES = (
    _errno(errno.EIO, Action.OPEN, Failure.IO_ERROR, pauses=True),
    _errno(errno.EIO, Action.READ, Failure.IO_ERROR, pauses=True),
    _errno(errno.EIO, Action.CREATE, Failure.IO_ERROR, pauses=True),
    _errno(errno.EIO, Action.WRITE, Failure.IO_ERROR, pauses=True),
    _errno(errno.EIO, Action.LINK, Failure.IO_ERROR, pauses=None),
    _errno(errno.ENOSPC, Action.CREATE, Failure.NO_SPACE),
    _errno(errno.ENOSPC, Action.WRITE, Failure.NO_SPACE),
    _errno(errno.ENOSPC, Action.LINK, Failure.NO_SPACE),
    _errno(errno.EDQUOT, Action.WRITE, Failure.NO_SPACE),
    _errno(errno.EROFS, Action.CREATE, Failure.PERMISSION, pauses=True),
    _errno(errno.EACCES, Action.OPEN, Failure.PERMISSION, pauses=True),
    _errno(errno.EACCES, Action.CREATE, Failure.PERMISSION, pauses=True),
    _errno(errno.ENOENT, Action.OPEN, Failure.NOT_FOUND),
    _errno(errno.ENOENT, Action.LINK, Failure.NOT_FOUND),
    _errno(errno.ESTALE, Action.OPEN, Failure.NOT_FOUND),
    _errno(errno.ESTALE, Action.READ, Failure.NOT_FOUND),
    _errno(errno.ESTALE, Action.WRITE, Failure.NOT_FOUND),
    _errno(errno.EMFILE, Action.OPEN, Failure.NO_DESCRIPTORS, pauses=True),
    _errno(errno.EMFILE, Action.CREATE, Failure.NO_DESCRIPTORS, pauses=True),
    Case(
        "half of the bytes",
        Direction.LOAD,
        Action.READ,
        {"short": True},
        frozenset((Failure.SHORT_TRANSFER,)),
    ),
    Case(
        "half of the bytes",
        Direction.STORE,
        Action.WRITE,
        {"short": True},
        frozenset((Failure.SHORT_TRANSFER,)),
    ),
    Case(
        "never returns",
        Direction.LOAD,
        Action.READ,
        {"hangs": True},
        frozenset((Failure.DEADLINE,)),
        pauses=True,
        is_slow=True,
    ),
    Case("never returns", Direction.STORE, Action.WRITE, {"hangs": True}, is_slow=True),
    Case(
        "1 MB/s",
        Direction.LOAD,
        Action.READ,
        {"bytes_per_s": SLOW_BYTES_PER_S},
        frozenset((Failure.DEADLINE,)),
        is_slow=True,
    ),
    Case("1 MB/s", Direction.STORE, Action.WRITE, {"bytes_per_s": SLOW_BYTES_PER_S}, is_slow=True),
    *(
        Case(
            happens,
            Direction.STORE,
            None,
            reasons=frozenset((Failure.NOT_FOUND,)),
        )
        for happens in (COVERED, MOVED, REMOVED)
    ),
)


@dataclass(frozen=True)
class Outcome:
    """A row of the table, behind the fault's name."""

    case: Case
    client: str
    counted: tuple[str, ...]
    files: str
    recovery: str

    @property
    def row(self) -> str:
        """In Markdown."""
        counted = ", ".join(f"`{reason}`" for reason in self.counted) or "-"
        paused = {True: "left alone", False: "-", None: "may be left alone"}[self.case.pauses]
        cells = (self.case.name, self.client, counted, self.files, paused, self.recovery)
        return f"| {' | '.join(cells)} |"


class RingFaultSite(Site):
    """A site whose server's file operations fail on order, between the reactor and the kernel."""

    @property
    def _order(self) -> Path:
        return self.directory / "ring-fault.json"

    def ring_fault_server(self) -> Server:
        """The server; it gives up soon, and leaves a disk alone soon and briefly."""
        return self.server(
            "ring-faults",
            pool_gib=0.25,
            options={
                "tokens_per_chunk": TOKENS_PER_CHUNK,
                "lookup_ttl_s": 0,
                "load_deadline_s": LOAD_DEADLINE_S,
                "pause_after_faults": CHUNKS,
                "pause_s": 1.0,
                "pause_max_s": 1.0,
                "gate": "off",
                **FROM_DISK_ONLY,
            },
            args=["--block-size=32"],
            env={
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_PLUGINS": "ring_fault_plugin",
                "PYTHONPATH": str(self.install_plugin(HERE / "ring_fault_plugin.py")),
                "PYKVCACHE_RING_FAULT": str(self._order),
            },
        )

    def begin(self, case: Case) -> None:
        """Let it happen from now on."""
        if case.fault == COVERED:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", self.root], check=True)
            return
        if case.action is None:
            self.root.rename(self._away)
            if case.fault == REMOVED:
                shutil.rmtree(self._away)
            return
        order = {"action": case.action.name, **case.order}
        self._order.with_suffix(".new").write_text(json.dumps(order))
        self._order.with_suffix(".new").rename(self._order)

    def end(self, case: Case) -> None:
        """Let it be over."""
        if case.action is not None:
            self._order.unlink()
        elif case.fault == COVERED:
            made = [entry for entry in self.root.iterdir() if entry.is_dir()]
            subprocess.run(["umount", "--lazy", self.root], check=True)
            assert not made, "on another filesystem"
        elif case.fault == MOVED:
            for number in itertools.count():
                if self.root.exists():  # the server makes one where it misses its own
                    self.root.rename(self.directory / f"root-made-{number}")
                with contextlib.suppress(OSError):  # it has just made another one
                    self._away.rename(self.root)
                    return

    def inodes(self) -> set[tuple[Path, int]]:
        """Which files there are; ext4 does not reuse an inode within a minute."""
        return {(path, path.stat().st_ino) for path in kv_files(self.root)}

    @property
    def _away(self) -> Path:
        return self.directory / "root-away"


class Suite:
    """Plays the cases on one server."""

    def __init__(self, site: RingFaultSite, server: Server, prompts: Prompts) -> None:
        self._site = site
        self._server = server
        self._prompts = prompts
        self._seed = 5000

    def play(self, case: Case) -> Outcome:
        """Let the fault come and go.

        Raises:
            AssertionError: something was not as it has to be.
        """
        if case.action is None:
            return self._play_root(case)
        if case.direction is Direction.LOAD:
            return self._play_load(case)
        return self._play_store(case)

    def _play_load(self, case: Case) -> Outcome:
        prompt = self._new_prompt()
        expected = self._ask(prompt)
        self._until(lambda: self._loads(prompt), "stored and loaded before the fault")
        self._server.reset_prefix_cache()
        before = self._failures(case.direction)
        files = self._site.inodes()
        self._site.begin(case)
        loaded = self._loaded()
        answer = self._ask(prompt)
        self._until(lambda: self._has_counted(case, before), "counted")
        is_paused = self._is_paused()
        counted = self._counted(case, before)
        is_whole = self._loaded() - loaded == CHUNKS * CHUNK_BYTES
        self._site.end(case)
        assert_same_answer(answer, expected)
        again = self._recover(prompt)
        assert_same_answer(again, expected)
        client = "the answer, loaded" if is_whole else "the answer, recomputed"
        # One that was removed has been stored again by now, as another file of the same name.
        kept = "stay" if files <= self._site.inodes() else "removed"
        return self._outcome(case, client, counted, kept, is_paused, "loaded again")

    def _play_store(self, case: Case) -> Outcome:
        prompt = self._new_prompt()
        self._server.wait_idle(self._site.root)
        before = self._failures(case.direction)
        files = len(kv_files(self._site.root))
        self._site.begin(case)
        answer = self._ask(prompt)
        if case.reasons:
            self._until(lambda: self._has_counted(case, before), "counted")
            self._until(lambda: not self._pending(), "given up")
        else:
            self._until(lambda: self._pending() or self._is_stored(files), "begun")
        is_paused = self._is_paused()
        counted = self._counted(case, before)
        is_stored = self._is_stored(files)
        if case.reasons:
            assert not is_stored, "a file whose store failed has appeared"
            assert not list(self._site.root.rglob(f"*{TEMPORARY_SUFFIX}"))
        # A slow store may end while it is looked at.
        kept = "never appear" if case.reasons else "appear late"
        self._site.end(case)
        again = self._recover(prompt)
        assert_same_answer(again, answer)
        return self._outcome(case, "the answer", counted, kept, is_paused, "stored and loaded")

    def _play_root(self, case: Case) -> Outcome:
        prompt = self._new_prompt()
        expected = self._ask(prompt)
        self._until(lambda: self._loads(prompt), "stored and loaded before the fault")
        before = self._failures(case.direction)
        self._site.begin(case)
        self._server.reset_prefix_cache()
        loaded = self._loaded()
        assert_same_answer(self._ask(prompt), expected)
        assert self._loaded() == loaded, "loaded from files that are gone"
        self._until(lambda: self._has_counted(case, before), "counted")
        self._until(lambda: not self._pending(), "given up")
        is_paused = self._is_paused()
        counted = self._counted(case, before)
        self._site.end(case)
        assert_same_answer(self._recover(prompt), expected)
        is_new = case.fault == REMOVED
        return self._outcome(
            case,
            "the answer, recomputed",
            counted,
            "anew" if is_new else "stay",
            is_paused,
            "stored and loaded" if is_new else "loaded again",
        )

    def _outcome(
        self,
        case: Case,
        client: str,
        counted: Sequence[str],
        files: str,
        is_paused: bool,
        recovery: str,
    ) -> Outcome:
        assert set(counted) <= {reason.value for reason in case.reasons}, counted
        assert case.pauses in (None, is_paused)
        assert self._server.healthy()
        return Outcome(case, client, tuple(counted), files, recovery)

    # --- what is asked of the server

    def _new_prompt(self) -> list[int]:
        self._seed += 1
        return self._prompts.of(PROMPT_TOKENS, self._seed)

    def _ask(self, prompt: Sequence[int]) -> Completion:
        return self._server.complete(prompt, ANSWER_TOKENS, logprobs=True)

    def _loads(self, prompt: Sequence[int]) -> bool:
        """Whether all of the prompt comes from disk when it is asked again."""
        self._server.reset_prefix_cache()
        before = self._loaded()
        self._ask(prompt)
        return self._loaded() - before == CHUNKS * CHUNK_BYTES

    def _recover(self, prompt: Sequence[int]) -> Completion:
        """The answer from disk, when the disk is used again."""
        self._until(lambda: self._loads(prompt), "loaded after the fault")
        return self._ask(prompt)

    def _until(self, happened: Callable[[], object], what: str) -> None:
        """Go on asking."""
        give_up_at = time.monotonic() + GIVE_UP_S
        while not happened():
            assert time.monotonic() < give_up_at, f"not {what} after {GIVE_UP_S:.0f} s"
            self._refresh()

    def _refresh(self) -> None:
        """A step of the engine, which brings the counts up to date."""
        self._seed += 1
        self._server.complete(self._prompts.of(TINY_TOKENS, self._seed), 1)

    def _loaded(self) -> int:
        return int(self._server.metrics().total(LOAD_BYTES))

    def _pending(self) -> float:
        return self._server.metrics().total(STORES_PENDING)

    def _is_paused(self) -> bool:
        self._refresh()
        return bool(self._server.metrics().total(PAUSED))

    def _is_stored(self, files_before: int) -> bool:
        return len(kv_files(self._site.root)) >= files_before + CHUNKS

    def _failures(self, direction: Direction) -> dict[str, float]:
        metrics = self._server.metrics()
        return {
            reason.value: metrics.total(FAILURES, direction=direction.value, reason=reason.value)
            for reason in Failure
        }

    def _has_counted(self, case: Case, before: Mapping[str, float]) -> bool:
        return not case.reasons or bool(self._counted(case, before))

    def _counted(self, case: Case, before: Mapping[str, float]) -> tuple[str, ...]:
        """Reasons that have been counted since; not those of jobs refused during a pause."""
        after = self._failures(case.direction)
        grown = (reason for reason in after if after[reason] > before[reason])
        return tuple(reason for reason in grown if reason != Failure.PAUSED.value)


def rows(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The table."""
    columns = ("fault", "strikes", "the client sees", "counted as", "the files", "the disk")
    yield f"| {' | '.join((*columns, 'when it is over'))} |"
    yield "| --- " * (len(columns) + 1) + "|"
    for outcome in outcomes:
        yield outcome.row
