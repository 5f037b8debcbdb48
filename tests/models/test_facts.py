# SPDX-License-Identifier: Apache-2.0
"""Whatever makes the same checkpoint compute other KV makes another identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("vllm.v1.kv_offload.pykvcache.facts", reason="needs the patched vLLM")

from vllm.config import CacheConfig, DeviceConfig, LoadConfig, ModelConfig, VllmConfig

from vllm.v1.kv_offload.pykvcache.facts import model_facts

CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 16,
    "ffn_dim": 16,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 16,
    "torch_dtype": "float32",
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"weight": np.zeros(1 << 18, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def facts(checkpoint: Path, *, load_format: str = "auto", **model: Any) -> dict[str, Any]:
    arguments = {"skip_tokenizer_init": True, "dtype": "float32", **model}
    return model_facts(
        VllmConfig(
            model_config=ModelConfig(model=str(checkpoint), **arguments),
            cache_config=CacheConfig(block_size=32),
            device_config=DeviceConfig("cpu"),
            load_config=LoadConfig(load_format=load_format),
        )
    )


def test_the_same_server_has_the_same_facts(checkpoint: Path) -> None:
    assert facts(checkpoint) == facts(checkpoint)


def test_a_shorter_limit_changes_nothing(checkpoint: Path) -> None:
    assert facts(checkpoint, max_model_len=128) == facts(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"hf_overrides": {"activation_function": "gelu"}}, id="overridden config"),
        pytest.param({"dtype": "bfloat16"}, id="data type"),
        pytest.param({"load_format": "dummy"}, id="dummy weights"),
        pytest.param({"revision": "other"}, id="revision"),
    ],
)
def test_what_changes_the_kv_changes_the_facts(checkpoint: Path, change: dict[str, Any]) -> None:
    assert facts(checkpoint, **change) != facts(checkpoint)


@pytest.mark.parametrize("place", [-1, -(1 << 19), -(1 << 20)])
def test_other_weights_are_another_model(checkpoint: Path, place: int) -> None:
    before = facts(checkpoint)
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[place] ^= 1
    weights.write_bytes(content)
    assert facts(checkpoint) != before


def test_another_configuration_file_is_another_model(checkpoint: Path) -> None:
    before = facts(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}))
    assert facts(checkpoint) != before
