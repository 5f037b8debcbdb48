# SPDX-License-Identifier: Apache-2.0
"""Who may share a cache, and what may not lie on the way to it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pykvcache import access
from pykvcache.access import PRIVATE, Access, access_of, make_directories
from pykvcache.config import Config
from pykvcache.errors import ConfigError

SHARED = Access(0o660, 0o770, is_shared=True)
TRUSTING = Access(is_anyone_trusted=True)


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_to_the_group(root: Path) -> None:
    for directory in (root, *root.rglob("*")):
        directory.chmod(0o770)


def test_everything_is_the_users_alone_unless_asked_for(umask: Callable[[int], int]) -> None:
    assert access_of(Config()) == PRIVATE == Access(0o600, 0o700, False, False)
    assert access_of(Config(unsafe_root=True)) == TRUSTING
    umask(0o007)
    assert access_of(Config(group_access=True)) == SHARED


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o070])
def test_a_group_needs_a_umask_that_lets_it(umask: Callable[[int], int], mask: int) -> None:
    umask(mask)
    with pytest.raises(ConfigError) as refused:
        access_of(Config(group_access=True))
    assert str(refused.value).startswith(
        f"option 'group_access' is True, but the umask of this process is {mask:04o}, which"
    )
    assert str(refused.value).endswith("0007 or 0002 would do")


@pytest.mark.parametrize("asked", [PRIVATE, SHARED])
def test_every_level_has_the_mode_asked_for(
    umask: Callable[[int], int], tmp_path: Path, asked: Access
) -> None:
    umask(0)
    tmp_path.chmod(0o700)
    root = tmp_path / "above" / "root"
    make_directories(root / "model" / "rank", root, asked)
    made = (root, root / "model", root / "model" / "rank")
    assert [mode_of(path) for path in made] == [asked.directory_mode] * 3


@pytest.mark.parametrize("level", ["model", "model/rank"])
def test_a_symbolic_link_inside_the_root_is_refused(tmp_path: Path, level: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "root"
    link = root / level
    make_directories(link.parent, root, PRIVATE)
    open_to_the_group(root)
    link.symlink_to(elsewhere)
    for asked in (PRIVATE, SHARED, TRUSTING):
        with pytest.raises(ConfigError) as refused:
            make_directories(root / "model" / "rank", root, asked)
        assert str(refused.value).startswith(
            f"option 'root' is '{root}', but '{link}' is a symbolic link"
        )
    assert not list(elsewhere.iterdir())


def test_the_root_itself_may_be_found_by_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir(mode=0o700)
    (tmp_path / "root").symlink_to(tmp_path / "drive")
    make_directories(tmp_path / "root" / "model", tmp_path / "root", PRIVATE)
    assert (tmp_path / "drive" / "model").is_dir()


@pytest.mark.parametrize("level", ["root", "root/model"])
def test_what_everyone_can_write_is_refused(tmp_path: Path, level: str) -> None:
    root = tmp_path / "root"
    make_directories(root / "model", root, PRIVATE)
    open_to_the_group(root)
    (tmp_path / level).chmod(0o1777)
    for asked in (PRIVATE, SHARED):
        with pytest.raises(ConfigError) as refused:
            make_directories(root / "model", root, asked)
        assert str(refused.value) == (
            f"option 'root' is '{root}', but '{tmp_path / level}' can be written by everyone "
            "(mode 1777), unless option 'unsafe_root' is true"
        )
    make_directories(root / "model", root, TRUSTING)


def test_what_belongs_to_someone_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    make_directories(root, root, PRIVATE)
    open_to_the_group(root)
    owner = os.geteuid()
    monkeypatch.setattr(access.os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=rf"belongs to user {owner}; it must belong to this user"):
        make_directories(root, root, PRIVATE)
    make_directories(root, root, TRUSTING)
    make_directories(root, root, SHARED)
    monkeypatch.setattr(access.os, "getgroups", list)
    monkeypatch.setattr(access.os, "getegid", lambda: -1)
    with pytest.raises(ConfigError, match="it must belong to this user, or a group of this user's"):
        make_directories(root, root, SHARED)


@pytest.mark.parametrize("level", ["root", "root/model"])
def test_what_a_group_cannot_write_is_refused_where_it_is_to(tmp_path: Path, level: str) -> None:
    root = tmp_path / "root"
    make_directories(root / "model", root, PRIVATE)
    open_to_the_group(root)
    (tmp_path / level).chmod(0o750)
    with pytest.raises(ConfigError) as refused:
        make_directories(root / "model", root, SHARED)
    assert str(refused.value) == (
        f"option 'root' is '{root}', but '{tmp_path / level}' cannot be written by its group "
        "(mode 0750), which option 'group_access' is for"
    )
    make_directories(root / "model", root, PRIVATE)
