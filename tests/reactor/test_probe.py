# SPDX-License-Identifier: Apache-2.0
"""The choice of engine and of direct I/O, on real kernels, sandboxes and filesystems."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pykvcache.errors import ConfigError
from pykvcache.layout import PAGE
from pykvcache.reactor import probe, ring
from pykvcache.reactor.probe import DirectChoice, EngineChoice, choose_direct, choose_engine
from pykvcache.transfer.operations import Action, FileOperation

REPOSITORY = Path(probe.__file__).parents[2]

FORBID = """
import ctypes, struct, sys
number, answer = int(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
program = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (LOAD, 0, 0, 0),  # the number of the system call
        (EQUAL, 0, 1, number),
        (RETURN, 0, 0, 0x00050000 | answer),  # SECCOMP_RET_ERRNO
        (RETURN, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    )
)
buffer = ctypes.create_string_buffer(program, len(program))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(buffer)))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, filter, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP
"""

CHOOSE = """
from pathlib import Path
from pykvcache.errors import ConfigError
from pykvcache.reactor.probe import choose_engine
requested, directory = sys.argv[3:]
try:
    choice = choose_engine(requested, Path(directory), False)
    print(choice.name, choice.fallback, choice.why, sep="|")
except ConfigError as error:
    print("ConfigError", error, sep="|")
