# SPDX-License-Identifier: Apache-2.0
"""The patch series and new versions of vLLM: import, edit, export, rebase, check.

    python scripts/patches.py --help

Exit codes: 0 done, 1 a conflict to resolve or a problem found, 2 refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rebasing import burden, seams
from rebasing.pins import MACHINES, add_pin, download
from rebasing.workspace import ConflictError, RebaseError, Workspace, versions_of
from rich.console import Console
from rich.table import Table

from distribution import upstream as pins
from distribution.errors import BuildError
from distribution.fetch import cache_dir, sha256_of, upstream_wheel

REPOSITORY = Path(__file__).resolve().parents[1]
PATCHES = REPOSITORY / "patches"
PINS = REPOSITORY / "upstream.toml"
FOLDER = REPOSITORY / "build" / "patches"

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__.splitlines()[0])
console = Console(stderr=True)

Version = Annotated[str, typer.Argument(help="A version of vLLM, such as 0.33.0.")]
Wheel = Annotated[Path | None, typer.Option(help="A wheel of a version that is not pinned.")]


def workspace() -> Workspace:
    return Workspace(PATCHES, FOLDER)


def wheel_of(version: str, given: Path | None = None) -> Path:
    """The pinned wheel of a version, or the given one.

    Raises:
        RebaseError: neither.
    """
    if given is not None:
        if not given.is_file():
            raise RebaseError(f"--wheel {given}: there is no such file")
        return given
    distribution = pins.load(PINS)
    for pin in distribution.upstreams:
        if pin.version == version:
            return upstream_wheel(pin, os.environ, console.print)
    known = sorted({pin.version for pin in distribution.upstreams})
    raise RebaseError(
        f"vLLM {version} is not pinned in upstream.toml ({', '.join(known)} are): "
        "give --wheel, or run new-release"
    )


@app.command("list")
def list_() -> None:
    """Show the versions and their patches."""
    for version in versions_of(PATCHES):
        patches, total = burden.of_series(PATCHES / f"v{version}")
        print(f"{version}: {len(patches)} patches, {len(total.files)} files, "
              f"+{total.lines_added} -{total.lines_removed} lines")  # fmt: skip
        for name in patches:
            print(f"  {name}")


@app.command("import")
def import_(version: Version, wheel: Wheel = None) -> None:
    """Make a commit of the upstream wheel's Python files."""
    workspace().import_wheel(version, wheel_of(version, wheel))
    print(f"pristine/{version} in {shown(FOLDER)}")


@app.command()
def edit(version: Version) -> None:
    """Make a branch of the series, to be changed with git; then export."""
    place = workspace()
    place.import_wheel(version, wheel_of(version))
    place.apply_series(version)
    print(
        f"series/{version} is checked out in {shown(FOLDER)}: one commit for each patch.\n"
        "Change them there (git commit --fixup, git rebase -i --autosquash), then run\n"
        f"  python scripts/patches.py export {version}"
    )


@app.command()
def export(version: Version) -> None:
    """Write the branch back into patches/."""
    report_export(workspace(), version)


def report_export(place: Workspace, version: str) -> None:
    """Export, and say what has changed."""
    changed = place.export(version)
    print(f"patches/v{version}: {', '.join(changed) + ' changed' if changed else 'unchanged'}")


@app.command()
def rebase(old: Version, new: Version, wheel: Wheel = None) -> None:
    """Carry the series of one version over to another, and export it."""
    place = workspace()
    place.import_wheel(old, wheel_of(old))
    place.import_wheel(new, wheel_of(new, wheel))
    place.rebase(old, new)
    finish(place, new)


def finish(place: Workspace, version: str) -> None:
    """Export a rebased series, and exit with 1 if it does not fit although it applied."""
    report_export(place, version)
    found = misfits(place, version)
    for text in found:
        print(f"does not fit: {text}")
    if found:
        print(f"repair it on series/{version} in {shown(FOLDER)}, then export {version}")
        raise typer.Exit(1)


@app.command("continue")
def continue_() -> None:
    """Go on with a rebase whose conflict was resolved and added."""
    place = workspace()
    finish(place, place.resume())


@app.command()
def abort() -> None:
    """Give up a rebase."""
    workspace().abort()


