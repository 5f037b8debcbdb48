# SPDX-License-Identifier: Apache-2.0
"""Who may promote what when many wait."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pykvcache.scheduler.promotions import (
    PromotionLimits,
    Promotions,
    Verdict,
    rows_for_promotions,
)

LIMITS = PromotionLimits(rows_max=10, ahead_max=10, requests_max=4, ttl_s=100.0)


class Queue:
    """Promotions, a clock, and requests that ask for so many chunks each."""

    def __init__(self, limits: PromotionLimits = LIMITS) -> None:
        self.now = 0.0
        self.promotions = Promotions(limits, lambda: self.now)

    def ask(self, name: str, count: int) -> str:
        """One letter for each chunk: n(ow), l(ater) or x."""
        letters = {Verdict.NOW: "n", Verdict.LATER: "l", Verdict.NEVER: "x"}
        keys = [f"{name}{number}".encode() for number in range(count)]
        return "".join(letters[self.promotions.ask(name, key)] for key in keys)

    def step(self, *started: str, **asked: int) -> dict[str, str]:
        self.promotions.note_queue(list(asked))
        answers = {name: self.ask(name, count) for name, count in asked.items()}
        self.promotions.end_step(started)
        return answers


def test_the_first_that_asks_is_served_at_once_and_the_next_one_step_later() -> None:
    queue = Queue()
    assert queue.step(a=3, b=2, c=4) == {"a": "nnn", "b": "ll", "c": "llll"}
    assert queue.step(b=2, c=4) == {"b": "nn", "c": "nnnn"}
    assert queue.promotions.rows_held == 9


def test_a_request_gets_all_or_nothing_unless_it_is_next() -> None:
    queue = Queue()
    queue.step(a=6, b=6)
    assert queue.step(a=0, b=6) == {"a": "", "b": "llllll"}
    assert queue.step("a", a=0, b=6) == {"a": "", "b": "llllll"}
    assert queue.step(b=6) == {"b": "nnnnnn"}


def test_who_holds_chunks_comes_before_who_asks_when_the_queue_is_not_known() -> None:
    queue = Queue()
    assert queue.ask("a", 6) == "nnnnnn"
    assert queue.ask("b", 6) == "llllll"
    queue.promotions.end_step(())
    assert queue.ask("b", 6) == "llllll", "a is ready and has not run"
    queue.promotions.end_step(["a"])
    assert queue.ask("b", 6) == "nnnnnn"


def test_if_not_all_fit_the_shortest_come_first() -> None:
    queue = Queue()
    queue.step(a=2, b=7, c=4, d=3)
    assert queue.step(a=2, b=7, c=4, d=3) == {"a": "nn", "b": "lllllll", "c": "nnnn", "d": "nnn"}


def test_who_runs_or_ends_makes_room() -> None:
    queue = Queue()
    queue.step(a=8, b=8, c=8)
    queue.step("a", a=8, b=8, c=8)
    assert queue.step(b=8, c=8) == {"b": "nnnnnnnn", "c": "llllllll"}
    queue.promotions.release("b")
    assert queue.step(c=8) == {"c": "nnnnnnnn"}


def test_a_new_head_takes_from_the_last() -> None:
    queue = Queue()
    queue.step(a=3, b=3, c=3)
    queue.step(a=3, b=3, c=3)
    assert queue.promotions.rows_held == 9
    assert queue.step(urgent=6, a=3)["urgent"] == "nnnnnn"
    assert queue.promotions.rows_held == 9, "c was the last"
    assert queue.step(urgent=9, a=3)["urgent"] == "nnnnnnnnn"
    assert queue.promotions.rows_held == 9


def test_what_does_not_fit_at_once_is_never_promoted() -> None:
    assert Queue().step(a=12) == {"a": "nnnnnnnnnnxx"}


def test_rows_in_use_are_waited_for() -> None:
    queue = Queue()
    queue.promotions.rows_busy = 8
    assert queue.step(a=4) == {"a": "nnll"}
    queue.promotions.rows_busy = 0
    assert queue.step(a=4) == {"a": "nnnn"}


def test_what_was_evicted_is_promoted_again() -> None:
    queue = Queue()
    queue.step(a=2, b=2)
    queue.step(a=2, b=2)
    assert queue.step(a=2, b=2) == {"a": "nn", "b": "nn"}
    assert queue.promotions.rows_held == 4


def test_no_more_requests_than_the_lookahead_hold_chunks() -> None:
    queue = Queue(replace(LIMITS, requests_max=2))
    queue.step(a=1, b=1, c=1)
    assert queue.step(a=1, b=1, c=1) == {"a": "n", "b": "n", "c": "l"}


def test_without_reading_ahead_only_the_next_one_is_served() -> None:
    queue = Queue(replace(LIMITS, requests_max=1))
    queue.step(a=1, b=1)
    assert queue.step(a=1, b=1) == {"a": "n", "b": "l"}
    queue.promotions.release("a")
    assert queue.step(b=1) == {"b": "n"}


def test_who_waits_too_long_keeps_nothing_until_it_is_next() -> None:
    queue = Queue()
    queue.step(a=2, b=2)
    queue.step(a=2, b=2)
    queue.now = 100.0
    queue.step(a=2, b=2)
    assert queue.promotions.rows_held == 0
    queue.step(a=2, b=2)
    assert queue.step(a=2, b=2) == {"a": "nn", "b": "ll"}
    assert queue.step(b=2) == {"b": "nn"}


def test_forgetting_leaves_nothing() -> None:
    queue = Queue()
    queue.step(a=2, b=2)
    queue.promotions.forget()
    assert queue.promotions.rows_held == 0
    assert queue.step(b=2, a=2) == {"b": "nn", "a": "ll"}


@pytest.mark.parametrize("rows", [1, 2, 4, 48, 64, 1000])
def test_some_rows_are_kept_from_promotions(rows: int) -> None:
    available = rows_for_promotions(rows, 12)
    assert 1 <= available <= rows
    assert rows - available <= 12


@pytest.mark.parametrize("seed", range(20))
def test_everybody_runs_and_nobody_holds_more_than_there_is(seed: int) -> None:
    source = random.Random(seed)
    queue = Queue(replace(LIMITS, ahead_max=source.randrange(1, 11), ttl_s=30.0))
    waiting = {f"r{number}": source.randrange(1, 14) for number in range(12)}
    present: dict[str, set[int]] = {}
    steps = 0
    while waiting:
        steps += 1
        assert steps < 1000, f"nobody runs (seed {seed})"
        queue.now += 1.0
        answers = {}
        order = sorted(waiting, key=lambda name: source.random() < 0.05)
        queue.promotions.note_queue(order)
        for name in order:
            answers[name] = queue.ask(name, waiting[name])
        present = {
            name: {at for at, letter in enumerate(letters) if letter in "nx"}
            for name, letters in answers.items()
        }
        ready = [name for name, there in present.items() if len(there) == waiting[name]]
        started = ready[:1]
        for name in started:
            del waiting[name]
        queue.promotions.end_step(started)
        assert queue.promotions.rows_held <= LIMITS.rows_max
