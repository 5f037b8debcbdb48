# SPDX-License-Identifier: Apache-2.0
"""Applying a patch series: what it does, and every way in which it is refused."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from scripts.distribution.errors import BuildError
from scripts.distribution.patches import apply_series, git_environment, read_series
from tests.packaging.checkouts import edited, patch_text

UPSTREAM = {
    "vllm/config.py": edited(1, "line 1").encode(),
    "vllm/core.py": edited(1, "line 1").encode(),
}


def series(folder: Path, **texts: str) -> list[Path]:
    """Write patches and a series, and read them back."""
    for name, text in texts.items():
        (folder / f"{name}.patch").write_text(text, "utf-8")
    (folder / "series").write_text(
        "# comment\n\n" + "".join(f"{name}.patch  # why\n" for name in texts), "utf-8"
    )
    return read_series(folder)


def test_patches_build_on_each_other(tmp_path: Path) -> None:
    first, second = edited(10, "ten"), edited(10, "ten").replace("line 40", "forty")
    patches = series(
        tmp_path,
        b_first=patch_text("vllm/config.py", edited(1, "line 1"), first),
        a_second=patch_text("vllm/config.py", first, second),
        made=patch_text("vllm/new/made.py", None, "x = 1\n"),
        gone=patch_text("vllm/core.py", edited(1, "line 1"), None),
    )
    assert apply_series(patches, UPSTREAM.get) == {
        "vllm/config.py": second.encode(),
        "vllm/new/made.py": b"x = 1\n",
        "vllm/core.py": None,
    }


def test_hunk_that_does_not_apply_is_named(tmp_path: Path) -> None:
    other = edited(40, "not upstream's")
    new = other.replace("line 10\n", "ten\n").replace("line 41\n", "forty-one\n")
    (patch,) = series(tmp_path, hook=patch_text("vllm/config.py", other, new))
    with pytest.raises(BuildError) as caught:
        apply_series([patch], UPSTREAM.get)
    message = str(caught.value)
    assert f"{tmp_path.name}/hook.patch does not apply" in message
    assert "hunk 2 of vllm/config.py" in message
    assert "hunk 1" not in message
    assert "not upstream's" in message, "the lines that were looked for are missing"


def test_every_rejected_hunk_is_named(tmp_path: Path) -> None:
    strange = "\n".join(f"other {number}" for number in range(60)) + "\n"
    text = patch_text("vllm/config.py", strange, strange.replace("other 5\n", "five\n"))
    text += patch_text("vllm/core.py", strange, strange.replace("other 7\n", "seven\n"))
    with pytest.raises(BuildError, match=r"hunk 1 of vllm/config\.py, hunk 1 of vllm/core\.py"):
        apply_series(series(tmp_path, hook=text), UPSTREAM.get)


def test_file_that_upstream_does_not_have_is_named(tmp_path: Path) -> None:
    patches = series(tmp_path, hook=patch_text("vllm/absent.py", "a\n", "b\n"))
    with pytest.raises(BuildError, match=r"does not apply: vllm/absent\.py: No such file"):
        apply_series(patches, UPSTREAM.get)


def test_new_file_that_exists_is_refused(tmp_path: Path) -> None:
    patches = series(tmp_path, hook=patch_text("vllm/core.py", None, "x\n"))
    with pytest.raises(BuildError, match=r"vllm/core\.py: already exists"):
        apply_series(patches, UPSTREAM.get)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Why: nothing follows\n", "hook.patch is malformed"),
        ("--- a/vllm/core.py\n+++ b/vllm/core.py\n@@ -1,9 +1,2 @@\n line 1\n", "is malformed"),
    ],
)
def test_malformed_patch_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        apply_series(series(tmp_path, hook=text), UPSTREAM.get)


def test_patch_without_effect_is_refused(tmp_path: Path) -> None:
    # A change of mode alone leaves the bytes as they are.
    text = "diff --git a/vllm/core.py b/vllm/core.py\nold mode 100644\nnew mode 100755\n"
    with pytest.raises(BuildError, match=r"has no effect on vllm/core\.py"):
        apply_series(series(tmp_path, hook=text), UPSTREAM.get)


def test_surrounding_repository_does_not_swallow_the_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a repository `git apply` skips paths outside its prefix and reports success."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    folder = tmp_path / "patches"
    folder.mkdir()
    new = edited(10, "ten")
    patches = series(folder, hook=patch_text("vllm/config.py", edited(1, "line 1"), new))
    assert apply_series(patches, UPSTREAM.get) == {"vllm/config.py": new.encode()}
    assert list(scratch.iterdir()) == []


def test_git_that_changes_nothing_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    git = programs / "git"
    git.write_text(
        "#!/bin/sh\ncase $* in *--numstat*) printf '1\\t1\\tvllm/config.py\\0';; esac\nexit 0\n"
    )
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    patches = series(
        tmp_path, hook=patch_text("vllm/config.py", edited(1, "line 1"), edited(10, "ten"))
    )
    with pytest.raises(BuildError, match=r"has no effect on vllm/config\.py"):
        apply_series(patches, UPSTREAM.get)


def test_missing_git_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patches = series(
        tmp_path, hook=patch_text("vllm/config.py", edited(1, "line 1"), edited(10, "ten"))
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"git is needed .* not on PATH"):
        apply_series(patches, UPSTREAM.get)


def test_missing_series_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no patch series .*v9\.9\.9/series is missing"):
        read_series(tmp_path / "v9.9.9")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n", "lists no patch"),
        ("a.patch\nb.patch\nc.patch\n", r"lists c\.patch, which is missing"),
        ("a.patch\n", r"does not list b\.patch"),
        ("a.patch\nb.patch\na.patch\n", "lists a patch twice"),
    ],
)
def test_series_and_files_must_agree(tmp_path: Path, text: str, message: str) -> None:
    for name in ("a.patch", "b.patch"):
        (tmp_path / name).touch()
    (tmp_path / "series").write_text(text, "utf-8")
    with pytest.raises(BuildError, match=message):
        read_series(tmp_path)


def test_git_sees_no_configuration(tmp_path: Path) -> None:
    environ = git_environment({"GIT_WORK_TREE": "/x", "PATH": "/bin"}, tmp_path / "tree")
    assert environ["GIT_CEILING_DIRECTORIES"] == str(tmp_path)
    assert "GIT_WORK_TREE" not in environ
    assert environ["PATH"] == "/bin"
