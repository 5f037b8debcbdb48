# SPDX-License-Identifier: Apache-2.0
"""What is in a root: found, counted, pinned, removed. For the commands and for a server's API.

All of it works beside running servers, on the files and pins alone.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pykvcache.capacity.budget import Space, estimate
from pykvcache.capacity.evictor import space_of
from pykvcache.capacity.keeper import budget_of
from pykvcache.capacity.pins import DIRECTORY, Pins
from pykvcache.capacity.policy import SECOND_NS
from pykvcache.capacity.record import Record
from pykvcache.capacity.scan import FileEntry, Leaf, Problem, leaves
from pykvcache.config import Config
from pykvcache.errors import ConfigError
from pykvcache.identity import FILE_NAME
from pykvcache.layout import SUFFIX, ChunkPaths

AGES_S = (60, 3600, 86400, 7 * 86400)
AGE_NAMES = ("under a minute", "under an hour", "under a day", "under a week", "older")


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk's file."""

    identity: Path
    leaf: Leaf
    file: FileEntry

    @property
    def key(self) -> str:
        """In hex."""
        return self.file.name.removesuffix(SUFFIX)

    @property
    def path(self) -> str:
        """Of the file."""
        return f"{self.leaf.path}/{self.file.name}"

    @property
    def rank(self) -> int:
        """Whose bytes it holds."""
        return int(Path(self.leaf.path).parent.name.removeprefix("rank-"))


def chunks(chosen: Iterable[Path], problem: Problem) -> Iterator[Found]:
    """Every chunk's file of these identities; in memory are those of one leaf directory."""
    for identity in chosen:
        for leaf in leaves(identity, problem):
            for file in leaf.chunks:
                yield Found(identity, leaf, file)


def model_of(identity: Path) -> str:
    """The model's name in an identity's facts; '?' if they cannot be read."""
    try:
        return str(msgspec.json.decode((identity / FILE_NAME).read_bytes())["model"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return "?"


def check_key(text: str) -> str:
    """A key as it is in the files' names.

    Raises:
        ConfigError: it is none.
    """
    key = os.path.basename(text).removesuffix(SUFFIX).lower()
    if not re.fullmatch(r"(?:[0-9a-f]{2}){1,64}", key):
        raise ConfigError(
            f"key is '{text}': must be the hex digits of a chunk's file name, as `pykvcache ls` "
            "shows them"
        )
    return key


def holds(identity: Path, key: str) -> bool:
    """Whether some rank has the chunk (key in hex)."""
    return any(
        os.path.exists(ChunkPaths(rank).final(bytes.fromhex(key)))
        for rank in identity.glob("rank-*")
    )


# --- counted


@dataclass(slots=True)
class Totals:
    """Of one identity; sizes in bytes."""

    files: int = 0
    size: int = 0
    pinned: int = 0
    ranks: set[int] = field(default_factory=set)
    oldest_s: float = 0.0
    ages: list[int] = field(default_factory=lambda: [0] * len(AGE_NAMES))
    """Bytes by the time for which they were not used."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What a root holds of some identities.

    Attributes:
        root: the root.
        totals: by identity.
        sizes: files by their size.
        limit: bytes that the root may hold, all identities together.
        space: of its filesystem.
    """

    root: Path
    totals: dict[Path, Totals]
    sizes: Counter[int]
    limit: int
    space: Space

    @property
    def files(self) -> int:
        """Of all these identities."""
        return sum(total.files for total in self.totals.values())

    @property
    def size(self) -> int:
        """Their bytes."""
        return sum(total.size for total in self.totals.values())

    def document(self) -> dict[str, Any]:
        """For programs, as JSON."""
        return {
            "root": str(self.root),
            "files": self.files,
            "bytes": self.size,
            "limit_bytes": self.limit,
            "free_bytes": self.space.free,
            "filesystem_bytes": self.space.total,
            "identities": [
                {
                    "identity": each.name,
                    "model": model_of(each),
                    "ranks": sorted(total.ranks),
                    "files": total.files,
                    "bytes": total.size,
                    "pinned_bytes": total.pinned,
                    "oldest_use_s": round(total.oldest_s, 3),
                    "bytes_by_age": dict(zip(AGE_NAMES, total.ages, strict=True)),
                }
                for each, total in self.totals.items()
            ],
            "files_by_bytes": {str(size): count for size, count in sorted(self.sizes.items())},
        }


def count(
    config: Config, chosen: Sequence[Path], now_s: float, problem: Problem, *, is_whole: bool
) -> Stats:
    """Count what is there.

    Args:
        config: the options; they tell the root and its limit.
        chosen: identities.
        now_s: seconds of the Unix epoch.
        problem: told of what cannot be read.
        is_whole: whether the root holds no others; else the last count of servers tells how
            much of the limit is used.

    Raises:
        OSError: the filesystem does not tell its free space.
    """
    totals = {each: Totals() for each in chosen}
    pinned = {each: Pins(each).keys() for each in chosen}
    sizes: Counter[int] = Counter()
    for found in chunks(chosen, problem):
        total = totals[found.identity]
        age_s = max(now_s - found.file.time_ns / SECOND_NS, 0.0)
        total.files += 1
        total.size += found.file.size
        total.pinned += found.file.size if found.key in pinned[found.identity] else 0
        total.ranks.add(found.rank)
        total.oldest_s = max(total.oldest_s, age_s)
        total.ages[sum(age_s >= border for border in AGES_S)] += found.file.size
        sizes[found.file.size] += 1
    space = space_of(config.root)
    last = None if is_whole else Record(config.root).read()
    used = estimate(last, space) if last else sum(total.size for total in totals.values())
    return Stats(config.root, totals, sizes, budget_of(config).limit(used, space), space)


# --- pinned


def pin(identity: Path, keys: Iterable[str]) -> list[str]:
    """Keep these chunks from eviction.

    Returns:
        The keys (hex) of those that are there, in order; no others are pinned.

    Raises:
        OSError: the pins cannot be written.
    """
    pins = Pins(identity)
    pinned = [key for key in keys if holds(identity, key)]
    for key in pinned:
        pins.add(key)
    evicted = {key for key in pinned if not holds(identity, key)}
    for key in evicted:  # between the look and the pin
        pins.remove(key)
    return [key for key in pinned if key not in evicted]


def unpin(identity: Path, keys: Iterable[str]) -> list[str]:
    """Let these chunks be evicted again.

    Returns:
        The keys (hex) of those that were pinned.

    Raises:
        OSError: the pins cannot be written.
    """
    pins = Pins(identity)
    return [key for key in keys if pins.remove(key)]


# --- removed


@dataclass(slots=True)
class Removed:
    """Chunk files that are gone, their bytes, and those that could not be removed."""

    files: int = 0
    size: int = 0
    failed: int = 0


def remove_all(chosen: Sequence[Path], unreadable: Problem, unremovable: Problem) -> Removed:
    """Remove every chunk of these identities, pinned ones and pins too.

    Args:
        chosen: identities; their directories stay, for servers at work.
        unreadable, unremovable: told of what cannot be.
    """
    removed = Removed()
    for found in chunks(chosen, unreadable):
        try:
            os.unlink(found.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            unremovable(found.path, error)
            removed.failed += 1
            continue
        removed.files += 1
        removed.size += found.file.size
    for each in chosen:
        shutil.rmtree(each / DIRECTORY, ignore_errors=True)
    return removed
