# SPDX-License-Identifier: Apache-2.0
"""A calibration: what one machine takes for one model, measured once and kept in a file.

Sections 4.1, 5.2 and 6.6 of the paper, which keeps a threshold for each tier; here the curves
themselves are kept, so that the gate can price any hit. ``pykvcache calibrate`` writes the file.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from scipy.interpolate import PchipInterpolator

from pykvcache.errors import ConfigError
from pykvcache.identity import Identity
from pykvcache.machine import Machine

FORMAT_VERSION = 1

AGE_MAX_S = 180 * 86400.0
"""Half a year: drives age and drivers change, though what a file tells is checked otherwise."""

CLOCK_SKEW_S = 86400.0
"""A date may lie so far ahead: files are written by machines whose clocks differ."""

FILE_BYTES_MAX = 64 << 20
"""More than any sweep writes; a server reads no more of whatever it is pointed to."""

DIRECTORY = "calibrations"
"""Below the root; not an identity, so it is neither counted nor evicted."""

NOT_OF_SPEED = frozenset({"format_version", "namespace", "hash_algorithm", "hash_seed"})
"""Fields of an identity that say which files are meant, not how long they take."""

SPEED_SETTINGS = (
    ("scheduler_config", "max_num_batched_tokens"),
    ("model_config", "enforce_eager"),
)
"""What of vLLM's configuration decides the speed and not the bytes."""

Tier = Literal["disk", "dram"]
TIERS: tuple[Tier, ...] = ("disk", "dram")

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CalibrationError(ConfigError):
    """A file that is no calibration, or not of this server; the message says what is not."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Fingerprint(_Part):
    """Of what a calibration holds for: it is used where all of it is the same.

    ``model`` holds the fields of the identity that decide the speed, and :data:`SPEED_SETTINGS`.
    """

    machine: Machine
    model: dict[str, Any]

    @property
    def digest(self) -> str:
        """32 hex digits: the file's name."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def fingerprint_of(
    machine: Machine, identity: Identity, settings: Mapping[str, Any]
) -> Fingerprint:
    """Of a server.

    Args:
        machine: it runs on, with its root.
        identity: of its files.
        settings: :func:`speed_settings`.
    """
    facts = identity.model_dump(mode="json", exclude=set(NOT_OF_SPEED))
    return Fingerprint(machine=machine, model={**facts, **settings})


def speed_settings(vllm_config: Any) -> dict[str, Any]:
    """:data:`SPEED_SETTINGS` of vLLM's configuration, or of its JSON."""

    def part(of: Any, name: str) -> Any:
        return of[name] if isinstance(of, Mapping) else getattr(of, name)

    return {name: part(part(vllm_config, section), name) for section, name in SPEED_SETTINGS}


