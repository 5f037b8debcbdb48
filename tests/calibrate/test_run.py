# SPDX-License-Identifier: Apache-2.0
"""A whole calibration against a server whose times are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykvcache.calibrate.journal import Journal
from pykvcache.calibrate.plan import Effort
from pykvcache.calibrate.run import Calibrator, Request
from pykvcache.calibrate.server_options import parse_options
from pykvcache.errors import ConfigError
from pykvcache.gate.calibration import Calibration, CalibrationFile, fingerprint_of, speed_settings
from tests.calibrate.fake_serving import (
    CONFIGURATION,
    IDENTITY,
    MACHINE,
    Fleet,
    Quiet,
    compute_s,
    load_s,
)

EFFORT = Effort(tokens_max=2100, per_octave=1, repeats=2, context_repeats=1)


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    return Request(
        "small", parse_options(["--dtype", "float32"]), tmp_path, EFFORT, ["disk", "dram"]
    )


def run(request: Request, fleet: Fleet, progress: Quiet) -> CalibrationFile:
    with Journal(request.journal) as journal:
        return Calibrator(request, MACHINE, fleet.serve, progress).measure(journal)


def test_what_is_measured_predicts_the_machine(request_: Request) -> None:
    content = run(request_, Fleet(), Quiet())
    calibration = Calibration(content)
    assert set(content.f) == {272, 528, 1040, 2064}
    for start, end in ((0, 300), (0, 2064), (256, 2064), (1500, 1800), (2048, 2064)):
        assert calibration.compute_s(start, end) == pytest.approx(compute_s(start, end), rel=0.02)
    for tier in ("disk", "dram"):
        for size in (256_000, 700_000, 2_048_000):
            assert calibration.load_s(tier, size) == pytest.approx(load_s(tier, size), rel=0.02)
        longer_s = calibration.load_s(tier, 8_000_000)
        assert load_s(tier, 8_000_000) <= longer_s
    assert content.error["fitted_max"] < 0.02 < content.error["paper_max"]


def test_the_fingerprint_is_the_servers(request_: Request) -> None:
    expected = fingerprint_of(MACHINE, IDENTITY, speed_settings(CONFIGURATION))
    assert run(request_, Fleet(), Quiet()).fingerprint == expected


def test_progress_ends_where_it_should(request_: Request) -> None:
    progress = Quiet()
    run(request_, Fleet(), progress)
    assert progress.tokens == progress.expected > 0


def test_one_server_keeps_nothing_in_dram_and_the_other_does(request_: Request) -> None:
    fleet = Fleet()
    run(request_, fleet, Quiet())
    assert [options["dram_policy"] for options in fleet.started] == ["none", "lru"]
    assert all(options["preload_lookahead"] == 0 for options in fleet.started)


def test_without_dram_one_server_is_enough(request_: Request) -> None:
    fleet = Fleet()
    request = Request(request_.model, request_.options, request_.root, EFFORT, ["disk"])
    content = run(request, fleet, Quiet())
    assert len(fleet.started) == 1
    assert list(content.tiers) == ["disk"]


def test_nothing_but_the_journal_stays_under_the_root(request_: Request) -> None:
    run(request_, Fleet(), Quiet())
    assert not request_.work.exists()
    assert [path for path in request_.root.rglob("*") if path.is_file()] == [request_.journal]


def test_a_pool_that_is_too_small_is_told(request_: Request) -> None:
    progress = Quiet()
    content = run(request_, Fleet(pool_tokens=600), progress)
    assert content.tiers["dram"].tokens == (272, 528)
    assert len(progress.notes) == 2
    assert "1040 tokens" in progress.notes[0] and "--kv-offloading-size" in progress.notes[0]


@pytest.mark.parametrize("stop_at", ["from disk: 1040", "DRAM: 1040"])
def test_an_interrupted_calibration_goes_on(request_: Request, stop_at: str) -> None:
    progress = Quiet()
    progress.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        run(request_, Fleet(), progress)
    assert not request_.work.exists()
    with Journal(request_.journal) as journal:
        kept = len(journal)
    assert kept
    whole, rest = Fleet(), Fleet()
    again = Quiet()
    content = run(request_, rest, again)
    assert again.tokens == again.expected
    expected = run(
        Request("other", request_.options, request_.root, EFFORT, ["disk", "dram"]), whole, Quiet()
    )
    assert content.f == expected.f and content.tiers == expected.tiers
    assert sum(server.requests for server in rest.servers) < sum(
        server.requests for server in whole.servers
    )


def test_a_journal_of_another_machine_is_refused(request_: Request) -> None:
    run(request_, Fleet(), Quiet())
    other = MACHINE.model_copy(update={"cpus": 64})
    with (
        Journal(request_.journal) as journal,
        pytest.raises(ConfigError, match="another machine or with another model"),
    ):
        Calibrator(request_, other, Fleet().serve, Quiet()).measure(journal)


def test_a_limit_below_a_chunk_is_refused(request_: Request) -> None:
    small = Effort(tokens_max=200, per_octave=1, repeats=1, context_repeats=1)
    request = Request(request_.model, request_.options, request_.root, small, ["disk"])
    with pytest.raises(ConfigError, match="--max-tokens is 200: must be at least 272"):
        run(request, Fleet(), Quiet())
