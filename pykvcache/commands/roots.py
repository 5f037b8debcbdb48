# SPDX-License-Identifier: Apache-2.0
"""What the commands on a root have in common: its options, its contents, how they are shown."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pykvcache.capacity.scan import FileEntry, Leaf, identities, leaves
from pykvcache.config import Config, parse_config
from pykvcache.errors import ConfigError
from pykvcache.identity import FILE_NAME
from pykvcache.layout import SUFFIX

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


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk's file."""

    identity: Path
    leaf: Leaf
    file: FileEntry

    @property
    def key(self) -> str:
        """In hex."""
        return self.file.name.removesuffix(SUFFIX)

    @property
    def path(self) -> str:
        """Of the file."""
        return f"{self.leaf.path}/{self.file.name}"

    @property
    def rank(self) -> int:
        """Whose bytes it holds."""
        return int(Path(self.leaf.path).parent.name.removeprefix("rank-"))


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
    """Every chunk's file of these identities; in memory are those of one leaf directory."""
    for identity in chosen:
        for leaf in leaves(identity, complain):
            for file in leaf.chunks:
                yield Found(identity, leaf, file)


def complain(path: str, error: OSError) -> None:
    """Say on standard error what cannot be read, and go on."""
    print(f"pykvcache: '{path}' cannot be read: {error.strerror}", file=sys.stderr)


def model_of(identity: Path) -> str:
    """The model's name in an identity's facts; '?' if they cannot be read."""
    try:
        return str(msgspec.json.decode((identity / FILE_NAME).read_bytes())["model"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return "?"


def check_key(text: str) -> str:
    """A key as it is in the files' names.

    Raises:
        ConfigError: it is none.
    """
    key = os.path.basename(text).removesuffix(SUFFIX).lower()
    if not re.fullmatch(r"(?:[0-9a-f]{2}){1,64}", key):
        raise ConfigError(
            f"key is '{text}': must be the hex digits of a chunk's file name, as `pykvcache ls` "
            "shows them"
        )
    return key


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
