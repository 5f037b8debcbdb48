# SPDX-License-Identifier: Apache-2.0
"""Reads traces back: those that were ended, and those whose process was killed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pykvcache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """One complete event; seconds of CLOCK_MONOTONIC."""

    process: str
    track: str
    name: str
    start_s: float
    seconds: float
    args: dict[str, Any]


@dataclass(slots=True)
class Trace:
    """The events of some processes."""

    raw: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)


def read_traces(paths: Sequence[Path]) -> Trace:
    """Read files, and all traces in directories.

    Raises:
        ConfigError: no file, or one that is no trace; the message names it.
    """
    trace = Trace()
    files = [file for path in paths for file in (sorted(path.glob("*.json")) or [path])]
    for file in files:
        trace.raw += _events_of(file)
    if not any(event.get("ph") == "X" for event in trace.raw):
        raise ConfigError(f"there are no spans in {', '.join(map(str, files)) or 'no files'}")
    _name(trace)
    return trace


def _events_of(path: Path) -> list[dict[str, Any]]:
    """Lines that are not whole, as a killed process leaves one, are left out."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error.strerror}") from None
    if not data.startswith(b"["):
        raise ConfigError(f"'{path}' is not a trace: it must be an array of events")
    events = _whole(data)
    return [event for event in events if isinstance(event, dict) and "ph" in event]


def _whole(data: bytes) -> Iterable[Any]:
    try:
        return list(msgspec.json.decode(data, type=list[Any]))
    except msgspec.DecodeError:
        return _by_line(data)


def _by_line(data: bytes) -> list[Any]:
    events = []
    for line in data[1:].splitlines():
        try:
            events.append(msgspec.json.decode(line.rstrip(b",")))
        except msgspec.DecodeError:
            continue
    return events


def _name(trace: Trace) -> None:
    tracks: dict[tuple[int, int], str] = {}
    for event in trace.raw:
        if event["ph"] == "M" and event.get("name") == "process_name":
            trace.processes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M" and event.get("name") == "thread_name":
            tracks[event["pid"], event["tid"]] = event["args"]["name"]
    for event in trace.raw:
        if event["ph"] == "X":
            process = trace.processes.get(event["pid"], str(event["pid"]))
            track = tracks.get((event["pid"], event["tid"]), str(event["tid"]))
            trace.spans.append(
                Span(
                    process,
                    track,
                    event["name"],
                    event["ts"] / 1e6,
                    event["dur"] / 1e6,
                    event.get("args", {}),
                )
            )
