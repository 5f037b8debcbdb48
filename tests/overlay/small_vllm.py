# SPDX-License-Identifier: Apache-2.0
"""A model, caches and configurations that are small, for vLLM's real scheduler and connector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

TOKENS_PER_BLOCK = 16
BLOCKS_PER_CHUNK = 2
TOKENS_PER_CHUNK = TOKENS_PER_BLOCK * BLOCKS_PER_CHUNK
NUM_GPU_BLOCKS = 200
MODEL_TOKENS_MAX = 2048


def opt_folder(folder: Path, **changes: Any) -> Path:
    """Write the configuration of a one-layer OPT into the folder."""
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 16,
        "ffn_dim": 16,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "max_position_embeddings": MODEL_TOKENS_MAX,
        "vocab_size": 4096,
        "word_embed_proj_dim": 16,
        "torch_dtype": "float32",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def full_attention() -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=TOKENS_PER_BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32
    )


def sliding_window() -> KVCacheSpec:
    """A window of two chunks."""
    return SlidingWindowSpec(
        block_size=TOKENS_PER_BLOCK,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        sliding_window=2 * TOKENS_PER_CHUNK,
    )


def kv_cache_config(specs: tuple[KVCacheSpec, ...]) -> KVCacheConfig:
    """A KV cache with a group of one layer for each spec."""
    groups = [KVCacheGroupSpec([f"layer{at}"], spec) for at, spec in enumerate(specs)]
    return KVCacheConfig(
        num_blocks=NUM_GPU_BLOCKS,
        kv_cache_groups=groups,
        kv_cache_tensors=[
            KVCacheTensor(
                size=group.kv_cache_spec.page_size_bytes * NUM_GPU_BLOCKS,
                layers=group.layer_names,
                layer_stride=group.kv_cache_spec.page_size_bytes * NUM_GPU_BLOCKS,
                block_stride=group.kv_cache_spec.page_size_bytes,
            )
            for group in groups
        ],
    )


def device_caches(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """What a model runner registers with a connector."""
    return {
        name: torch.zeros(NUM_GPU_BLOCKS, 2, TOKENS_PER_BLOCK, 1, 8)
        for group in config.kv_cache_groups
        for name in group.layer_names
    }


def offloading_config(
    model_dir: Path,
    spec_name: str,
    *,
    inside_multi_connector: bool = False,
    connector: dict[str, Any] | None = None,
    **scheduling: Any,
) -> VllmConfig:
    """A configuration that offloads with the spec.

    Args:
        model_dir: see :func:`opt_folder`.
        spec_name: as registered with vLLM's factory of offloading specs.
        inside_multi_connector: whether the offloading connector is a child.
        connector: more fields of the outermost connector's configuration.
        scheduling: fields of the scheduler's configuration.
    """
    cache = CacheConfig(block_size=TOKENS_PER_BLOCK, enable_prefix_caching=True)
    cache.kv_cache_layout = "LBNHC"
    cache.num_gpu_blocks = NUM_GPU_BLOCKS
    transfer: dict[str, Any] = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": spec_name, "block_size": TOKENS_PER_CHUNK},
    }
    if inside_multi_connector:
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [transfer]},
        }
    return VllmConfig(
        model_config=ModelConfig(
            model=str(model_dir),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=MODEL_TOKENS_MAX,
        ),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=2 * MODEL_TOKENS_MAX,
            max_model_len=MODEL_TOKENS_MAX,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=False,
            **scheduling,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**transfer, **(connector or {})),
    )
