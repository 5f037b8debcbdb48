# SPDX-License-Identifier: Apache-2.0
"""vLLM's own ``fs`` tier, driven alone: the peer that every vLLM user has."""

from __future__ import annotations

import mmap
import select
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from benchmarks.hashes import chunk_hashes

_POLL_S = 0.01


class NativeTier:
    """A ``FileSystemTierManager`` over a shared mapping of its own, as vLLM sets it up."""

    def __init__(self, root: Path, chunks: int, chunk_bytes: int) -> None:
        self._chunks = chunks
        self._keys: list[OffloadKey] = []
        self._memory = mmap.mmap(-1, chunks * chunk_bytes)
        array = np.frombuffer(self._memory, np.int8).reshape(chunks, chunk_bytes)
        array[:] = np.arange(chunk_bytes, dtype=np.int64).astype(np.int8)  # touched in order
        self._bytes = chunks * chunk_bytes
        self._tier = FileSystemTierManager(
            tier_spec(chunk_bytes), memoryview(array), "fs", root_dir=str(root)
        )
        self._jobs = 0

    def write(self, generation: int) -> tuple[float, float]:
        """Store every chunk under a name of this generation; seconds, and seconds of CPU."""
        self._keys = [
            make_offload_key(digest, 0) for digest in chunk_hashes(generation, self._chunks)
        ]
        for key in self._keys:
            Path(self._tier.file_mapper.get_file_name(key)).parent.mkdir(
                parents=True, exist_ok=True
            )
        return self._transfer(self._tier.submit_store)

    def read(self) -> tuple[float, float]:
        """Load every chunk that was written last; seconds, and seconds of CPU."""
        return self._transfer(self._tier.submit_load)

    def _transfer(self, submit: Callable[[TransferJob], object]) -> tuple[float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        for chunk, key in enumerate(self._keys):
            submit(self._job(chunk, key))
        ended = 0
        while ended < len(self._keys):
            for result in self._tier.get_finished_jobs():
                if not result.success:
                    raise OSError("a chunk of the fs tier failed")
                ended += 1
            select.select([], [], [], _POLL_S)
        return time.perf_counter() - start, time.process_time() - cpu

    def _job(self, chunk: int, key: OffloadKey) -> TransferJob:
        self._jobs += 1
        return TransferJob(
            self._jobs,
            [key],
            np.array([chunk]),
            is_promotion=False,
            req_context=ReqContext("bench"),
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of one pass."""
        return self._bytes

    def close(self) -> None:
        """Stop the tier's threads."""
        self._tier.shutdown()


def tier_spec(chunk_bytes: int) -> types.SimpleNamespace:
    """What a tier asks of the spec that makes it, for chunks of one block."""
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="benchmark",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
    return types.SimpleNamespace(
        config=config,
        blocks_per_chunk=1,
        kv_events_config=types.SimpleNamespace(enable_kv_cache_events=False),
    )
