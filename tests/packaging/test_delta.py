# SPDX-License-Identifier: Apache-2.0
"""The distribution as changes to an installed vLLM: together they are what the wheel would be."""

from __future__ import annotations

import importlib.metadata
import shutil
import zipfile
from pathlib import Path

import pytest

from scripts.distribution.archive import record_hash
from scripts.distribution.contents import Project
from scripts.distribution.delta import (
    Installed,
    add_requirements,
    project_for,
    write_delta,
)
from scripts.distribution.errors import BuildError
from scripts.distribution.wheel import build_wheel
from tests.packaging.checkouts import VERSION, Checkout, edited, patch_text

INFO = f"vllm-{VERSION}.dist-info"


@pytest.fixture
def checkout(checkout: Checkout) -> Checkout:
    """Without requirements of its own, which nothing would install."""
    checkout.pin()
    return checkout


@pytest.fixture
def site(checkout: Checkout, tmp_path: Path) -> Path:
    """The upstream wheel, installed: with a command, and what installers leave."""
    folder = tmp_path / "prefix" / "lib" / "site-packages"
    with zipfile.ZipFile(checkout.wheels["cuda"]) as wheel:
        wheel.extractall(folder)
    command = tmp_path / "prefix" / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    (folder / INFO / "INSTALLER").write_text("uv")
    (folder / INFO / "direct_url.json").write_text("{}")
    with (folder / INFO / "RECORD").open("a") as record:
        record.write(f"../../bin/vllm,,\n{INFO}/INSTALLER,,\n{INFO}/direct_url.json,,\n")
    return folder


def changed(checkout: Checkout, site: Path, folder: Path) -> Project:
    """Apply the delta the way the Dockerfile does; returns the project."""
    installed = Installed.find("vllm", [str(site)])
    project = project_for(checkout.root, installed)
    write_delta(project, installed, folder)
    add_requirements(project, installed.site, folder)
    for line in (folder / "removed").read_text().splitlines():
        path = Path(line)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(folder / "tree", "/", dirs_exist_ok=True)
    return project


def files_of(top: Path) -> dict[str, bytes]:
    return {
        path.relative_to(top).as_posix(): path.read_bytes()
        for path in top.rglob("*")
        if path.is_file()
    }


