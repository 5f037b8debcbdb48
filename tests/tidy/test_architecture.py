# SPDX-License-Identifier: Apache-2.0
"""The rules of docs/architecture.md and CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "pykvcache"
OVERLAY = REPOSITORY / "vllm"
NEW_IN_OVERLAY = ("v1/kv_offload/pykvcache",)
"""Folders that upstream does not have, so that they are packages of ours."""

FOLDERS = ("pykvcache", "vllm", "scripts", "benchmarks", "docker", "tests", "docs", ".ci")
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Dockerfile", "Makefile", "pyproject.toml")

LINES_MAX = 450


def python_files(*folders: Path) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in folder.rglob("*.py")
        if "__pycache__" not in path.parts
    )


def is_source(path: Path) -> bool:
    """Whether it is a file that people write, not some tool's cache."""
    inside = path.relative_to(REPOSITORY).parts[1:]
    made = any(part.startswith(".") or part == "__pycache__" for part in inside)
    return path.is_file() and not made


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Full names of all modules imported, at the top, inside functions, or for types."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def importers(package: str, *folders: Path) -> set[str]:
    """Files that import the package or something in it."""
    return {
        name_of(path)
        for path in python_files(*folders)
        if any(name.split(".")[0] == package for name in imports_of(path))
    }


PACKAGE_FILES = python_files(PACKAGE)
OUR_FILES = [*PACKAGE_FILES, *python_files(OVERLAY)]


def is_text(path: Path) -> bool:
    return is_source(path) and path.suffix != ".png"


TEXTS = [
    *(path for name in FOLDERS for path in (REPOSITORY / name).rglob("*") if is_text(path)),
    *(REPOSITORY / name for name in FILES),
]


def test_there_is_something_to_check() -> None:
    assert len(PACKAGE_FILES) > 20
    assert len(python_files(OVERLAY)) > 5
    assert all(path.is_file() for path in TEXTS)


# --- who imports whom


def test_only_the_overlay_knows_vllm() -> None:
    assert importers("vllm", PACKAGE) == set()
    assert importers("vllm", REPOSITORY / "scripts" / "distribution") == set()


def test_only_the_device_side_knows_torch() -> None:
    assert importers("torch", PACKAGE) == {"pykvcache/reactor/device.py"}
    assert importers("numpy", PACKAGE) <= {"pykvcache/reactor/device.py", "pykvcache/gate/fit.py"}


def test_only_the_ring_may_know_a_binding_of_io_uring() -> None:
    allowed = {"pykvcache/reactor/uring.py", "pykvcache/reactor/ring.py"}
    assert importers("liburing", PACKAGE, OVERLAY) <= allowed


PURE = {
    "abc",
    "__future__",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "errno",
    "functools",
    "itertools",
    "math",
    "types",
    "typing",
    "pykvcache.errors",
    "pykvcache.layout",
    "pykvcache.pool",
}
"""Modules without a clock, thread, file or random number; of `pool` only the ledger."""


@pytest.mark.parametrize("path", python_files(PACKAGE / "transfer"), ids=name_of)
def test_the_transfer_core_is_pure(path: Path) -> None:
    impure = {
        name
        for name in imports_of(path)
        if name not in PURE and not name.startswith("pykvcache.transfer.")
    }
    assert not impure
    from_pool = {
        alias.name
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module == "pykvcache.pool"
        for alias in node.names
    }
    assert from_pool <= {"SlotLedger"}


@pytest.mark.parametrize("name", ["terms", "gate", "fit", "estimate"])
def test_the_gate_is_pure(name: str) -> None:
    allowed = PURE | {"statistics", "numpy", "scipy.optimize"}
    impure = {
        module
        for module in imports_of(PACKAGE / "gate" / f"{name}.py")
        if module not in allowed and not module.startswith("pykvcache.gate.")
    }
    assert not impure


