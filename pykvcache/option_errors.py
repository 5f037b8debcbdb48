# SPDX-License-Identifier: Apache-2.0
"""What is said of options that are refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from pydantic import ValidationError


def unknown_option(key: str, known: Iterable[str]) -> str:
    """The message for an option that doesn't exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"unknown option '{key}': {hint}known options are {', '.join(names)}"


def describe_errors(error: ValidationError, origins: Mapping[str, str]) -> str:
    """One line that names each refused option, its value and what is accepted.

    Args:
        error: pydantic's.
        origins: for options that were not given explicitly, a remark on where they came from.
    """
    lines = []
    for detail in error.errors():
        message = detail["msg"].removeprefix("Value error, ")
        if not detail["loc"]:  # a combination, which the message names itself
            lines.append(message)
            continue
        name = str(detail["loc"][0])
        origin = f"option '{name}'{origins.get(name, '')}"
        lines.append(f"{origin} is {detail['input']!r}: {message[0].lower()}{message[1:]}")
    return "; ".join(lines)
