# SPDX-License-Identifier: Apache-2.0
"""What vLLM's configuration says about the bytes of the KV cache: the identity's fields.

They are taken where the whole configuration is at hand, once, and travel to every
process of the server in the connector's extra config, so that all of them agree.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import CpuArchEnum, current_platform
from vllm.version import __version__  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".gguf", ".pt"})


def model_facts(vllm_config: VllmConfig) -> dict[str, Any]:
    """Fields of :class:`pykvcache.identity.Identity` that need the whole configuration."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    return {
        "engine": f"vllm {__version__.partition('+')[0]}",
        "device": _device(vllm_config),
        "model": str(model.model),
        "revision": _revision(str(model.model), model.revision),
        "weights": _weights_fingerprint(vllm_config),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_seed": _hash_seed(str(cache.prefix_caching_hash_algo)),
    }


def _device(vllm_config: VllmConfig) -> str:
    """The device, the attention backend if chosen, and on CPU the instruction set: its
    kernels pack keys for it (AMX tiles, for one)."""
    backend = getattr(vllm_config.attention_config, "backend", None)
    parts = [current_platform.device_type, str(getattr(backend, "name", backend) or "auto")]
    if current_platform.is_cpu():
        arch = current_platform.get_cpu_architecture()
        parts.append(arch.name.lower())
        if arch == CpuArchEnum.X86:
            parts.append(torch.backends.cpu.get_cpu_capability().lower())
            if torch.cpu._is_amx_tile_supported():
                parts.append("amx")
    return " ".join(parts)


def _revision(model: str, revision: str | None) -> str:
    """The commit of a model from a hub, where its cache tells; a branch name moves."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(model).exists():
        return revision or ""
    try:
        path = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return revision or ""
    return Path(path).parent.name if isinstance(path, str) else revision or ""


def _weights_fingerprint(vllm_config: VllmConfig) -> str:
    """SHA-256, in hex, of what computes the KV: the model's effective configuration and, of a
    local checkpoint, samples of the weights. A model from a hub has its revision for those."""
    digest = hashlib.sha256(_effective_configuration(vllm_config).encode())
    directory = Path(vllm_config.model_config.model)
    if directory.is_dir():
        for path in sorted(directory.iterdir()):
            if path.suffix in _WEIGHT_SUFFIXES and path.is_file():
                digest.update(path.name.encode())
                _digest_samples(digest, path)
    return digest.hexdigest()


def _effective_configuration(vllm_config: VllmConfig) -> str:
    """The configuration that the model runs with, overrides applied, as JSON: the same weights
    give other KV with another RoPE, another data type or quantized while loading. Dummy
    weights are not those of the checkpoint; a draft model's KV lies beside the model's."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    draft = vllm_config.speculative_config
    config = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    facts = {
        "config": config,
        "dtype": str(model.dtype),
        "quantization": [str(model.quantization), str(model.quantization_config)],
        "dummy": vllm_config.load_config.load_format == "dummy",
        "draft": [str(draft.method), str(draft.model), str(draft.revision)] if draft else [],
        "interleave": parallel.cp_kv_cache_interleave_size,
    }
    return json.dumps(facts, sort_keys=True, default=_stable_text)


def _stable_text(value: object) -> Any:
    """For what JSON doesn't know: a text that is the same in every process."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value) if isinstance(value, torch.dtype | Path) else type(value).__qualname__


def _digest_samples(digest: hashlib._Hash, path: Path) -> None:
    """Evenly spaced, the first and the last bytes among them."""
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    last = max(0, size - _SAMPLE_BYTES)
    with path.open("rb") as file:
        for offset in sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)}):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))


def _hash_seed(algorithm: str) -> str:
    """What block hashes start from. vLLM seeds algorithms that are not collision resistant
    at random for each process unless PYTHONHASHSEED is set: nothing could be found again,
    so such a server gets files of its own."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import _NON_CRYPTO_HASH_FUNCTIONS, DEFAULT_NONE_HASH_SEED

    seed = os.getenv("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if get_hash_fn_by_name(algorithm) in _NON_CRYPTO_HASH_FUNCTIONS:
        return f"random {os.urandom(8).hex()}"
    return DEFAULT_NONE_HASH_SEED
