# SPDX-License-Identifier: Apache-2.0
"""The distribution as what it changes in a vLLM that is installed: how the CUDA image is made.

A wheel installed over that vLLM would write a gigabyte of compiled libraries again, and perhaps
those of another CUDA version than the image's torch is for. So only what differs is written:

    python -m distribution.delta FOLDER

run in the checkout, by the interpreter that has vLLM, writes `FOLDER/tree`, the files under their
absolute paths, and `FOLDER/removed`, the absolute paths that go, one a line. Requirements of ours
that the interpreter lacks are installed into the tree as well, by pip, else by uv.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from .archive import record_bytes, record_hash
from .contents import PINS, Project, changes, dist_info_files
from .errors import BuildError
from .upstream import TARGET_VARIABLE, VERSION_VARIABLE, choose, load

LAUNCHER = """\
#!{python}
import sys

from {module} import {name}

if __name__ == "__main__":
    sys.exit({name}())
"""
Rows = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Installed:
    """An installed distribution.

    Attributes:
        site: the folder that its packages are in.
        dist_info: name of its .dist-info folder there.
        version: its version, with a local part if it has one.
    """

    site: Path
    dist_info: str
    version: str

    @classmethod
    def find(cls, name: str, path: Sequence[str] = tuple(sys.path)) -> Installed:
        """Raises BuildError if it isn't installed, or not in a way that can be changed."""
        found = next(iter(importlib.metadata.distributions(name=name, path=list(path))), None)
        if found is None:
            raise BuildError(f"{name} isn't installed for {sys.executable}")
        site = Path(str(found.locate_file("")))
        records = (file for file in found.files or () if file.name == "RECORD")
        dist_info = next((file.parent.name for file in records), None)
        if dist_info is None:
            raise BuildError(
                f"{name} {found.version} in {site} has no RECORD: it must be installed from a wheel"
            )
        return cls(site, dist_info, found.version)

    @property
    def tag(self) -> str:
        """The first of the tags that it was built for."""
        for line in self.required("WHEEL").decode("utf-8").splitlines():
            if line.startswith("Tag: "):
                return line.removeprefix("Tag: ")
        raise BuildError(f"{self.site / self.dist_info}/WHEEL names no tag")

    def read(self, name: str) -> bytes | None:
        path = self.site / name
        return path.read_bytes() if path.is_file() else None

    def required(self, name: str) -> bytes:
        """A file of .dist-info."""
        data = self.read(f"{self.dist_info}/{name}")
        if data is None:
            raise BuildError(f"{self.site / self.dist_info / name} is missing")
        return data

    def record(self) -> Rows:
        """Path -> hash and size of every file, as RECORD states them."""
        text = self.required("RECORD").decode("utf-8")
        return {row[0]: (row[1], row[2]) for row in csv.reader(io.StringIO(text)) if row}


def project_for(root: Path, installed: Installed) -> Project:
    """The checkout, for the installed version.

    Raises:
        BuildError: no patch series for that version.
    """
    distribution = load(root / PINS)
    public = installed.version.partition("+")[0]
    environ = {VERSION_VARIABLE: public, TARGET_VARIABLE: "cuda"}
    return Project(root, distribution, choose(distribution, environ, lambda: True))


def add_requirements(project: Project, site: Path, folder: Path) -> None:
    """Install what the base lacks of the distribution's requirements into the delta.

    Their own requirements aren't: what is asked for beyond vLLM's dependencies has none.

    Raises:
        BuildError: they could not be installed.
    """
    path = [str(site), *sys.path]
    missing, outdated = [], []
    for requirement in map(Requirement, project.distribution.requires):
        name = requirement.name
        found = next(iter(importlib.metadata.distributions(name=name, path=path)), None)
        if found is None or found.version not in requirement.specifier:
            missing.append(str(requirement))
            outdated += (
                [] if found is None else [str(found.locate_file(f)) for f in found.files or ()]
            )
    if not missing:
        return
    target = folder / "tree" / site.relative_to("/")
    has_pip = importlib.util.find_spec("pip") is not None
    tool = [sys.executable, "-m", "pip"] if has_pip else ["uv", "pip"]
    command = [*tool, "install", "--quiet", "--no-deps", "--target", str(target), *missing]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{site} lacks {', '.join(missing)}: {error}") from None
    with (folder / "removed").open("a", encoding="utf-8") as removed:
        removed.writelines(f"{path}\n" for path in outdated if os.path.exists(path))


def write_delta(project: Project, installed: Installed, folder: Path) -> None:
    """Write `tree` and `removed` (see above) to the folder.

    Raises:
        BuildError: the installed vLLM isn't the one that the patches are for.
    """
    rows = installed.record()
    patched, added = changes(project, installed.read, rows.keys())
    wanted = {name: data for name, data in patched.items() if data is not None}
    wanted |= {name: path.read_bytes() for name, path in added.items()}
    wanted |= _launchers(project, rows)
    wanted |= _dist_info(project, installed, rows)
    removed = sorted(name for name, data in patched.items() if data is None)
    kept = {
        name: row
        for name, row in rows.items()
        if name not in removed and not name.startswith(f"{installed.dist_info}/")
    }
    record = f"{project.dist_info}/RECORD"
    stated = kept | {name: (record_hash(data), str(len(data))) for name, data in wanted.items()}
    stated[record] = ("", "")
    wanted[record] = record_bytes([(name, *row) for name, row in stated.items()])
    _write(folder, installed.site, wanted)
    gone = [str(installed.site / name) for name in (installed.dist_info, *removed)]
    (folder / "removed").write_text("".join(f"{path}\n" for path in gone), "utf-8")


def _write(folder: Path, site: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = Path(os.path.normpath(site / name))
        target = folder / "tree" / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o755 if path.parent.name == "bin" else 0o644)


def _dist_info(project: Project, installed: Installed, rows: Rows) -> dict[str, bytes]:
    """The new .dist-info but for RECORD: what isn't rewritten stays as it is.

    Where the vLLM was installed from (direct_url.json) would no longer be true.
    """
    inside = (name for name in rows if name.startswith(f"{installed.dist_info}/"))
    files = {name.partition("/")[2]: installed.site / name for name in inside}
    kept = {
        name: path.read_bytes()
        for name, path in files.items()
        if name not in ("RECORD", "direct_url.json")
    }
    made = dist_info_files(project, installed)
    return {f"{project.dist_info}/{name}": data for name, data in (kept | made).items()}


def _launchers(project: Project, rows: Rows) -> dict[str, bytes]:
    """Our commands, beside upstream's."""
    beside = next((name for name in rows if name.endswith("/bin/vllm")), None)
    if beside is None:
        raise BuildError("the installed vLLM has no command `vllm`")
    launchers = {}
    for command, target in project.commands().items():
        module, _, name = target.partition(":")
        text = LAUNCHER.format(python=sys.executable, module=module, name=name)
        launchers[beside.removesuffix("vllm") + command] = text.encode()
    return launchers


def main(arguments: list[str]) -> int:
    """Write the delta for the running interpreter's vLLM; returns the exit status."""
    if len(arguments) != 1:
        print("usage: python -m distribution.delta FOLDER", file=sys.stderr)
        return 2
    try:
        root = Path.cwd()
        installed = Installed.find(load(root / PINS).name)
        project = project_for(root, installed)
        write_delta(project, installed, Path(arguments[0]))
        add_requirements(project, installed.site, Path(arguments[0]))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{project.name} {installed.version} becomes {project.version}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
