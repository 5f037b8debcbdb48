# SPDX-License-Identifier: Apache-2.0
"""Which prompts are measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache.calibrate.plan import FULL, QUICK, TAIL_TOKENS, dram_units, first_units, sizes
from pykvcache.errors import ConfigError


def test_sizes_are_geometric() -> None:
    assert sizes(2100, 256, 1) == [272, 528, 1040, 2064]
    assert sizes(8191, 256, 2) == [272, 528, 784, 1040, 1552, 2064, 2832, 4112, 5904, 7952]


@given(st.integers(1, 1 << 20), st.integers(1, 4096), st.integers(1, 4))
def test_sizes_end_just_above_a_chunk_and_within_the_limit(
    tokens_max: int, tokens_per_chunk: int, per_octave: int
) -> None:
    if tokens_max < tokens_per_chunk + TAIL_TOKENS:
        with pytest.raises(ConfigError, match=f"--max-tokens is {tokens_max}"):
            sizes(tokens_max, tokens_per_chunk, per_octave)
        return
    found = sizes(tokens_max, tokens_per_chunk, per_octave)
    assert found == sorted(set(found))
    assert all((tokens - TAIL_TOKENS) % tokens_per_chunk == 0 for tokens in found)
    assert tokens_max - tokens_per_chunk < found[-1] <= tokens_max


@pytest.mark.parametrize("effort", [QUICK, FULL])
def test_units_have_names_of_their_own(effort: object) -> None:
    assert effort in (QUICK, FULL)
    chosen = QUICK if effort is QUICK else FULL
    lengths = sizes(8191, 256, chosen.per_octave)
    units = first_units(lengths, chosen) + dram_units(lengths)
    assert len({unit.name for unit in units}) == len(units)
    assert all(0 <= unit.context < unit.tokens - TAIL_TOKENS for unit in units)
    contexts = {unit.context for unit in units if unit.kind == "context"}
    assert len(contexts) >= 4


def test_a_quick_sweep_computes_few_tokens() -> None:
    units = first_units(sizes(QUICK.tokens_max, 256, QUICK.per_octave), QUICK)
    assert sum(unit.tokens for unit in units) < 40_000
