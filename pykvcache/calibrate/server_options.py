# SPDX-License-Identifier: Apache-2.0
"""The user's options for ``vllm serve``, with those of this backend that a measurement needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pykvcache.errors import ConfigError

BACKEND = "--kv-offloading-backend"
TRANSFER = "--kv-transfer-config"
EXTRA = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class UserOptions:
    """What the user gave.

    Attributes:
        rest: everything but the two options that are put together anew.
        transfer: of ``--kv-transfer-config``.
    """

    rest: tuple[str, ...]
    transfer: Mapping[str, Any]

    @property
    def backend(self) -> dict[str, Any]:
        """The options of this backend."""
        return dict(self.transfer.get(EXTRA, {}))

    def arguments(self, **options: Any) -> list[str]:
        """For ``vllm serve MODEL``, with these options of the backend over the user's."""
        transfer = {**self.transfer, EXTRA: {**self.backend, **options}}
        return [*self.rest, f"{BACKEND}=pykvcache", f"{TRANSFER}={json.dumps(transfer)}"]


def parse_options(arguments: Sequence[str]) -> UserOptions:
    """Take the options apart.

    Raises:
        ConfigError: another backend is chosen, or ``--kv-transfer-config`` is no JSON object.
    """
    rest: list[str] = []
    transfer: Mapping[str, Any] = {}
    left = [argument for argument in arguments if argument != "--"]
    while left:
        argument = left.pop(0)
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        if name.startswith(f"{TRANSFER}."):
            raise ConfigError(f"{argument}: give {TRANSFER} as one JSON object")
        if name not in (BACKEND, TRANSFER):
            rest.append(argument)
            continue
        if not equals:
            value = left.pop(0) if left else ""
        if name == TRANSFER:
            transfer = _transfer(value)
        elif value != "pykvcache":
            raise ConfigError(f"{BACKEND} is '{value}': must be pykvcache, or be left out")
    return UserOptions(tuple(rest), transfer)


def _transfer(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get(EXTRA, {}), dict):
        raise ConfigError(
            f"{TRANSFER} is '{text}': must be a JSON object, with another one as {EXTRA}"
        )
    return found
