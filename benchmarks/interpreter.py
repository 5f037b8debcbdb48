# SPDX-License-Identifier: Apache-2.0
"""What the reactor and the engine cost each other through the interpreter they share."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stamper:
    """A pure-Python thread that does nothing but look at the clock.

    It keeps the interpreter busy, as the engine's own Python does, and remembers the
    longest time in which it could not.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="stamper")

    def _run(self) -> None:
        clock = time.perf_counter
        last = clock()
        while not self._stop:
            now = clock()
            if now - last > self.longest_s:
                self.longest_s = now - last
            last = now

    def __enter__(self) -> Stamper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """The interpreter's switch interval, as the worker sets it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def stall_and_slowdown(load: Callable[[], float]) -> tuple[float, float]:
    """Run a saturating load without and with a busy thread.

    Args:
        load: runs it; returns its seconds.

    Returns:
        The longest stall of the busy thread in seconds, and throughput with the busy thread
        over throughput without.
    """
    alone = load()
    with Stamper() as stamper:
        together = load()
    return stamper.longest_s, alone / together
