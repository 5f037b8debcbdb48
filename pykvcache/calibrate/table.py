# SPDX-License-Identifier: Apache-2.0
"""Measurements from a CSV file, made by whatever means."""

from __future__ import annotations

import csv
from pathlib import Path

from pydantic import ValidationError

from pykvcache.errors import ConfigError
from pykvcache.gate.calibration import Sample, describe

COLUMNS = ("kind", "context", "tokens", "bytes", "seconds")


def samples_from_csv(path: Path) -> list[Sample]:
    """Read samples; the first line names the columns, in any order.

    ``kind`` is ``compute``, ``disk`` or ``dram``, and the others are those of
    :class:`~pykvcache.gate.calibration.Sample`. An empty ``context`` or ``bytes`` is 0.

    Raises:
        ConfigError: the file cannot be read, or a line is not a sample; the message names it.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            _check_columns(path, reader.fieldnames or ())
            return [_sample(path, reader.line_num, row) for row in reader]
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"'{path}' is not a CSV file in UTF-8: {error}") from None


def _check_columns(path: Path, found: object) -> None:
    names = list(found) if isinstance(found, list | tuple) else []
    if sorted(names) != sorted(COLUMNS):
        raise ConfigError(
            f"'{path}', line 1: the columns are {', '.join(names) or 'missing'}: must be "
            f"{', '.join(COLUMNS)}"
        )


def _sample(path: Path, line: int, row: dict[str, str | None]) -> Sample:
    if None in row or None in row.values():
        raise ConfigError(f"'{path}', line {line}: must have {len(COLUMNS)} fields")
    fields = {name: value.strip() for name, value in row.items() if value is not None}
    for name in ("context", "bytes"):
        fields[name] = fields[name] or "0"
    try:
        return Sample.model_validate_strings(fields)
    except ValidationError as error:
        raise ConfigError(f"'{path}', line {line}: {describe(error)}") from None
