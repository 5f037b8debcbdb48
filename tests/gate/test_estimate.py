# SPDX-License-Identifier: Apache-2.0
"""What is learned from steps and loads, with samples of a machine that is known."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache.gate.estimate import PROBE_MAX_S, PROBE_MIN_S, OnlineEstimate
from pykvcache.gate.fit import Level, Prices
from pykvcache.gate.gate import decide
from pykvcache.gate.terms import LoadSample, StepSample, Traffic
from tests.gate.machine import TOKEN_BYTES, Machine, offer_of

IDLE = Traffic()


class Served:
    """An estimate that has seen a machine at work, with a seeded scatter."""

    def __init__(self, machine: Machine, seed: int = 1, scatter: float = 0.1) -> None:
        self.machine = machine
        self.estimate = OnlineEstimate(TOKEN_BYTES)
        self.now = 0.0
        self._random = random.Random(seed)
        self._scatter = scatter

    def steps(self, count: int, slower: float = 1.0) -> None:
        for _ in range(count):
            tokens = self._random.choice([512, 1024, 2048])
            context = self._random.randrange(0, 20_000)
            seconds = self.machine.compute_s(context, context + tokens, IDLE) * slower
            contexts = tokens * context + tokens * (tokens - 1) // 2
            self.estimate.observe_step(StepSample(tokens, contexts, 0, seconds * self._noise()))

    def loads(self, count: int, slower: float = 1.0) -> None:
        for _ in range(count):
            size = TOKEN_BYTES * self._random.choice([1024, 4096, 16384])
            seconds = self.machine.fixed_s + slower * size / self.machine.disk
            self.now += 1.0
            sample = LoadSample(0, size, 0, seconds * self._noise())
            self.estimate.observe_load(sample, self.now)

    def _noise(self) -> float:
        return self._random.lognormvariate(0, self._scatter)


def test_the_prior_loads_long_prefixes_and_no_short_ones():
    estimate = OnlineEstimate(TOKEN_BYTES)
    assert decide(estimate, offer_of(8208, 0, 8192), IDLE).tokens == 8192
    assert decide(estimate, offer_of(528, 0, 512), IDLE).tokens == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "machine",
    [Machine(), Machine(token_s=1 / 500, context_s=3e-8, step_s=0.01, disk=15e6, fixed_s=0.02)],
    ids=["fast", "slow"],
)
def test_learns_the_prices_of_a_machine(machine, seed):
    served = Served(machine, seed)
    served.steps(60)
    served.loads(40)
    for start, end in [(0, 1024), (0, 2048), (16_384, 18_000)]:
        truth = machine.compute_s(start, end, IDLE)
        assert served.estimate.compute_s(start, end, IDLE) == pytest.approx(truth, rel=0.2)
    for tokens in (1024, 8192, 16_384):
        truth = machine.load_s(0, tokens * TOKEN_BYTES, IDLE)
        found = served.estimate.load_s(0, tokens * TOKEN_BYTES, IDLE)
        assert found == pytest.approx(truth, rel=0.2)


def test_follows_a_disk_that_turns_slow_and_recovers():
    served = Served(Machine())
    served.loads(40)
    for slower in (10.0, 1.0):
        served.loads(5, slower)
        rate = served.estimate.disk_bytes_per_s
        assert rate == pytest.approx(served.machine.disk / slower, rel=0.35)


def test_follows_a_gpu_that_others_use_too():
    served = Served(Machine())
    served.steps(60)
    alone = served.estimate.compute_s(0, 8192, IDLE)
    served.steps(5, slower=3.0)
    assert served.estimate.compute_s(0, 8192, IDLE) == pytest.approx(3 * alone, rel=0.3)
    served.steps(5)
    assert served.estimate.compute_s(0, 8192, IDLE) == pytest.approx(alone, rel=0.3)


@pytest.mark.parametrize("first", [0.003, 3.0], ids=["fast", "slow"])
def test_a_first_load_that_was_like_no_other_is_soon_forgotten(first):
    estimate = OnlineEstimate(TOKEN_BYTES)
    size, seconds = 64 << 20, 0.1
    for now, taken in enumerate((first, seconds, seconds, seconds)):
        estimate.observe_load(LoadSample(0, size, 0, taken), now)
    assert estimate.load_s(0, size, IDLE) == pytest.approx(seconds, rel=0.3)


@pytest.mark.parametrize("slower", [0.1, 10.0])
def test_one_outlier_moves_little(slower):
    served = Served(Machine())
    served.steps(60)
    served.loads(40)
    compute_s = served.estimate.compute_s(0, 8192, IDLE)
    rate = served.estimate.disk_bytes_per_s
    served.steps(1, slower)
    served.loads(1, slower)
    assert served.estimate.compute_s(0, 8192, IDLE) == pytest.approx(compute_s, rel=0.15)
    assert served.estimate.disk_bytes_per_s == pytest.approx(rate, rel=0.15)


def test_counts_what_stood_before_a_load():
    machine = Machine()
    served = Served(machine)
    served.loads(40)
    size, ahead = 4096 * TOKEN_BYTES, 20_000 * TOKEN_BYTES
    for _ in range(10):
        served.now += 1
        seconds = machine.load_s(0, size, Traffic(disk_bytes=ahead))
        served.estimate.observe_load(LoadSample(0, size, ahead, seconds), served.now)
    assert served.estimate.load_s(0, size, IDLE) == pytest.approx(
        machine.load_s(0, size, IDLE), rel=0.2
    )


def test_takes_a_first_load_that_is_slow_for_a_slow_disk():
    served = Served(Machine(disk=25e6))
    served.loads(1)
    assert served.estimate.disk_bytes_per_s == pytest.approx(25e6, rel=0.4)


def test_long_loads_leave_what_short_ones_take_as_it_was():
    served = Served(Machine(fixed_s=0.005))
    served.loads(40)
    chunk = 256 * TOKEN_BYTES
    truth = served.machine.load_s(0, chunk, IDLE)
    assert served.estimate.load_s(0, chunk, IDLE) == pytest.approx(truth, rel=0.25)
    for _ in range(5):  # a disk that is ten times as slow, seen by single chunks
        served.now += 1
        seconds = served.machine.fixed_s + 10 * chunk / served.machine.disk
        served.estimate.observe_load(LoadSample(0, chunk, 0, seconds), served.now)
    slow = served.machine.disk / 10
    assert served.estimate.disk_bytes_per_s == pytest.approx(slow, rel=0.35)


def test_learns_of_each_tier_from_its_own_loads():
    machine = Machine(disk=6e9, dram=55e9)
    served = Served(machine)
    served.loads(40)
    for chunks in (1, 4, 16, 64, 128) * 4:
        size = chunks * 256 * TOKEN_BYTES
        served.now += 1
        seconds = machine.load_s(size, 0, IDLE)
        served.estimate.observe_load(LoadSample(size, 0, 0, seconds), served.now)
    for size in (1 << 28, 1 << 32):
        found = served.estimate.load_s(size, 0, IDLE)
        assert found == pytest.approx(machine.load_s(size, 0, IDLE), rel=0.2)
    assert served.estimate.disk_bytes_per_s == pytest.approx(6e9, rel=0.2)


def test_a_copy_that_hides_the_read_says_nothing_about_the_disk():
    served = Served(Machine())
    served.loads(40)
    rate = served.estimate.disk_bytes_per_s
    for _ in range(20):
        served.now += 1
        seconds = served.machine.load_s(1 << 34, 0, IDLE)
        served.estimate.observe_load(LoadSample(1 << 34, 1 << 25, 0, seconds), served.now)
    assert served.estimate.disk_bytes_per_s == rate


class FixedMeasurement:
    """A calibration of a machine that has changed since."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def compute_s(self, start: int, end: int) -> float:
        return self._machine.compute_s(start, end, IDLE)

    def load_s(self, tier: str, size: int) -> float:
        dram, disk = (size, 0) if tier == "dram" else (0, size)
        return self._machine.load_s(dram, disk, IDLE)


