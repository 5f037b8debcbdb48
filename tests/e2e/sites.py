# SPDX-License-Identifier: Apache-2.0
"""Servers for the end-to-end tests, what is asked of them, and how answers are compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.serving import EXTERNAL_HITS, LOAD_BYTES, Completion, Server, ServerOptions

FAILURES = "vllm:kv_offload_chunk_failures_total"
FILE_BYTES = "vllm:kv_offload_file_bytes_total"
POOL_SLOTS = "vllm:kv_offload_pool_slots"

KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""SmolLM2-135M in float32: layers, keys and values, heads, elements, bytes."""

PAGE_BYTES = 4096
"""The trailer after a file's payload."""

FROM_DISK_ONLY = {"dram_policy": "none", "preload_lookahead": 0}
"""Options with which a load always reads its files."""

MODEL_TOKENS_MAX = 2560
KV_CACHE_GIB = 1
"""23,000 tokens in float32: no prompt of a test evicts another from memory."""

ANSWER_TOKENS = 8

LOGPROB_TOLERANCE = 1e-4
"""Nats. The same tokens at the same positions, but a tail recomputed in a batch of another shape
adds float32 numbers in another order."""


HERE = Path(__file__).parent


class Site:
    """A root that servers share, and a log for each."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model = model
        self.root = directory / "root"
        self.directory = directory

    def server(
        self,
        name: str,
        *,
        pool_gib: float | None = None,
        options: Mapping[str, Any] | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Server:
        """A server of this site; `options` are the backend's own."""
        extra = {"kv_connector_extra_config": {"root": str(self.root), **(options or {})}}
        arguments = [
            "--kv-offloading-backend=pykvcache",
            f"--kv-transfer-config={json.dumps(extra)}",
            *args,
        ]
        if pool_gib is not None:
            arguments.append(f"--kv-offloading-size={pool_gib}")
        return self._server(name, arguments, env or {})

    def _server(self, name: str, args: Sequence[str], env: Mapping[str, str]) -> Server:
        arguments = ["--dtype=float32", f"--max-model-len={MODEL_TOKENS_MAX}", *args]
        environment = {"VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB), **env}
        log = self.directory / "logs" / f"{name}.log"
        return Server(ServerOptions(self.model, log, arguments, environment))

    def install_plugin(self, *modules: Path) -> Path:
        """A directory that looks like an installed distribution with one vLLM plugin: the
        `register` of the first module. On PYTHONPATH, vLLM calls it in every process."""
        place = self.directory / "plugin"
        name = modules[0].stem
        metadata = place / f"{name}-1.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        for module in modules:
            shutil.copy(module, place)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(
            f"[vllm.general_plugins]\n{name} = {name}:register\n"
        )
        return place


class FaultySite(Site):
    """A site whose server damages files between look-up and load, on order.

    vLLM's own plugin mechanism loads `fault_plugin` into the engine's process: an entry point
    found on PYTHONPATH. It wraps the one method that vLLM calls after a look-up and before the
    load is handed to the worker; everything else is the product as it is.
    """

    TOKENS_PER_CHUNK = 64
    TOKENS_PER_BLOCK = 32

    @property
    def _order(self) -> Path:
        return self.directory / "order.json"

    def faulty_server(self) -> Server:
        """The server; vLLM's development mode lets it forget what is in memory."""
        return self.server(
            "faulty",
            pool_gib=0.25,
            options={
                "tokens_per_chunk": self.TOKENS_PER_CHUNK,
                "lookup_ttl_s": 0,
                **FROM_DISK_ONLY,
            },
            args=[f"--block-size={self.TOKENS_PER_BLOCK}"],
            env={
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_PLUGINS": "fault_plugin,pykvcache",
                "PYTHONPATH": str(self.install_plugin(HERE / "fault_plugin.py")),
                "PYKVCACHE_FAULT_ORDER": str(self._order),
            },
        )

    def order(self, damage: str, position: int) -> None:
        """Have the file at `position` of the next load damaged, before the load is planned."""
        order = {"damage": damage, "position": position, "root": str(self.root)}
        self._order.with_suffix(".new").write_text(json.dumps(order))
        self._order.with_suffix(".new").rename(self._order)

    @property
    def struck(self) -> bool:
        """Whether the last order has been carried out."""
        return not self._order.exists()


class TieringSite(Site):
    """A site whose servers use vLLM's own tiering, with this backend below its CPU tier.

    vLLM's CPU tier wants a GPU on its other side. `tiering_plugin` has it take the CPU's memory
    for one; everything else is vLLM's and this backend's as they are.
    """

    TOKENS_PER_CHUNK = 256

    def tiering_server(self, name: str, *, cpu_tier_bytes: int, **options: Any) -> Server:
        """A server of this site; `options` are the tier's own."""
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": cpu_tier_bytes,
                "block_size": self.TOKENS_PER_CHUNK,
                "secondary_tiers": [{"type": "pykvcache", "root": str(self.root), **options}],
            },
        }
        shim = HERE.parent / "conformance" / "cpu_shim.py"
        plugin = self.install_plugin(HERE / "tiering_plugin.py", shim)
        return self._server(
            name, [f"--kv-transfer-config={json.dumps(transfer)}"], {"PYTHONPATH": str(plugin)}
        )


@dataclass(frozen=True)
class Observed:
    """An answer, and what the metrics say was done for it."""

    answer: Completion
    external_tokens: int
    loaded_bytes: int
    file_bytes_read: int
    failures: Mapping[str, int]
    """Failed chunk loads by reason."""


def observe(server: Server, prompt: Sequence[int], n_tokens: int = ANSWER_TOKENS) -> Observed:
    """Ask, with logprobs, and read the metrics before and after."""
    before = server.metrics()
    answer = server.complete(prompt, n_tokens, logprobs=True)
    after = server.metrics()

    def grown(name: str, **labels: str) -> int:
        return int(after.total(name, **labels) - before.total(name, **labels))

    reasons = after.by(FAILURES, "reason")
    failures = {reason: grown(FAILURES, direction="load", reason=reason) for reason in reasons}
    return Observed(
        answer,
        external_tokens=grown(EXTERNAL_HITS),
        loaded_bytes=grown(LOAD_BYTES),
        file_bytes_read=grown(FILE_BYTES, direction="load"),
        failures={reason: count for reason, count in failures.items() if count},
    )


def assert_same_answer(answer: Completion, expected: Completion) -> None:
    """The same tokens, with the same logprobs as far as float32 goes."""
    assert answer.token_ids == expected.token_ids, f"{answer.text!r} != {expected.text!r}"
    assert len(answer.logprobs) == len(expected.logprobs) == len(answer.token_ids)
    pairs = zip(answer.logprobs, expected.logprobs, strict=True)
    furthest = max(abs(ours - theirs) for ours, theirs in pairs)
    assert furthest <= LOGPROB_TOLERANCE, f"logprobs differ by up to {furthest}"
