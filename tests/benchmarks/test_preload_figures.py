# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of reading ahead makes of its measurements, and what it runs."""

from __future__ import annotations

import pytest

from benchmarks.preload import QUICK, Case, Run, Samples, all_cases, server_groups


def test_names_say_bandwidth_prefix_and_running_requests() -> None:
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names)) == 16
    assert {"bw100_t7500", "bw200_t4000", "bw0_t7500", "bw0_t7500_seqs2"} <= set(names)
    assert set(QUICK) <= set(names)


def test_figures_are_medians_of_rounds() -> None:
    samples = Samples(
        bytes_used=100,
        on=[Run((1.0, 3.0), 4.0, 100), Run((1.0, 1.0), 2.0, 104), Run((2.0, 2.0), 4.0, 100)],
        off=[Run((4.0, 4.0), 5.0, 100), Run((5.0, 5.0), 8.0, 100), Run((2.0, 2.0), 4.0, 110)],
    )
    report = samples.report()
    assert report["ttft_speedup"] == 2.0
    assert report["ttft_speedup_range"] == [1.0, 5.0]
    assert report["makespan_ratio"] == 0.8
    assert report["read_amplification"] == 1.0
    assert report["read_amplification_range"] == [1.0, 1.04]
    assert report["read_amplification_off"] == 1.0
    assert report["rounds"] == 3


@pytest.mark.parametrize(("by_bandwidth", "groups"), [(False, 2), (True, 8)])
def test_servers_are_shared_by_cases_that_differ_in_nothing_they_are_started_with(
    by_bandwidth: bool, groups: int
) -> None:
    made = server_groups(list(all_cases()), by_bandwidth=by_bandwidth)
    assert len(made) == groups
    for group in made:
        assert len({case.seqs for case in group}) == 1
        if by_bandwidth:
            assert len({case.bandwidth for case in group}) == 1
    assert sorted((case for group in made for case in group), key=Case.__repr__) == sorted(
        all_cases(), key=Case.__repr__
    )
