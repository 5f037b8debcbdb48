# SPDX-License-Identifier: Apache-2.0
"""What is left to read of loads that have begun."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gate_simulation.backlog import Backlog


def test_nothing_is_left_where_nothing_was_begun():
    backlog = Backlog()
    assert backlog.left(5.0, 100.0) == 0
    backlog.begin("dram only", 0, 5.0)
    backlog.end("unknown", 5.0)
    assert backlog.left(5.0, 100.0) == 0


def test_the_first_load_is_read_and_those_behind_it_wait():
    backlog = Backlog()
    backlog.begin("a", 1000, now=1.0)
    backlog.begin("b", 500, now=2.0)
    assert backlog.left(1.0, 100.0) == 1500
    assert backlog.left(6.0, 100.0) == 1000
    assert backlog.left(60.0, 100.0) == 500, "a disk that hangs has not read what is behind"
    backlog.end("a", 12.0)
    assert backlog.left(12.0, 100.0) == 500
    assert backlog.left(15.0, 100.0) == 200


def test_a_load_behind_an_idle_disk_begins_when_it_is_submitted():
    backlog = Backlog()
    backlog.begin("a", 1000, now=0.0)
    backlog.begin("b", 1000, now=50.0)
    backlog.end("a", 10.0)  # told late
    assert backlog.left(51.0, 100.0) == 900


def test_one_that_ends_out_of_turn_leaves_the_others():
    backlog = Backlog()
    backlog.begin("a", 1000, now=0.0)
    backlog.begin("b", 500, now=0.0)
    backlog.end("b", 1.0)
    assert backlog.left(1.0, 100.0) == 1000
    backlog.end("a", 2.0)
    assert backlog.left(2.0, 100.0) == 0


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 1000)), max_size=40),
    st.floats(0.0, 1e6),
)
def test_never_more_than_was_begun_nor_less_than_nothing(events, rate):
    backlog = Backlog()
    open_bytes: dict[int, int] = {}
    for now, (begins, load, size) in enumerate(events):
        if begins:
            backlog.begin(load, size, float(now))
            open_bytes.setdefault(load, size)
            if not size and not open_bytes[load]:
                del open_bytes[load]
        else:
            backlog.end(load, float(now))
            open_bytes.pop(load, None)
        assert 0 <= backlog.left(float(now), rate) <= sum(open_bytes.values())
        assert backlog.left(float(now), 0.0) == sum(open_bytes.values())
