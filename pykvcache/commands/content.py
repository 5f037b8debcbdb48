# SPDX-License-Identifier: Apache-2.0
"""``pykvcache ls`` and ``stats``: what is in a root. They change nothing."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from pykvcache.capacity.budget import estimate
from pykvcache.capacity.evictor import space_of
from pykvcache.capacity.keeper import budget_of
from pykvcache.capacity.pins import Pins
from pykvcache.capacity.policy import SECOND_NS
from pykvcache.capacity.record import Record
from pykvcache.commands.prompts import (
    PromptOption,
    TokenizerOption,
    TokensOption,
    cached_tokens,
    groups_of,
)
from pykvcache.commands.roots import (
    Found,
    JsonOption,
    ModelOption,
    RootOption,
    age_text,
    chosen_identities,
    chunks,
    config_of,
    model_of,
    print_json,
    print_table,
)
from pykvcache.sizes import format_bytes

AGES_S = (60, 3600, 86400, 7 * 86400)
AGE_NAMES = ("under a minute", "under an hour", "under a day", "under a week", "older")


def ls(
    root: RootOption = None,
    identity: ModelOption = "",
    as_json: JsonOption = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Chunks at most; 0: all.")] = 100,
) -> None:
    """List chunks: key, rank, size, seconds since last use. With --json one object a line."""
    config = config_of(root)
    now_s = time.time()
    rows = []
    pinned: dict[Path, set[str]] = {}
    count = 0
    for found in _first(chunks(chosen_identities(config.root, identity)), limit):
        if found.identity not in pinned:
            pinned[found.identity] = Pins(found.identity).keys()
        is_pinned = found.key in pinned[found.identity]
        age_s = now_s - found.file.time_ns / SECOND_NS
        count += 1
        if as_json:
            entry = {
                "identity": found.identity.name,
                "rank": found.rank,
                "key": found.key,
                "bytes": found.file.size,
                "unused_s": round(age_s, 3),
                "pinned": is_pinned,
            }
            print(json.dumps(entry))
        else:
            pin = "pinned" if is_pinned else ""
            size = format_bytes(found.file.size)
            identity_name = found.identity.name
            rows.append([identity_name, str(found.rank), found.key, size, age_text(age_s), pin])
    if not as_json:
        print_table(["identity", "rank", "key", "size", "unused for", ""], rows)
        if limit and count == limit:
            print(f"The first {limit} only; --limit 0 shows all.")


def _first(found: Iterator[Found], limit: int) -> Iterator[Found]:
    for number, each in enumerate(found, 1):
        yield each
        if number == limit:
            return


@dataclass(slots=True)
class _Totals:
    files: int = 0
    size: int = 0
    pinned: int = 0
    ranks: set[int] = field(default_factory=set)
    oldest_s: float = 0.0
    ages: list[int] = field(default_factory=lambda: [0] * len(AGE_NAMES))
    """Bytes by the time for which they were not used."""


def stats(root: RootOption = None, identity: ModelOption = "", as_json: JsonOption = False) -> None:
    """Count what is there, by identity and by age, and compare it with the limits."""
    config = config_of(root)
    now_s = time.time()
    chosen = chosen_identities(config.root, identity)
    totals = {each: _Totals() for each in chosen}
    pinned = {each: Pins(each).keys() for each in chosen}
    sizes: dict[int, int] = defaultdict(int)
    for found in chunks(chosen):
        total = totals[found.identity]
        age_s = max(now_s - found.file.time_ns / SECOND_NS, 0.0)
        total.files += 1
        total.size += found.file.size
        total.pinned += found.file.size if found.key in pinned[found.identity] else 0
        total.ranks.add(found.rank)
        total.oldest_s = max(total.oldest_s, age_s)
        total.ages[sum(age_s >= border for border in AGES_S)] += found.file.size
        sizes[found.file.size] += 1
    space = space_of(config.root)
    used = sum(total.size for total in totals.values())
    last = Record(config.root).read()
    whole = used if not identity else estimate(last, space) if last else used
    limit = budget_of(config).limit(whole, space)
    if as_json:
        print_json(_document(config.root, totals, sizes, limit, space.free, space.total))
        return
    rows = [
        [
            model_of(each),
            each.name,
            str(len(total.ranks)),
            str(total.files),
            format_bytes(total.size),
            format_bytes(total.pinned),
            age_text(total.oldest_s),
        ]
        for each, total in totals.items()
    ]
    print_table(["model", "identity", "ranks", "files", "size", "pinned", "oldest use"], rows)
    print()
    ages = [sum(total.ages[at] for total in totals.values()) for at in range(len(AGE_NAMES))]
    print_table(
        ["last use", "size"],
        [[name, format_bytes(size)] for name, size in zip(AGE_NAMES, ages, strict=True)],
    )
    print()
    print(
        f"{sum(total.files for total in totals.values())} files, {format_bytes(used)} of at most "
        f"{format_bytes(limit)}; {format_bytes(space.free)} of {format_bytes(space.total)} free"
    )


def lookup(
    prompt: PromptOption = "",
    tokens: TokensOption = None,
    tokenizer: TokenizerOption = "",
    root: RootOption = None,
    identity: ModelOption = "",
    as_json: JsonOption = False,
) -> None:
    """Say how much of a prompt is on disk, in the files of each identity."""
    config = config_of(root)
    found = []
    for each in chosen_identities(config.root, identity):
        groups = groups_of(each, prompt, tokens, tokenizer)
        found.append(
            {
                "identity": each.name,
                "model": model_of(each),
                "cached_tokens": cached_tokens(each, groups),
                "chunks": [list(group.keys) for group in groups],
            }
        )
    if as_json:
        print_json(found)
    else:
        columns = ["model", "identity", "cached_tokens"]
        rows = [[str(each[column]) for column in columns] for each in found]
        print_table(["model", "identity", "tokens on disk"], rows)


def _document(
    root: Path,
    totals: dict[Path, _Totals],
    sizes: dict[int, int],
    limit: int,
    free: int,
    filesystem: int,
) -> dict[str, Any]:
    return {
        "root": str(root),
        "files": sum(total.files for total in totals.values()),
        "bytes": sum(total.size for total in totals.values()),
        "limit_bytes": limit,
        "free_bytes": free,
        "filesystem_bytes": filesystem,
        "identities": [
            {
                "identity": each.name,
                "model": model_of(each),
                "ranks": sorted(total.ranks),
                "files": total.files,
                "bytes": total.size,
                "pinned_bytes": total.pinned,
                "oldest_use_s": round(total.oldest_s, 3),
                "bytes_by_age": dict(zip(AGE_NAMES, total.ages, strict=True)),
            }
            for each, total in totals.items()
        ],
        "files_by_bytes": {str(size): count for size, count in sorted(sizes.items())},
    }
