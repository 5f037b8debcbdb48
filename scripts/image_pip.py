# SPDX-License-Identifier: Apache-2.0
"""pip's configuration on this machine, as mounts for an image's build; nothing stays in the image.

    python scripts/image_pip.py DIRECTORY

writes `pip.conf`, and a copy of the files that it names, to the directory and prints the
`--volume` options for `buildah build`, one a line. Local indexes are mounted under their own
paths.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

INSIDE = "/etc/pip-of-host"
SOURCES = ("find-links", "index-url", "extra-index-url")


def settings() -> dict[str, str]:
    """What pip is configured with, from its files and the environment; the latter wins."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return found


def main(directory: Path) -> None:
    """Write the configuration and print the mounts."""
    directory.mkdir(parents=True, exist_ok=True)
    found = settings()
    for name in {"cert", "constraint"} & found.keys():
        file = Path(found[name])
        shutil.copyfile(file, directory / file.name)
        found[name] = f"{INSIDE}/{file.name}"
    lines = [f"{name} = {' '.join(value.split())}" for name, value in found.items()]
    (directory / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    mounts = {f"{directory.absolute()}:{INSIDE}", f"{directory.absolute()}/pip.conf:/etc/pip.conf"}
    sources = " ".join(found.get(name, "") for name in SOURCES)
    for path in map(Path, re.findall(r"(?:^|\s|file://)(/\S+)", sources)):
        # The pages of an index link to files beside it.
        local = path.parent if path.name == "simple" else path
        if local.is_dir():
            mounts.add(f"{local}:{local}")
    for mount in sorted(mounts):
        print(f"--volume={mount}:ro")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