@pytest.mark.parametrize(
    ("folder", "foreign"),
    [
        ("transfer", ("reactor", "scheduler", "capacity", "config", "identity")),
        ("reactor", ("scheduler", "capacity")),
        ("scheduler", ("reactor", "transfer", "capacity")),
        ("capacity", ("reactor", "transfer", "scheduler")),
    ],
)
def test_layers_look_down_only(folder: str, foreign: tuple[str, ...]) -> None:
    wrong = {
        (name_of(path), name)
        for path in python_files(PACKAGE / folder)
        for name in imports_of(path)
        if name.startswith(tuple(f"pykvcache.{other}" for other in foreign))
    }
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {module_of(path): set(imports_of(path)) for path in PACKAGE_FILES}
    graph = {name: imported & modules.keys() for name, imported in modules.items()}
    while leaves := {name for name, imported in graph.items() if not imported}:
        graph = {name: imported - leaves for name, imported in graph.items() if name not in leaves}
    assert not graph, "these import each other"


def test_only_the_configuration_reads_the_environment() -> None:
    readers = {
        name_of(path)
        for path in PACKAGE_FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    }
    assert readers <= {"pykvcache/config.py"}


# --- the overlay


def test_the_overlay_hides_nothing_of_upstream() -> None:
    packages = {
        path.parent.relative_to(OVERLAY).as_posix() for path in OVERLAY.rglob("__init__.py")
    }
    ours = {
        name
        for name in packages
        if any(name == new or name.startswith(f"{new}/") for new in NEW_IN_OVERLAY)
    }
    assert packages == ours, "an __init__.py would hide the installed vLLM from the repository root"
    assert set(NEW_IN_OVERLAY) <= packages
    outside = [
        name_of(path)
        for path in python_files(OVERLAY)
        if not path.relative_to(OVERLAY).as_posix().startswith(NEW_IN_OVERLAY)
    ]
    assert not outside, "files go into a folder of ours"


# --- how files look


@pytest.mark.parametrize("path", OUR_FILES, ids=name_of)
def test_a_module_is_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines < LINES_MAX


def test_every_python_file_says_its_licence() -> None:
    unlicensed = []
    for path in TEXTS:
        if path.suffix == ".py":
            first, *rest = path.read_text().splitlines()
            line = rest[0] if first.startswith("#!") else first
            if line != "# SPDX-License-Identifier: Apache-2.0":
                unlicensed.append(name_of(path))
    assert not unlicensed


def test_every_module_of_ours_has_a_docstring() -> None:
    bare = [name_of(path) for path in OUR_FILES if not ast.get_docstring(tree_of(path))]
    assert not bare


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=name_of)
def test_what_is_public_is_documented(path: Path) -> None:
    def undocumented(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                bases = node.bases if isinstance(node, ast.ClassDef) else []
                if not ast.get_docstring(node):
                    yield f"{prefix}{node.name}"
                if isinstance(node, ast.ClassDef) and not bases:
                    yield from undocumented(node.body, f"{node.name}.")

    assert not list(undocumented(tree_of(path).body, ""))


def test_names_say_more_than_that_something_helps() -> None:
    vague = re.compile(
        r"(?i)(?:^|_)(?:" + "|".join(("help" + "er", "handl" + "er", "util")) + r")s?(?:_|$)"
    )
    names = {
        (name_of(path), name)
        for path in OUR_FILES
        for node in ast.walk(tree_of(path))
        for name in [path.stem, getattr(node, "name", None) or ""]
        if vague.search(name)
    }
    assert not names


FORBIDDEN = [
    *(f"/{folder}/" for folder in ("work", "root", "tmp")),
    *(
        ".".join(host)
        for host in (("pypi", "org"), ("python" + "hosted", "org"), ("debian", "org"))
    ),
]
"""Paths of one machine, and registries that a user may have replaced by a mirror."""


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = [
        (name_of(path), text) for path in TEXTS for text in FORBIDDEN if text in path.read_text()
    ]
    assert not found


def test_tests_do_not_sleep() -> None:
    pauses = ("sleep",)
    sleeping = [
        f"{name_of(path)}:{node.lineno}"
        for path in python_files(REPOSITORY / "tests")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in pauses
    ]
    assert not sleeping
