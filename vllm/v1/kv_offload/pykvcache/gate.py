# SPDX-License-Identifier: Apache-2.0
"""The gate in vLLM's scheduler: how much of a hit is loaded, and what steps and loads teach.

Called from the hook of the patch ``gate`` when vLLM looks a request up. The decision itself is
:mod:`pykvcache.gate`'s; here is what it is told: the hit by tier, what the engine computes before
the request, what the disk reads before its load.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey

from pykvcache.config import Config
from pykvcache.gate.calibration import (
    Calibration,
    CalibrationError,
    Fingerprint,
    calibration_path,
    find_calibration,
    load_calibration,
)
from pykvcache.gate.estimate import OnlineEstimate
from pykvcache.gate.gate import Gate, could_pass, decide
from pykvcache.gate.terms import Decision, Offer, Reach, Traffic
from vllm.v1.kv_offload.pykvcache.load_keys import Hit, keys_of_hit
from vllm.v1.kv_offload.pykvcache.workload import Span, Workload

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

REACHES_MAX = 16
"""Ends of a load that are compared: so many are nearly as good as all of them, and take a tenth of
a millisecond together."""

STORES_ASKED_S = 1.0
"""Seconds for which the answer is believed that stores could pass the gate, or could not."""

TRIAL_STORES = 32
"""Of so many requests whose chunks could never pass one is stored all the same: without files
nobody would notice a disk that has become faster."""

FIGURE_TOKENS = 2048
"""Of the prompt whose speed is told: vLLM's default number of tokens in a step."""

FIGURES_S = 1.0
"""Seconds between figures of what was learned; steps are shorter."""

PARAMETER = "pykvcache_gate"
"""In a request's ``kv_transfer_params``: ``always`` loads whatever can be."""


@dataclass(frozen=True, slots=True)
class KVSize:
    """Of one rank's KV.

    Attributes:
        chunk_bytes: of a chunk.
        bytes_per_token: of all groups together.
        tokens_max: of a prompt.
        dram: whether chunks stay in the pool after their transfer.
    """

    chunk_bytes: int
    bytes_per_token: float
    tokens_max: int
    dram: bool


@dataclass(frozen=True, slots=True)
class GateFigures:
    """For metrics; counts since the start.

    Attributes:
        declined_loads: by reason.
        declined_tokens: by reason.
        declined_stores: chunks.
        compute_tokens_per_s: learned, of a prompt of :data:`FIGURE_TOKENS`; 0: unknown.
        load_bytes_per_s: learned, by tier, of long loads.
    """

    declined_loads: Counter[str]
    declined_tokens: Counter[str]
    declined_stores: int
    compute_tokens_per_s: float
    load_bytes_per_s: Mapping[str, float]


