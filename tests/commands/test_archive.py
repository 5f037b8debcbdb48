# SPDX-License-Identifier: Apache-2.0
"""Archives: there and back, and whatever else somebody calls an archive."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvcache.access import PRIVATE
from pykvcache.archive import Reader, Taken, write_archive
from pykvcache.errors import ConfigError
from pykvcache.examine import find_defect, fingerprint_of
from pykvcache.identity import FILE_NAME, Identity, RankIdentity, claim_directory
from pykvcache.layout import PAGE, ChunkPaths, rank_directory
from tests.capacity.roots import key_of
from tests.commands.test_verify import write_chunk

FILES = 4
EXAMPLES = 150
EXAMPLES_SOAK = 50_000

IDENTITY = Identity(
    engine="vllm 1",
    device="cpu",
    model="a/model",
    revision="",
    weights="",
    cache_dtype="float32",
    kv_cache_layout="",
    tokens_per_hash=16,
    hash_algorithm="sha256",
    hash_seed="0",
    blocks_per_chunk=2,
    tokens_per_block=(16,),
    tensor_parallel_size=2,
    pipeline_parallel_size=1,
    prefill_context_parallel_size=1,
    decode_context_parallel_size=1,
    namespace="",
)


def ignore(_size: int) -> None:
    """No progress is shown."""


def make_root(root: Path, payload_bytes: int = 2 * PAGE + 100) -> Path:
    """Two ranks with four chunks each, as servers leave them; the identity's directory."""
    directory = IDENTITY.directory(root)
    claim_directory(IDENTITY, directory, root)
    for number in (0, 1):
        rank = rank_directory(directory, number)
        facts = RankIdentity(
            server=IDENTITY.fingerprint.hex(), rank=number, layers=(("a",),), page_bytes=((1,),)
        )
        claim_directory(facts, rank, root)
        for chunk in range(FILES):
            payload = random.Random(10 * number + chunk).randbytes(payload_bytes)
            path = Path(ChunkPaths(rank).final(key_of(chunk)))
            write_chunk(path, key_of(chunk), facts.fingerprint, payload)
    return directory


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.*")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "kv").mkdir()
    make_root(tmp_path / "kv")
    return tmp_path / "kv"


@pytest.fixture
def archive(root: Path, tmp_path: Path) -> Path:
    path = tmp_path / "chunks.tar"
    write_archive(path, IDENTITY.directory(root), sorted(root.rglob("*.kv")), ignore)
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    (tmp_path / "other").mkdir()
    return tmp_path / "other"


