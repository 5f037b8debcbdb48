# SPDX-License-Identifier: Apache-2.0
"""Real servers with a real model on this backend, in float32 so that answers can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.model import ensure_model
from scripts.serving import Prompts, Server
from tests.e2e.sites import FaultySite, Site
from tests.installed import items_for_this_build


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items_for_this_build(items, Path(__file__).parent):
        item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def model() -> Path:
    return ensure_model()


@pytest.fixture(scope="session")
def prompts(model: Path) -> Prompts:
    return Prompts(model)


@pytest.fixture(scope="module")
def site(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Site:
    """Where one module's servers work."""
    return Site(model, tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2]))


@pytest.fixture(scope="session")
def faulty_site(model: Path, tmp_path_factory: pytest.TempPathFactory) -> FaultySite:
    """Where the server works whose files are damaged between look-up and load."""
    return FaultySite(model, tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def faulty_server(faulty_site: FaultySite) -> Iterator[Server]:
    """One server for every test that forgets what is in memory instead of restarting."""
    with faulty_site.faulty_server() as server:
        yield server
