# SPDX-License-Identifier: Apache-2.0
"""The engine's steps, as the hooks of the patch ``idle-steps`` see them.

A step without tokens only asks whether transfers have ended. vLLM repeats such steps as fast as
it can, which takes both the engine's and the worker's processor from the very transfers they wait
for: the scheduler says that a step is empty, and the worker lets a transfer end before it answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )
    from vllm.v1.core.sched.output import SchedulerOutput


def begin(
    scheduler: OffloadingConnectorScheduler,
    metadata: OffloadingConnectorMetadata,
    output: SchedulerOutput,
) -> None:
    """Say in the step's metadata whether it computes anything."""
    from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager

    metadata.empty_step = output.total_num_scheduled_tokens == 0
    if isinstance(scheduler.manager, PyKVCacheManager):
        scheduler.manager.trace.begin_step(
            output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        )


def await_transfer(
    connector_worker: OffloadingConnectorWorker, metadata: OffloadingConnectorMetadata
) -> None:
    """Wait for a transfer, at most ``idle_wait_s``, if the step has nothing else to do."""
    from vllm.v1.kv_offload.pykvcache.worker import PyKVCacheWorker

    if metadata.empty_step and isinstance(connector_worker.worker, PyKVCacheWorker):
        connector_worker.worker.await_transfer()
