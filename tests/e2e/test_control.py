# SPDX-License-Identifier: Apache-2.0
"""The API of a server: what it says of its files and does with them, beside the engine at work."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from scripts.serving import Prompts, Server, kv_files
from tests.e2e.sites import KV_BYTES_PER_TOKEN, PAGE_BYTES, FaultySite, observe

CHUNKS = 3
TOKENS_PER_CHUNK = FaultySite.TOKENS_PER_CHUNK
PROMPT_TOKENS = CHUNKS * TOKENS_PER_CHUNK + 16
FILE_SIZE_BYTES = TOKENS_PER_CHUNK * KV_BYTES_PER_TOKEN + PAGE_BYTES


def call(server: Server, method: str, route: str, **body: Any) -> httpx.Response:
    return httpx.request(
        method,
        f"http://127.0.0.1:{server.port}/v1/pykvcache/{route}",
        json=body or None,
        timeout=120.0,
        trust_env=False,
    )


def told(server: Server, method: str, route: str, **body: Any) -> Any:
    return call(server, method, route, **body).raise_for_status().json()


@pytest.fixture(scope="module")
def prompt(prompts: Prompts) -> list[int]:
    return prompts.of(PROMPT_TOKENS, 400)


def test_a_prompt_is_looked_up_pinned_and_cleared(
    faulty_site: FaultySite, faulty_server: Server, prompt: list[int]
) -> None:
    server, root = faulty_server, faulty_site.root
    before = told(server, "POST", "lookup", prompt=prompt)
    assert before["cached_tokens"] == {"disk": 0, "dram": 0}
    files, others = told(server, "GET", "stats")["files"], len(kv_files(root))
    server.complete(prompt, 1)
    server.wait_idle(root, files=others + CHUNKS)

    found = told(server, "POST", "lookup", prompt=prompt)
    assert found["prompt_tokens"] == PROMPT_TOKENS
    assert found["cached_tokens"]["disk"] == CHUNKS * TOKENS_PER_CHUNK
    (keys,) = found["keys"]
    stored = {file.stem for file in kv_files(root) if file.parents[2].name == found["identity"]}
    assert set(keys) <= stored and len(keys) == CHUNKS

    assert told(server, "POST", "pin", prompt=prompt)["keys"] == keys
    counted = told(server, "GET", "stats")
    (mine,) = counted["identities"]
    assert mine["identity"] == found["identity"]
    assert mine["pinned_bytes"] == CHUNKS * FILE_SIZE_BYTES
    assert counted["files"] == files + CHUNKS
    assert told(server, "POST", "unpin", keys=keys[:1])["pinned"] is False

    assert told(server, "POST", "clear")["removed_files"] == files + CHUNKS
    assert told(server, "GET", "stats")["files"] == 0
    assert told(server, "POST", "lookup", prompt=prompt)["cached_tokens"]["disk"] == 0

    server.reset_prefix_cache()
    observed = observe(server, prompt, 1)
    assert (observed.loaded_bytes, observed.failures) == (0, {})


def test_text_is_read_by_the_servers_tokenizer(
    faulty_server: Server, faulty_site: FaultySite
) -> None:
    text = "The harbour is quiet in winter. " * 40
    files = len(kv_files(faulty_site.root))
    answer = faulty_server.complete(text, 1)
    chunks = answer.prompt_tokens // TOKENS_PER_CHUNK
    faulty_server.wait_idle(faulty_site.root, files=files + chunks)

    found = told(faulty_server, "POST", "lookup", prompt=text)

    assert found["prompt_tokens"] == answer.prompt_tokens
    assert found["cached_tokens"]["disk"] == chunks * TOKENS_PER_CHUNK > 0


@pytest.mark.parametrize(
    ("method", "route", "body", "status", "message"),
    [
        ("POST", "lookup", {}, 400, "Field required"),
        ("POST", "lookup", {"prompt": {"a": 1}}, 400, "prompt"),
        ("POST", "pin", {"keys": ["../x"]}, 400, "must be the hex digits"),
        ("POST", "pin", {"keys": ["ab" * 36]}, 404, "none of these chunks is in a file"),
    ],
)
def test_bad_input_gets_an_answer(
    faulty_server: Server,
    method: str,
    route: str,
    body: dict[str, Any],
    status: int,
    message: str,
) -> None:
    reply = call(faulty_server, method, route, **body)
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]
    assert faulty_server.healthy()
