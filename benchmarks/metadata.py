# SPDX-License-Identifier: Apache-2.0
"""Names, not bytes: look-ups and publications in a root of many files (figure 8b of the paper).

    python -m benchmarks.metadata --json FILE [--quick] [--directory DIR]

At each size a root is filled with that many chunk files, a byte each. Then, one thread:
look-ups as the scheduler does them (the catalog, nothing remembered), of chunks that are there and
that are not, beside the bare system call; publications as a store does them (create, write,
close, link, unlink); how soon a look-up is answered after the start while the keeper counts; and a
whole round of eviction that only tells what would go, with the memory it takes. Caches are warm:
the files were made just before.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.hashes import chunk_hashes
from pykvcache.capacity.budget import Budget
from pykvcache.capacity.evictor import Evictor
from pykvcache.capacity.keeper import Keeper
from pykvcache.capacity.policy import Policy
from pykvcache.config import Config
from pykvcache.identity import FILE_NAME
from pykvcache.layout import ChunkPaths, rank_directory, temporary_name
from pykvcache.scheduler.catalog import Catalog
from pykvcache.scheduler.existence import Existence
from pykvcache.sizes import Size

SIZES = (10_000, 100_000, 1_000_000)
QUICK_SIZES = (1_000, 10_000)
ROUNDS = 5
OPERATIONS = 20_000
"""In one round of one measurement: half a second or less, so that rounds interleave."""

EVICTED_SHARE = 0.1


def key_of(digest: bytes) -> bytes:
    """As vLLM makes it: the hash and the index of the KV cache group."""
    return digest + bytes(4)


def fill(directory: Path, count: int) -> Iterator[bytes]:
    """Make that many files; yields their keys."""
    paths = ChunkPaths(directory)
    made: set[str] = set()
    for digest in chunk_hashes(1, count):
        key = key_of(digest)
        path = paths.final(key)
        leaf = os.path.dirname(path)
        if leaf not in made:
            os.makedirs(leaf, exist_ok=True)
            made.add(leaf)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, b"x")
        os.close(descriptor)
        yield key


def rate(operation: Callable[[bytes], object], keys: list[bytes]) -> float:
    """Operations per second."""
    start = perf_counter()
    for key in keys:
        operation(key)
    return len(keys) / (perf_counter() - start)


class Publisher:
    """Publishes files of one byte as the transfer core does."""

    def __init__(self, directory: Path) -> None:
        self._paths = ChunkPaths(directory)
        self._number = 0

    def __call__(self, key: bytes) -> None:
        """One file."""
        self._number += 1
        final = self._paths.final(key)
        temporary = temporary_name(final, "benchmark", self._number)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            descriptor = os.open(temporary, flags, 0o600)
        except FileNotFoundError:  # the first file of its leaf directory
            os.mkdir(os.path.dirname(final))
            descriptor = os.open(temporary, flags, 0o600)
        os.write(descriptor, b"x")
        os.close(descriptor)
        os.link(temporary, final)
        os.unlink(temporary)


def look_ups(root: Path, ranks: list[ChunkPaths]) -> tuple[Catalog, Existence]:
    """As the scheduler does them, without a memory."""
    config = Config()
    existence = Existence(str(root), config.lookup_timeout_s, logging.getLogger("benchmarks"))
    catalog = Catalog(
        ranks, lookup_ttl_s=0.0, failed_key_ttl_s=0.0, clock=monotonic, exists=existence
    )
    return catalog, existence


def measure(root: Path, count: int, operations: int) -> dict[str, Any]:
    """Fill a new root and measure it."""
    identity = root / "benchmark-0123456789abcdef"
    directory = rank_directory(identity, 0)
    directory.mkdir(parents=True)
    (identity / FILE_NAME).write_text("{}")
    start = perf_counter()
    keys = list(
        track(fill(directory, count), f"{count} files", count, console=Console(stderr=True))
    )
    filled_s = perf_counter() - start
    paths = ChunkPaths(directory)
    catalog, existence = look_ups(root, [paths])
    publish = Publisher(directory)
    generator = random.Random(count)
    rates: dict[str, list[float]] = {
        name: [] for name in ("look_ups", "look_ups_of_misses", "bare_stats", "publications")
    }
    for number in range(ROUNDS):
        present = generator.choices(keys, k=operations)
        absent = [key_of(digest) for digest in chunk_hashes(100 + number, operations)]
        names = {key: paths.final(key) for key in present}
        rates["look_ups"].append(rate(catalog.holds, present))
        rates["bare_stats"].append(rate(lambda key: os.stat(names[key]), present))  # noqa: B023
        rates["look_ups_of_misses"].append(rate(catalog.holds, absent))
        fresh = [key_of(digest) for digest in chunk_hashes(200 + number, operations // 4)]
        rates["publications"].append(rate(publish, fresh))
        for key in fresh:
            os.unlink(paths.final(key))
    existence.close()
    return {
        "files": count,
        "filled_s": filled_s,
        **{
            f"{name}_per_s": {"median": statistics.median(found), "range": [min(found), max(found)]}
            for name, found in rates.items()
        },
        "first_look_up_s": first_look_up(root, directory, keys[-1]),
        "eviction_round": eviction_round(root),
    }


def first_look_up(root: Path, directory: Path, key: bytes) -> float:
    """Seconds from a server's start of the keeper to an answer, while the keeper counts."""
    paths = [ChunkPaths(directory)]
    start = perf_counter()
    keeper = Keeper(Config(root=root), paths, logging.getLogger("benchmarks"))
    keeper.start()
    catalog, existence = look_ups(root, paths)
    found = catalog.holds(key)
    seconds = perf_counter() - start
    keeper.stop()
    existence.close()
    if not found:
        raise RuntimeError("a chunk that is there was not found")
    return seconds


