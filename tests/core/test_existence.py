# SPDX-License-Identifier: Apache-2.0
"""Look-ups end, whatever the filesystem does."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykvcache import openat2
from pykvcache.layout import ChunkPaths
from pykvcache.scheduler.catalog import Catalog
from pykvcache.scheduler.existence import Existence, known_existence

LOG = logging.getLogger("tests.existence")
PATIENT_S = 60.0
"""No answer of a filesystem at work takes this long."""
IMPATIENT_S = 0.001
THREAD = "pykvcache-existence"


class Filesystem:
    """Names that exist, and a switch that makes every look hang until it is released."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.asked: list[str] = []
        self.hangs = False
        self.released = threading.Event()

    def exists(self, name: str) -> bool:
        self.asked.append(name)
        if self.hangs:
            self.released.wait()
        return name in self.names


def threads() -> set[threading.Thread]:
    """Those that ask; of earlier tests some may still be ending."""
    return {thread for thread in threading.enumerate() if thread.name == THREAD}


@pytest.fixture
def filesystem() -> Iterator[Filesystem]:
    filesystem = Filesystem("there")
    yield filesystem
    filesystem.released.set()


def asker(filesystem: Filesystem, timeout_s: float) -> Existence:
    """One that knows nothing without asking."""
    return Existence("/kv", timeout_s, LOG, exists=filesystem.exists, known=lambda _name: None)


def hang(filesystem: Filesystem) -> Existence:
    """One whose first look does not return."""
    filesystem.hangs = True
    existence = asker(filesystem, IMPATIENT_S)
    assert not existence("there")
    return existence


def test_the_filesystem_is_asked(filesystem: Filesystem) -> None:
    existence = asker(filesystem, PATIENT_S)
    assert [existence("there"), existence("nowhere"), existence("there")] == [True, False, True]
    assert existence.unanswered == 0
    existence.close()


def test_what_is_known_needs_no_answer(filesystem: Filesystem) -> None:
    known = {"there": True, "nowhere": False}
    existence = Existence("/kv", PATIENT_S, LOG, exists=filesystem.exists, known=known.get)
    assert existence("there")
    assert not existence("nowhere")
    assert filesystem.asked == []
    assert not existence("unknown")
    assert filesystem.asked == ["unknown"]
    existence.close()


def test_a_filesystem_that_hangs_is_a_miss_and_asked_no_more(
    filesystem: Filesystem, caplog: pytest.LogCaptureFixture
) -> None:
    before = threads()
    with caplog.at_level(logging.INFO, LOG.name):
        existence = hang(filesystem)
        assert [existence("there") for _ in range(100)] == [False] * 100
    assert filesystem.asked == ["there"]
    assert existence.unanswered == 101
    assert ["has not answered" in text for text in caplog.messages] == [True]
    assert len(threads() - before) == 1


def test_it_is_asked_again_once_it_has_answered(
    filesystem: Filesystem, caplog: pytest.LogCaptureFixture
) -> None:
    existence = hang(filesystem)
    filesystem.hangs = False
    filesystem.released.set()
    with caplog.at_level(logging.INFO, LOG.name):
        while not existence("there"):  # the thread is on its way back
            pass
    assert "answers again" in caplog.text
    existence.close()


def test_an_answer_that_comes_late_is_no_answer_to_another_question(
    filesystem: Filesystem,
) -> None:
    existence = hang(filesystem)
    filesystem.hangs = False
    filesystem.released.set()
    while len(filesystem.asked) < 2:
        assert not existence("nowhere")
    existence.close()


def test_closing_waits_for_nobody(filesystem: Filesystem) -> None:
    before = threads()
    existence = hang(filesystem)
    (thread,) = threads() - before
    existence.close()
    assert thread.is_alive() and thread.daemon
    filesystem.released.set()
    thread.join()


def test_the_catalog_of_a_filesystem_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real system call, blocked as by a network filesystem whose server is gone: a
    chunk is a miss, and may be stored; what is remembered is still found."""
    paths, released = ChunkPaths(tmp_path), threading.Event()
    key, other = b"\x01" * 36, b"\x02" * 36
    for each in (key, other):
        file = Path(paths.final(each))
        file.parent.mkdir()
        file.touch()
    stat = os.stat

    def blocked(path: str, **options: object) -> object:
        if threading.current_thread().name == THREAD:
            released.wait()
        return stat(path)

    existence = Existence(str(tmp_path), IMPATIENT_S, LOG, exists=exists, known=lambda _path: None)
    now = 0.0
    catalog = Catalog(
        [paths], lookup_ttl_s=1.0, failed_key_ttl_s=1.0, clock=lambda: now, exists=existence
    )
    catalog.end_store([other], stored=True)
    monkeypatch.setattr(os, "stat", blocked)
    assert not catalog.holds(key)
    assert catalog.holds(other)
    assert catalog.begin_store([key, other]) == [key]
    released.set()
    while not catalog.holds(key):
        pass
    existence.close()


def exists(path: str) -> bool:
    """os.path.exists, which looks os.stat up when it is called, on every version of Python."""
    try:
        os.stat(path)
    except OSError:
        return False
    return True


# --- what the kernel knows


@pytest.fixture
def _old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openat2, "SYSTEM_CALL", 100_000)


def test_the_kernel_knows_names_it_has_just_seen(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    os.stat(file)
    with pytest.raises(FileNotFoundError):
        os.stat(tmp_path / "nowhere")
    # Old kernels and sandboxes say nothing; none may say the wrong thing.
    assert known_existence(str(file)) in (True, None)
    assert known_existence(str(tmp_path / "nowhere")) in (False, None)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    before = os.listdir("/proc/self/fd")
    for _ in range(10):
        known_existence(str(file))
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.usefixtures("_old_kernel")
def test_an_old_kernel_knows_nothing_and_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert known_existence(str(file)) is None
    existence = Existence(str(tmp_path), PATIENT_S, LOG)
    assert existence(str(file))
    assert not existence(str(tmp_path / "nowhere"))
    existence.close()
