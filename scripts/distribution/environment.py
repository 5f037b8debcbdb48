# SPDX-License-Identifier: Apache-2.0
"""`make env`: the checkout's virtual environment, installed editable, in one pip run.

Whether anything must be done is decided by a stamp inside the environment: digests of all that
the installed state depends on. Unlike file times they survive a fresh checkout and notice a changed
environment variable. The overlay and the package are linked into the environment, so their
contents don't count. A change that can't alter a requirement, such as one of a patch, leads to a
repack alone, which takes a few seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from .conflicts import refuse_conflicts, venv_folders
from .contents import PINS, Project, added_files, open_wheel, sources
from .editable import pointer, pointer_name, tree_of
from .errors import BuildError
from .fetch import LOCATION_VARIABLE, upstream_wheel
from .patches import read_series
from .upstream import (
    TARGET_VARIABLE,
    VERSION_VARIABLE,
    choose,
    load,
    nvidia_gpu_visible,
)

ROOT = Path(__file__).resolve().parents[2]
GROUP = "dev"
# Third-party index with PyTorch's CPU builds, `torch==X+cpu`. It is added only where pip can't
# find that version otherwise: an index that is slow or out of reach costs pip its time-outs for
# every single package. For a plain `pip install .` on such a machine, give it with
# `--extra-index-url`.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main(root: Path = ROOT) -> int:
    """Bring `.venv` up to date; returns the exit status."""
    started = time.monotonic()
    try:
        done = _bring_up_to_date(root)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: the environment could not be made: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run it again to finish", file=sys.stderr)
        return 130
    took_s = time.monotonic() - started
    say(f".venv is ready ({took_s:.0f} s)" if done else ".venv is up to date")
    return 0


def say(message: str) -> None:
    print(f"env: {message}", file=sys.stderr, flush=True)


def _bring_up_to_date(root: Path) -> bool:
    """Returns False if there was nothing to do."""
    distribution = load(root / PINS)
    pin = choose(distribution, os.environ, nvidia_gpu_visible)
    project = Project(root, distribution, pin)
    folder = root / ".venv"
    stamp = folder / "pykvcache-stamp.json"
    wanted = digests(project, os.environ)
    had = _read_stamp(stamp) if _usable(folder, project) else {}
    if had == wanted:
        return False
    say(f"{project.name} {project.version} for target {pin.target}, from {pin}")
    read_series(project.patches)
    python = make_venv(folder)
    stamp.unlink(missing_ok=True)
    refuse_conflicts(venv_folders(folder))
    wheel = upstream_wheel(pin, os.environ, say, python=str(python))
    if had.get("requirements") == wanted["requirements"]:
        repack(project, python)
    else:
        install(project, python, wheel)
    stamp.write_text(json.dumps(wanted), "utf-8")
    return True


def _read_stamp(stamp: Path) -> dict[str, str]:
    try:
        found = json.loads(stamp.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def digests(project: Project, environ: Mapping[str, str]) -> dict[str, str]:
    """Of everything that the installed environment depends on, in two parts."""
    return {
        "requirements": _digest(_requirement_inputs(project, environ)),
        "contents": _digest(_content_inputs(project)),
    }


def _digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()


def _requirement_inputs(project: Project, environ: Mapping[str, str]) -> Iterator[bytes]:
    yield f"{sys.version_info[:3]} {project.root} {project.version}".encode()
    yield environ.get(LOCATION_VARIABLE, "").encode()
    yield from _named(project, [project.root / name for name in ("pyproject.toml", PINS)])


def _content_inputs(project: Project) -> Iterator[bytes]:
    for folder in (project.root / "scripts/distribution", project.patches):
        yield from _named(project, sources(folder))
    yield repr(project.entry_points()).encode()
    linked = {_linked(project.root, name) for name in added_files(project.root)}
    yield "\n".join(sorted(linked)).encode()


def _named(project: Project, files: Iterable[Path]) -> Iterator[bytes]:
    for path in files:
        yield path.relative_to(project.root).as_posix().encode()
        yield path.read_bytes()


def _linked(root: Path, name: str) -> str:
    """The folder that is linked into the tree as a whole, for a file inside one.

    Folders of ours are packages, folders of upstream's have no `__init__.py` of ours.
    """
    parents = [parent for parent in Path(name).parents if (root / parent / "__init__.py").is_file()]
    return str(parents[-1]) if parents else name


def _usable(folder: Path, project: Project) -> bool:
    """Whether the environment still has this project, editable, and the tree is still there.

    Somebody may have installed another vLLM over it by hand.
    """
    pointers = [Path(site) / pointer_name(project) for site in venv_folders(folder)]
    return (
        (folder / "bin/python").exists()
        and any(path.is_file() and path.read_text("utf-8") == pointer(project) for path in pointers)
        and (tree_of(project) / "vllm/_version.py").is_file()
    )


def make_venv(folder: Path) -> Path:
    """A virtual environment of the running Python's version; an unusable one is made anew.

    Returns:
        Its interpreter.
    """
    python = folder / "bin/python"
    if _version_of(python) == _version_of(Path(sys.executable)) is not None:
        return python
    say(f"making {folder} with Python {sys.version.split()[0]}")
    try:
        venv.create(folder, clear=True, with_pip=True, symlinks=True)
    except subprocess.CalledProcessError:
        raise BuildError(
            f"{sys.executable} can't make a virtual environment with pip: its module ensurepip is "
            "missing (on Debian and Ubuntu, install the package python3-venv)"
        ) from None
    return python


def _version_of(python: Path) -> str | None:
    """The version of an interpreter with pip, None if there is none that works."""
    command = [str(python), "-c", "import pip, sys; print(sys.version)"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout if result.returncode == 0 else None


def install(project: Project, python: Path, wheel: Path) -> None:
    """Install the distribution, editable, and the development tools in one pip run."""
    options = _index_options(python, _requirement(wheel, "torch"))
    say("installing the distribution and the development tools")
    _pip_install(project, python, [*options, *group(project.root / "pyproject.toml", GROUP)])


def repack(project: Project, python: Path) -> None:
    """Install the distribution again, editable, where its requirements are as they were."""
    say("repacking")
    _pip_install(project, python, ["--quiet", "--no-deps", "--force-reinstall"])


def _pip_install(project: Project, python: Path, more: list[str]) -> None:
    # Python compiles what is imported, when it is: compiling all of torch takes longer.
    command = [str(python), "-m", "pip", "install", "--no-build-isolation", "--no-compile"]
    command += ["--editable", str(project.root), *more]
    environ = os.environ | {
        TARGET_VARIABLE: project.pin.target,
        VERSION_VARIABLE: project.pin.version,
    }
    status = subprocess.run(command, env=environ, check=False).returncode
    if status:
        raise BuildError(f"pip failed with exit status {status}; its messages are above")


def _index_options(python: Path, torch: str | None) -> list[str]:
    """Options that let pip find the CPU build of torch; usually none are needed."""
    if torch is None or not torch.endswith("+cpu"):
        return []
    say(f"looking for {torch}")
    command = [str(python), "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", torch]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:
        return []
    say(f"not on the configured indexes; adding {TORCH_CPU_INDEX}")
    return ["--extra-index-url", TORCH_CPU_INDEX]


def _requirement(path: Path, project: str) -> str | None:
    """The first unconditional or platform-bound requirement on a project, without its marker."""
    with open_wheel(path) as wheel:
        text = wheel.required("METADATA").decode("utf-8")
    found = re.search(rf"(?m)^Requires-Dist: ({re.escape(project)}(?![\w.-])[^;\n]*)", text)
    return found[1].strip() if found else None


def group(pyproject: Path, name: str) -> list[str]:
    """The requirements of a dependency group (PEP 735), which only newer pip can read."""
    groups = tomllib.loads(pyproject.read_text("utf-8")).get("dependency-groups", {})
    if name not in groups:
        raise BuildError(f"{pyproject}: there is no dependency group {name!r}")
    requirements: list[str] = []
    for entry in groups[name]:
        requirements += (
            group(pyproject, entry["include-group"]) if isinstance(entry, dict) else [entry]
        )
    return requirements
