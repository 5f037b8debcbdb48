# SPDX-License-Identifier: Apache-2.0
"""Two servers on one root, with faults that come and go and servers that are killed.

    python -m benchmarks.soak --minutes 10 --json FILE

The root may hold a fifth of what the clients ask for, the servers' memory about as much, so
that everything is stored, evicted and loaded all the time. Files are damaged underneath
(:mod:`benchmarks.soak_faults`), each server is killed with SIGKILL now and then, and every
answer is compared with that of a server without this backend (float32, greedy).

It is no speed that is measured. The report counts what must not be: wrong outputs, engines
that died of themselves, bytes above the capacity beyond one chunk for each server, and what was
left behind at the end (slots, queued chunks, descriptors).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.soak_faults import Storm
from scripts.model import ensure_model
from scripts.serving import (
    STORES_PENDING,
    Metrics,
    Prompts,
    Server,
    ServerOptions,
    ServingError,
    ending_on_signals,
)

SERVERS = 2
CLIENTS = 3
"""For each server."""
CHUNKS = 3
TOKENS_PER_CHUNK = 256
PROMPT_TOKENS = CHUNKS * TOKENS_PER_CHUNK + 16
PROMPTS = 24
ANSWER_TOKENS = 6
CHUNK_FILE_BYTES = TOKENS_PER_CHUNK * 30 * 2 * 3 * 64 * 4 + 4096
"""SmolLM2-135M in float32: layers, keys and values, heads, elements, bytes; and the trailer."""
CAPACITY = PROMPTS * CHUNKS * CHUNK_FILE_BYTES // 5
GPU_BLOCKS = 28
"""3,584 tokens: a fifth of the prompts'."""
FIRST_SEED = 9000
KILL_APART_S = (60.0, 150.0)
WATCH_S = 0.1
IDLE_DEADLINE_S = 120.0
DEV_SHM = Path("/dev/shm")

FAILURES = "vllm:kv_offload_chunk_failures_total"
HITS = "vllm:kv_offload_load_hits_total"
EVICTED = "vllm:kv_offload_evicted_files_total"
GONE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_offload_pool_slots_in_use",
    "vllm:kv_offload_pool_slots_staged",
    "vllm:kv_offload_queue_chunks",
    STORES_PENDING,
)
"""Gauges that are 0 when nothing is left."""


@dataclass
class Tally:
    """What has happened so far; any thread adds to it."""

    requests: int = 0
    wrong_outputs: int = 0
    failed_requests: int = 0
    engine_deaths: int = 0
    kills: int = 0
    leaks: int = 0
    details: list[str] = field(default_factory=list)
    chunk_failures: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    evicted_files: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_metrics(self, metrics: Metrics) -> None:
        """A server's counters, before it ends."""
        with self.lock:
            self.chunk_failures.update(
                {name: int(count) for name, count in metrics.by(FAILURES, "reason").items()}
            )
            self.hits.update({name: int(count) for name, count in metrics.by(HITS, "tier").items()})
            self.evicted_files += int(metrics.total(EVICTED))


