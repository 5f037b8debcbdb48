# SPDX-License-Identifier: Apache-2.0
"""Tiny randomly initialised checkpoints, one for each way vLLM lays out a KV cache.

The weights are drawn wide, so that attention is far from uniform and a wrong block of KV moves
every logprob after it; with the usual initialisation it would hide in the rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 256
POSITIONS = 4096
WINDOW = 160
"""Tokens of a sliding window: more than one block of 128 tokens, less than two."""

_HEAD = 32  # the smallest head size that vLLM's CPU attention takes
_HIDDEN = 64
_SPREAD = 0.25
"""Standard deviation of the weights, some ten times the usual."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": 2 * _HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": _HEAD,
    "max_position_embeddings": POSITIONS,
    "initializer_range": _SPREAD,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_COMMON, num_hidden_layers=2)


def _mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_COMMON, num_hidden_layers=2, sliding_window=WINDOW)


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=5,
        layer_types=["sliding_attention"] * 2
        + ["full_attention"]
        + ["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        query_pre_attn_scalar=_HEAD,
    )


def _gemma4() -> Any:
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        **_COMMON,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        per_layer_config={"01": {"head_dim": 4 * _HEAD}, "03": {"head_dim": 4 * _HEAD}},
        global_head_dim=4 * _HEAD,
        sliding_window=WINDOW,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    )


def _deepseek_v2() -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **{**_COMMON, "num_key_value_heads": 4, "head_dim": 64},
        num_hidden_layers=2,
        first_k_dense_replace=2,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=_HIDDEN,
        # The one latent size that vLLM's CPU kernel for it is compiled for.
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **{**_COMMON, "num_key_value_heads": 4, "head_dim": 128},
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        # The kernel takes no smaller heads.
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=_HIDDEN,
        shared_expert_intermediate_size=_HIDDEN,
        mlp_only_layers=[1],  # vLLM wants one layer with experts
    )


def _lfm2() -> Any:
    from transformers import Lfm2Config

    return Lfm2Config(
        **{**_COMMON, "num_attention_heads": 2, "num_key_value_heads": 1},
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        conv_L_cache=3,
        conv_dim=_HIDDEN,
        block_dim=_HIDDEN,
        block_multiple_of=16,
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "deepseek_v2": _deepseek_v2,
    "qwen3_next": _qwen3_next,
    "lfm2": _lfm2,
}


def make_checkpoint(name: str, directory: Path) -> Path:
    """Write the named model with random weights, the same ones each time.

    Returns:
        ``directory / name``, with config.json and the weights; it has no tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM

    path = directory / name
    if not path.exists():
        torch.manual_seed(20240229)
        model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float32)
        model.save_pretrained(path)
    return path
