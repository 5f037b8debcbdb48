# SPDX-License-Identifier: Apache-2.0
"""``pykvcache calibrate``, as people call it, without a server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pykvcache.serving.server
from pykvcache.cli import app
from pykvcache.errors import ConfigError
from pykvcache.gate.calibration import read_calibration
from pykvcache.serving.answers import Completion
from tests.calibrate.fake_serving import FakeServer, Fleet


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    fleet = Fleet()
    monkeypatch.setattr(pykvcache.serving.server, "Server", fleet.serve)
    return fleet


def arguments(root: Path, *more: str) -> list[str]:
    return ["calibrate", "small", "--root", str(root), "--quick", *more]


def test_the_file_and_its_pictures_lie_where_servers_look(fleet: Fleet, tmp_path: Path) -> None:
    more = ["--json", "--dtype", "float32", "-tp", "1"]
    done = CliRunner().invoke(app, arguments(tmp_path, *more))
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    path = tmp_path / "calibrations" / f"{result['digest']}.json"
    assert result["path"] == str(path)
    content = read_calibration(path)
    assert result["samples"] == len(content.samples)
    assert set(result["tiers"]) == {"disk", "dram"}
    assert result["f"].keys() == {"272", "528", "1040", "2064"}
    left = sorted(file.name for file in path.parent.iterdir())
    stem = result["digest"]
    assert left == [f"{stem}.bandwidth.png", f"{stem}.frontier.png", f"{stem}.json"]


def test_people_get_a_table_and_both_errors(fleet: Fleet, tmp_path: Path) -> None:
    output = tmp_path / "mine.json"
    more = ["--no-picture", "--output", str(output), "--max-tokens", "2100", "--tiers", "disk"]
    done = CliRunner().invoke(app, arguments(tmp_path / "root", *more))
    assert done.exit_code == 0, done.output
    assert "2064" in done.stdout and "break-even" in done.stdout
    assert "as in the paper: wrong by" in done.stdout
    assert output.exists() and not list(tmp_path.glob("*.png"))
    assert len(fleet.started) == 1


def test_a_csv_file_is_taken(fleet: Fleet, tmp_path: Path) -> None:
    table = tmp_path / "measured.csv"
    table.write_text("kind,context,tokens,bytes,seconds\ncompute,0,272,,1\ndisk,256,272,9,0.5\n")
    done = CliRunner().invoke(app, arguments(tmp_path, "--from-csv", str(table), "--no-picture"))
    assert done.exit_code == 0, done.output
    assert "272" in done.stdout


def test_interrupted_it_says_how_to_go_on(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = FakeServer.complete

    def interrupt(server: FakeServer, prompt: Sequence[int], max_tokens: int = 16) -> Completion:
        if len(prompt) == 1040:
            raise KeyboardInterrupt
        return complete(server, prompt, max_tokens)

    with monkeypatch.context() as patched:
        patched.setattr(FakeServer, "complete", interrupt)
        done = CliRunner().invoke(app, arguments(tmp_path, "--no-picture"))
    assert done.exit_code == 1
    assert "interrupted: 2 measurements are kept in" in done.stderr
    again = CliRunner().invoke(app, arguments(tmp_path, "--no-picture"))
    assert again.exit_code == 0, again.output
    assert len(list((tmp_path / "calibrations").iterdir())) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--tiers", "dram"], "--tiers is 'dram': must be 'disk' or 'disk,dram'"),
        (["--kv-offloading-backend", "native"], "must be pykvcache"),
        (["--kv-transfer-config", '{"kv_connector_extra_config": {"rot": 1}}'], "'rot'"),
    ],
)
def test_bad_options_are_refused_before_a_server_starts(
    fleet: Fleet, tmp_path: Path, more: list[str], words: str
) -> None:
    done = CliRunner().invoke(app, arguments(tmp_path, *more))
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
    assert not fleet.started


def test_a_root_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "pykvcache", *arguments(tmp_path / "file" / "root")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("pykvcache: option 'root' is")
    assert len(done.stderr.splitlines()) == 1
