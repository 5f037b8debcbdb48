# SPDX-License-Identifier: Apache-2.0
"""What it costs to compare every chunk with its checksum: reads with ``verify`` 'full' against
'off', of the same files, turn by turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from pykvcache.config import Config
from pykvcache.measure import Storage, open_storage
from pykvcache.transfer.jobs import ChunkTransfer, Direction


def full_against_off(
    directory: Path,
    chunks: Sequence[ChunkTransfer],
    fingerprint: bytes,
    config: Config,
    rounds: int,
    bytes_per_s: Callable[[Storage], float],
) -> dict[str, float | list[float]]:
    """Write the chunks and compare reads of them.

    Returns:
        The median of the rounds' ratios, 1 if it costs nothing, and their range.
    """
    ratios = []
    with ExitStack() as stack:
        full, off = (
            stack.enter_context(
                open_storage(
                    directory,
                    chunks[0].file_bytes,
                    fingerprint,
                    config.model_copy(update={"verify": verify}),
                )
            )
            for verify in ("full", "off")
        )
        full.transfer(Direction.STORE, chunks)
        for number in range(rounds):
            if number % 2:
                without, compared = bytes_per_s(off), bytes_per_s(full)
            else:
                compared, without = bytes_per_s(full), bytes_per_s(off)
            ratios.append(compared / without)
    return {
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "rounds": rounds,
    }
