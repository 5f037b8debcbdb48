# SPDX-License-Identifier: Apache-2.0
"""``pykvcache export`` and ``import``: chunks of one identity as one archive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from pykvcache.access import access_of
from pykvcache.archive import Progress, Reader, write_archive
from pykvcache.capacity.budget import estimate
from pykvcache.capacity.evictor import space_of
from pykvcache.capacity.keeper import budget_of
from pykvcache.capacity.record import Record
from pykvcache.commands.prompts import PromptOption, TokenizerOption, TokensOption, groups_of
from pykvcache.commands.roots import (
    JsonOption,
    ModelOption,
    RootOption,
    chosen_identities,
    chunks,
    config_of,
    print_json,
)
from pykvcache.config import Config, parse_config
from pykvcache.errors import ConfigError
from pykvcache.layout import ChunkPaths
from pykvcache.sizes import format_bytes
from pykvcache.startup import check_root

Archive = Annotated[Path, typer.Argument(help="A tar file.")]


def export(
    archive: Archive,
    prompt: PromptOption = "",
    tokens: TokensOption = None,
    tokenizer: TokenizerOption = "",
    root: RootOption = None,
    identity: ModelOption = "",
    as_json: JsonOption = False,
) -> None:
    """Write the chunks of an identity, or those of a prompt, into one archive."""
    config = config_of(root)
    chosen = chosen_identities(config.root, identity)
    if len(chosen) != 1:
        names = ", ".join(each.name for each in chosen) or "none"
        raise ConfigError(f"an archive holds one identity; choose one with --identity: {names}")
    where = chosen[0]
    if prompt or tokens is not None:
        groups = groups_of(where, prompt, tokens, tokenizer)
        files = _files_of(where, [key for group in groups for key in group.keys])
    else:
        files = [Path(found.path) for found in chunks(chosen)]
    if not files:
        raise ConfigError(f"there is nothing to export in '{where}'")
    total = sum(file.stat().st_size for file in files if file.exists())
    try:
        with _bar("exporting", total) as progress:
            count, size = write_archive(archive, where, files, progress)
    except OSError as error:
        raise ConfigError(f"'{archive}' cannot be written: {error}") from None
    if as_json:
        print_json({"identity": where.name, "files": count, "bytes": size})
    else:
        print(f"exported {count} files, {format_bytes(size)} of {where.name} to '{archive}'")


def _files_of(identity: Path, keys: list[str]) -> list[Path]:
    """Those that are there, of all ranks."""
    named = [
        Path(ChunkPaths(rank).final(bytes.fromhex(key)))
        for rank in sorted(identity.glob("rank-*"))
        for key in keys
    ]
    return [path for path in named if path.exists()]


def import_(archive: Archive, root: RootOption = None, as_json: JsonOption = False) -> None:
    """Take the chunks of an archive into a root. Those that are there already stay as they are,
    and bad ones are left out."""
    config = parse_config({"root": root} if root is not None else {})
    check_root(config)
    _require_room(config)
    try:
        size = archive.stat().st_size
        with _bar("importing", size) as progress:
            taken = Reader(config.root, access_of(config), progress).read(archive)
    except OSError as error:
        raise ConfigError(f"'{archive}' cannot be imported: {error}") from None
    bad = taken.bad.total()
    if as_json:
        print_json(
            {
                "identities": taken.identities,
                "files": taken.files,
                "bytes": taken.size,
                "present_files": taken.present,
                "bad_files": bad,
                "defects": dict(taken.bad),
            }
        )
    else:
        print(
            f"imported {taken.files} files, {format_bytes(taken.size)}; {taken.present} were there "
            f"already, {bad} are bad"
        )
    if bad or not taken.identities:
        raise typer.Exit(1)


def _require_room(config: Config) -> None:
    usage = Record(config.root).read()
    space = space_of(config.root)
    used = estimate(usage, space) if usage else 0
    if used >= budget_of(config).limit(used, space):
        raise ConfigError(
            f"the root '{config.root}' is full: see `pykvcache stats`, and `pykvcache gc`"
        )


@contextmanager
def _bar(what: str, total: int) -> Iterator[Progress]:
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda size: bar.advance(task, size)
