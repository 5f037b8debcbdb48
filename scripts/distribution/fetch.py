# SPDX-License-Identifier: Apache-2.0
"""Gets the pinned upstream wheel: given by the user, cached, or downloaded; always verified.

Nothing unverified is ever visible under a wheel's final name: a download goes to a folder beside
it and is renamed after its checksum was compared.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError
from .upstream import TARGET_VARIABLE, VERSION_VARIABLE, Upstream

LOCATION_VARIABLE = "VLLM_PRECOMPILED_WHEEL_LOCATION"
UNPINNED_VARIABLE = "PYKVCACHE_ALLOW_UNPINNED_WHEEL"
MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}

Log = Callable[[str], None]


@dataclass(frozen=True)
class WheelName:
    """The parts of a wheel's file name; `tag` is `python-abi-platform`, possibly compressed."""

    project: str
    version: str
    tag: str

    @classmethod
    def parse(cls, path: Path) -> WheelName:
        """Raises BuildError for a name that is not a wheel's."""
        parts = path.name.removesuffix(".whl").split("-")
        if path.suffix != ".whl" or len(parts) not in (5, 6):
            raise BuildError(
                f"{path}: not a wheel's file name; expected PROJECT-VERSION-PYTHON-ABI-PLATFORM.whl"
            )
        return cls(project=normalized(parts[0]), version=parts[1], tag="-".join(parts[-3:]))

    @property
    def machine(self) -> str | None:
        """The machine that the platform tag ends in, if it is one that is pinned."""
        for machine in set(MACHINES.values()):
            if self.tag.endswith(machine):
                return machine
        return None


def normalized(project: str) -> str:
    """A project's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", project).lower()


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Where downloaded wheels are kept."""
    base = environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path(environ.get("HOME") or Path.home()) / ".cache"
    return root / "pykvcache" / "wheels"


def upstream_wheel(
    pin: Upstream,
    environ: Mapping[str, str],
    log: Log,
    python: str = sys.executable,
) -> Path:
    """Path of the verified wheel of `pin`; `python` is the interpreter whose pip downloads it.

    Raises:
        BuildError: no wheel for this machine, a download that failed, a local wheel that is
            another one, or a checksum that differs.
    """
    location = environ.get(LOCATION_VARIABLE)
    if location:
        return _local(pin, location, environ, log)
    expected = _checksum_here(pin)
    cache = cache_dir(environ)
    for path in sorted(cache.glob("*.whl")):
        if _is_for(path, pin, expected):
            return path
    return _download(pin, expected, cache, log, python)


def _checksum_here(pin: Upstream) -> str:
    machine = MACHINES.get(platform.machine().lower(), "")
    if sys.platform != "linux" or machine not in pin.sha256:
        raise BuildError(
            f"there is no pinned wheel of {pin} for {sys.platform} {platform.machine()}; "
            f"there is one for linux {' and '.join(sorted(pin.sha256))}"
        )
    return pin.sha256[machine]


def _is_for(path: Path, pin: Upstream, expected: str) -> bool:
    """Whether a cached file is the pinned wheel, whole. The name is compared before the bytes."""
    try:
        name = WheelName.parse(path)
    except BuildError:
        return False
    if (name.project, name.version) != (normalized(pin.project), pin.version):
        return False
    return sha256_of(path) == expected


def _local(pin: Upstream, location: str, environ: Mapping[str, str], log: Log) -> Path:
    path = Path(location).expanduser()
    if not path.is_file():
        raise BuildError(f"{LOCATION_VARIABLE}={location}: there is no such file; give a wheel")
    name = WheelName.parse(path)
    if (name.project, name.version) != (normalized(pin.project), pin.version):
        raise BuildError(
            f"{LOCATION_VARIABLE}={location}: that is {name.project} {name.version}, but "
            f"{pin} is being built (target {pin.target!r}); give that wheel, or choose another "
            f"with {TARGET_VARIABLE} and {VERSION_VARIABLE}"
        )
    expected = pin.sha256.get(name.machine or "")
    actual = sha256_of(path)
    if actual == expected:
        return path
    difference = (
        f"{path}: its sha256 is {actual}, upstream.toml pins {expected or 'none for that platform'}"
    )
    if environ.get(UNPINNED_VARIABLE) != "1":
        raise BuildError(
            f"{difference}; {UNPINNED_VARIABLE}=1 builds from it all the same, at your own risk"
        )
    log(f"warning: {difference}; used since {UNPINNED_VARIABLE}=1")
    return path


def _download(pin: Upstream, expected: str, cache: Path, log: Log, python: str) -> Path:
    if python == sys.executable and importlib.util.find_spec("pip") is None:
        raise BuildError(
            f"{python} has no pip to download {pin} with; install pip there, or give the wheel "
            f"with {LOCATION_VARIABLE}"
        )
    cache.mkdir(parents=True, exist_ok=True)
    log(f"downloading {pin} to {cache}")
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
        # Our own cache keeps the file: a second copy in pip's would cost as much disk again.
        command = [python, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
        command += ["--only-binary", ":all:", "--dest", folder, f"{pin.project}=={pin.version}"]
        status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        found = sorted(Path(folder).glob("*.whl"))
        if status or len(found) != 1:
            raise BuildError(
                f"pip could not download {pin} (exit status {status}, its messages are above); "
                f"a wheel that you have can be given with {LOCATION_VARIABLE}"
            )
        actual = sha256_of(found[0])
        if actual != expected:
            raise BuildError(
                f"checksum mismatch: the downloaded {found[0].name} has sha256 {actual}, "
                f"upstream.toml pins {expected}; the package index serves another file"
            )
        final = cache / found[0].name
        os.replace(found[0], final)
    return final


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
