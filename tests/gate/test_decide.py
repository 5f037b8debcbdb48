# SPDX-License-Identifier: Apache-2.0
"""The decision, with prices that are known."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache.gate.gate import PROBE_MOST, PROBE_SHARE, Gate, could_pass, decide
from pykvcache.gate.terms import Reason, Traffic
from tests.gate.machine import CHUNK, TOKEN_BYTES, Machine, offer_of

machines = st.builds(
    Machine,
    token_s=st.floats(1e-6, 1e-2),
    context_s=st.floats(0, 1e-7),
    step_s=st.floats(0, 0.1),
    disk=st.floats(1e6, 1e11),
    dram=st.floats(1e9, 1e11),
    fixed_s=st.floats(0, 0.1),
)
traffics = st.builds(
    Traffic,
    disk_bytes=st.integers(0, 1 << 34),
    decodes=st.integers(0, 64),
    wait_s=st.floats(0, 60),
)


@st.composite
def offers(draw):
    cached = draw(st.integers(0, 40)) * 128
    chunks = draw(st.integers(1, 60))
    hit = (cached // CHUNK + chunks) * CHUNK
    staged = draw(st.integers(0, hit))
    return offer_of(hit + draw(st.integers(1, 5000)), cached, hit, staged)


def test_loads_all_where_the_disk_is_faster():
    decision = decide(Machine(), offer_of(8208, 0, 8192), Traffic())
    assert (decision.tokens, decision.reason) == (8192, None)
    assert decision.chosen_s == decision.load_s < decision.recompute_s


def test_loads_nothing_where_computing_is_faster():
    decision = decide(Machine(disk=1e9), offer_of(8208, 0, 8192), Traffic())
    assert (decision.tokens, decision.reason) == (0, Reason.SLOWER)
    assert decision.chosen_s == decision.recompute_s


def test_loads_what_is_staged_and_leaves_a_slow_disk():
    decision = decide(Machine(disk=1e9), offer_of(8208, 0, 8192, staged=2048), Traffic())
    assert (decision.tokens, decision.reason) == (2048, Reason.PARTIAL)


def test_says_when_only_the_queue_speaks_against_it():
    decision = decide(Machine(), offer_of(8208, 0, 8192), Traffic(disk_bytes=10**10))
    assert (decision.tokens, decision.reason) == (0, Reason.BUSY)


def test_a_wait_hides_what_a_slow_disk_takes():
    offer = offer_of(8208, 0, 8192)
    assert decide(Machine(disk=1e9), offer, Traffic(wait_s=2.0)).tokens == 8192
    part = decide(Machine(disk=1e9), offer, Traffic(wait_s=0.1))
    assert part.reason is Reason.PARTIAL, "what is read until the request runs costs nothing"
    assert 0 < part.tokens * TOKEN_BYTES / 1e9 < 0.1


def test_a_saving_within_the_margin_is_none():
    machine = Machine(fixed_s=0.0, context_s=0.0, step_s=0.0)
    offer = offer_of(4096 + 1, 0, 4096)
    even = machine.token_s * 4097 / (offer.reaches[-1].disk_bytes)
    near = replace(machine, disk=1 / (0.97 * even))
    assert decide(near, offer, Traffic(), margin=0.0).tokens == 4096
    assert decide(near, offer, Traffic(), margin=0.05).tokens == 0


@given(machines, offers(), traffics)
def test_never_loads_what_alone_takes_longer_than_computing(machine, offer, traffic):
    decision = decide(machine, offer, traffic)
    if decision.tokens > offer.cached_tokens:
        reach = next(each for each in offer.reaches if each.tokens == decision.tokens)
        load_s = machine.load_s(reach.dram_bytes, reach.disk_bytes, traffic)
        assert load_s < decision.recompute_s
        assert decision.chosen_s < decision.recompute_s
    else:
        assert decision.chosen_s == decision.recompute_s


@given(machines, offers(), traffics, st.floats(1.0, 100.0))
def test_more_bandwidth_never_loads_less(machine, offer, traffic, factor):
    faster = replace(machine, disk=machine.disk * factor)
    slow, fast = decide(machine, offer, traffic), decide(faster, offer, traffic)
    # Ends with the same seconds but for the last bit may change places.
    if abs(fast.chosen_s - slow.chosen_s) > 1e-9 * slow.chosen_s:
        assert fast.tokens >= slow.tokens


@given(machines, offers(), traffics)
def test_what_is_chosen_is_never_slower_than_either(machine, offer, traffic):
    decision = decide(machine, offer, traffic, margin=0.0)
    assert decision.chosen_s <= min(decision.recompute_s, decision.load_s)


@pytest.mark.parametrize(
    ("disk", "dram", "passes"), [(13.5e9, False, True), (2e8, False, False), (2e8, True, True)]
)
def test_stores_are_made_where_the_longest_prompt_could_be_loaded(disk, dram, passes):
    machine = Machine(disk=disk)
    assert could_pass(machine, 131_072, 114_688, dram=dram) is passes


class Untried(Machine):
    """A machine whose disk nobody has read from for long."""

    def wants_probe(self, now: float) -> bool:
        return now >= 10.0

    def begin_probe(self, now: float) -> None:
        object.__setattr__(self, "probed_at", now)


def test_tries_a_slow_disk_once_enough_was_declined():
    machine = Untried(disk=1e9)
    gate, offer = Gate(machine), offer_of(32_784, 0, 32_768)
    cost_s = machine.load_s(0, CHUNK * TOKEN_BYTES, Traffic())
    earned_s = PROBE_SHARE * machine.compute_s(0, 32_784, Traffic())
    declined = math.ceil(cost_s / earned_s)
    assert declined > 1
    for _ in range(declined):
        assert gate.decide(offer, Traffic(), now=9.0).tokens == 0
    probe = gate.decide(offer, Traffic(), now=10.0)
    assert probe.tokens >= CHUNK
    assert probe.reason is Reason.SLOWER
    assert machine.load_s(0, probe.tokens * TOKEN_BYTES, Traffic()) <= (declined + 1) * earned_s
    assert machine.probed_at == 10.0


def test_probes_cost_no_more_than_their_share():
    machine = Untried(disk=1e9)
    gate, offer = Gate(machine), offer_of(32_784, 0, 32_768)
    compute_s = machine.compute_s(0, 32_784, Traffic())
    cost_s = 0.0
    for at in range(1, 1001):
        loaded = gate.decide(offer, Traffic(), now=10.0 + at).tokens
        if loaded:
            cost_s += machine.load_s(0, loaded * TOKEN_BYTES, Traffic())
        assert cost_s <= at * PROBE_SHARE * compute_s
    assert cost_s > 0.9 * 1000 * PROBE_SHARE * compute_s


def test_a_probe_that_was_long_in_coming_is_a_long_one():
    machine = Untried(disk=1e9)
    gate, offer = Gate(machine), offer_of(32_784, 0, 32_768)
    for _ in range(1000):
        gate.decide(offer, Traffic(), now=9.0)
    compute_s = machine.compute_s(0, 32_784, Traffic())
    loaded = gate.decide(offer, Traffic(), now=10.0).tokens
    assert loaded > CHUNK
    assert machine.load_s(0, loaded * TOKEN_BYTES, Traffic()) <= PROBE_MOST * compute_s


def test_tries_nothing_that_would_cost_a_short_prompt_much():
    gate = Gate(Untried(disk=1e9))
    for at in range(100):
        assert gate.decide(offer_of(1040, 0, 1024), Traffic(), now=10.0 + at).tokens == 0


def test_tries_no_disk_where_all_is_in_the_pool():
    gate = Gate(Untried(dram=1e8))
    for at in range(100):
        assert gate.decide(offer_of(1040, 0, 1024, 1024), Traffic(), now=10.0 + at).tokens == 0