def take(archive: Path, root: Path) -> Taken:
    return Reader(root, PRIVATE, ignore).read(archive)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pykvcache", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_there_and_back(root: Path, other: Path, tmp_path: Path) -> None:
    archive = tmp_path / "chunks.tar"
    done = run("export", archive, "--root", root, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == 2 * FILES
    done = run("import", archive, "--root", other, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["files"], report["present_files"], report["bad_files"]) == (2 * FILES, 0, 0)
    assert report["identities"] == [IDENTITY.directory(root).name]
    assert contents(other) == contents(root)
    assert [path for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
    again = json.loads(run("import", archive, "--root", other, "--json").stdout)
    assert (again["files"], again["present_files"]) == (0, 2 * FILES)


def test_a_full_root_takes_nothing(archive: Path, other: Path) -> None:
    command = [sys.executable, "-m", "pykvcache", "import", str(archive), "--root", str(other)]
    environment = {**os.environ, "PYKVCACHE_FREE_SPACE_MIN": "100%"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1 and "is full" in done.stderr
    assert contents(other) == {}


def test_a_file_that_has_gone_is_left_out(root: Path, tmp_path: Path, other: Path) -> None:
    files = sorted(root.rglob("*.kv"))
    files[0].unlink()
    count, _size = write_archive(tmp_path / "a.tar", IDENTITY.directory(root), files, ignore)
    assert count == 2 * FILES - 1
    assert take(tmp_path / "a.tar", other).files == count


def test_nothing_to_export_is_said(root: Path, tmp_path: Path) -> None:
    for path in root.rglob("*.kv"):
        path.unlink()
    done = run("export", tmp_path / "a.tar", "--root", root)
    assert done.returncode == 1 and "nothing to export" in done.stderr
    assert not (tmp_path / "a.tar").exists()


Change = Callable[[tarfile.TarInfo, bytes], tuple[tarfile.TarInfo, bytes]]


def changed(archive: Path, target: Path, change: Change) -> Path:
    """The archive with every member put through ``change``."""
    with tarfile.open(archive) as old, tarfile.open(target, "w:") as new:
        for member in old:
            content = old.extractfile(member)
            member.pax_headers = {}  # hold the name again
            info, data = change(member, content.read() if content else b"")
            info.size = len(data) if info.isreg() else 0
            new.addfile(info, io.BytesIO(data))
    return target


def named(name: str) -> Change:
    def change(info: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        if info.name.endswith(".kv"):
            info.name = name
        return info, data

    return change


@pytest.mark.parametrize(
    "name",
    [
        "../evil.kv",
        "/evil.kv",
        "model/rank-0000/abc/../../../evil.kv",
        "model/rank-0000/abc/abcd.kv/",
        "model/rank-0000/abc/zz.kv",
        "model/rank-0000/abc/abcd.tmp",
        ".hidden/rank-0000/abc/abcd.kv",
    ],
)
def test_no_name_leads_out_of_the_root(
    name: str, archive: Path, other: Path, tmp_path: Path
) -> None:
    taken = take(changed(archive, tmp_path / "bad.tar", named(name)), other)
    assert taken.files == 0 and taken.bad["name"] == 2 * FILES
    assert not list(tmp_path.rglob("evil*"))
    assert not list(other.rglob("*.kv"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
def test_nothing_but_files_is_taken(
    kind: bytes, archive: Path, other: Path, tmp_path: Path
) -> None:
    def change(info: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        if info.name.endswith(".kv"):
            info.type, info.linkname = kind, "/etc/passwd"
        return info, data

    taken = take(changed(archive, tmp_path / "bad.tar", change), other)
    assert taken.files == 0 and taken.bad["name"] == 2 * FILES
    assert not any(path.is_symlink() for path in other.rglob("*"))


def test_a_chunk_with_a_flipped_bit_is_left_out(archive: Path, other: Path, tmp_path: Path) -> None:
    def change(info: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        if info.name.endswith(".kv"):
            data = bytes([data[0] ^ 1]) + data[1:]
        return info, data

    taken = take(changed(archive, tmp_path / "bad.tar", change), other)
    assert (taken.files, taken.bad) == (0, {"checksum": 2 * FILES})
    assert not list(other.rglob("*.kv")) and not list(other.rglob("*.tmp"))


def test_one_ranks_chunks_are_not_anothers(archive: Path, other: Path, tmp_path: Path) -> None:
    def change(info: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        if info.name.endswith(".kv"):
            is_first = "rank-0000" in info.name
            info.name = "left out" if is_first else info.name.replace("rank-0001", "rank-0000")
        return info, data

    taken = take(changed(archive, tmp_path / "bad.tar", change), other)
    assert taken.bad == {"name": FILES, "identity": FILES}


@pytest.mark.parametrize(
    "old",
    ['"a/model"', '"float32"', '"rank": 1', IDENTITY.fingerprint.hex()],
)
def test_an_identity_must_be_its_name(old: str, archive: Path, other: Path, tmp_path: Path) -> None:
    def change(info: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        if info.name.endswith(FILE_NAME):
            data = data.replace(old.encode(), old.replace("1", "7").replace("a", "b").encode())
        return info, data

    with pytest.raises(ConfigError, match=r"does not (describe|belong)"):
        take(changed(archive, tmp_path / "bad.tar", change), other)


def test_another_cache_in_the_root_is_not_mixed_up(archive: Path, other: Path) -> None:
    directory = IDENTITY.directory(other)
    directory.mkdir()
    (directory / FILE_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="does not describe this server's cache"):
        take(archive, other)


def test_a_cut_archive_is_said_and_leaves_whole_chunks_only(archive: Path, other: Path) -> None:
    data = archive.read_bytes()
    archive.write_bytes(data[: len(data) * 2 // 3])
    done = run("import", archive, "--root", other)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    require_good(other)
    assert not list(other.rglob("*.tmp"))


@pytest.mark.parametrize("content", [b"", b"not an archive", bytes(10_000)])
def test_no_archive_is_said(content: bytes, tmp_path: Path, other: Path) -> None:
    path = tmp_path / "some.tar"
    path.write_bytes(content)
    done = run("import", path, "--root", other)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert not list(other.rglob("*.kv"))


def require_good(root: Path) -> None:
    """Everything that was taken in would be loaded rightly."""
    for path in root.rglob("*.kv"):
        assert path.is_file() and not path.is_symlink()
        assert find_defect(str(path), fingerprint_of(path.parent.parent)) is None


@pytest.fixture(scope="module")
def small_archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("small")
    (place / "kv").mkdir()
    directory = make_root(place / "kv", payload_bytes=50)
    write_archive(place / "a.tar", directory, sorted(directory.rglob("*.kv")), ignore)
    return (place / "a.tar").read_bytes()


EDITS = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=40)), min_size=1, max_size=6
)


def fuzz(archive: bytes, edits: list[tuple[int, bytes]], length: int, place: Path) -> None:
    data = bytearray(archive[: max(1, len(archive) - length)])
    for at, text in edits:
        at %= len(data)
        data[at : at + len(text)] = text
    (place / "a.tar").write_bytes(data)
    root = place / "root"
    root.mkdir()
    with contextlib.suppress(ConfigError):
        take(place / "a.tar", root)
    require_good(root)
    assert {path.name for path in place.iterdir()} == {"a.tar", "root"}


def check(small: bytes, factory: pytest.TempPathFactory, examples: int) -> None:
    @settings(max_examples=examples)
    @given(EDITS, st.one_of(st.just(0), st.integers(0, 60_000)))
    def each(edits: list[tuple[int, bytes]], length: int) -> None:
        place = factory.mktemp("fuzz")
        try:
            fuzz(small, edits, length, place)
        finally:
            shutil.rmtree(place)

    each()


def test_no_archive_gets_a_wrong_chunk_in(
    small_archive: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(small_archive, tmp_path_factory, EXAMPLES)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_archive_gets_a_wrong_chunk_in_ever(
    small_archive: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(small_archive, tmp_path_factory, EXAMPLES_SOAK)
