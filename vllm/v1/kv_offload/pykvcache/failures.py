# SPDX-License-Identifier: Apache-2.0
"""How a failed transfer gets from a worker to vLLM's scheduler.

Upstream's offloading connector knows no failures: it asserts that they don't happen. The
patch `transfer-failures` calls the functions below instead, in three places:

- the connector's worker side, for each result that is not a success
  (`TransferFailures.record`), and once per step to hand out what was recorded;
- the metadata that travels from every worker to the scheduler (`merge_failed_keys`);
- the connector's scheduler side, when all workers have reported a job (`complete_store`,
  `complete_load`).

What vLLM's scheduler does with a failed load, and why it ends in recomputation:

- *Invalid block ids* truncate the request's computed tokens at its first invalid block. The
  request resumes there, keeps its blocks and isn't looked up again. Block ids are unique only
  within a KV cache group, so upstream refuses them for models with several groups; and tokens
  before the truncation point must have all their KV, which only full attention has: a load for
  a sliding window restores just the window that ends at the hit, and recomputing from the
  middle of it would read blocks that were never filled.
- A *failed receive* sets the computed tokens to 0. The request gives its blocks back and is
  looked up anew, so the same chunk could be found, loaded and fail for ever. `complete_load`
  ends that: it caps what the request may load below its first failed chunk, which makes every
  further attempt strictly shorter, whatever the manager answers.

Either must reach the scheduler no later than the step in which that worker reports the load as
finished. Both are drained in that step. With several workers the scheduler moves the request
only when all have reported, so it waits for the slowest and sees every failure by then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    RSWASpec,
    is_full_attention_spec,
    iter_layer_specs,
)
from vllm.v1.kv_offload.base import (
    OffloadingManager,
    OffloadKey,
    ReqContext,
    TransferResult,
    get_offload_group_idx,
)

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        RequestOffloadState,
        TransferJobStatus,
    )

logger = init_logger(__name__)

FailedKeys = frozenset[OffloadKey] | None
"""Keys of one job that were not transferred; None stands for all of them."""


@dataclass
class ChunkTransferResult(TransferResult):
    """A transfer result that says which chunks of the job failed.

    An unsuccessful result without `failed_keys` counts as failed in all its chunks.
    """

    failed_keys: frozenset[OffloadKey] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()
    """GPU blocks that a failed load should have filled and did not."""


@runtime_checkable
class LoadFailureObserver(Protocol):
    """An offloading manager that wants to know which chunks could not be loaded."""

    def on_load_failed(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Called after `complete_load` for the same job. `keys` are no longer in use by it."""


class TransferFailures:
    """The failed transfers of one worker, kept until the end of the step that saw them."""

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        self._kv_cache_config = kv_cache_config
        self._invalid_block_ids: set[int] = set()
        self._failed_recving: set[str] = set()

    def record(self, result: TransferResult, load_jobs: Mapping[int, str | None]) -> FailedKeys:
        """Record an unsuccessful result.

        Args:
            result: what the offloading worker reported, with `success` false.
            load_jobs: the connector worker's loads in flight, job id to request id; None as the
                request id marks a synchronous load. A job that isn't among them is a store.

        Returns:
            The keys that failed, for the metadata that goes to the scheduler.

        Raises:
            RuntimeError: a synchronous load failed. Upstream asserts that it doesn't, its request
                being part of the running step already, and this keeps it so.
        """
        is_load = result.job_id in load_jobs
        if is_load and load_jobs[result.job_id] is None:
            raise RuntimeError(
                f"KV offloading: synchronous load {result.job_id} failed, and the step that "
                "needs its data is already running."
            )
        if not isinstance(result, ChunkTransferResult):
            # Our own worker has logged what happened and why.
            logger.warning_once(
                "KV offloading: a %s failed. What a store did not write is a miss later, and "
                "kv_load_failure_policy decides what becomes of the request of a load.",
                "load" if is_load else "store",
            )
        if (req_id := load_jobs.get(result.job_id)) is not None:
            self._record_load(result, req_id)
        if isinstance(result, ChunkTransferResult) and result.failed_keys:
            return result.failed_keys
        return None

    def _record_load(self, result: TransferResult, req_id: str) -> None:
        block_ids = (
            result.invalid_block_ids
            if isinstance(result, ChunkTransferResult)
            else frozenset[int]()
        )
        if block_ids and resumes_at_any_block(self._kv_cache_config):
            self._invalid_block_ids |= block_ids
        else:
            self._failed_recving.add(req_id)

    def take_invalid_block_ids(self) -> set[int]:
        """Return and forget the GPU blocks that loads failed to fill."""
        taken, self._invalid_block_ids = self._invalid_block_ids, set()
        return taken

    def take_failed_recving(self) -> set[str]:
        """Return and forget the requests whose load failed as a whole."""
        taken, self._failed_recving = self._failed_recving, set()
        return taken


