# SPDX-License-Identifier: Apache-2.0
"""``pykvcache trace``: put the traces of a server's processes together, and draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from pykvcache.commands.picture import draw
from pykvcache.commands.trace_files import Span, Trace, read_traces
from pykvcache.errors import ConfigError

app = typer.Typer(help="Traces written with the option trace_path.", no_args_is_help=True)

Files = Annotated[list[Path], typer.Argument(help="Trace files, or directories of them.")]


@app.command()
def merge(
    output: Annotated[Path, typer.Argument(help="The file to write.")],
    files: Files,
) -> None:
    """Write one trace that holds all of them, for https://ui.perfetto.dev."""
    trace = read_traces(files)
    output.write_bytes(msgspec.json.encode(trace.raw))
    Console(stderr=True).print(f"{len(trace.spans)} spans of {len(trace.processes)} processes")


@app.command()
def render(
    files: Files,
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture: .png, .svg, .pdf.")],
    start_s: Annotated[float, typer.Option("--from", help="Seconds after the first span.")] = 0.0,
    end_s: Annotated[float, typer.Option("--to", help="Seconds; 0: the last span's end.")] = 0.0,
    without: Annotated[
        list[str] | None, typer.Option("--without", help="Not this track: 'open'. Repeatable.")
    ] = None,
) -> None:
    """Draw a timeline: a row for each track, time to the right."""
    trace: Trace = read_traces(files)
    draw(_without(trace, without or ()), output, start_s, end_s)


def _without(trace: Trace, tracks: Sequence[str]) -> Trace:
    """Raises:
    ConfigError: there is no such track.
    """
    known = sorted({_track(span) for span in trace.spans})
    for track in tracks:
        if track not in known:
            raise ConfigError(f"--without is '{track}': must be one of {', '.join(known)}")
    return replace(trace, spans=[span for span in trace.spans if _track(span) not in tracks])


def _track(span: Span) -> str:
    """Without the number of its lane."""
    return span.track.rstrip("0123456789 ")
