# SPDX-License-Identifier: Apache-2.0
"""The distribution that these tests run with is ours and complete."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.packaging.checkouts import REPOSITORY

BACKEND = "vllm/v1/kv_offload/pykvcache"


@pytest.fixture(scope="module")
def installed() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        pytest.fail("the distribution isn't installed in this environment; run `make env`")


def is_editable(found: importlib.metadata.Distribution) -> bool:
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    return bool(origin.get("dir_info", {}).get("editable"))


def package_folder() -> Path:
    """Where `import vllm` finds the package; importing it here would take seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None, "`vllm` is the overlay's folder: nothing is installed"
    return Path(spec.origin).parent


def test_name_and_version(installed: importlib.metadata.Distribution) -> None:
    assert installed.metadata["Name"] == "vllm"
    assert re.fullmatch(r"\d+\.\d+\.\d+\+(cpu\.)?pykvcache\.\d+", installed.version)


def test_module_has_the_distributions_version(
    installed: importlib.metadata.Distribution,
) -> None:
    module = package_folder() / "_version.py"
    assert f"= {installed.version!r}" in module.read_text("utf-8")


def test_backend_is_installed(installed: importlib.metadata.Distribution) -> None:
    """Its files are in RECORD or, in an editable install, linked from this checkout."""
    ours = [path.name for path in (REPOSITORY / BACKEND).glob("*.py")]
    assert ours
    if is_editable(installed):
        linked = package_folder().parent / BACKEND
        assert linked.is_symlink()
        assert linked.resolve() == REPOSITORY / BACKEND
    else:
        recorded = {str(path) for path in installed.files or ()}
        assert {f"{BACKEND}/{name}" for name in ours} <= recorded


def test_api_is_found_by_its_entry_point(installed: importlib.metadata.Distribution) -> None:
    found = installed.entry_points.select(group="vllm.endpoint_plugins", name="pykvcache")
    assert [point.value for point in found] == [
        "vllm.v1.kv_offload.pykvcache.control:ControlPlugin"
    ]


def test_requirements_are_ours_and_upstreams(
    installed: importlib.metadata.Distribution,
) -> None:
    requires = installed.requires or []
    for project in ("pydantic", "torch", "numpy"):
        assert any(re.match(rf"{project}\b", line) for line in requires), project


def test_no_other_distribution_owns_the_package() -> None:
    owners = set(importlib.metadata.packages_distributions().get("vllm", []))
    assert owners <= {"vllm"}
