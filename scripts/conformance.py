# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of KV offloading on patched and unpatched vLLM, compared test by test.

    python scripts/conformance.py                     everything, about half an hour on two cores
    python scripts/conformance.py --tier            vLLM's tests of its tiers, on this backend's
    python scripts/conformance.py --only PATH         a folder, file or test id; may be repeated
    python scripts/conformance.py --pristine FOLDER   a site folder that holds an unpatched vLLM
    python scripts/conformance.py --patched FOLDER    one that holds a patched vLLM

By default the patched vLLM is the one installed for the interpreter that runs this, and the
unpatched one is unpacked from the pinned upstream wheel and goes before it on the path. The tests
come from the pinned source distribution, of which only `tests/` is unpacked: run from beside its
`vllm/`, they would test that.

Exit status: 0 when every test has the same outcome in both, 1 when one differs after `--retries`
runs of the tests that differ (some of them race with a clock), 2 when no comparison was possible.
With `--tier` nothing is compared: 0 when every test passes. All results, test by test, are in
`build/conformance/`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "scripts"))

from distribution.errors import BuildError  # noqa: E402
from distribution.fetch import upstream_wheel  # noqa: E402
from distribution.upstream import load  # noqa: E402

WORK = REPOSITORY / "build" / "conformance"

VLLM_VERSION = "0.32.0"
"""The newest version that has a CPU build, so that the tests run without a GPU."""
SDIST_SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
SDIST_VARIABLE = "PYKVCACHE_VLLM_SDIST"
"""Environment variable naming vLLM's source distribution that is already on this machine."""

BUILD_TOOLS = (
    "setuptools>=77,<81",
    "setuptools-rust",
    "setuptools-scm",
    "jinja2",
    "wheel",
    "packaging",
)
"""What vLLM's setup.py imports when pip asks it for metadata, which pip does before it saves the
file. It runs without build isolation, as that would install a CUDA build of torch."""
TEST_TOOLS = {"tblib": "tblib"}
"""Module to project: what vLLM's conftest imports and its wheel doesn't require."""

SUITES = ("tests/v1/kv_offload", "tests/v1/kv_connector/unit/offloading_connector")

TIER_SUITES = (
    "tests/v1/kv_offload/tiering/test_fs_tier.py",
    "tests/v1/kv_offload/tiering/test_tiering_offloading.py::TestTieringOffloadingManager",
)
"""Those that make tiers and use them; `tests/conformance/tier_swap.py` says what is left out."""

OVERLAY = Path("vllm/v1/kv_offload/pykvcache")

MODEL_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}
"""Stands in for facebook/opt-125m, of which the tests read the configuration alone."""

PYTEST_INI = """\
[pytest]
asyncio_default_fixture_loop_scope = function
markers =
    slow_test
    skip_global_cleanup
    cpu_test
    cpu_model
    core_model
    hybrid_model
    distributed
    optional
    split
"""

console = Console(stderr=True)


class ConformanceError(RuntimeError):
    """No comparison is possible; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Tree:
    """A vLLM to test: the folders that go before everything else on Python's path."""

    name: str
    path: tuple[Path, ...]
    plugins: tuple[str, ...] = ("cpu_shim",)


Outcomes = Mapping[str, str]
"""Test id to passed, failed, error or skipped."""