def resumes_at_any_block(kv_cache_config: KVCacheConfig) -> bool:
    """Whether a request may be recomputed from the middle of its loaded prefix.

    True for a single KV cache group in which every layer keeps the KV of all tokens.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return False
    spec = groups[0].kv_cache_spec
    return is_full_attention_spec(spec) and not any(
        # Counts as full attention, and still drops the blocks between prompt and window.
        isinstance(layer_spec, RSWASpec)
        for layer_spec in iter_layer_specs(spec)
    )


def merge_failed_keys(
    first: Mapping[int, FailedKeys], second: Mapping[int, FailedKeys]
) -> dict[int, FailedKeys]:
    """Combine what two workers report: a chunk that failed on one of them failed."""
    merged = dict(first)
    for job_id, keys in second.items():
        known = merged.get(job_id, frozenset())
        merged[job_id] = None if known is None or keys is None else known | keys
    return merged


def note_failed_keys(
    job_status: TransferJobStatus, job_id: int, failed_keys: Mapping[int, FailedKeys]
) -> None:
    """Add what one step's reports say about a job to what earlier steps said."""
    if job_id not in failed_keys:
        return
    keys = failed_keys[job_id]
    job_status.failed_keys |= job_status.keys if keys is None else job_status.keys & keys


def complete_store(
    manager: OffloadingManager, job_status: TransferJobStatus, req_status: RequestOffloadState
) -> None:
    """Tell the manager which chunks of a finished store it has, and which it hasn't."""
    failed = job_status.failed_keys
    if not failed:
        manager.complete_store(job_status.keys, req_status.req_context)
        return
    if stored := job_status.keys - failed:
        manager.complete_store(stored, req_status.req_context)
    manager.complete_store(failed, req_status.req_context, success=False)


def complete_load(
    manager: OffloadingManager, job_status: TransferJobStatus, req_status: RequestOffloadState
) -> None:
    """Tell the manager that a load has ended, and prepare its request for recomputation."""
    manager.complete_load(job_status.keys, req_status.req_context)
    failed = job_status.failed_keys
    if not failed:
        return
    if isinstance(manager, LoadFailureObserver):
        manager.on_load_failed(failed, req_status.req_context)
    _load_less(req_status, failed)
    _store_again(req_status, failed)


def _first_failed_chunks(
    req_status: RequestOffloadState, failed: Collection[OffloadKey]
) -> dict[int, int]:
    """Group index to the index of its first failed chunk, for the groups that have one."""
    tokens_per_chunk = {
        group.group_idx: group.tokens_per_chunk for group in req_status.config.kv_group_configs
    }
    first: dict[int, int] = {}
    for key in failed:
        group_idx = get_offload_group_idx(key)
        # The scheduler records where each key it loads ends. The last chunk may be partial.
        end_token = req_status.req_context.get_offload_key_position(key)
        chunk_idx = (end_token - 1) // tokens_per_chunk[group_idx] if end_token else 0
        first[group_idx] = min(chunk_idx, first.get(group_idx, chunk_idx))
    return first


def _load_less(req_status: RequestOffloadState, failed: Collection[OffloadKey]) -> None:
    """Cap the request's further loads below its first failed chunk.

    The cap counts from the tokens that are computed locally when the request is looked up. The
    failed chunk starts within the load that the last cap allowed, so each failure lowers the
    cap; at 0 nothing is loaded. (The end of the load is a bound of its own because the key of a
    partial tail may be recorded at a position behind it.)
    """
    first = _first_failed_chunks(req_status, failed)
    bounds = [
        first[group.group_idx] * group.tokens_per_chunk
        for group in req_status.config.kv_group_configs
        if group.group_idx in first
    ]
    bounds += [max((end for _, end, _ in req_status.load_key_ranges), default=1) - 1]
    cap = max(0, min(bounds) - req_status.num_locally_computed_tokens)
    if req_status.max_load_tokens is not None:
        cap = min(cap, req_status.max_load_tokens)
    req_status.max_load_tokens = cap


def _store_again(req_status: RequestOffloadState, failed: Collection[OffloadKey]) -> None:
    """Offer the failed chunks for storing once they are recomputed.

    Planning the load moved the store index past everything it covers. Moving it back only makes
    the manager see these keys again, and it filters those that exist. That is safe while the
    connector knows no GPU blocks of the request, which holds during an asynchronous load: they
    are forgotten when the request is looked up and known again when it is scheduled, so a
    request that is aborted meanwhile has nothing to store. With blocks known, sliding-window
    positions before the store index may name blocks that belong to someone else by now.
    """
    first = _first_failed_chunks(req_status, failed)
    for group, state in zip(
        req_status.config.kv_group_configs, req_status.group_states, strict=True
    ):
        if group.group_idx in first and not state.block_ids:
            state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, first[group.group_idx])
