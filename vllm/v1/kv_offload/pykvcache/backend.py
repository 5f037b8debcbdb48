# SPDX-License-Identifier: Apache-2.0
"""`--kv-offloading-backend pykvcache`: what the flag means for vLLM's configuration."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from pykvcache.config import GIB, Config, parse_config
from pykvcache.errors import ConfigError
from pykvcache.gate.calibration import speed_settings
from pykvcache.startup import check_root

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = init_logger(__name__)

SPEC_NAME = "PyKVCacheSpec"
SETTINGS_KEY = "pykvcache"
"""Where the validated settings travel in ``kv_connector_extra_config``."""

POOL_GIB_DEFAULT = 2.0
"""GiB of ``--kv-offloading-size`` when it is not given: some 60 chunks of 32 MiB, far
beyond what the disk's queue needs, and small beside a server's memory."""


def configure(vllm_config: VllmConfig) -> None:
    """Select vLLM's offloading connector with this backend's spec.

    Raises:
        ConfigError: a bad option, or a combination that cannot work.
    """
    from vllm.config import KVTransferConfig

    from vllm.v1.kv_offload.pykvcache.control_worker import extend_worker
    from vllm.v1.kv_offload.pykvcache.facts import model_facts
    from vllm.v1.kv_offload.pykvcache.models import check_model, has_recurrent_state

    transfer = vllm_config.kv_transfer_config or KVTransferConfig()
    if transfer.kv_connector not in (None, "OffloadingConnector"):
        raise ConfigError(
            f"--kv-offloading-backend pykvcache is combined with kv_connector "
            f"'{transfer.kv_connector}': leave kv_connector out of --kv-transfer-config"
        )
    extra = transfer.kv_connector_extra_config
    if SETTINGS_KEY in extra:  # configured already: the config is validated more than once
        return
    config = parse_config(extra)
    size_gib = vllm_config.cache_config.kv_offloading_size
    if size_gib is None:
        size_gib = POOL_GIB_DEFAULT
    if not 0 < size_gib < float("inf"):
        raise ConfigError(f"option --kv-offloading-size is {size_gib}: must be above 0, in GiB")
    check_model(vllm_config, config)
    check_root(config)
    extra.update(
        spec_name=SPEC_NAME,
        **{
            SETTINGS_KEY: {
                "config": config.model_dump(mode="json"),
                "pool_bytes": int(size_gib * GIB),
                "recurrent": has_recurrent_state(vllm_config),
                "facts": model_facts(vllm_config),
                "tokens_max": vllm_config.model_config.max_model_len,
                "speed": speed_settings(vllm_config),
            }
        },
    )
    transfer.kv_connector = "OffloadingConnector"
    transfer.kv_role = "kv_both"
    if transfer.kv_load_failure_policy is None:
        transfer.kv_load_failure_policy = "recompute"
    vllm_config.kv_transfer_config = transfer
    extend_worker(vllm_config)


@contextmanager
def logged_refusal() -> Iterator[None]:
    """Say in one line why the server cannot start; vLLM's own report of a failed start is
    many tracebacks, and the reason is in the first."""
    try:
        yield
    except ConfigError as error:
        logger.error("KV offloading cannot start: %s", error)
        raise


def settings_of(extra_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What :func:`configure` left in the extra config.

    Raises:
        ConfigError: the spec was selected without the flag.
    """
    try:
        settings: Mapping[str, Any] = extra_config[SETTINGS_KEY]
    except KeyError:
        raise ConfigError(
            f"spec_name is '{SPEC_NAME}' without --kv-offloading-backend pykvcache: use the flag, "
            "which also tells the backend what the KV cache depends on"
        ) from None
    return settings


def resolve_blocks_per_chunk(
    extra_config: Mapping[str, Any], tokens_per_block: Collection[int]
) -> int:
    """How many blocks make a chunk.

    Groups may have blocks of different sizes; the largest decides, and a block larger than
    the chunk is a chunk by itself. So is a block where a model has recurrent state: the one
    that vLLM keeps for a prompt lies at its last block border, rarely at one of larger chunks.

    Raises:
        ConfigError: ``tokens_per_chunk`` was chosen and is not a multiple of the block size,
            or the model's KV cache groups rule an option out.
    """
    from vllm.v1.kv_offload.pykvcache.models import check_groups

    settings = settings_of(extra_config)
    config = Config(**settings["config"])
    recurrent = bool(settings.get("recurrent"))
    check_groups(
        tokens_per_block,
        recurrent=recurrent,
        prompts_only=bool(extra_config.get("offload_prompt_only", True)),
        config=config,
    )
    if recurrent:
        return 1
    largest = max(tokens_per_block)
    blocks, rest = divmod(config.tokens_per_chunk, largest)
    default = Config.model_fields["tokens_per_chunk"].default
    if (rest or not blocks) and config.tokens_per_chunk != default:
        nearest = max(1, round(config.tokens_per_chunk / largest)) * largest
        raise ConfigError(
            f"option 'tokens_per_chunk' is {config.tokens_per_chunk}: must be a multiple of the "
            f"KV cache's block size, {largest} tokens, such as {nearest}"
        )
    return max(1, blocks)


def layout_facts(config: OffloadingConfig, options: Config) -> dict[str, Any]:
    """The fields of an identity that the offloading configuration and the options tell."""
    parallel = config.parallel
    return {
        "cache_dtype": config.model.dtype,
        "kv_cache_layout": str(config.kv_cache_layout),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_block": tuple(group.tokens_per_block for group in config.groups),
        "tensor_parallel_size": parallel.tp_size,
        "pipeline_parallel_size": parallel.pp_size,
        "prefill_context_parallel_size": parallel.pcp_size,
        "decode_context_parallel_size": parallel.dcp_size,
        "namespace": options.namespace,
    }
