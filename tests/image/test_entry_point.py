# SPDX-License-Identifier: Apache-2.0
"""The image's entry point and health check, against a `vllm` that only says what it was given."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"
OURS = ["--kv-offloading-backend", "pykvcache"]
Given = Callable[..., list[str]]


@pytest.fixture
def given(tmp_path: Path) -> Given:
    """Runs the entry point; returns the arguments that vllm got."""
    vllm = tmp_path / "bin" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\nexit 7\n")
    vllm.chmod(0o755)

    def run(*arguments: str) -> list[str]:
        environ = {"PATH": f"{vllm.parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            [DOCKER / "pykvcache-serve", *arguments], env=environ, capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (7, b"")
        return done.stdout.decode().split("\0")[:-1]

    return run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["serve", *OURS]),
        (["org/model"], ["serve", "org/model", *OURS]),
        (["m", "--port", "1"], ["serve", "m", *OURS, "--port", "1"]),
        (["--help"], ["serve", *OURS, "--help"]),
        (["--model", "m"], ["serve", *OURS, "--model", "m"]),
        (["m", "--x", 'a "b" $c  d', ""], ["serve", "m", *OURS, "--x", 'a "b" $c  d', ""]),
    ],
)
def test_backend_comes_before_the_users_options(
    given: Given, arguments: list[str], expected: list[str]
) -> None:
    assert given(*arguments) == expected


@pytest.mark.parametrize(
    "line",
    [
        "kv-offloading-backend: native",
        "kv_offloading_backend : lmcache",
        '"kv-offloading-backend": x',
    ],
)
def test_backend_of_a_configuration_file_wins(given: Given, tmp_path: Path, line: str) -> None:
    file = tmp_path / "my config.yaml"
    file.write_text(f"port: 1\n{line}\n")
    arguments = ["m", "--config", str(file)]
    assert given(*arguments) == ["serve", *arguments]


def test_backend_is_chosen_beside_a_file_that_names_none(given: Given, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("# kv-offloading-backend: native\nkv-offloading-size: 4\n")
    assert given("--config", str(file)) == ["serve", *OURS, "--config", str(file)]
    missing = str(tmp_path / "missing.yaml")
    assert given("--config", missing) == ["serve", *OURS, "--config", missing]


def test_vllm_takes_the_users_backend(given: Given, tmp_path: Path) -> None:
    """With vLLM's own parser; given a subcommand, it reads configuration files as `vllm` does."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    top = FlexibleArgumentParser()
    serve = top.add_subparsers(dest="command").add_parser("serve")
    serve.add_argument("model_tag", nargs="?")
    make_arg_parser(serve)

    def backend(*arguments: str) -> str:
        return str(top.parse_args(given(*arguments)).kv_offloading_backend)

    assert backend("m") == backend("m", "--port", "1") == "pykvcache"
    assert backend("m", "--kv-offloading-backend", "native") == "native"
    assert backend("m", "--kv-offloading-backend=native") == "native"
    assert backend("m", "--kv_offloading_backend", "lmcache") == "lmcache"
    file = tmp_path / "config.yaml"
    file.write_text("port: 1\n")
    assert backend("m", "--config", str(file)) == "pykvcache"
    file.write_text("model: m\nkv-offloading-backend: native\n")
    assert backend("--config", str(file)) == "native"


class Front(BaseHTTPRequestHandler):
    """Healthy or not, as the server says."""

    def do_GET(self) -> None:
        self.send_response(self.server.status if self.path == "/health" else 404)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def front() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Front)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def health(port: int) -> subprocess.CompletedProcess[str]:
    environ = {"HEALTH_PORT": str(port), "http_proxy": "http://127.0.0.1:1"}
    command = [sys.executable, str(DOCKER / "pykvcache-health")]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_health_is_what_the_server_answers(front: HTTPServer) -> None:
    front.status = 200  # type: ignore[attr-defined]
    assert health(front.server_port).returncode == 0
    front.status = 503  # type: ignore[attr-defined]
    sick = health(front.server_port)
    assert (sick.returncode, sick.stderr.strip()) == (1, "/health answered 503")


def test_no_server_is_unhealthy(front: HTTPServer) -> None:
    port = front.server_port
    front.server_close()
    gone = health(port)
    assert gone.returncode == 1
    assert gone.stderr.startswith(f"port {port}: ")
