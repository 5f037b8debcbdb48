# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np

from benchmarks.dram import Samples, plain_copy_s


def test_added_time_is_compared_with_the_copy_of_the_same_round() -> None:
    samples = Samples(
        memory_ttfts_s=[1.0, 1.0, 2.0],
        dram_ttfts_s=[1.5, 1.2, 2.3],
        copies_s=[0.25, 0.2, 0.1],
        bytes_loaded=7,
    )
    report = samples.report()
    assert report["added_vs_copy"] == 2.0
    assert [round(ratio, 6) for ratio in report["added_vs_copy_range"]] == [1.0, 3.0]
    assert report["dram_ttft_s"] == 1.5
    assert report["bytes_loaded"] == 7
    assert report["samples"] == 3


def test_the_copy_copies() -> None:
    source, target = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
    assert plain_copy_s(source, target) >= 0
    assert (target == 1).all()
