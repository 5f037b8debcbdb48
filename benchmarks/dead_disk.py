# SPDX-License-Identifier: Apache-2.0
"""What a dead disk costs: the same requests with offloading to it, and without offloading.

    python -m benchmarks.dead_disk --json FILE [--quick]

One server keeps its files on an ext4 of its own, on a loop device; another one serves the same
model without offloading. When the first has stored and loaded, the filesystem is shut down, as the
kernel does it itself after an error that it cannot go on from (``EXT4_IOC_SHUTDOWN``): every open,
read and write fails with EIO from then on. The server leaves such a disk alone, and tries it again
now and then.

Then both are asked the same prompts in turn, in changing order: some that are on the dead disk, and
some that nobody has seen. The server without offloading is asked twice in each round; its ratio to
itself is what the machine's noise comes to. Reported are medians of per-round ratios.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import statistics
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from scripts.model import ensure_model
from scripts.serving import LOAD_BYTES, Prompts, Server, ServerOptions, ending_on_signals

EXT4_IOC_SHUTDOWN = 0x8004587D
"""``_IOR('X', 125, __u32)``; of fs/ext4/ext4.h."""
WITHOUT_LOG_FLUSH = 2

DISK_BYTES = 2 << 30
PROMPT_TOKENS = 528
ANSWER_TOKENS = 32
STORED = 4
"""Prompts on the disk when it dies."""
ROUNDS = 60
QUICK_ROUNDS = 12
ORDERS = tuple(itertools.permutations(("offloading", "plain", "plain again")))
PAUSED = "vllm:kv_offload_paused"
FAILURES = "vllm:kv_offload_chunk_failures_total"
PAUSE_DEADLINE_S = 120.0


class DiskError(RuntimeError):
    """There can be no filesystem to shut down; the message says why."""


@contextmanager
def small_ext4(directory: Path) -> Iterator[Path]:
    """A filesystem of its own, mounted.

    Raises:
        DiskError: no root, no loop device, or no mkfs.ext4.
    """
    image, place = directory / "dead-disk.img", directory / "dead-disk"
    place.mkdir(exist_ok=True)
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    try:
        _run("mkfs.ext4", "-q", "-F", str(image))
        _run("mount", "-o", "loop", str(image), str(place))
        try:
            yield place
        finally:
            # Lazily: an operation may still be on its way through the dead filesystem.
            _run("umount", "--lazy", str(place))
    finally:
        image.unlink()


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise DiskError(f"{command[0]} is missing") from error
    if done.returncode:
        raise DiskError(f"{' '.join(command)}: {done.stderr.strip()}")


def shut_down(place: Path) -> None:
    """Let everything on the filesystem fail with EIO from now on."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", WITHOUT_LOG_FLUSH))
    finally:
        os.close(descriptor)


