# SPDX-License-Identifier: Apache-2.0
"""The plan of the finished distribution: each member, and where its bytes come from.

Both results, the wheel and the editable tree, are made from one plan, so they can't differ in
what they contain.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from . import metadata
from .archive import read_record, record_hash
from .errors import BuildError
from .fetch import WheelName
from .patches import Read, apply_series, read_series
from .upstream import Distribution, Upstream

PINS = "upstream.toml"
OVERLAY = "vllm"
PACKAGE = "pykvcache"
VERSION_MODULE = "vllm/_version.py"
COMMANDS = {"pykvcache": ("pykvcache/cli.py", "pykvcache.cli:main")}
_CONTROL = "vllm/v1/kv_offload/pykvcache/control"
PLUGINS = {
    # HTTP routes, which vLLM loads only where VLLM_PLUGINS names them.
    "vllm.endpoint_plugins": {
        "pykvcache": (f"{_CONTROL}.py", f"{_CONTROL.replace('/', '.')}:ControlPlugin")
    }
}


@dataclass(frozen=True)
class Project:
    """The checkout that is built, and which upstream wheel it is built on."""

    root: Path
    distribution: Distribution
    pin: Upstream

    @property
    def name(self) -> str:
        return self.distribution.name

    @property
    def version(self) -> str:
        return self.distribution.version_for(self.pin)

    @property
    def dist_info(self) -> str:
        return f"{self.name}-{self.version}.dist-info"

    @property
    def patches(self) -> Path:
        return self.root / "patches" / f"v{self.pin.version}"

    def commands(self) -> dict[str, str]:
        """Our console scripts whose module exists in this checkout."""
        return self._present(COMMANDS)

    def entry_points(self) -> dict[str, dict[str, str]]:
        """All our entry points whose module exists in this checkout, by group."""
        groups = {"console_scripts": COMMANDS, **PLUGINS}
        return {group: self._present(entries) for group, entries in groups.items()}

    def _present(self, entries: Mapping[str, tuple[str, str]]) -> dict[str, str]:
        return {
            name: target
            for name, (module, target) in entries.items()
            if (self.root / module).is_file()
        }


class DistInfo(Protocol):
    """Upstream's .dist-info, in a wheel or installed; `tag` is `python-abi-platform`."""

    @property
    def dist_info(self) -> str: ...

    @property
    def tag(self) -> str: ...

    def read(self, name: str) -> bytes | None: ...

    def required(self, name: str) -> bytes: ...


@dataclass(frozen=True)
class UpstreamWheel:
    """An open upstream wheel: its index, its bytes, and its RECORD (path -> hash)."""

    path: Path
    index: zipfile.ZipFile
    file: BinaryIO
    dist_info: str
    record: Mapping[str, str]

    @property
    def tag(self) -> str:
        return WheelName.parse(self.path).tag

    def members(self) -> list[zipfile.ZipInfo]:
        return [info for info in self.index.infolist() if not info.is_dir()]

    def names(self) -> set[str]:
        return {info.filename for info in self.members()}

    def read(self, name: str) -> bytes | None:
        try:
            return self.index.read(name)
        except KeyError:
            return None

    def required(self, name: str) -> bytes:
        """A file of .dist-info."""
        data = self.read(f"{self.dist_info}/{name}")
        if data is None:
            raise BuildError(f"{self.path}: {self.dist_info}/{name} is missing")
        return data

    def digest(self, name: str) -> str:
        """A member's hash from RECORD, computed when RECORD leaves it out."""
        return self.record.get(name) or record_hash(self.index.read(name))


