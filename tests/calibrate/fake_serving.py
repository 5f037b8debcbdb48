# SPDX-License-Identifier: Apache-2.0
"""A server whose every time is known, with a GPU's prefix cache, files and a pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pykvcache.calibrate.measure import HITS
from pykvcache.calibrate.run import ServedEngine
from pykvcache.calibrate.server_options import parse_options
from pykvcache.identity import FILE_NAME, Identity
from pykvcache.machine import Machine
from pykvcache.serving.answers import Completion, Metrics
from pykvcache.serving.server import LOAD_BYTES, ServerOptions

CHUNK = 256
BLOCK = 16
BYTES_PER_TOKEN = 1000
STEP_S, TOKEN_S, CONTEXT_S = 0.05, 0.002, 1e-7
LOAD_S = 0.01
BANDWIDTH = {"disk": 20e6, "dram": 400e6}

MACHINE = Machine(cpu="x", cpus=2, ram_gib=20, gpus=(), filesystem="ext4", storage="disk")

IDENTITY = Identity(
    engine="vllm 0.32.0",
    device="cpu",
    model="small",
    revision="",
    weights="00",
    cache_dtype="float32",
    kv_cache_layout="NHD",
    tokens_per_hash=BLOCK,
    hash_algorithm="sha256",
    hash_seed="0",
    blocks_per_chunk=CHUNK // BLOCK,
    tokens_per_block=(BLOCK,),
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    prefill_context_parallel_size=1,
    decode_context_parallel_size=1,
    namespace="",
)

CONFIGURATION = {
    "scheduler_config": {"max_num_batched_tokens": 2048},
    "model_config": {"enforce_eager": True, "max_model_len": 4096},
}


def compute_s(start: int, end: int) -> float:
    """The true c(a, b)."""
    return STEP_S + TOKEN_S * (end - start) + CONTEXT_S * (end**2 - start**2) / 2


def load_s(tier: str, size: int) -> float:
    """What a load adds in truth."""
    return LOAD_S + size / BANDWIDTH[tier]


class FakeServer:
    """What a calibration asks of a server, answered at once. A chunk or a block is known by all
    tokens up to its end."""

    def __init__(self, root: Path, *, retains: bool, pool_tokens: int = 1 << 20) -> None:
        self._directory = root / IDENTITY.model
        self._retains = retains
        self._pool_tokens = pool_tokens
        self._gpu: set[tuple[int, ...]] = set()
        self._pool: set[tuple[int, ...]] = set()
        self._loaded = {"disk": 0, "dram": 0}
        self.requests = 0
        (self._directory / "rank-0000").mkdir(parents=True, exist_ok=True)
        (self._directory / FILE_NAME).write_text(IDENTITY.canonical)

    def complete(self, prompt: Sequence[int], max_tokens: int = 16) -> Completion:
        """The times that the constants give."""
        assert max_tokens == 1
        self.requests += 1
        tokens = tuple(prompt)
        in_gpu = _leading(tokens, BLOCK, self._gpu.__contains__)
        stored = _leading(tokens, CHUNK, lambda chunk: self._file(chunk).exists())
        seconds = 0.0
        if stored > in_gpu:
            tier = "dram" if _leading(tokens, CHUNK, self._pool.__contains__) >= stored else "disk"
            size = BYTES_PER_TOKEN * (stored - in_gpu)
            seconds = load_s(tier, size)
            self._loaded[tier] += size
            in_gpu = stored
        seconds += compute_s(in_gpu, len(tokens))
        for end in range(CHUNK, len(tokens) + 1, CHUNK):
            self._file(tokens[:end]).touch()
            if self._retains and len(tokens) <= self._pool_tokens:
                self._pool.add(tokens[:end])
        self._gpu |= {tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK)}
        return Completion("a", (1,), (), len(tokens), in_gpu, seconds, seconds)

    def _file(self, chunk: Sequence[int]) -> Path:
        return self._directory / "rank-0000" / f"{hash(tuple(chunk)) & (1 << 64) - 1:016x}.kv"

    def metrics(self) -> Metrics:
        """Loads so far."""
        hits = {frozenset({("tier", tier)}): float(size) for tier, size in self._loaded.items()}
        return Metrics({HITS: hits, LOAD_BYTES: {frozenset(): sum(hits.values())}})

    def reset_prefix_cache(self) -> None:
        """Files and pool stay."""
        self._gpu.clear()

    def wait_idle(self, root: Path) -> None:
        """It always is."""

    def configuration(self) -> Mapping[str, Any]:
        """As vLLM tells it."""
        return CONFIGURATION


def _leading(tokens: tuple[int, ...], step: int, holds: Any) -> int:
    """Tokens of the pieces that are there, from the first on and before the last token."""
    end = 0
    while end + step < len(tokens) and holds(tokens[: end + step]):
        end += step
    return end


class Fleet:
    """Starts fake servers, and remembers what with."""

    def __init__(self, pool_tokens: int = 1 << 20) -> None:
        self.started: list[dict[str, Any]] = []
        self.servers: list[FakeServer] = []
        self._pool_tokens = pool_tokens

    @contextmanager
    def serve(self, options: ServerOptions) -> Iterator[ServedEngine]:
        """As :class:`~pykvcache.serving.server.Server` does."""
        backend = parse_options(options.args).backend
        self.started.append(backend)
        retains = backend["dram_policy"] == "lru"
        server = FakeServer(Path(backend["root"]), retains=retains, pool_tokens=self._pool_tokens)
        self.servers.append(server)
        yield server


class Quiet:
    """Progress that nobody sees."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.tokens = self.expected = 0
        self.stop_at = ""

    def stage(self, name: str) -> None:
        """Interrupt as Ctrl-C does, where it is to be."""
        if self.stop_at and self.stop_at in name:
            raise KeyboardInterrupt

    def expect(self, tokens: int) -> None:
        """Count."""
        self.expected += tokens

    def advance(self, tokens: int) -> None:
        """Count."""
        self.tokens += tokens

    def note(self, text: str) -> None:
        """Keep."""
        self.notes.append(text)