def test_a_calibration_is_believed_until_work_contradicts_it():
    machine = Machine()
    served = Served(Machine(token_s=3 * machine.token_s, disk=machine.disk / 5))
    served.estimate = OnlineEstimate(TOKEN_BYTES, FixedMeasurement(machine))
    size = 8192 * TOKEN_BYTES
    assert served.estimate.compute_s(0, 8192, IDLE) == machine.compute_s(0, 8192, IDLE)
    assert served.estimate.load_s(0, size, IDLE) == machine.load_s(0, size, IDLE)
    served.steps(20)
    served.loads(20)
    truth = served.machine
    assert served.estimate.load_s(0, size, IDLE) == pytest.approx(
        truth.load_s(0, size, IDLE), rel=0.2
    )
    assert served.estimate.compute_s(0, 8192, IDLE) > 1.5 * machine.compute_s(0, 8192, IDLE)


def test_asks_for_a_read_when_none_came_for_long():
    served = Served(Machine(), scatter=0.0)
    assert served.estimate.wants_probe(0.0), "nothing is known of the disk"
    served.loads(40)
    now = served.now
    assert not served.estimate.wants_probe(now)
    assert not served.estimate.wants_probe(now + PROBE_MAX_S - 1)
    assert served.estimate.wants_probe(now + PROBE_MAX_S)
    served.loads(1, slower=10.0)
    assert served.estimate.wants_probe(served.now + PROBE_MIN_S), "looked at again soon"


def test_does_not_flip_while_the_machine_stays_the_same():
    machine = Machine(disk=3.3e9)
    served = Served(machine, seed=3)
    served.steps(60)
    served.loads(40)
    offer = offer_of(8208, 0, 8192)
    verdicts = []
    for _ in range(200):
        served.steps(1)
        served.loads(1)
        verdicts.append(decide(served.estimate, offer, IDLE).tokens)
    flips = sum(one != other for one, other in itertools.pairwise(verdicts))
    assert flips <= 10


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e9), st.floats(1e-6, 1e3)), max_size=40))
def test_prices_are_never_negative(samples):
    prices = Prices([0.002, 1e-9], memory=16)
    for fixed, amount, total in samples:
        prices.add([fixed, amount], total)
    assert all(price >= 0 for price in prices.prices)


def test_a_level_stays_within_its_band_and_follows_what_lasts():
    level = Level()
    for ratio in (1.05, 0.95, 1.02, 0.98, 1.04):
        level.add(ratio)
    assert level.factor == 1.0
    for _ in range(3):
        level.add(3.0)
    assert level.factor == pytest.approx(3.0)


@pytest.mark.parametrize("change", [0.75, 1.3])
def test_a_level_follows_a_small_change_that_lasts_before_half_of_its_window_has_seen_it(change):
    level = Level()
    for _ in range(15):
        level.add(1.0)
    for _ in range(4):
        level.add(change)
    assert level.factor == 1.0
    level.add(change)
    assert level.factor == pytest.approx(change)


@given(st.lists(st.floats(0.01, 100), max_size=60))
def test_a_level_stays_where_no_few_in_a_row_agree(ratios):
    level = Level()
    for ratio in ratios:
        for each in (1.0, ratio, 1.0):
            level.add(each)
    assert level.factor == 1.0
