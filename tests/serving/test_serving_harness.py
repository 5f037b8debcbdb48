# SPDX-License-Identifier: Apache-2.0
"""The server harness of demo, benchmarks and end-to-end tests, against a stand-in for vLLM."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.serving import (
    LOAD_BYTES,
    Metrics,
    Server,
    ServerOptions,
    ServingError,
    group_members,
    kv_files,
    length_above_chunks,
)

FAKE = Path(__file__).with_name("fake_vllm.py")
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The stand-in, run by this interpreter."""
    launcher = tmp_path / "vllm"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    launcher.chmod(0o755)
    return launcher


def options(program: Path, mode: str = "", **env: str) -> ServerOptions:
    return ServerOptions(
        model=program.parent / "model",
        log=program.parent / "logs" / "server.log",
        env={"FAKE_MODE": mode, **env},
        program=program,
        start_deadline_s=20.0 if mode != "hang" else 0.5,
        stop_deadline_s=20.0 if mode != "stubborn" else 0.5,
    )


def test_a_completion_carries_tokens_logprobs_cached_tokens_and_times(program: Path) -> None:
    with Server(options(program)) as server:
        answer = server.complete([5, 6, 7], 2, logprobs=True)
    assert (answer.text, answer.token_ids, answer.logprobs) == ("ab", (1, 2), (-0.5, -1.5))
    assert (answer.prompt_tokens, answer.cached_tokens) == (3, 2)
    assert 0 < answer.ttft_s <= answer.total_s


def test_an_error_event_in_the_stream_is_raised(program: Path) -> None:
    with (
        Server(options(program)) as server,
        pytest.raises(ServingError, match="no tokens asked for"),
    ):
        server.complete([1], 0)


def test_stop_ends_the_children_too(program: Path) -> None:
    with Server(options(program)) as server:
        members = server.process_ids
    assert len(members) == 2
    assert group_members(members[0]) == []


def test_a_server_that_ignores_sigterm_is_killed(program: Path) -> None:
    with Server(options(program, "stubborn")) as server:
        members = server.process_ids
    assert members
    assert group_members(members[0]) == []


def test_an_exception_in_the_block_leaves_no_process(program: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Server(options(program)) as server:
        group = server.process_ids[0]
        raise KeyboardInterrupt
    assert group_members(group) == []


def test_a_server_that_dies_is_reported_with_its_log(program: Path) -> None:
    with pytest.raises(ServingError, match=r"(?s)exit status 3.*reason 42"):
        Server(options(program, "die")).__enter__()


def test_a_start_that_takes_too_long_is_given_up_and_leaves_no_process(program: Path) -> None:
    server = Server(options(program, "hang"))
    with pytest.raises(ServingError, match="not ready within"):
        server.__enter__()
    assert server.process_ids == []


def test_a_missing_program_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="make env"):
        Server(options(tmp_path / "vllm")).__enter__()


def test_killing_the_owner_ends_the_server(program: Path) -> None:
    """kill -9 runs no cleanup; the parent-death signal has to do it."""
    script = (
        "import sys; from pathlib import Path; sys.path.append(sys.argv[1])\n"
        "from scripts.serving import Server, ServerOptions\n"
        "program = Path(sys.argv[2])\n"
        "options = ServerOptions(program, program.with_name('log'), program=program)\n"
        "with Server(options) as server:\n"
        "    print(server.process_ids[0], flush=True); sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(REPOSITORY), str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    leader = int(owner.stdout.readline())
    handle = os.pidfd_open(leader)
    owner.kill()
    owner.communicate()
    ended = has_ended(handle)
    for orphan in group_members(leader):
        os.kill(orphan, signal.SIGKILL)
    assert ended


def has_ended(pidfd: int, seconds: float = 20.0) -> bool:
    """Whether the process behind `pidfd` ends within `seconds`."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(pidfd)


def test_wait_idle_returns_once_nothing_is_pending_and_the_files_are_there(
    program: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    chunk = root / "model" / "rank-0000" / "abc" / "abcdef.kv"
    chunk.parent.mkdir(parents=True)
    chunk.touch()
    with Server(options(program)) as server:
        server.wait_idle(root, files=1)
        with pytest.raises(ServingError, match="0 chunks pending, 1 files of 2"):
            server.wait_idle(root, files=2, deadline_s=0.2)


def test_wait_idle_says_how_many_stores_are_pending(program: Path, tmp_path: Path) -> None:
    with (
        Server(options(program, FAKE_PENDING="3")) as server,
        pytest.raises(ServingError, match="3 chunks pending"),
    ):
        server.wait_idle(tmp_path, deadline_s=0.2)


def test_metrics_are_summed_by_name_and_labels(program: Path) -> None:
    with Server(options(program)) as server:
        metrics = server.metrics()
    assert metrics.total(LOAD_BYTES) == 12
    assert metrics.total(LOAD_BYTES, engine="1") == 5
    assert metrics.total("no such metric") == 0
    assert metrics.by(LOAD_BYTES, "engine") == {"0": 7, "1": 5}


def test_metrics_keep_every_label_set() -> None:
    metrics = Metrics.parse('# TYPE a counter\na_total{x="1"} 1\na_total{x="2"} 2\n')
    assert metrics["a_total"] == {frozenset({("x", "1")}): 1.0, frozenset({("x", "2")}): 2.0}


@pytest.mark.parametrize(
    ("asked", "length"), [(7500, 7440), (7440, 7440), (272, 272), (1, 272), (399, 272), (401, 528)]
)
def test_lengths_are_just_above_a_whole_number_of_chunks(asked: int, length: int) -> None:
    assert length_above_chunks(asked) == length


def test_only_published_chunks_are_counted(tmp_path: Path) -> None:
    for name in ("b.kv", "a.kv", "c.kv.tmp", "identity.json"):
        (tmp_path / name).touch()
    assert [path.name for path in kv_files(tmp_path)] == ["a.kv", "b.kv"]
