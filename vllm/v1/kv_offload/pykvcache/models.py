# SPDX-License-Identifier: Apache-2.0
"""Which models can be served from files, and which would answer wrongly and are refused.

The rule behind it: a chunk is found by a hash of the tokens up to its end, so its bytes must
depend on nothing else. vLLM knows where that, or continuing from such bytes, fails, and turns
its own prefix caching off there, after saying so in its log: encoder-decoder and bidirectional
models, sparse windows of generated tokens (R-SWA), and its reference kernel for MLA on CPU,
whose answers after a cached prefix are wrong. It does not turn a connector off with it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform

from pykvcache.config import Config
from pykvcache.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PREFIX_LM_TYPES = frozenset({"hrm_text"})
"""Models whose prompt attends to itself in both directions. vLLM learns of it from the loaded
layers and turns prefix caching off only then, too late for a look at its configuration."""


def check_model(vllm_config: VllmConfig, config: Config) -> None:
    """Refuse what cannot be served from files.

    Call it once vLLM has decided about prefix caching.

    Raises:
        ConfigError: it names the property of the model and what would do.
    """
    model = vllm_config.model_config
    if model.is_encoder_decoder:
        raise ConfigError(
            f"model '{model.model}' is an encoder-decoder: the KV of its cross-attention depends "
            "on the encoder's input, which no hash of tokens covers; serve a decoder-only model, "
            "or leave --kv-offloading-backend pykvcache out"
        )
    if getattr(model.hf_text_config, "model_type", None) in _PREFIX_LM_TYPES:
        raise ConfigError(
            f"model '{model.model}' attends to its whole prompt in both directions, so the KV of "
            "a prefix depends on what follows it; leave --kv-offloading-backend pykvcache out"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(_no_prefix_caching(vllm_config))
    if vllm_config.lora_config is not None and not config.namespace:
        raise ConfigError(
            "option 'namespace' is '' with LoRA enabled: vLLM tells adapters apart by name and "
            "path, and files outlive an adapter that is trained again under the same path; set "
            "'namespace' to a name of this set of adapters and change it when one changes"
        )


def _no_prefix_caching(vllm_config: VllmConfig) -> str:
    model = vllm_config.model_config
    if current_platform.is_cpu() and model.use_mla and not torch.cpu._is_amx_tile_supported():
        return (
            f"model '{model.model}' uses multi-head latent attention (MLA), and this CPU has no "
            "AMX: vLLM's kernel for it answers wrongly after a cached prefix, so vLLM turns "
            "prefix caching off; serve it on a GPU or on a CPU with AMX"
        )
    return (
        "--kv-offloading-backend pykvcache needs prefix caching, and it is off for model "
        f"'{model.model}': leave --no-enable-prefix-caching out; if it isn't given, vLLM turned "
        "prefix caching off because the KV of this model cannot be reused (its log says why), "
        "neither from memory nor from files"
    )


def has_recurrent_state(vllm_config: VllmConfig) -> bool:
    """Whether some layers keep one state instead of KV for each token (Mamba and the like)."""
    model = vllm_config.model_config
    return bool(model.is_hybrid or model.is_attention_free)


def check_groups(
    tokens_per_block: Collection[int], *, recurrent: bool, prompts_only: bool, config: Config
) -> None:
    """Refuse options that the model's KV cache groups rule out.

    Args:
        tokens_per_block: of each group.
        recurrent: :func:`has_recurrent_state`.
        prompts_only: vLLM's ``offload_prompt_only``.
        config: the options.

    Raises:
        ConfigError: it names the option and what would do.
    """
    default = Config.model_fields["tokens_per_chunk"].default
    largest = max(tokens_per_block)
    if recurrent and config.tokens_per_chunk not in (default, largest):
        raise ConfigError(
            f"option 'tokens_per_chunk' is {config.tokens_per_chunk}: the recurrent state of this "
            f"model exists at the borders of blocks of {largest} tokens, so that a chunk is one "
            f"block; use {largest}, or leave the option out"
        )
    if not prompts_only and len(set(tokens_per_block)) > 1:
        raise ConfigError(
            "option 'offload_prompt_only' is False: the KV cache groups of this model have blocks "
            f"of different sizes ({', '.join(map(str, sorted(set(tokens_per_block))))} tokens), "
            "and for those vLLM may name a sliding window's blocks after it gave them to another "
            "request; leave the option out"
        )
