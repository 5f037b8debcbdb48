# SPDX-License-Identifier: Apache-2.0
"""A git repository in which each upstream version is a commit and its series commits on top.

``pristine/<version>`` is the wheel's Python files, ``series/<version>`` the patches on it. Exports
are byte-identical as long as nothing has changed: no commit ids, no git version, no statistics,
full blob names.
"""

from __future__ import annotations

import os
import re
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

from distribution.patches import git_environment, read_series

IDENTITY = (
    "-c",
    "user.name=py-kvcache maintainers",
    "-c",
    "user.email=maintainers@py-kvcache.invalid",
)
EXPORT = (
    *("--stdout", "-N", "--zero-commit", "--no-signature", "--no-stat", "--full-index"),
    *("--no-renames", "--diff-algorithm=histogram", "-U3"),
)


class RebaseError(RuntimeError):
    """It cannot be done; the message says what to do."""


class ConflictError(RebaseError):
    """The rebase has stopped at a patch that no longer fits."""


class Workspace:
    """The repository below a folder that may be removed at any time."""

    def __init__(self, patches: Path, folder: Path) -> None:
        """Args:
        patches: the checkout's ``patches/``.
        folder: where the repository lies, made when it is needed.
        """
        self._patches = patches
        self.folder = folder
        if not (folder / ".git").is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            self.git("init", "-q", "-b", "none")

    def git(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run git in the repository.

        Raises:
            RebaseError: it failed, and ``check``.
        """
        result = subprocess.run(
            ["git", *IDENTITY, *arguments],
            cwd=self.folder,
            env=git_environment(os.environ, self.folder.resolve()) | {"GIT_EDITOR": "true"},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if check and result.returncode:
            raise RebaseError(
                f"git {arguments[0]} failed: {(result.stderr or result.stdout).strip()}"
            )
        return result

    # --- versions

    def has(self, branch: str) -> bool:
        """Whether the branch is there."""
        return self.git("rev-parse", "-q", "--verify", branch, check=False).returncode == 0

    def import_wheel(self, version: str, wheel: Path) -> None:
        """Make ``pristine/<version>`` of the wheel's Python files."""
        self._require_rest()
        branch = f"pristine/{version}"
        if self.has(branch):
            return
        self.git("checkout", "-q", "--orphan", branch)
        self.git("rm", "-rqf", "--ignore-unmatch", ".")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if re.match(r"vllm/.+\.py$", name)]
            if not names:
                raise RebaseError(f"{wheel} holds no Python file of vllm")
            archive.extractall(self.folder, names)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", f"vLLM {version}, as in {wheel.name}")

    def apply_series(self, version: str) -> None:
        """Make ``series/<version>`` of the committed patches, without fuzz.

        Raises:
            RebaseError: one does not apply.
        """
        self._require_rest()
        self.git("checkout", "-q", "-B", f"series/{version}", f"pristine/{version}")
        for patch in read_series(self._patches / f"v{version}"):
            result = self.git("am", "-q", "--whitespace=nowarn", str(patch.resolve()), check=False)
            if result.returncode:
                self.git("am", "--abort", check=False)
                reason = result.stderr.strip() or result.stdout.strip()
                raise RebaseError(f"v{version}/{patch.name} does not apply: {reason}")

    # --- export

    def exported(self, version: str) -> dict[str, str]:
        """The series as files: name -> text, in order."""
        commits = self.git("rev-list", "--reverse", f"pristine/{version}..series/{version}").stdout
        files = {}
        for commit in commits.split():
            subject = self.git("show", "-s", "--format=%s", commit).stdout.strip()
            name = self._name_of(subject)
            if name in files:
                raise RebaseError(f"two patches would be called {name}")
            files[name] = self.git("format-patch", "-1", *EXPORT, commit).stdout
        return files

    def export(self, version: str) -> list[str]:
        """Write the series into ``patches/v<version>``; the names of files that have changed."""
        files = self.exported(version)
        if not files:
            raise RebaseError(f"series/{version} holds no patch")
        target = self._patches / f"v{version}"
        target.mkdir(exist_ok=True)
        files["series"] = "".join(f"{name}\n" for name in files)
        changed = [
            name
            for name, text in files.items()
            if not (target / name).is_file() or (target / name).read_text("utf-8") != text
        ]
        for name, text in files.items():
            (target / name).write_text(text, "utf-8")
        for path in target.iterdir():
            if path.name not in files:
                path.unlink()
                changed.append(path.name)
        return changed

    def _name_of(self, subject: str) -> str:
        """A patch keeps its name in all versions; a new one is called after its subject."""
        for path in sorted(self._patches.glob("v*/*.patch")):
            if f"\nSubject: [PATCH] {subject}\n" in path.read_text("utf-8"):
                return path.name
        return re.sub(r"[^a-z]+", "-", subject.lower()).strip("-") + ".patch"

    # --- rebase

    def rebase(self, old: str, new: str) -> None:
        """Make ``series/<new>`` of the series of ``old``.

        Raises:
            ConflictError: a patch does not fit; ``resume`` goes on.
        """
        self.apply_series(old)
        self.git("checkout", "-q", "-B", f"series/{new}", f"series/{old}")
        self._went("rebase", "--empty=drop", "--onto", f"pristine/{new}", f"pristine/{old}")

    def resume(self) -> str:
        """Go on after a conflict was resolved and ``git add``-ed; the version it is for.

        Raises:
            ConflictError: it is not resolved, or the next patch conflicts.
            RebaseError: nothing is going on.
        """
        version = self.rebasing
        if version is None:
            raise RebaseError("no rebase is going on")
        if left := self.conflicts:
            raise ConflictError(f"not resolved, or not added with git add: {', '.join(left)}")
        self._went("rebase", "--continue")
        return version

    def abort(self) -> None:
        """Give a rebase up."""
        if self.rebasing is None:
            raise RebaseError("no rebase is going on")
        self.git("rebase", "--abort")

    @property
    def rebasing(self) -> str | None:
        """The version that a stopped rebase is for."""
        head = self.folder / ".git" / "rebase-merge" / "head-name"
        return head.read_text().strip().rpartition("/")[2] if head.is_file() else None

    @property
    def conflicts(self) -> list[str]:
        """Files with conflicts."""
        return self.git("diff", "--name-only", "--diff-filter=U").stdout.split()

    def _went(self, *arguments: str) -> None:
        result = self.git(*arguments, check=False)
        if result.returncode == 0:
            return
        if self.rebasing is None:
            raise RebaseError(result.stderr.strip())
        subject = self.git("show", "-s", "--format=%s", "REBASE_HEAD").stdout.strip()
        details = self.git("diff", check=False).stdout
        raise ConflictError(
            f"{self._name_of(subject)} does not fit {self.rebasing}: conflicts in "
            f"{', '.join(self.conflicts)}\n\n{details}"
        )

    def _require_rest(self) -> None:
        if self.rebasing is not None:
            raise RebaseError(
                f"a rebase to {self.rebasing} is going on in {self.folder}: continue or abort it"
            )

    def tree(self, branch: str) -> dict[str, str]:
        """The Python files of a branch: path -> text."""
        self._require_rest()
        self.git("checkout", "-q", branch)
        return {
            path.relative_to(self.folder).as_posix(): path.read_text("utf-8")
            for path in sorted((self.folder / "vllm").rglob("*.py"))
        }


def versions_of(patches: Path) -> Sequence[str]:
    """Versions with a series, oldest first."""
    names = [path.parent.name.removeprefix("v") for path in patches.glob("v*/series")]
    return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
