# SPDX-License-Identifier: Apache-2.0
"""The chunks that a waiting request would load if it ran now.

vLLM's connector finds them out when it schedules a request, but its look-up leaves traces:
what the request has computed, events, and no answer at all while another request loads the
same chunks. This is the same search without them. It may be wrong, since time passes until
the request runs; then a chunk is read for nothing, or not ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv, round_down

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        GroupOffloadConfig,
        OffloadingConnectorScheduler,
        RequestOffloadState,
    )
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.request import Request

Exists = Callable[["OffloadKey"], bool]


@dataclass(frozen=True, slots=True)
class Hit:
    """What a request could load.

    Attributes:
        cached: tokens that the GPU has already.
        end: up to which tokens can be loaded.
        keys: chunks, group by group as a load lists them.
    """

    cached: int
    end: int
    keys: tuple[OffloadKey, ...]


def hit_of(
    scheduler: OffloadingConnectorScheduler,
    gpu_cache: KVCacheManager | None,
    request: Request,
    exists: Exists,
) -> Hit | None:
    """What the request would load if it ran now and all of it were loaded; None for nothing.

    Args:
        scheduler: the connector's side in vLLM's scheduler.
        gpu_cache: the GPU's prefix cache.
        request: holds no GPU blocks.
        exists: whether a chunk can be loaded.
    """
    state = scheduler._req_status.get(request.request_id)
    if state is None or request.skip_reading_prefix_cache or request.num_computed_tokens:
        return None
    if request.resumable:
        # The tokens of a session change while it waits, and with them its keys.
        return None
    state.update_offload_keys()
    coordinator = gpu_cache.coordinator if gpu_cache is not None else None
    cached = _cached_tokens(coordinator, request)
    groups = scheduler.config.kv_group_configs
    search = _Search(groups, state, cached, functools.cache(exists), coordinator)
    end = search.end_of_hit(_limit(scheduler, cached, state))
    return Hit(cached, end, search.keys_until(end)) if end else None


def keys_of_hit(
    scheduler: OffloadingConnectorScheduler, request: Request, cached: int, end: int
) -> tuple[OffloadKey, ...]:
    """The chunks of a hit that vLLM's own look-up has found.

    Args:
        scheduler: the connector's side in vLLM's scheduler.
        request: looked up.
        cached: tokens in the GPU already.
        end: of the hit.
    """
    state = scheduler._req_status[request.request_id]
    groups = scheduler.config.kv_group_configs
    return _Search(groups, state, cached, lambda key: True, None).keys_until(end)


def _cached_tokens(coordinator: KVCacheCoordinator | None, request: Request) -> int:
    """Tokens in the GPU's prefix cache; nothing is counted or touched by this look-up."""
    if coordinator is None:
        return 0
    # The last token is computed in any case.
    _, tokens, _ = coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
    return tokens


def _limit(scheduler: OffloadingConnectorScheduler, cached: int, state: RequestOffloadState) -> int:
    """Tokens up to which a load could reach."""
    limit = state.req.num_tokens
    if state.max_load_tokens is not None:
        limit = min(limit, cached + state.max_load_tokens)
    if scheduler._sliding_window_groups:
        # The window must end before the last token, which is computed in any case.
        limit -= 1
        if scheduler._mamba_align_size is not None:
            limit = round_down(limit, scheduler._mamba_align_size)
    return limit


@dataclass(frozen=True)
class _Search:
    """One request's chunks in all groups, from the tokens on that the GPU holds."""

    groups: Sequence[GroupOffloadConfig]
    state: RequestOffloadState
    cached: int
    exists: Exists
    coordinator: KVCacheCoordinator | None

    def skipped_tokens(self, group: GroupOffloadConfig, end: int) -> int:
        """Tokens at the start of which a request with ``end`` computed ones needs no KV."""
        if self.coordinator is None:
            return 0
        manager = self.coordinator.single_type_managers[group.group_idx]
        return manager.get_num_skipped_tokens(end)

    def end_of_hit(self, limit: int) -> int:
        """Tokens up to which every group has what it needs; 0 if that gains no chunk.

        A group that reaches less far shortens the hit for all, and then a window that ended
        further behind must be looked for again.
        """
        end, before = limit, limit + 1
        while end < before:
            before = end
            for index, group in enumerate(self.groups):
                end = self._reach(index, group, end)
                if end - self.cached < group.tokens_per_chunk:
                    return 0
        return end

    def _reach(self, index: int, group: GroupOffloadConfig, end: int) -> int:
        """Tokens up to which this group can be loaded, at most ``end``."""
        size = group.tokens_per_chunk
        keys = self.state.group_states[index].offload_keys
        end = min(end, len(keys) * size)
        if self.state.max_load_tokens is not None:
            end = round_down(end, size)
        # The last chunk of a draft model's group proves the hit and isn't loaded.
        proof = int(group.is_eagle_group)
        last = min(cdiv(end, size) + proof, len(keys))
        first = self.cached // size
        span = keys[first:last]
        window = group.sliding_window_size_in_chunks
        if window is None:
            hits = self._leading(span)
        else:
            to_end = group.load_window_size_in_chunks(min(end, (last - proof) * size))
            hits = self._window_end(span, window + proof, (to_end or window) + proof)
        return min(end, (first + hits - proof) * size) if hits else 0

    def _leading(self, keys: Sequence[OffloadKey]) -> int:
        for index, key in enumerate(keys):
            if not self.exists(key):
                return index
        return len(keys)

    def _window_end(self, keys: Sequence[OffloadKey], window: int, window_at_end: int) -> int:
        """Where the last run of existing chunks ends that is as long as the window, or that
        reaches back to the first chunk; 0 if there is none."""
        run, needed = 0, window_at_end
        for index in range(len(keys) - 1, -1, -1):
            if self.exists(keys[index]):
                run += 1
            else:
                run, needed = 0, window
            if run == needed:
                return index + run
        return run

    def keys_until(self, end: int) -> tuple[OffloadKey, ...]:
        """What a load of the tokens up to ``end`` reads."""
        keys: list[OffloadKey] = []
        for group, state in zip(self.groups, self.state.group_states, strict=True):
            first, last = self.cached // group.tokens_per_chunk, cdiv(end, group.tokens_per_chunk)
            window = group.load_window_size_in_chunks(end)
            if window is not None:
                # The window is rounded up to chunks; vLLM gives blocks only to what it attends to.
                skipped = self.skipped_tokens(group, end) // group.tokens_per_chunk
                first = max(first, last - window, skipped)
            keys += state.offload_keys[first:last]
        return tuple(keys)
