# SPDX-License-Identifier: Apache-2.0
"""The build backend: the hooks of PEP 517 and PEP 660 that pip, uv and build call.

They run with the checkout as the current folder. What a user can do something about ends in a
message and exit status 1; a bug ends in a traceback.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from .conflicts import refuse_conflicts, site_folders
from .contents import PINS, Project, dist_info_files, open_wheel, sources
from .editable import build_editable as build_editable_wheel
from .errors import BuildError
from .fetch import upstream_wheel
from .upstream import choose, load, nvidia_gpu_visible
from .wheel import build_wheel as build_whole_wheel

P = ParamSpec("P")
R = TypeVar("R")
Settings = dict[str, str | list[str]] | None

SOURCES = (
    "LICENSE",
    "README.md",
    "pyproject.toml",
    PINS,
    "patches",
    "pykvcache",
    "scripts/distribution",
    "setup.py",
    "vllm",
)


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _plain_errors(hook: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(hook)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return hook(*args, **kwargs)
        except BuildError as error:
            raise SystemExit(f"error: {error}") from None
        except OSError as error:
            raise SystemExit(f"error: the build failed: {error}") from None

    return wrapped


def open_project(root: Path) -> tuple[Project, Path]:
    """The project for this machine, and its verified upstream wheel."""
    distribution = load(root / PINS)
    pin = choose(distribution, os.environ, nvidia_gpu_visible)
    project = Project(root, distribution, pin)
    log(f"{project.name} {project.version} from {pin} (target {pin.target})")
    return project, upstream_wheel(pin, os.environ, log)


@_plain_errors
def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    refuse_conflicts(site_folders())
    project, upstream = open_project(Path.cwd())
    folder = Path(metadata_directory) / project.dist_info
    folder.mkdir(parents=True, exist_ok=True)
    with open_wheel(upstream) as wheel:
        for name, data in dist_info_files(project, wheel).items():
            (folder / name).write_bytes(data)
    return folder.name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


@_plain_errors
def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    refuse_conflicts(site_folders())
    project, upstream = open_project(Path.cwd())
    return build_whole_wheel(project, upstream, Path(wheel_directory)).name


@_plain_errors
def build_editable(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    refuse_conflicts(site_folders())
    project, upstream = open_project(Path.cwd())
    return build_editable_wheel(project, upstream, Path(wheel_directory)).name


@_plain_errors
def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """What is needed to build the wheel; the upstream wheel isn't in it."""
    root = Path.cwd()
    distribution = load(root / PINS)
    project = Project(root, distribution, choose(distribution, os.environ, nvidia_gpu_visible))
    base = f"{project.name}-{project.version}"
    info = f"Metadata-Version: 2.1\nName: {project.name}\nVersion: {project.version}\n".encode()
    path = Path(sdist_directory) / f"{base}.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        about = tarfile.TarInfo(f"{base}/PKG-INFO")
        about.size = len(info)
        archive.addfile(about, io.BytesIO(info))
        for source in SOURCES:
            top = root / source
            for file in sources(top) if top.is_dir() else [top]:
                archive.add(file, f"{base}/{file.relative_to(root).as_posix()}")
    return path.name
