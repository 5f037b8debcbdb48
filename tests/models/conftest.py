# SPDX-License-Identifier: Apache-2.0
"""Engines with tiny models on this backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.installed import items_for_this_build
from tests.models.tiny import make_checkpoint

_ENGINE_FREE = {"test_facts.py", "test_refused_models.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items_for_this_build(items, Path(__file__).parent):
        if item.path.name not in _ENGINE_FREE:
            item.add_marker(pytest.mark.e2e)


class Checkpoints:
    """Checkpoints of tiny models, each made when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __getitem__(self, name: str) -> Path:
        return make_checkpoint(name, self._directory)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
