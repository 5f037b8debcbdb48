# SPDX-License-Identifier: Apache-2.0
"""`make demo`: a real model answers long prompts cold, restarts, and answers them from disk.

What is measured, for every prompt, in this order:

1. cold: the first request, on a server that has never seen the prompt. Its KV goes to disk.
2. memory: the same request again, answered from vLLM's in-memory prefix cache (on this server once
   its stores have drained, and again after step 3; the median of all of them).
3. disk: after a restart, the first request: its KV comes from the files. Exactly once per prompt.
4. read: the reactor alone reads the same files, with no server running.

The prompts are a few tokens above a whole number of chunks, so that memory and disk recompute the
same short tail. Every server first answers an unrelated short prompt twice, which takes the cost of
a process's first request (allocations, first use of kernels) out of all three measurements alike.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from scripts.model import REPOSITORY, ModelError, ensure_model, run_reporting, shown
from scripts.serving import (
    LOAD_BYTES,
    Prompts,
    Server,
    ServerOptions,
    ServingError,
    ending_on_signals,
    kv_files,
    length_above_chunks,
)

BUILD = REPOSITORY / "build"
TOKENS_PER_CHUNK = 256
MODEL_TOKENS_MAX = 8192
ANSWER_TOKENS = 16
WARM_UP_TOKENS = 272
WARM_UP_SEED = 1_000_000
"""Plus the server's number: the restarted one must not find its warm-up on disk, so that its first
load is a measured one."""
MEMORY_REPEATS = 3
READ_ROUNDS = 5
CPU_KV_CACHE_GIB = 4
"""Room for 90,000 tokens in float32: no prompt of the demo evicts another from memory."""
DISK_NEEDED_BYTES = 4 << 30


class DemoError(RuntimeError):
    """The demo cannot run or shows nothing; the message says what is missing."""


@dataclass
class PromptResult:
    """What was measured for one prompt. Durations in seconds."""

    prompt_tokens: int
    cold_ttft_s: float
    files: list[Path]
    memory_ttfts_s: list[float] = field(default_factory=list)
    disk_ttft_s: float = 0.0
    disk_cached_tokens: int = 0
    bytes_read: int = 0
    read_s: float = 0.0

    def values(self) -> dict[str, Any]:
        memory_ttft_s = statistics.median(self.memory_ttfts_s)
        return {
            "prompt_tokens": self.prompt_tokens,
            "cold_ttft_s": self.cold_ttft_s,
            "disk_ttft_s": self.disk_ttft_s,
            "memory_ttft_s": memory_ttft_s,
            "read_s": self.read_s,
            "speedup": self.cold_ttft_s / self.disk_ttft_s,
            "bytes_read": self.bytes_read,
            "files": len(self.files),
            "disk_cached_tokens": self.disk_cached_tokens,
            "memory_ttfts_s": self.memory_ttfts_s,
        }


class Demo:
    """One run: two servers over one root, and the prompts between them."""

    def __init__(self, model: Path, dtype: str, n_prompts: int, n_tokens: int) -> None:
        self._prompts = Prompts(model)
        self._token_ids = [self._prompts.of(n_tokens, seed) for seed in range(n_prompts)]
        self._root = BUILD / "demo-root"
        self._model = model
        self._dtype = dtype
        self._results: list[PromptResult] = []

    def run(self, progress: Progress) -> list[PromptResult]:
        _empty(self._root)
        task = progress.add_task("starting")
        with self._serve(1, progress, task) as server:
            for number, token_ids in enumerate(self._token_ids, 1):
                self._at(progress, task, number, f"cold ({len(token_ids)} tokens)")
                self._results.append(self._measure_cold(server, token_ids))
                self._at(progress, task, number, "from memory")
                self._measure_memory(server, token_ids, self._results[-1])
        with self._serve(2, progress, task) as server:
            for number, token_ids in enumerate(self._token_ids, 1):
                self._at(progress, task, number, "from disk")
                self._measure_disk(server, token_ids, self._results[number - 1])
                self._measure_memory(server, token_ids, self._results[number - 1])
        for number, result in enumerate(self._results, 1):
            self._at(progress, task, number, "reading its files alone")
            result.read_s = read_seconds(result.files)
        progress.update(task, description="done", completed=1, total=1)
        return self._results

    def _at(self, progress: Progress, task: TaskID, number: int, what: str) -> None:
        _say(progress, task, f"prompt {number} of {len(self._token_ids)}: {what}")

    def _serve(self, number: int, progress: Progress, task: TaskID) -> _WarmServer:
        _say(progress, task, f"server {number} of 2: starting")
        options = ServerOptions(
            model=self._model,
            log=BUILD / "logs" / f"demo-{number}.log",
            args=(
                "--kv-offloading-backend=pykvcache",
                f"--dtype={self._dtype}",
                f"--max-model-len={MODEL_TOKENS_MAX}",
            ),
            env={
                "PYKVCACHE_ROOT": str(self._root),
                "VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB),
            },
        )
        return _WarmServer(options, self._prompts.of(WARM_UP_TOKENS, WARM_UP_SEED + number))

    def _measure_cold(self, server: Server, token_ids: Sequence[int]) -> PromptResult:
        before = set(kv_files(self._root))
        answer = server.complete(token_ids, ANSWER_TOKENS)
        server.wait_idle(self._root, files=len(before) + len(token_ids) // TOKENS_PER_CHUNK)
        files = sorted(set(kv_files(self._root)) - before)
        return PromptResult(answer.prompt_tokens, answer.ttft_s, files)

    def _measure_memory(
        self, server: Server, token_ids: Sequence[int], result: PromptResult
    ) -> None:
        for _ in range(MEMORY_REPEATS):
            result.memory_ttfts_s.append(server.complete(token_ids, ANSWER_TOKENS).ttft_s)

    def _measure_disk(self, server: Server, token_ids: Sequence[int], result: PromptResult) -> None:
        before = server.metrics().total(LOAD_BYTES)
        answer = server.complete(token_ids, ANSWER_TOKENS)
        result.disk_ttft_s = answer.ttft_s
        result.disk_cached_tokens = answer.cached_tokens
        result.bytes_read = int(server.metrics().total(LOAD_BYTES) - before)
        if result.bytes_read == 0 or answer.cached_tokens == 0:
            raise DemoError(
                f"the restarted server read nothing from {self._root} for a prompt it has the "
                f"files of; see {server.options.log}"
            )


def _say(progress: Progress, task: TaskID, description: str) -> None:
    """Show what is being done; a line each where there is no terminal to draw on."""
    progress.update(task, description=description)
    if not progress.console.is_terminal:
        progress.console.print(description)


class _WarmServer(Server):
    """A server that has answered its first requests before the `with` block begins."""

    def __init__(self, options: ServerOptions, warm_up: Sequence[int]) -> None:
        super().__init__(options)
        self._warm_up = warm_up

    def _start(self) -> None:
        super()._start()
        for _ in range(2):  # The second is answered from memory, as the measured ones will be.
            self.complete(self._warm_up, ANSWER_TOKENS)
        self.wait_idle(Path(self.options.env["PYKVCACHE_ROOT"]))


def read_seconds(files: Sequence[Path]) -> float:
    """Seconds in which the reactor alone (no vLLM, no copies) reads `files`: median of 5 rounds."""
    try:
        from pykvcache.measure import read_seconds as measure
    except ImportError as error:
        raise DemoError(f"the reactor cannot be run alone, so read_s is unknown: {error}") from None
    try:
        return measure(files, rounds=READ_ROUNDS)
    except (OSError, ValueError) as error:
        raise DemoError(f"the reactor alone could not read the demo's files: {error}") from error


# -- What has to be there --------------------------------------------------------------------------


def check_environment(model_tokens: int) -> None:
    """Raise DemoError with every reason why the demo cannot run here."""
    problems = []
    if model_tokens + ANSWER_TOKENS > MODEL_TOKENS_MAX:
        problems.append(
            f"--tokens gives prompts of {model_tokens}; the model takes at most "
            f"{MODEL_TOKENS_MAX - ANSWER_TOKENS}."
        )
    if sys.platform != "linux":
        problems.append(f"Linux is needed, this is {sys.platform}.")
    problems += _check_vllm()
    BUILD.mkdir(exist_ok=True)
    free_bytes = shutil.disk_usage(BUILD).free
    if free_bytes < DISK_NEEDED_BYTES:
        problems.append(
            f"{free_bytes >> 20} MiB free under build/, {DISK_NEEDED_BYTES >> 20} MiB needed."
        )
    if problems:
        raise DemoError("\n".join(problems))


def _check_vllm() -> list[str]:
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [f"vllm is not installed in {sys.executable}: run `make env`, use its .venv."]
    if "pykvcache" not in version:
        return [f"vllm {version} in {sys.executable} is not this project's build: run `make env`."]
    return []


def choose_dtype(vllm_version: str, cpuinfo: str) -> str:
    """bfloat16 where this machine multiplies it at speed, else float32.

    Without AVX-512 or AMX, PyTorch's CPU build has no bfloat16 matrix kernel and falls back to a
    scalar loop, seen 70 times slower than float32 on an AVX2-only EPYC.

    Args:
        vllm_version: "cpu" in it marks the CPU build, as for vLLM itself.
        cpuinfo: what /proc/cpuinfo says.
    """
    if "cpu" not in vllm_version:
        return "bfloat16"
    fast = {"avx512bw", "amx_bf16", "bf16"}
    return "bfloat16" if fast & set(cpuinfo.split()) else "float32"


def _empty(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


# -- What is shown ---------------------------------------------------------------------------------


def summary(results: Sequence[PromptResult], dtype: str) -> dict[str, Any]:
    """Medians over the prompts, the values of each, and what they were measured on."""
    prompts = [result.values() for result in results]
    keys = ("prompt_tokens", "cold_ttft_s", "disk_ttft_s", "memory_ttft_s", "read_s", "speedup")
    medians = {
        key: statistics.median(prompt[key] for prompt in prompts)
        for key in (*keys, "bytes_read", "files")
    }
    added_s = medians["disk_ttft_s"] - medians["memory_ttft_s"]
    return {
        **medians,
        "added_s": added_s,
        "added_over_read": added_s / medians["read_s"],
        "dtype": dtype,
        "vllm": importlib.metadata.version("vllm"),
        "machine": platform.platform(),
        "prompts": prompts,
    }


def table_of(demo: dict[str, Any]) -> Table:
    """The demo's result, a row per prompt and one of medians."""
    table = Table(title="The same prompts, cold and from disk after a restart")
    headings = ("", "tokens", "cold\nTTFT", "memory\nTTFT", "TTFT\nfrom disk", "speed-up")
    for heading in (*headings, "bytes\nread", "files"):
        table.add_column(heading, justify="right")
    for number, prompt in enumerate(demo["prompts"], 1):
        table.add_row(str(number), *_row(prompt))
    table.add_section()
    table.add_row("median", *_row(demo), style="bold")
    return table


