# SPDX-License-Identifier: Apache-2.0
"""What is said of options that are refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from pydantic import ValidationError

#: Keys of ``kv_connector_extra_config`` that vLLM's offloading connector reads itself.
CONNECTOR_KEYS = frozenset({"spec_name", "offload_prompt_only"})

#: Keys of vLLM's connector that would contradict an option of ours: what to use instead.
REPLACED_KEYS = {
    "block_size": "use 'tokens_per_chunk'",
    "blocks_per_chunk": "use 'tokens_per_chunk'",
    "cpu_bytes_to_use": "use --kv-offloading-size",
    "canonical_layout": "this backend stores each rank's own pages",
    "spec_module_path": "use --kv-offloading-backend pykvcache",
    "sync_load_budget_bytes": "this backend loads between steps, never inside one",
    "secondary_tiers": "this backend has no further tiers",
    "self_describing_kv_events": "this backend publishes no KV events",
}


def unknown_option(key: str, known: Iterable[str]) -> str:
    """The message for an option that doesn't exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"unknown option '{key}': {hint}known options are {', '.join(names)}"


def replaced_option(key: str) -> str:
    """The message for one of :data:`REPLACED_KEYS`."""
    return f"option '{key}' does not apply to the pykvcache backend: {REPLACED_KEYS[key]}"


def describe_errors(error: ValidationError, origins: Mapping[str, str]) -> str:
    """One line that names each refused option, its value and what is accepted.

    Args:
        error: pydantic's.
        origins: for options that were not given explicitly, a remark on where they came from.
    """
    lines = []
    for detail in error.errors():
        message = detail["msg"].removeprefix("Value error, ")
        if not detail["loc"]:  # a combination, which the message names itself
            lines.append(message)
            continue
        name = str(detail["loc"][0])
        origin = f"option '{name}'{origins.get(name, '')}"
        lines.append(f"{origin} is {detail['input']!r}: {message[0].lower()}{message[1:]}")
    return "; ".join(lines)
