# SPDX-License-Identifier: Apache-2.0
"""What the engine and the disk have taken on already, as the scheduler sees it.

A request that is looked up now competes with it, whether its prefix is loaded or computed; and
how long it takes is what the gate learns from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pykvcache.gate.estimate import OnlineEstimate
from pykvcache.gate.terms import LoadSample, StepSample, Traffic

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm.v1.kv_offload.pykvcache.reports import WorkerReport


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a prompt that are to be computed."""

    start: int
    end: int


@dataclass(slots=True)
class _Step:
    """Scheduled and not ended; ``expected_s`` of its prompt tokens."""

    number: int
    began: float
    tokens: int = 0
    token_contexts: int = 0
    decodes: int = 0
    expected_s: float = 0.0


class Workload:
    """Of one scheduler."""

    def __init__(self, estimate: OnlineEstimate, clock: Callable[[], float]) -> None:
        """Args:
        estimate: learns from steps and loads.
        clock: seconds.
        """
        self._estimate = estimate
        self._clock = clock
        self._unfinished: dict[str, Span] = {}
        """Of running requests, what is left of their prompts after the last step."""
        self._admitted: dict[str, Span] = {}
        """Of requests that this pass of the scheduler is about to run."""
        self._steps: deque[_Step] = deque()
        self._last_end = -float("inf")
        self._last_s = 0.0
        self._prefilling: list[Request] = []
        """Of the last step."""
        self._decoding: dict[str, Request] = {}
        self._number = 0
        self._unread_bytes = 0
        self._reported_at = 0.0
        self._planned: deque[tuple[int, int]] = deque()
        """Loads that no worker has seen yet: the step that carries them, bytes on disk."""

    def traffic(self, req_id: str) -> Traffic:
        """What stands before a request that is looked up now."""
        decodes = self._decodes
        is_busy = decodes or any(not request.is_finished() for request in self._prefilling)
        return Traffic(
            disk_bytes=self._left_to_read() + sum(size for _, size in self._planned),
            decodes=decodes,
            wait_s=self._wait_s(req_id),
            notice_s=self._last_s / 2 if is_busy else 0.0,
        )

    def _left_to_read(self) -> int:
        """By now: reports come with the ends of steps, and the disk reads on meanwhile."""
        if not self._unread_bytes:
            return 0
        since_s = self._clock() - self._reported_at
        return max(0, self._unread_bytes - int(since_s * self._estimate.bytes_per_s("disk")))

    @property
    def _decodes(self) -> int:
        # vLLM tells backends of a request's end only with the step after.
        return sum(not request.is_finished() for request in self._decoding.values())

    def _wait_s(self, req_id: str) -> float:
        """Seconds of computation of other requests' prompts."""
        running_s = sum(step.expected_s for step in self._steps)
        if running_s:
            elapsed_s = self._clock() - max(self._steps[0].began, self._last_end)
            running_s = max(0.0, running_s - elapsed_s)
        others = (
            span
            for spans in (self._unfinished, self._admitted)
            for name, span in spans.items()
            if name != req_id
        )
        return running_s + sum(map(self._compute_s, others))

    def _compute_s(self, span: Span) -> float:
        return self._estimate.compute_s(span.start, span.end, Traffic(decodes=self._decodes))

    def admit(self, req_id: str, span: Span) -> None:
        """A request is about to be scheduled without a load."""
        self._admitted[req_id] = span

    def plan_load(self, disk_bytes: int) -> None:
        """The coming step carries a load."""
        self._planned.append((self._number + 1, disk_bytes))

    def forget(self, req_id: str) -> None:
        """A request has finished, or begins again."""
        self._unfinished.pop(req_id, None)
        self._admitted.pop(req_id, None)
        self._decoding.pop(req_id, None)

    def begin_step(
        self, number: int, scheduler: OffloadingConnectorScheduler, output: SchedulerOutput
    ) -> None:
        """A step has been scheduled."""
        self._number = number
        self._admitted.clear()
        self._prefilling.clear()
        # Not every model runner is told of preemptions, but who resumes is known.
        for req_id in (*output.finished_req_ids, *output.scheduled_cached_reqs.resumed_req_ids):
            self.forget(req_id)
        step = _Step(number, self._clock())
        for req_id, count in output.num_scheduled_tokens.items():
            # Nearly all requests of nearly all steps: they are not looked at any closer.
            if req_id in self._decoding:
                step.decodes += 1
            elif (state := scheduler._req_status.get(req_id)) is not None:
                self._take_in(step, state.req, count)
        self._steps.append(step)

    def _take_in(self, step: _Step, request: Request, count: int) -> None:
        # vLLM counts the tokens as computed only after this.
        start = request.num_computed_tokens
        self._unfinished.pop(request.request_id, None)
        if start >= request.num_prompt_tokens:
            step.decodes += 1
            self._decoding[request.request_id] = request
            return
        self._prefilling.append(request)
        span = Span(start, start + count)
        step.tokens += count
        step.token_contexts += count * start + count * (count - 1) // 2
        step.expected_s += self._compute_s(span)
        if span.end < request.num_tokens:
            self._unfinished[request.request_id] = Span(span.end, request.num_tokens)

    def end_step(self, report: WorkerReport) -> None:
        """A step has ended, and those before it; learn from it."""
        now = self._clock()
        while self._steps and self._steps[0].number <= report.step:
            step = self._steps.popleft()
            # With asynchronous scheduling it was scheduled while the one before ran.
            seconds = now - max(step.began, self._last_end)
            self._last_end = now
            if step.tokens or step.decodes:
                self._last_s = seconds
                self._estimate.observe_step(
                    StepSample(step.tokens, step.token_contexts, step.decodes, seconds)
                )
        while self._planned and self._planned[0][0] <= report.step:
            self._planned.popleft()
        self._unread_bytes, self._reported_at = report.unread_bytes, now
        for load in report.loads.values():
            self._estimate.observe_load(
                LoadSample(load.dram_bytes, load.disk_bytes, load.ahead_bytes, load.seconds), now
            )
