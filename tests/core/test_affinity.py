# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pykvcache.reactor import affinity
from pykvcache.reactor.affinity import spread_over_process


def on_one_core(work: Callable[[], None]) -> set[int]:
    """Do the work on a thread that is bound to one core, and return where it may run then."""
    masks = []

    def bound() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        work()
        masks.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    return masks[0]


def test_a_thread_bound_by_its_maker_may_run_where_others_do() -> None:
    assert on_one_core(spread_over_process) == os.sched_getaffinity(0)


def test_threads_that_cannot_be_listed_change_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(affinity, "TASKS", tmp_path / "none")
    assert on_one_core(spread_over_process) == {min(os.sched_getaffinity(0))}
