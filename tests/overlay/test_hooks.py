# SPDX-License-Identifier: Apache-2.0
"""What the patches add to vLLM's own modules is there and reaches the overlay."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.failures", reason="needs the patched vLLM")

from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.config.cache import KVOffloadingBackend
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from tests.overlay.small_vllm import opt_folder
from vllm.v1.kv_offload.pykvcache import backend


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = opt_folder(tmp_path_factory.mktemp("model"), vocab_size=128)
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32")


def vllm_config(model_config: ModelConfig, **cache: Any) -> VllmConfig:
    return VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=32, **cache),
        device_config=DeviceConfig("cpu"),
    )


def test_backend_is_a_choice_of_the_flag() -> None:
    assert "pykvcache" in get_args(KVOffloadingBackend)


@pytest.mark.parametrize("size_gib", [None, 4.0])
def test_flag_reaches_the_overlay_with_and_without_a_size(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch, size_gib: float | None
) -> None:
    sizes: list[float | None] = []

    def configure(config: VllmConfig) -> None:
        sizes.append(config.cache_config.kv_offloading_size)

    monkeypatch.setattr(backend, "configure", configure)
    vllm_config(model_config, kv_offloading_backend="pykvcache", kv_offloading_size=size_gib)
    assert set(sizes) == {size_gib}


def test_other_backends_do_not_reach_the_overlay(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def configure(config: VllmConfig) -> None:
        pytest.fail("called for another backend")

    monkeypatch.setattr(backend, "configure", configure)
    assert vllm_config(model_config).kv_transfer_config is None
    native = vllm_config(model_config, kv_offloading_size=1.0).kv_transfer_config
    assert native is not None
    assert native.kv_connector == "OffloadingConnector"
    assert native.kv_load_failure_policy is None


def test_load_failure_policy_can_be_left_to_the_backend() -> None:
    assert KVTransferConfig().kv_load_failure_policy is None
    for policy in ("recompute", "fail"):
        assert KVTransferConfig(kv_load_failure_policy=policy).kv_load_failure_policy == policy
    with pytest.raises(ValueError, match="kv_load_failure_policy"):
        KVTransferConfig(kv_load_failure_policy="retry")  # type: ignore[arg-type]


def test_spec_is_registered_and_not_imported_before_it_is_used() -> None:
    assert "PyKVCacheSpec" in OffloadingSpecFactory._registry
    program = (
        "import sys; import vllm.v1.kv_offload.factory;"
        "sys.exit('vllm.v1.kv_offload.pykvcache.spec' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()


def test_connector_has_no_worker_statistics_for_other_backends() -> None:
    connector = OffloadingConnector.__new__(OffloadingConnector)
    connector.connector_scheduler = None
    connector.connector_worker = SimpleNamespace(worker=object())  # type: ignore[assignment]
    assert connector.get_kv_connector_stats() is None
