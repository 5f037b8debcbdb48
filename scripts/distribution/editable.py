# SPDX-License-Identifier: Apache-2.0
"""Lays the distribution out as a tree for `pip install -e .`.

The tree has upstream's files, the patched ones among them, and links to the overlay and to the
package, so that editing those needs no reinstall. It lies in .editable/<version>/ in the
checkout; the installed wheel holds only a .pth file that names it. A folder that upstream
doesn't have is linked whole, so files that are added to it later are seen as well.

The tree is brought up to date rather than made anew: upstream's shared libraries alone are
hundreds of MB, and a changed patch touches a few small files. An extracted file carries the
archive's time, so one that was patched or edited since differs in time or size and is replaced.
"""

from __future__ import annotations

import calendar
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from .archive import COPY_BYTES, WheelWriter
from .contents import Contents, Project, UpstreamWheel, open_wheel, plan
from .errors import BuildError
from .wheel import write_whole

TREES = ".editable"


def build_editable(project: Project, upstream: Path, folder: Path) -> Path:
    """Bring the tree up to date and write the wheel that points to it."""
    tree = tree_of(project)
    with open_wheel(upstream) as wheel:
        contents = plan(project, wheel)
        sync_tree(tree, project, wheel, contents)
        path = folder / f"{project.name}-{project.version}-0editable-{wheel.tag}.whl"
        write_whole(path, lambda file: _write(file, project, wheel, contents))
    return path


def tree_of(project: Project) -> Path:
    return project.root / TREES / project.version


def pointer_name(project: Project) -> str:
    """Name of the .pth file in the environment."""
    return f"__editable__.{project.name}.pth"


def pointer(project: Project) -> str:
    """What the .pth file says."""
    return f"{tree_of(project)}\n"


def _write(file: BinaryIO, project: Project, wheel: UpstreamWheel, contents: Contents) -> None:
    with WheelWriter(file, project.dist_info) as out:
        out.write(pointer_name(project), pointer(project).encode())
        for info in wheel.members():
            name = contents.kept.get(info.filename, "")
            if name.startswith(f"{project.dist_info}/"):
                out.copy(wheel.file, info, name, wheel.digest(info.filename))
        for name, data in sorted(contents.dist_info.items()):
            out.write(f"{project.dist_info}/{name}", data)


def sync_tree(tree: Path, project: Project, wheel: UpstreamWheel, contents: Contents) -> None:
    """Make `tree` hold exactly the planned files (bytecode caches aside)."""
    links = _links(project, wheel, contents)
    kept = [info for info in wheel.members() if contents.kept.get(info.filename) == info.filename]
    expected = {info.filename for info in kept} | set(contents.made) | set(links)
    _remove_others(tree, expected)
    for info in kept:
        _extract(wheel.index, info, tree / info.filename)
    for name, data in contents.made.items():
        path = tree / name
        if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
            _replace(path, [data])
    for name, target in links.items():
        _link(tree / name, target)


def _links(project: Project, wheel: UpstreamWheel, contents: Contents) -> dict[str, Path]:
    """Links of the tree -> their targets: the topmost folders that are new, else single files."""
    owned = {
        parent.as_posix()
        for name in (*wheel.names(), *contents.made)
        for parent in Path(name).parents
    }
    links: dict[str, Path] = {}
    for name in contents.added:
        path = Path(name)
        new = [parent for parent in path.parents if parent.as_posix() not in owned]
        top = new[-1] if new else path
        links[top.as_posix()] = project.root / top
    return links


def _remove_others(tree: Path, expected: set[str]) -> None:
    for path in _files(tree):
        if path.relative_to(tree).as_posix() not in expected:
            path.unlink()


def _files(folder: Path) -> Iterator[Path]:
    """Files and links under a folder, without following links and without bytecode."""
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        folders[:] = [name for name in folders if name != "__pycache__" and name not in links]
        yield from (Path(parent) / name for name in (*files, *links))


def _extract(index: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> None:
    # The archive's times are taken as UTC: only their equality matters.
    mtime = calendar.timegm((*info.date_time, 0, 0, 0))
    if not path.is_symlink() and path.is_file():
        have = path.stat()
        if (have.st_size, int(have.st_mtime)) == (info.file_size, mtime):
            return

    with index.open(info) as member:
        _replace(path, iter(lambda: member.read(COPY_BYTES), b""), mtime)


def _replace(path: Path, pieces: Iterable[bytes], mtime: int | None = None) -> None:
    """Write a file whole; running processes that have the old one mapped keep it."""
    if path.is_dir() and not path.is_symlink():
        raise BuildError(f"{path} is a folder where a file belongs; remove {TREES}/ and retry")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.writelines(pieces)
    partial = Path(file.name)
    partial.chmod(0o644)
    if mtime is not None:
        os.utime(partial, (mtime, mtime))
    partial.replace(path)
    # Bytecode is matched to its source by size and second, which may agree by chance.
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()


def _link(path: Path, target: Path) -> None:
    if path.is_symlink() and path.readlink() == target:
        return
    if path.is_dir() and not path.is_symlink():
        # Left by a state of the checkout in which this folder wasn't linked.
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
