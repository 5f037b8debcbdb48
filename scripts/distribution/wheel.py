# SPDX-License-Identifier: Apache-2.0
"""Writes the planned distribution as a wheel."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from .archive import WheelWriter
from .contents import Contents, Project, UpstreamWheel, open_wheel, plan


def build_wheel(project: Project, upstream: Path, folder: Path) -> Path:
    """Build the wheel from an upstream wheel; the file appears in `folder` whole or not at all."""
    with open_wheel(upstream) as wheel:
        contents = plan(project, wheel)
        path = folder / f"{project.name}-{project.version}-{wheel.tag}.whl"
        write_whole(path, lambda file: _write(file, project, wheel, contents))
    return path


def _write(file: BinaryIO, project: Project, wheel: UpstreamWheel, contents: Contents) -> None:
    with WheelWriter(file, project.dist_info) as out:
        for info in wheel.members():
            name = contents.kept.get(info.filename)
            if name is not None:
                out.copy(wheel.file, info, name, wheel.digest(info.filename))
        for name, data in sorted(contents.made.items()):
            out.write(name, data)
        for name, source in sorted(contents.added.items()):
            out.write(name, source.read_bytes())
        # The .dist-info folder comes last, as the wheel format recommends.
        for name, data in sorted(contents.dist_info.items()):
            out.write(f"{project.dist_info}/{name}", data)


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file beside its place and rename it, so that a partial one never has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as folder:
        partial = Path(folder) / path.name
        with partial.open("wb") as file:
            write(file)
        partial.replace(path)