"""

needs_uring = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the io_uring engine is for x86-64"
)


@pytest.fixture
def uring(tmp_path: Path) -> None:
    """Skips the test where this machine's own sandbox forbids io_uring."""
    try:
        ring.Ring(4).close()
    except OSError as error:
        pytest.skip(f"no io_uring here: {error.strerror}")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Mounts a filesystem of a kind, with options; skips the test without the right to."""
    directories: list[Path] = []

    def mount(kind: str, options: str) -> Path:
        directory = tmp_path / f"mounted-{kind}"
        directory.mkdir()
        command = ["mount", "-t", kind, "-o", options, kind, str(directory)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting {kind} needs root: {done.stderr.strip()}")
        directories.append(directory)
        return directory

    yield mount
    for directory in directories:
        subprocess.run(["umount", str(directory)], check=True)


def choose_where_forbidden(call: int, answer: int, requested: str, directory: Path) -> list[str]:
    """What :func:`choose_engine` says in a process in which the system call is forbidden."""
    done = subprocess.run(
        [sys.executable, "-c", FORBID + CHOOSE, str(call), str(answer), requested, str(directory)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


def test_io_uring_is_chosen_where_it_works(uring: None, tmp_path: Path) -> None:
    for requested in ("auto", "io_uring"):
        choice = choose_engine(requested, tmp_path, direct=False)  # type: ignore[arg-type]
        assert choice == EngineChoice("io_uring", "io_uring works here")
    assert list(tmp_path.iterdir()) == []


def test_threads_are_not_probed(tmp_path: Path) -> None:
    choice = choose_engine("threads", tmp_path / "missing", direct=False)
    assert choice == EngineChoice("threads", "io_engine is 'threads'")


@needs_uring
@pytest.mark.parametrize(
    ("answer", "name", "reason"),
    [
        (errno.EPERM, "EPERM", "seccomp profile"),
        (errno.ENOSYS, "ENOSYS", "the kernel, or a sandbox"),
        (errno.ENOMEM, "ENOMEM", "ulimit -l"),
        (errno.EMFILE, "EMFILE", "unexpected"),
    ],
)
@pytest.mark.parametrize("call", [425, 426], ids=["io_uring_setup", "io_uring_enter"])
def test_a_forbidden_io_uring_falls_back_to_threads(
    tmp_path: Path, call: int, answer: int, name: str, reason: str
) -> None:
    engine, fallback, why = choose_where_forbidden(call, answer, "auto", tmp_path)
    assert (engine, fallback) == ("threads", "True")
    assert why.startswith("io_uring is not available: ")
    assert f"({name})" in why
    assert reason in why
    assert why.endswith(": using threads")
    assert list(tmp_path.iterdir()) == []


@needs_uring
def test_a_forbidden_io_uring_that_is_demanded_is_refused(tmp_path: Path) -> None:
    kind, message = choose_where_forbidden(425, errno.EPERM, "io_uring", tmp_path)
    assert kind == "ConfigError"
    assert message.startswith("option 'io_engine' is 'io_uring', but io_uring is not available")
    assert "(EPERM)" in message
    assert "'auto' or 'threads' would do" in message
    assert "seccomp profile" in message


def test_the_sysctl_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sysctl = tmp_path / "io_uring_disabled"
    sysctl.write_text("2\n")
    monkeypatch.setattr(probe, "_DISABLED_SYSCTL", sysctl)
    monkeypatch.setattr(ring, "_system_call", _forbidden)
    choice = choose_engine("auto", tmp_path, direct=False)
    assert "the sysctl kernel.io_uring_disabled is 2" in choice.why


def _forbidden(*_: object) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


def test_another_processor_falls_back_to_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    choice = choose_engine("auto", tmp_path, direct=False)
    assert choice.name == "threads"
    assert choice.fallback
    assert "memory ordering of x86-64" in choice.why


def test_an_old_kernel_that_refuses_the_flags_gets_a_plain_ring(
    uring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = 1 << 31
    monkeypatch.setattr(ring, "_FLAG_SETS", (unknown, 0))
    plain = ring.Ring(4)
    plain.push(ring.NOP, -1, 77)
    plain.submit()
    poll = select.poll()
    poll.register(plain.descriptor, select.POLLIN)
    assert poll.poll(10_000)
    assert plain.completions() == [(77, 0)]
    plain.close()


def test_an_operation_that_fails_in_the_probe_falls_back(uring: None, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    choice = choose_engine("auto", missing, direct=False)
    assert choice.name == "threads"
    assert choice.why.startswith("io_uring cannot CREATE here: ")
    assert "(ENOENT)" in choice.why


def test_the_probe_leaves_no_descriptor_open(uring: None, tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    choose_engine("auto", tmp_path, direct=False)
    choose_engine("auto", tmp_path / "missing", direct=False)
    choose_direct("auto", tmp_path)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("name", ["io_uring", "threads"])
def test_the_chosen_engine_is_made(
    request: pytest.FixtureRequest, tmp_path: Path, name: probe.EngineName
) -> None:
    if name == "io_uring":
        request.getfixturevalue("uring")
    buffers = [memoryview(mmap.mmap(-1, PAGE))]
    engine = probe.make_engine(EngineChoice(name, ""), buffers, direct=False, io_depth=2)
    assert engine.name == name
    engine.submit([FileOperation(1, Action.MKDIR, path=str(tmp_path / "made"))])
    poll = select.poll()
    poll.register(engine.fileno(), select.POLLIN)
    assert poll.poll(10_000)
    assert [completion.result for completion in engine.reap()] == [0]
    engine.close()
    assert (tmp_path / "made").is_dir()


def test_direct_io_off(tmp_path: Path) -> None:
    assert choose_direct("off", tmp_path) == DirectChoice(False, "direct_io is 'off'")
    assert list(tmp_path.iterdir()) == []


def test_direct_io_where_the_filesystem_takes_it(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"the filesystem of {tmp_path} refuses O_DIRECT: {error.strerror}")
    (tmp_path / "file").unlink()
    for requested in ("auto", "on"):
        choice = choose_direct(requested, tmp_path)  # type: ignore[arg-type]
        assert choice == DirectChoice(True, "the filesystem takes O_DIRECT")
    assert list(tmp_path.iterdir()) == []


def test_direct_io_where_the_filesystem_refuses_it(mounted: Callable[[str, str], Path]) -> None:
    root = mounted("ramfs", "mode=0700")
    choice = choose_direct("auto", root)
    assert not choice.direct
    assert choice.fallback
    assert str(root) in choice.why
    assert "refuses O_DIRECT: Invalid argument (EINVAL)" in choice.why
    with pytest.raises(ConfigError, match=r"option 'direct_io' is 'on', but .*\(EINVAL\)"):
        choose_direct("on", root)
    assert choose_engine("auto", root, choice.direct).name in ("io_uring", "threads")
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("requested", ["auto", "on", "off"])
def test_a_full_disk_is_refused(mounted: Callable[[str, str], Path], requested: str) -> None:
    root = mounted("tmpfs", "size=64k")
    with pytest.raises(OSError, match="No space left"), open(root / "filler", "wb") as file:
        file.write(bytes(128 << 10))
        file.flush()
    with pytest.raises(ConfigError) as caught:
        choose_direct(requested, root)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"option 'root' is '{root}', but no file can be stored there")
    assert "No space left on device (ENOSPC)" in message
    assert "room for at least a page" in message
    assert os.listdir(root) == ["filler"]


def test_a_missing_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"option 'root' is '.*missing'.*\(ENOENT\)"):
        choose_direct("auto", tmp_path / "missing")


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"option 'root' is '.*file'.*\(ENOTDIR\)"):
        choose_direct("auto", tmp_path / "file")


def test_a_read_only_filesystem_is_refused(mounted: Callable[[str, str], Path]) -> None:
    root = mounted("tmpfs", "ro")
    with pytest.raises(ConfigError, match=r"\(EROFS\); it must be a directory that this process"):
        choose_direct("auto", root)


def test_a_directory_of_someone_else_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o500)
    if os.access(root, os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(ConfigError, match=r"\(EACCES\); it must be a directory that this process"):
        choose_direct("auto", root)


def test_a_filesystem_without_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: str, target: str, **_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConfigError, match=r"\(EPERM\); it must be a filesystem with hard links"):
        choose_direct("auto", tmp_path)
    assert list(tmp_path.iterdir()) == []
