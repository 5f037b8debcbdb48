# SPDX-License-Identifier: Apache-2.0
"""What was measured so far, so that an interrupted calibration goes on where it was."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from pykvcache.errors import ConfigError
from pykvcache.gate.calibration import Fingerprint, Sample


class _Head(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    fingerprint: Fingerprint


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    unit: str
    samples: tuple[Sample, ...]


class Journal:
    """A file of JSON lines: whose calibration it is, then a line for each unit measured."""

    def __init__(self, path: Path) -> None:
        """Open the file, made if it is not there, for this process alone.

        Args:
            path: of the file.

        Raises:
            ConfigError: it cannot be written, another process measures for it, or it is no
                journal.
        """
        self.path = path
        self.fingerprint: Fingerprint | None = None
        self._entries: dict[str, tuple[Sample, ...]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise ConfigError(f"'{path}' cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self.close()
            raise ConfigError(f"another calibration is writing '{path}': wait for it") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let others have it."""
        self._file.close()

    def _read(self) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole, _, rest = text.rpartition(b"\n")
        if rest:  # a line cut short by a crash
            self._file.truncate(len(text) - len(rest))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                if number == 1:
                    self.fingerprint = _Head.model_validate_json(line).fingerprint
                else:
                    entry = _Entry.model_validate_json(line)
                    self._entries[entry.unit] = entry.samples
            except ValidationError:
                raise ConfigError(
                    f"'{self.path}', line {number}: is not of a calibration; remove the file to "
                    "start anew"
                ) from None

    def begin(self, fingerprint: Fingerprint) -> None:
        """Say whose samples follow.

        Raises:
            ConfigError: those that are there are another server's.
        """
        if self.fingerprint is None:
            self._append(_Head(fingerprint=fingerprint))
            self.fingerprint = fingerprint
        elif self.fingerprint != fingerprint:
            raise ConfigError(
                f"'{self.path}' was begun on another machine or with another model or settings; "
                "remove the file to start anew"
            )

    def __contains__(self, unit: str) -> bool:
        return unit in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, unit: str, samples: Sequence[Sample]) -> None:
        """Keep what a unit measured."""
        self._append(_Entry(unit=unit, samples=tuple(samples)))
        self._entries[unit] = tuple(samples)

    def samples(self) -> Iterator[Sample]:
        """All of them."""
        for samples in self._entries.values():
            yield from samples

    def _append(self, line: BaseModel) -> None:
        self._file.write(line.model_dump_json().encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """The calibration is written: nothing of this is needed any more."""
        self.path.unlink(missing_ok=True)
