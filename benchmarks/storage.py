# SPDX-License-Identifier: Apache-2.0
"""The storage path against fio and against vLLM's own ``fs`` tier.

    python -m benchmarks.storage --json FILE [--quick]

Reads and writes of whole chunk files through the real reactor and its pool, interleaved
in each round with fio (io_uring, same depth, same files, huge pages too) and with
vLLM's tier on the same filesystem. Every figure is the median of per-round ratios; the
order of the three changes from round to round. The device's copies are not part of it:
fio and the tier end in host memory as well.

Reads are measured like fio's, over a window in which the queue is never empty. Writes
create every file anew, in directories that exist. Nothing is deleted before the end,
only truncated: ext4 does not reuse an inode within a minute of its deletion, so who
deletes files to write them again measures the search past the deleted ones.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import select
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.fio import FioMissingError, fio_gb_per_s, require_fio
from benchmarks.hashes import chunk_hashes
from benchmarks.interpreter import stall_and_slowdown, switch_interval
from benchmarks.native_tier import NativeTier
from benchmarks.verify import full_against_off
from pykvcache.config import Config
from pykvcache.layout import PAGE, ChunkPaths
from pykvcache.measure import Storage, open_storage, plain_chunk
from pykvcache.transfer.jobs import ChunkTransfer, Direction, Job

MIB = 1 << 20
CHUNK_BYTES = {"5.6MiB": int(5.625 * MIB), "28MiB": 28 * MIB}
FINGERPRINT = bytes(32)
SHM = Path("/dev/shm")
WINDOW_S = 1.0
JOB_CHUNKS = 8
JOBS_AHEAD = 4
"""Together more chunks than are open or in flight at a time, so that the queue is never empty."""
POLL_S = 0.01


@dataclass(frozen=True)
class Case:
    """One line of the report."""

    name: str
    directory: Path
    chunk_bytes: int
    chunks: int
    write: bool
    loops: int

    @property
    def place(self) -> Path:
        """The directory of its files."""
        return self.directory / f"pykvcache-{self.name}"


@dataclass
class Samples:
    """Per-round figures of a case."""

    ours: list[float] = field(default_factory=list)
    fio: list[float] = field(default_factory=list)
    native: list[float] = field(default_factory=list)
    ours_cpu: list[float] = field(default_factory=list)
    native_cpu: list[float] = field(default_factory=list)

    def report(self) -> dict[str, float | list[float]]:
        """Medians of per-round ratios, with their spread."""
        vs_fio = [ours / fio for ours, fio in zip(self.ours, self.fio, strict=True)]
        vs_native = [ours / native for ours, native in zip(self.ours, self.native, strict=True)]
        return {
            "vs_fio": statistics.median(vs_fio),
            "vs_native": statistics.median(vs_native),
            "cpu_s_per_gb": statistics.median(self.ours_cpu),
            "native_cpu_s_per_gb": statistics.median(self.native_cpu),
            "vs_fio_range": [min(vs_fio), max(vs_fio)],
            "vs_native_range": [min(vs_native), max(vs_native)],
            "rounds": len(vs_fio),
        }


class Bench:
    """The files and the running reactor and tier of one case."""

    def __init__(self, case: Case, config: Config, stack: ExitStack) -> None:
        self._case = case
        self._config = config
        self._directory = case.place
        shutil.rmtree(self._directory, ignore_errors=True)
        self._rank = self._directory / "rank"
        self._rank.mkdir(parents=True)
        stack.callback(truncate_files, self._directory)
        self.chunks = _chunks(self._rank, case, 0)
        self.file_bytes = self.chunks[0].file_bytes
        self.storage: Storage = stack.enter_context(
            open_storage(self._rank, self.file_bytes, FINGERPRINT, config)
        )
        self._native = NativeTier(self._directory / "native", case.chunks, self.file_bytes)
        stack.callback(self._native.close)
        if not case.write:
            self.storage.transfer(Direction.STORE, self.chunks)
            self._native.write(0)

    def round(self, number: int, samples: Samples) -> None:
        """Each of the three once, in an order that rotates."""
        steps: list[Callable[[int, Samples], None]] = [self._ours, self._fio, self._tier]
        for step in steps[number % 3 :] + steps[: number % 3]:
            step(number, samples)
            if self._case.write:
                truncate_files(self._directory)

    def read_once(self) -> float:
        """Seconds of one pass of reads."""
        return self.storage.transfer(Direction.LOAD, self.chunks)

    def _ours(self, number: int, samples: Samples) -> None:
        if self._case.write:
            chunks = _chunks(self._rank, self._case, number)
            make_directories(Path(chunk.path) for chunk in chunks)
            cpu = time.process_time()
            seconds = self.storage.transfer(Direction.STORE, chunks)
            cpu_s = time.process_time() - cpu
            moved = len(chunks)
        else:
            moved, seconds, cpu_s = steady_reads(self.storage, self.chunks, WINDOW_S)
        gigabytes = moved * self.file_bytes / 1e9
        samples.ours.append(gigabytes / seconds)
        samples.ours_cpu.append(cpu_s / gigabytes)

    def _fio(self, number: int, samples: Samples) -> None:
        samples.fio.append(
            fio_gb_per_s(
                self._directory / f"fio-{number}",
                [Path(chunk.path) for chunk in self.chunks],
                write=self._case.write,
                file_bytes=self.file_bytes,
                depth=self._config.io_depth,
                seconds=WINDOW_S,
                direct=self.storage.direct,
            )
        )

    def _tier(self, number: int, samples: Samples) -> None:
        if self._case.write:
            costs = [self._native.write(number)]
        else:
            costs = [self._native.read() for _ in range(self._case.loops)]
        gigabytes = len(costs) * self._native.total_bytes / 1e9
        samples.native.append(gigabytes / sum(seconds for seconds, _ in costs))
        samples.native_cpu.append(sum(cpu_s for _, cpu_s in costs) / gigabytes)


def steady_reads(
    storage: Storage, chunks: Sequence[ChunkTransfer], window_s: float
) -> tuple[int, float, float]:
    """Read the chunks over and over; count in a window that begins after as long a run-up.

    Returns:
        Chunks read in the window, its seconds, and its seconds of CPU.
    """
    jobs = itertools.count(1)
    starts = range(0, len(chunks), JOB_CHUNKS)
    batches = itertools.cycle([tuple(chunks[at : at + JOB_CHUNKS]) for at in starts])

    def ended(submit: bool) -> int:
        while not (results := storage.reactor.take_results()):
            select.select([], [], [], POLL_S)
        for result in results:
            if not result.success:
                raise OSError(f"reads failed: {set(result.failures.values())}")
            if submit:
                storage.reactor.submit(Job(next(jobs), Direction.LOAD, next(batches)))
        return len(results)

    for _ in range(JOBS_AHEAD):
        storage.reactor.submit(Job(next(jobs), Direction.LOAD, next(batches)))
    began = time.perf_counter()
    while time.perf_counter() - began < window_s:
        ended(submit=True)
    start, cpu, moved = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - start < window_s:
        moved += ended(submit=True) * JOB_CHUNKS
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    left = JOBS_AHEAD
    while left:
        left -= ended(submit=False)
    return moved, seconds, cpu_s


def make_directories(paths: Iterable[Path]) -> None:
    """The directories of files to be written, as a cache that is in use has them."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)