class SchedulerGate:
    """The gate of one scheduler."""

    def __init__(
        self,
        estimate: OnlineEstimate,
        size: KVSize,
        *,
        margin: float,
        only_counts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        estimate: of this machine.
        size: of the KV.
        margin: see :func:`pykvcache.gate.gate.decide`.
        only_counts: everything is loaded and stored, whatever the decision.
        clock: seconds.
        """
        self.estimate = estimate
        self._gate = Gate(estimate, margin)
        self._margin = margin
        self._size = size
        self._only_counts = only_counts
        self._clock = clock
        self.workload = Workload(estimate, clock)
        # What was decided for requests that have not been scheduled since.
        self._decided: dict[str, tuple[Decision, int]] = {}
        self.declined_loads: Counter[str] = Counter()
        """By reason, since the start."""
        self.declined_tokens: Counter[str] = Counter()
        self.declined_stores = 0
        """Chunks, since the start."""
        self._can_store = True
        self._asked_at = -float("inf")
        self._stores: dict[str, bool] = {}
        """Whether a request's chunks are stored: all of them, or none."""
        self._trials = 0
        self._has_warned = False
        self._speeds: tuple[float, Mapping[str, float]] = (0.0, {})
        self._speeds_at = -float("inf")

    # --- decisions

    def tokens_to_load(
        self,
        scheduler: OffloadingConnectorScheduler,
        request: Request,
        cached: int,
        hit: int,
        in_dram: Callable[[bytes], bool],
    ) -> int:
        """How many tokens of a hit are to be loaded.

        Args:
            scheduler: the connector's side in vLLM's scheduler.
            request: looked up.
            cached: tokens in the GPU already.
            hit: tokens behind those that could be loaded.
            in_dram: whether a chunk is in every rank's pool.
        """
        decision = None
        if hit and not self._wants_all(request):
            reaches = self._reaches(scheduler, request, cached, cached + hit, in_dram)
            offer = Offer(request.num_tokens, cached, reaches)
            traffic = self.workload.traffic(request.request_id)
            decision = self._gate.decide(offer, traffic, self._clock())
            self._decided[request.request_id] = (decision, cached + hit)
        chosen = hit if decision is None or self._only_counts else decision.tokens - cached
        if not chosen:
            self.workload.admit(request.request_id, Span(cached, request.num_tokens))
        return chosen

    def worth_reading_ahead(
        self,
        scheduler: OffloadingConnectorScheduler,
        request: Request,
        hit: Hit | None,
        after_s: float,
        in_dram: Callable[[bytes], bool],
    ) -> tuple[tuple[OffloadKey, ...], float]:
        """What a waiting request will load, if it waits so long: see
        :class:`~vllm.v1.kv_offload.pykvcache.preload.Worth`."""
        traffic = self.workload.traffic(request.request_id)
        traffic = replace(traffic, wait_s=max(traffic.wait_s, after_s))
        if hit is None:
            return (), traffic.wait_s + self.estimate.compute_s(0, request.num_tokens, traffic)
        reaches = self._reaches(scheduler, request, hit.cached, hit.end, in_dram)
        offer = Offer(request.num_tokens, hit.cached, reaches)
        decision = decide(self.estimate, offer, traffic, self._margin)
        if self._only_counts or self._wants_all(request) or decision.tokens >= hit.end:
            return hit.keys, decision.chosen_s
        if decision.tokens <= hit.cached:
            return (), decision.chosen_s
        return keys_of_hit(scheduler, request, hit.cached, decision.tokens), decision.chosen_s

    def _reaches(
        self,
        scheduler: OffloadingConnectorScheduler,
        request: Request,
        cached: int,
        end: int,
        in_dram: Callable[[bytes], bool],
    ) -> list[Reach]:
        """Ends of a load: of one group with full attention any chunk's, of others only the whole
        hit, since a sliding window or recurrent state exists only where one was stored."""
        keys = keys_of_hit(scheduler, request, cached, end)
        where = [in_dram(key) for key in keys]
        groups = scheduler.config.kv_group_configs
        size = self._size.chunk_bytes
        dram = [0]
        for is_there in where:
            dram.append(dram[-1] + size * is_there)
        if len(groups) != 1 or groups[0].sliding_window_size_in_chunks is not None or not keys:
            return [Reach(end, dram[-1], size * len(keys) - dram[-1])]
        tokens = groups[0].tokens_per_chunk
        first = cached // tokens
        return [
            Reach(min(end, (first + count) * tokens), dram[count], size * count - dram[count])
            for count in _counts(where)
        ]

    def plan_load(
        self, req_id: str, keys: Iterable[bytes], in_dram: Callable[[bytes], bool]
    ) -> None:
        """A load was planned for the coming step."""
        self._count(req_id)
        unread = sum(not in_dram(key) for key in keys)
        self.workload.plan_load(unread * self._size.chunk_bytes)

    def forget(self, req_id: str) -> None:
        """A request has finished."""
        self._decided.pop(req_id, None)
        self._stores.pop(req_id, None)
        self.workload.forget(req_id)

    def _count(self, req_id: str) -> None:
        """The request is scheduled by what was decided last."""
        decision, end = self._decided.pop(req_id, (None, 0))
        if decision is not None and decision.reason is not None and decision.tokens < end:
            self.declined_loads[str(decision.reason)] += 1
            self.declined_tokens[str(decision.reason)] += end - decision.tokens

    def admits_store(self, req_id: str, chunks: int) -> bool:
        """Whether so many chunks of a request may be stored: none of it where no load could ever
        pass the gate."""
        if not chunks or self._only_counts:
            return True
        if req_id not in self._stores:
            is_worth_it = self._could_pass()
            self._trials += not is_worth_it
            self._stores[req_id] = is_worth_it or self._trials % TRIAL_STORES == 1
        admitted = self._stores[req_id]
        if not admitted:
            self.declined_stores += chunks
        return admitted

    def _could_pass(self) -> bool:
        now = self._clock()
        if now - self._asked_at >= STORES_ASKED_S:
            self._asked_at = now
            size = self._size
            can_store = not self.estimate.has_learned or could_pass(
                self.estimate, size.tokens_max, size.bytes_per_token, dram=size.dram
            )
            if can_store != self._can_store:
                self._can_store = can_store
                logger.info(
                    "KV offloading %s: by what the gate has learned, loading %s (%s)",
                    "stores again" if can_store else "stores next to nothing",
                    "may pay" if can_store else "even the longest prompt is slower than computing",
                    self.describe(),
                )
        return self._can_store

    # --- the engine's steps

    def begin_step(
        self, number: int, scheduler: OffloadingConnectorScheduler, output: SchedulerOutput
    ) -> None:
        """A step has been scheduled."""
        for req_id in output.finished_req_ids:
            self.forget(req_id)
        for req_id in [name for name in self._decided if name in output.num_scheduled_tokens]:
            self._count(req_id)
        self.workload.begin_step(number, scheduler, output)

    def _wants_all(self, request: Request) -> bool:
        params: Mapping[str, Any] = request.kv_transfer_params or {}
        wanted = params.get(PARAMETER, "auto")
        if wanted not in ("auto", "always") and not self._has_warned:
            self._has_warned = True  # once: clients choose what they send
            logger.warning(
                "KV offloading: '%s' in a request's kv_transfer_params is %.40r: must be 'auto' or "
                "'always'; it is ignored, here and in requests to come",
                PARAMETER,
                wanted,
            )
        return bool(wanted == "always")

    def figures(self) -> GateFigures:
        """For metrics."""
        now = self._clock()
        if self.estimate.has_learned and now - self._speeds_at >= FIGURES_S:
            self._speeds_at = now
            compute_s = self.estimate.compute_s(0, FIGURE_TOKENS, Traffic())
            tiers = {tier: self.estimate.bytes_per_s(tier) for tier in ("disk", "dram")}
            self._speeds = (FIGURE_TOKENS / max(compute_s, 1e-9), tiers)
        return GateFigures(
            self.declined_loads.copy(),
            self.declined_tokens.copy(),
            self.declined_stores,
            *self._speeds,
        )

    def describe(self) -> str:
        """What is believed, for logs."""
        return ", ".join(f"{name} {value:.4g}" for name, value in self.estimate.summary().items())


def _counts(where: Sequence[bool]) -> list[int]:
    """Of how many chunks the loads consist that are compared: evenly spread, where the tier
    changes, and one, which is what trying a slow disk costs least with."""
    total = len(where)
    borders = [at for at in range(1, total) if where[at] != where[at - 1]][: REACHES_MAX // 2]
    spread = REACHES_MAX - 1 - len(borders)
    chosen = {1, *(-(-total * part // spread) for part in range(1, spread + 1))}
    return sorted(chosen | set(borders))


# --- when the server starts


def make_gate(
    options: Config, size: KVSize, fingerprint: Callable[[], Fingerprint]
) -> SchedulerGate | None:
    """The gate that the options ask for; a calibration that cannot be used is told, and does
    without.

    Args:
        options: of the server.
        size: of the KV.
        fingerprint: of the server, to find its calibration by.
    """
    if options.gate == "off":
        return None
    expected = fingerprint()
    calibration = _calibration(options, expected)
    if calibration is None:
        logger.info(
            "KV offloading: no calibration of this server (%s); the gate ('%s') learns while "
            "serving. `pykvcache calibrate` measures",
            options.gate_path or calibration_path(Path(options.root), expected),
            options.gate,
        )
    else:
        logger.info(
            "KV offloading: the gate ('%s') uses the calibration of %s, up to %d tokens",
            options.gate,
            calibration.content.date.date().isoformat(),
            calibration.max_tokens,
        )
    estimate = OnlineEstimate(size.bytes_per_token, calibration)
    only_counts = options.gate == "always"
    return SchedulerGate(estimate, size, margin=options.gate_margin, only_counts=only_counts)


def _calibration(options: Config, fingerprint: Fingerprint) -> Calibration | None:
    try:
        if options.gate_path:
            path = Path(options.gate_path).expanduser()
            return load_calibration(path, fingerprint, time.time())
        return find_calibration(Path(options.root), fingerprint, time.time())
    except CalibrationError as error:
        logger.warning("KV offloading: %s", error)
        return None


# --- called from the hook


def matched_tokens(
    scheduler: OffloadingConnectorScheduler,
    request: Request,
    num_computed_tokens: int,
    max_num_new_tokens: int | None = None,
) -> tuple[int | None, bool]:
    """vLLM's look-up, and once more for less where the gate wants less."""
    from vllm.v1.kv_offload.pykvcache.manager import PyKVCacheManager

    found = scheduler.get_num_new_matched_tokens(
        request, num_computed_tokens, max_num_new_tokens=max_num_new_tokens
    )
    manager, hit = scheduler.manager, found[0]
    if hit is None or not isinstance(manager, PyKVCacheManager):
        return found
    wanted = manager.ask_gate(
        lambda gate: gate.tokens_to_load(
            scheduler, request, num_computed_tokens, hit, manager.in_dram
        ),
        hit,
    )
    if wanted >= hit:
        return found
    return scheduler.get_num_new_matched_tokens(
        request, num_computed_tokens, max_num_new_tokens=max(0, wanted)
    )
