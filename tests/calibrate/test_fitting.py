# SPDX-License-Identifier: Apache-2.0
"""From samples to curves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache.calibrate.fitting import fit
from pykvcache.errors import ConfigError
from pykvcache.gate.calibration import ComputeTimes, Sample


def computed(context: int, tokens: int, seconds: float) -> Sample:
    return Sample(kind="compute", context=context, tokens=tokens, seconds=seconds)


def loaded(tokens: int, size: int, seconds: float, tier: str = "disk") -> Sample:
    return Sample.model_validate(
        {
            "kind": tier,
            "context": tokens - 16,
            "tokens": tokens,
            "bytes": size,
            "seconds": seconds,
        }
    )


HIT = loaded(272, 1000, 0.4)


def test_of_repeated_measurements_the_median_counts() -> None:
    samples = [computed(0, 272, seconds) for seconds in (1.0, 9.0, 1.2)]
    assert fit([*samples, HIT]).f == {272: 1.2}


def test_a_hit_is_charged_without_what_it_computes() -> None:
    curves = fit([computed(0, 272, 1.0), computed(256, 272, 0.1), HIT])
    assert curves.tiers["disk"].seconds == pytest.approx((0.3,))
    assert curves.tiers["disk"].bytes == (1000,)


def test_what_was_not_measured_of_a_hit_is_predicted() -> None:
    curves = fit([computed(0, 272, 0.2), HIT])
    tail_s = ComputeTimes(curves.compute)(256, 272)
    assert curves.tiers["disk"].seconds == pytest.approx((0.4 - tail_s,))


def test_a_larger_load_that_took_less_is_evened_out() -> None:
    samples = [computed(0, 272, 1.0), computed(256, 272, 0.1), computed(512, 528, 0.1)]
    curves = fit([*samples, HIT, loaded(528, 2000, 0.2)])
    assert curves.tiers["disk"].seconds == pytest.approx((0.2, 0.2))


def test_a_load_faster_than_its_tail_takes_no_time() -> None:
    curves = fit([computed(0, 272, 1.0), computed(256, 272, 0.5), HIT])
    assert curves.tiers["disk"].seconds == (0.0,)


def test_the_papers_error_is_that_of_leaving_out_the_context() -> None:
    samples = [computed(0, 272, 1.0), computed(0, 528, 3.0), computed(256, 528, 2.0)]
    error = fit([*samples, HIT]).error
    assert error["paper_max"] == error["paper_median"] > 0.4
    assert error["fitted_max"] < 0.05


def test_without_contexts_there_is_no_error() -> None:
    assert fit([computed(0, 272, 1.0), HIT]).error == {}


def test_what_is_missing_is_told() -> None:
    with pytest.raises(ConfigError, match="'compute' with context 0"):
        fit([computed(256, 272, 1.0), HIT])
    with pytest.raises(ConfigError, match="kind 'disk'"):
        fit([computed(0, 272, 1.0), loaded(272, 1000, 0.1, "dram")])


SECONDS = st.floats(1e-4, 1e3)


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(20, 5000), SECONDS), min_size=1, max_size=12
    ),
    st.lists(st.tuples(st.integers(20, 5000), SECONDS), min_size=1, max_size=6),
)
def test_whatever_was_measured_the_curves_do_not_fall(
    spans: list[tuple[int, int, float]], loads: list[tuple[int, float]]
) -> None:
    samples = [computed(start, start + tokens, seconds) for start, tokens, seconds in spans]
    samples.append(computed(0, 777, 1.0))
    samples += [loaded(tokens, tokens * 100, seconds) for tokens, seconds in loads]
    curves = fit(samples)
    for seconds in (curves.compute.seconds, curves.tiers["disk"].seconds):
        assert list(seconds) == sorted(seconds) and seconds[0] >= 0


@given(st.floats(0.001, 1), st.floats(1e-5, 1e-2), st.floats(0, 1))
def test_a_machine_that_obeys_the_model_is_found(
    step_s: float, token_s: float, share: float
) -> None:
    context_s = share * token_s / 2064  # at most, the last token takes twice the first's time

    def true_s(start: int, end: int) -> float:
        return step_s + token_s * (end - start) + context_s * (end**2 - start**2) / 2

    ends = [272, 528, 1040, 2064]
    spans = [(0, end) for end in ends] + [(end - 16, end) for end in ends]
    spans += [(start - 16, end) for start in ends for end in ends if start < end]
    curves = fit([*(computed(a, b, true_s(a, b)) for a, b in spans), HIT])
    times = ComputeTimes(curves.compute)
    for start, end in spans:
        # Of 16 tokens the slope between two points is a guess.
        close = 0.2 if end - start == 16 else 0.05
        assert times(start, end) == pytest.approx(true_s(start, end), rel=close)