def truncate_files(directory: Path) -> None:
    """Free what the files hold; see the module's text for why they stay."""
    for path in directory.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)


def _chunks(directory: Path, case: Case, generation: int) -> list[ChunkTransfer]:
    paths = ChunkPaths(directory)
    keys = [digest + bytes(4) for digest in chunk_hashes(generation, case.chunks)]
    # The trailer is part of the file: the payload is a page less, so that sizes are round.
    return [plain_chunk(key, paths.final(key), case.chunk_bytes - PAGE) for key in keys]


def cases(directory: Path, quick: bool) -> Iterator[Case]:
    """The lines of the report; quick ones move fewer bytes in each round, not fewer rounds."""
    gigabytes = 2.4 if quick else 4.8  # the queue fills and drains once in each pass
    for action, (size, chunk_bytes) in itertools.product(("read", "write"), CHUNK_BYTES.items()):
        count = round(gigabytes * 1e9 / chunk_bytes / 8) * 8  # whole depths
        yield Case(f"{action}_{size}", directory, chunk_bytes, count, action == "write", 1)
    for size, chunk_bytes in CHUNK_BYTES.items():
        count = round(0.7e9 / chunk_bytes / 8) * 8
        yield Case(f"tmpfs_read_{size}", SHM, chunk_bytes, count, False, 4)


