# SPDX-License-Identifier: Apache-2.0
"""An engine as vLLM's: steps, a waiting queue, chunked prefill, loads that others' work hides.

In each step every running request decodes a token, then prompts are computed up to
``max_num_batched_tokens``, first those begun, then those whose load has ended, then the waiting
ones in their order. A request that loads runs when the load has ended, which is seen between
two steps. What is simpler than in vLLM: memory for prompt and answer is reserved when a request
is admitted, so none is preempted; prefixes are found by whole chunks; what was computed is in
the pool and on disk at the end of its step; and steps that only decode are taken together until
something else happens.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.gate_simulation.backlog import Backlog
from benchmarks.gate_simulation.machines import CHUNK_TOKENS, Conditions, Profile, contexts
from benchmarks.gate_simulation.memory import Disk, GpuMemory, Pool
from benchmarks.gate_simulation.policies import Policy, View
from benchmarks.gate_simulation.traces import Arrival
from pykvcache.gate.terms import Decision, LoadSample, Offer, Reach, StepSample, Traffic

REACHES_MAX = 16
"""Ends of a load that the gate is offered."""

LOOKAHEAD = 16
"""Waiting requests that are read ahead for; the backend's ``preload_lookahead``."""

DECODE_STEPS_MAX = 64
"""Steps that only decode, taken together."""


