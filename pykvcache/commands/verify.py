# SPDX-License-Identifier: Apache-2.0
"""``pykvcache verify``: reads files as a load would, and puts bad ones aside."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pykvcache.access import make_like
from pykvcache.commands.roots import (
    JsonOption,
    ModelOption,
    RootOption,
    chosen_identities,
    chunks,
    complain,
    config_of,
    print_json,
)
from pykvcache.contents import Found
from pykvcache.errors import ConfigError
from pykvcache.examine import find_defect, fingerprint_of
from pykvcache.layout import Defect, quarantine_name
from pykvcache.sizes import format_bytes

PROBLEMS_MAX = 100
"""Bad files named in a report; the others are only counted."""


@dataclass(slots=True)
class _Report:
    files: int = 0
    size: int = 0
    gone: int = 0
    unreadable: int = 0
    defects: Counter[Defect] = field(default_factory=Counter)
    bad: list[tuple[str, Defect]] = field(default_factory=list)
    last: str = ""
    """Where ``--after`` would go on."""


def verify(
    root: RootOption = None,
    identity: ModelOption = "",
    sample: Annotated[
        float, typer.Option("--sample", min=0, max=100, help="Per cent of the files, at random.")
    ] = 100.0,
    after: Annotated[
        str, typer.Option("--after", help="Go on behind this file, which an earlier run named.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what is bad; move nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read chunks, compare their checksums, and move bad files to quarantine/."""
    config = config_of(root)
    chosen = chosen_identities(config.root, identity)
    report = _Report()
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    interrupted = False
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("counting", total=None)
        total = sum(1 for _found in _from(chosen, config.root, after))
        progress.update(task, description="verifying", total=total)
        try:
            for found in _from(chosen, config.root, after):
                if random.random() * 100 < sample:
                    _examine(found, report, dry_run, config.quarantine_files_max)
                report.last = os.path.relpath(found.path, config.root)
                progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True
    _tell(report, as_json, dry_run, interrupted)
    if report.bad or report.unreadable or interrupted:
        raise typer.Exit(1)


def _from(chosen: list[Path], root: Path, after: str) -> Iterator[Found]:
    """The files in one order, from behind that one on.

    Raises:
        ConfigError: ``after`` is no path below the root.
    """
    if after and (os.path.isabs(after) or after.count("/") != 3):
        raise ConfigError(
            f"--after is '{after}': must be the path below the root that an earlier run has named"
        )
    start = tuple(after.split("/")) if after else ()
    for found in sorted_chunks(chosen):
        if tuple(os.path.relpath(found.path, root).split("/")) > start:
            yield found


def sorted_chunks(chosen: list[Path]) -> Iterator[Found]:
    """Every chunk; identities, ranks and leaf directories come in order, and so do their files."""
    leaf: list[Found] = []
    for found in chunks(chosen):
        if leaf and leaf[0].leaf is not found.leaf:
            yield from sorted(leaf, key=lambda each: each.file.name)
            leaf.clear()
        leaf.append(found)
    yield from sorted(leaf, key=lambda each: each.file.name)


def _examine(found: Found, report: _Report, dry_run: bool, quarantine_max: int) -> None:
    try:
        defect = find_defect(found.path, fingerprint_of(Path(found.leaf.path).parent))
    except FileNotFoundError:
        report.gone += 1
        return
    except OSError as error:
        report.unreadable += 1
        complain(found.path, error)
        return
    report.files += 1
    report.size += found.file.size
    if defect is None:
        return
    report.defects[defect] += 1
    if len(report.bad) < PROBLEMS_MAX:
        report.bad.append((found.path, defect))
    if not dry_run:
        _set_aside(found.path, report.defects.total() - 1, quarantine_max)


def _set_aside(path: str, number: int, files_max: int) -> None:
    """As servers do: the newest so many bad files of a rank are kept."""
    try:
        if files_max:
            target = quarantine_name(path, number % files_max)
            make_like(Path(target).parent)
            os.replace(path, target)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        complain(path, error)


def _tell(report: _Report, as_json: bool, dry_run: bool, interrupted: bool) -> None:
    bad = report.defects.total()
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "files": report.files,
                "bytes": report.size,
                "bad_files": bad,
                "unreadable_files": report.unreadable,
                "defects": {defect.value: count for defect, count in report.defects.items()},
                "bad": [{"path": path, "defect": defect.value} for path, defect in report.bad],
                "complete": not interrupted,
                "last": report.last,
            }
        )
        return
    for path, defect in report.bad:
        print(f"bad ({defect.value}): {path}")
    verb = "found" if dry_run else "put aside"
    print(f"verified {report.files} files, {format_bytes(report.size)}; {verb} {bad} bad ones")
    if interrupted:
        print(f"interrupted; go on with --after {report.last}")
