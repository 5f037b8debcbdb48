# SPDX-License-Identifier: Apache-2.0
"""``pykvcache gc``, ``clear``, ``pin`` and ``unpin``: they work beside running servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pykvcache import contents
from pykvcache.capacity.evictor import Evictor, Round
from pykvcache.capacity.keeper import budget_of, policy_of
from pykvcache.commands.prompts import PromptOption, TokenizerOption, TokensOption, groups_of
from pykvcache.commands.roots import (
    JsonOption,
    ModelOption,
    RootOption,
    chosen_identities,
    complain,
    complain_of_removal,
    config_of,
    print_json,
)
from pykvcache.contents import check_key
from pykvcache.errors import ConfigError
from pykvcache.sizes import format_bytes

KeyOrNone = Annotated[str, typer.Argument(help="A chunk's key in hex, or its file's name.")]


def gc(
    root: RootOption = None,
    capacity: Annotated[
        str | None, typer.Option("--capacity", help="As the option of servers: '500GiB', '50%'.")
    ] = None,
    free_space_min: Annotated[
        str | None, typer.Option("--free-space-min", help="As the option of servers.")
    ] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="'lru' or 'prefix'.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Evict down to the limits once, as servers do, and remove leftovers of killed writers."""
    if policy not in (None, "lru", "prefix"):
        raise ConfigError(f"--policy is '{policy}': must be 'lru' or 'prefix'")
    config = config_of(
        root, capacity=capacity, free_space_min=free_space_min, eviction_policy=policy
    )
    evictor = Evictor(
        config.root,
        budget_of(config),
        policy_of(config),
        files_per_s=0.0,
        pause=lambda _seconds: False,
    )
    try:
        done = evictor.run(dry=dry_run)
    except OSError as error:
        raise ConfigError(f"'{config.root}' cannot be cleaned: {error}") from None
    if done is None:
        raise ConfigError(
            f"a server or another `pykvcache gc` is evicting from '{config.root}' just now; try "
            "again later"
        )
    _tell(done, as_json, dry_run)


def _tell(done: Round, as_json: bool, dry_run: bool) -> None:
    if as_json:
        document: dict[str, Any] = {
            "dry_run": dry_run,
            "evicted_files": done.files,
            "evicted_bytes": done.size,
            "temporaries": done.temporaries,
            "files": done.usage.files,
            "bytes": done.usage.size,
            "pinned_bytes": done.usage.pinned,
            "limit_bytes": done.limit,
            "excess_bytes": done.excess,
            "skipped": dict(done.skipped),
            "problems": [{"path": path, "why": why} for path, why in done.problems],
        }
        print_json(document)
    else:
        for path, why in done.problems:
            print(f"skipped '{path}': {why}")
        verb = "would evict" if dry_run else "evicted"
        print(
            f"{verb} {done.files} files, {format_bytes(done.size)}; {done.usage.files} files, "
            f"{format_bytes(done.usage.size)} of at most {format_bytes(done.limit)} are left"
        )
        if done.excess:
            print(f"{format_bytes(done.excess)} too many are pinned or cannot be removed")
    if done.excess:
        raise typer.Exit(1)


def clear(
    root: RootOption = None,
    identity: ModelOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove all chunks, pinned ones too; of one identity with --identity. Running servers miss
    them, and go on storing."""
    config = config_of(root)
    chosen = chosen_identities(config.root, identity)
    names = ", ".join(each.name for each in chosen) or "nothing"
    if not yes:
        typer.confirm(f"Remove all chunks of {names} in '{config.root}'?", abort=True, err=True)
    removed = contents.remove_all(chosen, complain, complain_of_removal)
    if as_json:
        document = {"removed_files": removed.files, "removed_bytes": removed.size}
        print_json({**document, "failed_files": removed.failed})
    else:
        failed = f"; {removed.failed} failed" if removed.failed else ""
        print(f"removed {removed.files} files, {format_bytes(removed.size)}{failed}")
    if removed.failed:
        raise typer.Exit(1)


def pin(
    key: KeyOrNone = "",
    prompt: PromptOption = "",
    tokens: TokensOption = None,
    tokenizer: TokenizerOption = "",
    root: RootOption = None,
    identity: ModelOption = "",
    as_json: JsonOption = False,
) -> None:
    """Never evict a chunk, or those of a prompt that are on disk."""
    where, keys = _chosen(key, prompt, tokens, tokenizer, root, identity)
    try:
        kept = contents.pin(where, keys)
    except OSError as error:
        raise ConfigError(f"'{where}' cannot be pinned in: {error.strerror}") from None
    if not kept:
        raise ConfigError(f"none of these chunks is in '{where}' any more, or yet")
    _tell_pins(where, kept, "pinned", as_json)


def unpin(
    key: KeyOrNone = "",
    prompt: PromptOption = "",
    tokens: TokensOption = None,
    tokenizer: TokenizerOption = "",
    root: RootOption = None,
    identity: ModelOption = "",
    as_json: JsonOption = False,
) -> None:
    """Let a chunk, or those of a prompt, be evicted again."""
    if key:
        digits = check_key(key)
        found = [
            each
            for each in chosen_identities(config_of(root).root, identity)
            if _unpin(each, [digits])
        ]
        if not found:
            raise ConfigError(f"key is '{digits}': it is not pinned")
        _tell_pins(found[0], [digits], "unpinned", as_json)
        return
    where, keys = _chosen(key, prompt, tokens, tokenizer, root, identity)
    unpinned = _unpin(where, keys)
    if not unpinned:
        raise ConfigError(f"none of the prompt's chunks is pinned in '{where}'")
    _tell_pins(where, unpinned, "unpinned", as_json)


def _chosen(
    key: str, prompt: str, tokens: Path | None, tokenizer: str, root: Path | None, identity: str
) -> tuple[Path, list[str]]:
    """An identity's directory and the keys that are meant."""
    directory = config_of(root).root
    if key and (prompt or tokens is not None):
        raise ConfigError("give either a key or a prompt")
    if key:
        digits = check_key(key)
        return _where(directory, identity, digits), [digits]
    chosen = chosen_identities(directory, identity)
    if len(chosen) != 1:
        names = ", ".join(each.name for each in chosen) or "none"
        raise ConfigError(f"a prompt has other keys in each identity; choose one: {names}")
    groups = groups_of(chosen[0], prompt, tokens, tokenizer)
    return chosen[0], [digits for group in groups for digits in group.keys]


def _unpin(identity: Path, keys: list[str]) -> list[str]:
    try:
        return contents.unpin(identity, keys)
    except OSError as error:
        raise ConfigError(f"chunks cannot be unpinned: {error.strerror}") from None


def _tell_pins(identity: Path, keys: list[str], done: str, as_json: bool) -> None:
    if as_json:
        print_json({"identity": identity.name, "keys": keys, "pinned": done == "pinned"})
    else:
        what = keys[0] if len(keys) == 1 else f"{len(keys)} chunks"
        print(f"{done} {what} of {identity.name}")


def _where(root: Path, start: str, digits: str) -> Path:
    holders = [each for each in chosen_identities(root, start) if contents.holds(each, digits)]
    if not holders:
        raise ConfigError(f"key is '{digits}': no chunk of that key is in '{root}'")
    if len(holders) > 1:
        names = ", ".join(each.name for each in holders)
        raise ConfigError(f"key is '{digits}': several identities hold it, choose one: {names}")
    return holders[0]
