# SPDX-License-Identifier: Apache-2.0
"""How well the gate decides, on machines that are known, with the requests of real traffic.

    python -m benchmarks.gate_simulator --traces DIR --json FILE [--quick]

Simulates one engine (``benchmarks/gate_simulation/``) for each machine, trace and policy. DIR
holds Mooncake's ``*_trace.jsonl``; the same requests arrive at the same times for all policies
of a machine. Reported are mean and p99 time to first token, and the regret: how much longer the
mean is than with an oracle, which knows the machine as it is at each moment. See docs/gate.md.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.gate_simulation.machines import PROFILES, SCENARIOS
from benchmarks.gate_simulation.pictures import draw
from benchmarks.gate_simulation.policies import ORACLE, POLICIES
from benchmarks.gate_simulation.report import (
    UTILISATION,
    Case,
    Result,
    Row,
    as_json,
    run,
    summarise,
)

QUICK_REQUESTS = 1000
REQUESTS_MAX = 1_000_000


def all_cases(
    traces: list[Path],
    scenarios: list[str],
    profiles: list[str],
    *,
    seeds: int,
    requests_max: int,
    utilisation: float,
) -> list[Case]:
    """In the order in which they are reported."""
    return [
        Case(scenario, profile, trace, policy, seed, requests_max, utilisation)
        for scenario in scenarios
        for profile in profiles
        for trace in traces
        for policy in POLICIES
        for seed in range(1, seeds + 1)
    ]


def run_all(cases: list[Case], jobs: int, progress: Progress) -> list[Result]:
    """Simulate in so many processes; the order is that of the cases."""
    task = progress.add_task("simulating", total=len(cases))
    with ProcessPoolExecutor(jobs) as executor:
        futures = [executor.submit(run, case) for case in cases]
        for _ in as_completed(futures):
            progress.advance(task)
        return [future.result() for future in futures]


def table_of(rows: list[Row]) -> Table:
    """For people."""
    table = Table("scenario", "machine", "trace", "policy", "mean TTFT", "p99", "regret", "loaded")
    previous: tuple[str, str, str] | None = None
    for row in rows:
        group = (row.scenario, row.profile, row.trace)
        if previous is not None and group != previous:
            table.add_section()
        regret = "" if row.policy == ORACLE else f"{100 * row.regret:+.1f} %"
        table.add_row(
            *(group if group != previous else ("", "", "")),
            row.policy,
            f"{row.ttft_mean_s:.3f} s",
            f"{row.ttft_p99_s:.2f} s",
            regret,
            f"{100 * row.loaded_share:.0f} %",
        )
        previous = group
    return table


def _known(chosen: list[str] | None, known: dict[str, object], console: Console) -> list[str]:
    names = chosen or list(known)
    if unknown := [name for name in names if name not in known]:
        console.print(f"[red]'{unknown[0]}' is unknown: known are {', '.join(known)}[/red]")
        raise typer.Exit(2)
    return names


def main(
    traces: Annotated[Path, typer.Option(help="Folder with *_trace.jsonl.")],
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the report goes.")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder that pictures go to.")] = None,
    quick: Annotated[bool, typer.Option(help=f"{QUICK_REQUESTS} requests of each trace.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each case.")] = 1,
    scenario: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
    profile: Annotated[list[str] | None, typer.Option(help="Only these machines.")] = None,
    utilisation: Annotated[
        float, typer.Option(min=0.05, max=0.95, help="Share of the time that work fills.")
    ] = UTILISATION,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Simulate the gate's decisions."""
    console = Console(stderr=True)
    found = sorted(traces.glob("*_trace.jsonl"))
    if not found:
        console.print(f"[red]no *_trace.jsonl in '{traces}'[/red]")
        raise typer.Exit(2)
    cases = all_cases(
        found,
        _known(scenario, dict(SCENARIOS), console),
        _known(profile, dict(PROFILES), console),
        seeds=seeds,
        requests_max=QUICK_REQUESTS if quick else REQUESTS_MAX,
        utilisation=utilisation,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        results = run_all(cases, jobs, progress)
    console.print(table_of(summarise(results)))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(as_json(results, utilisation), indent=1) + "\n")
    if pictures is not None:
        for path in draw(results, pictures):
            console.print(f"drawn: {path}")


if __name__ == "__main__":
    typer.run(main)
