# SPDX-License-Identifier: Apache-2.0
"""KV bytes loaded equal the bytes stored, chunk by chunk.

The bytes in the engine's memory cannot be read from outside, but they can be made to come out
again: a prompt is loaded from its files, the files are deleted, and the prompt is asked once more.
It is answered from memory, and vLLM stores its blocks anew: the ones that were loaded. The new
files must hold what the old ones held.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from scripts.serving import Prompts, Server, kv_files
from tests.e2e.sites import KV_BYTES_PER_TOKEN, PAGE_BYTES, FaultySite, observe

CHUNKS = 3


def payloads(files: list[Path]) -> dict[str, str]:
    """Digest of every file's payload; the trailer names the time it was written."""
    return {
        file.name: hashlib.sha256(file.read_bytes()[:-PAGE_BYTES]).hexdigest() for file in files
    }


def test_what_is_loaded_is_what_was_stored(
    faulty_site: FaultySite, faulty_server: Server, prompts: Prompts
) -> None:
    prompt = prompts.of(CHUNKS * FaultySite.TOKENS_PER_CHUNK + 16, 21)
    others = set(kv_files(faulty_site.root))
    expected_files = len(others) + CHUNKS

    faulty_server.complete(prompt, 1)
    faulty_server.wait_idle(faulty_site.root, files=expected_files)
    stored = [file for file in kv_files(faulty_site.root) if file not in others]
    stored_payloads = payloads(stored)

    faulty_server.reset_prefix_cache()
    loaded = observe(faulty_server, prompt, 1)
    assert loaded.loaded_bytes == CHUNKS * FaultySite.TOKENS_PER_CHUNK * KV_BYTES_PER_TOKEN
    assert loaded.failures == {}

    for file in stored:
        file.unlink()
    again = observe(faulty_server, prompt, 1)
    assert again.loaded_bytes == 0
    faulty_server.wait_idle(faulty_site.root, files=expected_files)
    assert payloads(stored) == stored_payloads
    assert len(set(stored_payloads.values())) == CHUNKS
