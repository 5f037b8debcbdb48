# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` under control: what the demo, the benchmarks and the end-to-end tests share.

`Server` starts `vllm serve` as the leader of a process group of its own and ends that group, and
nothing else, whatever happens: at the end of its `with` block, on an exception or Ctrl-C while it
starts, and (through the parent-death signal) when this process is killed. Engine processes are
members of the group, so none is left behind.

Clocks: every duration is in seconds of `time.perf_counter`. A TTFT runs from the moment before the
request is written to the socket until the first streamed event that carries a token.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

STORES_PENDING = "vllm:kv_offload_stores_pending"
"""Gauge: chunks whose store was accepted and has not ended yet."""

LOAD_BYTES = "vllm:kv_offload_load_bytes_total"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"

FILE_SUFFIX = ".kv"
QUARANTINE = "quarantine"

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


class ServingError(RuntimeError):
    """The server or a request failed; the message says how and quotes the log."""


# -- Prompts ---------------------------------------------------------------------------------------

_VOCABULARY = """
amber anchor answer autumn bakery balance barley basin beacon bridge bronze canal candle carbon
castle cedar cellar chapel cherry circle cloud coast copper coral cotton crystal current desert
dragon eagle echo ember engine fabric falcon feather fern field flame forest fossil fountain
garden glacier granite harbor harvest hazel hill hollow honey horizon island ivory jacket
journey kernel kettle ladder lagoon lantern leather ledger lemon library lily linen marble
market meadow mirror molten morning mountain needle north oak ocean orchard paper path pearl
pebble pepper pilot pine planet plaster pocket pollen powder prairie quarry quartz rain raven
reef ribbon ridge river rocket saddle salt sand scholar season shadow shell shore signal silver
sketch smoke spiral spring station stone storm summit sunset table thread timber tower trail
tunnel valley velvet village violet voyage walnut water wheat willow window winter wire yarn
zenith
"""
_WORDS = tuple(_VOCABULARY.split())


class Prompts:
    """Deterministic token-exact prompts made of plain English-like sentences.

    Sent as token ids, so a prompt has exactly the length asked for and no tokenizer stands between.
    """

    def __init__(self, model_dir: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def of(self, n_tokens: int, seed: int) -> list[int]:
        """`n_tokens` token ids. Prompts of different seeds differ from their first words on, and a
        shorter prompt of the same seed is a prefix of a longer one."""
        source = random.Random(seed)
        text = f"Record {seed} of the archive."
        ids: list[int] = []
        while len(ids) < n_tokens:
            words = [source.choice(_WORDS) for _ in range(source.randint(6, 14))]
            # Sentences are tokenized one by one: what was made stays what it is as more follow.
            ids += self._tokenizer.encode(text, add_special_tokens=False).ids
            text = " The " + " ".join(words) + "."
        return ids[:n_tokens]


def length_above_chunks(n_tokens: int, tokens_per_chunk: int = 256, tail: int = 16) -> int:
    """The length nearest to `n_tokens` that is `tail` tokens above a whole number of chunks.

    At such a length every system has the same short tail to recompute, and what vLLM's in-memory
    prefix cache holds (whole blocks, less the last token) ends exactly where the chunks end.
    """
    chunks = max(1, round((n_tokens - tail) / tokens_per_chunk))
    return chunks * tokens_per_chunk + tail


# -- What a request and /metrics return ------------------------------------------------------------


@dataclass(frozen=True)
class Completion:
    """One answer. `logprobs` holds the chosen token's log-probability for every token."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float


@dataclass
class _Answer:
    """A completion while its events arrive."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    first_token_at: float | None = None

    def add(self, event: Mapping[str, Any], now: float) -> None:
        if "error" in event:
            raise ServingError(f"the server answered with an error: {event['error']}")
        for choice in event.get("choices", ()):
            token_ids = choice.get("token_ids") or ()
            if token_ids and self.first_token_at is None:
                self.first_token_at = now
            self.text.append(choice.get("text") or "")
            self.token_ids += token_ids
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()
        self.usage = event.get("usage") or self.usage

    def completed(self, started: float, now: float) -> Completion:
        if self.first_token_at is None or not self.usage:
            raise ServingError("the server ended the stream without a token or without usage")
        details = self.usage.get("prompt_tokens_details") or {}
        return Completion(
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            prompt_tokens=self.usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
            ttft_s=self.first_token_at - started,
            total_s=now - started,
        )


Labels = frozenset[tuple[str, str]]


class Metrics(dict[str, dict[Labels, float]]):
    """One reading of /metrics: sample name -> labels -> value."""

    @classmethod
    def parse(cls, text: str) -> Metrics:
        metrics = cls()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = frozenset(sample.labels.items())
                metrics.setdefault(sample.name, {})[labels] = sample.value
        return metrics

    def total(self, name: str, **labels: str) -> float:
        """Sum over every sample of `name` that carries `labels`; 0 when there is none."""
        wanted = labels.items()
        return math.fsum(value for key, value in self.get(name, {}).items() if wanted <= key)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums of `name` by the value of `label`."""
        sums: dict[str, float] = {}
        for key, value in self.get(name, {}).items():
            name_of_sum = dict(key).get(label, "")
            sums[name_of_sum] = sums.get(name_of_sum, 0.0) + value
        return sums


# -- The server ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerOptions:
    """How to serve.

    Attributes:
        model: the checkpoint's directory.
        log: file that takes the server's output; replaced at every start.
        args: follow `vllm serve MODEL`.
        env: laid over this process's environment.
        program: what is run as `vllm`; None for the one next to this interpreter.
        start_deadline_s, stop_deadline_s: how long a start or an orderly end may take.
    """

    model: Path
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
                env=_serve_environment(self.options.env),
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
    ) -> Completion:
        """Stream one completion of exactly `max_tokens` tokens.

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
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            return self._stream(json.dumps(body))
        except httpx.HTTPError as error:
            self.require_alive()
            raise ServingError(self._with_log(f"the request failed: {error!r}")) from error

    def _stream(self, body: str) -> Completion:
        answer = _Answer()
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
    files = root.rglob(f"*{FILE_SUFFIX}")
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
        raise ServingError(f"there is no {vllm}: run `make env` and use its .venv.")
    command = [str(vllm), "serve", str(options.model), "--served-model-name", SERVED_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    return [*command, *options.args]


def _serve_environment(overlay: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        # What these servers store goes when they have ended, however full the disk is.
        "PYKVCACHE_FREE_SPACE_MIN": os.environ.get("PYKVCACHE_FREE_SPACE_MIN", "1GiB"),
        **overlay,
    }


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
