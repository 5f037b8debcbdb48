# SPDX-License-Identifier: Apache-2.0
"""How much of upstream the patches touch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from distribution.patches import read_series

FILES_MAX = 12
ADDED_LINES_MAX = 250
"""For all patches of a version together."""


@dataclass(frozen=True)
class Burden:
    """What one patch, or a whole series, changes."""

    files: frozenset[str]
    lines_added: int
    lines_removed: int

    def report(self) -> dict[str, int]:
        """As in ``stats --json``."""
        return {
            "files_touched": len(self.files),
            "lines_added": self.lines_added,
            "lines_removed": self.lines_removed,
        }


def of_patch(path: Path) -> Burden:
    """Count one patch."""
    files = set()
    added = removed = 0
    for line in path.read_text("utf-8").splitlines():
        if found := re.match(r"diff --git a/(\S+) ", line):
            files.add(found[1])
        elif files and not line.startswith(("+++ ", "--- ")):
            added += line.startswith("+")
            removed += line.startswith("-")
    return Burden(frozenset(files), added, removed)


def of_series(folder: Path) -> tuple[dict[str, Burden], Burden]:
    """Each patch by name, and all of them together."""
    patches = {path.name: of_patch(path) for path in read_series(folder)}
    return patches, together(patches.values())


def together(burdens: Iterable[Burden]) -> Burden:
    """The sum; a file counts once."""
    burdens = list(burdens)
    return Burden(
        frozenset().union(*(burden.files for burden in burdens)),
        sum(burden.lines_added for burden in burdens),
        sum(burden.lines_removed for burden in burdens),
    )
