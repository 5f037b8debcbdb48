# SPDX-License-Identifier: Apache-2.0
"""Tests that need an engine of this project's build.

Elsewhere they are skipped, and tests/packaging fails instead: it wants that build installed.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest


def items_for_this_build(items: list[pytest.Item], folder: Path) -> Iterator[pytest.Item]:
    """The folder's tests, marked to be skipped where another vLLM, or none, is installed."""
    version = vllm_version()
    for item in items:
        if folder not in item.path.parents:
            continue
        if "pykvcache" not in version:
            item.add_marker(pytest.mark.skip(reason=f"needs this project's vLLM, not {version}"))
        yield item


def vllm_version() -> str:
    """Of the installed one; 'none' if there is none."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "none"
