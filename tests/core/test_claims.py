# SPDX-License-Identifier: Apache-2.0
"""A rank's directories, after somebody has removed them."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pykvcache.access import PRIVATE
from pykvcache.claims import Claim
from pykvcache.errors import ConfigError
from pykvcache.identity import FILE_NAME
from pykvcache.layout import QUARANTINE, rank_directory
from tests.core.test_identity import IDENTITY, RANK

log = logging.getLogger("pykvcache.claims")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def claim(root: Path) -> Claim:
    return Claim(root, PRIVATE, IDENTITY, RANK, log)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another filesystem."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        if os.stat(directory).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("temporary files lie in /dev/shm here")
        yield Path(directory)


def renew(claim: Claim) -> None:
    """Ask for it, and wait until it was done."""
    claim.renew()
    for thread in threads():
        thread.join()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pykvcache-claim"]


def files(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): path.read_text() if path.is_file() else ""
        for path in root.rglob("*")
    }


def test_all_of_a_ranks_directories_are_made(root: Path, claim: Claim) -> None:
    server = IDENTITY.directory(root)
    assert claim.directory == rank_directory(server, 0)
    assert (server / FILE_NAME).read_text() == IDENTITY.canonical
    assert (claim.directory / FILE_NAME).read_text() == RANK.canonical
    assert (claim.directory / QUARANTINE).is_dir()


REMOVED: list[Callable[[Path, Claim], Path]] = [
    lambda root, claim: claim.directory,
    lambda root, claim: claim.directory.parent,
    lambda root, claim: root,
]


@pytest.mark.parametrize("removed", REMOVED, ids=["rank", "server", "root"])
def test_what_somebody_removed_is_made_anew(
    root: Path,
    claim: Claim,
    removed: Callable[[Path, Claim], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = files(root)
    for _ in range(2):
        shutil.rmtree(removed(root, claim))
        renew(claim)
        assert files(root) == before
    assert [record.message for record in caplog.records] == [
        f"KV offloading: '{claim.directory}' had been removed with all chunks, and is made anew"
    ] * 2


def test_what_is_there_stays_as_it_is(
    root: Path, claim: Claim, caplog: pytest.LogCaptureFixture
) -> None:
    (claim.directory / "abc").mkdir()
    before = files(root)
    renew(claim)
    assert files(root) == before
    assert not caplog.records


@pytest.mark.parametrize("is_above", [False, True])
def test_nothing_is_made_on_another_filesystem(
    tmp_path: Path, elsewhere: Path, is_above: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As below the mount point of one that was unmounted."""
    mount = tmp_path / "mount"
    root = mount / "root" if is_above else mount
    claim = Claim(root, PRIVATE, IDENTITY, RANK, log)
    away = mount.rename(tmp_path / "away")
    mount.symlink_to(elsewhere)
    for _ in range(2):
        renew(claim)
        assert not list(elsewhere.iterdir())
    (said,) = caplog.records
    assert said.message == (
        f"KV offloading stores nothing for now: '{claim.directory}' is gone, and another "
        f"filesystem is mounted at '{root}' than at the start"
    )
    mount.unlink()
    away.rename(mount)
    shutil.rmtree(root)
    renew(claim)
    assert claim.directory.is_dir(), "its filesystem is back"


def test_what_lies_in_its_place_is_said_once(
    root: Path, claim: Claim, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(root)
    root.write_text("not a directory")
    for _ in range(2):
        renew(claim)
    (said,) = caplog.records
    assert "is gone, and option 'root' is" in said.message
    assert root.read_text() == "not a directory"
    root.unlink()
    renew(claim)
    assert claim.directory.is_dir()


def test_a_place_that_cannot_be_had_is_refused_at_the_start(root: Path) -> None:
    root.write_text("not a directory")
    with pytest.raises(ConfigError, match="cannot keep files there"):
        Claim(root, PRIVATE, IDENTITY, RANK, log)


def test_a_filesystem_that_hangs_holds_up_nobody(
    claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, is_back = threading.Event(), threading.Event()

    def hang(path: Path) -> bool:
        is_asked.set()
        is_back.wait()
        return True

    monkeypatch.setattr(Path, "is_dir", hang)
    claim.renew()
    is_asked.wait()
    for _ in range(3):
        claim.renew()
    (hanging,) = threads()
    is_back.set()
    hanging.join()