@dataclass(slots=True)
class Request:
    """One request's way through the engine."""

    arrival: Arrival
    computed: int = 0
    held: list[int] = field(default_factory=list)
    reserved: int = 0
    read_ahead: bool = False
    ttft_s: float = -1.0

    @property
    def hit_chunks_max(self) -> int:
        """All but the last token may be found."""
        return min(len(self.arrival.chunks), (self.arrival.prompt_tokens - 1) // CHUNK_TOKENS)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision, for the report."""

    at: float
    offered_tokens: int
    loaded_tokens: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class _Load:
    request: Request
    to_tokens: int
    ended_at: float
    sample: LoadSample
    is_shared: bool
    """It waited for a read of another load, and teaches nothing."""


@dataclass
class Outcome:
    """What a run was like.

    Attributes:
        ttfts_s: of each request, in the order of arrival.
        verdicts: on each hit.
        prompt_tokens: of all requests.
        computed_tokens: of prompts.
        loaded_tokens: of prompts.
        busy_s: in which steps ran.
        end_s: of the last step.
    """

    ttfts_s: list[float]
    verdicts: list[Verdict]
    prompt_tokens: int = 0
    computed_tokens: int = 0
    loaded_tokens: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0


class Engine:
    """One run."""

    def __init__(
        self,
        profile: Profile,
        conditions: Conditions,
        make_policy: Callable[[Profile, Conditions, View], Policy],
        *,
        seed: int = 0,
        read_ahead: bool = True,
    ) -> None:
        """Args:
        profile: of the machine.
        conditions: that change it.
        make_policy: for this engine.
        seed: of the scatter.
        read_ahead: whether the prefixes of waiting requests are read before their turn.
        """
        self.now = 0.0
        self._profile = profile
        self._machine = profile.machine
        self._conditions = conditions
        self._step_noise = random.Random(f"{seed} steps")
        self._read_noise = random.Random(f"{seed} reads")
        self._gpu = GpuMemory(profile.gpu_tokens // CHUNK_TOKENS)
        self._pool = Pool(profile.pool_bytes // profile.chunk_bytes)
        self._ahead_max = profile.pool_bytes // profile.chunk_bytes // 2
        self._disk = Disk(self._read_s, self._pool.use)
        self._stored: set[int] = set()
        self._read_ahead = read_ahead
        self._waiting: deque[Request] = deque()
        self._ready: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._decoding: list[tuple[int, int, Request]] = []
        """Number of its last step, of itself, and the request: a heap."""
        self._decode_context = 0
        self._loads: list[tuple[float, int, _Load]] = []
        self._backlog = Backlog()
        self._step = 0
        self._step_took_s = 0.0
        self._numbers = itertools.count()
        self._outcome = Outcome([], [])
        self._policy = make_policy(profile, conditions, self)

    # --- what an oracle sees

    @property
    def decodes_s(self) -> float:
        """What decoding adds to each step, on the machine as it was."""
        return self._machine.decodes_s(len(self._decoding), self._decode_context)

    @property
    def disk_free_at(self) -> float:
        """When the disk will have read what it was asked for."""
        return self._disk.free_at

    # --- time

    def run(
        self, arrivals: Sequence[Arrival], advance: Callable[[], None] | None = None
    ) -> Outcome:
        """Serve all requests.

        Args:
            arrivals: in their order.
            advance: called for each that has arrived.
        """
        requests = [Request(each) for each in arrivals]
        coming = deque(requests)
        while coming or self._waiting or self._ready or self._loads or self._is_running:
            while coming and coming[0].arrival.at <= self.now:
                self._waiting.append(coming.popleft())
                if advance is not None:
                    advance()
            self._end_loads()
            parts = self._schedule()
            next_at = min(
                coming[0].arrival.at if coming else math.inf,
                self._loads[0][0] if self._loads else math.inf,
            )
            if parts or self._decoding:
                self._run_steps(parts, next_at)
            elif next_at == math.inf:
                raise AssertionError(f"nothing will happen to {len(self._waiting)} requests")
            else:
                self.now = max(self.now, next_at)
        outcome = self._outcome
        outcome.ttfts_s = [each.ttft_s for each in requests]
        outcome.prompt_tokens = sum(each.arrival.prompt_tokens for each in requests)
        outcome.end_s = self.now
        return outcome

    @property
    def _is_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def _read_s(self, chunks: int, begin: float) -> float:
        slower = self._conditions.disk(begin)
        scatter = self._read_noise.lognormvariate(0.0, self._conditions.read_scatter)
        return chunks * self._profile.chunk_bytes / self._machine.disk_rate * slower * scatter

    # --- what happens between two steps

    def _end_loads(self) -> None:
        self._disk.advance(self.now)
        ended = []
        while self._loads and self._loads[0][0] <= self.now:
            ended.append(heapq.heappop(self._loads)[2])
        for load in ended:
            request, sample = load.request, load.sample
            self._outcome.loaded_tokens += load.to_tokens - request.computed
            chunks = request.arrival.chunks[: load.to_tokens // CHUNK_TOKENS]
            for key in chunks[request.computed // CHUNK_TOKENS :]:
                self._publish(request, key)
                self._pool.use(key)
            request.computed = load.to_tokens
            self._backlog.end(id(request), load.ended_at)
            if not load.is_shared:
                self._policy.observe_load(sample, self.now)
        self._ready.extend(sorted((load.request for load in ended), key=lambda r: r.arrival.at))

    def _publish(self, request: Request, key: int) -> None:
        if self._gpu.publish(key):
            request.held.append(key)
            request.reserved -= 1

    def _schedule(self) -> list[tuple[Request, int]]:
        """Which requests compute how many tokens of their prompts in the next step."""
        budget = self._profile.batched_tokens - len(self._decoding)
        parts: list[tuple[Request, int]] = []
        before_s = 0.0
        estimate = self._policy.estimate

        def take(request: Request) -> None:
            nonlocal budget, before_s
            tokens = min(budget, request.arrival.prompt_tokens - request.computed)
            if tokens <= 0:
                return
            budget -= tokens
            parts.append((request, tokens))
            if self._waiting:
                start = request.computed
                before_s += estimate.compute_s(start, start + tokens, Traffic())

        for request in self._prefilling:
            take(request)
        while self._ready and budget > 0 and self._is_running < self._profile.seqs_max:
            self._prefilling.append(self._ready.popleft())
            take(self._prefilling[-1])
        while self._waiting and budget > 0 and self._is_running < self._profile.seqs_max:
            request = self._waiting[0]
            if not self._admit(request):
                break
            self._waiting.popleft()
            if not self._begin_load(request, before_s):
                self._prefilling.append(request)
                take(request)
        if self._read_ahead and self._waiting:
            self._begin_reading_ahead(before_s)
        return parts

    def _admit(self, request: Request) -> bool:
        arrival = request.arrival
        cached = self._gpu.match(arrival.chunks[: request.hit_chunks_max])
        total = -(-(arrival.prompt_tokens + arrival.output_tokens) // CHUNK_TOKENS)
        shared = arrival.chunks[:cached]
        if not self._gpu.admit(shared, total - cached):
            return False
        request.held = list(shared)
        request.reserved = total - cached
        request.computed = cached * CHUNK_TOKENS
        return True

    def _begin_load(self, request: Request, before_s: float) -> bool:
        """Ask the gate; whether something is loaded."""
        cached = request.computed // CHUNK_TOKENS
        hit = self._hit(request, cached)
        if hit == cached:
            return False
        offer = self._offer(request, cached, hit)
        traffic = self._traffic(before_s)
        decision = self._policy.decide(offer, traffic, self.now)
        self._outcome.verdicts.append(
            Verdict(
                self.now,
                (hit - cached) * CHUNK_TOKENS,
                decision.tokens - offer.cached_tokens,
                decision,
            )
        )
        if decision.tokens <= offer.cached_tokens:
            return False
        keys = request.arrival.chunks[cached : decision.tokens // CHUNK_TOKENS]
        from_disk = [key for key in keys if key not in self._pool]
        shared = any(self._disk.is_reading(key, self.now) for key in from_disk)
        copy_s = (len(keys) - len(from_disk)) * self._profile.chunk_bytes / self._machine.dram_rate
        read_until = self._disk.read(from_disk, self.now) if from_disk else self.now
        ends_at = max(read_until, self.now + copy_s) + self._machine.load_s
        disk_bytes = len(from_disk) * self._profile.chunk_bytes
        sample = LoadSample(
            dram_bytes=(len(keys) - len(from_disk)) * self._profile.chunk_bytes,
            disk_bytes=disk_bytes,
            ahead_bytes=traffic.disk_bytes,
            seconds=ends_at - self.now,
        )
        self._backlog.begin(id(request), disk_bytes, self.now)
        load = _Load(request, decision.tokens, ends_at, sample, shared)
        heapq.heappush(self._loads, (ends_at, next(self._numbers), load))
        return True

    def _hit(self, request: Request, cached: int) -> int:
        """Chunks of the prompt that could be there after a load."""
        chunks = request.arrival.chunks
        hit = cached
        while hit < request.hit_chunks_max and chunks[hit] in self._stored:
            hit += 1
        return hit

    def _offer(self, request: Request, cached: int, hit: int) -> Offer:
        size = self._profile.chunk_bytes
        # The first is one chunk, for probes; the others divide the hit evenly.
        parts = range(1, REACHES_MAX)
        ends = {cached + 1, *(cached + -(-(hit - cached) * part // parts[-1]) for part in parts)}
        reaches = []
        dram = disk = 0
        for index in range(cached, hit):
            if request.arrival.chunks[index] in self._pool:
                dram += size
            else:
                disk += size
            if index + 1 in ends:
                reaches.append(Reach((index + 1) * CHUNK_TOKENS, dram, disk))
        return Offer(request.arrival.prompt_tokens, cached * CHUNK_TOKENS, tuple(reaches))

    def _traffic(self, wait_s: float) -> Traffic:
        notice_s = self._step_took_s / 2 if self._is_running else 0.0
        left = self._backlog.left(self.now, self._policy.estimate.disk_bytes_per_s)
        return Traffic(left, len(self._decoding), wait_s, notice_s)

    def _begin_reading_ahead(self, wait_s: float) -> None:
        """For those whose turn has not come, in their order, while there is room in the pool."""
        for request in itertools.islice(self._waiting, LOOKAHEAD):
            if not request.read_ahead:
                if self._disk.waiting_ahead >= self._ahead_max:
                    return
                request.read_ahead = True
                self._read_ahead_of(request, wait_s)
            wait_s += self._policy.estimate.compute_s(0, request.arrival.prompt_tokens, Traffic())

    def _read_ahead_of(self, request: Request, wait_s: float) -> None:
        cached = self._gpu.match(request.arrival.chunks[: request.hit_chunks_max])
        hit = self._hit(request, cached)
        if hit == cached:
            return
        offer = self._offer(request, cached, hit)
        decision = self._policy.decide_ahead(offer, self._traffic(wait_s))
        for key in request.arrival.chunks[cached : decision.tokens // CHUNK_TOKENS]:
            if key not in self._pool:
                self._disk.read_ahead(key, self.now)

    # --- steps

    def _run_steps(self, parts: list[tuple[Request, int]], next_at: float) -> None:
        tokens = sum(count for _, count in parts)
        work = sum(contexts(each.computed, each.computed + count) for each, count in parts)
        machine, decodes = self._machine, len(self._decoding)
        usual_s = machine.step_s + tokens * machine.token_s + work * machine.context_s
        usual_s += machine.decodes_s(decodes, self._decode_context)
        scatter = self._step_noise.lognormvariate(0.0, self._conditions.step_scatter)
        seconds = usual_s * self._conditions.compute(self.now) * scatter
        steps = 1
        if not parts:
            until_event = math.ceil(min((next_at - self.now) / seconds, DECODE_STEPS_MAX))
            steps = max(1, min(self._decoding[0][0] - self._step, until_event))
        self.now += steps * seconds
        self._step += steps
        self._step_took_s = seconds
        self._decode_context += steps * decodes
        self._outcome.busy_s += steps * seconds
        self._outcome.computed_tokens += tokens
        for request, count in parts:
            self._compute(request, count)
        while self._decoding and self._decoding[0][0] <= self._step:
            request = heapq.heappop(self._decoding)[2]
            arrival = request.arrival
            self._decode_context -= arrival.prompt_tokens + arrival.output_tokens
            self._gpu.release(request.held, request.reserved)
        self._policy.observe_step(StepSample(tokens, work, decodes, seconds))

    def _compute(self, request: Request, tokens: int) -> None:
        """A step has computed tokens of a prompt."""
        arrival = request.arrival
        first = request.computed // CHUNK_TOKENS
        request.computed += tokens
        for key in arrival.chunks[first : request.computed // CHUNK_TOKENS]:
            self._publish(request, key)
            self._stored.add(key)
            self._pool.use(key)
        if request.computed < arrival.prompt_tokens:
            return
        self._prefilling.remove(request)
        request.ttft_s = self.now - arrival.at
        if arrival.output_tokens == 1:
            self._gpu.release(request.held, request.reserved)
            return
        self._decode_context += arrival.prompt_tokens + 1
        last = self._step + arrival.output_tokens - 1
        heapq.heappush(self._decoding, (last, next(self._numbers), request))
