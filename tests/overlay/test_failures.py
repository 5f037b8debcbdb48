# SPDX-License-Identifier: Apache-2.0
"""The functions that the failure patch calls, one by one, and the connector's worker side."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.failures", reason="needs the patched vLLM")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    RequestGroupState,
    TransferJobStatus,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, TransferResult, make_offload_key

from vllm.v1.kv_offload.pykvcache.failures import (
    ChunkTransferResult,
    TransferFailures,
    complete_load,
    complete_store,
    merge_failed_keys,
    note_failed_keys,
    resumes_at_any_block,
)

TOKENS_PER_CHUNK = 32
ATTENTION: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8}
FULL = FullAttentionSpec(**ATTENTION, dtype=torch.float32)
WINDOW = SlidingWindowSpec(**ATTENTION, dtype=torch.float32, sliding_window=64)
MLA = MLAAttentionSpec(**ATTENTION, dtype=torch.float32)
RSWA = RSWASpec(**ATTENTION, dtype=torch.float32, rswa_window=64)
MAMBA = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))


def key(chunk: int, group: int = 0) -> OffloadKey:
    return make_offload_key(chunk.to_bytes(8, "big"), group)


def cache_config(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


class RecordingManager:
    """Keeps what it was told, in order. Not an observer of failed loads."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, frozenset[OffloadKey], bool]] = []

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self.calls.append(("store", frozenset(keys), success))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.calls.append(("load", frozenset(keys), True))


class ObservingManager(RecordingManager):
    def on_load_failed(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.calls.append(("load failed", frozenset(keys), False))


def job(keys: set[OffloadKey], failed: set[OffloadKey], *, is_store: bool) -> TransferJobStatus:
    return TransferJobStatus(
        req_id="r", pending_count=0, keys=keys, is_store=is_store, failed_keys=failed
    )


def request_state(
    num_chunks: int,
    *,
    groups: int = 1,
    computed: int = 0,
    max_load_tokens: int | None = None,
    block_ids: list[int] | None = None,
) -> SimpleNamespace:
    """What `complete_load` reads of upstream's RequestOffloadState, after a load was planned."""
    context = ReqContext(req_id="r")
    states = []
    for group in range(groups):
        keys = [key(chunk, group) for chunk in range(num_chunks)]
        for position, each in enumerate(keys, 1):
            context.set_offload_key_position(each, position * TOKENS_PER_CHUNK)
        states.append(
            RequestGroupState(
                offload_keys=keys,
                block_ids=list(block_ids or ()),
                next_stored_chunk_idx=num_chunks,
            )
        )
    return SimpleNamespace(
        req_context=context,
        config=SimpleNamespace(
            kv_group_configs=tuple(
                SimpleNamespace(group_idx=group, tokens_per_chunk=TOKENS_PER_CHUNK)
                for group in range(groups)
            )
        ),
        group_states=tuple(states),
        num_locally_computed_tokens=computed,
        max_load_tokens=max_load_tokens,
        load_key_ranges=[(computed, num_chunks * TOKENS_PER_CHUNK, key(0))],
    )


# ------------------------------------------------------------------ which failures can be partial


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        pytest.param((FULL,), True, id="full"),
        pytest.param((MLA,), True, id="mla"),
        pytest.param(
            (UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": FULL}),),
            True,
            id="uniform-full",
        ),
        pytest.param((FULL, FULL), False, id="two-groups"),
        pytest.param((WINDOW,), False, id="window"),
        pytest.param(
            (UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": WINDOW, "b": WINDOW}),),
            False,
            id="uniform-window",
        ),
        pytest.param((RSWA,), False, id="reference-window"),
        pytest.param((MAMBA,), False, id="mamba"),
    ],
)
def test_resumes_at_any_block(specs: tuple[KVCacheSpec, ...], expected: bool) -> None:
    assert resumes_at_any_block(cache_config(*specs)) is expected


# ----------------------------------------------------------------------------- recording a failure


def chunk_failure(job_id: int, *chunks: int, blocks: Collection[int] = ()) -> ChunkTransferResult:
    return ChunkTransferResult(
        job_id,
        success=False,
        failed_keys=frozenset(key(chunk) for chunk in chunks),
        invalid_block_ids=frozenset(blocks),
    )


def test_failed_load_names_its_blocks_once() -> None:
    failures = TransferFailures(cache_config(FULL))
    assert failures.record(chunk_failure(1, 2, blocks={4, 5}), {1: "r"}) == {key(2)}
    assert failures.record(chunk_failure(2, 0, blocks={9}), {1: "r", 2: "s"}) == {key(0)}
    assert failures.take_invalid_block_ids() == {4, 5, 9}
    assert failures.take_invalid_block_ids() == set()
    assert failures.take_failed_recving() == set()


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(TransferResult(1, success=False), id="other-backend"),
        pytest.param(chunk_failure(1, 2), id="without-blocks"),
    ],
)
def test_failed_load_without_blocks_fails_as_a_whole(result: TransferResult) -> None:
    failures = TransferFailures(cache_config(FULL))
    failures.record(result, {1: "r"})
    assert failures.take_failed_recving() == {"r"}
    assert failures.take_failed_recving() == set()
    assert failures.take_invalid_block_ids() == set()


