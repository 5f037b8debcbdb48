# SPDX-License-Identifier: Apache-2.0
"""Whether the gate chooses the faster one of loading and computing, on a real server.

    python -m benchmarks.gate --json FILE [--quick]

The kernel holds the reads of one server to a rate; the prompts are longer and shorter. In each
round the same prompt is asked three times, in changing order, every time with an empty GPU prefix
cache and all of its chunks on disk: once as the gate chooses, once with everything loaded, and once
with everything computed. So a round tells which was faster and which one the gate chose.

Rates and prompts come in two sets: a grid, and for each prompt two rates of its own, a fifth below
and above the rate at which the grid says that loading and computing take the same time. The gate
starts without a calibration, so that it only knows what it has learned; after each change of the
rate a few loads are made for it to learn from, as traffic would.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import statistics
from collections.abc import Iterator, Sequence
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
from scripts.serving import (
    LOAD_BYTES,
    Prompts,
    Server,
    ServerOptions,
    ending_on_signals,
)

MB = 1_000_000
RATES = (5.0, 10.0, 15.0, 20.0, 40.0, 0.0)
"""MB/s; 0: what the drive gives."""
TOKENS_PER_CHUNK = 256
CHUNKS = (2, 4, 8)
QUICK_CHUNKS = (2, 4)
TAIL_TOKENS = 16
"""Behind the last chunk, so that a hit has little to compute."""
ROUNDS = 5
QUICK_ROUNDS = 3
STEP = 1.2
"""How far the rates just below and above the break-even are from it."""
LESSONS = 6
"""Loads after each change of the rate."""
TIE = 0.05
"""Share by which loading and computing must differ for one of them to be the faster one."""
GROUP = "pykvcache-benchmark"

ARMS: dict[str, dict[str, Any]] = {
    "gate": {},
    "load": {"pykvcache_gate": "always"},
    "compute": {"max_load_tokens": 0},
}


@dataclass(frozen=True)
class Case:
    """A prompt and a rate."""

    rate: float
    """MB/s, 0: unthrottled."""
    chunks: int
    is_near: bool = False

    @property
    def tokens(self) -> int:
        return self.chunks * TOKENS_PER_CHUNK + TAIL_TOKENS

    @property
    def name(self) -> str:
        return f"{'near' if self.is_near else 'grid'}_bw{self.rate:.4g}_t{self.tokens}"


@dataclass(frozen=True)
class Round:
    """Seconds to the first token of each arm, and the share of the hit that the gate loaded."""

    gate_s: float
    load_s: float
    compute_s: float
    loaded: float

    @property
    def is_tie(self) -> bool:
        return abs(math.log(self.load_s / self.compute_s)) < math.log1p(TIE)

    @property
    def is_right(self) -> bool:
        """Whether the gate chose the faster one; of a part, whether that was no slower."""
        if self.loaded in (0.0, 1.0):
            return (self.loaded == 1.0) == (self.load_s < self.compute_s)
        return self.gate_s <= min(self.load_s, self.compute_s)


@dataclass
class Results:
    """All rounds, by case."""

    rounds: dict[Case, list[Round]] = field(default_factory=dict)

    def ratio(self, case: Case) -> float:
        """Median over the rounds of loading's time to computing's."""
        return statistics.median(each.load_s / each.compute_s for each in self.rounds[case])

    def break_even(self, chunks: int) -> float | None:
        """MB/s at which loading the prompt takes as long as computing it: between the two rates
        of the grid on both sides, straight in the logarithms; beyond the fastest one as if a load
        took as many times as long as the rate is lower. None below the slowest one."""
        grid = sorted(
            (case.rate, math.log(self.ratio(case)))
            for case in self.rounds
            if case.chunks == chunks and case.rate and not case.is_near
        )
        for (slow, above), (fast, below) in itertools.pairwise(grid):
            if above > 0 >= below:
                part = above / (above - below)
                return math.exp((1 - part) * math.log(slow) + part * math.log(fast))
        rate, above = grid[-1] if grid else (0.0, 0.0)
        return rate * math.exp(above) if above > 0 else None

    def report(self) -> dict[str, Any]:
        """The keys of the JSON file; see :func:`main`."""
        every = [each for rounds in self.rounds.values() for each in rounds]
        near = [each for case, rounds in self.rounds.items() if case.is_near for each in rounds]
        regressions = {
            case.name: statistics.median(each.gate_s / each.compute_s for each in rounds)
            for case, rounds in self.rounds.items()
        }
        return {
            "choice_accuracy": _accuracy(every),
            "choice_accuracy_near": _accuracy(near),
            "ties": sum(each.is_tie for each in every),
            "measurements": len(every),
            "worst_regression_vs_recompute": max(regressions.values()),
            "worst_regression_case": max(regressions, key=lambda name: regressions[name]),
            "gain_vs_always_load": _gain([each.load_s / each.gate_s for each in every]),
            "gain_vs_never_load": _gain([each.compute_s / each.gate_s for each in every]),
            "break_even_mb_s": {
                case.tokens: self.break_even(case.chunks)
                for case in self.rounds
                if not case.is_near
            },
            "cases": {case.name: _figures(rounds) for case, rounds in self.rounds.items()},
        }


def _accuracy(rounds: Sequence[Round]) -> float | None:
    """Of the rounds that tell a faster one."""
    told = [each.is_right for each in rounds if not each.is_tie]
    return sum(told) / len(told) if told else None


def _gain(ratios: Sequence[float]) -> float:
    return statistics.geometric_mean(ratios)


def _figures(rounds: Sequence[Round]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "right": sum(each.is_right for each in rounds if not each.is_tie),
        "ties": sum(each.is_tie for each in rounds),
        "loaded": [round(each.loaded, 3) for each in rounds],
    }
    for name, ratios in (
        ("gate_vs_compute", [each.gate_s / each.compute_s for each in rounds]),
        ("gate_vs_load", [each.gate_s / each.load_s for each in rounds]),
        ("load_vs_compute", [each.load_s / each.compute_s for each in rounds]),
    ):
        figures[name] = statistics.median(ratios)
        figures[f"{name}_range"] = [min(ratios), max(ratios)]
    return figures


class Bench:
    """One server whose reads are throttled, and its prompts on disk."""

    def __init__(self, directory: Path, throttle: ReadThrottle, stack: ExitStack) -> None:
        model = ensure_model()
        self._prompts = Prompts(model)
        self._throttle = throttle
        self.root = directory / "gate-root"
        stack.callback(shutil.rmtree, self.root, ignore_errors=True)
        extra = {"root": str(self.root), "dram_policy": "none", "preload_lookahead": 0}
        arguments = [
            "--kv-offloading-backend=pykvcache",
            f"--kv-transfer-config={json.dumps({'kv_connector_extra_config': extra})}",
            "--dtype=float32",
            "--max-model-len=4096",
        ]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
        options = ServerOptions(model, directory / "logs" / "gate.log", arguments, environment)
        self._server = stack.enter_context(Server(options))
        throttle.add(self._server.process_ids)

    def store(self, chunks: Sequence[int]) -> None:
        """Compute and store every prompt."""
        self._throttle.limit(0)
        for count in chunks:
            self._ask(count, ARMS["compute"])
        self._server.wait_idle(self.root)

    def begin(self, rate: float, chunks: int) -> None:
        """Change the rate, and let the gate learn it."""
        self._throttle.limit(int(rate * MB))
        for _ in range(LESSONS):
            self._ask(chunks, ARMS["load"])

    def round(self, chunks: int, order: Sequence[str]) -> Round:
        """One prompt in every arm."""
        seconds: dict[str, float] = {}
        loaded: dict[str, float] = {}
        for arm in order:
            before = self._loaded()
            seconds[arm] = self._ask(chunks, ARMS[arm])
            loaded[arm] = self._loaded() - before
        if loaded["compute"] or not loaded["load"]:
            raise RuntimeError(f"{loaded} bytes were loaded: the arms are not what they say")
        share = min(1.0, loaded["gate"] / loaded["load"])
        return Round(seconds["gate"], seconds["load"], seconds["compute"], share)

    def _loaded(self) -> float:
        return self._server.metrics().total(LOAD_BYTES)

    def _ask(self, chunks: int, transfer: dict[str, Any]) -> float:
        self._server.reset_prefix_cache()
        tokens = chunks * TOKENS_PER_CHUNK + TAIL_TOKENS
        # Another seed for each length: one is not the beginning of another.
        prompt = self._prompts.of(tokens, seed=chunks)
        return self._server.complete(prompt, 1, transfer=transfer).ttft_s


def orders() -> Iterator[tuple[str, ...]]:
    """Every order of the arms in turn."""
    return itertools.cycle(itertools.permutations(ARMS))


def measure(
    bench: Bench, cases: Sequence[Case], rounds: int, results: Results, progress: Progress
) -> None:
    """All cases, those of one rate after each other."""
    order = orders()
    task = progress.add_task("measuring", total=len(cases))
    rate: float | None = None
    for case in cases:
        progress.update(task, description=case.name)
        if case.rate != rate:
            rate = case.rate
            bench.begin(rate, min(each.chunks for each in cases if each.rate == rate))
        results.rounds[case] = [bench.round(case.chunks, next(order)) for _ in range(rounds)]
        progress.advance(task)
        progress.console.print(_line(case, results.rounds[case]))


def _line(case: Case, rounds: Sequence[Round]) -> str:
    figures = _figures(rounds)
    return (
        f"{case.name}: load / compute {figures['load_vs_compute']:.3f}, gate / compute "
        f"{figures['gate_vs_compute']:.3f}, loaded {figures['loaded']}"
    )


def _table(report: dict[str, Any]) -> Table:
    table = Table("case", "load / compute", "gate / compute", "gate / load", "right", "ties")
    for name, figures in report["cases"].items():
        cells = []
        for key in ("load_vs_compute", "gate_vs_compute", "gate_vs_load"):
            low, high = figures[f"{key}_range"]
            cells.append(f"{figures[key]:.3f} ({low:.2f}-{high:.2f})")
        told = len(figures["loaded"]) - figures["ties"]
        table.add_row(name, *cells, f"{figures['right']} of {told}", str(figures["ties"]))
    return table


def near_cases(results: Results, chunks: Sequence[int]) -> list[Case]:
    """For each prompt a rate just below and one just above its break-even."""
    cases = []
    for count in chunks:
        rate = results.break_even(count)
        if rate is not None:
            cases += [
                Case(rate / STEP, count, is_near=True),
                Case(rate * STEP, count, is_near=True),
            ]
    return cases


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the report goes.")] = None,
    quick: Annotated[bool, typer.Option(help="Two prompts, three rounds.")] = False,
    directory: Annotated[Path, typer.Option(help="On the drive to measure.")] = Path("build/bench"),
) -> None:
    """Compare what the gate chooses with loading always and never.

    Keys of the report: ``choice_accuracy``, of the rounds in which loading and computing differ
    by more than 5 %, the share in which the gate chose the faster one (``choice_accuracy_near``:
    of those near the break-even); ``worst_regression_vs_recompute``, of all cases the largest
    median of the gate's time to computing's; ``gain_vs_always_load`` and ``gain_vs_never_load``,
    geometric means of the others' times to the gate's.
    """
    console = Console(stderr=True)
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    chunks = QUICK_CHUNKS if quick else CHUNKS
    rounds = QUICK_ROUNDS if quick else ROUNDS
    results = Results()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with ending_on_signals(), ExitStack() as stack:
        try:
            throttle = ReadThrottle(directory, name=GROUP)
        except ThrottleError as error:
            console.print(f"[red]the drive cannot be throttled: {error}[/red]")
            raise typer.Exit(1) from None
        stack.callback(throttle.close)
        progress = stack.enter_context(Progress(*columns, console=console))
        bench = Bench(directory, throttle, stack)
        bench.store(chunks)
        grid = [Case(rate, count) for rate in RATES for count in chunks]
        measure(bench, grid, rounds, results, progress)
        measure(bench, near_cases(results, chunks), rounds, results, progress)
    report = results.report()
    console.print(_table(report))
    console.print({name: value for name, value in report.items() if name != "cases"})
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
