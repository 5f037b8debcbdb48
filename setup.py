# SPDX-License-Identifier: Apache-2.0
"""For tools that still call `python setup.py bdist_wheel`: pip and others use pyproject.toml.

What is built, and how, is in scripts/distribution; nothing is compiled.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

from distribution import backend  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="setup.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, description in (
        ("bdist_wheel", "build the wheel"),
        ("editable_wheel", "build the wheel of an editable installation"),
        ("sdist", "pack what is needed to build the wheel"),
    ):
        command = commands.add_parser(name, help=description)
        command.add_argument("-d", "--dist-dir", default="dist", help="where it goes")
    arguments = parser.parse_args()
    folder = Path(arguments.dist_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    build = {
        "bdist_wheel": backend.build_wheel,
        "editable_wheel": backend.build_editable,
        "sdist": backend.build_sdist,
    }[arguments.command]
    print(folder / build(str(folder)))


if __name__ == "__main__":
    main()
