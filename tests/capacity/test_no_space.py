# SPDX-License-Identifier: Apache-2.0
"""Word of writes that found no room."""

from __future__ import annotations

import os
from pathlib import Path

from pykvcache.capacity.no_space import NoSpaceReporter
from pykvcache.capacity.record import Record


def test_word_is_left_at_most_once_a_second(tmp_path: Path) -> None:
    now = [0.0]
    record = Record(tmp_path)
    reporter = NoSpaceReporter(tmp_path, clock=lambda: now[0])
    assert record.no_space_at_ns() == 0
    for moment, reported in ((0.0, True), (0.9, False), (1.0, True)):
        now[0] = moment
        reporter.report()
        reporter.join()
        assert (record.no_space_at_ns() > 1) == reported, moment
        os.utime(tmp_path / ".no-space", ns=(1, 1))


def test_a_root_that_is_gone_is_nobodys_failure(tmp_path: Path) -> None:
    reporter = NoSpaceReporter(tmp_path / "gone")
    reporter.report()
    reporter.join()
