# SPDX-License-Identifier: Apache-2.0
"""Pictures of a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.gate_simulation.policies import ORACLE
from benchmarks.gate_simulation.report import BINS, Result, Row, summarise

COLORS = {
    "never": "#8c8c8c",
    "always": "#c44e52",
    "calibration only": "#dd8452",
    "calibrated": "#55a868",
    "online": "#4c72b0",
    ORACLE: "black",
}
HIGHEST = 5.0
"""Bars end there: beyond it a queue grows without end and the ratio is that of its length."""
DPI = 110
SHOWN = ("h100-pm1743", "conversation")
"""Of which the slow disk is drawn."""


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the pictures of which there are results.

    Args:
        results: of all runs.
        folder: where they go.
    """
    written = []
    steady = [row for row in summarise(results) if row.scenario == "steady"]
    slow = [
        each
        for each in results
        if (each.scenario, each.profile, each.trace) == ("slow-disk", *SHOWN)
        and each.seed == results[0].seed
    ]
    if steady:
        figure = _figure(11.0, 4.4)
        _bars(figure, steady)
        written.append(_save(figure, folder / "gate-policies.png"))
    if slow:
        figure = _figure(8.0, 3.6)
        _timeline(figure, slow)
        written.append(_save(figure, folder / "gate-slow-disk.png"))
    return written


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return path


def _bars(figure: Figure, rows: Sequence[Row]) -> None:
    """Mean time to first token relative to the oracle's."""
    axes = figure.subplots()
    groups = list(dict.fromkeys((row.profile, row.trace) for row in rows))
    policies = [name for name in COLORS if name != ORACLE]
    width = 0.8 / len(policies)
    for number, policy in enumerate(policies):
        ratios = {(row.profile, row.trace): 1 + row.regret for row in rows if row.policy == policy}
        for place, group in enumerate(groups):
            left = place + (number - len(policies) / 2 + 0.5) * width
            ratio = ratios[group]
            axes.bar(
                left,
                min(ratio, HIGHEST) - 1,
                width,
                bottom=1,
                color=COLORS[policy],
                label=policy if not place else None,
            )
            if ratio > HIGHEST:
                axes.annotate(
                    f"{ratio:.0f}x", (left, HIGHEST), ha="center", va="bottom", fontsize=7
                )
    axes.axhline(1.0, color="black", linewidth=1)
    axes.axhline(1.05, color="black", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_ylim(0.95, HIGHEST * 1.15)
    axes.set_yticks([1, 1.05, 1.25, 1.5, 2, 3, 5], ["1", "1.05", "1.25", "1.5", "2", "3", "5"])
    axes.minorticks_off()
    axes.set_xticks(range(len(groups)), ["\n".join(group) for group in groups], fontsize=7.5)
    axes.set_ylabel("mean TTFT / oracle's")
    axes.legend(ncols=len(policies), loc="upper center", frameon=False, bbox_to_anchor=(0.5, 1.1))


def _timeline(figure: Figure, results: Sequence[Result]) -> None:
    """What is loaded of the hits while the disk is as usual, slow, and as usual again."""
    axes = figure.subplots()
    places = [100 * (number + 0.5) / BINS for number in range(BINS)]
    axes.axvspan(100 / 3, 200 / 3, color="#f2e3d5", label="disk 10 times as slow")
    for result in results:
        if result.policy in ("calibration only", "online", ORACLE):
            shares = [float("nan") if each is None else 100 * each for each in result.loaded_of_hit]
            axes.plot(
                places,
                shares,
                color=COLORS[result.policy],
                linestyle="--" if result.policy == ORACLE else "-",
                label=result.policy,
            )
    axes.set_xlabel("time, % of the run")
    axes.set_ylabel("loaded, % of the tokens found")
    axes.set_title(f"{SHOWN[0]}, {SHOWN[1]}", fontsize=10)
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, fontsize=8, ncols=2)
