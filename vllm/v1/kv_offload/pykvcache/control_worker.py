# SPDX-License-Identifier: Apache-2.0
"""What the API of :mod:`control` asks a worker: whose files are its own, what its pool holds.

vLLM gives its worker's class a further base on order (``worker_extension_cls``), whose methods
``collective_rpc`` finds. It is ordered only where the API is loaded, and nobody ordered another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PLUGIN_NAME = "pykvcache"
"""Of the API, in ``VLLM_PLUGINS``."""

EXTENSION = f"{__name__}.ControlWorkerExtension"


def extend_worker(vllm_config: VllmConfig) -> None:
    """Order the extension if the API will be there to ask it."""
    parallel = vllm_config.parallel_config
    if PLUGIN_NAME in (envs.VLLM_PLUGINS or ()) and not parallel.worker_extension_cls:
        parallel.worker_extension_cls = EXTENSION


class ControlWorkerExtension:
    """A base of vLLM's worker."""

    def pykvcache_state(self, keys: Sequence[str]) -> dict[str, Any]:
        """One rank's answer.

        Args:
            keys: of chunks, in hex.

        Returns:
            ``directory``: of the server's files; ``chunks``: how many the pool holds; ``held``:
            whether each of the keys is one of them. As of the last step, as plain values for the
            way to another process.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from vllm.v1.kv_offload.pykvcache.worker import PyKVCacheWorker

        connector: Any = get_kv_transfer_group()
        worker = connector.connector_worker.worker
        assert isinstance(worker, PyKVCacheWorker)
        in_dram = worker.in_dram
        return {
            "directory": str(worker.server_directory),
            "chunks": len(in_dram),
            "held": [bytes.fromhex(key) in in_dram for key in keys],
        }
