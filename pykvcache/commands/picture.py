# SPDX-License-Identifier: Apache-2.0
"""A timeline of a trace, drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykvcache.errors import ConfigError

if TYPE_CHECKING:
    from pykvcache.commands.trace_files import Span, Trace

COLORS = {
    "forward pass": "#4c72b0",
    "empty step": "#c9d3e6",
    "read": "#dd8452",
    "write": "#8172b3",
    "copy for load": "#55a868",
    "copy for store": "#a9d4b4",
    "load": "#c44e52",
    "store": "#937860",
}
OTHER = "#8c8c8c"
LANE_INCHES = 0.16
WIDTH_INCHES = 11.0


def draw(trace: Trace, output: Path, start_s: float, end_s: float) -> None:
    """Write the picture of the spans between two moments.

    Args:
        trace: at least one span.
        output: its suffix says which format.
        start_s, end_s: seconds after the first span's start; an end of 0 is that of the last.

    Raises:
        ConfigError: matplotlib is not there, nothing lies between, or the format is unknown.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ConfigError("drawing needs matplotlib: pip install matplotlib") from None
    zero = min(span.start_s for span in trace.spans)
    end_s = end_s or max(span.start_s + span.seconds for span in trace.spans) - zero
    shown = [
        span
        for span in trace.spans
        if span.start_s - zero < end_s and span.start_s + span.seconds - zero > start_s
    ]
    if not shown:
        raise ConfigError(f"no span lies between {start_s} s and {end_s} s")
    rows = _rows(shown)
    figure = Figure(figsize=(WIDTH_INCHES, 1.2 + LANE_INCHES * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names: dict[str, Any] = {}
    for span in shown:
        color = COLORS.get(span.name, OTHER)
        names.setdefault(span.name if span.name in COLORS else "other", color)
        bar = [(span.start_s - zero, max(span.seconds, (end_s - start_s) / 2000))]
        axes.broken_barh(bar, (rows[span.process, span.track] - 0.4, 0.8), color=color)
    axes.set_yticks(list(rows.values()), [f"{process}  {track}" for process, track in rows])
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlim(start_s, end_s)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in sorted(names.items())],
        loc="outside upper center",
        ncols=len(names),
        fontsize=8,
        frameon=False,
    )
    try:
        figure.savefig(output, dpi=110)
    except ValueError as error:
        raise ConfigError(f"'{output}' cannot be written: {error}") from None


def _rows(spans: list[Span]) -> dict[tuple[str, str], int]:
    """Tracks from top to bottom: the scheduler's, then each worker's, from request to disk."""
    order = ("step", "plan", "look-up", "load", "store", "copy", "read", "write", "open", "file")

    def rank(process_and_track: tuple[str, str]) -> tuple[str, int, str, int]:
        process, track = process_and_track
        base, _, number = track.rpartition(" ")
        known = [at for at, name in enumerate(order) if track.startswith(name)]
        lane = int(number) if number.isdigit() else 0
        return process, known[0] if known else len(order), base, lane

    tracks = sorted({(span.process, span.track) for span in spans}, key=rank)
    return {track: row for row, track in enumerate(tracks)}
