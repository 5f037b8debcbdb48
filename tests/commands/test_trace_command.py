# SPDX-License-Identifier: Apache-2.0
"""``pykvcache trace``, as people call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pykvcache.trace import Tracer

SECOND_NS = 1_000_000_000


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pykvcache", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    directory = tmp_path / "traces"
    for process, track, name in (
        ("scheduler", "step 1", "forward pass"),
        ("worker-0", "read 1", "read"),
    ):
        tracer = Tracer(directory, process, events_max=10)
        tracer.span(track, name, 5 * SECOND_NS, 6 * SECOND_NS)
        tracer.close()
    return directory


def test_merged_traces_are_one(traces: Path, tmp_path: Path) -> None:
    output = tmp_path / "all.json"
    done = run("trace", "merge", output, traces)
    assert done.returncode == 0, done.stderr
    assert "2 spans" in done.stderr
    events = json.loads(output.read_text())
    assert {event["name"] for event in events if event["ph"] == "X"} == {"forward pass", "read"}


def test_a_picture_is_drawn(traces: Path, tmp_path: Path) -> None:
    output = tmp_path / "timeline.svg"
    done = run("trace", "render", traces, "-o", output)
    assert done.returncode == 0, done.stderr
    picture = output.read_text()
    assert picture.lstrip().startswith("<?xml")
    assert "forward pass" in picture and "worker-0" in picture


def test_tracks_can_be_left_out(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "traces", "worker-0", events_max=10)
    for track in ("read 1", "open 1", "open 2"):
        tracer.span(track, track, 5 * SECOND_NS, 6 * SECOND_NS)
    tracer.close()
    output = tmp_path / "timeline.svg"
    done = run("trace", "render", tmp_path / "traces", "-o", output, "--without", "open")
    assert done.returncode == 0, done.stderr
    assert "read 1" in output.read_text() and "open" not in output.read_text()
    done = run("trace", "render", tmp_path / "traces", "-o", output, "--without", "opens")
    assert done.returncode == 1
    assert "--without is 'opens': must be one of open, read" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{}", "is not a trace"),
        ("[]", "there are no spans"),
        ("[\nnonsense,\n", "there are no spans"),
    ],
)
def test_what_is_no_trace_is_said_in_a_line(
    content: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "some.json"
    if content is not None:
        file.write_text(content)
    done = run("trace", "merge", tmp_path / "out.json", file)
    assert done.returncode == 1
    assert message in done.stderr and str(file) in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.json").exists()


def test_an_empty_moment_is_said(traces: Path, tmp_path: Path) -> None:
    done = run("trace", "render", traces, "-o", tmp_path / "x.png", "--from", "50", "--to", "60")
    assert done.returncode == 1
    assert "no span lies between 50.0 s and 60.0 s" in done.stderr


def test_an_unknown_format_is_said(traces: Path, tmp_path: Path) -> None:
    done = run("trace", "render", traces, "-o", tmp_path / "x.docx")
    assert done.returncode == 1
    assert "x.docx" in done.stderr and "Traceback" not in done.stderr


def test_serving_does_not_import_the_command() -> None:
    code = (
        "import sys, pykvcache.reactor.reactor, pykvcache.measure\n"
        "sys.exit(bool({'typer', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
