# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write them: bytes, with a unit, or a share of the filesystem."""

from __future__ import annotations

import re
from dataclasses import dataclass

ACCEPTED = (
    "a number of bytes, also with a unit such as '500GiB' or '2TB', or '80%' of the filesystem"
)

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(?:(%)|([KMGTP]?)(i?)(B?))", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, or a share (0 to 1) of a filesystem."""

    amount: int = 0
    share: float = 0.0

    def of(self, total_bytes: int) -> int:
        """In bytes, on a filesystem of that many."""
        return self.amount or int(self.share * total_bytes)


def parse_size(text: str) -> Size:
    """Read a size; 'KiB' is 1,024 bytes and 'KB' 1,000, a unit without B counts as with it.

    Raises:
        ValueError: it is no size, or more than 100 %.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None or (match[4] and not match[3]):
        raise ValueError(f"must be {ACCEPTED}")
    number = float(match[1])
    if match[2]:
        if number > 100:
            raise ValueError(f"must be {ACCEPTED}, at most 100%")
        return Size(share=number / 100)
    base = 1024 if match[4] else 1000
    power = _POWERS[match[3].upper()]
    exact = int(match[1]) if match[1].isdigit() else number
    return Size(amount=int(exact * base**power))


def format_bytes(count: float) -> str:
    """For people, in binary units: '3.2 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("a unit is always found")