def _row(values: dict[str, Any]) -> list[str]:
    return [
        f"{values['prompt_tokens']:,.0f}",
        f"{values['cold_ttft_s']:.2f} s",
        f"{values['memory_ttft_s']:.3f} s",
        f"{values['disk_ttft_s']:.3f} s",
        f"{values['speedup']:.0f}x",
        f"{values['bytes_read'] / 1e6:.0f} MB",
        f"{values['files']:.0f}",
    ]


def run_demo(n_prompts: int, n_tokens: int, dtype: str, output: Path) -> None:
    """Run the demo, print its table and write `output`.

    Raises:
        DemoError, ModelError, ServingError: it could not be shown; the message says why.
    """
    console = Console()
    length = length_above_chunks(n_tokens, TOKENS_PER_CHUNK)
    check_environment(length)
    model = ensure_model(console=console)
    if dtype == "auto":
        cpuinfo = Path("/proc/cpuinfo").read_text()
        dtype = choose_dtype(importlib.metadata.version("vllm"), cpuinfo)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        results = Demo(model, dtype, n_prompts, length).run(progress)
    demo = summary(results, dtype)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(demo, indent=2) + "\n")
    console.print(table_of(demo))
    console.print(
        f"From disk adds {demo['added_s'] * 1e3:.0f} ms to the in-memory hit; reading the same "
        f"files alone takes {demo['read_s'] * 1e3:.0f} ms. Written to {shown(output)}."
    )


def main(
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts to ask.")] = 3,
    tokens: Annotated[
        int, typer.Option(min=300, help="Prompt length; rounded to just above a whole chunk.")
    ] = 7500,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or auto.")] = "auto",
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = BUILD / "demo.json",
) -> None:
    """Answer long prompts cold, restart the server, answer them from disk."""
    with ending_on_signals():
        expected = (DemoError, ModelError, ServingError)
        raise typer.Exit(run_reporting(lambda: run_demo(prompts, tokens, dtype, output), *expected))


if __name__ == "__main__":
    typer.run(main)
