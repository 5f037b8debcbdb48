# SPDX-License-Identifier: Apache-2.0
"""How a worker whose write found no room tells the keepers, without waiting for the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from pykvcache.capacity.record import Record

REPORT_INTERVAL_S = 1.0
"""The keepers look once a second."""


class NoSpaceReporter:
    """Used by one thread."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._record = Record(root)
        self._clock = clock
        self._reported_s = float("-inf")
        self._thread: threading.Thread | None = None

    def report(self) -> None:
        """Leave word in the root, on a thread of its own: a disk that is full may be slow."""
        now_s = self._clock()
        busy = self._thread is not None and self._thread.is_alive()
        if busy or now_s - self._reported_s < REPORT_INTERVAL_S:
            return
        self._reported_s = now_s
        self._thread = threading.Thread(target=self._record.report_no_space, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the last report is written."""
        if self._thread is not None:
            self._thread.join()
