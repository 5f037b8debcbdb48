# SPDX-License-Identifier: Apache-2.0
"""A full queue on a small pool (the paper's figure 12), without a model.

    python -m benchmarks.pressure --json FILE

32 requests wait, each with a prefix of 48 chunks on disk; the pool holds 64. Once a step the head
of the queue is shown to the contender, and then the queue is walked as vLLM's scheduler does: each
request is looked up chunk by chunk, one whose look-up is not decided yet is passed over, and the
first one that is decided runs: its hit is loaded, a few new chunks are stored. Who has run waits
again at the end of the queue until it has had its turns. The GPU has room for one request and
remembers nothing.

A contender is vLLM's manager and what moves the chunks: ours, vLLM's
``TieringOffloadingManager`` with its ``fs`` tier, and the same with this backend's tier. They all
see the same requests and steps.
"""

from __future__ import annotations

import json
import select
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.hashes import chunk_hashes

MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """How large everything is. Chunks, except where the name says otherwise."""

    requests: int = 32
    prefix: int = 48
    new: int = 2
    """Stored by each run."""
    turns: int = 2
    pool: int = 64
    chunk_bytes: int = MIB
    compute_s: float = 0.02
    """Seconds that a run computes; reading ahead has them."""
    recompute_s: float = 0.02
    """Seconds more for every chunk of the prefix that was not loaded."""
    idle_s: float = 0.001
    """Seconds of a step in which nothing runs, as short as vLLM's."""
    steps_max: int = 100_000


@dataclass
class Request:
    """One of those that wait."""

    number: int
    prefix: Sequence[bytes]
    """Keys, all of them on disk."""
    turn: int = 0

    @property
    def req_id(self) -> str:
        return f"{self.number}-{self.turn}"

    def new_keys(self, count: int) -> list[bytes]:
        """Keys of the chunks that this turn stores."""
        generation = 1_000_000 + 1000 * self.number + self.turn
        return [key_of(digest) for digest in chunk_hashes(generation, count)]


class Contender(Protocol):
    """A manager and its transfers, as vLLM's scheduler uses them."""

    def arrive(self, request: Request) -> None:
        """The request begins to wait."""

    def show(self, waiting: Sequence[Request]) -> None:
        """The queue at the beginning of a step."""

    def look_up(self, request: Request) -> int | None:
        """Chunks from the front that can be loaded; None: ask again in a later step."""

    def run(self, request: Request, chunks: int) -> int:
        """Load so many, and store the turn's new ones.

        Returns:
            How many were loaded.
        """

    def end_step(self, ran: Request | None) -> None:
        """The step is over; the request that ran is finished."""

    @property
    def bytes_read(self) -> int:
        """From disk, since the start."""


@dataclass
class Outcome:
    """What a contender needed for the whole queue."""

    bytes_read: int = 0
    bytes_used: int = 0
    """Of the chunks that were loaded, once for each run."""
    recomputed: list[str] = field(default_factory=list)
    """Runs that computed some of their prefix anew."""
    runs: int = 0
    steps: int = 0

    def report(self) -> dict[str, float]:
        """``read_amplification``: bytes read over bytes used; what recomputing was left to use
        is not read anew by anybody, so a contender that loads nothing counts what it read."""
        return {
            "read_amplification": self.bytes_read / max(1, self.bytes_used),
            "recomputed_requests": len(self.recomputed),
            "runs": self.runs,
            "steps": self.steps,
            "gb_read": self.bytes_read / 1e9,
        }


def key_of(digest: bytes) -> bytes:
    """vLLM's ``OffloadKey`` of a chunk of the first KV cache group."""
    from vllm.v1.kv_offload.base import make_offload_key

    return bytes(make_offload_key(digest, 0))


def make_requests(shape: Shape) -> list[Request]:
    """The requests in the order of the queue."""
    return [
        Request(number, [key_of(digest) for digest in chunk_hashes(number, shape.prefix)])
        for number in range(shape.requests)
    ]


def play(
    contender: Contender,
    shape: Shape,
    wait: Callable[[float], object],
    on_run: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run the queue to its end.

    Args:
        contender: what is tried.
        shape: sizes.
        wait: passes so many seconds.
        on_run: called after each run.
    """
    outcome = Outcome()
    queue = deque(make_requests(shape))
    for request in queue:
        contender.arrive(request)
    while queue and outcome.steps < shape.steps_max:
        outcome.steps += 1
        contender.show(list(queue))
        ran = _step(contender, queue, shape, outcome, wait)
        if ran is None:
            wait(shape.idle_s)
        contender.end_step(ran)
        if ran is not None:
            on_run()
            if ran.turn + 1 < shape.turns:
                ran.turn += 1
                contender.arrive(ran)
                queue.append(ran)
    outcome.bytes_read = contender.bytes_read
    outcome.recomputed += [request.req_id for request in queue]  # never had its turn
    return outcome


def _step(
    contender: Contender,
    queue: deque[Request],
    shape: Shape,
    outcome: Outcome,
    wait: Callable[[float], object],
) -> Request | None:
    for request in list(queue):
        ready = contender.look_up(request)
        if ready is None:
            continue
        loaded = contender.run(request, ready)
        missing = len(request.prefix) - loaded
        wait(shape.compute_s + missing * shape.recompute_s)
        queue.remove(request)
        outcome.runs += 1
        outcome.bytes_used += loaded * shape.chunk_bytes
        if missing:
            outcome.recomputed.append(request.req_id)
        return request
    return None


def pause(seconds: float) -> None:
    """Let time pass; the transfers' threads go on."""
    select.select([], [], [], seconds)


def _table(report: dict[str, dict[str, float]]) -> Table:
    table = Table("", "bytes read / used", "requests that recomputed", "GB read", "steps")
    for name, figures in report.items():
        table.add_row(
            name,
            f"{figures['read_amplification']:.2f}",
            f"{figures['recomputed_requests']:.0f} of {figures['runs']:.0f}",
            f"{figures['gb_read']:.1f}",
            f"{figures['steps']:.0f}",
        )
    return table


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the report goes.")] = None,
    directory: Annotated[Path, typer.Option(help="On the drive to use.")] = Path("build/bench"),
    only: Annotated[list[str] | None, typer.Option(help="ours, native, tier")] = None,
) -> None:
    """Compare what a full queue makes each backend read."""
    from benchmarks.pressure_contenders import CONTENDERS

    console = Console(stderr=True)
    if unknown := [name for name in only or () if name not in CONTENDERS]:
        console.print(f"[red]unknown contender {unknown[0]}: {', '.join(CONTENDERS)}[/red]")
        raise typer.Exit(2)
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    shape = Shape()
    report = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name in only or CONTENDERS:
            task = progress.add_task(name, total=shape.requests * shape.turns)
            place = Path(tempfile.mkdtemp(prefix=f"pressure-{name}-", dir=directory))
            try:
                with CONTENDERS[name](shape, place) as contender:
                    outcome = play(contender, shape, pause, lambda t=task: progress.advance(t))
            finally:
                shutil.rmtree(place, ignore_errors=True)
            report[name] = outcome.report()
    console.print(_table(report))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
