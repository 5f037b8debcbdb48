# SPDX-License-Identifier: Apache-2.0
"""What one user's server and commands leave in a root that a group shares, another's can use."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pykvcache.access import make_like, open_like
from pykvcache.capacity.evictor import Evictor
from pykvcache.capacity.keeper import Keeper, budget_of, policy_of
from pykvcache.capacity.pins import Pins
from pykvcache.capacity.policy import time_of_use
from pykvcache.capacity.record import FILE_NAME, NO_SPACE_NAME, Record
from pykvcache.config import Config
from pykvcache.layout import ChunkPaths
from tests.capacity.roots import NOW_S, Disk, Root, key_of, never

GROUP = 54_321
OWNER, OTHER = 50_001, 50_002


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Of a login shell, which servers with ``group_access`` refuse but commands don't."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def shared_root(path: Path) -> Root:
    root = Root(path)
    root.fill(range(10))
    for each in (path, *path.rglob("*")):
        each.chmod(0o2770 if each.is_dir() else 0o660)
    return root


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def evictor_of(root: Root, capacity: int) -> Evictor:
    config = Config(root=root.path, capacity=str(capacity), free_space_min="0")
    return Evictor(
        root.path,
        budget_of(config),
        policy_of(config),
        files_per_s=0,
        pause=never,
        space=Disk(root),
        clock=lambda: NOW_S,
    )


def use_all(root: Root) -> None:
    evictor = evictor_of(root, 2000)
    assert evictor.run() is not None
    Record(root.path).report_no_space()
    Pins(root.identity).add(key_of(3).hex())


@pytest.mark.parametrize("is_shared", [False, True])
def test_modes_follow_the_directory(tmp_path: Path, is_shared: bool) -> None:
    root = shared_root(tmp_path / "kv")
    if not is_shared:
        root.path.chmod(0o700)
        root.identity.chmod(0o700)
    use_all(root)
    pins = root.identity / "pins"
    made = [root.path / FILE_NAME, root.path / NO_SPACE_NAME, pins / ".lock"]
    made.append(pins / key_of(3).hex())
    assert [mode_of(path) for path in made] == [0o660 if is_shared else 0o600] * 4
    assert mode_of(pins) == (0o2770 if is_shared else 0o700)


def test_what_was_private_is_shared_once_its_directory_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    os.close(open_like(tmp_path / "file", os.O_WRONLY))
    assert mode_of(tmp_path / "file") == 0o600
    tmp_path.chmod(0o770)
    os.close(open_like(tmp_path / "file", os.O_WRONLY))
    assert mode_of(tmp_path / "file") == 0o660


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        open_like(tmp_path / "link", os.O_WRONLY)
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    (tmp_path / "made").mkdir(mode=0o700)
    make_like(tmp_path / "made")
    assert mode_of(tmp_path / "made") == 0o700


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory of the group's; pytest's own lie where only this user gets to."""
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, OWNER, GROUP)
        os.chmod(name, 0o2770)
        yield Path(name)


def as_user(user: int, work: Callable[[], None]) -> None:
    """Do it in another process as that user."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        return
    code = 1
    try:
        os.setgroups([GROUP])
        os.setgid(GROUP)
        os.setuid(user)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two other users")
def test_two_users_keep_one_root(shared: Path) -> None:
    def own() -> None:
        use_all(shared_root(shared / "kv"))

    def other() -> None:
        os.umask(0o007)
        root = Root.__new__(Root)
        found = shared / "kv"
        root.path, root.identity = found, next(found.glob("model-*"))
        root.directories = [root.identity / "rank-0000"]
        record = Record(found)
        before_ns = record.no_space_at_ns()
        os.utime(root.file(9))
        keeper = Keeper(
            Config(root=found),
            [ChunkPaths(root.directories[0])],
            logging.getLogger("tests"),
            space=Disk(root),
            clock=lambda: NOW_S,
        )
        keeper.touch([(key_of(8), 100), (key_of(7), 200)])
        keeper.turn()
        times = {number: root.file(number).stat().st_mtime_ns for number in (6, 7, 8)}
        assert time_of_use(NOW_S, 0, 60) < times[7] <= times[8]
        assert times[6] < time_of_use(NOW_S, 0, 60)
        record.report_no_space()
        assert record.no_space_at_ns() >= before_ns
        done = evictor_of(root, 500).run()
        assert done is not None and not done.skipped and done.files
        assert 3 in root.numbers() and 8 in root.numbers()
        assert Pins(root.identity).remove(key_of(3).hex())
        Pins(root.identity).add(key_of(4).hex())

    def own_again() -> None:
        assert Pins(next((shared / "kv").glob("model-*"))).keys() == {key_of(4).hex()}
        assert Record(shared / "kv").read() is not None
        Record(shared / "kv").report_no_space()

    as_user(OWNER, own)
    as_user(OTHER, other)
    as_user(OWNER, own_again)