@pytest.mark.parametrize("specs", [(FULL, WINDOW), (WINDOW,)], ids=["two-groups", "window"])
def test_failed_load_fails_as_a_whole_where_it_cannot_be_partial(
    specs: tuple[KVCacheSpec, ...],
) -> None:
    failures = TransferFailures(cache_config(*specs))
    assert failures.record(chunk_failure(1, 2, blocks={4}), {1: "r"}) == {key(2)}
    assert failures.take_failed_recving() == {"r"}
    assert failures.take_invalid_block_ids() == set()


def test_failed_store_concerns_no_request() -> None:
    failures = TransferFailures(cache_config(FULL))
    assert failures.record(chunk_failure(7, 3, blocks={4}), {1: "r"}) == {key(3)}
    assert failures.record(TransferResult(8, success=False), {1: "r"}) is None
    assert failures.take_failed_recving() == set()
    assert failures.take_invalid_block_ids() == set()


def test_chunk_result_without_keys_stands_for_the_whole_job() -> None:
    failures = TransferFailures(cache_config(FULL))
    assert failures.record(ChunkTransferResult(1, success=False), {}) is None


def test_failed_synchronous_load_is_an_error() -> None:
    failures = TransferFailures(cache_config(FULL))
    with pytest.raises(RuntimeError, match="synchronous load 1 failed"):
        failures.record(chunk_failure(1, 2, blocks={4}), {1: None})
    assert failures.take_failed_recving() == set()
    assert failures.take_invalid_block_ids() == set()


# -------------------------------------------------------------------- from workers to the scheduler


def test_merge_failed_keys() -> None:
    first = {1: frozenset({key(1)}), 2: None, 3: frozenset({key(3)})}
    second = {1: frozenset({key(2)}), 2: frozenset({key(5)}), 4: None}
    expected = {1: {key(1), key(2)}, 2: None, 3: {key(3)}, 4: None}
    assert merge_failed_keys(first, second) == expected
    assert merge_failed_keys(second, first) == expected
    assert first[1] == {key(1)}


def test_worker_metadata_aggregates_failed_keys() -> None:
    reports = [
        OffloadingWorkerMetadata(completed_jobs={1: 1, 2: 1}, failed_keys={1: frozenset({key(1)})}),
        OffloadingWorkerMetadata(completed_jobs={1: 1}),
        OffloadingWorkerMetadata(completed_jobs={1: 1}, failed_keys={1: frozenset({key(0)})}),
    ]
    merged = reports[0].aggregate(reports[1]).aggregate(reports[2])
    assert isinstance(merged, OffloadingWorkerMetadata)
    assert merged.completed_jobs == {1: 3, 2: 1}
    assert merged.failed_keys == {1: {key(0), key(1)}}


