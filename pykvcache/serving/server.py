# SPDX-License-Identifier: Apache-2.0
"""A real ``vllm serve`` under control, for whatever measures or tests one.

:class:`Server` starts it as the leader of a process group of its own and ends that group, and
nothing else, whatever happens: at the end of its ``with`` block, on an exception or Ctrl-C while
it starts, and (through the parent-death signal) when this process is killed. Engine processes are
members of the group, so none is left behind.

Every duration is in seconds of ``time.perf_counter``. A TTFT runs from the moment before the
request is written to the socket until the first streamed event that carries a token.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

import httpx

from pykvcache.config import environment_options
from pykvcache.layout import QUARANTINE, SUFFIX
from pykvcache.serving.answers import Answer, Completion, Metrics, ServingError

STORES_PENDING = "vllm:kv_offload_stores_pending"
"""Gauge: chunks whose store was accepted and has not ended yet."""

LOAD_BYTES = "vllm:kv_offload_load_bytes_total"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"

START_DEADLINE_S = 300.0
"""A start takes 20 to 40 s on two cores; a loaded machine gets several times that."""
STOP_DEADLINE_S = 30.0
"""vLLM ends its engine within a few seconds of SIGTERM; after this the group is killed."""
KILL_DEADLINE_S = 10.0
"""SIGKILL takes a moment to free gigabytes of memory."""
REQUEST_DEADLINE_S = 600.0
RESET_DEADLINE_S = 30.0
POLL_S = 0.1
LOG_TAIL_LINES = 30

_PR_SET_PDEATHSIG = 1  # prctl(2)
_prctl = ctypes.CDLL(None).prctl


@dataclass(frozen=True)
class ServerOptions:
    """How to serve.

    Attributes:
        model: the checkpoint's directory, or a name on a hub.
        log: file that takes the server's output; replaced at every start.
        args: follow `vllm serve MODEL`.
        env: laid over this process's environment.
        program: what is run as `vllm`; None for the one next to this interpreter.
        start_deadline_s, stop_deadline_s: how long a start or an orderly end may take.
    """

    FLAGS: ClassVar[Sequence[str]] = ()
    """Precede ``args``."""
    ENVIRONMENT: ClassVar[Mapping[str, str]] = {}
    """Under ``env``."""

    model: Path | str
    log: Path
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    program: Path | None = None
    start_deadline_s: float = START_DEADLINE_S
    stop_deadline_s: float = STOP_DEADLINE_S


class Server:
    """`vllm serve` for the length of a `with` block."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.port = _free_port()
        self.start_s = math.nan
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=httpx.Timeout(REQUEST_DEADLINE_S, connect=10.0),
            trust_env=False,
        )

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        started = time.perf_counter()
        self.options.log.parent.mkdir(parents=True, exist_ok=True)
        with self.options.log.open("wb") as log:
            self._process = subprocess.Popen(
                _serve_command(self.options, self.port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._wait_healthy(started + self.options.start_deadline_s)
        self.start_s = time.perf_counter() - started

    def _wait_healthy(self, deadline: float) -> None:
        while not self.healthy():
            self.require_alive()
            if time.perf_counter() > deadline:
                limit_s = self.options.start_deadline_s
                raise ServingError(self._with_log(f"vllm serve not ready within {limit_s:.0f} s"))
            time.sleep(POLL_S)

    def healthy(self) -> bool:
        """Whether /health answers 200 now."""
        try:
            return self._client.get("/health", timeout=5.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def require_alive(self) -> None:
        """Raise ServingError with the log's end when the process has ended."""
        status = self._process.poll() if self._process else None
        if status is not None:
            raise ServingError(self._with_log(f"vllm serve ended with exit status {status}"))

    def _with_log(self, message: str) -> str:
        return f"{message}; the end of its log, {self.options.log}:\n{log_tail(self.options.log)}"

    def stop(self) -> None:
        """End the server and every process of its group; returns when none is left."""
        self._client.close()
        process, self._process = self._process, None
        if process is None:
            return
        group, limit_s = process.pid, self.options.stop_deadline_s
        try:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
                # The engine's processes notice that their parent is gone and end a little later.
                _wait_until(lambda: not group_members(group), seconds=limit_s)
        finally:
            # Also after a second Ctrl-C during the wait. A group's id is not reused while it has
            # members, so this signals nobody else.
            if group_members(group):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            process.wait()
            _wait_until(lambda: not group_members(group), seconds=KILL_DEADLINE_S)

    def kill(self) -> None:
        """End every process of the group as a crash would, without a chance to clean up."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def process_ids(self) -> list[int]:
        """The live processes of the server's group."""
        return group_members(self._process.pid) if self._process else []

    def complete(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int = 16,
        *,
        logprobs: bool = False,
        temperature: float = 0.0,
        transfer: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Stream one completion of exactly `max_tokens` tokens; `transfer` is sent as vLLM's
        `kv_transfer_params`.

        Raises:
            ServingError: the request failed or the server died.
        """
        body = {
            "model": SERVED_NAME,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "logprobs": 0 if logprobs else None,
            "return_token_ids": True,
            "kv_transfer_params": transfer,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            return self._stream(json.dumps(body))
        except httpx.HTTPError as error:
            self.require_alive()
            raise ServingError(self._with_log(f"the request failed: {error!r}")) from error

    def _stream(self, body: str) -> Completion:
        answer = Answer()
        headers = {"Content-Type": "application/json"}
        started = time.perf_counter()
        with self._client.stream("POST", "/v1/completions", content=body, headers=headers) as reply:
            if reply.status_code != httpx.codes.OK:
                reply.read()
                raise ServingError(f"HTTP {reply.status_code}: {reply.text[:500]}")
            for line in reply.iter_lines():
                now = time.perf_counter()
                if line.startswith("data: ") and line != "data: [DONE]":
                    answer.add(json.loads(line.removeprefix("data: ")), now)
        return answer.completed(started, time.perf_counter())

    def metrics(self) -> Metrics:
        """Read /metrics now."""
        return Metrics.parse(self._client.get("/metrics").raise_for_status().text)

    def configuration(self) -> Mapping[str, Any]:
        """vLLM's configuration as JSON (needs VLLM_SERVER_DEV_MODE=1)."""
        reply = self._client.get("/server_info", params={"config_format": "json"})
        found: Mapping[str, Any] = reply.raise_for_status().json()["vllm_config"]
        return found

    def reset_prefix_cache(self) -> None:
        """Forget every block in memory (needs VLLM_SERVER_DEV_MODE=1); the files stay."""

        def forgotten() -> bool:
            reply = self._client.post("/reset_prefix_cache").raise_for_status()
            return bool(reply.json()["success"])

        # Refused while blocks are held, such as by a store that has not ended.
        if not _wait_until(forgotten, seconds=RESET_DEADLINE_S):
            raise ServingError("blocks stay in use: the prefix cache could not be reset")

    def wait_idle(self, root: Path, *, files: int | None = None, deadline_s: float = 120.0) -> None:
        """Wait until the stores have drained: none pending, and the files under `root` stand still.

        Args:
            root: where the backend keeps its files.
            files: how many are expected in the end; None waits for any stable number.
            deadline_s: give up after this long.

        Raises:
            ServingError: not drained in time; the message says what was still missing.
        """
        watch = _StoreWatch(self, root, files)
        if not _wait_until(watch.drained, seconds=deadline_s):
            raise ServingError(f"stores not drained within {deadline_s:.0f} s: {watch.state()}")


SERVED_NAME = "model"


class _StoreWatch:
    """Decides over successive readings whether stores have drained."""

    # The gauge is refreshed by engine steps only, so one reading of 0 may be from before the stores
    # were handed over: the same file count must be seen this many times in a row as well.
    STABLE_READINGS = 5

    def __init__(self, server: Server, root: Path, files: int | None) -> None:
        self._server = server
        self._root = root
        self._expected = files
        self._files = -1
        self._stable = 0
        self._pending = math.nan

    def drained(self) -> bool:
        self._server.require_alive()
        self._pending = self._server.metrics().total(STORES_PENDING)
        files = len(kv_files(self._root))
        self._stable = self._stable + 1 if files == self._files else 0
        self._files = files
        if self._pending > 0:
            return False
        if self._expected is not None:
            return files >= self._expected
        return self._stable >= self.STABLE_READINGS

    def state(self) -> str:
        expected = "any stable number" if self._expected is None else self._expected
        return f"{self._pending:.0f} chunks pending, {self._files} files of {expected}"


def kv_files(root: Path) -> list[Path]:
    """The published chunk files under `root`, sorted by path; not those that were put aside."""
    files = root.rglob(f"*{SUFFIX}")
    return sorted(file for file in files if file.parent.name != QUARANTINE)


def log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last `lines` lines of `log`."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error})"


def _serve_command(options: ServerOptions, port: int) -> list[str]:
    vllm = options.program or Path(sys.executable).with_name("vllm")
    if not vllm.is_file():
        raise ServingError(f"there is no {vllm}: install vLLM there; in a checkout `make env`")
    command = [str(vllm), "serve", str(options.model), *options.FLAGS, *options.args]
    # Of a flag that is given twice the last one counts.
    command += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    variables = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    if "free_space_min" not in environment_options():
        # What these servers store goes when they have ended, however full the disk is.
        variables["PYKVCACHE_FREE_SPACE_MIN"] = "1GiB"
    variables.update({**options.ENVIRONMENT, **options.env})
    # env(1) becomes the program it runs.
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]


def _die_with_parent() -> None:
    """In the child, before exec: end with SIGTERM when the parent's thread dies, even by kill -9.

    Calls one function that was looked up before the fork, so no lock that another thread of the
    parent held can block it.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def group_members(group: int) -> list[int]:
    """Ids of the live processes (zombies excepted) of process group `group`."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The second field, the command in parentheses, may hold spaces and parentheses itself.
            state, _, process_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(process_group) == group and state not in "ZX":
            members.append(int(entry.name))
    return members


def _wait_until(condition: Callable[[], bool], *, seconds: float) -> bool:
    deadline = time.perf_counter() + seconds
    while not condition():
        if time.perf_counter() > deadline:
            return False
        time.sleep(POLL_S)
    return True


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit inside the block: `with Server` blocks clean up."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, action in previous.items():
            signal.signal(number, action)