def main(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Folder, file or test id to run, from tests/ on. Default: all."),
    ] = None,
    tier: Annotated[
        bool, typer.Option("--tier", help="Run the tests of vLLM's tiers on this backend's.")
    ] = False,
    pristine: Annotated[
        Path | None,
        typer.Option(help="Site folder with an unpatched vllm/. Default: made from the wheel."),
    ] = None,
    patched: Annotated[
        Path | None,
        typer.Option(help="Site folder with a patched vllm/. Default: the installed one."),
    ] = None,
    sdist: Annotated[
        Path | None,
        typer.Option(envvar=SDIST_VARIABLE, help="vLLM's source distribution, if it is here."),
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="Further runs of the tests whose outcomes differ.")
    ] = 2,
    work: Annotated[Path, typer.Option(help="Where everything is kept.")] = WORK,
) -> None:
    """Run vLLM's own tests on both trees and compare."""
    try:
        work = work.absolute()
        work.mkdir(parents=True, exist_ok=True)
        run_folder = ensure_tests(work, sdist)
        tools = ensure_test_tools(work)
        if tier:
            passed = check_own_tier(patched, tools, only or TIER_SUITES, run_folder, work)
            raise typer.Exit(0 if passed else 1)
        unpatched = Tree("unpatched", (pristine or ensure_pristine(work), tools))
        changed = Tree("patched", (patched, tools) if patched else (tools,))
        check_tree(unpatched, has_overlay=False)
        check_tree(changed, has_overlay=True)
        same = compare(unpatched, changed, only or SUITES, retries, run_folder, work)
    except (ConformanceError, BuildError) as error:
        console.print(f"[red]conformance:[/] {error}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if same else 1)


def check_own_tier(
    patched: Path | None, tools: Path, selection: Sequence[str], run_folder: Path, work: Path
) -> bool:
    """Whether this backend's tier passes vLLM's tests of its own.

    Raises:
        ConformanceError: a run broke off.
    """
    path = (patched, tools) if patched else (tools,)
    tree = Tree("tier", path, ("cpu_shim", "tier_swap"))
    check_tree(tree, has_overlay=True)
    outcomes = run_tests(tree, selection, run_folder, work)
    counts = Counter(outcomes.values())
    out = Console()
    for test, outcome in sorted(outcomes.items()):
        if outcome in ("failed", "error"):
            out.print(f"{outcome}: {test}", soft_wrap=True, markup=False)
    out.print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return not counts["failed"] and not counts["error"]


def compare(
    unpatched: Tree,
    patched: Tree,
    selection: Sequence[str],
    retries: int,
    run_folder: Path,
    work: Path,
) -> bool:
    """Whether every selected test has the same outcome on both trees.

    Raises:
        ConformanceError: a run broke off.
    """
    trees = (unpatched, patched)
    before, after = (run_tests(tree, selection, run_folder, work) for tree in trees)
    differing = differences(before, after)
    for attempt in range(1, retries + 1):
        if not differing:
            break
        console.print(f"{len(differing)} differ; run {attempt} of {retries} of these alone")
        label = f"-again{attempt}"
        again = [run_tests(tree, sorted(differing), run_folder, work, label) for tree in trees]
        before, after = {**before, **again[0]}, {**after, **again[1]}
        differing = differences(before, after)
    report(selection, before, after, differing, work)
    return not differing


# ------------------------------------------------------------------------------ what is needed


def ensure_tests(work: Path, sdist: Path | None) -> Path:
    """The folder in which the tests run: `tests/`, a stand-in for the model, a pytest.ini."""
    folder = work / f"run-{VLLM_VERSION}-{SDIST_SHA256[:12]}"
    if folder.is_dir():
        return folder
    archive = sdist or work / f"vllm-{VLLM_VERSION}.tar.gz"
    if not archive.is_file():
        if sdist is not None:
            raise ConformanceError(f"{sdist} is not a file; give vllm-{VLLM_VERSION}.tar.gz")
        download_sdist(work, archive)
    check_sha256(archive)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=work) as name:
        made = Path(name) / "run"
        extract_tests(archive, made)
        model = made / "facebook" / "opt-125m"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
        (made / "pytest.ini").write_text(PYTEST_INI)
        made.rename(folder)
    return folder


def extract_tests(archive: Path, target: Path) -> None:
    """Unpack `tests/` of a source distribution, without the folder that it is packed in."""
    prefix = f"vllm-{VLLM_VERSION}/"
    with console.status("unpacking vLLM's tests"), tarfile.open(archive) as tar:
        members = []
        for member in tar:
            if member.name.startswith(f"{prefix}tests/") and (member.isfile() or member.isdir()):
                member.name = member.name.removeprefix(prefix)
                members.append(member)
        if not members:
            raise ConformanceError(f"{archive} has no {prefix}tests/")
        tar.extractall(target, members, filter="data")


def check_sha256(archive: Path) -> None:
    with archive.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != SDIST_SHA256:
        raise ConformanceError(
            f"{archive} has sha256 {actual}, expected {SDIST_SHA256}: not the pinned source "
            f"distribution of vLLM {VLLM_VERSION}; remove it"
        )


