# SPDX-License-Identifier: Apache-2.0
"""What the commands on a root have in common: its options, its contents, how they are shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pykvcache import contents
from pykvcache.capacity.scan import identities
from pykvcache.config import Config, parse_config
from pykvcache.contents import Found
from pykvcache.errors import ConfigError

RootOption = Annotated[
    Path | None,
    typer.Option("--root", help="Of the KV files; else PYKVCACHE_ROOT, or the servers' default."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
ModelOption = Annotated[
    str,
    typer.Option("--identity", help="Only of this identity: the start of its directory's name."),
]


def config_of(root: Path | None, **options: Any) -> Config:
    """The servers' options, from the environment and these; those that are None are left out.

    Raises:
        ConfigError: the root is no directory, or an option is bad.
    """
    given = {"root": root, **options}
    config = parse_config({name: value for name, value in given.items() if value is not None})
    if not config.root.is_dir():
        raise ConfigError(
            f"option 'root' is '{config.root}': there is no such directory; it must be the root "
            "of a server"
        )
    return config


def chosen_identities(root: Path, start: str) -> list[Path]:
    """The directories of the root's identities, of those whose name starts so.

    Raises:
        ConfigError: a name was given and none starts so.
    """
    all_of_them = identities(root, complain)
    chosen = [identity for identity in all_of_them if identity.name.startswith(start)]
    if start and not chosen:
        known = ", ".join(identity.name for identity in all_of_them) or "none"
        raise ConfigError(
            f"--identity is '{start}': no identity's name starts so; there are {known}"
        )
    return chosen


def chunks(chosen: list[Path]) -> Iterator[Found]:
    """Every chunk's file of these identities; what cannot be read is said."""
    return contents.chunks(chosen, complain)


def complain(path: str, error: OSError) -> None:
    """Say on standard error what cannot be read, and go on."""
    print(f"pykvcache: '{path}' cannot be read: {error.strerror}", file=sys.stderr)


def complain_of_removal(path: str, error: OSError) -> None:
    """Likewise of what cannot be removed."""
    print(f"pykvcache: '{path}' cannot be removed: {error.strerror}", file=sys.stderr)


def print_json(value: Any) -> None:
    """One document."""
    print(json.dumps(value, indent=1))


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """For people; numbers to the right."""
    table = Table(box=None, pad_edge=False)
    for at, column in enumerate(columns):
        right = bool(rows) and all(row[at][:1].isdigit() for row in rows)
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def age_text(seconds: float) -> str:
    """For people: '5 s', '3 min', '2 h', '4 d'."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
