# SPDX-License-Identifier: Apache-2.0
"""Fixtures: checkouts in miniature."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.packaging.checkouts import ALL_PLATFORMS, REPOSITORY, Checkout, make_checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Built on a wheel for one platform, as upstream's are."""
    return make_checkout(tmp_path)


@pytest.fixture
def installable(tmp_path: Path) -> Checkout:
    """A checkout that the real pip can build and install on any machine."""
    checkout = make_checkout(tmp_path, ALL_PLATFORMS)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(REPOSITORY / name, checkout.root)
    shutil.copytree(
        REPOSITORY / "scripts" / "distribution",
        checkout.root / "scripts" / "distribution",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return checkout
