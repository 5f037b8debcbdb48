# SPDX-License-Identifier: Apache-2.0
"""The spec: builds the scheduler's manager and each worker's transfers from one identity."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from pykvcache.access import access_of
from pykvcache.capacity.keeper import Keeper
from pykvcache.config import Config
from pykvcache.gate.calibration import fingerprint_of
from pykvcache.identity import Identity, claim_directory
from pykvcache.layout import ChunkPaths, file_bytes, rank_directory
from pykvcache.machine import machine_of
from vllm.v1.kv_offload.pykvcache.backend import layout_facts, logged_refusal, settings_of
from vllm.v1.kv_offload.pykvcache.metrics import metric_definitions
from vllm.v1.kv_offload.pykvcache.tracing import make_tracer

if TYPE_CHECKING:
    from vllm.v1.kv_offload.pykvcache.gate import SchedulerGate

logger = init_logger(__name__)


class PyKVCacheSpec(OffloadingSpec):
    """KV offloading to hash-addressed files, selected by ``--kv-offloading-backend pykvcache``."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """The metrics of this backend, beside those of every offloading backend."""
        return metric_definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        """Raises:
        ConfigError: the root cannot be used.
        """
        super().__init__(config)
        settings = settings_of(config.extra_config)
        self.options = Config(**settings["config"])
        self.pool_bytes: int = settings["pool_bytes"]
        self._tokens_max: int = settings["tokens_max"]
        self._speed: Mapping[str, Any] = settings["speed"]
        self.identity = build_identity(config, self.options, settings["facts"])
        # Nothing follows a symbolic link once the root itself has been found.
        self.root = Path(os.path.realpath(self.options.root))
        self.directory = self.identity.directory(self.root)
        with logged_refusal():
            self.access = access_of(self.options)
            claim_directory(self.identity, self.directory, self.root, self.access)

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side."""
        from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager

        ranks = range(self.config.parallel.world_size)
        directories = [rank_directory(self.directory, rank) for rank in ranks]
        keeper = Keeper(self.options, [ChunkPaths(path) for path in directories], logger)
        with logged_refusal():
            tracer = make_tracer(self.options, "scheduler")
        keeper.start()
        payload_bytes = self.config.worker_kv_bytes_per_block * self.config.cache.blocks_per_chunk
        chunk_bytes = len(ranks) * file_bytes(payload_bytes)
        return PyKVCacheManager(
            self.options, directories, tracer, keeper, chunk_bytes, self._gate(payload_bytes)
        )

    def _gate(self, payload_bytes: int) -> SchedulerGate | None:
        from vllm.v1.kv_offload.pykvcache.gate import KVSize, make_gate

        config = self.config
        per_token = [
            payload_bytes / (group.tokens_per_block * config.cache.blocks_per_chunk)
            for group in config.groups
        ]
        size = KVSize(
            payload_bytes, sum(per_token), self._tokens_max, dram=self.options.dram_policy != "none"
        )
        return make_gate(
            self.options,
            size,
            lambda: fingerprint_of(machine_of(self.root), self.identity, self._speed),
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """One rank's transfers."""
        from vllm.v1.kv_offload.pykvcache.worker import PyKVCacheWorker

        with logged_refusal():
            return PyKVCacheWorker(self, kv_caches)


def build_identity(config: OffloadingConfig, options: Config, facts: Mapping[str, Any]) -> Identity:
    """Everything that all ranks' bytes depend on."""
    return Identity(**facts, **layout_facts(config, options))
