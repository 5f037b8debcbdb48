# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side and the workers add to a trace: look-ups, plans, steps, jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from pathlib import Path

from vllm.logger import init_logger

from pykvcache.config import Config
from pykvcache.trace import Lanes, Tracer
from pykvcache.transfer.jobs import Job, JobResult

logger = init_logger(__name__)


def make_tracer(options: Config, process: str) -> Tracer | None:
    """The process's tracer, or None without ``trace_path``.

    Raises:
        ConfigError: its file cannot be written.
    """
    if not options.trace_path:
        return None
    directory = Path(options.trace_path).expanduser().absolute()
    tracer = Tracer(directory, process, events_max=options.trace_events_max)
    logger.info("KV offloading: tracing to %s", tracer.path)
    return tracer


class SchedulerTrace:
    """The scheduler's side; without a tracer it does nothing."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer
        self._lanes = Lanes()
        self._steps: deque[tuple[int, str, int, int, int]] = deque()
        self._looked_up: tuple[str, int, int, int] | None = None

    def begin_step(self, number: int, tokens: int, requests: int) -> None:
        """A step has been scheduled; with asynchronous scheduling before the last one ended."""
        if self._tracer is not None:
            self._end_look_ups()
            track = self._lanes.take("step")
            self._steps.append((number, track, self._tracer.now(), tokens, requests))

    def end_step(self, number: int) -> None:
        """The output of this step is there, and so are those of the steps before."""
        if self._tracer is None:
            return
        while self._steps and self._steps[0][0] <= number:
            _, track, start, tokens, requests = self._steps.popleft()
            self._lanes.give_back(track)
            name = "forward pass" if tokens else "empty step"
            args = {"tokens": tokens, "requests": requests}
            self._tracer.span(track, name, start, self._tracer.now(), args)

    def look_up(self, req_id: str) -> None:
        """A chunk of the request is looked up; those that follow each other are one span."""
        if self._tracer is None:
            return
        if self._looked_up is None or self._looked_up[0] != req_id:
            self._end_look_ups()
            now = self._tracer.now()
            self._looked_up = (req_id, now, now, 0)
        _, start, _, chunks = self._looked_up
        self._looked_up = (req_id, start, self._tracer.now(), chunks + 1)

    def plan(self, name: str, req_id: str, keys: Collection[bytes]) -> None:
        """A load or store of these chunks was planned."""
        if self._tracer is not None and keys:
            self._end_look_ups()
            now = self._tracer.now()
            self._tracer.span("plan", name, now, now, {"request": req_id, "chunks": len(keys)})

    def _end_look_ups(self) -> None:
        if self._tracer is not None and self._looked_up is not None:
            req_id, start, end, chunks = self._looked_up
            self._looked_up = None
            self._tracer.span(
                "look-up", "look-up", start, end, {"request": req_id, "asked": chunks}
            )

    def close(self) -> None:
        """Write what is left."""
        if self._tracer is not None:
            self._end_look_ups()
            self._tracer.close()


class WorkerTrace:
    """A worker's jobs; without a tracer it does nothing."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer
        self._lanes = Lanes()
        self._jobs: dict[int, tuple[str, int]] = {}

    def submit(self, job: Job) -> None:
        """The reactor has the job."""
        if self._tracer is not None:
            self._jobs[job.job_id] = (self._lanes.take(f"{job.direction} job"), self._tracer.now())

    def end(self, result: JobResult) -> None:
        """The engine has taken its result."""
        if self._tracer is None or result.job_id not in self._jobs:
            return
        track, start = self._jobs.pop(result.job_id)
        self._lanes.give_back(track)
        args = {"job": result.job_id, "chunks": result.chunks, "bytes": result.copied_bytes}
        args |= {"from dram": result.dram, "failed": len(result.failures)}
        self._tracer.span(track, str(result.direction), start, self._tracer.now(), args)

    def preload(self, chunks: int) -> None:
        """A new list of chunks to read ahead."""
        if self._tracer is not None:
            now = self._tracer.now()
            self._tracer.span("read ahead", "list", now, now, {"chunks": chunks})

    def close(self) -> None:
        """Write what is left."""
        if self._tracer is not None:
            self._tracer.close()