def test_note_failed_keys_accumulates_over_steps() -> None:
    status = job({key(0), key(1), key(2)}, set(), is_store=True)
    note_failed_keys(status, 5, {})
    note_failed_keys(status, 5, {6: None})
    assert status.failed_keys == set()
    note_failed_keys(status, 5, {5: frozenset({key(1), key(9)})})
    assert status.failed_keys == {key(1)}
    note_failed_keys(status, 5, {5: None})
    assert status.failed_keys == status.keys


# --------------------------------------------------------------------------- completing at the end


def test_complete_store_without_failure_is_one_call() -> None:
    manager = RecordingManager()
    keys = {key(0), key(1)}
    complete_store(manager, job(keys, set(), is_store=True), request_state(2))
    assert manager.calls == [("store", keys, True)]


def test_complete_store_splits_what_failed() -> None:
    manager = RecordingManager()
    status = job({key(0), key(1), key(2)}, {key(1)}, is_store=True)
    complete_store(manager, status, request_state(3))
    assert manager.calls == [("store", {key(0), key(2)}, True), ("store", {key(1)}, False)]


def test_complete_store_of_nothing_but_failures() -> None:
    manager = RecordingManager()
    keys = {key(0), key(1)}
    complete_store(manager, job(keys, set(keys), is_store=True), request_state(2))
    assert manager.calls == [("store", keys, False)]


def test_complete_load_without_failure_leaves_the_request_alone() -> None:
    manager = ObservingManager()
    state = request_state(3)
    complete_load(manager, job({key(0)}, set(), is_store=False), state)
    assert manager.calls == [("load", {key(0)}, True)]
    assert state.max_load_tokens is None
    assert state.group_states[0].next_stored_chunk_idx == 3


def test_complete_load_tells_an_observer_after_completion() -> None:
    manager = ObservingManager()
    keys = {key(chunk) for chunk in range(4)}
    complete_load(manager, job(keys, {key(3), key(1)}, is_store=False), request_state(4))
    assert manager.calls == [("load", keys, True), ("load failed", {key(1), key(3)}, False)]


def test_complete_load_asks_nothing_of_other_managers() -> None:
    manager = RecordingManager()
    complete_load(manager, job({key(0)}, {key(0)}, is_store=False), request_state(1))
    assert manager.calls == [("load", {key(0)}, True)]


def test_failed_load_offers_its_chunks_for_storing_again() -> None:
    state = request_state(4)
    complete_load(RecordingManager(), job({key(2)}, {key(3), key(2)}, is_store=False), state)
    assert state.group_states[0].next_stored_chunk_idx == 2


def test_store_index_only_moves_back_in_groups_that_failed() -> None:
    state = request_state(4, groups=2)
    failed = {key(1, group=1)}
    complete_load(RecordingManager(), job(failed, failed, is_store=False), state)
    assert [group.next_stored_chunk_idx for group in state.group_states] == [4, 1]


def test_store_index_never_moves_forward() -> None:
    state = request_state(4)
    state.group_states[0].next_stored_chunk_idx = 1
    complete_load(RecordingManager(), job({key(3)}, {key(3)}, is_store=False), state)
    assert state.group_states[0].next_stored_chunk_idx == 1


def test_store_index_stays_while_gpu_blocks_are_known() -> None:
    state = request_state(4, block_ids=[5, 6])
    complete_load(RecordingManager(), job({key(1)}, {key(1)}, is_store=False), state)
    assert state.group_states[0].next_stored_chunk_idx == 4


