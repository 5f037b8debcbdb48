# SPDX-License-Identifier: Apache-2.0
"""Which upstream wheel the distribution is made from, and which version it gets."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError

TARGET_VARIABLE = "VLLM_TARGET_DEVICE"
VERSION_VARIABLE = "PYKVCACHE_VLLM_VERSION"
TARGETS = ("cuda", "cpu")


@dataclass(frozen=True)
class Upstream:
    """One pinned upstream wheel.

    `sha256` maps a machine (`x86_64`, `aarch64`) to the checksum of its wheel; `extras` maps the
    name of a new extra to the projects whose requirements move into it.
    """

    target: str
    project: str
    version: str
    sha256: Mapping[str, str]
    extras: Mapping[str, Sequence[str]]

    def __str__(self) -> str:
        return f"{self.project} {self.version}"


@dataclass(frozen=True)
class Distribution:
    """What is ours: the name, the revision, added requirements, description, and all pins."""

    name: str
    revision: int
    requires: Sequence[str]
    description: str
    upstreams: Sequence[Upstream]

    def version_for(self, upstream: Upstream) -> str:
        """The local version: vLLM picks its CPU platform by the word `cpu` in it."""
        label = "cpu." if upstream.target == "cpu" else ""
        return f"{upstream.version}+{label}pykvcache.{self.revision}"


def load(path: Path) -> Distribution:
    """Read upstream.toml.

    Raises:
        BuildError: the file is missing or a field is missing or malformed.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise BuildError(f"{path} is missing: it pins the upstream wheels") from None
    except tomllib.TOMLDecodeError as error:
        raise BuildError(f"{path}: {error}") from None
    try:
        ours = table["distribution"]
        return Distribution(
            name=ours["name"],
            revision=ours["revision"],
            requires=tuple(ours["requires"]),
            description=ours["description"],
            upstreams=tuple(
                Upstream(
                    target=pin["target"],
                    project=pin["project"],
                    version=pin["version"],
                    sha256=pin["sha256"],
                    extras=pin.get("extras", {}),
                )
                for pin in table["upstream"]
            ),
        )
    except KeyError as error:
        raise BuildError(f"{path}: the key {error} is missing") from None


def choose(
    distribution: Distribution,
    environ: Mapping[str, str],
    gpu_visible: Callable[[], bool],
) -> Upstream:
    """The pin for this machine, or the one that the environment variables name.

    Raises:
        BuildError: an unknown target, or a version that is not pinned for it.
    """
    target, reason = _target(environ, gpu_visible)
    candidates = [pin for pin in distribution.upstreams if pin.target == target]
    if not candidates:
        raise BuildError(f"upstream.toml pins no wheel for the target {target!r} ({reason})")
    wanted = environ.get(VERSION_VARIABLE)
    if not wanted:
        return candidates[0]
    for pin in candidates:
        if pin.version == wanted:
            return pin
    versions = ", ".join(pin.version for pin in candidates)
    raise BuildError(
        f"{VERSION_VARIABLE}={wanted}: there is no patch series for {candidates[0].project} "
        f"{wanted}; target {target!r} ({reason}) has: {versions}"
    )


def _target(environ: Mapping[str, str], gpu_visible: Callable[[], bool]) -> tuple[str, str]:
    """The target and why it was chosen."""
    named = environ.get(TARGET_VARIABLE)
    if named:
        if named not in TARGETS:
            raise BuildError(f"{TARGET_VARIABLE}={named}: accepted are {' and '.join(TARGETS)}")
        return named, f"set by {TARGET_VARIABLE}"
    if gpu_visible():
        return "cuda", "an NVIDIA GPU is visible"
    return "cpu", f"no NVIDIA GPU is visible; {TARGET_VARIABLE}=cuda overrides that"


def nvidia_gpu_visible(root: Path = Path("/"), smi: str = "nvidia-smi") -> bool:
    """Whether the driver shows a GPU: its control device, its /proc entries, or its own tool.

    The tool is asked last since it takes long; it alone knows GPUs that are reached through
    another device node (WSL).
    """
    if (root / "dev/nvidiactl").exists():
        return True
    gpus = root / "proc/driver/nvidia/gpus"
    if gpus.is_dir() and any(gpus.iterdir()):
        return True
    try:
        listing = subprocess.run(
            [smi, "--list-gpus"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout
