# SPDX-License-Identifier: Apache-2.0
"""``pykvcache calibrate``: measure what this machine takes, for the gate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from pykvcache.access import access_of, make_directories
from pykvcache.commands.roots import JsonOption, RootOption, print_json, print_table
from pykvcache.config import parse_config
from pykvcache.errors import ConfigError

if TYPE_CHECKING:
    from pykvcache.calibrate.journal import Journal
    from pykvcache.calibrate.run import Calibrator, Request
    from pykvcache.gate.calibration import Calibration, CalibrationFile, Tier

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For typer: what it does not know is an option of ``vllm serve``."""


class _Shown:
    """Progress on standard error; a line for each stage where that is no terminal."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=None)
        self._last = ""

    def stage(self, name: str) -> None:
        self._bar.update(self._task, description=name)
        if not self._bar.console.is_terminal and name != self._last:
            self._bar.console.print(name)
        self._last = name

    def expect(self, tokens: int) -> None:
        self._bar.update(self._task, total=tokens)

    def advance(self, tokens: int) -> None:
        self._bar.advance(self._task, tokens)

    def note(self, text: str) -> None:
        self._bar.console.print(text)


def calibrate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="As `vllm serve` takes it.")],
    root: RootOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and shorter prompts: up to 2,048 tokens.")
    ] = False,
    tokens_max: Annotated[
        int, typer.Option("--max-tokens", min=0, help="Of the longest prompt; 0: the model's own.")
    ] = 0,
    tiers: Annotated[
        str, typer.Option("--tiers", help="'disk,dram', or 'disk': one start of a server less.")
    ] = "disk,dram",
    from_csv: Annotated[
        Path | None, typer.Option("--from-csv", help="Take measurements from this file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="The file; else where servers look.")
    ] = None,
    picture: Annotated[
        bool, typer.Option("--picture/--no-picture", help="Draw two pictures beside it.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Measure what computing and loading take, so that servers load only what is faster loaded.

    Further options, after the model, are those of `vllm serve`: give the same as when serving.
    Starts servers on this machine, which should do nothing else. Interrupted, it goes on where
    it was when it is called again.
    """
    from pykvcache.calibrate.pictures import draw
    from pykvcache.gate.calibration import Calibration, calibration_path, save_calibration

    request = _request(model, context.args, root, quick, tokens_max, tiers)
    content = _measure(request, from_csv)
    path = output or calibration_path(request.root, content.fingerprint)
    save_calibration(content, path)
    if from_csv is None:
        request.journal.unlink(missing_ok=True)
    calibration = Calibration(content)
    pictures = draw(calibration, path) if picture else []
    if as_json:
        print_json(_result(calibration, path, pictures))
    else:
        _show(calibration, path, pictures)


def _request(
    model: str, arguments: list[str], root: Path | None, quick: bool, tokens_max: int, tiers: str
) -> Request:
    from pykvcache.calibrate.plan import FULL, QUICK
    from pykvcache.calibrate.run import Request
    from pykvcache.calibrate.server_options import parse_options

    wanted = [tier.strip() for tier in tiers.split(",")]
    if sorted(wanted) not in (["disk"], ["disk", "dram"]):
        raise ConfigError(f"--tiers is '{tiers}': must be 'disk' or 'disk,dram'")
    options = parse_options(arguments)
    given = options.backend if root is None else {**options.backend, "root": root}
    config = parse_config(given)
    try:
        make_directories(config.root, config.root, access_of(config))
    except OSError as error:
        raise ConfigError(
            f"option 'root' is '{config.root}': cannot make it ({error.strerror})"
        ) from None
    effort = QUICK if quick else FULL
    if tokens_max:
        effort = replace(effort, tokens_max=tokens_max)
    return Request(model, options, config.root, effort, wanted)


def _measure(request: Request, from_csv: Path | None) -> CalibrationFile:
    """Raises:
    ConfigError: it cannot be measured; or a server failed, which the message tells.
    """
    from pykvcache.calibrate.journal import Journal
    from pykvcache.calibrate.run import Calibrator
    from pykvcache.calibrate.table import samples_from_csv
    from pykvcache.machine import machine_of
    from pykvcache.serving.answers import ServingError
    from pykvcache.serving.server import Server, ending_on_signals

    samples = samples_from_csv(from_csv) if from_csv is not None else None
    columns = (TextColumn("{task.description}"), BarColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with (
        Bar(*columns, *times, console=console, disable=not console.is_terminal) as bar,
        ending_on_signals(),
    ):
        calibrator = Calibrator(request, machine_of(request.root), Server, _Shown(bar))
        try:
            if samples is not None:
                return calibrator.take(samples)
            return _with_journal(calibrator, Journal(request.journal))
        except ServingError as error:
            raise ConfigError(str(error)) from None


def _with_journal(calibrator: Calibrator, journal: Journal) -> CalibrationFile:
    with journal:
        try:
            return calibrator.measure(journal)
        except KeyboardInterrupt:
            Console(stderr=True).print(
                f"interrupted: {len(journal)} measurements are kept in '{journal.path}'; the same "
                "command goes on from there",
                soft_wrap=True,
            )
            raise typer.Exit(1) from None


def _break_even(calibration: Calibration, tier: Tier) -> list[tuple[int, float | None]]:
    from pykvcache.calibrate.frontier import break_even_share

    return [
        (tokens, break_even_share(calibration, tier, tokens))
        for tokens in calibration.content.compute.tokens
    ]


def _result(calibration: Calibration, path: Path, pictures: list[Path]) -> dict[str, object]:
    content = calibration.content
    return {
        "path": str(path),
        "pictures": [str(picture) for picture in pictures],
        "digest": content.fingerprint.digest,
        "samples": len(content.samples),
        "f": content.f,
        "step_s": content.compute.step_s,
        "tiers": {
            tier: {
                "bytes_per_s": calibration.bandwidth(tier),
                "load_s": dict(zip(curve.tokens, curve.seconds, strict=True)),
                "break_even_share": dict(_break_even(calibration, tier)),
            }
            for tier, curve in content.tiers.items()
        },
        "error": content.error,
    }


def _show(calibration: Calibration, path: Path, pictures: list[Path]) -> None:
    content = calibration.content
    columns = ["tokens", "computed"]
    for tier in content.tiers:
        columns += [f"from {tier}", "break-even"]
    shares = {tier: dict(_break_even(calibration, tier)) for tier in content.tiers}
    rows = []
    for tokens, computed_s in content.f.items():
        row = [f"{tokens}", f"{computed_s:.3f} s"]
        for tier, curve in content.tiers.items():
            loads = dict(zip(curve.tokens, curve.seconds, strict=True))
            share = shares[tier].get(tokens)
            row.append(f"{loads[tokens]:.3f} s" if tokens in loads else "not measured")
            row.append(f"{100 * share:.1f} %" if share is not None else "never")
        rows.append(row)
    print_table(columns, rows)
    for tier in content.tiers:
        print(f"{tier}: {calibration.bandwidth(tier) / 1e6:.0f} MB/s")
    for name, what in (("fitted", "this fit"), ("paper", "f(b - a), as in the paper")):
        if f"{name}_median" in content.error:
            middle, most = content.error[f"{name}_median"], content.error[f"{name}_max"]
            print(f"c(a, b) by {what}: wrong by {middle:.1%} (median), {most:.1%} (at most)")
    for written in (path, *pictures):
        print(f"written: {written}")
