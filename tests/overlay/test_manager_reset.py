# SPDX-License-Identifier: Apache-2.0
"""After a reset, vLLM offers the chunks of running requests again, some under stale block ids."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.manager", reason="needs the patched vLLM")

from vllm.v1.kv_offload.base import OffloadKey, PrepareStoreOutput, ReqContext, make_offload_key

from pykvcache.config import Config
from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager


def key(chunk: int) -> OffloadKey:
    return make_offload_key(chunk.to_bytes(32, "big"), 0)


def stored(output: PrepareStoreOutput | None) -> list[OffloadKey]:
    assert output is not None
    return list(output.keys_to_store)


@pytest.fixture
def manager(tmp_path: Path) -> PyKVCacheManager:
    return PyKVCacheManager(Config(root=tmp_path), [tmp_path / "rank-0000"])


def test_a_request_in_flight_stores_nothing_after_a_reset(manager: PyKVCacheManager) -> None:
    request = ReqContext("running")
    manager.on_new_request(request)
    assert stored(manager.prepare_store([key(1)], request)) == [key(1)]
    manager.complete_store([key(1)], request, success=False)

    manager.reset_cache()

    assert stored(manager.prepare_store([key(1), key(2)], request)) == []


def test_later_requests_store_as_before(manager: PyKVCacheManager) -> None:
    running, finished, later = ReqContext("running"), ReqContext("finished"), ReqContext("later")
    for request in (running, finished):
        manager.on_new_request(request)
    manager.on_request_finished(finished)
    manager.reset_cache()
    manager.on_new_request(later)

    assert stored(manager.prepare_store([key(1)], later)) == [key(1)]

    manager.on_request_finished(running)
    again = ReqContext("running")  # a client may use an id again
    manager.on_new_request(again)
    assert stored(manager.prepare_store([key(2)], again)) == [key(2)]