def test_the_changed_site_is_what_the_wheel_holds(
    checkout: Checkout, site: Path, tmp_path: Path
) -> None:
    project = changed(checkout, site, tmp_path / "delta")
    wheel = build_wheel(project, checkout.wheels["cuda"], tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        expected = {name: archive.read(name) for name in archive.namelist()}
    found = files_of(site)
    assert found.pop(f"{project.dist_info}/INSTALLER") == b"uv"
    for name in ("RECORD", "WHEEL"):  # These speak of an installation and of another tag.
        assert found.pop(f"{project.dist_info}/{name}")
        assert expected.pop(f"{project.dist_info}/{name}")
    assert found == expected


def test_record_is_true_and_complete(checkout: Checkout, site: Path, tmp_path: Path) -> None:
    project = changed(checkout, site, tmp_path / "delta")
    distribution = importlib.metadata.Distribution.at(site / project.dist_info)
    assert distribution.version == project.version == f"{VERSION}+pykvcache.7"
    recorded = {str(file): file for file in distribution.files or ()}
    assert recorded.keys() == files_of(site).keys() | {"../../bin/vllm"}
    for name, file in recorded.items():
        if file.hash:
            value = f"{file.hash.mode}={file.hash.value}"
            assert value == record_hash((site / name).read_bytes())


def test_only_what_differs_is_written(checkout: Checkout, site: Path, tmp_path: Path) -> None:
    checkout.patch(
        gone=patch_text("vllm/v1/core.py", edited(1, "line 1"), None),
        made=patch_text("vllm/v1/made.py", None, "made = True\n"),
    )
    changed(checkout, site, tmp_path / "delta")
    tree = tmp_path / "delta" / "tree" / site.relative_to("/")
    written = {name for name in files_of(tree) if ".dist-info/" not in name}
    assert written == {
        "pykvcache/__init__.py",
        "pykvcache/core/pool.py",
        "vllm/_version.py",
        "vllm/v1/made.py",
        "vllm/v1/ours/__init__.py",
        "vllm/v1/ours/spec.py",
    }
    removed = (tmp_path / "delta" / "removed").read_text().splitlines()
    assert removed == [str(site / INFO), str(site / "vllm/v1/core.py")]


def test_our_commands_lie_beside_upstreams(checkout: Checkout, site: Path, tmp_path: Path) -> None:
    checkout.write("pykvcache/cli.py", "def main() -> None: ...\n")
    changed(checkout, site, tmp_path / "delta")
    command = tmp_path / "prefix" / "bin" / "pykvcache"
    assert "from pykvcache.cli import main\n" in command.read_text()
    assert command.stat().st_mode & 0o777 == 0o755


def test_a_local_version_of_upstream_is_taken(checkout: Checkout, site: Path) -> None:
    installed = Installed(site, INFO, f"{VERSION}+cu129")
    assert project_for(checkout.root, installed).version == f"{VERSION}+pykvcache.7"


@pytest.mark.parametrize("version", ["1.3.0", f"{VERSION}.dev3"])
def test_another_version_is_refused(checkout: Checkout, site: Path, version: str) -> None:
    with pytest.raises(BuildError, match=f"no patch series for vllm {version}"):
        project_for(checkout.root, Installed(site, INFO, version))


def test_other_contents_are_refused(checkout: Checkout, site: Path, tmp_path: Path) -> None:
    (site / "vllm/config.py").write_text("something else\n")
    installed = Installed.find("vllm", [str(site)])
    with pytest.raises(BuildError, match=r"config\.patch does not apply"):
        write_delta(project_for(checkout.root, installed), installed, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A wheel that pip finds, and nothing else."""
    folder = tmp_path / "offered"
    folder.mkdir()
    info = "coldhash-3.5.dist-info"
    with zipfile.ZipFile(folder / "coldhash-3.5-py3-none-any.whl", "w") as wheel:
        wheel.writestr("coldhash.py", "cold = True\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: coldhash\nVersion: 3.5\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{info}/RECORD", f"coldhash.py,,\n{info}/METADATA,,\n{info}/RECORD,,\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return info


@pytest.mark.parametrize("has", [None, "3.3.9"])
def test_requirements_that_the_base_lacks_are_installed(
    checkout: Checkout, site: Path, tmp_path: Path, offered: str, has: str | None
) -> None:
    checkout.pin(requires='["coldhash>=3.4"]')
    if has is not None:
        install_nothing(site, "coldhash", has)
    changed(checkout, site, tmp_path / "delta")
    found = importlib.metadata.distributions(name="coldhash", path=[str(site)])
    assert [distribution.version for distribution in found if distribution.files] == ["3.5"]
    assert (site / "coldhash.py").read_text() == "cold = True\n"


def test_requirements_that_the_base_has_are_met(
    checkout: Checkout, site: Path, tmp_path: Path, offered: str
) -> None:
    checkout.pin(requires='["coldhash>=3.4"]')
    install_nothing(site, "coldhash", "3.4.1")
    changed(checkout, site, tmp_path / "delta")
    assert not (site / "coldhash.py").exists()


def test_a_requirement_that_nobody_offers_is_an_error(
    checkout: Checkout, site: Path, tmp_path: Path, offered: str
) -> None:
    checkout.pin(requires='["coldhash>=4"]')
    with pytest.raises(BuildError, match=r"lacks coldhash>=4"):
        changed(checkout, site, tmp_path / "delta")


def install_nothing(site: Path, name: str, version: str) -> None:
    """A distribution's metadata alone."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\n")


def test_vllm_has_to_be_installed_from_a_wheel(site: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="vllm isn't installed"):
        Installed.find("vllm", [str(tmp_path)])
    (site / INFO / "RECORD").unlink()
    with pytest.raises(BuildError, match="has no RECORD"):
        Installed.find("vllm", [str(site)])
