# SPDX-License-Identifier: Apache-2.0
"""Models that would answer wrongly from files are refused when the server starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.models", reason="needs the patched vLLM")

from pykvcache.config import Config
from pykvcache.errors import ConfigError
from vllm.v1.kv_offload.pykvcache import models
from vllm.v1.kv_offload.pykvcache.backend import resolve_blocks_per_chunk
from vllm.v1.kv_offload.pykvcache.models import check_model, has_recurrent_state


def vllm_config(*, prefix_caching: bool = True, lora: object = None, **model: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **{
                "model": "some/model",
                "is_encoder_decoder": False,
                "is_hybrid": False,
                "is_attention_free": False,
                "use_mla": False,
                "hf_text_config": SimpleNamespace(model_type="llama"),
                **model,
            }
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        lora_config=lora,
    )


def settings(*, recurrent: bool = False, **options: Any) -> dict[str, Any]:
    """The connector's extra config, as the flag leaves it."""
    prompts_only = options.pop("offload_prompt_only", True)
    config = Config(**options).model_dump(mode="json")
    return {
        "offload_prompt_only": prompts_only,
        "pykvcache": {"config": config, "pool_bytes": 1, "recurrent": recurrent, "facts": {}},
    }


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"is_hybrid": True},
        {"use_mla": True},
    ],
    ids=["plain", "hybrid", "MLA"],
)
def test_a_model_whose_kv_vllm_reuses_is_served(model: dict[str, Any]) -> None:
    check_model(vllm_config(**model), Config())


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'some/model' is an encoder-decoder.*decoder-only"):
        check_model(vllm_config(is_encoder_decoder=True, prefix_caching=False), Config())


def test_a_prefix_language_model_is_refused() -> None:
    config = vllm_config(hf_text_config=SimpleNamespace(model_type="hrm_text"))
    with pytest.raises(ConfigError, match=r"'some/model' attends .* in both directions"):
        check_model(config, Config())


def test_what_vllm_cannot_reuse_in_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs prefix caching.*--no-enable-prefix-caching"):
        check_model(vllm_config(prefix_caching=False), Config())


@pytest.mark.parametrize(("amx", "message"), [(False, "no AMX"), (True, "needs prefix caching")])
def test_mla_on_a_cpu_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, amx: bool, message: str
) -> None:
    monkeypatch.setattr(models.current_platform, "is_cpu", lambda: True, raising=False)
    monkeypatch.setattr(models.torch.cpu, "_is_amx_tile_supported", lambda: amx)
    with pytest.raises(ConfigError, match=message):
        check_model(vllm_config(use_mla=True, prefix_caching=False), Config())


def test_lora_needs_a_namespace() -> None:
    with pytest.raises(ConfigError, match=r"option 'namespace' is '' with LoRA"):
        check_model(vllm_config(lora=object()), Config())
    check_model(vllm_config(lora=object()), Config(namespace="adapters-7"))


@pytest.mark.parametrize(
    ("model", "recurrent"),
    [({}, False), ({"is_hybrid": True}, True), ({"is_attention_free": True}, True)],
)
def test_which_models_have_recurrent_state(model: dict[str, Any], recurrent: bool) -> None:
    assert has_recurrent_state(vllm_config(**model)) is recurrent


@pytest.mark.parametrize(
    ("options", "recurrent", "tokens_per_block", "blocks"),
    [
        ({}, False, [16], 16),
        ({}, False, [128, 128], 2),
        ({}, False, [512, 128], 1),
        ({"tokens_per_chunk": 512}, False, [128], 4),
        ({}, True, [128, 128], 1),
        ({}, True, [528], 1),
        ({"tokens_per_chunk": 528}, True, [528, 528], 1),
    ],
)
def test_blocks_of_a_chunk(
    options: dict[str, Any], recurrent: bool, tokens_per_block: list[int], blocks: int
) -> None:
    extra = settings(recurrent=recurrent, **options)
    assert resolve_blocks_per_chunk(extra, tokens_per_block) == blocks


def test_a_chunk_with_recurrent_state_is_one_block() -> None:
    extra = settings(recurrent=True, tokens_per_chunk=512)
    with pytest.raises(ConfigError, match=r"option 'tokens_per_chunk' is 512:.*use 128"):
        resolve_blocks_per_chunk(extra, [128, 128])


def test_generated_tokens_of_groups_with_different_blocks_are_not_stored() -> None:
    extra = settings(offload_prompt_only=False)
    assert resolve_blocks_per_chunk(extra, [128, 128]) == 2
    with pytest.raises(ConfigError, match=r"option 'offload_prompt_only' is False.*128, 512"):
        resolve_blocks_per_chunk(extra, [512, 128])
