# SPDX-License-Identifier: Apache-2.0
"""``pykvcache ls``, ``stats``, ``gc``, ``clear``, ``pin`` and ``unpin``, as people call them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pykvcache.capacity.pins import Pins
from pykvcache.capacity.record import Record
from tests.capacity.roots import Root, key_of


def run(root: Root, *arguments: object) -> subprocess.CompletedProcess[str]:
    name, *rest = map(str, arguments)
    command = [sys.executable, "-m", "pykvcache", name, "--root", str(root.path), *rest]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def document(root: Root, *arguments: object) -> Any:
    done = run(root, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(root: Root, *arguments: object) -> str:
    done = run(root, *arguments)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Ten chunks of 1,000 bytes, the first the longest unused; of another model two."""
    root = Root(tmp_path / "kv", ranks=2)
    for number in range(5):
        for rank in (0, 1):
            root.add(number, 1000, time.time() - 7200 + 60 * number, rank)
    other = Root(root.path, model="other")
    other.add(100, 500, time.time() - 30)
    other.add(101, 500, time.time() - 30)
    return root


def test_ls_lists_chunks(root: Root) -> None:
    done = run(root, "ls")
    assert done.returncode == 0, done.stderr
    assert key_of(0).hex() in done.stdout and "1000 B" in done.stdout and "2 h" in done.stdout
    lines = [json.loads(line) for line in run(root, "ls", "--json").stdout.splitlines()]
    assert len(lines) == 12
    ours = [line for line in lines if line["identity"] == root.identity.name]
    assert {(line["key"], line["rank"]) for line in ours} == {
        (key_of(number).hex(), rank) for number in range(5) for rank in (0, 1)
    }
    assert all(line["unused_s"] > 6000 and not line["pinned"] for line in ours)


def test_ls_ends_at_its_limit(root: Root) -> None:
    done = run(root, "ls", "--limit", 3)
    assert done.stdout.count("1000 B") + done.stdout.count("500 B") == 3
    assert "first 3 only" in done.stdout


def test_stats_count_by_identity_and_age(root: Root) -> None:
    found = document(root, "stats")
    assert (found["files"], found["bytes"]) == (12, 11_000)
    mine, other = found["identities"]
    assert (mine["files"], mine["bytes"], mine["ranks"]) == (10, 10_000, [0, 1])
    assert mine["bytes_by_age"]["under a day"] == 10_000
    assert other["bytes_by_age"]["under a minute"] == 1000
    assert found["files_by_bytes"] == {"500": 2, "1000": 10}
    text = run(root, "stats").stdout
    assert "12 files, 10.7 KiB of at most" in text and root.identity.name in text


def test_stats_of_one_identity(root: Root) -> None:
    assert document(root, "stats", "--identity", "other")["files"] == 2
    assert "no identity's name starts so" in refusal(root, "stats", "--identity", "nothing")


def test_gc_evicts_down_to_the_limits(root: Root) -> None:
    planned = document(root, "gc", "--capacity", 8000, "--dry-run")
    assert (planned["dry_run"], planned["evicted_files"]) == (True, 4)
    assert len(root.numbers()) == 5
    done = document(root, "gc", "--capacity", 8000)
    assert (done["evicted_files"], done["bytes"], done["limit_bytes"]) == (4, 7000, 8000)
    assert root.numbers() == [2, 3, 4]
    assert "evicted 0 files" in run(root, "gc", "--capacity", 8000).stdout


def test_gc_names_bad_options(root: Root) -> None:
    message = refusal(root, "gc", "--capacity", "lots")
    assert "option 'capacity' is 'lots'" in message and "'500GiB'" in message
    assert "'lru' or 'prefix'" in refusal(root, "gc", "--policy", "random")


def test_gc_does_not_wait_for_another(root: Root) -> None:
    with Record(root.path).try_lock() as held:
        assert held
        assert "is evicting from" in refusal(root, "gc", "--capacity", 8000)
    assert len(root.numbers()) == 5


def test_pinned_chunks_stay(root: Root) -> None:
    key = key_of(0).hex()
    assert document(root, "pin", key) == {
        "identity": root.identity.name,
        "keys": [key],
        "pinned": True,
    }
    done = run(root, "gc", "--capacity", 1000, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["excess_bytes"] == 1100
    assert root.numbers() == [0]
    assert document(root, "stats")["identities"][0]["pinned_bytes"] == 2000
    assert document(root, "unpin", f"{key}.kv")["pinned"] is False
    assert document(root, "gc", "--capacity", 1000)["files"] == 0


def test_pin_refuses_what_is_not_there(root: Root) -> None:
    assert "no chunk of that key" in refusal(root, "pin", "ab" * 36)
    assert "must be the hex digits" in refusal(root, "pin", "../etc")
    assert "is not pinned" in refusal(root, "unpin", key_of(0).hex())
    assert "either a key or a prompt" in refusal(root, "pin", "ab" * 36, "--prompt", "text")
    assert "choose one" in refusal(root, "pin", "--prompt", "text")


def test_pin_asks_which_identity(root: Root) -> None:
    Root(root.path, model="third").add(0, 10, time.time())
    assert "several identities" in refusal(root, "pin", key_of(0).hex())
    found = document(root, "pin", key_of(0).hex(), "--identity", "third")
    assert found["identity"].startswith("third-")


def test_clear_removes_one_identity_or_all(root: Root) -> None:
    Pins(root.identity).add(key_of(0).hex())
    assert document(root, "clear", "--yes", "--identity", "other")["removed_files"] == 2
    assert len(root.numbers()) == 5
    assert document(root, "clear", "--yes")["removed_files"] == 10
    assert root.numbers() == []
    assert Pins(root.identity).keys() == set()
    assert (root.identity / "identity.json").exists()


def test_clear_asks(root: Root) -> None:
    command = [sys.executable, "-m", "pykvcache", "clear", "--root", str(root.path)]
    done = subprocess.run(command, input="n\n", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(root.numbers()) == 5


@pytest.mark.parametrize("name", ["ls", "stats", "gc", "clear"])
def test_a_root_that_is_not_there_is_said(name: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    command = [sys.executable, "-m", "pykvcache", name, "--root", str(missing)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"option 'root' is '{missing}'" in done.stderr
    assert not missing.exists()


def test_wrong_usage_has_a_code_of_its_own(root: Root) -> None:
    assert run(root, "ls", "--nonsense").returncode == 2
