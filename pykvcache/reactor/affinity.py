# SPDX-License-Identifier: Apache-2.0
"""Which processors the reactor's thread may run on.

A thread inherits the mask of the one that makes it. vLLM's CPU worker binds its main thread
to the first of its cores and each OpenMP thread to one of the others; a reactor made by that
main thread would share a single core with it, and so would the kernel's I/O workers
(io_uring_register(2), ``IORING_REGISTER_IOWQ_AFF``: they take the mask of the ring's task).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TASKS = Path("/proc/self/task")


def spread_over_process() -> None:
    """Let the calling thread run wherever any thread of its process may.

    That is what the process was given: cores bound away from it by ``taskset``, a cpuset or
    NUMA binding stay out. Does nothing where the kernel does not allow it.
    """
    allowed: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(TASKS):
            with contextlib.suppress(OSError):  # a thread may end meanwhile
                allowed |= os.sched_getaffinity(int(task))
        os.sched_setaffinity(0, allowed or os.sched_getaffinity(0))
