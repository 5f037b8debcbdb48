# SPDX-License-Identifier: Apache-2.0
"""A whole calibration: the servers, what is measured on each, and the file."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from pykvcache.calibrate.fitting import fit
from pykvcache.calibrate.journal import Journal
from pykvcache.calibrate.measure import Bench, Engine
from pykvcache.calibrate.plan import Effort, Unit, dram_units, first_units, sizes
from pykvcache.calibrate.server_options import UserOptions
from pykvcache.config import Config
from pykvcache.errors import ConfigError
from pykvcache.gate.calibration import (
    DIRECTORY,
    CalibrationFile,
    Fingerprint,
    Sample,
    fingerprint_of,
    speed_settings,
)
from pykvcache.identity import FILE_NAME, Identity
from pykvcache.machine import Machine
from pykvcache.serving.server import ServerOptions


class ServedEngine(Engine, Protocol):
    """A server that also tells its configuration."""

    def configuration(self) -> Mapping[str, Any]:
        """vLLM's, as JSON."""
        ...


Serve = Callable[[ServerOptions], AbstractContextManager[ServedEngine]]


class Progress(Protocol):
    """Told how far it is."""

    def stage(self, name: str) -> None:
        """What begins now."""
        ...

    def expect(self, tokens: int) -> None:
        """So many more are to be computed."""
        ...

    def advance(self, tokens: int) -> None:
        """So many have been."""
        ...

    def note(self, text: str) -> None:
        """Something that the user should know."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """What to calibrate.

    Attributes:
        model: as ``vllm serve`` takes it.
        options: of ``vllm serve``.
        root: of the servers that will use the calibration.
        effort: how thorough.
        tiers: ``disk``, and ``dram`` or not.
    """

    model: str
    options: UserOptions
    root: Path
    effort: Effort
    tiers: Sequence[str]

    @property
    def _name(self) -> str:
        """The same for the same model and options."""
        text = json.dumps([self.model, self.options.arguments()])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def journal(self) -> Path:
        """What is kept of an interrupted calibration."""
        return self.root / DIRECTORY / f"journal-{self._name}.jsonl"

    @property
    def log(self) -> Path:
        """The servers' output."""
        return self.root / DIRECTORY / f"server-{self._name}.log"

    @property
    def work(self) -> Path:
        """The root of the measured servers: on the same filesystem."""
        return self.root / DIRECTORY / f"work-{self._name}"


@dataclass(frozen=True, slots=True)
class Served:
    """What a running server says of itself.

    Attributes:
        fingerprint: of what its calibration holds for.
        tokens_max: of a prompt and one token of the answer.
        tokens_per_chunk: of one file.
        ranks: that each hold a part of the KV.
    """

    fingerprint: Fingerprint
    tokens_max: int
    tokens_per_chunk: int
    ranks: int


def identify(server: ServedEngine, work: Path, machine: Machine) -> Served:
    """Ask the server, and look into its root.

    Raises:
        ConfigError: there is no identity, or none that can be read.
    """
    found = sorted(work.glob(f"*/{FILE_NAME}"))
    if len(found) != 1:
        raise ConfigError(f"'{work}' has {len(found)} identities: a server makes one")
    try:
        identity = Identity.model_validate_json(found[0].read_bytes())
    except ValidationError:
        raise ConfigError(f"'{found[0]}' is not an identity of this version") from None
    configuration = server.configuration()
    return Served(
        fingerprint_of(machine, identity, speed_settings(configuration)),
        int(configuration["model_config"]["max_model_len"]) - 1,
        identity.blocks_per_chunk * max(identity.tokens_per_block),
        max(1, len(list(found[0].parent.glob("rank-*")))),
    )


