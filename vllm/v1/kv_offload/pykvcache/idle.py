# SPDX-License-Identifier: Apache-2.0
"""A step without tokens: the engine only asks whether transfers have ended.

vLLM repeats such steps as fast as it can, which takes both the engine's and the worker's
processor from the very transfers they wait for. Called from the hooks of the patch
``idle-steps``: the scheduler says that a step is empty, and the worker then lets a transfer
end before it answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )


def await_transfer(
    connector_worker: OffloadingConnectorWorker, metadata: OffloadingConnectorMetadata
) -> None:
    """Wait for a transfer, at most ``idle_wait_s``, if the step has nothing else to do."""
    from vllm.v1.kv_offload.pykvcache.worker import PyKVCacheWorker

    if metadata.empty_step and isinstance(connector_worker.worker, PyKVCacheWorker):
        connector_worker.worker.await_transfer()
