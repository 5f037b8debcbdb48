# SPDX-License-Identifier: Apache-2.0
"""A real server whose root may hold a few chunks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.serving import Prompts, Server, kv_files
from tests.e2e.sites import FROM_DISK_ONLY, KV_BYTES_PER_TOKEN, PAGE_BYTES, Site

TOKENS_PER_CHUNK = 256
FILE_BYTES = TOKENS_PER_CHUNK * KV_BYTES_PER_TOKEN + PAGE_BYTES
CAPACITY = 6 * FILE_BYTES
HIGH_MARK = 0.95 * CAPACITY
DEADLINE_S = 120.0
EVICTED = "vllm:kv_offload_evicted_files_total"
FAILURES = "vllm:kv_offload_chunk_failures_total"


def size_of(root: Path) -> int:
    return sum(file.stat().st_size for file in kv_files(root))


def test_a_root_is_kept_within_its_capacity(site: Site, prompts: Prompts) -> None:
    options = {**FROM_DISK_ONLY, "capacity": CAPACITY, "free_space_min": 0}
    with site.server("evicting", pool_gib=0.5, options=options) as server:
        store_until_evicted(server, prompts)
        deadline = time.monotonic() + DEADLINE_S
        while size_of(site.root) > HIGH_MARK and time.monotonic() < deadline:
            server.metrics()
        assert 0 < size_of(site.root) <= HIGH_MARK
        check_with_commands(site.root)
        assert server.healthy()
        assert server.metrics().total(FAILURES) == 0


def check_with_commands(root: Path) -> None:
    """Beside the running server: nothing it has stored is bad, or too much."""
    verified = command(root, "verify")
    assert verified["files"] > 0 and verified["bad_files"] == verified["unreadable_files"] == 0
    assert command(root, "gc", "--capacity", str(CAPACITY), "--dry-run")["evicted_files"] == 0
    counted = command(root, "stats")
    assert counted["files"] == len(kv_files(root)) == verified["files"]
    assert [identity["ranks"] for identity in counted["identities"]] == [[0]]


def command(root: Path, name: str, *options: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "pykvcache", name, "--root", str(root), "--json", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def store_until_evicted(server: Server, prompts: Prompts) -> None:
    """Ask other prompts of two chunks each."""
    deadline = time.monotonic() + DEADLINE_S
    seed = 700
    while server.metrics().total(EVICTED) == 0:
        assert time.monotonic() < deadline, "nothing was evicted"
        server.complete(prompts.of(2 * TOKENS_PER_CHUNK + 16, seed), 1)
        seed += 1
