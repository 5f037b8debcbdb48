# SPDX-License-Identifier: Apache-2.0
"""Who decides what is loaded: estimates of several kinds, each behind the same gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from benchmarks.gate_simulation.machines import Conditions, Machine, Profile
from pykvcache.gate.estimate import OnlineEstimate
from pykvcache.gate.gate import MARGIN, Gate, Probed, decide
from pykvcache.gate.terms import Decision, LoadSample, Offer, StepSample, Traffic


class View(Protocol):
    """What an oracle sees of an engine."""

    now: float

    @property
    def decodes_s(self) -> float:
        """What decoding adds to each step now."""
        ...

    @property
    def disk_free_at(self) -> float:
        """When the disk will have read what it was asked for."""
        ...


class Estimator(Probed, Protocol):
    """What a policy stands on."""

    @property
    def disk_bytes_per_s(self) -> float:
        """Of long reads."""
        ...


class Policy:
    """A gate, and what becomes of its samples."""

    def __init__(self, estimate: Estimator, margin: float = MARGIN) -> None:
        """Args:
        estimate: learns from samples if it is an :class:`OnlineEstimate`.
        margin: of the gate.
        """
        self.estimate = estimate
        self._margin = margin
        self._gate = Gate(estimate, margin)

    def decide(self, offer: Offer, traffic: Traffic, now: float) -> Decision:
        """For a request whose turn it is."""
        return self._gate.decide(offer, traffic, now)

    def decide_ahead(self, offer: Offer, traffic: Traffic) -> Decision:
        """For one that waits: nobody waits for the read, so it is not made as a probe."""
        return decide(self.estimate, offer, traffic, self._margin)

    def observe_step(self, sample: StepSample) -> None:
        """Learn from a step."""
        if isinstance(self.estimate, OnlineEstimate):
            self.estimate.observe_step(sample)

    def observe_load(self, sample: LoadSample, now: float) -> None:
        """Learn from a load."""
        if isinstance(self.estimate, OnlineEstimate):
            self.estimate.observe_load(sample, now)


class _NeverProbed:
    def wants_probe(self, now: float) -> bool:
        return False

    def begin_probe(self, now: float) -> None:
        raise AssertionError("nobody wanted a probe")


class Constant(_NeverProbed):
    """Loads take the same time, whatever they are, and each token a second."""

    def __init__(self, load_s: float) -> None:
        """Args:
        load_s: 0 to load all there is, infinity to load nothing.
        """
        self._load_s = load_s
        self.disk_bytes_per_s = 1e9

    def compute_s(self, start: int, end: int, traffic: Traffic) -> float:
        """A second for a token."""
        return float(max(0, end - start))

    def load_s(self, dram_bytes: int, disk_bytes: int, traffic: Traffic) -> float:
        """Always the same."""
        return self._load_s


class Measurement:
    """What a calibration of the idle machine finds, before anything happens to it."""

    def __init__(self, machine: Machine, batched_tokens: int) -> None:
        """Args:
        machine: that is measured.
        batched_tokens: of prompts in a step.
        """
        self._machine = machine
        self._batched = batched_tokens

    def compute_s(self, start: int, end: int) -> float:
        """Seconds to compute the tokens."""
        return computed_s(self._machine, start, end, self._batched, 0.0)

    def load_s(self, tier: str, size: int) -> float:
        """Seconds to load so many bytes."""
        rate = self._machine.dram_rate if tier == "dram" else self._machine.disk_rate
        return self._machine.load_s + size / rate if size else 0.0


class Calibrated(_NeverProbed):
    """Believes a calibration and learns nothing."""

    def __init__(self, measurement: Measurement) -> None:
        """Args:
        measurement: that is believed.
        """
        self._measurement = measurement
        size = 1 << 30
        self.disk_bytes_per_s = size / (
            measurement.load_s("disk", 2 * size) - measurement.load_s("disk", size)
        )

    def compute_s(self, start: int, end: int, traffic: Traffic) -> float:
        """As measured, whatever else the steps do."""
        return self._measurement.compute_s(start, end)

    def load_s(self, dram_bytes: int, disk_bytes: int, traffic: Traffic) -> float:
        """As measured, behind other reads."""
        disk = disk_bytes + traffic.disk_bytes if disk_bytes else 0
        return max(
            self._measurement.load_s("disk", disk), self._measurement.load_s("dram", dram_bytes)
        )


class Oracle(_NeverProbed):
    """Knows the machine as it is now, and when its disk will be free; not its scatter."""

    def __init__(self, profile: Profile, conditions: Conditions, view: View) -> None:
        """Args:
        profile: of the machine.
        conditions: that change it.
        view: of the engine.
        """
        self._profile = profile
        self._conditions = conditions
        self._view = view
        self.disk_bytes_per_s = profile.machine.disk_rate

    def compute_s(self, start: int, end: int, traffic: Traffic) -> float:
        """What it will take, if nothing changes."""
        profile, view = self._profile, self._view
        seconds = computed_s(profile.machine, start, end, profile.batched_tokens, view.decodes_s)
        return seconds * self._conditions.compute(view.now)

    def load_s(self, dram_bytes: int, disk_bytes: int, traffic: Traffic) -> float:
        """Likewise."""
        machine, view = self._profile.machine, self._view
        read_s = 0.0
        if disk_bytes:
            slower = self._conditions.disk(view.now)
            queue_s = max(0.0, view.disk_free_at - view.now)
            read_s = queue_s + disk_bytes * slower / machine.disk_rate
        return machine.load_s + max(read_s, dram_bytes / machine.dram_rate)


def computed_s(
    machine: Machine, start: int, end: int, batched_tokens: int, decodes_s: float
) -> float:
    """Seconds of the steps that compute the tokens ``start`` to ``end`` of a prompt.

    Args:
        machine: that computes.
        start: first token.
        end: behind the last.
        batched_tokens: in a step.
        decodes_s: added to each step by others.
    """
    if end <= start:
        return 0.0
    steps = -(-(end - start) // batched_tokens)
    return steps * (machine.step_s + decodes_s) + machine.tokens_s(start, end)


def _online(profile: Profile, conditions: Conditions, view: View) -> Policy:
    return Policy(OnlineEstimate(profile.bytes_per_token))


def _calibrated(profile: Profile, conditions: Conditions, view: View) -> Policy:
    return Policy(OnlineEstimate(profile.bytes_per_token, _measured(profile)))


def _calibration_only(profile: Profile, conditions: Conditions, view: View) -> Policy:
    return Policy(Calibrated(_measured(profile)))


def _oracle(profile: Profile, conditions: Conditions, view: View) -> Policy:
    return Policy(Oracle(profile, conditions, view), margin=0.0)


def _never(profile: Profile, conditions: Conditions, view: View) -> Policy:
    return Policy(Constant(float("inf")))


def _always(profile: Profile, conditions: Conditions, view: View) -> Policy:
    return Policy(Constant(0.0), margin=0.0)


def _measured(profile: Profile) -> Measurement:
    return Measurement(profile.machine, profile.batched_tokens)


ORACLE = "oracle"
POLICIES: dict[str, Callable[[Profile, Conditions, View], Policy]] = {
    "never": _never,
    "always": _always,
    "calibration only": _calibration_only,
    "calibrated": _calibrated,
    "online": _online,
    ORACLE: _oracle,
}
