# SPDX-License-Identifier: Apache-2.0
"""What a process did when, as a trace that Perfetto and Chrome open.

The file is the Trace Event Format's array of events, one on each line, whose closing bracket
may be missing: a process that is killed leaves a trace that opens. Times are those of
CLOCK_MONOTONIC, which all processes of a host share, so traces can be put together.

Recording appends a tuple; a thread of its own writes them down now and then.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pykvcache.errors import ConfigError

WRITE_EVERY_S = 1.0
"""Seconds of events that a killed process takes with it."""

Event = tuple[str, str, int, int, Mapping[str, Any] | None]


class Tracer:
    """The trace of one process. Any thread may record."""

    def __init__(self, directory: Path, process: str, *, events_max: int) -> None:
        """Args:
        directory: made if it is not there; the file is ``<process>-<pid>.json``.
        process: how the viewer calls this process.
        events_max: events after which nothing more is recorded.

        Raises:
            ConfigError: the file cannot be written.
        """
        self.path = directory / f"{process}-{os.getpid()}.json"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"option 'trace_path' is '{directory}': a file must be writable there ({error})"
            ) from None
        self._events: list[Event] = []
        self._events_left = events_max
        self._tracks: dict[str, int] = {}
        self._encode = msgspec.json.Encoder().encode
        self._file.write(b"[\n" + self._line(_named("process_name", process)))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pykvcache-trace", daemon=True)
        self._thread.start()

    @staticmethod
    def now() -> int:
        """The time of events, in ns."""
        return time.monotonic_ns()

    def span(
        self,
        track: str,
        name: str,
        start_ns: int,
        end_ns: int,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Record what lasted from start to end. Spans of one track must not overlap."""
        if self._events_left > 0:
            self._events_left -= 1
            self._events.append((track, name, start_ns, end_ns, args))

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._stop.set()
        self._thread.join()
        if not self._file.closed:
            self._file.write(self._line({"ph": "M", "name": "end", "pid": os.getpid()})[:-2])
            self._file.write(b"\n]\n")
            self._file.close()

    def _run(self) -> None:
        while not self._stop.wait(WRITE_EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        events, self._events = self._events, []
        lines = []
        for track, name, start_ns, end_ns, args in events:
            track_id = self._tracks.get(track)
            if track_id is None:
                track_id = self._tracks[track] = len(self._tracks) + 1
                lines.append(self._line(_named("thread_name", track) | {"tid": track_id}))
            event = {
                "ph": "X",
                "name": name,
                "pid": os.getpid(),
                "tid": track_id,
                "ts": start_ns / 1000,
                "dur": (end_ns - start_ns) / 1000,
            }
            if args:
                event["args"] = args
            lines.append(self._line(event))
        try:
            self._file.write(b"".join(lines))
        except OSError:  # a full disk must not end anything but the trace
            self._events_left = 0

    def _line(self, event: Mapping[str, Any]) -> bytes:
        return self._encode(event) + b",\n"


class Lanes:
    """Tracks for spans that overlap: the lowest free one of those with the same name."""

    def __init__(self) -> None:
        self._free: dict[str, list[int]] = defaultdict(list)
        self._made: dict[str, int] = defaultdict(int)

    def take(self, name: str) -> str:
        """A track on which nothing is going on; give it back."""
        if self._free[name]:
            return f"{name} {heapq.heappop(self._free[name])}"
        self._made[name] += 1
        return f"{name} {self._made[name]}"

    def give_back(self, track: str) -> None:
        """Nothing is going on on it any more."""
        name, _, number = track.rpartition(" ")
        heapq.heappush(self._free[name], int(number))


def _named(kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": os.getpid(), "args": {"name": name}}
