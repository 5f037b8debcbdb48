# SPDX-License-Identifier: Apache-2.0
"""What tells requests and servers apart: each makes a chunk a miss, by its key or by where it is
looked for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.spec", reason="needs the patched vLLM")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.request import Request

from pykvcache.config import Config
from pykvcache.layout import ChunkPaths, rank_directory
from pykvcache.scheduler.catalog import Catalog
from vllm.v1.kv_offload.pykvcache.spec import build_identity

BLOCK_TOKENS = 16
TOKENS = list(range(4 * BLOCK_TOKENS))


def key(
    tokens: list[int] = TOKENS, *, algorithm: str = "sha256", seed: str = "0", **facts: Any
) -> OffloadKey:
    """The key of a request's last block, as vLLM's connector makes it."""
    function = get_hash_fn_by_name(algorithm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", seed)
        init_none_hash(function)
        request = Request(
            request_id="request",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, function),
            **facts,
        )
    return make_offload_key(request.block_hashes[-1], 0)


def image(identifier: str, offset: int = 4) -> list[MultiModalFeatureSpec]:
    return [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=offset, length=8),
        )
    ]


def adapter(name: str) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=1, lora_path=f"/adapters/{name}")


SAME = [
    {},
    {"cache_salt": "tenant a"},
    {"lora_request": adapter("a")},
    {"mm_features": image("an image")},
]
OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"tokens": [*TOKENS[:-1], 7]}),
    ({}, {"tokens": [7, *TOKENS[1:]]}),
    ({}, {"seed": "1"}),
    ({}, {"algorithm": "sha256_cbor"}),
    ({}, {"cache_salt": "tenant a"}),
    ({"cache_salt": "tenant a"}, {"cache_salt": "tenant b"}),
    ({}, {"lora_request": adapter("a")}),
    ({"lora_request": adapter("a")}, {"lora_request": adapter("b")}),
    ({}, {"mm_features": image("an image")}),
    ({"mm_features": image("an image")}, {"mm_features": image("another")}),
    ({"mm_features": image("an image")}, {"mm_features": image("an image", offset=5)}),
]


@pytest.mark.parametrize("facts", SAME, ids=str)
def test_equal_requests_have_one_key(facts: dict[str, Any]) -> None:
    assert key(**facts) == key(**facts)


@pytest.mark.parametrize(("stored", "asked"), OTHERS, ids=str)
def test_another_request_is_a_miss(
    tmp_path: Path, stored: dict[str, Any], asked: dict[str, Any]
) -> None:
    paths = ChunkPaths(tmp_path)
    file = Path(paths.final(key(**stored)))
    file.parent.mkdir(parents=True)
    file.touch()
    catalog = Catalog.of(Config(root=tmp_path, lookup_ttl_s=0), [paths], os.path.exists)
    assert catalog.holds(key(**stored))
    assert not catalog.holds(key(**asked))


# --- servers

FACTS = {
    "engine": "vllm 1",
    "device": "cpu",
    "model": "org/model",
    "revision": "main",
    "weights": "0" * 64,
    "hash_algorithm": "sha256",
    "hash_seed": "0",
}
PARALLEL = OffloadingParallelConfig(
    rank=0,
    world_size=1,
    tp_size=1,
    pp_size=1,
    pcp_size=1,
    dcp_size=1,
    data_parallel_index=0,
    data_parallel_size=1,
    data_parallel_rank_local=None,
    is_parallelism_agnostic=False,
)
SERVER = OffloadingConfig(
    groups=(OffloadingGroupConfig(16, ("layer",), 0),),
    worker_kv_bytes_per_block=4096,
    enable_kv_cache_events=False,
    extra_config={},
    engine_id="engine",
    model=OffloadingModelConfig("org/model", "bfloat16"),
    cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=16),
    parallel=PARALLEL,
    kv_cache_layout="NHD",
)


def place(root: Path, **changes: Any) -> Path:
    """Where a server's first rank keeps its files.

    Args:
        root: of the server.
        changes: to its facts, to its options (``namespace``), else to its configuration.
    """
    facts = {**FACTS, **{name: value for name, value in changes.items() if name in FACTS}}
    options = Config(root=root, namespace=changes.get("namespace", ""))
    others = {name: changes[name] for name in changes.keys() - FACTS.keys() - {"namespace"}}
    return rank_directory(
        build_identity(replace(SERVER, **others), options, facts).directory(root), 0
    )


OTHER_SERVERS: list[dict[str, Any]] = [
    *({name: "other"} for name in FACTS),
    {"model": "another/model"},
    {"namespace": "tenant"},
    {"cache": OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=16)},
    {"cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=8)},
    {"groups": (OffloadingGroupConfig(32, ("layer",), 0),)},
    {"groups": SERVER.groups * 2},
    {"kv_cache_layout": "HND"},
    {"kv_cache_layout": None},
    *(
        {"parallel": replace(PARALLEL, **{name: 2})}
        for name in ("tp_size", "pp_size", "pcp_size", "dcp_size")
    ),
]


@pytest.mark.parametrize("changes", OTHER_SERVERS, ids=str)
def test_another_server_looks_elsewhere(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours, theirs = ChunkPaths(place(tmp_path)), ChunkPaths(place(tmp_path, **changes))
    file = Path(ours.final(key()))
    file.parent.mkdir(parents=True)
    file.touch()
    options = Config(root=tmp_path, lookup_ttl_s=0)
    assert Catalog.of(options, [ours], os.path.exists).holds(key())
    assert not Catalog.of(options, [theirs], os.path.exists).holds(key())


@pytest.mark.parametrize("dtype", ["float16", "fp8_e4m3", "float32"])
def test_another_data_type_of_the_cache_looks_elsewhere(tmp_path: Path, dtype: str) -> None:
    changed = replace(SERVER, model=OffloadingModelConfig("org/model", dtype))
    directory = build_identity(changed, Config(root=tmp_path), FACTS).directory(tmp_path)
    assert directory != place(tmp_path).parent


def test_the_same_server_finds_its_files_wherever_it_runs(tmp_path: Path) -> None:
    assert place(tmp_path) == place(tmp_path, engine_id="another process")
    elsewhere = replace(PARALLEL, data_parallel_index=1, data_parallel_size=2)
    assert place(tmp_path) == place(tmp_path, parallel=elsewhere)


def test_another_rank_looks_elsewhere(tmp_path: Path) -> None:
    directory = place(tmp_path).parent
    names = {ChunkPaths(rank_directory(directory, rank)).final(key()) for rank in range(4)}
    assert len(names) == 4
