# SPDX-License-Identifier: Apache-2.0
"""A prompt whose chunks are in DRAM, against one that is in vLLM's own memory.

    python -m benchmarks.dram --json FILE [--quick]

One real server whose pool holds the whole working set. In each round every prompt is answered
from vLLM's prefix cache, then that cache is reset and it is answered from the DRAM tier; what this
adds is compared with one plain copy of the same bytes between touched memory, timed while the
server idles. Prompts end just above a chunk, so that both recompute the same short tail. Nothing
may be read from disk: the report says what was.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from scripts.model import ensure_model
from scripts.serving import (
    LOAD_BYTES,
    Prompts,
    Server,
    ServerOptions,
    ending_on_signals,
    length_above_chunks,
)

PROMPTS = 3
PROMPT_TOKENS = length_above_chunks(7500)
ANSWER_TOKENS = 4
POOL_GIB = 2
"""The prompts' KV in float32 is half of it."""
KV_CACHE_GIB = 4
FILE_BYTES = "vllm:kv_offload_file_bytes_total"
HITS = "vllm:kv_offload_load_hits_total"
FIRST_SEED = 500
ROUNDS = 5


class DramError(RuntimeError):
    """The run does not show what it is meant to; the message says why."""


@dataclass
class Samples:
    """Seconds, one for each prompt and round."""

    memory_ttfts_s: list[float] = field(default_factory=list)
    dram_ttfts_s: list[float] = field(default_factory=list)
    copies_s: list[float] = field(default_factory=list)
    bytes_loaded: int = 0
    """By one prompt."""

    def report(self) -> dict[str, Any]:
        """Medians, and the ratio of the issue: added latency over one copy of the bytes."""
        ratios = [
            (dram - memory) / copy
            for dram, memory, copy in zip(
                self.dram_ttfts_s, self.memory_ttfts_s, self.copies_s, strict=True
            )
        ]
        memory_s = statistics.median(self.memory_ttfts_s)
        dram_s = statistics.median(self.dram_ttfts_s)
        copy_s = statistics.median(self.copies_s)
        return {
            "memory_ttft_s": memory_s,
            "dram_ttft_s": dram_s,
            "copy_s": copy_s,
            "added_vs_copy": statistics.median(ratios),
            "added_vs_copy_range": [min(ratios), max(ratios)],
            "bytes_loaded": self.bytes_loaded,
            "prompt_tokens": PROMPT_TOKENS,
            "samples": len(ratios),
        }


def plain_copy_s(source: np.ndarray, target: np.ndarray) -> float:
    """Seconds of one copy on one thread."""
    start = perf_counter()
    np.copyto(target, source)
    return perf_counter() - start


def ask(server: Server, prompt: list[int], samples: Samples) -> None:
    """One prompt from memory and from DRAM."""
    samples.memory_ttfts_s.append(server.complete(prompt, ANSWER_TOKENS).ttft_s)
    server.reset_prefix_cache()
    before = server.metrics().total(LOAD_BYTES)
    samples.dram_ttfts_s.append(server.complete(prompt, ANSWER_TOKENS).ttft_s)
    samples.bytes_loaded = int(server.metrics().total(LOAD_BYTES) - before)
    if not samples.bytes_loaded:
        raise DramError(f"nothing was loaded; see {server.options.log}")


def measure(server: Server, root: Path, rounds: int, progress: Progress) -> dict[str, Any]:
    """All prompts in turn, so many times."""
    prompts = Prompts(Path(server.options.model))
    asked = [prompts.of(PROMPT_TOKENS, FIRST_SEED + number) for number in range(PROMPTS)]
    task = progress.add_task("computing the prompts", total=len(asked))
    for prompt in asked:
        server.complete(prompt, ANSWER_TOKENS)
        server.wait_idle(root)
        progress.advance(task)
    ask(server, asked[0], first := Samples())  # a process's first load
    source = np.ones(first.bytes_loaded, np.uint8)
    target = np.zeros_like(source)
    samples = Samples()
    before = server.metrics().total(FILE_BYTES, direction="load")
    task = progress.add_task("from memory, from DRAM", total=rounds * len(asked))
    for _ in range(rounds):
        for prompt in asked:
            server.complete(prompt, 1)  # in memory again
            ask(server, prompt, samples)
            samples.copies_s.append(plain_copy_s(source, target))
            progress.advance(task)
    after = server.metrics()
    report = samples.report()
    report["bytes_read"] = int(after.total(FILE_BYTES, direction="load") - before)
    report["chunks_from_disk"] = int(after.by(HITS, "tier").get("disk", 0))
    return report


def serve(directory: Path) -> Server:
    """A server with an empty root of its own."""
    extra = {"kv_connector_extra_config": {"root": str(directory / "dram-root")}}
    return Server(
        ServerOptions(
            ensure_model(),
            directory / "logs" / "dram.log",
            [
                "--kv-offloading-backend=pykvcache",
                f"--kv-offloading-size={POOL_GIB}",
                f"--kv-transfer-config={json.dumps(extra)}",
                "--dtype=float32",
                "--max-model-len=8192",
            ],
            {"VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB), "VLLM_SERVER_DEV_MODE": "1"},
        )
    )


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the report goes.")] = None,
    quick: Annotated[bool, typer.Option(help="3 rounds instead of 5.")] = False,
    directory: Annotated[Path, typer.Option(help="For the KV files.")] = Path("build/bench"),
) -> None:
    """Measure what the DRAM tier adds to a hit in vLLM's own memory."""
    console = Console(stderr=True)
    directory = directory.resolve()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        ending_on_signals(),
        Progress(*columns, console=console) as progress,
        serve(directory) as server,
    ):
        report = measure(server, directory / "dram-root", 3 if quick else ROUNDS, progress)
    table = Table("memory TTFT", "DRAM TTFT", "one copy", "added / copy", "read from disk")
    low, high = report["added_vs_copy_range"]
    table.add_row(
        f"{report['memory_ttft_s']:.3f} s",
        f"{report['dram_ttft_s']:.3f} s",
        f"{report['copy_s'] * 1e3:.0f} ms",
        f"{report['added_vs_copy']:.2f} ({low:.2f}-{high:.2f})",
        f"{report['bytes_read']} B",
    )
    console.print(table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({"dram": report}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
