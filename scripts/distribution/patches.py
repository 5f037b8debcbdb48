# SPDX-License-Identifier: Apache-2.0
"""A patch series (`series` and the files it lists) applied to upstream files.

`git apply` run inside the work tree of some repository takes the paths as relative to that
repository and skips all that lie elsewhere, with exit status 0. So it runs in a folder that is
cut off from any repository above, with no configuration, and every file that a patch names must
differ afterwards.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .errors import BuildError

Read = Callable[[str], bytes | None]


def read_series(folder: Path) -> list[Path]:
    """The patches of one upstream version, in order.

    Raises:
        BuildError: no series, an empty one, a listed file that is missing, or a patch that lies
            there unlisted.
    """
    series = folder / "series"
    if not series.is_file():
        raise BuildError(f"there is no patch series for this upstream version: {series} is missing")
    lines = (line.partition("#")[0].strip() for line in series.read_text("utf-8").splitlines())
    listed = [line for line in lines if line]
    if not listed:
        raise BuildError(f"{series} lists no patch")
    for name in listed:
        if not (folder / name).is_file():
            raise BuildError(f"{series} lists {name}, which is missing")
    if len(set(listed)) != len(listed):
        raise BuildError(f"{series} lists a patch twice")
    unlisted = sorted({path.name for path in folder.glob("*.patch")} - set(listed))
    if unlisted:
        raise BuildError(f"{series} does not list {', '.join(unlisted)}")
    return [folder / name for name in listed]


def apply_series(patches: Sequence[Path], read: Read) -> dict[str, bytes | None]:
    """Apply the patches one after the other to upstream's files.

    Args:
        patches: files in the format of `git format-patch`, paths with one leading component.
        read: gives the bytes of an upstream file, None if there is none.

    Returns:
        The new bytes of every file that a patch changes or makes, None for one that it deletes.

    Raises:
        BuildError: git is missing, or a patch is malformed, doesn't apply, or changes nothing.
    """
    git = shutil.which("git")
    if git is None:
        raise BuildError("git is needed to apply the patches and is not on PATH; install git")
    changed: dict[str, bytes | None] = {}
    with tempfile.TemporaryDirectory(prefix="pykvcache-patch-") as folder:
        tree = Path(folder).resolve() / "tree"
        tree.mkdir()
        for patch in patches:
            changed.update(_apply(git, patch.resolve(), tree, set(changed), read))
    return changed


def _apply(
    git: str, patch: Path, tree: Path, extracted: set[str], read: Read
) -> dict[str, bytes | None]:
    names = _touched(git, patch, tree)
    for name in names:
        data = read(name)
        if name not in extracted and data is not None:
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    before = {name: _bytes(tree / name) for name in names}
    result = _git(git, tree, "apply", "-p1", "--whitespace=nowarn", "--reject", "-v", str(patch))
    if result.returncode:
        raise BuildError(f"patch {_label(patch)} does not apply: {_reason(result.stderr)}")
    after = {name: _bytes(tree / name) for name in names}
    same = sorted(name for name in names if before[name] == after[name])
    if same:
        raise BuildError(
            f"patch {_label(patch)} has no effect on {', '.join(same)}: git reported success but "
            "the file is unchanged"
        )
    return after


def _touched(git: str, patch: Path, tree: Path) -> list[str]:
    """The files that a patch names."""
    result = _git(git, tree, "apply", "-p1", "--numstat", "-z", str(patch))
    if result.returncode:
        raise BuildError(f"patch {_label(patch)} is malformed: {_reason(result.stderr)}")
    names = [record.split("\t", 2)[2] for record in result.stdout.split("\0") if record]
    if not names:
        raise BuildError(f"patch {_label(patch)} has no effect: it names no file")
    return names


def _git(git: str, tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [git, *arguments],
        cwd=tree,
        env=git_environment(os.environ, tree),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def git_environment(environ: Mapping[str, str], tree: Path) -> dict[str, str]:
    """An environment in which git sees no repository around `tree` and no configuration."""
    kept = {name: value for name, value in environ.items() if not name.startswith("GIT_")}
    return kept | {
        "GIT_CEILING_DIRECTORIES": str(tree.parent),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "LC_ALL": "C",
    }


def _reason(stderr: str) -> str:
    """Git's report cut down to the files and hunks that failed, and the text that was missing."""
    failures: list[str] = []
    file = ""
    for text in stderr.splitlines():
        if found := re.match(r"Applying patch (.+) with \d+ rejects?\.\.\.$", text):
            file = found[1]
        elif found := re.match(r"Rejected hunk #(\d+)\.$", text):
            failures.append(f"hunk {found[1]} of {file}")
    if not failures:
        errors = [text.removeprefix("error: ") for text in stderr.splitlines() if "error:" in text]
        return "; ".join(errors) or stderr.strip() or "git gave no reason"
    context = stderr.partition("error: while searching for:\n")[2].partition("\nerror: ")[0]
    where = f"{', '.join(failures)}: upstream's file has no such lines"
    return f"{where}:\n{context.rstrip()}" if context else where


def _label(patch: Path) -> str:
    return f"{patch.parent.name}/{patch.name}"


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
