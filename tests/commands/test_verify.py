# SPDX-License-Identifier: Apache-2.0
"""``pykvcache verify``, over files as servers write them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pykvcache.checksum import checksum
from pykvcache.config import Config
from pykvcache.examine import PIECE_BYTES, find_defect
from pykvcache.identity import FILE_NAME
from pykvcache.layout import PAGE, BlockSpan, Defect, Trailer, padded
from tests.capacity.roots import Root, key_of

FILES = 6
PAYLOAD_BYTES = 2 * PAGE + 100


def fingerprint_of(root: Root) -> bytes:
    return hashlib.sha256((root.directories[0] / FILE_NAME).read_bytes()).digest()


def write_chunk(path: Path, key: bytes, fingerprint: bytes, payload: bytes) -> None:
    data = payload.ljust(padded(len(payload)), b"\0")
    page = bytearray(PAGE)
    span = BlockSpan(0, 4)
    trailer = Trailer(key, fingerprint, len(payload), span, 1, b"writer", checksum(data))
    trailer.encode_into(memoryview(page))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data + page)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(tmp_path / "kv")
    root.directories[0].mkdir(parents=True)
    (root.directories[0] / FILE_NAME).write_text('{"rank": 0}')
    for number in range(FILES):
        payload = random.Random(number).randbytes(PAYLOAD_BYTES)
        write_chunk(root.file(number), key_of(number), fingerprint_of(root), payload)
    return root


def run(root: Root, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pykvcache", "verify", "--root", str(root.path)]
    command += map(str, arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def document(root: Root, *arguments: object) -> Any:
    return json.loads(run(root, *arguments, "--json").stdout)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damage(root: Root, kind: str, number: int) -> Path:
    path = root.file(number)
    if kind == "payload":
        flip(path, PAYLOAD_BYTES // 2)
    elif kind == "padding":
        flip(path, PAYLOAD_BYTES + 1)
    elif kind == "page":
        flip(path, path.stat().st_size - PAGE + 20)
    elif kind == "cut":
        os.truncate(path, PAGE)
    elif kind == "empty":
        os.truncate(path, 0)
    elif kind == "longer":
        data = path.read_bytes()
        path.write_bytes(bytes(PAGE) + data)
    elif kind == "another key":
        path.write_bytes(root.file(number + 1).read_bytes())
    else:
        write_chunk(path, key_of(number), bytes(32), b"of another server")
    return path


DAMAGES = {
    "payload": Defect.CHECKSUM,
    "padding": Defect.CHECKSUM,
    "page": Defect.NO_TRAILER,
    "cut": Defect.NO_TRAILER,
    "empty": Defect.NO_TRAILER,
    "longer": Defect.LENGTH,
    "another key": Defect.KEY,
    "another identity": Defect.IDENTITY,
}


def test_good_files_stay(root: Root) -> None:
    done = run(root)
    assert done.returncode == 0, done.stderr
    assert f"verified {FILES} files" in done.stdout and "0 bad ones" in done.stdout
    assert root.numbers() == list(range(FILES))


@pytest.mark.parametrize(("kind", "defect"), DAMAGES.items())
def test_what_a_load_would_refuse_is_found(root: Root, kind: str, defect: Defect) -> None:
    path = damage(root, kind, 2)
    assert find_defect(str(path), fingerprint_of(root)) is defect
    assert find_defect(str(root.file(3)), fingerprint_of(root)) is None


def test_bad_files_are_put_aside(root: Root) -> None:
    kept = damage(root, "payload", 2).read_bytes()
    done = run(root)
    assert done.returncode == 1
    assert f"bad (checksum): {root.file(2)}" in done.stdout
    assert root.numbers() == [0, 1, 3, 4, 5]
    (aside,) = (root.directories[0] / "quarantine").iterdir()
    assert aside.read_bytes() == kept
    assert run(root).returncode == 0


def test_a_dry_run_moves_nothing(root: Root) -> None:
    damage(root, "page", 2)
    found = document(root, "--dry-run")
    assert (found["bad_files"], found["defects"]) == (1, {"no_trailer": 1})
    assert found["bad"][0]["path"] == str(root.file(2))
    assert root.numbers() == list(range(FILES))


def test_quarantine_is_bounded(root: Root) -> None:
    bound = Config.model_fields["quarantine_files_max"].default
    for number in range(bound + 3):
        write_chunk(root.file(number), key_of(number), bytes(32), b"of another server")
    assert document(root)["bad_files"] == bound + 3
    assert root.numbers() == []
    assert len(list((root.directories[0] / "quarantine").iterdir())) == bound


def test_it_goes_on_where_it_was_interrupted(root: Root) -> None:
    everything = document(root)
    assert everything["complete"] and everything["files"] == FILES
    assert document(root, "--after", everything["last"])["files"] == 0
    first = sorted(path.relative_to(root.path) for path in root.path.rglob("*.kv"))[0]
    assert document(root, "--after", first)["files"] == FILES - 1


def test_a_sample_reads_fewer_files(root: Root) -> None:
    assert document(root, "--sample", 0)["files"] == 0
    assert run(root, "--sample", 101).returncode == 2


def test_what_cannot_be_read_is_said(root: Root) -> None:
    (root.directories[0] / FILE_NAME).unlink()
    (root.directories[0] / FILE_NAME).symlink_to(root.identity / FILE_NAME)
    done = run(root)
    assert done.returncode == 1
    assert done.stderr.count("cannot be read") == FILES
    assert root.numbers() == list(range(FILES))


def test_a_bad_place_to_go_on_is_refused(root: Root) -> None:
    done = run(root, "--after", "/etc/passwd")
    assert done.returncode == 1
    assert "--after is '/etc/passwd'" in done.stderr and "Traceback" not in done.stderr


def test_files_larger_than_a_piece_are_read_whole(root: Root) -> None:
    payload = random.Random(9).randbytes(PIECE_BYTES + 5000)
    path = root.file(50)
    write_chunk(path, key_of(50), fingerprint_of(root), payload)
    assert find_defect(str(path), fingerprint_of(root)) is None
    flip(path, PIECE_BYTES + 4999)
    assert find_defect(str(path), fingerprint_of(root)) is Defect.CHECKSUM
