# SPDX-License-Identifier: Apache-2.0
"""What reading ahead gains: a full queue of requests whose prefixes lie on a slow disk.

    python -m benchmarks.preload --json FILE [--quick]

Two real servers over the same files, one that reads ahead for waiting requests and one with
``preload_lookahead`` 0, answer the same prompts in turn. In each round eight requests arrive at
once, each with a document of its own as prefix and a fresh question behind it; ``--max-num-seqs``
of them run at a time. The kernel holds the servers' reads to a rate.

The KV cache has room for the running requests alone, as where a queue forms because memory is
full; with memory to spare vLLM loads for waiting requests anyway, as soon as it has seen them.

Between rounds vLLM's in-memory prefix cache is reset, and ``dram_policy`` is ``none``, so that
every round reads every prefix from disk again; the report's amplification proves it. Ratios
are of one round each, with and without in turn first; reported are their medians.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.throttle import ReadThrottle, ThrottleError
from scripts.model import ensure_model
from scripts.serving import Prompts, Server, ServerOptions, ending_on_signals, kv_files

MB = 1_000_000
BANDWIDTHS = (100, 200, 400, 0)
"""MB/s; 0: what the drive gives."""
TOKENS_PER_CHUNK = 256
CHUNKS = {7500: 29, 4000: 16}
"""Prefixes of 7,424 and 4,096 tokens; the shorter is the beginning of the longer."""
SEQS = (1, 2)
REQUESTS = 8
QUESTION_TOKENS = 64
ANSWER_TOKENS = 4
WARM_UP_TOKENS = 300
TOKENS_PER_BLOCK = 128
"""vLLM's default on CPU."""
BLOCKS_PER_REQUEST = -(
    -(CHUNKS[7500] * TOKENS_PER_CHUNK + QUESTION_TOKENS + ANSWER_TOKENS) // TOKENS_PER_BLOCK
)
KV_CACHE_GIB = 2
"""Said, because by default vLLM takes most of the memory, which the second server then lacks; the
blocks above are fewer."""
FILE_BYTES = "vllm:kv_offload_file_bytes_total"
ROUNDS = 5
GROUP = "pykvcache-benchmark"


@dataclass(frozen=True)
class Case:
    """One row of the report."""

    bandwidth: int
    """MB/s, 0: unthrottled."""
    tokens: int
    seqs: int

    @property
    def name(self) -> str:
        suffix = "" if self.seqs == 1 else f"_seqs{self.seqs}"
        return f"bw{self.bandwidth}_t{self.tokens}{suffix}"


def all_cases() -> Iterator[Case]:
    """In the order they run: servers differ by ``seqs`` only."""
    for seqs in SEQS:
        for bandwidth in BANDWIDTHS:
            for tokens in CHUNKS:
                yield Case(bandwidth, tokens, seqs)


QUICK = ("bw200_t7500", "bw0_t7500")


@dataclass(frozen=True)
class Run:
    """One server's answers to one round. Seconds and bytes."""

    ttfts_s: tuple[float, ...]
    makespan_s: float
    bytes_read: int

    @property
    def ttft_s(self) -> float:
        return statistics.fmean(self.ttfts_s)


@dataclass
class Samples:
    """The rounds of one case."""

    bytes_used: int
    """Of the distinct files that a round's prompts need."""
    on: list[Run] = field(default_factory=list)
    off: list[Run] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """Medians of per-round ratios, and their ranges.

        ``ttft_speedup``: mean TTFT without reading ahead over that with it. ``makespan_ratio``:
        time until the last answer with it over that without. ``read_amplification``: bytes read
        with it over the bytes of the distinct files needed.
        """
        pairs = list(zip(self.on, self.off, strict=True))
        figures = {
            "ttft_speedup": [off.ttft_s / on.ttft_s for on, off in pairs],
            "makespan_ratio": [on.makespan_s / off.makespan_s for on, off in pairs],
            "read_amplification": [on.bytes_read / self.bytes_used for on, _ in pairs],
            "read_amplification_off": [off.bytes_read / self.bytes_used for _, off in pairs],
        }
        report: dict[str, Any] = {name: statistics.median(all_) for name, all_ in figures.items()}
        report |= {f"{name}_range": [min(all_), max(all_)] for name, all_ in figures.items()}
        report["rounds"] = len(pairs)
        return report


