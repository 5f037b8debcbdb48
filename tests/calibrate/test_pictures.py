# SPDX-License-Identifier: Apache-2.0
"""What a calibration says about loading, in numbers and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykvcache.calibrate.frontier import (
    break_even_share,
    bytes_per_token,
    lengths_between,
    needed_bandwidth,
    speedup,
)
from pykvcache.calibrate.journal import Journal
from pykvcache.calibrate.pictures import draw
from pykvcache.calibrate.plan import Effort
from pykvcache.calibrate.run import Calibrator, Request
from pykvcache.calibrate.server_options import parse_options
from pykvcache.errors import ConfigError
from pykvcache.gate.calibration import Calibration
from tests.calibrate.fake_serving import (
    BANDWIDTH,
    BYTES_PER_TOKEN,
    LOAD_S,
    MACHINE,
    Fleet,
    Quiet,
    compute_s,
    load_s,
)


def calibration_of(root: Path, *tiers: str) -> Calibration:
    effort = Effort(tokens_max=2100, per_octave=1, repeats=1, context_repeats=1)
    request = Request("small", parse_options([]), root, effort, tiers)
    with Journal(request.journal) as journal:
        calibrator = Calibrator(request, MACHINE, Fleet().serve, Quiet())
        return Calibration(calibrator.measure(journal))


@pytest.fixture
def calibration(tmp_path: Path) -> Calibration:
    return calibration_of(tmp_path, "disk", "dram")


def test_the_speedup_is_that_of_the_machine(calibration: Calibration) -> None:
    assert bytes_per_token(calibration) == BYTES_PER_TOKEN
    for prefix in (512, 1024, 2000):
        with_load_s = load_s("disk", prefix * BYTES_PER_TOKEN) + compute_s(prefix, 2064)
        expected = compute_s(0, 2064) / with_load_s
        assert speedup(calibration, "disk", 2064, prefix) == pytest.approx(expected, rel=0.03)


def test_break_even_is_where_a_load_takes_what_it_saves(calibration: Calibration) -> None:
    """The fixed part of a load is worth a few tokens here, of which each saves 1.95 ms."""
    share = break_even_share(calibration, "disk", 2064)
    saved_s = 0.002 - BYTES_PER_TOKEN / BANDWIDTH["disk"]
    assert share is not None
    assert share * 2064 == pytest.approx(LOAD_S / saved_s, abs=3)


def test_where_no_load_is_worth_it_there_is_no_break_even(calibration: Calibration) -> None:
    assert break_even_share(calibration, "disk", 2) is None


def test_the_needed_bandwidth_is_bytes_over_saved_time(calibration: Calibration) -> None:
    saved_s = compute_s(0, 2064) - compute_s(2063, 2064)
    expected = 2063 * BYTES_PER_TOKEN / saved_s
    assert needed_bandwidth(calibration, 2064) == pytest.approx(expected, rel=0.03)


def test_lengths_are_geometric_with_both_ends() -> None:
    assert lengths_between(128, 2048, 5) == [128, 256, 512, 1024, 2048]


@pytest.mark.parametrize("tiers", [("disk",), ("disk", "dram")])
def test_both_pictures_are_drawn_beside_the_file(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    written = draw(calibration_of(tmp_path, *tiers), tmp_path / "some.json")
    assert [path.name for path in written] == ["some.frontier.png", "some.bandwidth.png"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000


def test_a_picture_that_cannot_be_written_is_named(
    calibration: Calibration, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"other.some.frontier.png' cannot be written"):
        draw(calibration, tmp_path / "other" / "some.json")