def interpreter_cost(
    directory: Path, config: Config, runs: int, leftovers: ExitStack
) -> dict[str, dict[str, float]]:
    """Stall and slow-down at both chunk sizes, medians over the runs."""
    report = {}
    for size, chunk_bytes in CHUNK_BYTES.items():
        case = Case(
            f"interpreter_{size}", directory, chunk_bytes, int(1.2e9 / chunk_bytes), False, 1
        )
        leftovers.callback(shutil.rmtree, case.place, ignore_errors=True)
        with ExitStack() as stack, switch_interval(config.switch_interval_s):
            bench = Bench(case, config, stack)
            bench.read_once()
            pairs = [stall_and_slowdown(bench.read_once) for _ in range(runs)]
        report[size] = {
            "stall_ms": statistics.median(stall for stall, _ in pairs) * 1e3,
            "busy_ratio": statistics.median(ratio for _, ratio in pairs),
        }
    return report


def verify_cost(
    directory: Path, config: Config, rounds: int, leftovers: ExitStack
) -> dict[str, dict[str, float | list[float]]]:
    """Reads whose checksums are compared against reads without, at both chunk sizes."""
    report = {}
    for size, chunk_bytes in CHUNK_BYTES.items():
        count = round(1.2e9 / chunk_bytes / JOB_CHUNKS) * JOB_CHUNKS
        case = Case(f"verify_{size}", directory, chunk_bytes, count, False, 1)
        leftovers.callback(shutil.rmtree, case.place, ignore_errors=True)
        shutil.rmtree(case.place, ignore_errors=True)
        case.place.mkdir(parents=True)
        chunks = _chunks(case.place, case, 0)

        def bytes_per_s(storage: Storage, chunks: Sequence[ChunkTransfer] = tuple(chunks)) -> float:
            moved, seconds, _ = steady_reads(storage, chunks, WINDOW_S)
            return moved * chunks[0].file_bytes / seconds

        report[size] = full_against_off(
            case.place, chunks, FINGERPRINT, config, rounds, bytes_per_s
        )
    return report


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the report goes.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer bytes in each round.")] = False,
    rounds: Annotated[int, typer.Option(min=5, help="Rounds of each case.")] = 5,
    directory: Annotated[Path, typer.Option(help="On the drive to measure.")] = Path("build/bench"),
    only: Annotated[list[str] | None, typer.Option(help="Only these cases.")] = None,
) -> None:
    """Measure the storage path and report ratios."""
    console = Console(stderr=True)
    try:
        require_fio()
    except FioMissingError as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(2) from None
    # As vLLM's engine does once it has started: collections of the imported modules' objects
    # would stall every thread, whoever triggers them.
    gc.collect()
    gc.freeze()
    config = Config()
    report: dict[str, object] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with ExitStack() as leftovers, Progress(*columns, console=console) as progress:
        for case in cases(directory.resolve(), quick):
            if only and case.name not in only:
                continue
            leftovers.callback(shutil.rmtree, case.place, ignore_errors=True)
            task = progress.add_task(case.name, total=rounds)
            samples = Samples()
            with ExitStack() as stack:
                bench = Bench(case, config, stack)
                for number in range(1, rounds + 1):
                    bench.round(number, samples)
                    progress.advance(task)
            report[case.name] = samples.report()
        if not only or "interpreter" in only:
            progress.add_task("interpreter", total=None)
            sizes = interpreter_cost(directory.resolve(), config, max(5, rounds), leftovers)
            report["interpreter"] = sizes
            report["stall_ms_max"] = max(figures["stall_ms"] for figures in sizes.values())
            report["busy_interpreter_ratio"] = min(
                figures["busy_ratio"] for figures in sizes.values()
            )
        if not only or "verify" in only:
            progress.add_task("verify", total=None)
            costs = verify_cost(directory.resolve(), config, max(5, rounds), leftovers)
            report["verify"] = costs
            report["verify_ratio"] = min(figures["ratio"] for figures in costs.values())
    console.print(_table(report))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1) + "\n")


def _table(report: dict[str, object]) -> Table:
    table = Table("case", "vs fio", "vs fs tier", "CPU s/GB", "fs tier's CPU s/GB")
    for name, figures in report.items():
        if isinstance(figures, dict) and "vs_fio" in figures:
            low, high = figures["vs_fio_range"]
            table.add_row(
                name,
                f"{figures['vs_fio']:.3f} ({low:.2f}-{high:.2f})",
                f"{figures['vs_native']:.2f}",
                f"{figures['cpu_s_per_gb']:.4f}",
                f"{figures['native_cpu_s_per_gb']:.4f}",
            )
    for name in ("stall_ms_max", "busy_interpreter_ratio", "verify_ratio"):
        if name in report:
            table.add_row(name, f"{report[name]:.3f}", "", "", "")
    return table


if __name__ == "__main__":
    typer.run(main)
