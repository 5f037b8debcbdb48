# SPDX-License-Identifier: Apache-2.0
"""A server whose disk is slower than computing: the gate learns it, and computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pykvcache.calibrate.run import identify
from pykvcache.gate.calibration import calibration_path
from pykvcache.machine import machine_of
from scripts.serving import LOAD_BYTES, Completion, Metrics, Prompts, Server, log_tail
from tests.e2e.sites import (
    ANSWER_TOKENS,
    FROM_DISK_ONLY,
    KV_BYTES_PER_TOKEN,
    Site,
    assert_same_answer,
)

HIT_TOKENS = 512
PROMPT_TOKENS = HIT_TOKENS + 16
DISK_BYTES_PER_S = 2_000_000
"""After a chunk of 11.8 MB the next one is not read for 6 s; both are computed in two."""

LESSONS = 1
ALWAYS = {"pykvcache_gate": "always"}
DECLINED = "vllm:kv_offload_declined_loads_total"
DECLINED_TOKENS = "vllm:kv_offload_declined_tokens_total"


@dataclass(frozen=True)
class Run:
    """What the server did."""

    computed: Completion
    loaded: list[Completion]
    after_loads: Metrics
    declined: Completion
    after_decline: Metrics
    calibration: Path
    log: str


@pytest.fixture(scope="module")
def run(site: Site, prompts: Prompts) -> Iterator[Run]:
    prompt = prompts.of(PROMPT_TOKENS, seed=1)
    options = {"read_bandwidth_max": DISK_BYTES_PER_S, **FROM_DISK_ONLY}
    with site.server("gate", options=options, env={"VLLM_SERVER_DEV_MODE": "1"}) as server:

        def ask(**transfer: object) -> Completion:
            server.reset_prefix_cache()
            return server.complete(prompt, ANSWER_TOKENS, logprobs=True, transfer=transfer)

        computed = ask()
        server.wait_idle(site.root, files=2)
        loaded = [ask(**ALWAYS) for _ in range(LESSONS)]
        after_loads = server.metrics()
        declined = ask()
        served = identify(server, site.root, machine_of(site.root))
        yield Run(
            computed,
            loaded,
            after_loads,
            declined,
            settled(server),
            calibration_path(site.root, served.fingerprint),
            log_tail(server.options.log, 1000),
        )


def settled(server: Server) -> Metrics:
    """Figures travel with the step after; one more answer brings it."""
    server.complete([1, 2, 3], 2)
    return server.metrics()


def test_who_wants_it_gets_it_loaded(run: Run) -> None:
    assert run.after_loads.total(LOAD_BYTES) == LESSONS * HIT_TOKENS * KV_BYTES_PER_TOKEN
    assert [answer.cached_tokens for answer in run.loaded] == [HIT_TOKENS] * LESSONS


def test_what_is_slower_to_load_is_computed(run: Run) -> None:
    assert run.declined.cached_tokens == 0
    assert run.after_decline.total(LOAD_BYTES) == run.after_loads.total(LOAD_BYTES)


def test_the_decision_is_counted(run: Run) -> None:
    assert run.after_loads.total(DECLINED) == 0
    assert run.after_decline.total(DECLINED, reason="slower") == 1
    assert run.after_decline.total(DECLINED_TOKENS, reason="slower") == HIT_TOKENS


def test_the_answer_is_the_same_either_way(run: Run) -> None:
    for answer in (*run.loaded, run.declined):
        assert_same_answer(answer, run.computed)


def test_the_server_looks_where_calibrate_writes(run: Run) -> None:
    assert f"no calibration of this server ({run.calibration})" in run.log
