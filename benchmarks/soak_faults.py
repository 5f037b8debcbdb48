# SPDX-License-Identifier: Apache-2.0
"""Harm done to the files of a root that servers use: it comes, and most of it goes again."""

from __future__ import annotations

import os
import random
import shutil
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from pykvcache.layout import PAGE
from scripts.serving import kv_files

APART_S = (0.5, 3.0)
LASTS_S = (0.5, 5.0)


class Fault(ABC):
    """One kind of harm."""

    name: ClassVar[str]

    @abstractmethod
    def begin(self, root: Path, source: random.Random) -> Callable[[], None] | None:
        """Do it; how it is undone, None if it stays.

        Raises:
            OSError: a server was faster, and there is nothing to harm.
            IndexError: likewise.
        """


def _some_file(root: Path, source: random.Random) -> Path:
    return source.choice(kv_files(root))


class Deleted(Fault):
    """A file is removed."""

    name = "deleted"

    def begin(self, root: Path, source: random.Random) -> None:
        """For good."""
        _some_file(root, source).unlink()


class Truncated(Fault):
    """A file is cut short."""

    name = "truncated"

    def begin(self, root: Path, source: random.Random) -> None:
        """For good."""
        file = _some_file(root, source)
        os.truncate(file, source.randrange(file.stat().st_size))


class Flipped(Fault):
    """A byte of the payload changes, as on a bad drive: the trailer page stays right."""

    name = "flipped"

    def begin(self, root: Path, source: random.Random) -> None:
        """For good."""
        file = _some_file(root, source)
        with file.open("r+b") as opened:
            at = source.randrange(file.stat().st_size - PAGE)
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ (1 << source.randrange(8))]))


class Swapped(Fault):
    """A file gets another chunk's content."""

    name = "swapped"

    def begin(self, root: Path, source: random.Random) -> None:
        """For good."""
        file, other = source.sample(kv_files(root), 2)
        content = other.read_bytes()
        file.write_bytes(content)


class Unreadable(Fault):
    """A directory is where a file was."""

    name = "unreadable"

    def begin(self, root: Path, source: random.Random) -> Callable[[], None]:
        """Until it is removed."""
        file = _some_file(root, source)
        file.unlink()
        file.mkdir()
        return file.rmdir


class Unwritable(Fault):
    """A file is where a leaf directory was: nothing in it can be found or made."""

    name = "unwritable"

    def begin(self, root: Path, source: random.Random) -> Callable[[], None]:
        """Until the directory is back."""
        leaf = _some_file(root, source).parent
        away = leaf.with_name(f"{leaf.name}-away")
        leaf.rename(away)
        leaf.touch()

        def undo() -> None:
            leaf.unlink()
            away.rename(leaf)

        return undo


class Unmounted(Fault):
    """All files of a rank are gone, as after an unmount, and may be back later."""

    name = "unmounted"

    def begin(self, root: Path, source: random.Random) -> Callable[[], None]:
        """Until they are back; lost if servers have stored others meanwhile."""
        rank = _some_file(root, source).parent.parent
        away = rank.with_name(f"{rank.name}-away")
        rank.rename(away)

        def undo() -> None:
            try:
                away.rename(rank)
            except OSError:  # made anew
                shutil.rmtree(away)

        return undo


FAULTS: tuple[Fault, ...] = (
    Deleted(),
    Truncated(),
    Flipped(),
    Swapped(),
    Unreadable(),
    Unwritable(),
    Unmounted(),
)


class Storm:
    """A thread that does harm, one at a time, until it is ended."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root = root
        self._source = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.done: Counter[str] = Counter()
        """By kind."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, with everything undone that can be."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._source.uniform(*APART_S)):
            fault = self._source.choice(FAULTS)
            try:
                undo = fault.begin(self._root, self._source)
            except (OSError, IndexError, ValueError):  # nothing there, or a server was faster
                continue
            self.done[fault.name] += 1
            if undo is None:
                continue
            self._stop.wait(self._source.uniform(*LASTS_S))
            try:
                undo()
            except OSError:  # likewise
                continue
