# SPDX-License-Identifier: Apache-2.0
"""A new version's wheels: downloaded for every machine, and pinned in ``upstream.toml``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rebasing.workspace import RebaseError

MACHINES = ("x86_64", "aarch64")
PLATFORMS = (
    "manylinux_2_28",
    "manylinux_2_31",
    "manylinux_2_34",
    "manylinux_2_35",
    "manylinux_2_39",
)
"""Tags that upstream has used, and newer ones; pip takes the best there is."""


def download(version: str, machine: str, folder: Path) -> Path:
    """The wheel of a version from the package index, for whichever machine.

    Raises:
        RebaseError: there is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform={tag}_{machine}" for tag in PLATFORMS]
    command = ["pip", "download", "-q", "--no-deps", "--only-binary=:all:", *platforms]
    done = subprocess.run(
        [sys.executable, "-m", *command, f"vllm=={version}", "-d", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    found = sorted(folder.glob(f"vllm-{version}-*{machine}.whl"))
    if done.returncode or not found:
        lines = done.stderr.strip().splitlines() or ["no wheel"]
        raise RebaseError(f"vLLM {version} for {machine} cannot be downloaded: {lines[-1]}")
    return found[0]


def add_pin(pins: Path, version: str, sha256: Mapping[str, str]) -> None:
    """Write the wheels of a version into ``upstream.toml``, before the others: it becomes the
    default for CUDA.

    Args:
        pins: the file.
        version: not pinned for CUDA so far.
        sha256: machine to checksum.

    Raises:
        RebaseError: the file pins nothing for CUDA, so that there is no place for it.
    """
    text = pins.read_text("utf-8")
    first = re.search(r'^\[\[upstream\]\]\ntarget = "cuda"$', text, re.MULTILINE)
    if first is None:
        raise RebaseError(f'{pins.name} has no [[upstream]] with target = "cuda" to add one before')
    sums = "".join(f'{machine} = "{value}"\n' for machine, value in sha256.items())
    entry = (
        f'[[upstream]]\ntarget = "cuda"\nproject = "vllm"\nversion = "{version}"\n'
        f"[upstream.sha256]\n{sums}\n"
    )
    pins.write_text(text[: first.start()] + entry + text[first.start() :], "utf-8")