class Watch:
    """A thread that measures how much is in the root."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.most = 0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(WATCH_S):
            self.most = max(self.most, _bytes_below(str(self._root)))


def _bytes_below(directory: str) -> int:
    """Of all files in it, but for what a fault has moved away."""
    total = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith("-away"):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    total += _bytes_below(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_size
    except OSError:  # removed meanwhile
        pass
    return total


class Life:
    """One server, started again whenever it has ended, and its clients."""

    def __init__(
        self,
        options: ServerOptions,
        prompts: Sequence[Sequence[int]],
        expected: Sequence[tuple[int, ...]],
        tally: Tally,
        seed: int,
    ) -> None:
        self._options = options
        self._prompts = prompts
        self._expected = expected
        self._tally = tally
        self._source = random.Random(seed)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end(self) -> None:
        """No more kills; look for what is left, and end the server."""
        self._ending.set()

    def join(self) -> None:
        """Wait until the server has ended."""
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._live()
            except ServingError as error:
                with self._tally.lock:
                    self._tally.engine_deaths += 1
                    self._tally.details.append(str(error))

    def _live(self) -> None:
        """From a start to a kill, or to the end."""
        with Server(self._options) as server:
            server.complete(self._prompts[0], ANSWER_TOKENS)
            descriptors = _descriptors(server)
            killed = threading.Event()
            resting = threading.Event()
            clients = [
                threading.Thread(
                    target=self._client,
                    args=(server, killed, resting, random.Random(self._source.random())),
                    daemon=True,
                )
                for _ in range(CLIENTS)
            ]
            for client in clients:
                client.start()
            ended = self._ending.wait(self._source.uniform(*KILL_APART_S))
            self._tally.add_metrics(server.metrics())
            if not ended:
                killed.set()
                server.kill()
                with self._tally.lock:
                    self._tally.kills += 1
            resting.set()
            for client in clients:
                client.join()
            if ended:
                self._look_for_leaks(server, descriptors)

    def _client(
        self,
        server: Server,
        killed: threading.Event,
        resting: threading.Event,
        source: random.Random,
    ) -> None:
        while not resting.is_set():
            number = source.randrange(len(self._prompts))
            try:
                answer = server.complete(self._prompts[number], ANSWER_TOKENS)
            except (ServingError, httpx.HTTPError) as error:
                if killed.is_set():
                    return
                with self._tally.lock:
                    self._tally.failed_requests += 1
                    self._tally.details.append(str(error))
                if not server.process_ids:
                    return
                continue
            with self._tally.lock:
                self._tally.requests += 1
                if answer.token_ids != self._expected[number]:
                    self._tally.wrong_outputs += 1
                    self._tally.details.append(f"prompt {number}: {answer.token_ids}")

    def _look_for_leaks(self, server: Server, descriptors: int) -> None:
        deadline = time.monotonic() + IDLE_DEADLINE_S
        left: dict[str, float] = {"unknown": 1.0}
        while left and time.monotonic() < deadline:
            server.complete(self._prompts[0], 1)  # gauges follow the engine's steps
            metrics = server.metrics()
            left = {name: total for name in GONE if (total := metrics.total(name))}
        more = max(_descriptors(server) - descriptors, 0)
        with self._tally.lock:
            self._tally.leaks += len(left) + more
            if left or more:
                self._tally.details.append(f"left: {left}, {more} descriptors")


def _descriptors(server: Server) -> int:
    """Open files, rings, events and pipes of all processes; sockets come and go with clients."""
    count = 0
    for process in server.process_ids:
        folder = Path(f"/proc/{process}/fd")
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            try:
                count += not os.readlink(folder / name).startswith("socket:")
            except OSError:  # closed meanwhile
                continue
    return count


def server_options(root: Path, log: Path) -> ServerOptions:
    """A server on the root, with little memory."""
    extra = {"root": str(root), "capacity": CAPACITY, "free_space_min": 0}
    return ServerOptions(
        ensure_model(),
        log,
        [
            "--kv-offloading-backend=pykvcache",
            "--kv-offloading-size=0.25",
            f"--kv-transfer-config={json.dumps({'kv_connector_extra_config': extra})}",
            "--dtype=float32",
            "--max-model-len=2048",
            "--max-num-seqs=4",
            f"--num-gpu-blocks-override={GPU_BLOCKS}",
        ],
        {"VLLM_CPU_KVCACHE_SPACE": "1"},
    )


def right_answers(directory: Path, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Those of a server without this backend."""
    options = ServerOptions(
        ensure_model(),
        directory / "logs" / "plain.log",
        ["--dtype=float32", "--max-model-len=2048"],
        {"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    with Server(options) as server:
        for prompt in prompts:
            yield server.complete(prompt, ANSWER_TOKENS).token_ids


@contextmanager
def shared_memory_kept() -> Iterator[None]:
    """vLLM's processes cannot remove their shared memory when they are killed: do it for them."""
    before = set(os.listdir(DEV_SHM))
    try:
        yield
    finally:
        for name in set(os.listdir(DEV_SHM)) - before:
            (DEV_SHM / name).unlink(missing_ok=True)


def soak(directory: Path, minutes: float, seed: int, progress: Progress) -> dict[str, Any]:
    """Run it, and report."""
    root = directory / "soak-root"
    shutil.rmtree(root, ignore_errors=True)
    maker = Prompts(ensure_model())
    prompts = [maker.of(PROMPT_TOKENS, FIRST_SEED + number) for number in range(PROMPTS)]
    task = progress.add_task("answers without the backend", total=len(prompts))
    expected = []
    for answer in right_answers(directory, prompts):
        expected.append(answer)
        progress.advance(task)
    tally, watch, storm = Tally(), Watch(root), Storm(root, seed)
    lives = [
        Life(
            server_options(root, directory / "logs" / f"soak-{number}.log"),
            prompts,
            expected,
            tally,
            seed + number,
        )
        for number in range(SERVERS)
    ]
    task = progress.add_task("soaking", total=None)
    for thread in (*lives, watch, storm):
        thread.start()
    end = time.monotonic() + 60 * minutes
    while (left_s := end - time.monotonic()) > 0:
        text = (
            f"soaking: {tally.requests} requests, {tally.kills} kills, {storm.done.total()} faults"
        )
        progress.update(task, description=text)
        time.sleep(min(1.0, left_s))
    storm.stop()
    for life in lives:
        life.end()
    for life in lives:
        life.join()
    watch.stop()
    shutil.rmtree(root, ignore_errors=True)
    over = watch.most - CAPACITY
    return {
        "requests": tally.requests,
        "wrong_outputs": tally.wrong_outputs,
        "engine_deaths": tally.engine_deaths,
        "bytes_over_capacity_max": max(0, over - SERVERS * CHUNK_FILE_BYTES),
        "leaks": tally.leaks,
        "failed_requests": tally.failed_requests,
        "kills": tally.kills,
        "faults": dict(sorted(storm.done.items())),
        "chunk_failures": {name: n for name, n in sorted(tally.chunk_failures.items()) if n},
        "chunks_loaded": dict(sorted(tally.hits.items())),
        "evicted_files": tally.evicted_files,
        "capacity_bytes": CAPACITY,
        "root_bytes_max": watch.most,
        "minutes": minutes,
        "details": tally.details[:20],
    }


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the report goes.")] = None,
    minutes: Annotated[float, typer.Option(help="Of load.", min=1.0)] = 10.0,
    seed: Annotated[int, typer.Option(help="Of faults and kills.")] = 1,
    directory: Annotated[Path, typer.Option(help="For the KV files.")] = Path("build/bench"),
) -> None:
    """Two servers, one root, faults and kills: count what must not be."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        ending_on_signals(),
        shared_memory_kept(),
        Progress(*columns, console=console) as progress,
    ):
        report = soak(directory.resolve(), minutes, seed, progress)
    table = Table("what", "count")
    for name, value in report.items():
        if name != "details":
            table.add_row(name, str(value))
    console.print(table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    must_be_0 = ("wrong_outputs", "engine_deaths", "bytes_over_capacity_max", "leaks")
    if any(report[name] for name in must_be_0):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