class Sample(_Part):
    """One measurement.

    ``seconds`` are the time to the first token of a prompt of ``tokens``, of which ``context``
    were in the GPU (``compute``) or were loaded from that tier, ``bytes`` of KV for each rank.
    """

    kind: Literal["compute", "disk", "dram"]
    context: int = Field(ge=0)
    tokens: int = Field(gt=0)
    bytes: int = Field(default=0, ge=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Sample:
        if self.context >= self.tokens:
            raise ValueError(f"context is {self.context}: must be below tokens, {self.tokens}")
        if (self.kind == "compute") == bool(self.bytes):
            needed = "must be 0" if self.kind == "compute" else "must be above 0"
            raise ValueError(f"bytes is {self.bytes}: {needed} where kind is '{self.kind}'")
        return self


class _Curve(_Part):
    """Points with ascending places and seconds that never fall."""

    seconds: tuple[Seconds, ...] = Field(min_length=1)

    def _check(self, name: str, places: Sequence[int]) -> None:
        if len(places) != len(self.seconds):
            raise ValueError(f"has {len(places)} {name} and {len(self.seconds)} seconds")
        if any(low >= high for low, high in itertools.pairwise(places)) or places[0] <= 0:
            raise ValueError(f"{name} must be above 0 and ascend")
        if any(low > high for low, high in itertools.pairwise(self.seconds)):
            raise ValueError("seconds must not fall")


class ComputeCurve(_Curve):
    """``seconds[i]``: what the first ``tokens[i]`` of a prompt take, beside ``step_s``, which
    every prompt takes."""

    step_s: Seconds
    tokens: tuple[int, ...]

    @model_validator(mode="after")
    def _is_a_curve(self) -> ComputeCurve:
        self._check("tokens", self.tokens)
        return self


class TierCurve(_Curve):
    """``seconds[i]``: what ``bytes[i]`` of KV for each rank take to the GPU. ``tokens``: of the
    prompts these were, for people."""

    bytes: tuple[int, ...]
    tokens: tuple[int, ...]

    @model_validator(mode="after")
    def _is_a_curve(self) -> TierCurve:
        self._check("bytes", self.bytes)
        self._check("tokens", self.tokens)
        return self


class CalibrationFile(_Part):
    """The file's content; ``f`` holds medians of the time to compute a whole prompt, ``error``
    how far the predictions are from the measured c(a, b), see docs/calibration.md."""

    format_version: Literal[1] = 1
    fingerprint: Fingerprint
    versions: dict[str, str]
    date: AwareDatetime
    f: dict[int, Seconds]
    compute: ComputeCurve
    tiers: dict[Tier, TierCurve]
    error: dict[str, float]
    samples: tuple[Sample, ...]

    @field_validator("tiers")
    @classmethod
    def _has_a_disk(cls, value: dict[str, TierCurve]) -> dict[str, TierCurve]:
        if "disk" not in value:
            raise ValueError("has no 'disk'")
        return value


PIECES = 32
"""Straight pieces between two points of a curve. A scheduler asks hundreds of times a second, and
one point of a spline takes as long to evaluate as all of them."""


class _Monotone:
    """PCHIP through points (Fritsch and Butland 1984), which is monotone where they are;
    beyond the last point straight on."""

    def __init__(
        self, places: Sequence[float], values: Sequence[float], slope: float | None = None
    ) -> None:
        """Args:
        places: ascending, at least two.
        values: that do not fall.
        slope: beyond the last point; None for that at it.
        """
        values = [round(value, 12) for value in values]  # a picosecond's slope would overflow
        curve = PchipInterpolator(places, values)
        self._places = [
            low + (high - low) * piece / PIECES
            for low, high in itertools.pairwise(places)
            for piece in range(PIECES)
        ]
        self._places.append(float(places[-1]))
        self._values: list[float] = curve(self._places).tolist()
        self._last, self._value = float(places[-1]), float(values[-1])
        secant = (values[-1] - values[-2]) / (places[-1] - places[-2])
        # No gentler than the last piece: a longer context never makes a token cheaper.
        last = max(float(curve.derivative()(self._last)), secant)
        self.slope = last if slope is None else slope

    def __call__(self, place: float) -> float:
        if place >= self._last:
            return self._value + (place - self._last) * self.slope
        at = max(1, bisect.bisect(self._places, place))
        low, high = self._places[at - 1 : at + 1]
        below, above = self._values[at - 1 : at + 1]
        return below + (above - below) * max(0.0, place - low) / (high - low)


class ComputeTimes:
    """c(a, b) between and beyond the points of a curve."""

    def __init__(self, curve: ComputeCurve) -> None:
        """Args:
        curve: of a file.
        """
        self._step_s = curve.step_s
        self._total = _Monotone((0, *curve.tokens), (0.0, *curve.seconds))

    def __call__(self, start: int, end: int) -> float:
        """Seconds to the first token when the tokens ``start`` to ``end`` are computed, with
        those before in the GPU, in an idle server. 0 if there are none."""
        if end <= start:
            return 0.0
        return self._step_s + max(0.0, self._total(end) - self._total(start))


class Calibration:
    """The curves of a file, between and beyond what was measured."""

    def __init__(self, content: CalibrationFile) -> None:
        """Args:
        content: as read or written.
        """
        self.content = content
        self._compute = ComputeTimes(content.compute)
        self._loads: dict[str, _Monotone] = {
            name: _load_curve(curve) for name, curve in content.tiers.items()
        }

    @property
    def max_tokens(self) -> int:
        """Up to which was measured."""
        return self.content.compute.tokens[-1]

    def compute_s(self, start: int, end: int) -> float:
        """c(a, b): see :class:`ComputeTimes`."""
        return self._compute(start, end)

    def load_s(self, tier: str, size: int) -> float:
        """Seconds that a load adds, in an idle server.

        Args:
            tier: ``disk`` or ``dram``; the disk's curve stands for DRAM that was not measured,
                which is no slower.
            size: bytes of KV for each rank; 0 takes no time.
        """
        if size <= 0:
            return 0.0
        return max(0.0, self._loads.get(tier, self._loads["disk"])(size))

    def bandwidth(self, tier: str) -> float:
        """Bytes per second for each rank, of the longest load measured."""
        slope = self._loads.get(tier, self._loads["disk"]).slope
        return 1 / max(slope, 1e-15)


def _load_curve(curve: TierCurve) -> _Monotone:
    """With what a load takes beside its bytes at 0: straight back from the first points. Beyond
    the last it goes on at the bandwidth of that load, since between two loads of nearly the same
    time the slope is noise."""
    sizes, seconds = curve.bytes, curve.seconds
    fixed_s = 0.0
    if len(sizes) > 1:
        slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
        fixed_s = min(max(0.0, seconds[0] - sizes[0] * slope), seconds[0])
    return _Monotone((0, *sizes), (fixed_s, *seconds), seconds[-1] / sizes[-1])


# --- files


def calibration_path(root: Path, fingerprint: Fingerprint) -> Path:
    """Where a server looks."""
    return root / DIRECTORY / f"{fingerprint.digest}.json"


def find_calibration(root: Path, fingerprint: Fingerprint, now: float) -> Calibration | None:
    """The calibration of this server below its root, if there is one.

    Raises:
        CalibrationError: there is, and it cannot be used.
    """
    path = calibration_path(root, fingerprint)
    return load_calibration(path, fingerprint, now) if os.path.lexists(path) else None


def load_calibration(path: Path, fingerprint: Fingerprint, now: float) -> Calibration:
    """Read a calibration and see that it is of this server.

    Args:
        path: of the file.
        fingerprint: of the server.
        now: seconds since the epoch.

    Raises:
        CalibrationError: it cannot be read, is none, or is of another machine, model or time.
    """
    content = read_calibration(path)
    _compare(path, content.fingerprint, fingerprint)
    age_s = now - content.date.timestamp()
    if not -CLOCK_SKEW_S <= age_s <= AGE_MAX_S:
        raise CalibrationError(
            f"calibration '{path}': date is {content.date.isoformat()}: must be within the last "
            f"{AGE_MAX_S / 86400:.0f} days; run `pykvcache calibrate` again"
        )
    return Calibration(content)


def read_calibration(path: Path) -> CalibrationFile:
    """Read a calibration of whichever server.

    Raises:
        CalibrationError: it cannot be read or is none.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise CalibrationError(f"calibration '{path}' cannot be read: {error.strerror}") from None
    if len(text) > FILE_BYTES_MAX:
        raise CalibrationError(
            f"calibration '{path}' is too long: at most {FILE_BYTES_MAX >> 20} MiB are read"
        )
    try:
        found = json.loads(text)
    except ValueError as error:
        raise CalibrationError(f"calibration '{path}' is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CalibrationError(f"calibration '{path}' is not a JSON object")
    version = found.get("format_version")
    if version != FORMAT_VERSION:
        raise CalibrationError(
            f"calibration '{path}': format_version is {version!r}: must be {FORMAT_VERSION}; "
            "run `pykvcache calibrate` again"
        )
    try:
        return CalibrationFile.model_validate_json(text)
    except ValidationError as error:
        raise CalibrationError(f"calibration '{path}': {describe(error)}") from None


def describe(error: ValidationError) -> str:
    """The first thing that is wrong: field, value, what is accepted."""
    detail = error.errors(include_url=False)[0]
    field = ".".join(map(str, detail["loc"])) or "it"
    message = detail["msg"].removeprefix("Value error, ")
    value = repr(detail["input"])
    shown = value if len(value) <= 60 else f"{value[:60]}..."
    return f"{field} is {shown}: {message[0].lower()}{message[1:]}"


def _compare(path: Path, found: Fingerprint, expected: Fingerprint) -> None:
    for what, of_file, of_server in (
        (
            "machine",
            found.machine.model_dump(mode="json"),
            expected.machine.model_dump(mode="json"),
        ),
        ("model", found.model, expected.model),
    ):
        for name in sorted(of_file.keys() | of_server.keys()):
            ours, theirs = of_server.get(name), of_file.get(name)
            if json.dumps(ours, sort_keys=True) != json.dumps(theirs, sort_keys=True):
                raise CalibrationError(
                    f"calibration '{path}' is of another {what}: {name} is {theirs!r}: must be "
                    f"{ours!r}, as in this server; run `pykvcache calibrate` for it"
                )


def save_calibration(content: CalibrationFile, path: Path) -> None:
    """Write the file, whole or not at all.

    Raises:
        CalibrationError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(content.model_dump_json(indent=1) + "\n")
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
    except OSError as error:
        raise CalibrationError(f"'{path}' cannot be written: {error.strerror}") from None
