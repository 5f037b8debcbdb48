# SPDX-License-Identifier: Apache-2.0
"""Rules for the patch series: what they may touch, how they are written down, how big they get.

Reads the files alone; that they apply is shown where the wheel is built.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rebasing.burden import ADDED_LINES_MAX, FILES_MAX

REPOSITORY = Path(__file__).resolve().parents[2]
PATCHES = REPOSITORY / "patches"
OVERLAY_PACKAGE = "vllm.v1.kv_offload.pykvcache"

CONTEXT_LINES = 3
"""With less, hunks land in the wrong place without a word when upstream moves on."""

FIELDS = ("Description", "Why-not-overlay", "Origin", "Forwarded", "Removable-when")
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")

VERSIONS = sorted(path.name for path in PATCHES.iterdir() if path.is_dir())


@dataclass(frozen=True)
class Hunk:
    old_start: int
    old_lines: int
    new_lines: int
    body: tuple[str, ...]

    def count(self, marks: str) -> int:
        return sum(line[0] in marks for line in self.body)

    @property
    def context_runs(self) -> list[int]:
        """Lengths of the stretches of context: before, between and after the changes."""
        runs = [0]
        for line in self.body:
            if line[0] == " ":
                runs[-1] += 1
            elif runs[-1] or len(runs) == 1:
                runs.append(0)
        return runs


@dataclass(frozen=True)
class FileChange:
    path: str
    header: tuple[str, ...]
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    path: Path
    header: tuple[str, ...]
    changes: tuple[FileChange, ...]

    @classmethod
    def read(cls, path: Path) -> Patch:
        header, *files = path.read_text("utf-8").split("\ndiff --git ")
        return cls(path, tuple(header.splitlines()), tuple(_file_change(text) for text in files))

    @property
    def fields(self) -> dict[str, str]:
        """The fields of the header, folded lines joined."""
        found: dict[str, str] = {}
        name = ""
        for line in self.header:
            if line.startswith(" ") and name:
                found[name] += line
            elif separated := re.match(r"([A-Z][A-Za-z-]*): ?(.*)", line):
                name, found[separated[1]] = separated[1], separated[2]
            else:
                name = ""
        return found

    @property
    def added(self) -> list[str]:
        return [
            line[1:]
            for change in self.changes
            for hunk in change.hunks
            for line in hunk.body
            if line[0] == "+"
        ]


def _file_change(text: str) -> FileChange:
    lines = text.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("@@"))
    paths = re.fullmatch(r"a/(\S+) b/(\S+)", lines[0])
    assert paths and paths[1] == paths[2], f"renames or odd names: {lines[0]}"
    hunks: list[Hunk] = []
    for line in lines[first:]:
        if head := HUNK.match(line):
            old_start, old_lines, _, new_lines = (int(part or 1) for part in head.groups())
            hunks.append(Hunk(old_start, old_lines, new_lines, ()))
        else:
            last = hunks.pop()
            hunks.append(
                Hunk(last.old_start, last.old_lines, last.new_lines, (*last.body, line or " "))
            )
    return FileChange(paths[1], tuple(lines[1:first]), tuple(hunks))


def series(version: str) -> list[str]:
    return (PATCHES / version / "series").read_text("utf-8").splitlines()


def all_patches() -> Iterator[Patch]:
    for version in VERSIONS:
        for path in sorted((PATCHES / version).glob("*.patch")):
            yield Patch.read(path)


every_patch = pytest.mark.parametrize(
    "patch",
    [pytest.param(each, id=f"{each.path.parent.name}/{each.path.stem}") for each in all_patches()],
)
every_version = pytest.mark.parametrize("version", VERSIONS)


def test_every_pinned_upstream_version_has_a_series() -> None:
    pinned = tomllib.loads((REPOSITORY / "upstream.toml").read_text("utf-8"))["upstream"]
    assert {f"v{each['version']}" for each in pinned} == set(VERSIONS)


@every_version
def test_series_lists_each_patch_once_and_nothing_else(version: str) -> None:
    listed = series(version)
    present = sorted(path.name for path in (PATCHES / version).iterdir() if path.name != "series")
    assert sorted(listed) == present
    assert listed


@every_version
def test_names_carry_no_number(version: str) -> None:
    for name in series(version):
        assert re.fullmatch(r"[a-z][a-z-]*\.patch", name), name


@every_version
def test_burden_is_bounded(version: str) -> None:
    patches = [Patch.read(PATCHES / version / name) for name in series(version)]
    files = {change.path for patch in patches for change in patch.changes}
    added = sum(len(patch.added) for patch in patches)
    assert len(files) <= FILES_MAX
    assert added <= ADDED_LINES_MAX


def test_every_version_has_the_same_hooks() -> None:
    """One overlay serves all versions, so each calls the same functions of it."""
    hooks = {version: _hooks(version) for version in VERSIONS}
    assert len({frozenset(names) for names in hooks.values()}) == 1, hooks
    assert len({tuple(series(version)) for version in VERSIONS}) == 1


def _hooks(version: str) -> set[tuple[str, str]]:
    """(module, name) of all that the series takes from the overlay."""
    added = "\n".join(
        line for name in series(version) for line in Patch.read(PATCHES / version / name).added
    )
    package = re.escape(OVERLAY_PACKAGE)
    hooks: set[tuple[str, str]] = set()
    for module, names in re.findall(rf"from ({package}\.\w+) import ([\w, ]+)", added):
        hooks |= {(module, name.strip()) for name in names.split(",")}
    imported = re.findall(rf"from {package} import ([\w, ]+)", added)
    for module in {name.strip() for names in imported for name in names.split(",")}:
        used = re.findall(rf"(?<!\.)\b{module}\.(\w+)\(", added)
        hooks |= {(f"{OVERLAY_PACKAGE}.{module}", name) for name in used}
    for module, name in re.findall(rf'"({package}\.\w+)", "(\w+)"', added):
        hooks.add((module, name))
    return hooks


@every_version
def test_hooks_are_defined_in_the_overlay(version: str) -> None:
    hooks = _hooks(version)
    assert len({module for module, _ in hooks}) >= 3
    for module, name in sorted(hooks):
        source = REPOSITORY / Path(*module.split(".")).with_suffix(".py")
        assert source.is_file(), f"{version} imports {module}, which the overlay lacks"
        defined = {
            node.name
            for node in ast.parse(source.read_text("utf-8")).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        assert name in defined, f"{version} takes {name} from {module}, which does not define it"


@every_patch
def test_header_is_complete(patch: Patch) -> None:
    fields = patch.fields
    assert re.match(r"\[PATCH\] \S", fields["Subject"])
    for name in FIELDS:
        assert fields.get(name, "").strip(), f"{patch.path.name} has no {name}"
    assert fields["Origin"] in {"vendor", "backport", "upstream"}
    assert re.match(r"not-yet|not-needed \(.+\)|https://", fields["Forwarded"])


@every_patch
def test_export_is_reproducible(patch: Patch) -> None:
    """What would differ between two exports (commit id, git version) is left out, and nothing
    that tells where a hunk belongs is."""
    text = patch.path.read_text("utf-8")
    assert patch.header[0] == f"From {'0' * 40} Mon Sep 17 00:00:00 2001"
    assert "From: py-kvcache maintainers <maintainers@py-kvcache.invalid>" in patch.header
    assert "\n---\n" not in text
    assert "\n-- \n" not in text
    for change in patch.changes:
        assert re.fullmatch(r"index [0-9a-f]{40}\.\.[0-9a-f]{40} 100644", change.header[0])


@every_patch
def test_only_existing_python_files_of_vllm_are_changed(patch: Patch) -> None:
    assert patch.changes
    for change in patch.changes:
        assert re.fullmatch(r"vllm/[\w/]+\.py", change.path)
        assert len(change.header) == 3, f"{change.path} is new, deleted or has another mode"
        assert change.header[1:] == (f"--- a/{change.path}", f"+++ b/{change.path}")


@every_patch
def test_hunks_have_their_full_context(patch: Patch) -> None:
    for change in patch.changes:
        for hunk in change.hunks:
            where = f"{patch.path.name}, {change.path}, line {hunk.old_start}"
            assert hunk.count(" -") == hunk.old_lines, where
            assert hunk.count(" +") == hunk.new_lines, where
            before, *between, after = hunk.context_runs
            assert before == min(CONTEXT_LINES, hunk.old_start - 1), where
            assert all(run <= 2 * CONTEXT_LINES for run in between), where
            at_end_of_file = hunk is change.hunks[-1] and after < CONTEXT_LINES
            assert after == CONTEXT_LINES or at_end_of_file, where


@every_patch
def test_code_lives_in_the_overlay(patch: Patch) -> None:
    """A patch adds calls, fields and overrides, and no function or class at module level."""
    for line in patch.added:
        assert not re.match(r"(async )?def |class ", line), f"{patch.path.name} defines: {line}"