@pytest.mark.parametrize(
    ("computed", "before", "failed", "expected"),
    [
        pytest.param(0, None, [(2, 0)], 2 * TOKENS_PER_CHUNK, id="below-the-chunk"),
        pytest.param(0, None, [(0, 0)], 0, id="first-chunk"),
        pytest.param(TOKENS_PER_CHUNK, None, [(3, 0)], 2 * TOKENS_PER_CHUNK, id="behind-gpu-hit"),
        pytest.param(48, None, [(1, 0)], 0, id="load-began-inside-the-chunk"),
        pytest.param(0, 16, [(3, 0)], 16, id="user-allows-less"),
        pytest.param(0, None, [(3, 0), (1, 1)], TOKENS_PER_CHUNK, id="least-of-the-groups"),
    ],
)
def test_failed_load_caps_the_next_one(
    computed: int, before: int | None, failed: list[tuple[int, int]], expected: int
) -> None:
    state = request_state(4, groups=2, computed=computed, max_load_tokens=before)
    keys = {key(chunk, group) for chunk, group in failed}
    complete_load(RecordingManager(), job(keys, keys, is_store=False), state)
    assert state.max_load_tokens == expected


def test_cap_is_below_the_load_that_failed_wherever_the_key_is_recorded() -> None:
    """A partial tail's key may be recorded behind the tokens that it loads."""
    state = request_state(4)
    state.load_key_ranges = [(0, 40, key(0))]
    complete_load(RecordingManager(), job({key(3)}, {key(3)}, is_store=False), state)
    assert state.max_load_tokens == 39


def test_key_that_the_scheduler_did_not_record_ends_loading() -> None:
    state = request_state(4)
    unknown = {key(99)}
    complete_load(RecordingManager(), job(unknown, unknown, is_store=False), state)
    assert state.max_load_tokens == 0


# ------------------------------------------------------------------------ upstream's worker side


class FinishedTransfers:
    """Stands in for the offloading worker of one step."""

    def __init__(self, *results: TransferResult) -> None:
        self.results = list(results)

    def get_finished(self) -> list[TransferResult]:
        return self.results


def connector_worker(*results: TransferResult) -> OffloadingConnectorWorker:
    spec: Any = SimpleNamespace(replicated_layout=False)
    config: Any = None
    worker = OffloadingConnectorWorker(spec, config, cache_config(FULL))
    finished: Any = FinishedTransfers(*results)
    worker.worker = finished
    worker._load_jobs[1] = "r"
    return worker


def test_worker_reports_a_failed_load_as_finished() -> None:
    worker = connector_worker(chunk_failure(1, 2, blocks={4}))
    assert worker.get_finished(set()) == (set(), {"r"})
    meta = worker.build_connector_worker_meta()
    assert meta is not None
    assert meta.completed_jobs == {1: 1}
    assert meta.failed_keys == {1: {key(2)}}
    assert meta.transfer_stats.is_empty()
    assert worker.failures.take_invalid_block_ids() == {4}
    assert worker._load_jobs == {}
    assert worker.build_connector_worker_meta() is None


def test_worker_counts_what_a_failed_transfer_says_it_moved() -> None:
    partly = ChunkTransferResult(
        1, success=False, transfer_size=100, transfer_time=0.5, failed_keys=frozenset({key(2)})
    )
    worker = connector_worker(partly, TransferResult(2, success=False))
    worker.get_finished(set())
    meta = worker.build_connector_worker_meta()
    assert meta is not None
    assert meta.transfer_stats.load.bytes == 100
    assert meta.transfer_stats.store.is_empty()
    assert meta.failed_keys == {1: {key(2)}, 2: None}


def test_worker_says_nothing_of_failures_when_there_are_none() -> None:
    worker = connector_worker(TransferResult(1, success=True, transfer_size=8, transfer_time=0.1))
    assert worker.get_finished(set()) == (set(), {"r"})
    meta = worker.build_connector_worker_meta()
    assert meta is not None
    assert meta.failed_keys == {}
    assert worker.failures.take_failed_recving() == set()
