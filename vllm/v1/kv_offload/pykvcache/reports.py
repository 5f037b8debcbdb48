# SPDX-License-Identifier: Apache-2.0
"""What every rank tells the scheduler at the end of a step.

Called from the hooks of the patch ``preload``. A report travels with the step's output, also
with the output of a step that computed nothing, so that the scheduler knows which step has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadKey

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A load that has ended, without failures or by its deadline; bytes are of one rank's KV.

    Attributes:
        dram_bytes: that were in the pool.
        disk_bytes: that were read from files.
        ahead_bytes: that were still to be read for other loads when it was submitted.
        seconds: from submission to its end.
    """

    dram_bytes: int
    disk_bytes: int
    ahead_bytes: int
    seconds: float


@dataclass(slots=True)
class WorkerReport:
    """One rank's, or the sum of several ranks'.

    Attributes:
        step: the number of the step that has ended.
        dram: key to ranks whose pool gained (+) or lost (-) the chunk.
        loads: those that ended, by job.
        unread_bytes: still to be read from files for loads.
    """

    step: int = 0
    dram: dict[OffloadKey, int] = field(default_factory=dict)
    loads: dict[int, LoadReport] = field(default_factory=dict)
    unread_bytes: int = 0


def merge_reports(one: WorkerReport | None, other: WorkerReport | None) -> WorkerReport | None:
    """Reports of two ranks on the same step. A load takes as long as with the slowest."""
    if one is None or other is None:
        return one or other
    dram = {key: one.dram.get(key, 0) + other.dram.get(key, 0) for key in one.dram | other.dram}
    loads = {**one.loads}
    for job_id, load in other.loads.items():
        known = loads.get(job_id)
        if known is None or known.seconds < load.seconds:
            loads[job_id] = load
    return WorkerReport(
        step=max(one.step, other.step),
        dram={key: change for key, change in dram.items() if change},
        loads=loads,
        unread_bytes=max(one.unread_bytes, other.unread_bytes),
    )


def add_report(
    connector_worker: OffloadingConnectorWorker | None, metadata: OffloadingWorkerMetadata | None
) -> OffloadingWorkerMetadata | None:
    """Add this rank's report to what the step's output carries."""
    from vllm.v1.kv_offload.pykvcache.worker import PyKVCacheWorker

    worker = connector_worker.worker if connector_worker is not None else None
    if not isinstance(worker, PyKVCacheWorker):
        return metadata
    if metadata is None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )

        metadata = OffloadingWorkerMetadata()
    metadata.report = worker.take_report()
    return metadata


def note_report(scheduler: OffloadingConnectorScheduler | None, metadata: Any) -> None:
    """Tell the manager what the ranks reported."""
    from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager

    manager = scheduler.manager if scheduler is not None else None
    report = getattr(metadata, "report", None)
    if report is not None and isinstance(manager, PyKVCacheManager):
        manager.note_report(report)