@contextmanager
def open_wheel(path: Path) -> Iterator[UpstreamWheel]:
    """Raises BuildError when the file isn't a wheel that can be repacked."""
    try:
        index = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise BuildError(f"{path}: not a wheel: {error}") from None
    with index, path.open("rb") as file:
        names = index.namelist()
        infos = {name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA")}
        if len(infos) != 1:
            raise BuildError(f"{path}: {len(infos)} .dist-info folders, a wheel has one")
        data = sorted(name for name in names if name.split("/")[0].endswith(".data"))
        if data:
            raise BuildError(f"{path}: files outside the packages ({data[0]}) aren't supported")
        dist_info = infos.pop()
        record = index.read(f"{dist_info}/RECORD") if f"{dist_info}/RECORD" in names else b""
        yield UpstreamWheel(path, index, file, dist_info, read_record(record))


@dataclass(frozen=True)
class Contents:
    """Every member of the distribution except RECORD.

    Attributes:
        kept: upstream's members that stay as they are -> their new name.
        made: bytes that are made here: patched files and vllm/_version.py.
        added: files of the overlay and of the package.
        dist_info: bytes of the .dist-info folder, by name inside it.
    """

    kept: Mapping[str, str]
    made: Mapping[str, bytes]
    added: Mapping[str, Path]
    dist_info: Mapping[str, bytes]


def dist_info_files(project: Project, upstream: DistInfo) -> dict[str, bytes]:
    """The rewritten files of .dist-info."""
    entry_points = upstream.read(f"{upstream.dist_info}/entry_points.txt") or b""
    return {
        "METADATA": metadata.rewrite_metadata(
            upstream.required("METADATA"),
            name=project.name,
            version=project.version,
            requires=project.distribution.requires,
            extras=project.pin.extras,
            description=project.distribution.description,
        ),
        "WHEEL": metadata.rewrite_wheel(upstream.required("WHEEL"), upstream.tag),
        "entry_points.txt": metadata.rewrite_entry_points(entry_points, project.entry_points()),
        "top_level.txt": f"{PACKAGE}\n{OVERLAY}\n".encode(),
    }


def plan(project: Project, wheel: UpstreamWheel) -> Contents:
    """Apply patches, overlay and package to upstream's members, in memory.

    Raises:
        BuildError: the patches don't apply, or an added file would hide another one.
    """
    patched, added = changes(project, wheel.read, wheel.names())
    made = {name: data for name, data in patched.items() if data is not None}
    info = dist_info_files(project, wheel)
    gone = set(patched) | {f"{wheel.dist_info}/{name}" for name in (*info, "RECORD")}
    kept = {
        member.filename: _renamed(member.filename, wheel.dist_info, project.dist_info)
        for member in wheel.members()
        if member.filename not in gone
    }
    return Contents(kept, made, added, info)


def changes(
    project: Project, read: Read, names: Set[str]
) -> tuple[dict[str, bytes | None], dict[str, Path]]:
    """What the distribution does to upstream's files.

    Args:
        read: gives the bytes of an upstream file, None if there is none.
        names: all of upstream's files.

    Returns:
        The new bytes of each patched file and of vllm/_version.py, None for one that goes; and
        the files of the overlay and of the package.

    Raises:
        BuildError: the patches don't apply, or an added file would hide another one.
    """
    patched = apply_series(read_series(project.patches), read)
    added = added_files(project.root)
    _refuse_hidden(added, names | set(patched))
    version_module = patched.get(VERSION_MODULE) or read(VERSION_MODULE)
    if version_module is None:
        raise BuildError(f"{project.pin}: {VERSION_MODULE} is missing")
    patched[VERSION_MODULE] = metadata.rewrite_version_module(version_module, project.version)
    return patched, added


def added_files(root: Path) -> dict[str, Path]:
    """The overlay's and the package's files: member name -> file."""
    added: dict[str, Path] = {}
    for folder in (OVERLAY, PACKAGE):
        top = root / folder
        if not top.is_dir():
            raise BuildError(f"{top} is missing: the distribution needs {OVERLAY}/ and {PACKAGE}/")
        for path in sources(top):
            added[path.relative_to(root).as_posix()] = path
    return added


def sources(top: Path) -> Iterator[Path]:
    """The files under a folder that belong in a distribution: no bytecode and nothing hidden."""
    for path in sorted(top.rglob("*")):
        inside = path.relative_to(top).parts
        bytecode = "__pycache__" in inside or path.suffix in {".pyc", ".pyo"}
        hidden = any(part.startswith(".") for part in inside)
        if path.is_file() and not bytecode and not hidden:
            yield path


def _refuse_hidden(added: Mapping[str, Path], others: Set[str]) -> None:
    hidden = sorted(set(added) & others)
    if hidden:
        raise BuildError(
            f"{', '.join(hidden)}: the added file would hide upstream's of the same name; change "
            "an upstream file with a patch, or choose another name"
        )


def _renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(f"{old}/") else name
