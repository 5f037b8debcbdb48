# SPDX-License-Identifier: Apache-2.0
"""The manager on a filesystem whose stat(2) does not return."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.failures", reason="needs the patched vLLM")

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from pykvcache import openat2
from pykvcache.config import Config
from pykvcache.layout import ChunkPaths, rank_directory
from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager
from vllm.v1.kv_offload.pykvcache.metrics import UNANSWERED

REQUEST = ReqContext(req_id="r")
KEY = OffloadKey(b"\x01" * 36)
THREAD = "pykvcache-existence"


def test_it_is_a_miss_and_counted_until_the_filesystem_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = rank_directory(tmp_path, 0)
    file = Path(ChunkPaths(directory).final(KEY))
    file.parent.mkdir(parents=True)
    file.touch()
    released = threading.Event()
    stat = os.stat

    def hanging(path: str, **options: object) -> os.stat_result:
        if threading.current_thread().name == THREAD:
            released.wait()
        return stat(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(openat2, "SYSTEM_CALL", 100_000)  # the kernel knows nothing
    monkeypatch.setattr(os, "stat", hanging)
    manager = PyKVCacheManager(Config(root=tmp_path, lookup_timeout_s=0.001), [directory])

    looked_up = [manager.lookup(KEY, REQUEST) for _ in range(3)]
    stats = manager.get_stats()
    released.set()
    while manager.lookup(KEY, REQUEST) is not LookupResult.HIT:
        pass
    manager.shutdown()

    assert looked_up == [LookupResult.MISS] * 3
    assert stats is not None
    assert stats.reduce()[UNANSWERED] == 3