@app.command()
def check(
    version: Annotated[str, typer.Argument(help="A version; without one, --all.")] = "",
    all_: Annotated[bool, typer.Option("--all", help="Every version with a series.")] = False,
) -> None:
    """Check that a series applies, exports identically, and fits the overlay."""
    known = versions_of(PATCHES)
    if version and version not in known:
        raise RebaseError(f"there is no series for {version}: there is one for {', '.join(known)}")
    if not version and not all_:
        raise RebaseError("name a version, or give --all")
    failed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "tests/patches/test_series.py"],
        cwd=REPOSITORY,
        check=False,
    ).returncode
    place = workspace()
    for each in known if all_ else [version]:
        found = problems_of(place, each)
        failed |= bool(found)
        print(f"{each}: {'; '.join(found) or 'reproduces exactly, and the overlay fits'}")
    raise typer.Exit(1 if failed else 0)


def problems_of(place: Workspace, version: str) -> list[str]:
    """What is wrong with a series, in the tree it is for."""
    place.import_wheel(version, wheel_of(version))
    place.apply_series(version)
    folder = PATCHES / f"v{version}"
    found = [
        f"{name} is exported differently: run export {version}"
        for name, text in place.exported(version).items()
        if not (folder / name).is_file() or (folder / name).read_text("utf-8") != text
    ]
    return found + misfits(place, version)


def misfits(place: Workspace, version: str) -> list[str]:
    """What overlay and patches want of a version and do not find."""
    found = seams.problems(place.tree(f"series/{version}"), REPOSITORY / "vllm")
    _, total = burden.of_series(PATCHES / f"v{version}")
    return found + seams.undefined_names(place.folder, total.files)


@app.command()
def stats(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count what the patches touch upstream."""
    series = {
        version: burden.of_series(PATCHES / f"v{version}") for version in versions_of(PATCHES)
    }
    if as_json:
        report = {
            version: {
                **total.report(),
                "patches": {name: each.report() for name, each in patches.items()},
            }
            for version, (patches, total) in series.items()
        }
        print(json.dumps(report, indent=1))
        return
    for version, (patches, total) in series.items():
        limits = f"at most {burden.FILES_MAX} files, {burden.ADDED_LINES_MAX} added lines"
        table = Table("patch", "files", "added", "removed", title=f"{version} ({limits})")
        for name, each in {**patches, "all": total}.items():
            table.add_row(name, *map(str, (len(each.files), each.lines_added, each.lines_removed)))
        Console().print(table)


@app.command("new-release")
def new_release(
    version: Version,
    conformance: Annotated[bool, typer.Option(help="Run upstream's own tests too.")] = True,
) -> None:
    """Do everything that a new version of vLLM asks for, and print what is left."""
    wheels = {machine: download(version, machine, cache_dir(os.environ)) for machine in MACHINES}
    known = {(pin.target, pin.version) for pin in pins.load(PINS).upstreams}
    if ("cuda", version) not in known:
        add_pin(PINS, version, {machine: sha256_of(wheel) for machine, wheel in wheels.items()})
        print(f"{shown(PINS)}: {version} is pinned, the default for CUDA from here on")
    place = workspace()
    newest = [each for each in versions_of(PATCHES) if each != version][-1]
    place.import_wheel(newest, wheel_of(newest))
    place.import_wheel(version, wheels[MACHINES[0]])
    place.rebase(newest, version)
    report_export(place, version)
    found = misfits(place, version)
    for text in found:
        print(f"does not fit: {text}")
    tests = [[sys.executable, "-m", "pytest", "-q", "tests/patches", "tests/overlay"]]
    if conformance:
        tests.append([sys.executable, "scripts/conformance.py"])
    failed = [
        command
        for command in tests
        if subprocess.run(command, cwd=REPOSITORY, check=False).returncode
    ]
    print("left to do:")
    print("  set the version in README.md, CHANGELOG.md and the Dockerfile; build its wheel")
    for command in failed:
        print(f"  repair: {' '.join(command[1:])}")
    raise typer.Exit(1 if failed or found else 0)


def shown(path: Path) -> str:
    """Relative to the checkout."""
    return path.relative_to(REPOSITORY).as_posix()


def main() -> int:
    """Run the command; what is expected to go wrong is told in words."""
    try:
        app(standalone_mode=True)
    except ConflictError as conflict:
        console.print(str(conflict), markup=False, highlight=False)
        console.print(
            f"Resolve it in {shown(FOLDER)}, git add the files, and run "
            "python scripts/patches.py continue (or abort)",
            markup=False,
        )
        return 1
    except (RebaseError, BuildError) as error:
        console.print(f"error: {error}", markup=False, highlight=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
