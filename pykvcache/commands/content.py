# SPDX-License-Identifier: Apache-2.0
"""``pykvcache ls`` and ``stats``: what is in a root. They change nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from pykvcache.capacity.pins import Pins
from pykvcache.capacity.policy import SECOND_NS
from pykvcache.commands.prompts import PromptOption, TokenizerOption, TokensOption, groups_of
from pykvcache.commands.roots import (
    JsonOption,
    ModelOption,
    RootOption,
    age_text,
    chosen_identities,
    chunks,
    complain,
    config_of,
    print_json,
    print_table,
)
from pykvcache.contents import AGE_NAMES, Found, count, model_of
from pykvcache.prompts import cached_tokens
from pykvcache.sizes import format_bytes


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
    shown = 0
    for found in _first(chunks(chosen_identities(config.root, identity)), limit):
        if found.identity not in pinned:
            pinned[found.identity] = Pins(found.identity).keys()
        is_pinned = found.key in pinned[found.identity]
        age_s = now_s - found.file.time_ns / SECOND_NS
        shown += 1
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
        if limit and shown == limit:
            print(f"The first {limit} only; --limit 0 shows all.")


def _first(found: Iterator[Found], limit: int) -> Iterator[Found]:
    for number, each in enumerate(found, 1):
        yield each
        if number == limit:
            return


def stats(root: RootOption = None, identity: ModelOption = "", as_json: JsonOption = False) -> None:
    """Count what is there, by identity and by age, and compare it with the limits."""
    config = config_of(root)
    chosen = chosen_identities(config.root, identity)
    found = count(config, chosen, time.time(), complain, is_whole=not identity)
    if as_json:
        print_json(found.document())
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
        for each, total in found.totals.items()
    ]
    print_table(["model", "identity", "ranks", "files", "size", "pinned", "oldest use"], rows)
    print()
    ages = [sum(total.ages[at] for total in found.totals.values()) for at in range(len(AGE_NAMES))]
    print_table(
        ["last use", "size"],
        [[name, format_bytes(size)] for name, size in zip(AGE_NAMES, ages, strict=True)],
    )
    print()
    print(
        f"{found.files} files, {format_bytes(found.size)} of at most {format_bytes(found.limit)}; "
        f"{format_bytes(found.space.free)} of {format_bytes(found.space.total)} free"
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