class Bench:
    """Two servers for one ``--max-num-seqs``, and the documents on their disk."""

    def __init__(self, model: Path, directory: Path, stack: ExitStack) -> None:
        self._model = model
        self._prompts = Prompts(model)
        self._directory = directory
        self.root = directory / "preload-root"
        self._stack = stack
        self._questions = int(time.time()) % 1_000_000 * 1000
        """Seed of the next question; questions of an earlier run must not be on disk."""

    def serve(self, name: str, seqs: int, options: dict[str, Any]) -> Server:
        """A server that has answered its first request."""
        extra = {"root": str(self.root), "dram_policy": "none", **options}
        arguments = [
            "--kv-offloading-backend=pykvcache",
            f"--kv-transfer-config={json.dumps({'kv_connector_extra_config': extra})}",
            "--dtype=float32",
            f"--max-model-len={BLOCKS_PER_REQUEST * TOKENS_PER_BLOCK}",
            f"--max-num-seqs={seqs}",
            f"--num-gpu-blocks-override={seqs * BLOCKS_PER_REQUEST + 1}",
        ]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)}
        log = self._directory / "logs" / f"preload-{name}.log"
        server = self._stack.enter_context(
            Server(ServerOptions(self._model, log, arguments, environment))
        )
        server.complete(self._question(WARM_UP_TOKENS), ANSWER_TOKENS)
        server.wait_idle(self.root)
        return server

    def store_documents(self, server: Server, progress: Progress) -> None:
        """Compute what is not on disk yet."""
        task = progress.add_task("storing documents", total=REQUESTS)
        for number in range(REQUESTS):
            server.complete(self._document(number, CHUNKS[7500]) + self._question(1), 1)
            progress.advance(task)
        server.wait_idle(self.root)

    def run(self, server: Server, prompts: Sequence[list[int]]) -> Run:
        """All prompts at once."""
        server.reset_prefix_cache()
        before = server.metrics().total(FILE_BYTES, direction="load")
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = list(clients.map(lambda ids: server.complete(ids, ANSWER_TOKENS), prompts))
        makespan_s = time.perf_counter() - start
        after = server.metrics().total(FILE_BYTES, direction="load")
        return Run(tuple(answer.ttft_s for answer in answers), makespan_s, int(after - before))

    def round_of(self, tokens: int) -> list[list[int]]:
        """The prompts of a round, with questions never asked before."""
        return [
            self._document(number, CHUNKS[tokens]) + self._question(QUESTION_TOKENS)
            for number in range(REQUESTS)
        ]

    def bytes_used(self, tokens: int) -> int:
        """Bytes of the files that a round needs; all files are alike."""
        file_bytes = max(path.stat().st_size for path in kv_files(self.root))
        return REQUESTS * CHUNKS[tokens] * file_bytes

    def _document(self, number: int, chunks: int) -> list[int]:
        return self._prompts.of(chunks * TOKENS_PER_CHUNK, number)

    def _question(self, tokens: int) -> list[int]:
        self._questions += 1
        return self._prompts.of(tokens, self._questions)


def measure(bench: Bench, on: Server, off: Server, case: Case, rounds: int) -> Samples:
    """Both servers in turn, the first one changing from round to round."""
    samples = Samples(bench.bytes_used(case.tokens))
    for number in range(rounds):
        prompts = bench.round_of(case.tokens)
        contenders = [(on, samples.on), (off, samples.off)]
        for server, runs in contenders if number % 2 else reversed(contenders):
            runs.append(bench.run(server, prompts))
    return samples


def _table(report: dict[str, Any]) -> Table:
    table = Table("case", "TTFT speed-up", "makespan, with / without", "bytes read / used")
    for name, figures in report.items():
        if not isinstance(figures, dict):
            continue
        cells = []
        for key in ("ttft_speedup", "makespan_ratio", "read_amplification"):
            low, high = figures[f"{key}_range"]
            cells.append(f"{figures[key]:.3f} ({low:.2f}-{high:.2f})")
        table.add_row(name, *cells)
    return table


def run_cases(
    cases: Sequence[Case], rounds: int, directory: Path, trace: Path | None, progress: Progress
) -> dict[str, Any]:
    """Measure the cases; servers are started once for each ``seqs`` (and for each bandwidth,
    where only ``read_bandwidth_max`` can throttle)."""
    model = ensure_model()
    report: dict[str, Any] = {}
    with ExitStack() as outer:
        throttle: ReadThrottle | None = None
        try:
            throttle = ReadThrottle(directory, name=GROUP)
            outer.callback(throttle.close)
            report["throttle"] = "kernel"
        except ThrottleError as error:
            progress.console.print(f"Throttled by read_bandwidth_max: {error}")
            report["throttle"] = "read_bandwidth_max"
        for group in server_groups(cases, by_bandwidth=throttle is None):
            with ExitStack() as stack:
                bench = Bench(model, directory, stack)
                options = {} if throttle else {"read_bandwidth_max": group[0].bandwidth * MB}
                seqs = group[0].seqs
                traced = {"trace_path": str(trace.resolve())} if trace else {}
                on = bench.serve(f"on-{seqs}", seqs, {**options, **traced})
                off = bench.serve(f"off-{seqs}", seqs, {**options, "preload_lookahead": 0})
                bench.store_documents(on, progress)
                for server in (on, off):
                    bench.run(server, bench.round_of(4000)[:2])  # its first loads
                    if throttle:
                        throttle.add(server.process_ids)
                for case in group:
                    task = progress.add_task(case.name, total=None)
                    if throttle:
                        throttle.limit(case.bandwidth * MB)
                    report[case.name] = measure(bench, on, off, case, rounds).report()
                    progress.update(task, total=1, completed=1)
                    progress.console.print(_table({case.name: report[case.name]}))
                if throttle:
                    throttle.limit(0)
    return report


def server_groups(cases: Sequence[Case], *, by_bandwidth: bool) -> list[list[Case]]:
    """Cases that the same pair of servers can answer."""
    groups: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.seqs, case.bandwidth if by_bandwidth else 0), []).append(case)
    return list(groups.values())


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the report goes.")] = None,
    quick: Annotated[bool, typer.Option(help=f"Only {' and '.join(QUICK)}, 3 rounds.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each case.")] = ROUNDS,
    only: Annotated[list[str] | None, typer.Option(help="Only these cases.")] = None,
    directory: Annotated[Path, typer.Option(help="On the drive to measure.")] = Path("build/bench"),
    trace: Annotated[Path | None, typer.Option(help="Trace the server that reads ahead.")] = None,
) -> None:
    """Measure time to first token with and without reading ahead."""
    console = Console(stderr=True)
    names = {case.name: case for case in all_cases()}
    chosen = only or (QUICK if quick else names)
    if unknown := [name for name in chosen if name not in names]:
        console.print(f"[red]unknown case {unknown[0]}: known are {', '.join(names)}[/red]")
        raise typer.Exit(2)
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with ending_on_signals(), Progress(*columns, console=console) as progress:
        cases = [names[name] for name in chosen]
        report = run_cases(cases, 3 if quick else rounds, directory, trace, progress)
    console.print(_table(report))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
