# SPDX-License-Identifier: Apache-2.0
"""The tree of an editable install: what is linked, what is copied, and how it is updated."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from scripts.distribution.editable import build_editable
from scripts.distribution.errors import BuildError
from tests.packaging.checkouts import Checkout, edited, patch_text

VERSION = "1.2.0+cpu.pykvcache.7"
INFO = f"vllm-{VERSION}.dist-info"


@pytest.fixture
def tree(checkout: Checkout) -> Path:
    return checkout.root / ".editable" / VERSION


def build(checkout: Checkout, folder: Path) -> Path:
    return build_editable(checkout.project(), checkout.wheels["cpu"], folder)


def files(tree: Path) -> set[str]:
    """Files and links of the tree; folders behind links aren't entered."""
    found = set()
    for parent, folders, names in os.walk(tree):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        found |= {(Path(parent) / name).relative_to(tree).as_posix() for name in names + links}
    return found


def test_wheel_points_to_the_tree(checkout: Checkout, tree: Path, tmp_path: Path) -> None:
    path = build(checkout, tmp_path / "out")
    assert path.name == f"vllm-{VERSION}-0editable-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path) as archive:
        assert archive.read("__editable__.vllm.pth").decode() == f"{tree}\n"
        assert {name for name in archive.namelist() if not name.startswith(INFO)} == {
            "__editable__.vllm.pth"
        }
        assert f"Version: {VERSION}\n" in archive.read(f"{INFO}/METADATA").decode()
        assert f"{INFO}/licenses/LICENSE" in archive.namelist()


def test_new_folders_are_linked_and_the_rest_copied(
    checkout: Checkout, tree: Path, tmp_path: Path
) -> None:
    checkout.write("vllm/v1/single.py", "single = 1\n")
    build(checkout, tmp_path / "out")
    assert files(tree) == {
        "pykvcache",
        "vllm/_C.abi3.so",
        "vllm/__init__.py",
        "vllm/_version.py",
        "vllm/cli.py",
        "vllm/config.py",
        "vllm/données.json",
        "vllm/v1/__init__.py",
        "vllm/v1/core.py",
        "vllm/v1/made.py",
        "vllm/v1/ours",
        "vllm/v1/single.py",
    }
    assert (tree / "pykvcache").readlink() == checkout.root / "pykvcache"
    assert (tree / "vllm/v1/ours").readlink() == checkout.root / "vllm/v1/ours"
    assert (tree / "vllm/v1/single.py").readlink() == checkout.root / "vllm/v1/single.py"
    assert (tree / "vllm/config.py").read_text() == edited(10, "patched")
    assert not (tree / "vllm/config.py").is_symlink()


def test_edits_and_new_files_are_seen_without_a_build(
    checkout: Checkout, tree: Path, tmp_path: Path
) -> None:
    build(checkout, tmp_path / "out")
    checkout.write("vllm/v1/ours/spec.py", "value = 2\n")
    checkout.write("pykvcache/core/later.py", "")
    assert (tree / "vllm/v1/ours/spec.py").read_text() == "value = 2\n"
    assert (tree / "pykvcache/core/later.py").is_file()


def test_changed_patch_replaces_only_its_files(
    checkout: Checkout, tree: Path, tmp_path: Path
) -> None:
    build(checkout, tmp_path / "out")
    inodes = {name: (tree / name).lstat().st_ino for name in files(tree)}
    stale = tree / "vllm/__pycache__/config.cpython-311.pyc"
    stale.parent.mkdir()
    stale.touch()
    checkout.patch(
        config=patch_text("vllm/config.py", edited(1, "line 1"), edited(20, "patched")),
    )
    build(checkout, tmp_path / "out")
    assert (tree / "vllm/config.py").read_text() == edited(20, "patched")
    assert not stale.exists(), "bytecode of the old file could be taken for the new one's"
    assert not (tree / "vllm/v1/made.py").exists(), "the dropped patch's file is still there"
    changed = {
        name for name in files(tree) - {stale} if (tree / name).lstat().st_ino != inodes.get(name)
    }
    assert changed == {"vllm/config.py"}


def test_dropped_patch_restores_upstreams_file(
    checkout: Checkout, tree: Path, tmp_path: Path
) -> None:
    build(checkout, tmp_path / "out")
    checkout.patch(made=patch_text("vllm/v1/made.py", None, "made = True\n"))
    build(checkout, tmp_path / "out")
    assert (tree / "vllm/config.py").read_text() == edited(1, "line 1")


def test_file_edited_in_the_tree_is_restored(
    checkout: Checkout, tree: Path, tmp_path: Path
) -> None:
    build(checkout, tmp_path / "out")
    (tree / "vllm/cli.py").write_text("oops\n")
    (tree / "vllm/config.py").write_text("oops\n")
    (tree / "vllm/v1/stray.py").touch()
    build(checkout, tmp_path / "out")
    assert b"upstream" in (tree / "vllm/cli.py").read_bytes()
    assert (tree / "vllm/config.py").read_text() == edited(10, "patched")
    assert not (tree / "vllm/v1/stray.py").exists()


def test_removed_overlay_folder_loses_its_link(
    checkout: Checkout, tree: Path, tmp_path: Path
) -> None:
    build(checkout, tmp_path / "out")
    checkout.write("vllm/extra/one.py", "")
    build(checkout, tmp_path / "out")
    assert (tree / "vllm/extra").is_symlink()
    (checkout.root / "vllm/extra/one.py").unlink()
    build(checkout, tmp_path / "out")
    assert not (tree / "vllm/extra").is_symlink()
    assert (checkout.root / "vllm/extra").is_dir(), "the checkout itself was touched"


def test_hiding_file_is_refused_before_the_tree_changes(
    checkout: Checkout, tree: Path, tmp_path: Path
) -> None:
    checkout.write("vllm/cli.py", "mine\n")
    with pytest.raises(BuildError, match="would hide upstream's"):
        build(checkout, tmp_path / "out")
    assert not tree.exists()
