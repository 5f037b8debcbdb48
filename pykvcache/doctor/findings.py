# SPDX-License-Identifier: Apache-2.0
"""What a check says."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """The backend works, but slower, or with less than it could have."""
    FAIL = "fail"
    """The backend does not start, or stores nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line.

    Attributes:
        check: its name, in lower case.
        verdict: how bad it is.
        found: what is the case.
        advice: what to do about it; empty if all is well.
    """

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, Verdict.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    """It could be better."""
    return Finding(check, Verdict.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(check, Verdict.FAIL, found, advice)
