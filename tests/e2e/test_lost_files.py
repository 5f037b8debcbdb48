# SPDX-License-Identifier: Apache-2.0
"""A file is deleted, cut, made unreadable or falsified between look-up and load.

The request is answered as if nothing had happened, the failure is counted by its reason, and the
server goes on. Every case has a prompt of its own: three chunks, one of them damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from scripts.serving import Completion, Prompts, Server, kv_files
from tests.e2e.sites import KV_BYTES_PER_TOKEN, FaultySite, assert_same_answer, observe

CHUNKS = 3
POSITIONS = {"first": 0, "middle": 1, "last": 2}
PROMPT_TOKENS = CHUNKS * FaultySite.TOKENS_PER_CHUNK + 16
ANSWER_TOKENS = 4
REASONS = {
    "delete": "not_found",
    "truncate": "short_transfer",
    "make_unreadable": "permission",
    "flip_payload": "checksum",
    "corrupt_trailer": "trailer",
    "replace_by_other_chunk": "wrong_content",
}
CASES = [(damage, position) for damage in REASONS for position in POSITIONS]


@dataclass(frozen=True)
class Stored:
    """A prompt whose chunks are on disk, and its answer from memory."""

    prompt: list[int]
    from_memory: Completion


@pytest.fixture(scope="module")
def stored(
    faulty_site: FaultySite, faulty_server: Server, prompts: Prompts
) -> Mapping[tuple[str, str], Stored]:
    asked = {case: prompts.of(PROMPT_TOKENS, 100 + number) for number, case in enumerate(CASES)}
    expected_files = len(kv_files(faulty_site.root)) + CHUNKS * len(asked)
    for prompt in asked.values():
        faulty_server.complete(prompt, 1)
    answers = {
        case: Stored(prompt, faulty_server.complete(prompt, ANSWER_TOKENS, logprobs=True))
        for case, prompt in asked.items()
    }
    faulty_server.wait_idle(faulty_site.root, files=expected_files)
    return answers


@pytest.mark.parametrize(("damage", "position"), CASES)
def test_a_damaged_file_is_recomputed(
    faulty_site: FaultySite,
    faulty_server: Server,
    stored: Mapping[tuple[str, str], Stored],
    damage: str,
    position: str,
) -> None:
    case = stored[damage, position]
    faulty_server.reset_prefix_cache()
    faulty_site.order(damage, POSITIONS[position])

    observed = observe(faulty_server, case.prompt, ANSWER_TOKENS)

    assert faulty_site.struck
    assert_same_answer(observed.answer, case.from_memory)
    assert observed.failures == {REASONS[damage]: 1}
    good_tokens = (CHUNKS - 1) * FaultySite.TOKENS_PER_CHUNK
    assert observed.loaded_bytes == good_tokens * KV_BYTES_PER_TOKEN
    assert faulty_server.healthy()
    again = faulty_server.complete(case.prompt, ANSWER_TOKENS, logprobs=True)
    assert_same_answer(again, case.from_memory)


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip_payload", "corrupt_trailer"])
def test_a_damaged_file_is_replaced_by_a_good_one(
    faulty_site: FaultySite, faulty_server: Server, prompts: Prompts, damage: str
) -> None:
    prompt = prompts.of(PROMPT_TOKENS, 300 + len(damage))
    expected_files = len(kv_files(faulty_site.root)) + CHUNKS
    faulty_server.complete(prompt, 1)
    faulty_server.wait_idle(faulty_site.root, files=expected_files)
    faulty_server.reset_prefix_cache()
    faulty_site.order(damage, POSITIONS["middle"])
    assert observe(faulty_server, prompt, 1).failures == {REASONS[damage]: 1}

    faulty_server.wait_idle(faulty_site.root, files=expected_files)
    faulty_server.reset_prefix_cache()
    observed = observe(faulty_server, prompt, 1)

    assert observed.failures == {}
    assert observed.loaded_bytes == CHUNKS * FaultySite.TOKENS_PER_CHUNK * KV_BYTES_PER_TOKEN


def test_files_gone_before_the_look_up_are_a_miss_not_a_failure(
    faulty_site: FaultySite, faulty_server: Server, prompts: Prompts
) -> None:
    prompt = prompts.of(PROMPT_TOKENS, 200)
    others = set(kv_files(faulty_site.root))
    faulty_server.complete(prompt, 1)
    from_memory = faulty_server.complete(prompt, ANSWER_TOKENS, logprobs=True)
    faulty_server.wait_idle(faulty_site.root, files=len(others) + CHUNKS)
    for file in set(kv_files(faulty_site.root)) - others:
        file.unlink()
    faulty_server.reset_prefix_cache()

    observed = observe(faulty_server, prompt, ANSWER_TOKENS)

    assert_same_answer(observed.answer, from_memory)
    assert (observed.failures, observed.loaded_bytes) == ({}, 0)
