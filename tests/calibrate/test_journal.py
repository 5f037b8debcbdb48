# SPDX-License-Identifier: Apache-2.0
"""What is kept of an interrupted calibration."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykvcache.calibrate.journal import Journal
from pykvcache.errors import ConfigError
from pykvcache.gate.calibration import Fingerprint, Sample
from tests.calibrate.fake_serving import MACHINE

FINGERPRINT = Fingerprint(machine=MACHINE, model={"model": "small"})
SAMPLE = Sample(kind="compute", context=0, tokens=272, seconds=0.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Journal(tmp_path / "some" / "journal.jsonl") as journal:
        journal.begin(FINGERPRINT)
        journal.add("first", [SAMPLE, SAMPLE])
        journal.add("second", [])
        return journal.path


def test_what_was_added_is_there_again(path: Path) -> None:
    with Journal(path) as journal:
        assert journal.fingerprint == FINGERPRINT
        assert "first" in journal and "second" in journal and "third" not in journal
        assert list(journal.samples()) == [SAMPLE, SAMPLE]
        journal.begin(FINGERPRINT)
        journal.add("third", [SAMPLE])
    with Journal(path) as journal:
        assert len(journal) == 3


def test_a_line_cut_short_is_measured_again(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])
    with Journal(path) as journal:
        assert "second" not in journal
        journal.add("second", [SAMPLE])
    with Journal(path) as journal:
        assert len(journal) == 2


def test_two_at_once_are_refused(path: Path) -> None:
    with Journal(path), pytest.raises(ConfigError, match="another calibration is writing"):
        Journal(path)


def test_another_file_is_refused_and_named(path: Path) -> None:
    path.write_text(path.read_text().replace('"seconds":0.5', '"seconds":-1', 1))
    with pytest.raises(ConfigError, match=r"line 2: is not of a calibration"):
        Journal(path)
    path.write_text("some notes\n")
    with pytest.raises(ConfigError, match=r"line 1: is not of a calibration"):
        Journal(path)


def test_a_place_that_cannot_be_written_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: File exists"):
        Journal(path / "journal.jsonl")