def download_sdist(work: Path, archive: Path) -> None:
    """Fetch the source distribution with pip; nothing is compiled."""
    tools = pip_target(work / "build-tools", BUILD_TOOLS)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tools),
        "VLLM_VERSION_OVERRIDE": VLLM_VERSION,
        "VLLM_TARGET_DEVICE": "empty",
    }
    with tempfile.TemporaryDirectory(prefix=".downloading-", dir=work) as name:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
        command += ["--no-binary", "vllm", "--disable-pip-version-check", "--dest", name]
        command.append(f"vllm=={VLLM_VERSION}")
        with console.status(f"downloading the source distribution of vLLM {VLLM_VERSION}"):
            finish(
                command, environment, work / "download.log", f"pip could not download {command[-1]}"
            )
        (found,) = Path(name).glob("*.tar.gz")
        check_sha256(found)
        found.rename(archive)


def ensure_test_tools(work: Path) -> Path:
    """A folder with what the tests import and the environment lacks; empty if it lacks nothing."""
    missing = [
        project
        for module, project in TEST_TOOLS.items()
        if importlib.util.find_spec(module) is None
    ]
    return pip_target(work / "test-tools", missing)


def pip_target(folder: Path, projects: Sequence[str]) -> Path:
    """Install some projects in a folder of their own, so that the environment stays as it is."""
    marker = folder / "installed.txt"
    wanted = "\n".join(projects)
    if marker.is_file() and marker.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if projects:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        command += ["--disable-pip-version-check", *projects]
        with console.status(f"installing {', '.join(projects)}"):
            finish(
                command,
                os.environ,
                folder / "pip.log",
                f"pip could not install {', '.join(projects)}",
            )
    marker.write_text(wanted)
    return folder