class Calibrator:
    """One run of the command."""

    def __init__(
        self, request: Request, machine: Machine, serve: Serve, progress: Progress
    ) -> None:
        """Args:
        request: what to calibrate.
        machine: this one.
        serve: starts a server.
        progress: told how far it is.
        """
        self._request = request
        self._machine = machine
        self._serve = serve
        self._progress = progress

    def measure(self, journal: Journal) -> CalibrationFile:
        """Measure what the journal does not hold yet.

        Raises:
            ConfigError: it cannot be measured, or the journal is another's.
            ServingError: a server failed.
        """
        try:
            with self._server("none") as server:
                served = self._identify(server)
                journal.begin(served.fingerprint)
                lengths = self._lengths(served)
                units = first_units(lengths, self._request.effort)
                after = dram_units(lengths) if "dram" in self._request.tiers else []
                self._progress.expect(sum(map(_cost, [*units, *after])))
                self._run(server, served, units, journal, "computing, and loading from disk")
            if _missing(after, journal):
                with self._server("lru") as server:
                    self._run(server, served, after, journal, "loading from DRAM")
        finally:
            shutil.rmtree(self._request.work, ignore_errors=True)
        return make_file(served.fingerprint, journal.samples())

    def take(self, samples: Iterable[Sample]) -> CalibrationFile:
        """Make the file of samples measured elsewhere; a server tells whose they are to be.

        Raises:
            ConfigError: too few samples.
            ServingError: the server failed.
        """
        try:
            with self._server("none") as server:
                fingerprint = self._identify(server).fingerprint
        finally:
            shutil.rmtree(self._request.work, ignore_errors=True)
        return make_file(fingerprint, samples)

    def _server(self, dram_policy: str) -> AbstractContextManager[ServedEngine]:
        request = self._request
        self._progress.stage("starting a server")
        options: dict[str, Any] = {"dram_policy": dram_policy, "preload_lookahead": 0}
        if "gate" in Config.model_fields:
            options["gate"] = "always"
        arguments = request.options.arguments(root=str(request.work), **options)
        environment = {"VLLM_SERVER_DEV_MODE": "1"}
        return self._serve(ServerOptions(request.model, request.log, arguments, environment))

    def _identify(self, server: ServedEngine) -> Served:
        return identify(server, self._request.work, self._machine)

    def _lengths(self, served: Served) -> list[int]:
        effort = self._request.effort
        tokens_max = min(effort.tokens_max or served.tokens_max, served.tokens_max)
        return sizes(tokens_max, served.tokens_per_chunk, effort.per_octave)

    def _run(
        self,
        server: ServedEngine,
        served: Served,
        units: Sequence[Unit],
        journal: Journal,
        stage: str,
    ) -> None:
        missing = _missing(units, journal)
        self._progress.advance(sum(map(_cost, units)) - sum(map(_cost, missing)))
        if not missing:
            return
        request, note = self._request, self._progress.note
        bench = Bench(server, request.work, served.ranks, request.effort.repeats, note)
        self._progress.stage("warming up")
        bench.warm_up(min(unit.tokens for unit in units))
        for unit in missing:
            self._progress.stage(f"{stage}: {unit.tokens} tokens")
            journal.add(unit.name, bench.measure(unit))
            self._progress.advance(_cost(unit))


def _missing(units: Iterable[Unit], journal: Journal) -> list[Unit]:
    return [unit for unit in units if unit.name not in journal]


def _cost(unit: Unit) -> int:
    """Tokens, about; of a hit the tail counts for nothing."""
    return unit.tokens


def make_file(fingerprint: Fingerprint, samples: Iterable[Sample]) -> CalibrationFile:
    """Fit the samples, and put everything together.

    Raises:
        ConfigError: too few samples.
    """
    samples = tuple(samples)
    curves = fit(samples)
    return CalibrationFile(
        fingerprint=fingerprint,
        versions={"vllm": _vllm_version()},
        date=datetime.now(UTC),
        f=dict(curves.f),
        compute=curves.compute,
        tiers=dict(curves.tiers),
        error=dict(curves.error),
        samples=samples,
    )


def _vllm_version() -> str:
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "unknown"
