# SPDX-License-Identifier: Apache-2.0
"""Measurements from a CSV file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykvcache.calibrate.plan import Effort
from pykvcache.calibrate.run import Calibrator, Request
from pykvcache.calibrate.server_options import parse_options
from pykvcache.calibrate.table import samples_from_csv
from pykvcache.errors import ConfigError
from pykvcache.gate.calibration import Sample
from tests.calibrate.fake_serving import MACHINE, Fleet, Quiet

HEAD = "kind,context,tokens,bytes,seconds\n"
LINES = "compute,0,272,,0.5\ncompute,256,272,0,0.1\ndisk,256,272,1000,0.3\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "measured.csv"
    path.write_text(HEAD + LINES)
    return path


def test_every_line_is_a_sample(path: Path) -> None:
    assert samples_from_csv(path) == [
        Sample(kind="compute", context=0, tokens=272, seconds=0.5),
        Sample(kind="compute", context=256, tokens=272, seconds=0.1),
        Sample(kind="disk", context=256, tokens=272, bytes=1000, seconds=0.3),
    ]


def test_the_columns_may_be_in_any_order(path: Path) -> None:
    path.write_text("seconds,tokens,kind,bytes,context\n0.5, 272,compute,,\n")
    assert samples_from_csv(path)[0].tokens == 272


def test_a_server_tells_whose_they_are(path: Path, tmp_path: Path) -> None:
    effort = Effort(0, 1, 1, 1)
    request = Request("small", parse_options([]), tmp_path, effort, ["disk"])
    fleet = Fleet()
    calibrator = Calibrator(request, MACHINE, fleet.serve, Quiet())
    content = calibrator.take(samples_from_csv(path))
    assert content.tiers["disk"].seconds == pytest.approx((0.2,))
    assert content.fingerprint.model["model"] == "small"
    assert fleet.servers[0].requests == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: the columns are missing: must be kind, context, tokens, bytes, seconds"),
        ("kind,tokens\n", "line 1: the columns are kind, tokens: must be"),
        (HEAD + "tape,0,272,,1\n", "line 2: kind is 'tape': input should be 'compute', 'disk'"),
        (HEAD + LINES + "disk,0,x,9,1\n", "line 5: tokens is 'x': input should be a valid int"),
        (HEAD + "disk,0,9,9,-1\n", "line 2: seconds is '-1': input should be greater than 0"),
        (HEAD + "disk,0,9,9,nan\n", "line 2: seconds is 'nan': input should be"),
        (HEAD + "disk,0,9,,1\n", "line 2: it is"),
        (HEAD + "disk,0,9,9\n", "line 2: must have 5 fields"),
        (HEAD + "disk,0,9,9,1,7\n", "line 2: must have 5 fields"),
    ],
)
def test_a_bad_line_is_named(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        samples_from_csv(path)
    assert words in str(refused.value)


def test_what_cannot_be_read_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        samples_from_csv(path.with_name("other.csv"))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a CSV file in UTF-8"):
        samples_from_csv(path)