class Bench:
    """The two servers."""

    def __init__(self, directory: Path, disk: Path, stack: ExitStack) -> None:
        self._model = ensure_model()
        self._prompts = Prompts(self._model)
        self._directory = directory
        self._disk = disk
        self.root = disk / "root"
        # Everything comes from disk, so that all of it depends on what has died.
        options = {"root": str(self.root), "dram_policy": "none", "preload_lookahead": 0}
        self.offloading = self._serve(
            "offloading",
            [
                "--kv-offloading-backend=pykvcache",
                f"--kv-transfer-config={json.dumps({'kv_connector_extra_config': options})}",
            ],
            stack,
        )
        self.plain = self._serve("plain", [], stack)

    def _serve(self, name: str, arguments: Sequence[str], stack: ExitStack) -> Server:
        log = self._directory / "logs" / f"dead-disk-{name}.log"
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # vLLM leaves two processors to others if there is a connector, else one; on two it
            # then leaves none, and computes with another number of threads.
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
        }
        all_arguments = ["--dtype=float32", "--max-model-len=2048", *arguments]
        return stack.enter_context(
            Server(ServerOptions(self._model, log, all_arguments, environment))
        )

    def store(self) -> None:
        """Put prompts on the disk, and load one of them."""
        for seed in range(STORED):
            self.offloading.complete(self._prompts.of(PROMPT_TOKENS, seed), 1)
        self.offloading.wait_idle(self.root)
        self.offloading.reset_prefix_cache()
        self.offloading.complete(self._prompts.of(PROMPT_TOKENS, 0), 1)
        if not self.offloading.metrics().total(LOAD_BYTES):
            raise RuntimeError("nothing was loaded while the disk was alive")
        self.plain.complete(self._prompts.of(PROMPT_TOKENS, 0), 1)

    def let_die(self) -> int:
        """Shut the disk down, and ask until the server leaves it alone; how many requests that
        took."""
        shut_down(self._disk)
        give_up_at = time.monotonic() + PAUSE_DEADLINE_S
        asked = 0
        while not self.offloading.metrics().total(PAUSED):
            if time.monotonic() > give_up_at:
                raise RuntimeError(
                    f"the disk is still in use {PAUSE_DEADLINE_S:.0f} s after its death"
                )
            self.offloading.reset_prefix_cache()
            self.offloading.complete(self._prompts.of(PROMPT_TOKENS, asked % STORED), 1)
            asked += 1
        return asked

    def round(self, number: int) -> dict[str, tuple[float, float]]:
        """One prompt, asked by each of :data:`ORDERS`' names; seconds to the first token and to the
        last."""
        # Every other one is on the dead disk; the others are new.
        seed = number // 2 % STORED if number % 2 else 1000 + number
        prompt = self._prompts.of(PROMPT_TOKENS, seed)
        seconds = {}
        for name in ORDERS[number // 2 % len(ORDERS)]:
            server = self.offloading if name == "offloading" else self.plain
            server.reset_prefix_cache()
            answer = server.complete(prompt, ANSWER_TOKENS)
            seconds[name] = (answer.ttft_s, answer.total_s)
        return seconds


def report_of(rounds: Sequence[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Medians of the per-round ratios to the server without offloading, their quartiles and
    ranges; ``control``: of that server, asked again, to itself."""
    report: dict[str, Any] = {"rounds": len(rounds)}
    for prefix, name in (("", "offloading"), ("control_", "plain again")):
        for at, figure in enumerate(("ttft", "total")):
            ratios = [each[name][at] / each["plain"][at] for each in rounds]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            report[f"{prefix}{figure}_ratio"] = middle
            report[f"{prefix}{figure}_quartiles"] = [low, high]
            report[f"{prefix}{figure}_range"] = [min(ratios), max(ratios)]
    return report


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the report goes.")] = None,
    quick: Annotated[bool, typer.Option(help=f"{QUICK_ROUNDS} rounds.")] = False,
    directory: Annotated[Path, typer.Option(help="For the disk's image.")] = Path("build/bench"),
) -> None:
    """Compare a server whose disk has died with one that does not offload."""
    console = Console(stderr=True)
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with ending_on_signals(), ExitStack() as stack:
        try:
            disk = stack.enter_context(small_ext4(directory))
        except DiskError as error:
            console.print(f"[red]there is no disk to kill: {error}[/red]")
            raise typer.Exit(1) from None
        progress = stack.enter_context(Progress(*columns, console=console))
        task = progress.add_task("starting two servers", total=None)
        bench = Bench(directory, disk, stack)
        progress.update(task, description="storing")
        bench.store()
        progress.update(task, description="killing the disk")
        until_paused = bench.let_die()
        count = QUICK_ROUNDS if quick else ROUNDS
        rounds = []
        for number in range(count):
            progress.update(task, description=f"round {number + 1} of {count}")
            rounds.append(bench.round(number))
        failures = bench.offloading.metrics().by(FAILURES, "reason")
    report = {**report_of(rounds), "requests_until_paused": until_paused, "failures": failures}
    table = Table("with a dead disk / without offloading", "median", "quartiles", "range")
    for name in ("ttft", "total", "control_ttft", "control_total"):
        spreads = [report[f"{name}_{spread}"] for spread in ("quartiles", "range")]
        cells = [f"{low:.2f}-{high:.2f}" for low, high in spreads]
        table.add_row(name, f"{report[f'{name}_ratio']:.3f}", *cells)
    console.print(table)
    console.print({name: report[name] for name in ("requests_until_paused", "failures")})
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
