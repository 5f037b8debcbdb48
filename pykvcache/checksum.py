# SPDX-License-Identifier: Apache-2.0
"""The checksum of a chunk's payload: XXH3 with 128 bits.

It guards against accidents: a torn write, a flipped bit, another file's pages. Whoever may write
to the root on purpose can write a fitting checksum too. Of the hashes at hand it is the only one
that costs little beside the disk: measured 30 GB/s on one core, where CRC-32 (zlib) and BLAKE3
reach 4 to 5. The interpreter lock is not held meanwhile.
"""

from __future__ import annotations

import xxhash

ALGORITHM = 1
"""XXH3-128 in the trailer; the digest's bytes are in the order of the specification."""


def checksum(*parts: memoryview | bytes) -> bytes:
    """The 16 bytes for these, one after the other."""
    if len(parts) == 1:
        return xxhash.xxh3_128_digest(parts[0])
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()
