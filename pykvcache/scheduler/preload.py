# SPDX-License-Identifier: Apache-2.0
"""In which order the chunks of waiting requests are read ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request and the chunks that its load would read, in their order."""

    req_id: str
    keys: tuple[bytes, ...]


def order_preloads(candidates: Sequence[Candidate], chunks_max: int) -> tuple[bytes, ...]:
    """The chunks to read ahead, each once.

    Requests come in the order of the queue while all fit. If not, the first one of the queue
    still comes first, as it runs next; the others by ascending number of chunks, so that the
    room helps as many of them as it can.

    Args:
        candidates: in the order of the queue.
        chunks_max: chunks that can be read ahead.
    """
    wanted = dict.fromkeys(key for candidate in candidates for key in candidate.keys)
    if len(wanted) > chunks_max:
        rest = sorted(candidates[1:], key=lambda candidate: len(candidate.keys))
        ordered = [*candidates[:1], *rest]
        wanted = dict.fromkeys(key for candidate in ordered for key in candidate.keys)
    return tuple(wanted)[:chunks_max]
