# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin that damages one file between look-up and load; see `tests/e2e/sites.py`.

Runs inside the server under test, from a copy outside the repository: it imports nothing of the
tests. PYKVCACHE_FAULT_ORDER names the file that holds the order; it is removed when carried out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def make_unreadable(path: Path) -> None:
    """No permission; for root, whom permissions don't stop, a symbolic link to itself instead."""
    if os.geteuid() == 0:
        path.unlink()
        path.symlink_to(path)
    else:
        path.chmod(0)


def flip_payload(path: Path) -> None:
    """Flip one bit of the payload; the trailer page stays as it was."""
    with path.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 0x10]))


def corrupt_trailer(path: Path) -> None:
    """Flip every bit of the first byte of the trailer page, the last 4,096 bytes."""
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-4096, os.SEEK_END)
        file.write(bytes([byte ^ 0xFF]))


def replace_by_other_chunk(path: Path) -> None:
    """Another chunk's file under this name: whole and well-formed, but not what it should be."""
    size = path.stat().st_size
    others = (file for file in sorted(path.parents[1].rglob("*.kv")) if file != path)
    other = next(file for file in others if file.exists() and file.stat().st_size == size)
    path.unlink()
    os.link(other, path)


DAMAGES = {
    action.__name__: action
    for action in (
        delete,
        truncate,
        make_unreadable,
        flip_payload,
        corrupt_trailer,
        replace_by_other_chunk,
    )
}


def carry_out(order: Path, keys: Sequence[bytes]) -> None:
    """Do what `order` says to the file of one of `keys`, once."""
    try:
        asked = json.loads(order.read_text())
    except FileNotFoundError:
        return
    (path,) = Path(asked["root"]).rglob(f"{keys[asked['position']].hex()}.kv")
    DAMAGES[asked["damage"]](path)
    order.unlink()


def register() -> None:
    """Entry point, called in every process of the server; wraps the manager once in each."""
    from vllm.v1.kv_offload.base import OffloadKey

    from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager

    original = PyKVCacheManager.prepare_load
    if getattr(original, "faulty", False):
        return

    def prepare_load(self: PyKVCacheManager, keys: Collection[OffloadKey], *rest: Any) -> Any:
        carry_out(Path(os.environ["PYKVCACHE_FAULT_ORDER"]), list(keys))
        return original(self, keys, *rest)

    prepare_load.faulty = True  # type: ignore[attr-defined]
    PyKVCacheManager.prepare_load = prepare_load  # type: ignore[method-assign]
