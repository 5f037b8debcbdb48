# SPDX-License-Identifier: Apache-2.0
"""Names for the chunks that the benchmarks write."""

from __future__ import annotations

import hashlib


def chunk_hashes(generation: int, count: int) -> list[bytes]:
    """Hashes of 32 bytes, as a cache has them, which spread the files over directories; others
    for each generation."""
    return [hashlib.sha256(f"{generation} {number}".encode()).digest() for number in range(count)]
