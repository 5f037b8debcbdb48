# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading

from pykvcache.reactor.outbox import Outbox

LONG_S = 60.0


def test_items_are_taken_once_and_in_order() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.put([1, 2])
    outbox.put([3])
    assert outbox.take() == [1, 2, 3]
    assert outbox.take() == []


def test_what_is_there_is_not_waited_for() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.put([1])
    outbox.wait(LONG_S)
    assert outbox.take() == [1]


def test_a_wait_for_nothing_ends_at_its_timeout() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.put([1])
    outbox.take()
    outbox.put([])
    outbox.wait(0.0)
    assert outbox.take() == []


def test_putting_ends_the_wait() -> None:
    outbox: Outbox[int] = Outbox()
    taken: list[int] = []

    def wait_and_take() -> None:
        while not taken:
            outbox.wait(LONG_S)
            taken.extend(outbox.take())

    waiting = threading.Thread(target=wait_and_take)
    waiting.start()
    outbox.put([1])
    waiting.join(LONG_S / 2)
    assert taken == [1]
