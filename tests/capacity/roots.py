# SPDX-License-Identifier: Apache-2.0
"""Roots full of small files that look like chunks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from pykvcache.capacity.budget import Space
from pykvcache.layout import ChunkPaths, model_directory, rank_directory

SECOND_NS = 1_000_000_000
NOW_S = 1_700_000_000.0


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest() + bytes(4)


class Root:
    """A root with one identity of some ranks."""

    def __init__(self, path: Path, ranks: int = 1, model: str = "model") -> None:
        self.path = path
        self.identity = model_directory(path, model, hashlib.sha256(model.encode()).digest())
        self.identity.mkdir(parents=True)
        (self.identity / "identity.json").write_text("{}")
        self.directories = [rank_directory(self.identity, rank) for rank in range(ranks)]

    def file(self, number: int, rank: int = 0) -> Path:
        return Path(ChunkPaths(self.directories[rank]).final(key_of(number)))

    def add(self, number: int, size: int, used_s: float, rank: int = 0) -> Path:
        path = self.file(number, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, ns=(0, int(used_s * SECOND_NS)))
        return path

    def fill(self, numbers: Iterable[int], size: int = 100) -> None:
        """Files whose last use was in the order of their numbers."""
        for number in numbers:
            self.add(number, size, NOW_S - 10_000 + number)

    def numbers(self, upto: int = 1000) -> list[int]:
        """The numbers whose files are there."""
        return [number for number in range(upto) if self.file(number).is_file()]

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.path.rglob("*.kv") if path.is_file())


class Disk:
    """A filesystem of a made-up size whose free space follows the root."""

    def __init__(self, root: Root, total: int = 1_000_000, others: int = 0) -> None:
        self.root, self.total, self.others = root, total, others

    def __call__(self, _path: Path) -> Space:
        return Space(self.total, self.total - self.others - self.root.size())


def never(_seconds: float) -> bool:
    """A pause that does not wait."""
    return False