def finish(command: Sequence[str], environment: Mapping[str, str], log: Path, problem: str) -> None:
    """Run a command to its end.

    Raises:
        ConformanceError: it failed; the message ends with the last line that it wrote.
    """
    with log.open("w") as file:
        status = subprocess.run(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if status:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        raise ConformanceError(f"{problem} (log: {log}): {lines[-1] if lines else 'no output'}")


def ensure_pristine(work: Path) -> Path:
    """A site folder that holds the unpatched vLLM of the pinned CPU wheel, and nothing else."""
    pins = load(REPOSITORY / "upstream.toml").upstreams
    pin = next(
        (each for each in pins if each.target == "cpu" and each.version == VLLM_VERSION), None
    )
    if pin is None:
        raise ConformanceError(f"upstream.toml pins no CPU wheel of vLLM {VLLM_VERSION}")
    site = work / f"pristine-{VLLM_VERSION}"
    if site.is_dir():
        return site
    wheel = upstream_wheel(pin, os.environ, console.print)
    with (
        tempfile.TemporaryDirectory(prefix=".unpacking-", dir=work) as name,
        console.status(f"unpacking {wheel.name}"),
        zipfile.ZipFile(wheel) as archive,
    ):
        made = Path(name) / "site"
        members = [member for member in archive.namelist() if member.startswith("vllm/")]
        archive.extractall(made, members)
        made.rename(site)
    return site


def check_tree(tree: Tree, *, has_overlay: bool) -> None:
    """See to it that the interpreter finds the vLLM that is meant.

    Raises:
        ConformanceError: it finds none, another version, or the wrong one of the two.
    """
    probe = (
        "import importlib.metadata as m, importlib.util as u, json;"
        "spec = u.find_spec('vllm');"
        "print(json.dumps([m.version('vllm'), list(spec.submodule_search_locations)]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", probe],
        env=environment_of(tree),
        cwd=REPOSITORY / "tests",
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise ConformanceError(f"{sys.executable} has no vllm installed; run `make env`")
    version, locations = json.loads(result.stdout)
    if version.partition("+")[0] != VLLM_VERSION or "cpu" not in version:
        raise ConformanceError(
            f"the installed vllm is {version}; the tests are those of {VLLM_VERSION}, and run on "
            "its CPU build: make the environment with VLLM_TARGET_DEVICE=cpu"
        )
    found = any((Path(location).parent / OVERLAY).is_dir() for location in locations)
    if found is not has_overlay:
        kind = (
            "no overlay, so it is not patched" if has_overlay else "the overlay, so it is patched"
        )
        raise ConformanceError(f"the {tree.name} vllm in {', '.join(locations)} has {kind}")


# ------------------------------------------------------------------------------------ the runs


def environment_of(tree: Tree) -> dict[str, str]:
    path = [*map(str, tree.path), str(REPOSITORY / "tests" / "conformance")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def run_tests(
    tree: Tree, selection: Sequence[str], folder: Path, work: Path, label: str = ""
) -> Outcomes:
    """Run tests on one tree.

    Raises:
        ConformanceError: pytest broke off, or ran nothing.
    """
    results = work / f"{tree.name}{label}.xml"
    log = work / f"{tree.name}{label}.log"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    command += [argument for plugin in tree.plugins for argument in ("-p", plugin)]
    command += ["-c", "pytest.ini", "--rootdir", ".", "-o", "junit_family=xunit1"]
    command += [f"--junitxml={results}", *selection]
    status = follow(command, environment_of(tree), folder, log, f"{tree.name}{label}")
    # 0: all passed, 1: some failed. All else means that not every test has run.
    if status not in (0, 1) or not results.is_file():
        raise ConformanceError(f"pytest broke off with status {status}; its output is in {log}")
    outcomes = read_outcomes(results)
    if not outcomes:
        raise ConformanceError(f"no test has run; the output of pytest is in {log}")
    return outcomes


def follow(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path, name: str
) -> int:
    """Run pytest and show how far it is; return its exit status."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    failed = 0
    with (
        log.open("w") as file,
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
        subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        task = progress.add_task(f"{name}: collecting", total=None)
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if collected := re.search(r"\bcollected (\d+) items?", line):
                progress.update(task, total=int(collected[1]), description=name)
            elif outcome := re.search(
                r"(PASSED|FAILED|SKIPPED|ERROR)\b.*\[ *\d+%\]$", line.rstrip()
            ):
                failed += outcome[1] in ("FAILED", "ERROR")
                progress.update(
                    task, advance=1, description=f"{name}, {failed} failed" if failed else name
                )
    return process.returncode


def read_outcomes(results: Path) -> dict[str, str]:
    """The outcome of every test in a JUnit file, by the id that pytest takes as an argument."""
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        outcomes[test_id(case.attrib)] = outcome_of(case)
    return outcomes


def test_id(case: Mapping[str, str]) -> str:
    """`classname` is the module with dots, then the classes."""
    name = case["name"]
    file = case.get("file")
    if file is None:
        return f"{case.get('classname', '')}::{name}"
    module = file.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).strip(".")
    return "::".join([file, *filter(None, classes.split(".")), name])


def outcome_of(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    for tag, outcome in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
        if tag in kinds:
            return outcome
    return "passed"


# ---------------------------------------------------------------------------------- the result


def differences(unpatched: Outcomes, patched: Outcomes) -> set[str]:
    """Tests that end differently, or exist on one side only."""
    return {
        test
        for test in unpatched.keys() | patched.keys()
        if unpatched.get(test) != patched.get(test)
    }


def report(
    selection: Sequence[str],
    unpatched: Outcomes,
    patched: Outcomes,
    differing: Collection[str],
    work: Path,
) -> None:
    """Print the counts and what differs; write everything to `conformance.json`."""
    kinds = ("passed", "failed", "error", "skipped")
    counts = {"unpatched": Counter(unpatched.values()), "patched": Counter(patched.values())}
    table = Table(title=f"vLLM {VLLM_VERSION}, its own tests")
    for heading in ("", *kinds):
        table.add_column(heading, justify="right" if heading else "left")
    for name, counter in counts.items():
        table.add_row(name, *(str(counter[kind]) for kind in kinds))
    out = Console()
    out.print(table)
    failing = sorted(test for test, outcome in patched.items() if outcome in ("failed", "error"))
    for test in sorted(differing):
        out.print(
            f"differs: {test}: {unpatched.get(test, 'absent')} unpatched, "
            f"{patched.get(test, 'absent')} patched",
            soft_wrap=True,
            markup=False,
        )
    for test in failing:
        if test not in differing:
            out.print(f"fails in both: {test}", soft_wrap=True, markup=False)
    out.print(f"tests that differ: {len(differing)}")
    record = {
        "vllm": VLLM_VERSION,
        "sdist_sha256": SDIST_SHA256,
        "selection": list(selection),
        "counts": {
            name: {kind: counter[kind] for kind in kinds} for name, counter in counts.items()
        },
        "differing": sorted(differing),
        "failing": failing,
        "tests": {"unpatched": dict(unpatched), "patched": dict(patched)},
    }
    target = work / "conformance.json"
    target.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    out.print(f"all outcomes: {target}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
