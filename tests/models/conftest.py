# SPDX-License-Identifier: Apache-2.0
"""Engines with tiny models on this backend."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from tests.models.tiny import make_checkpoint

_ENGINE_FREE = {"test_facts.py", "test_refused_models.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    version = _vllm_version()
    for item in items:
        if here not in item.path.parents:
            continue
        if item.path.name not in _ENGINE_FREE:
            item.add_marker(pytest.mark.e2e)
        if "pykvcache" not in version:
            item.add_marker(pytest.mark.skip(reason=f"needs this project's vLLM, not {version}"))


def _vllm_version() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "none"


class Checkpoints:
    """Checkpoints of tiny models, each made when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __getitem__(self, name: str) -> Path:
        return make_checkpoint(name, self._directory)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