def eviction_round(root: Path) -> dict[str, Any]:
    """What a round takes, in a process of its own, whose memory is nothing else's."""
    command = [sys.executable, "-m", "benchmarks.metadata", "--only-evict", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def peak_kib() -> int:
    """Of this program's resident memory; getrusage's still counts the program before exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def evict_only(root: Path) -> None:
    """Print what a round that only tells takes."""
    empty = Budget(Size(1 << 60), Size(), 0.95, 0.9)

    def evictor(budget: Budget) -> Evictor:
        return Evictor(root, budget, Policy.LRU, files_per_s=0.0, pause=lambda _seconds: False)

    before = resource.getrusage(resource.RUSAGE_SELF)
    peak_before = peak_kib()
    counted = evictor(empty).run(dry=True)
    assert counted is not None
    extra = int(EVICTED_SHARE * counted.usage.size)
    done = evictor(empty).run(extra, dry=True)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert done is not None
    print(
        json.dumps(
            {
                "files": counted.usage.files,
                "victims": done.files,
                "count_s": counted.usage.seconds,
                "cpu_s_of_two_rounds": after.ru_utime
                + after.ru_stime
                - before.ru_utime
                - before.ru_stime,
                "memory_mib": (peak_kib() - peak_before) / 1024,
            }
        )
    )


def main(
    output: Annotated[Path | None, typer.Option("--json", help="Where the report goes.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller roots.")] = False,
    directory: Annotated[
        Path, typer.Option("--directory", help="On the filesystem to be measured.")
    ] = Path(),
    only_evict: Annotated[Path | None, typer.Option("--only-evict", hidden=True)] = None,
) -> None:
    """Measure at each size and report."""
    if only_evict is not None:
        evict_only(only_evict)
        return
    results = []
    for count in QUICK_SIZES if quick else SIZES:
        with tempfile.TemporaryDirectory(dir=directory, prefix="metadata-") as place:
            results.append(measure(Path(place), count, min(OPERATIONS, count)))
    table = Table(box=None)
    for column in (
        "files",
        "look-ups/s",
        "of misses/s",
        "bare stat/s",
        "publications/s",
        "first look-up",
        "count",
        "memory",
    ):
        table.add_column(column, justify="right")
    for result in results:
        names = ("look_ups", "look_ups_of_misses", "bare_stats", "publications")
        table.add_row(
            f"{result['files']:,}",
            *(f"{result[f'{name}_per_s']['median']:,.0f}" for name in names),
            f"{1000 * result['first_look_up_s']:.1f} ms",
            f"{result['eviction_round']['count_s']:.1f} s",
            f"{result['eviction_round']['memory_mib']:.0f} MiB",
        )
    Console(stderr=True).print(table)
    if output is not None:
        output.write_text(json.dumps({"sizes": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
