# SPDX-License-Identifier: Apache-2.0
"""The engine's steps, as the hooks of the patch ``idle-steps`` see them.

A step without tokens only asks whether transfers have ended. vLLM repeats such steps as fast as
it can, which takes both the engine's and the worker's processor from the very transfers they wait
for: the scheduler says that a step is empty, and the worker lets a transfer end before it answers.

Steps are numbered, so that the scheduler knows which one a worker's report belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Step:
    """A step on its way to the workers, who return its number when it has ended.

    Attributes:
        number: counted from 1.
        is_empty: whether it computes nothing.
    """

    number: int
    is_empty: bool


def begin(
    scheduler: OffloadingConnectorScheduler,
    metadata: OffloadingConnectorMetadata,
    output: SchedulerOutput,
) -> None:
    """Number the step, and say in its metadata whether it computes anything."""
    from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager

    manager = scheduler.manager
    if isinstance(manager, PyKVCacheManager):
        number = manager.begin_step(scheduler, output)
        metadata.step = Step(number, is_empty=output.total_num_scheduled_tokens == 0)


def await_transfer(
    connector_worker: OffloadingConnectorWorker, metadata: OffloadingConnectorMetadata
) -> None:
    """Take the step's number, and wait for a transfer, at most ``idle_wait_s``, if the step has
    nothing else to do."""
    from vllm.v1.kv_offload.pykvcache.worker import PyKVCacheWorker

    worker, step = connector_worker.worker, metadata.step
    if step is None or not isinstance(worker, PyKVCacheWorker):
        return
    worker.step = step.number
    if step.is_empty:
        worker.await_transfer()
