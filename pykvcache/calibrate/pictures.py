# SPDX-License-Identifier: Apache-2.0
"""The paper's figures 6 and 7 of this machine, drawn with matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykvcache.calibrate.frontier import (
    bytes_per_token,
    lengths_between,
    needed_bandwidth,
    speedup,
)
from pykvcache.errors import ConfigError
from pykvcache.gate.calibration import Calibration, Tier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 80
ROWS = 60
LOG2_MAX = 5.0
"""Where the colours end: 32 times faster or slower."""
BEYOND = 2
"""Up to so many times the longest prompt measured is drawn; what lies beyond it is a guess."""
DPI = 110


def draw(calibration: Calibration, output: Path) -> list[Path]:
    """Write both pictures beside a calibration.

    Args:
        calibration: of the file.
        output: the file.

    Raises:
        ConfigError: matplotlib is not there, or a picture cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "drawing needs matplotlib: pip install matplotlib, or give --no-picture"
        ) from None
    tiers = [tier for tier in ("disk", "dram") if tier in calibration.content.tiers]
    written = []
    for name, width, fill in (
        ("frontier", 1.2 + 4.6 * len(tiers), _frontier),
        ("bandwidth", 6.4, _bandwidth),
    ):
        figure = Figure(figsize=(width, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure, calibration, tiers)
        path = output.with_suffix(f".{name}.png")
        try:
            figure.savefig(path, dpi=DPI)
        except OSError as error:
            raise ConfigError(f"'{path}' cannot be written: {error.strerror}") from None
        written.append(path)
    return written


def _lengths(calibration: Calibration) -> list[int]:
    shortest = calibration.content.compute.tokens[0]
    return list(lengths_between(max(2, shortest // 2), BEYOND * calibration.max_tokens, COLUMNS))


def _frontier(figure: Figure, calibration: Calibration, tiers: list[Tier]) -> None:
    """Figure 6: document size against the share of its prefix that is loaded."""
    lengths = _lengths(calibration)
    shares = [(row + 1) / ROWS for row in range(ROWS)]
    all_axes = figure.subplots(1, len(tiers), sharey=True, squeeze=False)[0]
    mesh: Any = None
    for axes, tier in zip(all_axes, tiers, strict=True):
        field = [
            [_log2_speedup(calibration, tier, tokens, share) for tokens in lengths]
            for share in shares
        ]
        percent = [100 * share for share in shares]
        mesh = axes.pcolormesh(
            lengths, percent, field, cmap="RdBu", vmin=-LOG2_MAX, vmax=LOG2_MAX, shading="nearest"
        )
        values = [value for row in field for value in row]
        if min(values) < 0 < max(values):
            axes.contour(lengths, percent, field, levels=[0], colors="black", linewidths=1.5)
        axes.axvline(calibration.max_tokens, color="grey", linestyle=":", linewidth=1)
        axes.set_title(f"from {tier}")
        _token_axis(axes)
    all_axes[0].set_ylabel("prefix loaded, % of the prompt")
    bar = figure.colorbar(mesh, ax=list(all_axes))
    bar.set_label("log2 of the speed-up over recomputing")


def _log2_speedup(calibration: Calibration, tier: Tier, tokens: int, share: float) -> float:
    prefix = max(1, min(round(tokens * share), tokens - 1))
    return math.log2(max(speedup(calibration, tier, tokens, prefix), 1e-9))


def _bandwidth(figure: Figure, calibration: Calibration, tiers: list[Tier]) -> None:
    """Figure 7: the bandwidth that a whole prompt's load needs, and what there is."""
    axes = figure.subplots()
    lengths = _lengths(calibration)
    needed = [needed_bandwidth(calibration, tokens) for tokens in lengths]
    axes.plot(lengths, needed, color="black", label="needed to break even")
    per_token = bytes_per_token(calibration)
    for tier, color in zip(tiers, ("#c44e52", "#4c72b0"), strict=False):
        there = [_measured(calibration, tier, per_token, tokens) for tokens in lengths]
        axes.plot(lengths, there, color=color, linestyle="--", label=f"{tier}, measured")
    axes.axvline(calibration.max_tokens, color="grey", linestyle=":", linewidth=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: _rate(value))
    axes.yaxis.set_minor_formatter("")
    axes.set_ylabel("bandwidth of KV, each rank")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    _token_axis(axes)


def _measured(calibration: Calibration, tier: Tier, per_token: float, tokens: int) -> float:
    size = round(tokens * per_token)
    load_s = calibration.load_s(tier, size)
    return size / load_s if load_s > 0 else float("nan")


def _token_axis(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.set_xlabel("prompt, tokens")


def _rate(bytes_per_s: float) -> str:
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:g} {unit}"
    return f"{bytes_per_s / 1e3:g} kB/s"
